"""Does a run beside other work choose the winner that a quiet run chooses?

    python benchmarks/neighbour.py --save               # 40 runs beside a neighbour: at most ten minutes on two cores
    python benchmarks/neighbour.py --repetitions 3      # a look
    python benchmarks/neighbour.py --original pytorch   # whose threads wait for each other in each operator

A convolutional network that reads digits is compiled for ONNX Runtime and OpenVINO in FP32 and int8: four candidates,
the original in ONNX Runtime or in PyTorch. The first run compiles and proves them, and a quiet run measures them for 45
seconds. Then the whole stage runs again and again with `--remeasure`, so that all but the measurement comes from the
cache, beside a neighbour: another process tree that uses 0.5 to 1.5 cores and memory, in one of three ways that are
drawn by the seed:

- `steady`: all the time, in slices of 20 ms.
- `bursts`: of half a second on average, and pauses.
- `waves`: more and less, with a period of 2 to 20 seconds.

A run agrees with the quiet one when it has the same winner, or one that the quiet run calls a tie with its own. Let
nothing else run on the machine; whether anything did is said in the file that `--save` writes.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage import api  # noqa: E402
from compile_stage.core.records import RunResult, TargetResult  # noqa: E402

KINDS = ("steady", "bursts", "waves")
CORES = (0.5, 1.5)
QUIET_S = 45.0
SLICE_S, BURST_S, PERIODS_S = 0.02, 0.5, (2.0, 20.0)
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: neighbour
owner: benchmarks
data:
  validation: {source: "file:validation.npz", max_samples: 128}
  calibration: {source: "file:calibration.npz", max_samples: 128}
targets:
  cpu: {device: cpu, backends: [onnxruntime, openvino], precisions: [int8, fp32], batch_sizes: [1], threads: 2}
performance: {min_speedup: null}
fallback: {mixed_precision: false}
"""
# Where the original runs in ONNX Runtime too, one of the candidates is as fast as it is: no limit on speed is asked.


# ------------------------------------------------------------------------------------------------------- the neighbour


@contextmanager
def neighbour(kind: str, cores: float, seed: int) -> Iterator[None]:
    """Processes that use so many cores meanwhile. They are no descendants of this one, whose own would count as the
    stage's."""
    command = [sys.executable, __file__, "--be-the-neighbour", kind]
    with tempfile.TemporaryDirectory() as folder:
        running = Path(folder) / "running"
        running.touch()
        for number, share in enumerate((cores / 2, cores / 2)):
            words = [*command, str(share), str(seed + number), str(running), str(os.getpid())]
            subprocess.run(  # the shell ends at once, and leaves it to the system
                ["sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *words], check=True, start_new_session=True
            )
        time.sleep(0.5)
        try:
            yield
        finally:
            running.unlink()  # each looks for it before a slice


def be_the_neighbour(kind: str, share: float, seed: int, running: Path, benchmark: int) -> None:
    """Use that share of a core, on average, until the file is gone, or the process of the benchmark is."""
    generator = random.Random(seed)
    period = generator.uniform(*PERIODS_S)
    block = np.ones(1 << 20)  # 8 MB, so that caches are shared too
    began = time.monotonic()
    while running.exists() and psutil.pid_exists(benchmark):
        busy_s, idle_s = _slice(kind, share, time.monotonic() - began, period, generator)
        ends = time.monotonic() + busy_s
        while time.monotonic() < ends:
            block *= 1.0000001
        time.sleep(idle_s)


def _slice(kind: str, share: float, now: float, period: float, generator: random.Random) -> tuple[float, float]:
    """Seconds to compute, and to rest."""
    if kind == "bursts":
        return generator.expovariate(1 / BURST_S), generator.expovariate(share / (BURST_S * (1 - share)))
    if kind == "waves":
        share = min(1.0, share * (1 + math.sin(2 * math.pi * now / period)))
    return SLICE_S * share, SLICE_S * (1 - share)


# ------------------------------------------------------------------------------------------------------------ the runs


@dataclass
class Stage:
    """One model and policy in a folder, with a cache of its own."""

    folder: Path
    original: str

    def prepare(self) -> None:
        """Train and export the network, write its data and the policy."""
        import digits
        import mlflow
        import torch

        train_x, _, test_x, _ = digits.data()
        np.savez(self.folder / "validation.npz", input=test_x)
        np.savez(self.folder / "calibration.npz", input=train_x)
        network, example, into = digits.digits(0.0), test_x[:2], str(self.folder / "digits")
        if self.original == "pytorch":
            mlflow.pytorch.save_model(
                network, into, input_example=example, serialization_format="pt2", pip_requirements=["torch"]
            )
        else:
            model = torch.onnx.export(
                network, (torch.from_numpy(example),), dynamo=True, verbose=False, input_names=["input"],
                output_names=["scores"], dynamic_shapes=({0: torch.export.Dim("batch")},),
            ).model_proto  # fmt: skip
            mlflow.onnx.save_model(model, into, pip_requirements=["onnx"])
        (self.folder / "policy.yaml").write_text(POLICY)

    def run(self, seconds: float) -> tuple[RunResult, float]:
        """The whole stage, measured anew; and how long it took."""
        began = time.monotonic()
        result = api.run(
            f"folder:{self.folder / 'digits'}", self.folder / "policy.yaml", out=self.folder / "out", publish=False,
            remeasure=True, sets=(f"budget.measure_seconds={seconds}", "budget.soak_seconds=0"),
        )  # fmt: skip
        return result, time.monotonic() - began


def short(job_id: str | None) -> str:
    """Backend and precision."""
    return " ".join(job_id.split("--")[2:]) if job_id else "none"


def ties(target: TargetResult) -> set[str]:
    """The winner, and all that tie with it."""
    lost = {name for name, reason in target.selection.reasons.items() if reason.startswith("ties with the winner")}
    return {target.selection.winner or "", *lost}


def row_of(target: TargetResult, seconds: float) -> dict[str, Any]:
    """What a run chose, and how sure it was."""
    won = target.winner
    timing = won.measurement.timing(1) if won is not None and won.measurement is not None else None
    base = target.baseline.timing(1) if target.baseline is not None else None
    return {
        "winner": short(target.selection.winner),
        "speedup": round(timing.speedup, 3) if timing is not None and timing.speedup is not None else None,
        "stable": timing.stable if timing is not None else None,
        "starts": len(set(base.processes)) if base is not None else 0,
        "disturbed_rounds": base.disturbed if base is not None else 0,
        "rounds": base.rounds if base is not None else 0,
        "seconds": round(seconds, 1),
    }


def measure(stage: Stage, repetitions: int, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row for the quiet run, and one for each beside the neighbour."""
    stage.prepare()
    stage.run(1.0)  # compiles and proves
    result, took = stage.run(QUIET_S)
    (quiet,) = result.targets
    good = ties(quiet)
    yield {"kind": "quiet", **row_of(quiet, took), "ties": sorted(map(short, good))}
    generator = random.Random(seed)
    for number in range(repetitions):
        kind, cores = KINDS[number % len(KINDS)], generator.uniform(*CORES)
        with neighbour(kind, cores, seed + 2 * number):
            result, took = stage.run(seconds)
        (target,) = result.targets
        agrees = target.selection.winner in good
        yield {"kind": kind, "cores": round(cores, 2), "agrees": agrees, **row_of(target, took)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=40, help="runs beside a neighbour")
    parser.add_argument("--seconds", type=float, default=8.0, help="budget.measure_seconds of each of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--original", choices=("onnx", "pytorch"), default="onnx", help="the framework that it runs in")
    parser.add_argument("--be-the-neighbour", nargs=5, help=argparse.SUPPRESS)
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    if options.be_the_neighbour:
        kind, share, seed, running, benchmark = options.be_the_neighbour
        be_the_neighbour(kind, float(share), int(seed), Path(running), int(benchmark))
        return
    warnings.filterwarnings("ignore")  # of the frameworks that export
    with tempfile.TemporaryDirectory() as scratch, results.recording("neighbour", options.save) as record:
        os.environ["COMPILE_STAGE_CACHE"] = str(Path(scratch) / "cache")
        record.settings |= {
            "repetitions": options.repetitions, "seconds": options.seconds, "seed": options.seed,
            "quiet_seconds": QUIET_S,
        }  # fmt: skip
        stage = Stage(Path(scratch), options.original)
        for row in measure(stage, options.repetitions, options.seconds, options.seed):
            row["original"] = options.original
            record.rows.append(row)
            print(row, flush=True)
    agreed = [row["agrees"] for row in record.rows if "agrees" in row]
    print(f"{sum(agreed)} of {len(agreed)} runs beside a neighbour agree with the quiet one")


if __name__ == "__main__":
    main()
