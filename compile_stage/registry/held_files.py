"""Are the files that a registry holds of a version still those that were published?

What lies in a folder of this machine is digested, but for files of more than `_LARGE_BYTES`. Behind a server each file
is a request, so there names and sizes are compared, and only the smaller files of `data/` are read, with `MLmodel`. A
large file is compared by its size with the one of this run: a key is of one artifact. Whatever moves an alias fetches
all files, and compares every digest.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_file, digest_of, list_tree
from compile_stage.core.errors import IntegrityError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.records import Bundle, record
from compile_stage.registry.model_files import DIGEST_TAG
from compile_stage.serving.manifest import VALIDATIONS
from compile_stage.serving.mlmodel import check_mlmodel
from compile_stage.serving.signatures import SIGNATURE_FOLDER

_LARGE_BYTES = 64 * 2**20  # digested in 0.05 to 0.3 s
_LARGE_REMOTE_BYTES = 2**20
GONE = "its files are gone"
_DATA = "data/"


@record
class HeldFiles:
    """What a registry holds of one version.

    Attributes:
        sizes: Of each file, in bytes.
        path: Brings a file to this machine, and returns where it is; its folder is the model directory.
        here: They lie in a folder of this machine.
    """

    sizes: Mapping[str, int]
    path: Callable[[str], Path]
    here: bool

    @classmethod
    def in_folder(cls, folder: Path) -> HeldFiles:
        """Those of a folder of this machine."""
        sizes = {name: (folder / name).stat().st_size for name in list_tree(folder)}
        return cls(sizes=sizes, path=lambda name: folder / name, here=True)


def refuse_held(held: HeldFiles, tags: Mapping[str, str], bundle: Bundle) -> str | None:
    """None when the files of a version are what was published, as far as that is looked at, or the reason.

    Args:
        tags: Of the version.
        bundle: Of the same key, though perhaps not of the same measurements.
    """
    if not held.sizes:
        return GONE
    try:
        return next(_wrong(held, tags.get(DIGEST_TAG, ""), bundle), None)
    except IntegrityError as error:
        return error.problem


def refuse_folder(folder: Path, tags: Mapping[str, str], bundle: Bundle) -> str | None:
    """The same of a version that lies in a folder of this machine."""
    if not folder.is_dir():
        return GONE
    return refuse_tree(folder) or refuse_held(HeldFiles.in_folder(folder), tags, bundle)


def differing(written: Path, there: Path) -> list[str]:
    """The files of a folder that are not in another one, byte for byte."""
    filecmp.clear_cache()  # it knows files by size and time, and answers with what it found of them before
    _, differ, missing = filecmp.cmpfiles(written, there, list_tree(written), shallow=False)
    return sorted([*differ, *missing])


def _wrong(held: HeldFiles, published: str, bundle: Bundle) -> Iterator[str]:
    if "MLmodel" not in held.sizes:
        yield "MLmodel is missing"
    if "data/manifest.json" not in held.sizes:
        yield "data/manifest.json is missing"
    data = {name.removeprefix(_DATA): name for name in held.sizes if name.startswith(_DATA)}
    digests: dict[str, str] = {}
    for short, name in sorted(data.items()):
        digests[short] = yield from _digest(held, name, bundle)
    manifest = _manifest(held.path("data/manifest.json"))
    if digest_of(digests) != published:
        files = manifest.get("files", {})
        yield from _differences(files, {name: digests[name] for name in digests if name != "manifest.json"}, _DATA)
        yield "data/ does not have the digest that was published"
    if "mlmodel" in manifest:
        check_mlmodel(manifest, held.path("MLmodel").parent)
    yield from _wrong_beside(held, manifest, bundle)


def _digest(held: HeldFiles, name: str, bundle: Bundle) -> Any:
    """The digest of a file, read where it is small; yields what is wrong with the size of a large one."""
    size, own = held.sizes[name], Path(bundle.path) / name
    if size <= (_LARGE_BYTES if held.here else _LARGE_REMOTE_BYTES) or not own.is_file():
        return digest_file(held.path(name))
    if size != own.stat().st_size:
        yield f"{name} has {size} bytes, and was published with {own.stat().st_size}"
    known = bundle.manifest.get("files", {}).get(name.removeprefix(_DATA))
    return known or digest_file(own)


def _wrong_beside(held: HeldFiles, manifest: Mapping[str, Any], bundle: Bundle) -> Iterator[str]:
    """What is wrong outside of `data/`, whose manifest holds."""
    listed = {**manifest.get("code", {}), **manifest.get("beside", {})}
    others = [name for name in held.sizes if not name.startswith(_DATA) and name not in ("MLmodel",)]
    signed = Path(bundle.path) / SIGNATURE_FOLDER
    for name in list_tree(signed) if signed.is_dir() else ():  # by the same signer: a key is of one
        if f"{SIGNATURE_FOLDER}/{name}" not in held.sizes:
            yield f"{SIGNATURE_FOLDER}/{name} is missing"
    theirs = (VALIDATIONS, SIGNATURE_FOLDER, "registered_model_meta")
    present = {name for name in others if name.partition("/")[0] not in theirs and "__pycache__" not in name}
    if "beside" not in manifest:  # an earlier version published it, and listed code alone
        present = {name for name in present if name in listed}
    if held.here:
        yield from _differences(listed, {name: digest_file(held.path(name)) for name in sorted(present)})
        return
    yield from _differences(dict.fromkeys(listed, ""), dict.fromkeys(present, ""))
    known = {**bundle.manifest.get("code", {}), **bundle.manifest.get("beside", {})}
    for name in sorted(present):
        own = Path(bundle.path) / name
        if known.get(name) == listed[name] and own.is_file() and own.stat().st_size != held.sizes[name]:
            yield f"{name} has {held.sizes[name]} bytes, and was published with {own.stat().st_size}"


def _differences(listed: Mapping[str, str], present: Mapping[str, str], folder: str = "") -> Iterator[str]:
    for name in sorted(listed.keys() | present.keys()):
        if name not in present:
            yield f"{folder}{name} is missing"
        elif name not in listed:
            yield f"{folder}{name} is not among the published files"
        elif present[name] != listed[name]:
            yield f"{folder}{name} is not what was published: its digest differs"


def _manifest(file: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError("data/manifest.json is not what was published: it can't be read") from error
    return manifest if isinstance(manifest, dict) else {}
