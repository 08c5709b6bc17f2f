"""Zip archives that strangers wrote: what they unpack to is bounded before anything is unpacked."""

from __future__ import annotations

import zipfile
from pathlib import Path

_ALWAYS_BYTES = 2**30  # unpacked, whatever the ratio
_MAX_RATIO = 50  # DEFLATE reaches 1032, on nothing but zeros; weights and tables reach 2 to 20


def refuse(path: Path) -> str | None:
    """None when the archive may be unpacked, or the reason: one that unpacks to far more than it holds fills the
    memory.

    Raises:
        OSError, zipfile.BadZipFile: It can't be read.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(record.file_size for record in archive.infolist())
    held = path.stat().st_size
    if unpacked > _ALWAYS_BYTES and unpacked > _MAX_RATIO * held:
        return f"unpacks to {unpacked / 2**30:.0f} GiB from {held / 2**20:.0f} MiB, which no model does"
    return None
