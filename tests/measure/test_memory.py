"""Resident memory of real processes."""

from __future__ import annotations

import numpy as np

from compile_stage.measure.memory import peak_rss_bytes


def test_the_peak_remembers_what_was_freed() -> None:
    size = peak_rss_bytes() + 30_000_000
    block = np.ones(size, dtype=np.uint8)
    del block
    assert peak_rss_bytes() >= size
