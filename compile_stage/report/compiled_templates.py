"""Compiled templates, kept between processes as Python keeps its own bytecode: to compile the page's takes 0.1 s, as
long as to fill them.

They lie in the templates' `__pycache__`, or where `PYTHONPYCACHEPREFIX` says, so whoever can write there can change our
modules too. Each is of one text, one Python and one Jinja.
"""

from __future__ import annotations

import contextlib
import os
import pickle  # Jinja's own header holds one
import sys
import tempfile
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path

from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

_TEMPLATES = Path(__file__).parent / "templates"


class CompiledTemplates(BytecodeCache):
    """One file for each template. Where none can be written, templates are compiled each time."""

    def load_bytecode(self, bucket: Bucket) -> None:
        damaged = EOFError, ValueError, pickle.UnpicklingError
        with contextlib.suppress(OSError, *damaged), _file(bucket).open("rb") as file:
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError):
            file = _file(bucket)
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            try:
                with os.fdopen(handle, "wb") as new:
                    bucket.write_bytecode(new)
                Path(name).chmod(0o644)  # as other bytecode: whoever may read the templates may read it
                Path(name).replace(file)
            except OSError:
                Path(name).unlink()


def _file(bucket: Bucket) -> Path:
    """Of a template. Jinja writes its text's digest into the file, and the version of Python, and not its own."""
    compiled = Path(cache_from_source(str(_TEMPLATES / f"{bucket.key}-{version('jinja2')}.py")))
    return compiled.with_suffix(".jinja")
