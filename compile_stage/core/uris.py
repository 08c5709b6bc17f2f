"""What an argument that may be a URI or a path is: one rule for all that take both."""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # of two letters at least: C: is a drive


def is_uri(given: str | os.PathLike[str]) -> bool:
    """True for what begins with a scheme (`models:/...`, `runs:/...`, `folder:/...`, `oci://...`). It is never read as
    a path, whatever lies in the current folder: a folder called `models:` would stand for the registry. A path that
    begins so is written `./...`."""
    return isinstance(given, str) and _SCHEME.match(given) is not None
