"""A CNN whose int8 misses its tolerance, through the whole stage: the search, its budget, its proof, and going on after
a kill."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core.records import Candidate, RunResult

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

TARGET = "backends: [onnxruntime], precisions: [int8]"

# By size, int8 wins whatever the machine is doing: with so small a net, latencies on a busy one decide nothing.
BODY = """\
tolerances: {{int8: {{snr_db: {snr_db}}}}}
select: {{prefer: size}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}}
fallback: {{max_evaluations: {evaluations}, max_minutes: 5}}
"""


@pytest.fixture
def policy(outlier_net: Any, write_policy: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    import mlflow

    net = copy.deepcopy(outlier_net)  # MLflow moves the weights out of the model it is given
    mlflow.onnx.save_model(net, str(tmp_path / "outlier-net"), pip_requirements=["onnx"])
    images = np.random.default_rng(1).standard_normal((64, 3, 20, 20)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images)
    return lambda snr_db, evaluations=12: write_policy(TARGET, BODY.format(snr_db=snr_db, evaluations=evaluations))


def run(policy: Path) -> RunResult:
    folder = policy.parent
    result = api.run(f"folder:{folder / 'outlier-net'}", policy, out=folder / "out", publish=False)
    assert result.targets, result.problem
    return result


def candidates(result: RunResult) -> dict[str, Candidate]:
    return {candidate.job.scheme.name: candidate for candidate in result.targets[0].candidates}


def test_int8_that_misses_its_tolerance_ends_as_mixed_int8_that_holds_it(policy: Callable[..., Path]) -> None:
    """Broken: the policy's `fallback.mixed_precision` would do nothing, or a mixed model would ship without proof."""
    import onnx

    file = policy(36)
    result = run(file)
    found = candidates(result)
    plain, mixed = found["int8-u8s8"], found["int8-u8s8-mixed"]
    assert plain.verdict is not None
    assert not plain.verdict.passed
    assert mixed.verdict is not None
    assert mixed.verdict.passed
    assert result.targets[0].selection.winner == mixed.job.id == plain.job.id + "-mixed"
    tried = sum(len(candidate.trials) for candidate in found.values())
    assert 1 <= tried <= 12
    assert mixed.portable is not None
    assert mixed.artifact is not None
    names = {node.name for node in onnx.load(file.parent / "outlier-net" / "model.onnx").graph.node}
    (kept,) = mixed.portable.kept.values()
    assert set(kept) <= names
    assert len(kept) <= 2
    reason = result.targets[0].selection.reasons[mixed.job.id]
    assert "quantised nodes stay" in reason
    assert "since without" in reason
    written = json.loads((file.parent / "out" / "result.json").read_text())
    told = {c["scheme"]: c for c in written["targets"][0]["candidates"]}
    assert [trial["passed"] for trial in told["int8-u8s8"]["trials"]].count(True) >= 1
    assert told["int8-u8s8-mixed"]["kept"] == {"fp32": list(kept)}
    page = (file.parent / "out" / "report.html").read_text()
    assert "trial by trial" in page
    assert kept[0] in page
    again = run(file)
    assert candidates(again)["int8-u8s8"].trials == plain.trials
    assert all(event.cached for event in again.events if event.step in ("mix", "compile", "validate", "rank"))


@pytest.mark.slow
def test_an_impossible_tolerance_ends_with_the_proof_of_what_was_tried(policy: Callable[..., Path]) -> None:
    """Broken: the search would not end, or end with nothing to show."""
    result = run(policy(150, evaluations=5))
    assert (result.targets[0].selection.winner or "").endswith("--fp32")
    found = candidates(result)
    assert sum(len(candidate.trials) for candidate in found.values()) <= 5
    searched = [candidate for candidate in found.values() if candidate.trials]
    assert searched
    for candidate in searched:
        assert not any(trial.passed for trial in candidate.trials)
        assert all(trial.problem or (trial.decisive and trial.decisive.measured) for trial in candidate.trials)
        assert "the closest keeps" in result.targets[0].selection.reasons[candidate.job.id]


def test_without_the_fallback_nothing_is_searched(policy: Callable[..., Path]) -> None:
    """Broken: a team that forbids mixed precision would get it."""
    file = policy(36)
    file.write_text(file.read_text().replace("fallback: {", "fallback: {mixed_precision: false, "))
    result = run(file)
    assert not any(candidate.trials for candidate in result.targets[0].candidates)
    assert not any("mixed" in candidate.job.id for candidate in result.targets[0].candidates)


@pytest.mark.slow
def test_after_a_kill_finished_trials_are_not_repeated(policy: Callable[..., Path], tmp_path: Path) -> None:
    """Broken: a search of hours would start anew after the machine was taken away."""
    file = policy(150, evaluations=6)
    mixes = Path(os.environ["COMPILE_STAGE_CACHE"]) / "mix"
    command = [sys.executable, "-m", "compile_stage", "run", f"folder:{tmp_path / 'outlier-net'}", "-p", str(file)]
    with (tmp_path / "log").open("wb") as log:
        stage = subprocess.Popen([*command, "--no-publish", "--out", str(tmp_path / "out")], stdout=log, stderr=log)

    def written() -> int:
        # Not those under way (`*.part-*`): they hold an entry.json too, until they are renamed.
        return sum(".part-" not in path.parent.name for path in mixes.glob("*/*/entry.json"))

    deadline = time.monotonic() + 120
    while written() < 2 and stage.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    finished = written()
    assert finished >= 2, (tmp_path / "log").read_text()
    result = run(file)
    made = [event for event in result.events if event.step == "mix"]
    assert sum(event.cached for event in made) >= finished
    assert sum(len(candidate.trials) for candidate in result.targets[0].candidates) <= 6
