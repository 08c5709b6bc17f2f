"""A task metric on a model with several outputs: the message's advice is followed through a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core.records import Outcome, TargetResult

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}"
Write = Callable[..., Path]


SETS = [f"data.{role}.{key}" for role in ("validation", "calibration") for key in ("labels=label", "max_samples=256")]


def run(model: Path, policy: Path, out: Path, tolerances: str) -> TargetResult:
    sets = [*SETS, f"tolerances.int8={tolerances}"]
    return api.run(f"folder:{model}", policy, out=out, publish=False, sets=sets).targets[0]


@pytest.fixture
def labelled(small_model: Path, tmp_path: Path) -> Path:
    """`small_model`, whose two outputs `y` and `z` are both scores of classes, with labels for `y`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(small_model / "model.onnx"))
    x = np.random.default_rng(1).standard_normal((256, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=session.run(["y"], {"x": x})[0].argmax(axis=1))
    return small_model


@pytest.mark.parametrize("general", ["", "accuracy: 0.2, "], ids=["the shipped one", "the policy's own"])
def test_an_outputs_own_accuracy_takes_the_place_of_the_general_one(
    labelled: Path, write_policy: Write, tmp_path: Path, general: str
) -> None:
    """Broken: who follows the message and limits accuracy on the output that the labels are for is refused by the
    general limit, so no int8 of a model with two such outputs could ever pass."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [int8]",
        f"{FAST}\nfallback: {{mixed_precision: false}}\ntolerances: {{fp32: null}}",
    )
    loose = "cosine: 0.5, mean_snr_db: null"
    unclear = run(labelled, policy, tmp_path / "first", f"{{{general}{loose}}}")
    assert not unclear.candidates
    advice = "outputs: {y: {accuracy: ...}}"
    assert advice in unclear.refused[0].reason

    followed = f"{{{general}{loose}, {advice.replace('...', '0.2')}}}"
    (candidate,) = run(labelled, policy, tmp_path / "second", followed).candidates
    verdict = candidate.verdict
    assert verdict is not None
    assert [check.output for check in verdict.checks if check.gate.metric == "accuracy"] == ["y"]
    assert verdict.passed, [check.reason for check in verdict.checks if check.outcome is not Outcome.PASS]
