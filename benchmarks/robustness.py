"""How many times its tolerance an honest int8 network uses on samples that were made of the policy's.

    python benchmarks/robustness.py                          # eight networks, about half an hour on two cores
    python benchmarks/robustness.py lstm vit
    python benchmarks/robustness.py --onnx minilm model.onnx samples.npz    # your own: arrays by input

Each network goes through the whole stage with the shipped tolerances: exported, lowered by every int8 scheme of ONNX
Runtime and of OpenVINO, compiled, validated. Reported is each `robustness` check: the kind of samples, the times of its
tolerance that the gate which used most used there, and whether the candidate held its tolerances on the validation set.
The limit is `data.robustness.factor`. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import types
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.modules.setdefault("candidate", types.SimpleNamespace(register=None))  # examples/models.py registers; here nothing

import mlflow  # noqa: E402
import networks  # noqa: E402
import onnx  # noqa: E402
import results  # noqa: E402

from compile_stage import api  # noqa: E402
from compile_stage.core.records import Candidate  # noqa: E402

NETWORKS = ("digits", "digits-wild", "small", "separable", "lstm", "vit", "bert6", "resnet50")
VALIDATION, CALIBRATION = 64, 32
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: robustness
data:
  validation: {{source: "file:{folder}/validation.npz"}}
  calibration: {{source: "file:{folder}/calibration.npz"}}
targets:
  cpu: {{backends: [onnxruntime, openvino], precisions: [int8, fp32], batch_sizes: [4], threads: 2}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.1, soak_seconds: 0.1}}
fallback: {{mixed_precision: false}}
"""


def rows_of(name: str, candidate: Candidate) -> list[dict[str, object]]:
    """One for each kind of samples."""
    checks = candidate.verdict.checks if candidate.verdict is not None else ()
    own = [check for check in checks if check.gate.metric != "robustness"]
    held = all(check.outcome == "pass" for check in own)
    missed = next((check.reason for check in own if check.outcome != "pass"), "")
    return [
        {
            "network": name,
            "backend": candidate.job.backend,
            "scheme": candidate.job.scheme.name,
            "samples": check.gate.options["samples"],
            "times_its_tolerance": None if check.measured is None else round(check.measured, 3),
            "holds_on_validation": held,
            "missed": missed,
            "reason": check.reason,
        }
        for check in checks
        if check.gate.metric == "robustness"
    ]


def measure(name: str, model: onnx.ModelProto, validation: dict, calibration: dict, folder: Path) -> list[dict]:
    mlflow.onnx.save_model(model, str(folder / "model"), pip_requirements=["onnx"])
    np.savez(folder / "validation.npz", **validation)
    np.savez(folder / "calibration.npz", **calibration)
    (folder / "policy.yaml").write_text(POLICY.format(folder=folder))
    result = api.run(f"folder:{folder / 'model'}", folder / "policy.yaml", out=folder / "out", publish=False)
    found: list[dict] = []
    for candidate in [candidate for target in result.targets for candidate in target.candidates]:
        rows = rows_of(name, candidate)
        if not rows:
            print(f"{name} {candidate.job.backend} {candidate.job.scheme.name}: {candidate.reason}", flush=True)
        found += rows
    for row in found:
        held = "held" if row["holds_on_validation"] else f"missed: {row['missed']}"
        cells = (name, f"{row['backend']} {row['scheme']}", row["samples"], row["times_its_tolerance"], held)
        print(" | ".join(map(str, (*cells, row["reason"]))), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all of them")
    parser.add_argument(
        "--onnx", nargs=3, action="append", default=[], metavar=("NAME", "MODEL", "SAMPLES"),
        help="a model and samples of your own; the first half validates, the second calibrates",
    )  # fmt: skip
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("robustness", chosen.save) as record:
        record.settings |= {"validation_samples": VALIDATION, "calibration_samples": CALIBRATION}
        for name in chosen.networks or ([] if chosen.onnx else NETWORKS):
            with tempfile.TemporaryDirectory() as scratch:
                drawn = (networks.samples(name, count, seed) for count, seed in ((VALIDATION, 1), (CALIBRATION, 2)))
                record.rows += measure(name, networks.export(name), *drawn, Path(scratch))
        for name, model, samples in chosen.onnx:
            arrays = dict(np.load(samples))
            half = len(next(iter(arrays.values()))) // 2
            parts = ({key: a[:half] for key, a in arrays.items()}, {key: a[half:] for key, a in arrays.items()})
            with tempfile.TemporaryDirectory() as scratch:
                record.rows += measure(name, onnx.load(model), *parts, Path(scratch))


if __name__ == "__main__":
    main()
