"""Who need not be measured further: a candidate that is slower than the leader beyond doubt, and of which no gate is
open.

Rounds are shared by all, so a loser that stays costs as much time as the winner does. What more rounds could tell of it
changes neither the ranking nor a gate. Who may leave is decided by intervals with room for all that rounds of one
process can't show: for what processes differ by, for the memory of the rounds, and for all candidates at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compile_stage.core.records import Gate, Measurement, Outcome
from compile_stage.measure.performance import check_performance, is_too_uncertain
from compile_stage.measure.restarts import CONTENDER
from compile_stage.measure.speedups import ratio_interval
from compile_stage.measure.stats import Interval, median

CONFIDENCE = 0.95
"""Of all candidates at once."""


def one_process(
    base: Sequence[Sequence[float]], own: Sequence[Sequence[float]], candidates: int, seed: int
) -> Interval:
    """How many times faster `own` is, by rounds of one process of each, at the confidence that makes the intervals of
    so many candidates hold at once (Sidak: 0.95^(1/k))."""
    confidence = CONFIDENCE ** (1 / max(1, candidates))
    count = min(len(base), len(own))
    return ratio_interval(base, own, seed=seed, confidence=confidence, processes=(0,) * count)


def leaving(
    rounds: Mapping[str, Sequence[Sequence[float]]],
    hold: Callable[[str], bool | None],
    *,
    candidates: int,
    seed: int,
) -> dict[str, str]:
    """Who leaves: all that are slower than the leader beyond doubt, and by so much that they would not be started
    again, if none of their gates is open. The leader is the fastest whose gates hold.

    Args:
        rounds: Candidate → seconds per call, one list for each round. All have been in the same rounds.
        hold: Candidate → whether its gates hold by these rounds; None while one is open.
        candidates: That are compared in this measurement, whether or not they are still in the rounds.

    Returns:
        Candidate → that leader.
    """
    latency_s = {name: median([call for turn in turns for call in turn]) for name, turns in rounds.items()}
    by_speed = sorted(rounds, key=latency_s.__getitem__)
    leader = next(
        (name for name in by_speed if latency_s[by_speed[-1]] > CONTENDER * latency_s[name] and hold(name)), ""
    )
    return {
        name: leader
        for name in (by_speed if leader else ())
        if latency_s[name] > CONTENDER * latency_s[leader]
        and one_process(rounds[name], rounds[leader], candidates, seed).low > 1
        and hold(name) is not None
    }


def gates_hold(gates: Sequence[Gate], measured: Measurement, size_bytes: int | None) -> bool | None:
    """Whether the gates hold, as far as they look at the last timing or at none; None while one of them is open."""
    size = measured.timings[-1].batch_size
    checks = [c for c in check_performance(gates, measured, size_bytes) if c.batch_size in (None, size)]
    if any(check.outcome is Outcome.NOT_RUN or is_too_uncertain(check) for check in checks):
        return None
    return all(check.outcome is Outcome.PASS for check in checks)
