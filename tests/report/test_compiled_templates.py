import sys
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from compile_stage.report.compiled_templates import CompiledTemplates


def of(folder: Path, templates: Path) -> Environment:
    return Environment(loader=FileSystemLoader(templates), bytecode_cache=CompiledTemplates(folder), autoescape=True)


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "page.html").write_text("<p>{{ word }}</p>", encoding="utf-8")
    return tmp_path


def test_a_template_is_compiled_once(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each run compiles 25 templates anew, a fifth of a second at its end."""
    assert of(templates, templates).get_template("page.html").render(word="<b>") == "<p>&lt;b&gt;</p>"
    assert [path.suffix for path in (templates / "__pycache__").iterdir()] == [".pyc"]
    later = of(templates, templates)
    monkeypatch.setattr(Environment, "compile", lambda *_, **__: pytest.fail("compiled again"))
    assert later.get_template("page.html").render(word="two") == "<p>two</p>"


def test_a_changed_template_is_compiled_anew(templates: Path) -> None:
    """Broken: after an upgrade the report's page is that of the version before."""
    of(templates, templates).get_template("page.html")
    (templates / "page.html").write_text("<i>{{ word }}</i>", encoding="utf-8")
    assert of(templates, templates).get_template("page.html").render(word="two") == "<i>two</i>"


@pytest.mark.parametrize("end", [0, 2, 30, 60, -40])
def test_a_torn_file_is_compiled_anew(templates: Path, end: int) -> None:
    """Broken: a full disk once, and no report is written any more."""
    of(templates, templates).get_template("page.html")
    (kept,) = (templates / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:end])
    assert of(templates, templates).get_template("page.html").render(word="two") == "<p>two</p>"


def test_without_a_place_to_write_the_page_is_made_all_the_same(templates: Path) -> None:
    """Broken: no report from a package in a folder that is read-only, or in a zip file."""
    (templates / "__pycache__").write_text("a file, so nothing can be written below it", encoding="utf-8")
    assert of(templates, templates).get_template("page.html").render(word="two") == "<p>two</p>"


def test_python_told_to_write_no_bytecode_is_heeded(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: PYTHONDONTWRITEBYTECODE=1, and files appear in the package's folder."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    of(templates, templates).get_template("page.html")
    assert not (templates / "__pycache__").exists()
