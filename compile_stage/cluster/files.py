"""Files that are the same on driver and nodes: the source, the policy's samples, and the bundles that come back.

Each is an entry of the step cache, which the machines share, named by its digest. Nothing vouches for such an entry but
that digest, which the other side got from Ray; so it is verified, and needs no signature.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cache, cache_secret
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import digest_file, digest_of, digest_tree
from compile_stage.core.errors import IntegrityError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.reuse import Reuse
from compile_stage.core.shared_cache import SharedCache
from compile_stage.core.shared_store import open_store

_STEP = "files/1"


def send(path: Path, shared: str) -> str:
    """Put a folder, or a file, where the other machines find it.

    Args:
        shared: Address of the shared cache; empty where the machines have one folder.

    Returns:
        What `fetch` finds it by.

    Raises:
        OSError: It can't be read.
    """
    digest = _digest(path)

    def make(into: Path) -> dict[str, str]:
        if path.is_dir():
            shutil.copytree(path, into / path.name)
        else:
            shutil.copy2(path, into / path.name)
        return {"name": path.name}

    cache = _cache(shared)
    key = {"digest": digest}
    held = cache.fetch(_STEP, key, make)
    if held.hit and cache.shared is not None:  # of a former run: there it may have been cleared away since
        files = Path(held.path)
        entry = read_json_object(files.parent / "entry.json")
        entry.pop("mac", None)
        cache.shared.push(cache.locate(_STEP, key).relative_to(cache.root).as_posix(), entry, files)
    return digest


def fetch(digest: str, what: str, shared: str) -> Path:
    """The folder or file that `send` put there, on this machine.

    Args:
        what: Its path where it came from, for the message.

    Raises:
        IntegrityError: It is not there, or has other content.
    """
    held = _cache(shared).read(_STEP, {"digest": digest})
    if held is None:
        raise IntegrityError(
            "a file of the run did not arrive on this machine",
            fix="let the driver write to the cache that the machines share, and each node read from it",
            where=what,
        )
    found = Path(held.path) / str(held.value["name"])
    if _digest(found) != digest:
        raise IntegrityError("a file of the run has another content than where it came from", where=str(found))
    return found


@contextmanager
def token() -> Iterator[Path]:
    """A file in this machine's step cache, by which another machine sees whether that is its own."""
    file = cache_root() / f".seen-{uuid.uuid4().hex}"
    file.touch()
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def sees(name: str) -> bool:
    """Whether the token of that name lies in this machine's step cache."""
    return (cache_root() / name).exists()


def _digest(path: Path) -> str:
    """Of content and name."""
    content = digest_tree(path) if path.is_dir() else digest_file(path)
    return digest_of({"content": content, "name": path.name})


class _ByDigest:
    """The seal of entries that are known by their content."""

    name, signs = "by-digest", True

    def sign(self, digest: str) -> Any:
        """Nothing is said of it."""

    def voucher(self, digest: str, seal: Any) -> str:
        return "whoever asks for the digest"


def _cache(shared: str) -> Cache:
    entries = SharedCache(open_store(shared), _ByDigest()) if shared else None
    return Cache(cache_root(), cache_secret(), shared=entries, reuse=Reuse(timings="same-fingerprint"))
