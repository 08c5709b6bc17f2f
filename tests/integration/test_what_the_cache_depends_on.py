"""What changes an answer must be part of its key: a cache hit across it would be a wrong verdict."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.records import Check, Gate, Measurement, Outcome, RunResult, Timing
from compile_stage.sources.onnx import OnnxSource
from compile_stage.steps.benchmark import _left_open

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# Whether a short measurement settles depends on the machine, and one that did not is made anew; so nothing is asked of
# its speed here.
FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}"


def made_anew(result: RunResult) -> set[str]:
    """The steps that did not come from the cache."""
    assert result.exit_code == 0, result.problem
    return {event.step for event in result.events if not event.cached} - {"resolve", "package"}


@pytest.mark.slow
def test_an_upgrade_of_the_original_framework_is_measured_again(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: speed-ups over a PyTorch that is not installed any more would be published; or another Python's results
    found."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)

    def run() -> set[str]:
        return made_anew(api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False))

    assert "benchmark" in run()
    assert run() == set()
    with monkeypatch.context() as upgraded:
        upgraded.setattr(OnnxSource, "packages", lambda self: {"onnxruntime": "99.0"})
        # What was exported has the same bytes, so it is compiled the same, and proven and measured against the new
        # original.
        assert {"inspect", "export", "reference", "benchmark"} <= run()
    monkeypatch.setattr("compile_stage.core.context.python_version", lambda: "9.9.9")
    assert {"compile", "validate", "benchmark"} <= run()


@pytest.mark.usefixtures("known_run")
def test_the_same_weights_with_another_signature_are_read_anew(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: a model that was logged again with other columns would be published with the answers of the first."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    described = yaml.safe_load((small_model / "MLmodel").read_text())
    described["model_uuid"] = "another"
    described["utc_time_created"] = "2030-01-01 00:00:00"
    (small_model / "MLmodel").write_text(yaml.safe_dump(described))
    again = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert made_anew(again) == set()  # ids and times are not the model
    tensor = '[{"type": "tensor", "name": "%s", "tensor-spec": {"dtype": "float32", "shape": [-1, %d]}}]'
    outputs = '[{"type": "tensor", "name": "y", "tensor-spec": {"dtype": "float32", "shape": [-1, 4]}}]'
    described["signature"] = {"inputs": tensor % ("x", 8), "outputs": outputs, "params": None}
    (small_model / "MLmodel").write_text(yaml.safe_dump(described))
    other = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert {"inspect", "export"} <= made_anew(other)


@pytest.mark.slow
def test_an_edit_of_a_third_party_plug_in_or_of_an_own_metric_is_seen(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the author of a backend, or of a metric, would be shown the verdict of the code before the edit."""
    installed = tmp_path / "installed"
    shutil.copytree(Path(__file__).parents[1] / "fake_backends", installed)
    metric = installed / "own_metric.py"
    metric.write_text("def distance(candidate, baseline, labels):\n    return 0.0\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        plugins.refresh()
        sys.modules.pop("own_metric", None)

    policy = write_policy(
        "backends: [fake-slow], precisions: [fp32]",
        FAST + '\ntolerances: {fp32: {"python:own_metric:distance": {limit: 0.5, direction: at_most}}}',
    )

    def run() -> RunResult:
        forget()
        return api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)

    try:
        assert "compile" in made_anew(run())
        assert made_anew(run()) == {"validate"}  # an own metric is asked each time
        code = installed / "fake_backends.py"
        code.write_text(code.read_text() + "\n# an edit\n")
        assert {"compile", "validate", "benchmark"} <= made_anew(run())
        metric.write_text("def distance(candidate, baseline, labels):\n    return 1.0\n")
        assert run().exit_code == 3
    finally:
        forget()


@pytest.mark.slow
def test_a_measurement_that_decided_nothing_is_made_three_times(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a candidate that a noisy minute kept from passing is rejected from the cache at once, or one that is just
    beyond a limit is measured until it passes."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    monkeypatch.setattr("compile_stage.steps.benchmark._left_open", lambda check, measured: True)

    def run() -> set[str]:
        sets = ["performance.min_speedup=0.001"]
        return made_anew(api.run(f"folder:{small_model}", policy, sets=sets, out=tmp_path / "out", publish=False))

    run()
    assert [run() for _ in range(3)] == [{"benchmark"}, {"benchmark"}, set()]


@pytest.mark.parametrize(
    ("outcome", "interval", "stable", "left_open"),
    [
        (Outcome.FAIL, (0.9, 1.3), False, True),  # it may be fast enough
        (Outcome.FAIL, (0.2, 0.4), False, False),  # however noisy, it is slower
        (Outcome.FAIL, (0.97, 1.0), True, False),
        (Outcome.PASS, (1.5, 3.0), False, False),
        (Outcome.FAIL, None, False, True),  # a percentile on a noisy machine
    ],
)
def test_what_noise_leaves_open(
    outcome: Outcome, interval: tuple[float, float] | None, stable: bool, left_open: bool
) -> None:
    """Broken: what is plainly too slow would be measured again in every run, or what may pass in none."""
    gate = Gate(metric="speedup", limit=1.0, direction="at_least")
    check = Check(gate=gate, outcome=outcome, measured=1.0, reason="", batch_size=1, interval=interval)
    known = (0.99, 1.01) if stable else (0.8, 1.2)
    timing = Timing(latency_s=(0.1,), batch_size=1, stable=stable, environment="x", speedup=1.0, speedup_interval=known)
    assert _left_open(check, Measurement(timings=(timing,), load_s=0.1, peak_memory_bytes=1)) is left_open
