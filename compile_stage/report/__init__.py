"""The same records as JSON, HTML, Markdown and JUnit."""

from compile_stage.report.files import write

__all__ = ["write"]
