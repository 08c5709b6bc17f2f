"""The winner's predict() beside the original's: measured while it is loaded for serving, kept, and told."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import yaml

from compile_stage import api
from compile_stage.core.records import RunResult
from compile_stage.measure.recompute import refuse_published
from compile_stage.steps import predict

pytestmark = [
    pytest.mark.usefixtures("known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0.2}\n"
    'promote: {alias: "{target}-prod"}'
)
Write = Callable[..., Path]


def run(small_model: Path, policy: Path, *, publish: bool = True) -> RunResult:
    return api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=publish)


@pytest.mark.slow
def test_it_is_measured_before_promotion_and_kept(small_model: Path, write_policy: Write) -> None:
    """Broken: clients learn the runtime's speedup, and not that of the predict() which they call; or each run of the
    same thing loads both models again."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32], batch_sizes: [4]", BODY)
    result = run(small_model, policy)
    assert result.exit_code == 0, result.problem
    (target,) = result.targets
    found = target.predict_speedup
    assert found is not None
    assert found.reason == ""
    assert (found.rows, found.given) == (4, "an array")
    assert 5 <= found.pairs <= 31
    assert found.original_s
    assert found.compiled_s
    assert found.speedup == pytest.approx(found.original_s / found.compiled_s)
    assert target.receipt is not None
    assert target.receipt.promoted_to == "cpu-prod"
    written = json.loads((policy.parent / "out" / "result.json").read_text())
    assert written["targets"][0]["predict_speedup"]["pairs"] == found.pairs
    for name in ("report.html", "report.md"):
        assert "through predict()" in (policy.parent / "out" / name).read_text()

    again = run(small_model, policy, publish=False)
    assert again.targets[0].predict_speedup == found
    assert [event.cached for event in again.events if event.step == "predict-speedup"] == [True]
    stored = api.compare(target.receipt.uri, again)  # by the result.json that lies beside the published version
    assert not stored.changed, str(stored)
    assert stored.inputs == ()


@pytest.mark.slow
def test_nothing_is_published_by_a_speedup_over_a_baseline_that_is_contradicted(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: something slowed the baseline down, so that `min_speedup` held; the original's predict() shows that, and
    that the published one takes ten times as long, and the alias moves to it."""
    monkeypatch.setattr(predict, "contradiction", lambda target, found: "the baseline took 50 ms")
    pairs = [(0.001, 0.01)] * predict.PAIRS
    monkeypatch.setattr(predict.PredictComparison, "_take_turns", lambda *_: pairs)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY.replace("null", "0.2"))
    result = run(small_model, policy)
    assert result.exit_code == 3
    assert "reaches min_speedup 0.2 by a baseline that can't be relied on: the baseline took 50 ms" in result.problem
    assert "--remeasure" in result.problem
    (target,) = result.targets
    assert target.receipt is None
    assert target.bundle is None
    written = json.loads((policy.parent / "out" / "result.json").read_text())
    assert written["targets"][0]["predict_speedup"]["contradiction"] == "the baseline took 50 ms"


@pytest.mark.slow
def test_what_is_published_holds_no_speedup_over_a_baseline_that_is_contradicted(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the report says that the speedup over the baseline is not known, and the published manifest, which was
    written before predict() was timed, holds it."""
    monkeypatch.setattr(predict, "contradiction", lambda target, found: "the baseline took 50 ms")
    pairs = [(0.012, 0.001)] * predict.PAIRS
    monkeypatch.setattr(predict.PredictComparison, "_take_turns", lambda *_, **__: pairs)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY.replace("null", "0.2"))
    result = run(small_model, policy)
    assert result.exit_code == 0, result.problem
    (target,) = result.targets
    assert target.bundle is not None
    assert target.receipt is not None
    assert target.receipt.digest == target.bundle.digest
    assert not [name for name in target.bundle.metrics if name.startswith("speedup")]
    assert "the original's speed is not known" in target.bundle.summary
    manifest = json.loads((Path(target.bundle.path) / "data" / "manifest.json").read_text())
    assert [one["speedup"] for one in manifest["timing"].values()] == [None]
    (check,) = [one for one in manifest["verdict"]["checks"] if one["gate"]["metric"] == "speedup"]
    assert (check["outcome"], check["measured"]) == ("pass", 12.0)
    assert check["reason"].startswith("through predict() of 1 row it is 12 times as fast as the original")
    assert refuse_published(manifest, date(2026, 11, 30)) is None
    written = json.loads((policy.parent / "out" / "result.json").read_text())
    (candidate,) = written["targets"][0]["candidates"]
    assert [one["speedup"] for one in candidate["timing"]["by_batch"].values()] == [None]


def test_the_code_of_a_model_does_not_run_for_a_figure(small_model: Path, write_policy: Write, tmp_path: Path) -> None:
    """Broken: a loader that somebody wrote into MLmodel runs, since the report wants its speed; or the run fails for
    that."""
    described = yaml.safe_load((small_model / "MLmodel").read_text())
    described["flavors"]["python_function"] |= {"loader_module": "evil", "code": "code"}
    (small_model / "MLmodel").write_text(yaml.safe_dump(described))
    (small_model / "code").mkdir()
    (small_model / "code" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    result = run(small_model, policy, publish=False)
    assert result.exit_code == 0, result.problem
    found = result.targets[0].predict_speedup
    assert found is not None
    assert found.speedup is None
    assert "its pyfunc is loaded by evil, which is not MLflow's own for onnx" in found.reason
    assert not (tmp_path / "ran").exists()
    assert f"through predict() not measured: {found.reason}" in (tmp_path / "out" / "report.md").read_text()
