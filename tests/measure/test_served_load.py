"""What trials under load tell, on queues whose percentiles are known by formula. No server runs here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.records import Gate, Layout, LoadPoint, Outcome, ServedLoad, Serving, ServingCost
from compile_stage.measure import served_load
from compile_stage.measure.energy import EnergyMeter

RATE = Gate(metric="throughput_at_p99", limit=100, direction="at_least", unit="requests/s", confidence=0.95)
PRICE = Gate(metric="cost_per_million", limit=2, direction="at_most", unit="currency", confidence=0.95)


def found(latencies: list[float | None], **changes: Any) -> dict[str, Any]:
    right = sum(value is not None for value in latencies)
    base = {"latencies_s": latencies, "late_s": [], "wrong": 0, "errors": 0, "unanswered": len(latencies) - right}
    return {**base, "seconds": 1.0, "right": right, "overloaded": False, **changes}


def queue(services: np.ndarray, rate: float, chance: np.random.Generator) -> np.ndarray:
    """Latencies of one server, first come first served: Lindley's recursion."""
    gaps = chance.exponential(1 / rate, len(services))
    steps = services[:-1] - gaps[1:]
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return walk - np.minimum.accumulate(walk) + services


def test_few_requests_have_no_p99_and_what_was_missed_is_endless() -> None:
    """Broken: a p99 of 298 requests is told, or requests without an answer leave the percentile as it was."""
    assert served_load.quantile([0.1] * 298, 0.99) is None
    assert served_load.quantile([0.1] * 299, 0.99) == 0.1
    point = served_load.point_of("open", found([0.1] * 990 + [None] * 10), 0.2, rate=50)
    assert (point.p99_s, point.missed, served_load.holds(point)) == (0.1, 10, True)
    point = served_load.point_of("open", found([0.1] * 989 + [None] * 11), 0.2, rate=50)
    assert (point.p95_s, point.p99_s, point.missed, served_load.holds(point)) == (0.1, None, 11, False)
    late = served_load.point_of("open", found([0.1] * 989 + [0.3] * 11), 0.2, rate=50)
    assert (late.over_limit, served_load.holds(late)) == (11, False)


def test_a_late_generator_makes_a_trial_invalid() -> None:
    """Broken: a load that was never offered counts as carried."""
    on_time = served_load.point_of("open", found([0.1] * 300, late_s=[0.0001] * 300), 0.05, rate=1)
    assert on_time.invalid == ""
    late = served_load.point_of("open", found([0.1] * 300, late_s=[0.0001] * 290 + [0.02] * 10), 0.05, rate=1)
    assert "sent 10 of 300 requests more than 5 ms late: it had no core; serve with fewer instances" in late.invalid


@given(st.floats(0.001, 1e5), st.floats(0.02, 50))
def test_a_search_ends_near_the_highest_rate_that_holds(true: float, off: float) -> None:
    """Broken: the search does not end, or ends above the rate from which on the limit is missed, or far below."""
    tried: list[float] = []

    def measure(rate: float) -> bool:
        tried.append(rate)
        return rate <= true

    rate = served_load.find_rate(measure, true * off, lambda: True)
    assert len(tried) < 40
    assert rate is not None
    assert true / 1.06 <= rate <= true


def test_a_search_without_time_or_without_valid_trials_is_not_known() -> None:
    """Broken: a rate is made up where no trial told anything; or a server that holds nothing counts as unknown."""
    assert served_load.find_rate(lambda _: None, 10, lambda: True) is None
    assert served_load.find_rate(lambda _: False, 10, lambda: False) is None
    assert served_load.find_rate(lambda _: False, 10, lambda: True) == 0.0
    assert served_load.find_rate(lambda _: True, 10, lambda: False) == 10


SERVED, LIMIT_S = 1000.0, 0.05
"""Requests a second that the queues below serve, and what 99 % of them must hold."""

# M/M/1: latencies are exponential, p99 = ln(100) / (served - arriving). M/D/1: by a simulation of 60 million requests.
TRUE = {"exponential": SERVED - math.log(100) / LIMIT_S, "constant": 954.0}


def intervals(kind: str, requests: int, number: int) -> list[tuple[float, float]]:
    """Of so many measurements, each of three starts that are searched by trials of so many requests."""
    chance = np.random.default_rng(5)

    def measure(rate: float) -> bool:
        services = chance.exponential(1 / SERVED, requests) if kind == "exponential" else np.full(requests, 1 / SERVED)
        latencies = queue(services, rate, chance)
        return served_load.holds(served_load.point_of("open", found(latencies.tolist()), LIMIT_S, rate=rate))

    ends = []
    for _ in range(number):
        starts = [served_load.find_rate(measure, 700, lambda: True) or 0.0 for _ in range(3)]
        interval = served_load.over_starts(starts)[1]
        assert interval is not None
        ends.append(interval)
    return ends


@pytest.mark.parametrize("kind", ["exponential", "constant"])
def test_intervals_hold_the_known_rate_of_a_queue(kind: str) -> None:
    """Broken: the throughput at a p99 is off, or its interval does not hold the true one, though trials are as long as
    they are to be."""
    ends = intervals(kind, math.ceil(4 * (LIMIT_S * TRUE[kind]) ** 2), 20)
    assert sum(low <= TRUE[kind] <= high for low, high in ends) >= 17, ends
    assert abs(np.median([math.sqrt(low * high) for low, high in ends]) / TRUE[kind] - 1) < 0.03


@pytest.mark.parametrize("kind", ["exponential", "constant"])
def test_short_trials_promise_less_and_never_more(kind: str) -> None:
    """Broken: a server that can't carry a rate is said to, since the trial ended before its queue had grown."""
    ends = intervals(kind, 600, 30)
    assert sum(low > TRUE[kind] for low, _ in ends) <= 1, ends


def test_what_waits_together_counts_less() -> None:
    """Broken: 1,500 requests that one pause met, or none, pass for as many independent ones; or a p99 among requests
    without an answer has a figure."""
    chance = np.random.default_rng(3)
    steady = [chance.exponential(0.01, 500).tolist() for _ in range(3)]
    known = served_load.p99_of(steady, 50)
    assert known is not None
    assert known.value < -0.01 * math.log(0.01) * 1.1 < known.high < 0.1
    pause = [0.5] * 14  # less than 1 % of all
    assert served_load.p99_of([steady[0], steady[1], [*steady[2][:-14], *pause]], 50) is None
    missing = served_load.p99_of([[None] * 60, *steady], 50)
    assert missing is None or missing.high == math.inf
    scattered = [[None if number % 40 == 0 else 0.001 for number in range(1500)]]
    lost = served_load.p99_of(scattered, 50)
    assert lost is not None
    assert (lost.value, lost.high) == (math.inf, math.inf)


def test_the_rate_that_is_asked_for_is_the_one_that_is_shown() -> None:
    """Broken: a server that holds what is asked for is measured at another rate, and misses the gate by that; or at one
    where nothing waits, which takes too long to show anything."""
    assert served_load.rate_to_hold(200, None, 20) == 150
    assert served_load.rate_to_hold(200, 180, 20) == 180
    assert served_load.rate_to_hold(200, 80, 40) == 80, "3,200 requests"
    assert served_load.rate_to_hold(200, 205, 20) == 205, "within what a search can tell"
    assert served_load.rate_to_hold(200, 230, 20) == 150
    assert served_load.rate_to_hold(200, 1, 40) == pytest.approx(10 * 299 / 40)
    assert served_load.rate_to_hold(200, 1, 20) == 100
    assert served_load.rate_to_hold(10, 1, 20) == 5


def test_the_worse_end_of_the_interval_decides() -> None:
    """Broken: a throughput or a cost passes by its middle, or a miss that is only uncertain is not called so."""
    layout = Layout(instances=1, threads=1)

    def outcome(interval: tuple[float, float] | None, gate: Gate) -> tuple[Outcome, str]:
        value = math.sqrt(interval[0] * interval[1]) if interval else None
        load = ServedLoad(layout=layout, throughput_per_s=value, interval=interval, reason="" if value else "no time")
        cost = ServingCost(winner=load, price_per_hour=0.72, currency="EUR")
        (check,) = served_load.judge_served([gate], served_load.with_cost(cost))
        return check.outcome, check.reason

    assert outcome((101, 130), RATE)[0] is Outcome.PASS
    assert outcome((90, 130), RATE)[1].startswith("too uncertain: ")
    assert outcome((90, 130), RATE)[0] is Outcome.FAIL
    assert not outcome((70, 90), RATE)[1].startswith("too uncertain")
    assert outcome(None, RATE) == (Outcome.NOT_RUN, "not measured: no time")
    # 0.72 an hour is 2e-4 a second: 100 requests/s cost 2 for a million.
    assert outcome((101, 130), PRICE)[0] is Outcome.PASS
    assert outcome((99, 130), PRICE)[0] is Outcome.FAIL
    assert "EUR for a million inferences" in outcome((99, 130), PRICE)[1]
    assert served_load.cost_per_million(0.34, 100, 8) == pytest.approx(0.34 / 3600 / 800 * 1e6)


def test_layouts_fill_the_cores() -> None:
    """Broken: more threads than cores are tried without being asked for, or what the policy names is not."""

    def tried(serving: Serving, threads: int, cores: int) -> list[tuple[int, int]]:
        return [(one.instances, one.threads) for one in served_load.layouts(serving, threads, cores)]

    assert tried(Serving(), 1, 4) == [(1, 1), (2, 1), (4, 1)]
    assert tried(Serving(), 4, 2) == [(1, 4)]
    assert tried(Serving(threads=(1, 2)), 1, 2) == [(1, 1), (2, 1), (1, 2)]
    assert tried(Serving(instances=(3,)), 1, 2) == [(3, 1)]


@pytest.fixture
def powercap(tmp_path: Path) -> Callable[[int], Path]:
    """The kernel's folder with one package's counter, in microjoules, and a part of it."""

    def write(microjoules: int) -> Path:
        for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
            (tmp_path / zone).mkdir(exist_ok=True)
            for file, text in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", 1000_000_000)):
                (tmp_path / zone / file).write_text(f"{text}\n")
        return tmp_path

    return write


def test_energy_is_read_from_packages_and_counters_begin_again(powercap: Callable[[int], Path]) -> None:
    """Broken: parts of a package count twice, or a counter that began again at 0 gives energy back."""
    meter = EnergyMeter("cpu", powercap(990_000_000))
    before = meter.read()
    powercap(5_000_000)
    assert meter.source == "RAPL (package-0)"
    assert meter.between(before, meter.read()) == pytest.approx(15.0)


def test_energy_that_can_not_be_read_says_why(tmp_path: Path) -> None:
    """Broken: no energy looks like none used, without a word."""
    meter = EnergyMeter("cpu", tmp_path / "none")
    assert (meter.read(), meter.between(None, None)) == (None, None)
    assert "there is no" in meter.source


def test_points_of_no_requests_are_no_error() -> None:
    """Broken: a trial that was stopped before its first request ends the run with a traceback."""
    point: LoadPoint = served_load.point_of("open", found([], seconds=0.0), 0.1, rate=1)
    assert (point.requests, point.p50_s, point.throughput_per_s) == (0, None, 0.0)
