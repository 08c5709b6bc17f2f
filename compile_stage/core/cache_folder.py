"""Where this machine's cache is."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$COMPILE_STAGE_CACHE`, or the user's cache folder."""
    if named := os.environ.get("COMPILE_STAGE_CACHE"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("compile-stage")
