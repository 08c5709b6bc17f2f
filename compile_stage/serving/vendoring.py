"""The files of ours that a published model carries, so that it loads where compile-stage is not installed."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

_OUR_IMPORT = re.compile(
    r"^[ \t]*(?:import (compile_stage[\w.]*)|from (compile_stage[\w.]*) import (\([^)]*\)|[^\n#]*))", re.MULTILINE
)


def copy_modules(modules: Iterable[str], into: Path) -> None:
    """Copy modules of ours, and what of ours they import, however indirectly, into the folder `into`."""
    waiting = list(modules)
    done: set[Path] = set()
    while waiting:
        parts = tuple(waiting.pop().split(".")[1:])
        for depth in range(len(parts) + 1):
            file = _source_file(parts[:depth])
            if file is None or file in done:
                continue
            done.add(file)
            copy = into / file.relative_to(_PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            waiting.extend(our_imports(file))


def our_imports(file: Path) -> set[str]:
    """The modules of ours that a Python file imports, anywhere in it; none where it is no Python, as a template that
    somebody packaged."""
    if file.is_relative_to(_PACKAGE):
        return set(_read_imports(file.read_text(encoding="utf-8")))
    try:
        return set(_imports_of(file.read_bytes()))
    except (SyntaxError, ValueError):
        return set()


def _read_imports(source: str) -> Iterator[str]:
    """Of a file of ours: by the form in which our imports are written, since to parse 70 files takes 0.1 s."""
    for whole, package, names in _OUR_IMPORT.findall(source):
        if whole:
            yield whole
        else:
            yield from (f"{package}.{name}" for name in re.findall(r"\w+", names))


@cache
def _imports_of(source: bytes) -> frozenset[str]:
    modules: set[str] = set()
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "compile_stage":
            modules |= {f"{node.module}.{name.name}" for name in node.names}  # a name may be a module of a package
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names if name.name.partition(".")[0] == "compile_stage"}
    return frozenset(modules)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, without the expressions in them: these import nothing, and are nine tenths of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, ())  # a lambda's body is an expression
            waiting.extend(inner if isinstance(inner, list) else ())


@cache  # asked for thousands of times, of a hundred modules
def _source_file(parts: tuple[str, ...]) -> Path | None:
    base = _PACKAGE.joinpath(*parts)
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)
