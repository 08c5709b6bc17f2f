"""Whether threads only held the baseline up: it is timed with one thread too, in the process that was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from compile_stage.core.baseline import CPU, baseline_target
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import Measurement, SampleSet, SourceModel, Target, Timing
from compile_stage.measure import stats
from compile_stage.measure.participant import Turn

THREADS_COST = 3.0
"""With the target's threads the original takes so many times as long as with one: not what a synchronisation costs, but
threads that wait for cores which others hold. 450 was seen where two cores had 15 busy processes."""

_TURNS = 3
_TURN_S = 0.02
_WAITED = 0.2  # threads that waited for a core, on average over a turn; 1.6 were seen where two cost 30 to 300 times


def waiting(turns: Sequence[Turn]) -> float:
    """How many threads of the process waited for a core, on average over these turns; 0 where nobody counts them."""
    wall_s = sum(turn.wall_s for turn in turns)
    return sum(turn.waited_s for turn in turns) / wall_s if wall_s else 0.0


def may_be_held_up(target: Target, turns: Sequence[Turn]) -> bool:
    """Whether it is worth to time the baseline with one thread: it has several, on a CPU, and they waited for cores."""
    return target.threads > 1 and baseline_target(target).device == CPU and waiting(turns) >= _WAITED


def time_on_one_thread(
    worker: Worker, source: SourceModel, target: Target, samples: SampleSet, seconds: Mapping[int, float]
) -> dict[int, tuple[float, ...]]:
    """Seconds of a call of the original with one thread, the median of each turn, by batch size. It is opened anew in
    the worker; where that fails, or a framework sets its threads once in a process, nothing is shown.

    Args:
        seconds: By batch size: after so long there are no more turns.
    """
    found: dict[int, tuple[float, ...]] = {}
    with suppress(CompileStageError):  # what was measured before stands without it
        worker.call("open_source", source=source, target=replace(target, threads=1))
        for batch_size, longest_s in seconds.items():
            ends, turns = time.monotonic() + longest_s, list[float]()
            while len(turns) < _TURNS and (not turns or time.monotonic() < ends):
                calls = worker.call("quick_turn", samples=samples, batch_size=batch_size, seconds=_TURN_S)
                turns.append(stats.median(calls))
            found[batch_size] = tuple(turns)
    return found


def say_held_up(baseline: Measurement | None, threads: int) -> str:
    """Why no speedup over the baseline is one, as a part of a sentence; empty where `held_up` finds nothing."""
    if baseline is None or (found := held_up(baseline)) is None:
        return ""
    timing, alone_s = found
    return (
        f"the baseline took {stats.median(timing.latency_s) * 1e3:.3g} ms with {threads} threads at batch "
        f"{timing.batch_size}, and {alone_s * 1e3:.3g} ms with one: its threads waited for cores that other processes "
        "held, so that the speedups over it are too large"
    )


def held_up(baseline: Measurement) -> tuple[Timing, float] | None:
    """The baseline's timing at a batch size at which its threads only held it up, and the seconds of a call with one;
    None where they don't, or nobody looked."""
    for timing in baseline.timings:
        if timing.one_thread_s and timing.latency_s:
            alone_s = stats.median(timing.one_thread_s)
            if stats.median(timing.latency_s) > THREADS_COST * alone_s:
                return timing, alone_s
    return None
