"""Of a language model: the time to the first token, the time per output token, and tokens a second.

All three come from the same calls: each batch was answered once as a whole generation and once for its first token
alone, one right after the other. The time per output token is the difference of the two, shared among the tokens after
the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from compile_stage.core.records import Timing, record
from compile_stage.measure import stats
from compile_stage.measure.quantiles import GATED, quantile_interval, rounds_of_calls
from compile_stage.measure.restarts import shared_rounds
from compile_stage.measure.stats import Interval

_LEAST_S = 1e-9

FIRST, NEXT = "ttft", "tpot"
"""Time to the first token; time per output token after it."""


@record
class TokenTimes:
    """Of one model at one batch size, which is how many sequences it writes at a time; seconds, each with the 95 %
    bounds that its calls leave, None where they are too few.

    Attributes:
        first_s, next_s: Median time to the first token, and per output token.
        first_p95_s, next_p95_s: Their 95th percentiles.
        tokens_per_s: Output tokens of all sequences a second, of a whole generation.
        first_ratio, next_ratio: How many times as fast as the baseline, of the medians; None for the baseline itself.
    """

    batch_size: int
    first_s: Interval | None
    next_s: Interval | None
    first_p95_s: Interval | None
    next_p95_s: Interval | None
    tokens_per_s: Interval | None
    first_ratio: Interval | None = None
    next_ratio: Interval | None = None


def token_times(timing: Timing, baseline: Timing | None = None) -> TokenTimes | None:
    """None where it is no language model's.

    Args:
        baseline: Measured beside it, for the ratios: in the rounds that both ran.
    """
    if not timing.first_s or not timing.token_s:
        return None
    first, after = rounds_of(timing, FIRST), rounds_of(timing, NEXT)
    ratios: list[Interval | None] = [None, None]
    if baseline is not None and baseline.first_s:
        ratios = [_ratio(baseline, timing, what) for what in (FIRST, NEXT)]
    return TokenTimes(
        batch_size=timing.batch_size,
        first_s=quantile_interval(first, 0.5, processes=timing.processes),
        next_s=quantile_interval(after, 0.5, processes=timing.processes),
        first_p95_s=quantile_interval(first, GATED, processes=timing.processes),
        next_p95_s=quantile_interval(after, GATED, processes=timing.processes),
        tokens_per_s=tokens_per_s(timing),
        first_ratio=ratios[0],
        next_ratio=ratios[1],
    )


def rounds_of(timing: Timing, what: str) -> list[tuple[float, ...]]:
    """Seconds of each call, one group for each round: `FIRST` or `NEXT`."""
    calls = timing.first_s if what == FIRST else timing.token_s
    ends = list(accumulate(timing.turns))
    return [tuple(calls[end - count : end]) for end, count in zip(ends, timing.turns, strict=True)]


def tokens_per_s(timing: Timing) -> Interval | None:
    """Output tokens of all sequences of a batch a second; None where it is no language model's, or has too few
    calls."""
    written = timing.batch_size * timing.new_tokens
    taken = quantile_interval(rounds_of_calls(timing), 0.5, processes=timing.processes)
    if not written or taken is None:
        return None
    return Interval(
        value=written / taken.value, low=written / taken.high, high=written / taken.low, confidence=taken.confidence
    )


def _ratio(baseline: Timing, timing: Timing, what: str) -> Interval | None:
    """Of the rounds that both ran. Where others' work hit a short call and not the whole one beside it, their
    difference may be nothing or less: it counts as next to nothing, and moves no median."""

    def floored(of: Timing) -> list[tuple[float, ...]]:
        return [tuple(max(call, _LEAST_S) for call in calls) for calls in rounds_of(of, what)]

    shared = shared_rounds(baseline, timing, floored)
    if not shared.own or min(_median(shared.base), _median(shared.own)) <= _LEAST_S:
        return None
    return shared.ratio(seed=0)


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return stats.median([call for calls in rounds for call in calls])
