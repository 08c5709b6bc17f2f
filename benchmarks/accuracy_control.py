"""What it takes to hold a tolerance: the stage's precision search beside NNCF's accuracy control.

    python benchmarks/accuracy_control.py                          # five networks, about ten minutes on two cores
    python benchmarks/accuracy_control.py separable:50 --seconds 10

Each network comes with a gate: `38`, the smallest signal-to-noise ratio of a sample against FP32, in dB, over 32
samples; or `1%`, the largest loss of accuracy, over the labelled samples of a network that was trained (digits,
digits-wild). NNCF's `quantize_with_accuracy_control` gets the same samples for calibration and for validation, and a
validation function that computes that measure; the stage gets a policy with that gate and OpenVINO as its one backend.
A gate on accuracy must hold at the worse end of the stage's interval; NNCF compares the mean. Reported are: evaluations
(calls of NNCF's validation function over the samples; validations by the stage, its safe floor among them), the wall
time until the artifact is proven (the stage's with its workers, until it begins to measure those that passed), and the
latency of both results over FP32's in turns in one process, batch 1, two threads, each in the precision that it was
made for. NNCF knows no budget: it is stopped after `--nncf-minutes`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import int8 as nets  # noqa: E402
import openvino  # noqa: E402
import results  # noqa: E402
from turns import in_turns  # noqa: E402

from compile_stage import api  # noqa: E402

CEILING_DB = 200.0  # for an exact output, so that a drop from it is a number

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: accuracy-control
owner: benchmarks
data:
  validation: {{source: "file:{validation}", max_samples: {count}{labels}}}
  calibration: {{source: "file:{calibration}", max_samples: {calibrated}}}
  min_samples: {calibrated}
targets:
  cpu: {{device: cpu, backends: [openvino], precisions: [int8, bf16, fp32], batch_sizes: [1], threads: 2}}
tolerances: {{int8: {gate}, bf16: {gate}}}
performance: {{min_speedup: 0.01}}
budget: {{measure_seconds: 2, minutes: 20}}
"""


@dataclass(frozen=True)
class Task:
    """A network with what it is judged by.

    Attributes:
        batches: To validate with, each of one sample.
        truth: What is right for each: FP32's outputs, or labels.
        drop: How far below FP32's own measure a result may lie.
    """

    batches: list[dict]
    truth: list[np.ndarray]
    labelled: bool
    drop: float

    def score(self, output: np.ndarray, right: np.ndarray) -> float:
        """Of one sample: 1 or 0 for a label, dB otherwise."""
        if self.labelled:
            return float(output.argmax() == right)
        noise = float(np.sum((output.astype(np.float64) - right) ** 2))
        signal = float(np.sum(right.astype(np.float64) ** 2))
        return min(CEILING_DB, float(10 * np.log10(signal / noise))) if noise else CEILING_DB

    def measure(self, run: nets.Run, chosen: list[int]) -> tuple[float, list[float]]:
        """The network's measure over some samples, and each sample's own."""
        scores = [self.score(run(self.batches[index]), self.truth[index]) for index in chosen]
        return (float(np.mean(scores)) if self.labelled else min(scores)), scores

    def words(self, run: nets.Run) -> str:
        measured, _ = self.measure(run, list(range(len(self.batches))))
        return f"{measured:.2%}" if self.labelled else f"{measured:.1f} dB"


def task_of(name: str, gate: str, fp32: nets.Run, folder: Path) -> tuple[Task, str]:
    """The task, and the policy that asks the same of the stage."""
    calibration = nets.networks.samples(name, nets.CALIBRATION, 2)
    np.savez(folder / "calibration.npz", **calibration)
    if labelled := gate.endswith("%"):
        *_, images, labels = nets.networks.digits.data()
        drop, samples, truth = float(gate[:-1]) / 100, {"input": images}, list(labels)
        np.savez(folder / "validation.npz", input=images, y=labels)
    else:
        drop, samples = CEILING_DB - float(gate), calibration
        truth = [fp32(nets.one(samples, index)) for index in range(nets.CALIBRATION)]
        np.savez(folder / "validation.npz", **samples)
    count = len(truth)
    policy = POLICY.format(
        validation=folder / "validation.npz", calibration=folder / "calibration.npz", count=count,
        calibrated=nets.CALIBRATION, labels=", labels: y" if labelled else "",
        gate=f"{{accuracy: {drop}}}" if labelled else f"{{snr_db: {gate}}}",
    )  # fmt: skip
    return Task([nets.one(samples, index) for index in range(count)], truth, labelled, drop), policy


class _LateError(Exception):
    pass


def by_nncf(name: str, path: str, task: Task, minutes: float, into: Path) -> tuple[Path | None, int, float]:
    """NNCF's result (None where it was stopped), how often it evaluated, and the seconds that it took."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    began, evaluations = time.monotonic(), 0
    graph = openvino.Core().read_model(path)
    places = {id(batch): index for index, batch in enumerate(task.batches)}

    def validate(compiled: openvino.CompiledModel, data: Iterable[dict]) -> tuple[float, list[float]]:
        nonlocal evaluations
        asked = list(data)  # it counts what is taken from it
        request = compiled.create_infer_request()

        def run(batch: dict) -> np.ndarray:
            request.infer(list(batch.values()))
            return request.output_tensors[0].data.copy()

        evaluations += 1
        if time.monotonic() - began > minutes * 60:
            raise _LateError
        return task.measure(run, [places[id(batch)] for batch in asked])

    calibration = nets.networks.samples(name, nets.CALIBRATION, 2)
    try:
        tuned = nncf.quantize_with_accuracy_control(
            graph,
            nncf.Dataset([nets.one(calibration, index) for index in range(nets.CALIBRATION)]),
            nncf.Dataset(task.batches),
            validation_fn=validate,
            max_drop=task.drop,
            drop_type=nncf.DropType.ABSOLUTE,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=nets.CALIBRATION,
            model_type=nncf.ModelType.TRANSFORMER if name == "bert6" else None,
        )
    except _LateError:
        return None, evaluations, time.monotonic() - began
    openvino.save_model(tuned, str(into / "nncf.xml"), compress_to_fp16=False)
    return into / "nncf.xml", evaluations, time.monotonic() - began


def by_stage(path: str, asked: str, into: Path) -> tuple[Path, str, str, int, float]:
    """The stage's winner, the precision that it runs in as OpenVINO calls it, its scheme, how often the stage
    validated, and the seconds until all proofs."""
    import mlflow
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.onnx.save_model(onnx.load(path), str(into / "net"), pip_requirements=["onnx"])
    policy = into / "policy.yaml"
    policy.write_text(asked)
    result = api.run(f"folder:{into / 'net'}", policy, out=into / "out", publish=False)
    proven_s = min(event.started_s for event in result.events if event.step == "benchmark")  # since the run began
    (target,) = result.targets
    won = target.selection.winner
    (winner,) = (candidate for candidate in target.candidates if candidate.job.id == won)
    trials = sum(len(candidate.trials) for candidate in target.candidates)
    validations = trials + sum(candidate.verdict is not None for candidate in target.candidates)
    kept = sum(map(len, winner.portable.kept.values()))
    scheme = f"{winner.job.scheme.name}, {kept} kept" if kept else winner.job.scheme.name
    artifact = winner.artifact
    return Path(artifact.path) / artifact.entry, artifact.options["hint"], scheme, validations, proven_s


def compare(name: str, gate: str, seconds: float, minutes: float, folder: Path) -> list[dict[str, object]]:
    """A row for each of FP32, NNCF and the stage."""
    model, _ = nets.export(name, folder / "model")
    example = nets.one(nets.networks.samples(name, 1, 2), 0)
    fp32 = nets.on_openvino(Path(model.path), example)
    task, policy = task_of(name, gate, fp32, folder)
    peer, their_evaluations, their_s = by_nncf(name, model.path, task, minutes, folder)
    mine, hint, scheme, evaluations, seconds_taken = by_stage(model.path, policy, folder)
    runs = {"FP32": fp32, "stage": nets.on_openvino(mine, example, hint=hint)}
    if peer is not None:
        runs["NNCF"] = nets.on_openvino(peer, example)
    times = in_turns(runs, example, seconds)
    asked = f"at most {gate} of accuracy lost" if task.labelled else f"at least {gate} dB"
    print(
        f"\n| {name}, {asked} | evaluations | s to the proof | reached | latency over FP32's |\n|---|---|---|---|---|"
    )
    rows = {
        "FP32": ("FP32", "", ""),
        "NNCF accuracy control": ("NNCF", str(their_evaluations), f"{their_s:.0f}"),
        f"stage ({scheme})": ("stage", str(evaluations), f"{seconds_taken:.0f}"),
    }
    figures: list[dict[str, object]] = []
    for label, (key, evaluated, took) in rows.items():
        if key not in runs:
            print(f"| {label} | {evaluated}, stopped | {took} | not reached | |")
            figures.append({**row_of(key, evaluated, took), "stopped": True, "reached": "not reached"})
            continue
        ratio = statistics.median(own / other for own, other in zip(times[key], times["FP32"], strict=True))
        print(f"| {label} | {evaluated} | {took} | {task.words(runs[key])} | {ratio:.2f} |", flush=True)
        figures.append({**row_of(key, evaluated, took), "stopped": False, "reached": task.words(runs[key])})
        figures[-1] |= {"latency_over_fp32": round(ratio, 3)} | ({"scheme": scheme} if key == "stage" else {})
    asked_for = f"{gate.rstrip('%')} % of accuracy" if task.labelled else f"{gate} dB"
    return [{"network": name, "gate": asked_for, **figure} for figure in figures if figure["by"] != "FP32"]


def row_of(by: str, evaluated: str, took: str) -> dict[str, object]:
    """The figures that both a finished and a stopped search have; FP32 has none."""
    return {"by": by, "evaluations": int(evaluated or 0), "seconds": float(took or 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "networks",
        nargs="*",
        default=["resnet50:38", "bert6:42", "separable:50", "digits:1%", "digits-wild:1%"],
        metavar="NAME:GATE",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of taking turns, a network")
    parser.add_argument("--nncf-minutes", type=float, default=5.0, help="after which NNCF is stopped, a network")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("accuracy-control", chosen.save) as record:
        record.settings |= {"batch": 1, "threads": nets.THREADS, "backend": "openvino", "seconds": chosen.seconds}
        for word in chosen.networks:
            name, _, gate = word.partition(":")
            with tempfile.TemporaryDirectory() as scratch:
                os.environ["COMPILE_STAGE_CACHE"] = f"{scratch}/cache"
                record.rows += compare(name, gate, chosen.seconds, chosen.nncf_minutes, Path(scratch))


if __name__ == "__main__":
    main()
