"""JSON files that others may have written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from compile_stage.core.json_files import read_json_object


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000, "nested too deeply"),  # Python's own reader raises RecursionError
        (nested(400).encode(), "nested too deeply"),  # it reads that; what walks the values does not
        (b"[1]", "no JSON object"),
        (b"{", "Expecting"),
        (b"\xff\xfe", "decode"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "larger than"),
    ],
)
def test_what_is_no_plain_object_is_a_value_error(tmp_path: Path, content: bytes, reason: str) -> None:
    """Broken: a damaged or hostile file would end a command as a bug of ours, or fill the memory."""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read_json_object(tmp_path / "a.json", max_bytes=1000 if b"xx" in content else 2**20)


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = {"a": [1, 2.5, None, "é"], "b": {"c": [[], {}]}}
    (tmp_path / "a.json").write_text(json.dumps(written))
    assert read_json_object(tmp_path / "a.json") == written


def test_a_named_pipe_and_a_folder_are_no_file(tmp_path: Path) -> None:
    """Broken: a bundle whose manifest is a named pipe would be waited for without end."""
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="no regular file"):
        read_json_object(tmp_path / "pipe.json")
    with pytest.raises(OSError, match=r"directory|regular"):
        read_json_object(tmp_path)
