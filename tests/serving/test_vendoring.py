"""The files of ours that a published model carries."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import compile_stage
from compile_stage.serving import vendoring

PACKAGE = Path(compile_stage.__file__).parent


def test_what_our_files_import_is_read_as_python_reads_it() -> None:
    """Broken: an import in a form that is not looked for is missing in what is published, which then loads only where
    compile-stage is installed."""
    for file in sorted(PACKAGE.rglob("*.py")):
        # What a docstring or a program in a string imports is read too: a file more, that nobody needs.
        assert files(vendoring._imports_of(file.read_bytes())) <= files(vendoring.our_imports(file)), file


def files(modules: Iterable[str]) -> set[Path]:
    """That are copied for these: of each module, and of the packages that it lies in."""
    parts = [tuple(module.split(".")[1:]) for module in modules]
    found = (vendoring._source_file(own[:depth]) for own in parts for depth in range(len(own) + 1))
    return {file for file in found if file}


def test_a_third_partys_file_is_parsed(tmp_path: Path) -> None:
    """Broken: a plug-in that is written in another style is published without what it imports of ours."""
    file = tmp_path / "plugin.py"
    file.write_text("if True: from compile_stage.core import plugins\nimport os, compile_stage.core.errors\n")
    assert vendoring.our_imports(file) == {"compile_stage.core.plugins", "compile_stage.core.errors"}
    file.write_text("{% template %}")
    assert vendoring.our_imports(file) == set()
