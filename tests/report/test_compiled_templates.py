"""Compiled templates between processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment

from compile_stage.report.compiled_templates import CompiledTemplates


@pytest.fixture(autouse=True)
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path


def rendered(text: str) -> tuple[str, bool]:
    """What a new process makes of a template, and whether it had to compile it."""
    environment = Environment(loader=DictLoader({"page": text}), bytecode_cache=CompiledTemplates(), autoescape=True)
    compiled: list[str] = []
    plain = environment.compile
    environment.compile = lambda source, *names: compiled.append(source) or plain(source, *names)
    return environment.get_template("page").render(), bool(compiled)


def test_a_template_is_compiled_once() -> None:
    """Broken: each run compiles the report's templates, for a tenth of a second."""
    assert rendered("{{ 1 + 1 }}") == ("2", True)
    assert rendered("{{ 1 + 1 }}") == ("2", False)
    assert rendered("{{ 1 + 2 }}") == ("3", True)  # after an update


def test_a_damaged_file_is_no_template(prefix: Path) -> None:
    """Broken: a disk that was full once breaks each report after it."""
    rendered("{{ 1 + 1 }}")
    [file] = prefix.rglob("*.jinja")
    for size in (0, 3, 20, file.stat().st_size - 5):
        file.write_bytes(file.read_bytes()[:size])
        assert rendered("{{ 1 + 1 }}") == ("2", True)


def test_nothing_is_written_where_python_writes_no_bytecode(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: PYTHONDONTWRITEBYTECODE is set for a read-only or a counted folder, and files appear in it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered("{{ 1 + 1 }}") == ("2", True)
    assert not list(prefix.rglob("*"))


def test_where_nothing_can_be_written_templates_are_compiled(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: no report in an installation that belongs to another user."""
    (prefix / "file").touch()
    monkeypatch.setattr(sys, "pycache_prefix", str(prefix / "file"))
    assert rendered("{{ 1 + 1 }}") == ("2", True)
