"""The cache stays within its bound, and keeps what is used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from compile_stage.core.cache import Cache
from compile_stage.core.cache_eviction import VARIABLE, evict, limit_bytes
from compile_stage.core.errors import UsageError

DAY_S = 24 * 3600.0


def entry(root: Path, name: str, age_days: float, size: int = 1000) -> Path:
    """An entry of that age since its last use."""

    def make(folder: Path) -> str:
        (folder / "file").write_bytes(bytes(size))
        return name

    cached = Cache(root).fetch("step/1", {"name": name}, make)
    place = Path(cached.path).parent
    when = time.time() - age_days * DAY_S
    os.utime(place, (when, when))
    return place


def test_what_was_longest_unused_goes_first_until_it_fits(tmp_path: Path) -> None:
    """Broken: the cache would fill the disk, or lose what runs find in it most."""
    old, older, young = entry(tmp_path, "a", 3), entry(tmp_path, "b", 5), entry(tmp_path, "c", 0.1)
    source = tmp_path / "sources" / ("0" * 64)
    source.mkdir(parents=True)
    (source / "weights").write_bytes(bytes(1000))
    os.utime(source, (0, 0))
    assert evict(tmp_path, 3_000) == 2
    assert [path.exists() for path in (source, older, old, young)] == [False, False, True, True]
    os.utime(tmp_path / "evicted", (0, 0))
    assert evict(tmp_path, 0) == 1, "what was used within a day stays, whatever the bound"
    assert young.exists()
    assert Cache(tmp_path).read("step/1", {"name": "a"}) is None
    assert not [path for path in tmp_path.rglob("*evicted*") if path.is_dir()]


def test_reading_an_entry_keeps_it(tmp_path: Path) -> None:
    """Broken: what every run reads would go, since it was made first."""
    used, unused = entry(tmp_path, "a", 9), entry(tmp_path, "b", 5)
    assert Cache(tmp_path).read("step/1", {"name": "a"}) is not None
    assert evict(tmp_path, 0) == 1
    assert used.exists()
    assert not unused.exists()


def test_an_entry_that_somebody_is_making_stays(tmp_path: Path) -> None:
    """Broken: a run would lose what it is about to write."""
    place = entry(tmp_path, "a", 9)
    with FileLock(f"{place}.lock"):
        assert evict(tmp_path, 0) == 0
    assert place.exists()


def test_the_whole_cache_is_not_looked_at_every_time(tmp_path: Path) -> None:
    """Broken: each short run would read the size of a hundred thousand files."""
    assert evict(tmp_path, 0) == 0
    place = entry(tmp_path, "a", 9)
    assert evict(tmp_path, 0) == 0
    assert evict(tmp_path, 0, now=time.time() + 3600) == 1
    assert not place.exists()


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """Broken: a machine whose clock was once a year ahead evicts nothing for a year, and the disk fills."""
    ahead, young = entry(tmp_path, "a", -365), entry(tmp_path, "b", 0.1)
    assert evict(tmp_path, 0, now=time.time() + 400 * DAY_S) == 2
    ahead, young = entry(tmp_path, "a", -365), entry(tmp_path, "b", 0.1)
    assert evict(tmp_path, 0) == 1
    assert [path.exists() for path in (ahead, young)] == [False, True]


@pytest.mark.parametrize(("text", "limit"), [("", 50e9), ("2.5", 2.5e9), ("0", float("inf"))])
def test_the_bound_is_the_environments(monkeypatch: pytest.MonkeyPatch, text: str, limit: float) -> None:
    """Broken: whoever has a small disk, or wants to keep everything, could not say so."""
    monkeypatch.setenv(VARIABLE, text)
    assert limit_bytes() == limit


@pytest.mark.parametrize("text", ["a lot", "-1", "nan"])
def test_a_bound_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Broken: a typing mistake would empty the cache, or never."""
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=VARIABLE):
        limit_bytes()
