"""Many calls in a row: what drifts, or is right at first only, is found by its kept answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure import soak
from compile_stage.measure.resemblance import RESEMBLANCE
from compile_stage.measure.samples import Samples
from compile_stage.measure.soak import KEPT, judge_soak, run_soak

GATES = (Gate(metric="max_rel", limit=1e-3, direction="at_most"),)
INPUTS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


class Model:
    """A linear model whose answers are multiplied by what a function makes of the number of the call."""

    signature: Any = None

    def __init__(self, factor: Any = lambda call: 1.0) -> None:
        self._factor, self.calls = factor, 0
        self.buffer = np.zeros((2, 3), np.float32)

    def run(self, batch: Any) -> Any:
        self.calls += 1
        self.buffer[:] = batch["x"] @ WEIGHTS * np.float32(self._factor(self.calls))
        return {"y": self.buffer}  # overwritten by the next call: what is kept must be a copy


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a look, so that the number of calls does not depend on the machine."""
    looks = iter(range(10**9))
    monkeypatch.setattr(soak, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(looks) / 1000)}))


def soaked(model: Model, tmp_path: Path, seconds: float = 2.0) -> tuple[dict[str, Any], Check]:
    recorded = run_soak(model, Samples(40, {"x": INPUTS}, None), 2, seconds, 0, tmp_path)
    return recorded, judge_soak(GATES, recorded, {"y": INPUTS @ WEIGHTS}, 0, seconds)


def test_an_honest_model_holds_and_answers_of_the_whole_soak_are_looked_at(tmp_path: Path) -> None:
    """Broken: only the first answers would be looked at, or the last not."""
    recorded, check = soaked(Model(), tmp_path)
    calls = [answer["call"] for answer in recorded["kept"]]
    assert recorded["calls"] == 1499  # two looks at the clock a call in the first half
    assert len(calls) == KEPT + 1
    assert max(calls) == 1498
    assert np.median(calls) > 400
    assert (check.outcome, check.gate.metric) == (Outcome.PASS, "soak")
    assert check.reason == "1,499 calls in 2 s, 17 answers looked at: all are the original's"


@pytest.mark.parametrize(("factor", "outcome"), [(-1.0, Outcome.FAIL), (1.2, Outcome.PASS)])
def test_answers_that_no_gate_can_judge_are_held_against_the_original_together(
    tmp_path: Path, factor: float, outcome: Outcome
) -> None:
    """Broken: where a policy looks at labels alone, a soak of wrong answers would say that all are the original's."""
    model = Model(lambda call: factor)
    model.buffer = np.zeros((1, 3), np.float32)
    recorded = run_soak(model, Samples(40, {"x": INPUTS}, None), 1, 0.5, 0, tmp_path)
    check = judge_soak([RESEMBLANCE], recorded, {"y": INPUTS @ WEIGHTS}, 0, 0.5)
    assert check.outcome is outcome, check.reason


def test_rows_that_depend_on_their_batch_are_called_in_the_batches_that_the_original_had(tmp_path: Path) -> None:
    """Broken: an exact artifact of such a model fails, since other batches have other answers."""
    samples = Samples(40, {"x": INPUTS}, None)
    recorded = run_soak(Model(), samples, 2, 0.5, 0, tmp_path, in_order=True)
    rows = [tuple(answer["rows"]) for answer in recorded["kept"]]
    assert len(set(rows)) > 5
    assert all(second == first + 1 and first % 2 == 0 for first, second in rows)
    few = run_soak(Model(), Samples(1, {"x": INPUTS[:1]}, None), 2, 0.1, 0, tmp_path, in_order=True)
    assert {tuple(answer["rows"]) for answer in few["kept"]} == {(0, 0)}


def test_what_goes_wrong_in_another_thread_is_found(tmp_path: Path) -> None:
    """Broken: a backend that answers wrongly from its second call in a thread on, other than the one that opened it,
    wins; a server makes all of its calls so."""
    elsewhere: list[int] = []

    def factor(call: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            elsewhere.append(call)
        return 0.0 if len(elsewhere) > 1 else 1.0

    recorded, check = soaked(Model(factor), tmp_path)
    assert 900 < len(elsewhere) < 1100, "half of them"
    assert len([answer for answer in recorded["kept"] if answer["call"] + 1 in elsewhere]) > 2
    assert check.outcome is Outcome.FAIL
    assert "are wrong, the first in call" in check.reason


@pytest.mark.parametrize(
    "factor",
    [lambda call: 1.0 if call <= 1000 else 0.5, lambda call: 1 + call * 1e-5],
    ids=["after a thousand", "drift"],
)
def test_what_goes_wrong_later_is_found(factor: Any, tmp_path: Path) -> None:
    """Broken: an artifact that is right for as long as it is proven would win."""
    _, check = soaked(Model(factor), tmp_path)
    assert check.outcome is Outcome.FAIL
    assert "are wrong, the first in call " in check.reason
    assert "max_rel of output 'y' is" in check.reason


def test_a_slow_model_is_called_once_at_least(tmp_path: Path) -> None:
    """Broken: a call longer than the soak would leave nothing to look at."""
    recorded, check = soaked(Model(), tmp_path, seconds=0.0)
    assert (recorded["calls"], len(recorded["kept"])) == (1, 1)
    assert check.outcome is Outcome.PASS
