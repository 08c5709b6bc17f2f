"""What it takes to hold a tolerance: the stage's precision search beside NNCF's accuracy control.

    python benchmarks/accuracy_control.py                          # three networks, about ten minutes on two cores
    python benchmarks/accuracy_control.py separable:50 --seconds 10

Each network comes with a gate: the smallest signal-to-noise ratio of a sample, in dB, against FP32 over 32 samples. NNCF's
`quantize_with_accuracy_control` gets the same samples for calibration and for validation, and a validation function that computes that ratio; the stage gets a
policy with that gate and OpenVINO as its one backend. Told are: evaluations (calls of NNCF's validation function over the samples; validations by the stage, its safe floor among them), the wall time
until the artifact is proven (the stage's with its workers, without the final benchmark), and the latency of both results over FP32's in turns in one process, batch 1, two threads. NNCF knows no budget: it is
stopped after `--nncf-minutes`.
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
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import int8 as nets  # noqa: E402
import openvino  # noqa: E402

from compile_stage import api  # noqa: E402

CEILING_DB = 200.0  # said of an exact answer, so that a drop from it is a number

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: accuracy-control
owner: benchmarks
data:
  validation: {{source: "file:{data}", max_samples: {count}}}
  calibration: {{source: "file:{data}", max_samples: {count}}}
  min_samples: {count}
targets:
  cpu: {{device: cpu, backends: [openvino], precisions: [int8, bf16, fp32], batch_sizes: [1], threads: 2}}
tolerances: {{int8: {{snr_db: {gate}}}, bf16: {{snr_db: {gate}}}}}
performance: {{min_speedup: 0.01}}
budget: {{measure_seconds: 2, minutes: 20}}
"""


def smallest_snr_db(run: nets.Run, batches: list[dict], expected: list[np.ndarray]) -> tuple[float, list[float]]:
    found = []
    for batch, right in zip(batches, expected, strict=True):
        noise = float(np.sum((run(batch).astype(np.float64) - right) ** 2))
        signal = float(np.sum(right.astype(np.float64) ** 2))
        found.append(min(CEILING_DB, float(10 * np.log10(signal / noise))) if noise else CEILING_DB)
    return min(found), found


class _LateError(Exception):
    pass


def by_nncf(
    name: str, path: str, batches: list[dict], gate: float, minutes: float, into: Path
) -> tuple[Path | None, int, float]:
    """NNCF's result (None where it was stopped), how often it evaluated, and the seconds that it took."""
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    began, evaluations = time.monotonic(), 0
    graph = openvino.Core().read_model(path)
    expected: list[np.ndarray] = []

    def validate(compiled: openvino.CompiledModel, data: Iterable[dict]) -> tuple[float, list[float]]:
        nonlocal evaluations
        asked = list(data)  # it counts what is taken from it
        request = compiled.create_infer_request()

        def run(batch: dict) -> np.ndarray:
            request.infer(list(batch.values()))
            return request.output_tensors[0].data.copy()

        if not expected:  # it asks of the original first, and of all
            expected.extend(run(batch) for batch in batches)
        evaluations += 1
        if time.monotonic() - began > minutes * 60:
            raise _LateError
        right = {id(batch): answer for batch, answer in zip(batches, expected, strict=True)}
        return smallest_snr_db(run, asked, [right[id(batch)] for batch in asked])

    try:
        tuned = nncf.quantize_with_accuracy_control(
            graph,
            nncf.Dataset(batches),
            nncf.Dataset(batches),
            validation_fn=validate,
            max_drop=CEILING_DB - gate,
            drop_type=nncf.DropType.ABSOLUTE,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(batches),
            model_type=nncf.ModelType.TRANSFORMER if name == "bert6" else None,
        )
    except _LateError:
        return None, evaluations, time.monotonic() - began
    openvino.save_model(tuned, str(into / "nncf.xml"), compress_to_fp16=False)
    return into / "nncf.xml", evaluations, time.monotonic() - began


def by_stage(path: str, data: Path, count: int, gate: float, into: Path) -> tuple[Path, str, int, float]:
    """The stage's winner and its scheme, how often it validated, and the seconds until its proof."""
    import mlflow
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.onnx.save_model(onnx.load(path), str(into / "net"), pip_requirements=["onnx"])
    policy = into / "policy.yaml"
    policy.write_text(POLICY.format(data=data, count=count, gate=gate))
    began = time.monotonic()
    result = api.run(f"folder:{into / 'net'}", policy, out=into / "out", publish=False)
    wall = time.monotonic() - began
    (target,) = result.targets
    won = target.selection.winner
    (winner,) = (candidate for candidate in target.candidates if candidate.job.id == won)
    measured = sum(event.ended_s - event.started_s for event in result.events if event.step == "benchmark")
    trials = sum(len(candidate.trials) for candidate in target.candidates)
    validations = trials + sum(candidate.verdict is not None for candidate in target.candidates)
    kept = sum(map(len, winner.portable.kept.values()))
    scheme = f"{winner.job.scheme.name}, {kept} kept" if kept else winner.job.scheme.name
    return Path(winner.artifact.path) / winner.artifact.entry, scheme, validations, wall - measured


def compare(name: str, gate: float, seconds: float, minutes: float, folder: Path) -> None:
    model, _ = nets.export(name, folder / "model")
    count = nets.CALIBRATION
    stacked = nets.networks.samples(name, count, 2)
    batches = [nets.one(stacked, index) for index in range(count)]
    np.savez(folder / "data.npz", **stacked)
    peer, their_evaluations, their_s = by_nncf(name, model.path, batches, gate, minutes, folder)
    mine, scheme, evaluations, seconds_taken = by_stage(model.path, folder / "data.npz", count, gate, folder)
    fp32 = nets.on_openvino(Path(model.path), batches[0])
    expected = [fp32(batch) for batch in batches]
    runs = {"FP32": fp32, "stage": nets.on_openvino(mine, batches[0])}
    if peer is not None:
        runs["NNCF"] = nets.on_openvino(peer, batches[0])
    times = nets.in_turns(runs, batches[0], seconds)
    print(
        f"\n| {name}, at least {gate:g} dB | evaluations | s to the proof | dB reached | latency over FP32's |\n|---|---|---|---|---|"
    )
    rows = {"NNCF accuracy control": ("NNCF", their_evaluations, their_s), f"stage ({scheme})": ("stage", evaluations, seconds_taken)}  # fmt: skip
    for label, (key, asked, took) in rows.items():
        if key not in runs:
            print(f"| {label} | {asked}, stopped | {took:.0f} | not reached | |")
            continue
        ratio = statistics.median(own / other for own, other in zip(times[key], times["FP32"], strict=True))
        reached, _ = smallest_snr_db(runs[key], batches, expected)
        print(f"| {label} | {asked} | {took:.0f} | {reached:.1f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet50:38", "bert6:42", "separable:50"], metavar="NAME:DB")
    parser.add_argument("--seconds", type=float, default=20.0, help="of taking turns, a network")
    parser.add_argument("--nncf-minutes", type=float, default=5.0, help="after which NNCF is stopped, a network")
    chosen = parser.parse_args()
    for word in chosen.networks:
        name, _, gate = word.partition(":")
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["COMPILE_STAGE_CACHE"] = f"{scratch}/cache"
            compare(name, float(gate), chosen.seconds, chosen.nncf_minutes, Path(scratch))


if __name__ == "__main__":
    main()
