"""The original runs on the device that its artifacts run on, or there is no speedup. The accelerator is a fake: a
source and backends that say that they run on `rocm`, which no machine of the tests has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.engine.local import LocalWorker

pytestmark = [
    pytest.mark.usefixtures("fake_backends"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

FAST = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}\n"
    "fallback: {mixed_precision: false}"
)
Write = Callable[..., Path]


@pytest.fixture
def accelerated_model(small_model: Path) -> Path:
    """The small network, of a flavor whose source runs on the accelerator too."""
    described = small_model / "MLmodel"
    described.write_text(described.read_text().replace("\n  onnx:\n", "\n  fake-onnx:\n"))
    assert "fake-onnx:" in described.read_text()
    return small_model


def policy_for(write_policy: Write, backend: str, device: str = "rocm") -> Path:
    path = write_policy(f"backends: [{backend}], precisions: [fp32]", FAST)
    path.write_text(path.read_text().replace("device: cpu, threads: 1", f"device: {device}, threads: 1"))
    return path


@pytest.mark.slow
def test_the_original_is_opened_on_the_targets_device_to_predict_and_to_be_measured(
    accelerated_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the headline of a GPU target would be a speedup over a CPU."""
    opened: list[tuple[str, int]] = []
    call = LocalWorker.call

    def recorded(self: LocalWorker, function: str, /, **arguments: Any) -> Any:
        if function == "open_source":
            opened.append((arguments["target"].device, arguments["target"].threads))
        return call(self, function, **arguments)

    monkeypatch.setattr(LocalWorker, "call", recorded)
    uri = f"folder:{accelerated_model}"
    policy = policy_for(write_policy, "fake-accelerated")
    plan = api.plan(uri, policy)
    assert (plan.exit_code, plan.refused) == (0, ())
    assert opened == [("rocm", 1)]  # a plan would refuse what has no such device
    result = api.run(uri, policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == 0
    winner = result.targets[0].winner
    assert winner is not None
    assert winner.measurement is not None
    assert winner.measurement.timings[0].speedup is not None
    assert len(opened) >= 3  # plan, outputs, each start of the measurement
    assert set(opened) == {("rocm", 1)}

    opened.clear()
    on_cpu = policy_for(write_policy, "onnxruntime", device="cpu")
    assert api.run(uri, on_cpu, out=tmp_path / "out", publish=False).exit_code == 0
    assert set(opened) == {("cpu", 1)}  # nothing of the other device came from the cache


def test_a_source_that_can_not_be_moved_is_refused_by_plan_and_run(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: as above; or only the end of a run would say that nothing can be compared."""
    policy = policy_for(write_policy, "fake-accelerated")
    plan = api.plan(f"folder:{small_model}", policy)
    assert not plan.jobs
    (refusal,) = plan.refused
    assert refusal.reason == (
        "a speedup on rocm over a baseline on the CPU would be no comparison: models of flavor onnx run on cpu and "
        "cuda only; set the target's device to cpu or cuda"
    )
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == plan.exit_code != 0
    assert refusal.reason in result.targets[0].selection.reason


def test_what_is_cross_compiled_and_turns_out_to_run_here_is_refused_without_a_baseline(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a backend that cross-compiles would be the way around the refusal; its artifacts for other machines need
    no baseline."""
    result = api.run(
        f"folder:{small_model}", policy_for(write_policy, "fake-accelerated-cross"), out=tmp_path / "out", publish=False
    )
    assert result.exit_code == 3
    (candidate,) = result.targets[0].candidates
    assert candidate.artifact is not None
    assert candidate.state == "refused"
    assert "over a baseline on the CPU would be no comparison" in candidate.reason
    assert candidate.measurement is None
