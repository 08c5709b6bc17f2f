"""Tuning records as files: named by content, whole or not there, inside their folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from compile_stage.core import tuning_records
from compile_stage.core.errors import InternalError

KEY = "tvm-0.27.0.post1/x86_64-1a2b3c4d5e6f7081-2-threads"


def test_a_record_is_named_by_its_content(tmp_path: Path) -> None:
    """Broken: two machines' records would overwrite each other, or a damaged one would be believed."""
    name = tuning_records.name_of("81", "json", b"{}")
    assert name == tuning_records.name_of("81", "json", b"{}") != tuning_records.name_of("81", "json", b"[]")
    assert tuning_records.refuse(name, b"{}") is None
    assert "not what it was named after" in str(tuning_records.refuse(name, b"{} "))
    for path in (
        tuning_records.write(tmp_path / "new", name, b"{}"),
        tuning_records.write(tmp_path / "new", name, b"{}"),
    ):
        assert path.read_bytes() == b"{}"
    assert tuning_records.names_in(tmp_path / "new") == [name]
    assert tuning_records.names_in(tmp_path / "not made yet") == []


@pytest.mark.parametrize(
    "name", ["../81-" + "0" * 24 + ".json", "81.json", ".part-x", "81-" + "0" * 23 + ".json", "a/b", ""]
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    """Broken: a file of the registry could be written outside of its folder."""
    assert "its name" in str(tuning_records.refuse(name, b""))


@pytest.mark.parametrize(
    "key", ["", "tvm", "../tvm/x", "tvm/../../x", "/tvm/x", "tvm//x", "tvm/.x", "tvm/x'y", "a/b/c/d/e"]
)
def test_a_key_that_leaves_the_cache_is_an_error_of_ours(key: str) -> None:
    """Broken: a backend's key could be a path to anywhere, or end a registry's query."""
    with pytest.raises(InternalError, match="no key"):
        tuning_records.folder_of(key)


def test_what_a_killed_process_left_is_cleared_and_counts_for_nothing(tmp_path: Path) -> None:
    """Broken: parts of files would pile up, or be pushed to the registry."""
    old, new = tmp_path / ".part-old", tmp_path / ".part-new"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    name = tuning_records.name_of("81", "json", b"{}")
    tuning_records.write(tmp_path, name, b"{}")
    assert (old.exists(), new.exists()) == (False, True), "another process may be writing the younger"
    assert tuning_records.names_in(tmp_path) == [name]


def test_they_lie_below_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: COMPILE_STAGE_CACHE would not move them."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path))
    assert tuning_records.folder_of(KEY) == tmp_path / "tuning" / KEY
