"""What tuning gives on TVM: a small CNN (three times Conv-BN-ReLU, 64x64) untuned, tuned, and from its records, beside
ONNX Runtime.

    python benchmarks/tune_tvm.py                # 100 trials, two threads, at most three minutes of tuning
    python benchmarks/tune_tvm.py --trials 40

All that is compared is measured in turns within one run, at batch 1; medians. Records go to a folder of their own,
which ends with the run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage.backends.onnxruntime import OnnxRuntime  # noqa: E402
from compile_stage.backends.tvm import Tvm  # noqa: E402
from compile_stage.core.records import PortableModel, Target  # noqa: E402
from compile_stage.testing import models  # noqa: E402

CHANNELS = (3, 32, 64, 64)


def small_cnn(folder: Path) -> PortableModel:
    g, x = models.Graph(), "image"
    for before, after in itertools.pairwise(CHANNELS):
        x = g.add("Conv", x, g.weight(after, before, 3, 3), g.weight(after, scale=0.1), pads=[1, 1, 1, 1])
        statistics_ = (g.weight(after, scale=0.1, offset=1), g.weight(after, scale=0.1), g.weight(after, scale=0.1))
        x = g.add("Relu", g.add("BatchNormalization", x, *statistics_, g.constant(np.ones(after, np.float32))))
    pooled = g.add("Flatten", g.add("GlobalAveragePool", x))
    g.add("Gemm", pooled, g.weight(CHANNELS[-1], 10), g.weight(10, scale=0.1), name="scores")
    images = g.random.standard_normal((models.SAMPLES, 3, 64, 64)).astype(np.float32)
    return models.write(g, folder, {"image": images}, {"scores": ("float32", ("batch", 10))})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=3.0)
    results.add_save_option(parser)
    asked = parser.parse_args()
    with results.recording("tune-tvm", asked.save) as record:
        record.settings |= {"batch": 1, "threads": asked.threads, "trials": asked.trials}
        record.rows += measure(asked)


def measure(asked: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each way to get the artifact."""
    target = Target(name="bench", threads=asked.threads)
    granted = replace(target, options={"tvm": {"trials": asked.trials, "tuning_minutes": asked.minutes}})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["COMPILE_STAGE_CACHE"] = str(Path(folder) / "cache")
        model, backend, opened = small_cnn(Path(folder) / "model"), Tvm(), {}
        for name, where in (("untuned", target), ("tuned", granted), ("from records", granted)):
            began = time.perf_counter()
            artifact = backend.compile(model, backend.schemes(where, "fp32")[0], where, name, Path(folder) / name)
            print(f"{name}: compiled in {time.perf_counter() - began:.1f} s, {artifact.executed['tuning']}", flush=True)
            opened[name] = stack.enter_context(backend.open(artifact, asked.threads))
        ort = OnnxRuntime()
        plain = ort.compile(model, ort.schemes(target, "fp32")[0], target, "ort", Path(folder) / "ort")
        opened["onnxruntime"] = stack.enter_context(ort.open(plain, asked.threads))
        image = {"image": np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)}
        wanted = opened["onnxruntime"].run(image)["scores"]
        seconds: dict[str, list[float]] = {name: [] for name in opened}
        for _ in range(40):
            for name, session in opened.items():
                session.run(image)
                began = time.perf_counter()
                answer = session.run(image)["scores"]
                seconds[name].append(time.perf_counter() - began)
                np.testing.assert_allclose(answer, wanted, atol=1e-4)
    base = statistics.median(seconds["untuned"])
    rows: list[dict[str, object]] = []
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.append({"way": name, "p50_ms": round(median * 1e3, 3), "over_untuned": round(base / median, 2)})
        print(f"{name:13} {median * 1e3:8.3f} ms  {base / median:6.1f} times as fast as untuned")
    return rows


if __name__ == "__main__":
    main()
