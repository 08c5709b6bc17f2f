"""The report's templates as compiled by Jinja, kept beside them as Python keeps its modules: compiling them takes a
fifth of a second, which is most of what a run whose steps are all cached takes to write its report."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.resources.abc import Traversable
from importlib.util import cache_from_source
from pathlib import Path
from pickle import UnpicklingError

from jinja2 import FileSystemBytecodeCache
from jinja2.bccache import Bucket


class CompiledTemplates(FileSystemBytecodeCache):
    """Reads and writes `__pycache__` of a folder of templates. It holds code, so it lies where the package's own code
    does, and never in the stage's cache, which machines may share.

    Jinja compares the digest of a template's source, its own version and Python's. Where the folder can't be read or
    written, or `PYTHONDONTWRITEBYTECODE` is set, the templates are compiled anew.
    """

    def __init__(self, templates: Traversable) -> None:
        super().__init__(str(Path(cache_from_source(f"{templates}/any.html")).parent), "%s.pyc")

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, EOFError, UnpicklingError):  # the latter two: the file is torn
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        with suppress(OSError):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)
