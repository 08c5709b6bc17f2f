"""JSON files that others may have written: read with a limit on their size, and with one kind of error."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from compile_stage.core.read_errors import naming

_MAX_BYTES = 64 * 2**20  # the largest of ours, a result.json with every sample, has a few MB

_MAX_DEPTH = 100  # ours have 12; what walks a document recursively ends at some hundreds


def read_json_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: The file can't be read; it is named.
        ValueError: It is no regular file, is larger than `max_bytes`, is no JSON, is nested too deeply, or holds no
            object.
    """
    # Without O_NONBLOCK, opening a named pipe waits for somebody to write to it.
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        # Python makes a buffer of all that it is asked for; one byte more shows a file that grew meanwhile.
        with naming(path):
            content = file.read(min(status.st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes / 2**20:.0f} MiB")
    try:
        document = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    if _is_deeper(document, _MAX_DEPTH):
        raise ValueError("its values are nested too deeply")
    return document


def _is_deeper(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True
