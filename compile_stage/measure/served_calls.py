"""What an artifact's own call takes in the process that serves it, beside what it took while it was timed.

A runtime may notice that it is timed, or be fast only where calls follow each other at once.
"""

from __future__ import annotations

from compile_stage.core.records import Measurement, PredictSpeedup
from compile_stage.measure import stats

OVER_TIMED, BEYOND_S = 3.0, 0.2e-3
"""Nine calls of one process tell no less: each comes after a rest, and checks its input outside of the runtime."""


def slower_when_served(measured: Measurement | None, found: PredictSpeedup | None) -> str:
    """A sentence where the winner's call took far longer in the process that has the published model loaded than while
    it was timed; empty where it did not, or nobody asked.

    Args:
        measured: The winner's.
    """
    if measured is None or found is None or found.served_s is None:
        return ""
    timing = measured.timing(found.rows)
    if timing is None or not timing.latency_s or timing.new_tokens:
        return ""
    timed_s = stats.median(timing.latency_s)
    if found.served_s <= OVER_TIMED * timed_s + BEYOND_S:
        return ""
    return (
        f"the artifact's own call took {found.served_s * 1e3:.3g} ms in the process that has the published model "
        f"loaded, and {timed_s * 1e3:.3g} ms while it was timed"
    )
