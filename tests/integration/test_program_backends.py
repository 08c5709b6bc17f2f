"""Backends that start from a PyTorch program, beside one that starts from the graph, in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.records import Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's and PyTorch's own deprecations are not what is tested here
]

FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}"


@pytest.fixture
def torch_model(tmp_path: Path) -> Path:
    """An MLflow model directory with a PyTorch network of two inputs: a, b [batch, 8] → y [batch, 4]."""
    torch = pytest.importorskip("torch", reason="the PyTorch source needs torch")
    import mlflow

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 64), torch.nn.Linear(64, 4)

        def forward(self, a: Any, b: Any) -> Any:
            return self.second(torch.relu(self.first(a - 2 * b)))

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    data = {name: random.standard_normal((64, 8)).astype(np.float32) for name in ("a", "b")}
    example = {name: array[:2] for name, array in data.items()}
    signature = mlflow.models.infer_signature(example, np.zeros((2, 4), np.float32))
    folder = tmp_path / "torch-net"
    mlflow.pytorch.save_model(
        Net().eval(),
        str(folder),
        input_example=list(example.values()),
        signature=signature,
        serialization_format="pt2",
        pip_requirements=["torch"],
    )
    np.savez(tmp_path / "data.npz", **data)
    return folder


def test_a_network_that_has_no_onnx_is_compiled_by_who_starts_from_its_program(
    write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: one operator that PyTorch's ONNX exporter lacks refuses the whole run, though a backend of the policy
    needs no ONNX; or batches that nobody has shown to be right are answered in parts."""
    torch = pytest.importorskip("torch", reason="the PyTorch source needs torch")
    import mlflow

    from compile_stage import flavor
    from compile_stage.core.errors import UsageError

    class Net(torch.nn.Module):  # type: ignore[misc]
        def forward(self, a: Any, b: Any) -> Any:
            return torch.linalg.matrix_exp((a - 2 * b).unflatten(1, (2, 2, 2))).flatten(1)

    random = np.random.default_rng(0)
    data = {name: random.standard_normal((64, 8)).astype(np.float32) / 4 for name in ("a", "b")}
    np.savez(tmp_path / "data.npz", **data)
    example = {name: array[:2] for name, array in data.items()}
    mlflow.pytorch.save_model(
        Net().eval(), str(tmp_path / "net"), input_example=list(example.values()), pip_requirements=["torch"],
        signature=mlflow.models.infer_signature(example, np.zeros((2, 8), np.float32)), serialization_format="pt2",
    )  # fmt: skip
    both = write_policy("backends: [onnxruntime, torchscript], precisions: [fp32], batch_sizes: [1, 4]", FAST)
    result = api.run(f"folder:{tmp_path / 'net'}", both, out=tmp_path / "both")
    assert result.status == "passed", result.problem
    (target,) = result.targets
    assert {each.job.backend: each.state for each in target.candidates} == {
        "onnxruntime": "refused",
        "torchscript": "passed",
    }
    (refused,) = [each for each in target.candidates if each.state == "refused"]
    assert "matrix_exp" in refused.reason
    assert target.bundle is not None
    batch = {name: array[:4] for name, array in data.items()}
    with flavor.load_model(target.bundle.path) as model:
        (answer,) = model.run(batch).values()
        wanted = Net()(*map(torch.from_numpy, batch.values())).numpy()
        np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(UsageError, match="batch"):
            model.run({name: array[:11] for name, array in data.items()})


SLOW = ("executorch", "inductor", "litert", "xla")


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.compilers) for name in SLOW), "torchscript"])
def test_both_forms_compete_and_the_winner_answers_as_the_source(
    name: str, torch_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: a job of one form would be given the other's file, would not be proven against the original, or a
    published program would not load where it is served."""
    from compile_stage import flavor
    from compile_stage.sources.torch import TorchSource

    backend = plugins.load("backends", name)
    if (reason := plugins.missing(backend) or backend.refuse_target(Target(name="cpu"))) is not None:
        pytest.skip(reason)
    if absent := plugins.absent_to_open(backend):
        pytest.skip(f"{name} compiles in its toolchain, and is served here: it needs {', '.join(absent)}")
    uri = f"folder:{torch_model}"
    both = write_policy(f"backends: [onnxruntime, {name}], precisions: [fp32], batch_sizes: [1, 5]", FAST)
    result = api.run(uri, both, out=tmp_path / "both", publish=False)
    (target,) = result.targets
    found = {candidate.job.backend: candidate for candidate in target.candidates}
    assert {key: candidate.job.form for key, candidate in found.items()} == {
        "onnxruntime": "onnx",
        name: "torch-export",
    }
    for candidate in found.values():
        assert candidate.verdict is not None
        assert candidate.verdict.passed, candidate.verdict
    assert target.winner is not None
    losers = [candidate.job.id for candidate in found.values() if candidate != target.winner]
    assert all(target.selection.reasons[job_id] for job_id in losers)

    held = api.plan(uri, both).cached_steps
    assert all("validate" in held[candidate.job.id] for candidate in found.values()), held

    # The artifact comes from the cache now.
    alone = write_policy(f"backends: [{name}], precisions: [fp32], batch_sizes: [1, 5]", FAST)
    result = api.run(uri, alone, out=tmp_path / "alone")
    assert result.status == "passed", result.problem
    (target,) = result.targets
    assert target.bundle is not None
    data = np.load(tmp_path / "data.npz")
    source = result.source
    with flavor.load_model(target.bundle.path) as model, TorchSource().open(source, Target(name="cpu")) as original:
        for count in (1, 5):
            batch = {key: data[key][:count] for key in ("a", "b")}
            (wanted,) = original.run(batch).values()
            (answer,) = model.run(batch).values()
            np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param("inductor", marks=pytest.mark.compilers), "torchscript"])
def test_a_graph_reaches_a_backend_that_starts_from_a_program(
    name: str, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: ONNX models could not be given to these compilers, or would be proven against what onnx2torch made of
    them."""
    import mlflow
    import onnx

    from compile_stage.testing import models

    backend, source = plugins.load("backends", name), plugins.load("sources", "onnx")
    if (reason := plugins.missing(backend) or plugins.missing_for_programs(source)) is not None:
        pytest.skip(reason)
    model, _ = models.conv_net(tmp_path / "kit")
    mlflow.onnx.save_model(onnx.load(model.path), str(tmp_path / "net"), pip_requirements=["onnx"])
    np.savez(tmp_path / "data.npz", image=np.random.default_rng(1).standard_normal((64, 3, 16, 16)).astype(np.float32))
    policy = write_policy(f"backends: [{name}], precisions: [fp32], batch_sizes: [1, 3]", FAST)
    result = api.run(f"folder:{tmp_path / 'net'}", policy, out=tmp_path / "out", publish=False)
    (target,) = result.targets
    assert target.winner is not None, [candidate.failure for candidate in target.candidates]
    assert (target.winner.job.backend, target.winner.job.form) == (name, "torch-export")
    assert target.winner.verdict is not None
    assert target.winner.verdict.passed
