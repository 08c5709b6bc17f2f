"""Models that are not published yet, laid out as they would be: the artifact, and the loader that a published model
carries. So what is measured is opened by the code that serves it (`engine.served`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import compile_stage
from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import list_tree
from compile_stage.core.leftovers import part_folder, remove_leftovers, temporary_folder
from compile_stage.core.records import Artifact, Target
from compile_stage.core.storage import demand_present
from compile_stage.serving.batches import proven_batches
from compile_stage.serving.saving import copy_loader, save_draft

_INSTALLED = Path(compile_stage.__file__).parent


class Drafts:
    """The drafts of one measurement, each laid out once."""

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        """Args:
        scratch: A folder of the run; loaders stay there, since several measurements need them.
        stack: Removes the drafts when it ends.
        """
        self._scratch, self._stack = scratch, stack
        self._found: dict[tuple[str, str], Path] = {}

    def of(self, artifact: Artifact, target: Target) -> dict[str, str]:
        """`{"path": ...}`, the model directory of an artifact, as a worker's call takes it."""
        known = artifact.job_id, artifact.path
        if known not in self._found:
            demand_present(artifact.path)
            home = self._stack.enter_context(temporary_folder("draft", self._place(Path(artifact.path))))
            save_draft(
                loader_code(artifact.backend, self._scratch / "loaders"),
                home / "model",
                {
                    "artifact": artifact,
                    "threads": target.threads,
                    "batches": proven_batches(None, target),
                    "runtime": plugins.package_versions(
                        *plugins.load("backends", artifact.backend).capabilities.runtime
                    ),
                },
            )
            self._found[known] = home / "model"
        return {"path": str(self._found[known])}

    def _place(self, artifact: Path) -> Path:
        """On the artifact's disk, so that it is linked: it may be large, and what holds temporary folders small."""
        if self._scratch.stat().st_dev == artifact.stat().st_dev:
            return self._scratch
        place = cache_root() / "drafts"
        place.mkdir(parents=True, exist_ok=True)
        remove_leftovers(place)
        return place


def loader_code(backend: str, home: Path) -> Path:
    """The folder `code` of every model that is published with the backend; it is written when it is first asked for."""
    place = home / backend
    if not place.exists():
        home.mkdir(parents=True, exist_ok=True)
        with part_folder(home) as part:
            copy_loader(backend, part / "code" / "compile_stage")
            _bring_bytecode(part / "code" / "compile_stage")
            with suppress(OSError):  # another thread was faster
                (part / "code").rename(place)
    return place


def _bring_bytecode(package: Path) -> None:
    """Put the compiled form of installed files beside their copies: compiling them anew takes each worker 0.2 s. Python
    compares the times of the files, and takes it where it fits."""
    for name in list_tree(package):
        installed, copy = _INSTALLED / name, package / name
        compiled = Path(importlib.util.cache_from_source(str(installed)))
        if not installed.is_file() or not compiled.is_file() or installed.read_bytes() != copy.read_bytes():
            continue
        seen = installed.stat()
        os.utime(copy, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        place = copy.parent / "__pycache__" / compiled.name
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(compiled, place)
