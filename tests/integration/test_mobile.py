"""ONNX Runtime's `.ort` files through the whole stage: proven and served on this machine's CPU, published without a
proof for a phone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compile_stage import api, flavor
from compile_stage.core.errors import GateError
from compile_stage.core.plugins import registry_for

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}\n"
    'promote: {alias: "{target}-prod"}'
)
Write = Callable[..., Path]


@pytest.mark.slow
def test_an_ort_file_is_proven_measured_promoted_and_served(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: the format would be compiled and never judged, or published without what it needs to load."""
    options = "options: {onnxruntime: {format: ort}}"
    policy = write_policy(f"backends: [onnxruntime], precisions: [fp32], {options}", BODY)
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    assert result.exit_code == 0, result.problem
    (target,) = result.targets
    assert [(c.job.scheme.precision, c.verdict is not None, c.measurement is not None) for c in target.candidates] == [
        ("fp32", True, True)
    ]
    assert target.receipt is not None
    assert target.receipt.promoted_to == "cpu-prod"
    published = registry_for(target.receipt.uri).fetch(target.receipt.uri, tmp_path / "published")
    assert list(published.rglob("model.ort"))
    with np.load(tmp_path / "data.npz") as data, flavor.load_model(str(published)) as model:
        answer = model.run({"x": data["x"][:5]})
    assert answer["y"].shape == (5, 4)


@pytest.mark.usefixtures("known_original")
def test_what_a_phone_gets_is_published_as_not_validated_with_the_estimate(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a file that nobody ran would win, or what is known of it would be in no report."""
    options = "options: {onnxruntime: {provider: nnapi}}"
    policy = write_policy(f"backends: [onnxruntime], precisions: [fp32], {options}", BODY)
    policy.write_text(policy.read_text().replace("cpu: {device: cpu", "phone: {device: android"))
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    assert result.exit_code == 3
    (draft,) = result.targets[0].unvalidated
    assert draft.receipt is not None
    with pytest.raises(GateError, match="no validation is attached"):
        api.promote(draft.receipt.uri, "phone-prod")
    (candidate,) = json.loads((tmp_path / "out" / "result.json").read_text())["targets"][0]["candidates"]
    assert candidate["state"] == "compiled_not_validated"
    assert candidate["executed"]["estimate"]["share"] == 1
    assert any("would take an estimated 4 of 4 nodes (100 %) in 1 part" in note for note in candidate["notes"])
    assert "would take an estimated 4 of 4 nodes" in (tmp_path / "out" / "report.html").read_text()
    published = registry_for(draft.receipt.uri).fetch(draft.receipt.uri, tmp_path / "published")
    assert list(published.rglob("required_operators.config"))
