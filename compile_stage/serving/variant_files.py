"""The files of a version that holds several artifacts: each file is stored once, and an artifact that shares files is
put together before it is opened.

    data/artifact/                   of the lead, whose manifest is the version's
    data/variants/ID/artifact/       of another variant: what no file of `data/` has yet
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath

from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import IntegrityError

VARIANTS_FOLDER = "variants"
ARTIFACT_FOLDER = "artifact"


def folder_of(variant: str) -> str:
    """Where a variant's own files lie, below `data/`."""
    return f"{VARIANTS_FOLDER}/{variant}/{ARTIFACT_FOLDER}"


def store_once(artifact: Path, folder: str, data: Path, stored: dict[str, str]) -> dict[str, str]:
    """Copy an artifact's files to `data/FOLDER` that `data` does not hold yet.

    Args:
        artifact: Its folder.
        stored: Digest → path below `data` of what is stored; what is copied is added.

    Returns:
        File of the artifact → where it is stored, below `data`.
    """
    places = {}
    for name in list_tree(artifact):
        digest = digest_file(artifact / name)
        if digest not in stored:
            stored[digest] = f"{folder}/{name}"
            (data / folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact / name, data / folder / name)
        places[name] = stored[digest]
    return places


def shares_files(folder: str, stored: Mapping[str, str]) -> bool:
    """True where a file of an artifact lies elsewhere than in its own folder."""
    return any(place != f"{folder}/{name}" for name, place in stored.items())


def demand_inside(stored: Mapping[str, str], where: Path) -> None:
    """Raise IntegrityError for a name that leads out of the artifact's folder, or out of `data/`."""
    for name in (*stored, *stored.values()):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise IntegrityError(f"the manifest names a file outside of the model: {name}", where=str(where))


def put_together(data: Path, stored: Mapping[str, str], into: Path) -> Path:
    """The artifact's files in one folder `into`, as hard links where the disk allows that, else as copies."""
    for name, place in stored.items():
        file = into / name
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(os.path.realpath(data / place), file)
        except OSError:  # another disk, or one without links
            shutil.copyfile(data / place, file)
    return into


@cache
def kept_together(data: Path, stored: tuple[tuple[str, str], ...]) -> Path:
    """As `put_together`, in a temporary folder that ends with the process."""
    into = Path(tempfile.mkdtemp(prefix="compile-stage-variant-"))
    atexit.register(shutil.rmtree, into, ignore_errors=True)
    return put_together(data, dict(stored), into)
