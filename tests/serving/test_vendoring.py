"""The files of ours that a published model carries."""

from __future__ import annotations

from pathlib import Path

import compile_stage
from compile_stage.serving import vendoring

PACKAGE = Path(compile_stage.__file__).parent


def test_what_our_files_import_is_read_as_python_reads_it() -> None:
    """Broken: an import in a form that is not looked for is missing in what is published, which then loads only where
    compile-stage is installed."""

    def files(modules: set[str] | frozenset[str]) -> set[str]:
        return {name for name in modules - {"compile_stage"} if vendoring._source_file(name.split(".")[1:])}

    for file in sorted(PACKAGE.rglob("*.py")):
        # A docstring may import the module that it is of.
        own = ".".join(("compile_stage", *file.relative_to(PACKAGE).with_suffix("").parts))
        parsed = files(vendoring._imports_of(file.read_bytes()))
        assert files(vendoring.our_imports(file)) - {own} == parsed - {own}, own


def test_a_third_partys_file_is_parsed(tmp_path: Path) -> None:
    """Broken: a plug-in that is written in another style is published without what it imports of ours."""
    file = tmp_path / "plugin.py"
    file.write_text("if True: from compile_stage.core import plugins\nimport os, compile_stage.core.errors\n")
    assert vendoring.our_imports(file) == {"compile_stage.core.plugins", "compile_stage.core.errors"}
    file.write_text("{% template %}")
    assert vendoring.our_imports(file) == set()
