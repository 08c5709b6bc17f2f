"""A fresh machine on the same registry starts from what another measured: whole runs, with the real TVM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.backends.tvm import Tvm
from compile_stage.core import plugins
from compile_stage.core.records import Artifact

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
    pytest.mark.skipif(plugins.missing(Tvm()) is not None, reason=plugins.missing(Tvm()) or "Apache TVM is installed"),
]


def matmul(seed: int, layers: int) -> Any:
    """x [batch, 8] → y [batch, 8]: layers of one shape, so that all models of it have one workload."""
    from onnx import TensorProto, helper, numpy_helper

    rng, nodes, weights = np.random.default_rng(seed), [], []
    for at in range(layers):
        weights.append(numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), f"w{at}"))
        nodes.append(helper.make_node("MatMul", [f"h{at}" if at else "x", f"w{at}"], [f"m{at}"]))
        nodes.append(helper.make_node("Relu", [f"m{at}"], ["y" if at == layers - 1 else f"h{at + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(params=["mlflow", "folder"])
def registered(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Any], str]:
    """Put a model into the registry; returns its URI."""
    import mlflow

    def register(name: str, model: Any) -> str:
        if request.param == "folder":
            folder = tmp_path / "registry" / name / "1" / "model"
            mlflow.onnx.save_model(model, str(folder), pip_requirements=["onnx"])
            return f"folder:{folder.parent}"
        mlflow.onnx.log_model(model, name=name, registered_model_name=name, pip_requirements=["onnx"])
        return f"models:/{name}/1"

    return register


def test_a_fresh_machine_makes_no_trial_again_not_even_for_another_model(
    registered: Callable[[str, Any], str],
    small_model: Path,  # for its data
    write_policy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Broken: each CI machine would tune from nothing, and each model pay for the operators that all of them have."""
    monkeypatch.chdir(tmp_path)
    first, second = registered("first", matmul(1, 1)), registered("second", matmul(2, 2))
    policy = write_policy(
        "backends: [tvm], precisions: [fp32], batch_sizes: [1]",
        "performance: {min_speedup: null}\n"
        "budget: {measure_seconds: 0.5, soak_seconds: 0.2, tuning_trials: 4, predict_seconds: 0}",
    )

    def run(machine: str, uri: str, publish: bool = True) -> tuple[Artifact, tuple[str, ...], Path]:
        monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / machine))
        out = tmp_path / f"out-{machine}"
        result = api.run(uri, policy, out=out, publish=publish)
        assert result.exit_code == 0, result.problem
        (candidate,) = result.targets[0].candidates
        assert candidate.artifact is not None
        return candidate.artifact, result.notes, out

    tuned, notes, _ = run("one", first, publish=False)
    assert tuned.executed["tuning"]["trials"] == 4
    assert not [note for note in notes if "tuning records" in note], "--no-publish writes nothing"
    # Published now, from the step cache; what was measured before goes along.
    again, notes, _ = run("one", first)
    assert again.digest == tuned.digest
    assert [note for note in notes if note.startswith("tuning records added to the registry: 1")]

    fresh, notes, out = run("two", first)
    assert fresh.executed["tuning"] == {**tuned.executed["tuning"], "trials": 0}
    assert fresh.digest == tuned.digest, "the same records make the same kernels"
    assert [note for note in notes if note.startswith("tuning records taken from the registry: 1")]
    manifest = json.loads(next(out.rglob("manifest.json")).read_text())
    pinned = manifest["artifact"]["executed"]["tuning"]["records_digest"]
    assert pinned == tuned.executed["tuning"]["records_digest"]

    other, _, _ = run("three", second)
    assert other.executed["tuning"] == {**tuned.executed["tuning"], "trials": 0, "tuned": 2}
