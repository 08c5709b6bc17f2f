"""What lower precision costs is seen, and said: a trained network that int8 breaks, and one that dynamic int8 makes slower."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.core.records import Candidate, Outcome, RunResult

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

EXAMPLES = Path(__file__).parents[2] / "examples"

# Trains the network of examples/digits_cnn.py, and makes of it a second one that computes the same function with four loud channels: their activations
# are 1000 times as large, the weights that read them as small. Per-tensor int8 has no steps left for the quiet ones. Between stands a Clip whose limit is
# never reached, not a ReLU: through a ReLU the lowering moves the factors back where they came from, and int8 holds its tolerance.
TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import mlflow, numpy as np, onnx, torch
from digits_cnn import load_data, train

train_x, train_y, test_x, test_y = load_data()
np.savez("validation.npz", image=test_x, y=test_y)
np.savez("calibration.npz", image=train_x[:300], y=train_y[:300])
model = train(train_x, train_y, epochs=2)

def save(name):
    program = torch.onnx.export(
        model, (torch.from_numpy(test_x[:2]),), dynamo=True, input_names=["image"], output_names=["logits"],
        dynamic_shapes={"image": {0: torch.export.Dim("batch")}}, verbose=False,
    )
    mlflow.onnx.save_model(program.model_proto, name, pip_requirements=["onnx"])

save("even")
with torch.no_grad():
    model.features[1].weight[:4] *= 1000
    model.features[1].bias[:4] *= 1000
    model.features[3].weight[:, :4] /= 1000
model.features[2] = torch.nn.Hardtanh(0.0, 1e9)
save("loud")
"""

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: gates
owner: tests
data:
  validation: {source: "file:validation.npz", labels: y, max_samples: 256}
  calibration: {source: "file:calibration.npz", labels: y, max_samples: 128}
targets:
  cpu: {device: cpu, backends: [onnxruntime], precisions: [int8, int8-dynamic], batch_sizes: [8], threads: 1}
budget: {measure_seconds: 1}
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both networks as MLflow models, their data and a policy."""
    folder = tmp_path_factory.mktemp("digits")
    made = subprocess.run(
        [sys.executable, "-c", TRAIN, str(EXAMPLES)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    (folder / "policy.yaml").write_text(POLICY)
    return folder


def run(digits: Path, model: str, out: Path, *sets: str) -> RunResult:
    return api.run(f"folder:{digits / model}", digits / "policy.yaml", sets=sets, out=out, publish=False)


def of(result: RunResult, precision: str) -> list[Candidate]:
    return [c for t in result.targets for c in t.candidates if c.job.scheme.precision == precision]


def test_int8_that_misses_its_tolerance_never_wins_and_the_report_says_by_how_much(
    digits: Path, tmp_path: Path
) -> None:
    """Broken: a network that int8 ruins would be shipped, or nobody would learn what was wrong with it."""
    alone = ("performance.min_speedup=null", "fallback.mixed_precision=false")  # a search would mend it
    result = run(digits, "loud", tmp_path / "out", "tolerances.fp32=null", *alone)
    assert result.exit_code == 3
    assert result.targets[0].selection.winner is None
    static = of(result, "int8")
    assert static
    report = html.unescape((tmp_path / "out" / "report.md").read_text())
    assert "256 real samples of `file:" in report
    for candidate in static:
        assert candidate.verdict is not None, candidate.failure
        failed = [c for c in candidate.verdict.checks if c.outcome is Outcome.FAIL]
        assert failed, candidate.job.id
        for check in failed:
            assert check.measured is not None
            assert check.samples == 256
        reason = result.targets[0].selection.reasons[candidate.job.id]
        assert failed[0].gate.metric in reason
        assert f"{failed[0].gate.limit:g}" in reason
        assert "over 256 samples" in reason
        assert reason in report

    safe = run(digits, "loud", tmp_path / "safe", *alone)
    assert safe.exit_code == 0
    assert safe.targets[0].selection.winner == of(safe, "fp32")[0].job.id


def test_dynamic_int8_of_a_small_conv_net_is_rejected_as_slower(digits: Path, tmp_path: Path) -> None:
    """Broken: what is right but slower would be shipped. ONNX Runtime's integer convolution takes about five times as long as its float one here."""
    result = run(digits, "even", tmp_path / "out", "targets.cpu.precisions=[int8-dynamic]", "tolerances.fp32=null")
    (dynamic,) = of(result, "int8-dynamic")
    assert dynamic.verdict is not None, dynamic.failure
    failed = [c for c in dynamic.verdict.checks if c.outcome is Outcome.FAIL]
    assert [c.gate.metric for c in failed] == ["speedup"], [c.reason for c in failed]
    assert "slower than the baseline" in result.targets[0].selection.reasons[dynamic.job.id]
    assert result.exit_code == 3
