"""What a timing says of itself: seconds for a token, CPU time of a call, and when a ratio has a figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import timing

from compile_stage.core.records import is_ratio_known, surely_faster

CALLS = timing(rounds=2, latency_s=(1.0, 3.0))


def test_a_tokens_time_is_what_the_call_takes_after_the_first() -> None:
    """Broken: the time of the prompt would count as that of the text that is written."""
    assert replace(CALLS, first_s=(0.4, 0.6), new_tokens=4).token_s == pytest.approx((0.2, 0.8))
    assert replace(CALLS, first_s=(0.4, 0.6), new_tokens=2).token_s == pytest.approx((0.6, 2.4))
    assert replace(CALLS, first_s=(0.4, 0.6), new_tokens=1).token_s == ()
    assert CALLS.token_s == ()


def test_the_cpu_time_of_a_call_has_no_part_of_the_calls_for_first_tokens() -> None:
    """Broken: a language model would seem to take the CPU time of two calls for one."""
    assert replace(CALLS, cpu_s=(2.0, 6.0)).cpu_per_call_s == pytest.approx(4.0)
    assert replace(CALLS, cpu_s=(2.0, 8.0), first_s=(0.4, 0.6)).cpu_per_call_s == pytest.approx(4.0)
    assert CALLS.cpu_per_call_s is None
    assert replace(CALLS, latency_s=(), cpu_s=(1.0,)).cpu_per_call_s is None


def test_an_unstable_ratio_has_no_figure() -> None:
    """Broken: a report would name a speedup that the measurement does not know."""
    assert replace(CALLS, speedup=2.0, stable=True).headline_speedup == 2.0
    assert replace(CALLS, speedup=2.0, stable=False).headline_speedup is None


@pytest.mark.parametrize(
    ("interval", "known", "least"),
    [
        (None, False, None),
        ((0.0, 2.0), False, None),
        ((0.5, 2.0), True, None),
        ((0.02, 1.99), True, None),
        ((0.02, 2.0), False, None),
        ((1.5, 2.0), True, None),
        ((1.5, 150.0), False, 1.5),
        ((1.0, 1e30), False, None),
        ((0.5, 1e30), False, None),
    ],
)
def test_ends_that_are_a_factor_of_100_apart_tell_at_most_a_least_speedup(
    interval: tuple[float, float] | None, known: bool, least: float | None
) -> None:
    """Broken: digits of an interval of thirty powers of ten would be shown as if something was known, or what is surely
    faster would be called unknown."""
    assert is_ratio_known(interval) is known
    assert surely_faster(interval) == least
