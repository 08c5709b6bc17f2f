"""An engine whose workers run `deeds.py`, with real processes throughout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compile_stage.engine.local import LocalEngine


@pytest.fixture
def engine(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])  # the stage's path is its workers' too
    made = LocalEngine(calls="deeds")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test: no process that this one started is left, dead or alive. What an earlier test's multiprocessing
    keeps for itself (its resource tracker) was there before."""
    before = set(psutil.Process().children(recursive=True))
    yield
    until = time.monotonic() + 60  # they end at once, but on a busy machine the kernel is late
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
