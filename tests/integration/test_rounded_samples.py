"""Models of float64 whose answers change where samples are rounded to the network's float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from factories import policy_text
from mlflow.models import infer_signature

from compile_stage import api
from compile_stage.core.records import Outcome, RunResult

pytest.importorskip("skl2onnx", reason="the scikit-learn source needs skl2onnx")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0.2}\n"
    "compliance: {allow_pickle: true}\n"
)
TARGET = "backends: [onnxruntime], precisions: [fp32], batch_sizes: [1, 8]"


def run(folder: Path, model: Any, rows: pd.DataFrame, body: str = "") -> RunResult:
    mlflow.sklearn.save_model(
        model, str(folder / "model"), serialization_format="cloudpickle", pip_requirements=["scikit-learn"],
        signature=infer_signature(rows, model.predict(rows)),
    )  # fmt: skip
    rows.to_parquet(folder / "data.parquet")
    policy = folder / "policy.yaml"
    text = policy_text(folder / "data.parquet", TARGET, BODY + body)
    policy.write_text(text.replace("max_samples: 64", "max_samples: 400"))
    return api.run(f"folder:{folder / 'model'}", policy, out=folder / "out", publish=False)


def failed(result: RunResult) -> list[Any]:
    (candidate,) = result.targets[0].candidates
    assert candidate.verdict is not None
    return [check for check in candidate.verdict.checks if check.outcome is Outcome.FAIL]


def test_trees_whose_thresholds_are_samples_are_compared_with_what_people_get(tmp_path: Path) -> None:
    """Broken: the original, asked with rounded samples, takes other branches than it takes for people, and the
    artifact, which answers as it does for these, fails: on the validation samples, in other calls, on samples made of
    these, with a NaN, while it is timed, or by its predict()."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    random = np.random.default_rng(0)
    rows = pd.DataFrame(np.round(random.normal(size=(2000, 4)), 2), columns=list("abcd"))
    model = HistGradientBoostingRegressor(max_iter=20).fit(rows, rows.a + np.sin(3 * rows.b))
    result = run(tmp_path, model, rows[:200])
    assert result.exit_code == 0, result.problem
    assert not failed(result)
    (note,) = (note for note in result.targets[0].notes if "otherwise once they are rounded" in note)
    assert "'a' (" in note
    (candidate,) = result.targets[0].candidates
    assert candidate.verdict is not None
    (missing,) = (check for check in candidate.verdict.checks if check.gate.metric == "missing_numbers")
    assert missing.gate.options["refused"] == []


TIMES = pd.DataFrame({"time": 1.7e9 + np.arange(400) * 7.0, "size": np.linspace(0, 3, 400)})
WAIVED = ("max_rel", "cosine", "column_nrmse", "agreement")


def late() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression()).fit(TIMES, np.arange(400) > 180)


def test_a_model_of_time_stamps_fails_by_the_gates_and_is_told_why(tmp_path: Path) -> None:
    """Broken: original and artifact lose the same digits of a time stamp, agree and pass; or nobody is told what it
    is."""
    result = run(tmp_path, late(), TIMES)
    assert result.exit_code == 3
    found = failed(result)
    assert found
    for check in found:
        assert "beside the original's answers to rounded samples it holds" in check.reason
        assert "by the rounding of 'time' (" in check.reason
        assert "difference of a time" in check.reason


@pytest.mark.parametrize("by", ["tolerances", "waivers"])
def test_a_policy_may_let_it_through(by: str, tmp_path: Path) -> None:
    """Broken: a difference that a policy tolerates, or waives, is refused all the same: in other calls, in the soak,
    while it is timed, or by predict()."""
    waivers = "".join(
        f"  - {{gate: {gate}, target: cpu, reason: known, owner: me, expires: 2099-12-31}}\n" for gate in WAIVED
    )
    limits = (
        "max_rel: 0.3, cosine: 0.98, agreement: 0.98, column_nrmse: {limit: 0.5}, column_spread: {limit: 0.5}, "
        "top1_agreement: 0.98"
    )
    body = f"waivers:\n{waivers}" if by == "waivers" else f"tolerances: {{fp32: {{{limits}}}}}\n"
    result = run(tmp_path, late(), TIMES, body)
    assert result.exit_code == 0, result.problem
    assert bool(failed(result)) is (by == "waivers")
    assert any("otherwise once they are rounded" in note for note in result.targets[0].notes)
