"""Own metrics that do not end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core.records import Gate, Outcome
from compile_stage.measure import own_metric
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.stats import bootstrap

SCORES = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    module = "import time\n\ndef waits(own, expected, labels):\n    while True:\n        time.sleep(0.01)\n"
    (tmp_path / "endlessmetric.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Gate(metric="python:endlessmetric:waits", limit=0.9, direction="at_least")


def test_a_metric_that_never_ends_was_not_run(endless: Gate) -> None:
    """If it failed, one endless function of a policy would hold up the whole run, or pass without a value; and its
    thread would take a core from the measurement."""
    outputs = {"a": SCORES, "b": SCORES}
    began = time.monotonic()
    with own_metric.allowed(0.5):
        checks = check_outputs([endless], outputs, outputs, SINGLE_CALL, batch_size=1, seed=0)
    assert time.monotonic() - began < 5, "what is allowed is for all outputs together"
    own = [check for check in checks if check.gate == endless]
    assert [check.outcome for check in own] == [Outcome.NOT_RUN, Outcome.NOT_RUN]
    assert "did not end within 0.5 s" in own[0].reason
    assert "budget.job_minutes" in own[0].reason
    wait_for_threads()


def wait_for_threads() -> None:
    ends = time.monotonic() + 30
    while any(thread.name.startswith("metric ") for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not any(thread.name.startswith("metric ") for thread in threading.enumerate())


def test_a_metric_that_catches_everything_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: what ends a metric is raised once, and lost where the function, a finalizer or a callback of the garbage
    collector was under way: its thread takes a core from the measurement."""
    module = (
        "import time\n\ndef waits(own, expected, labels):\n    caught = 0\n    while True:\n        try:\n"
        "            time.sleep(0.01)\n        except BaseException:\n            caught += 1\n"
        "            if caught == 3:\n                raise\n"
    )
    (tmp_path / "stubbornmetric.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(metric="python:stubbornmetric:waits", limit=0.9, direction="at_least")
    with own_metric.allowed(0.1):
        checks = check_outputs([gate], {"a": SCORES}, {"a": SCORES}, SINGLE_CALL, batch_size=1, seed=0)
    assert {check.outcome for check in checks if check.gate == gate} == {Outcome.NOT_RUN}
    wait_for_threads()


def test_an_interrupted_run_waits_for_no_metric(endless: Gate) -> None:
    """If it failed, Ctrl-C and SIGTERM would not end a run whose own metric does not end."""
    outputs, began = {"a": SCORES, "b": SCORES}, time.monotonic()
    stop = threading.Timer(0.3, own_metric.stop_waiting)
    stop.start()
    with own_metric.allowed(60):
        checks = check_outputs([endless], outputs, outputs, SINGLE_CALL, batch_size=1, seed=0)
    assert time.monotonic() - began < 10
    assert {check.outcome for check in checks if check.gate == endless} == {Outcome.NOT_RUN}


def rmse_rise(own: np.ndarray, base: np.ndarray, labels: np.ndarray) -> float:
    """How much the root mean square error rises, as a share."""
    squares = [float(np.mean((answers - labels) ** 2)) for answers in (own, base)]
    return float(np.sqrt(squares[0] / squares[1])) - 1


@pytest.mark.parametrize("metric", ["rmse_rise", "median_rise"])
def test_one_number_that_few_samples_decide_has_the_bounds_of_such_losses(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a policy's own rmse passes what the rmse of this library does not, since three samples make up the loss;
    or a median, which no single sample can decide, is bounded as if one could."""

    def median_rise(own: np.ndarray, base: np.ndarray, labels: np.ndarray) -> float:
        return float(np.median(np.abs(own - labels)) / np.median(np.abs(base - labels))) - 1

    function = rmse_rise if metric == "rmse_rise" else median_rise
    monkeypatch.setattr(own_metric, "_imported", lambda _: function)
    random = np.random.default_rng(3)
    labels = np.exp(random.standard_normal(150))
    base = labels + 0.5 * labels.std() * random.standard_normal(150)
    own = base + 0.4 * labels**1.5 * random.standard_normal(150)
    gate = Gate(metric="python:own:metric", limit=0.1, direction="at_most", confidence=0.95)
    found = own_metric.measure_own(gate, own, base, labels, seed=0)
    monkeypatch.setattr(own_metric, "interval_of_any", bootstrap)
    simple = own_metric.measure_own(gate, own, base, labels, seed=0)
    assert found.interval is not None
    assert simple.interval is not None
    further = (found.interval[1] - found.value) / (simple.interval[1] - simple.value)
    assert further > 1.5 if metric == "rmse_rise" else further < 1.4
