"""Compiled Python beside a published model's code.

Python runs `__pycache__/flavor.cpython-311.pyc` in place of `flavor.py` wherever its header fits, so such a file
decides what is served as much as the source does. None is published. Loading a model by MLflow from a folder that can
be written leaves some, and these are what their source compiles to.
"""

from __future__ import annotations

import importlib.util
import marshal
import re
import sys
from pathlib import Path

_HEADER_BYTES = 16
_NAME = re.compile(r"(?P<module>[^.]+)\.(?P<tag>[^.]+)(\.opt-(?P<level>[12]))?\.pyc")


def refuse_bytecode(code: Path, *, other_pythons: bool) -> str | None:
    """None when all that lies in `__pycache__` folders below `code` is what the source beside it compiles to, or what
    is wrong.

    Args:
        other_pythons: Refuse also what another version of Python would run: it can't be compared here. Else it is
            passed over, since this process does not run it.
    """
    for file in sorted(code.rglob("__pycache__/**/*")):
        if file.is_file() and (reason := _refuse(file, other_pythons=other_pythons)) is not None:
            return f"{file.relative_to(code.parent).as_posix()} {reason}"
    return None


def _refuse(file: Path, *, other_pythons: bool) -> str | None:
    named = _NAME.fullmatch(file.name)
    source = file.parent.parent / f"{named['module']}.py" if named else None
    if named is None or source is None or file.parent.name != "__pycache__" or not source.is_file():
        return "is no compiled form of a published file"
    content = file.read_bytes()
    if named["tag"] != sys.implementation.cache_tag or content[:4] != importlib.util.MAGIC_NUMBER:
        return "is compiled for another Python, which can't be compared here" if other_pythons else None
    try:
        held = marshal.loads(content[_HEADER_BYTES:])  # noqa: S302 - not run, and what would run it reads it so
        level = int(named["level"] or 0)
        fresh = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=level)
    except (EOFError, ValueError, TypeError, SyntaxError):
        return "can't be read"
    return None if held == fresh else "is not what its source compiles to"
