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
