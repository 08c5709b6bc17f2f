"""The same records as JSON, HTML, Markdown and JUnit."""

from compile_stage.report.files import remove, write

__all__ = ["remove", "write"]
