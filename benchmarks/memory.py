"""Peak memory of a whole run, by step: the stage's own process, and each worker with all that it started.

    python benchmarks/memory.py                              # a model of 2.2 GB from both sources
    python benchmarks/memory.py onnx --megabytes 400         # a smaller one, from ONNX alone

The model is a stack of residual blocks of two Linear layers, 1,024 wide, with random weights, registered in an embedded
MLflow as ONNX (weights in a file beside the graph) or as PyTorch's exported program. A run without a cache takes it
through fp32, int8-dynamic, int8 and int4, in ONNX Runtime and OpenVINO, one job at a time.

Memory is what would be free without the process: anonymous and shared pages, and swap, summed over the process tree and
looked at every 10 ms. Pages of mapped files are left out: the kernel drops them when it needs room. A figure is also
given as a multiple of the model: 1.5 is one and a half times the bytes of its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

WIDTH, SAMPLES = 1024, 64
SOURCES = ("onnx", "pytorch")
BLOCK_BYTES = 4 * (8 * WIDTH * WIDTH + 7 * WIDTH)
"""Of a block: both matrices, both biases, and the scale and offset of its normalisation, in float32."""

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: memory
owner: benchmarks
data:
  validation: {{source: "file:{data}"}}
  calibration: {{source: "file:{data}"}}
  min_samples: 32
targets:
  cpu:
    device: cpu
    backends: [onnxruntime, openvino]
    precisions: [int8, int8-dynamic, int4, fp32]
    batch_sizes: [1]
    threads: 2
fallback: {{mixed_precision: {search}, max_evaluations: 4}}
performance: {{min_speedup: null}}
budget: {{minutes: 240, job_minutes: 60, measure_seconds: 5, job_memory_mb: {limit}}}
"""

REGISTER = """\
import sys
import mlflow, numpy as np, torch
from torch import nn
source, blocks, width, samples, data = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(blocks))).eval()
x = np.random.default_rng(0).standard_normal((samples, width)).astype(np.float32)
np.savez(data, x=x)
with torch.no_grad():
    signature = mlflow.models.infer_signature(x[:2], model(torch.from_numpy(x[:2])).numpy())
mlflow.set_experiment("memory")
if source == "onnx":
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        model, (torch.from_numpy(x[:2]),), dynamo=True, input_names=["x"], output_names=["y"],
        dynamic_shapes=({0: batch},), opset_version=18, verbose=False,
    )
    program.save("exported.onnx", external_data=True)
    import onnx
    mlflow.onnx.log_model(
        onnx.load("exported.onnx"), name="model", registered_model_name=source, save_as_external_data=True
    )
else:
    mlflow.pytorch.log_model(
        model, name="model", registered_model_name=source, signature=signature, input_example=x[:2],
        serialization_format="pt2",
    )
"""

# A thread of this process looks at the tree of each worker while it answers a call, and at this process itself.
STAGE = """\
import json, sys, threading, time
from pathlib import Path
from compile_stage import api
from compile_stage.engine import local
from compile_stage.engine.usage import descendants_of

def held(pid):
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words and words[0] in ("RssAnon:", "RssShmem:", "VmSwap:"))

calls, lock, over = [], threading.Lock(), threading.Event()
call = local.LocalWorker.call

def measured(self, function, /, **arguments):
    began = time.monotonic()
    seen = {"worker": self.name, "call": function, "pid": self.pid, "peak": 0, "open": True}
    with lock:
        calls.append(seen)
    try:
        return call(self, function, **arguments)
    finally:
        seen["open"], seen["seconds"] = False, time.monotonic() - began

def look():
    own = {"worker": "stage", "call": "", "peak": 0, "seconds": 0}
    with lock:
        calls.append(own)
    while not over.is_set():
        own["peak"] = max(own["peak"], held("self"))
        with lock:
            now = [seen for seen in calls if seen.get("open")]
        for seen in now:
            seen["peak"] = max(seen["peak"], sum(map(held, (seen["pid"], *descendants_of(seen["pid"])))))
        time.sleep(0.01)

local.LocalWorker.call = measured
local.LocalEngine.max_parallel = lambda self, memory_bytes: 1
thread = threading.Thread(target=look, daemon=True)
thread.start()
result = api.run(sys.argv[1], sys.argv[2], out=sys.argv[3])
over.set()
thread.join()
Path(sys.argv[4]).write_text(json.dumps({"calls": calls, "exit_code": result.exit_code}))
"""


def registered(source: str, blocks: int, work: Path, environment: dict[str, str]) -> str:
    """Register a model of so many blocks, in a process of its own; its URI."""
    arguments = [source, str(blocks), str(WIDTH), str(SAMPLES), str(work / "data.npz")]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REGISTER, *arguments], env=environment, cwd=work, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return f"models:/{source}/1"


def stage(uri: str, work: Path, environment: dict[str, str], *, search: bool, limit_mb: int) -> dict[str, Any]:
    """One run without a cache: `calls` with their peaks, `candidates`, and the bytes that the cache holds then."""
    policy = work / "policy.yaml"
    policy.write_text(POLICY.format(data=work / "data.npz", search=json.dumps(search), limit=limit_mb))
    measured = work / "measured.json"
    command = [sys.executable, "-c", STAGE, uri, str(policy), str(work / "out"), str(measured)]
    subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.DEVNULL)
    answer = json.loads(measured.read_text())
    result = json.loads((work / "out" / "result.json").read_text())
    cache = Path(environment["COMPILE_STAGE_CACHE"])
    return {
        **answer,
        "candidates": result["targets"][0]["candidates"],
        "cache_bytes": sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file()),
    }


def rows_of(source: str, answer: dict[str, Any], model_bytes: int) -> list[dict[str, Any]]:
    """A row for each call of each worker, the largest where it was called several times; in the order of the first."""
    peaks: dict[tuple[str, str], dict[str, Any]] = {}
    for call in answer["calls"]:
        row = peaks.setdefault((call["worker"], call["call"]), {"peak": 0, "seconds": 0.0})
        row["peak"] = max(row["peak"], call["peak"])
        row["seconds"] += call.get("seconds", 0.0)
    return [
        {
            "source": source, "worker": worker, "call": call, "peak_mb": round(row["peak"] / 1e6),
            "models": round(row["peak"] / model_bytes, 2), "seconds": round(row["seconds"], 1),
        }
        for (worker, call), row in peaks.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=list(SOURCES), help=" or ".join(SOURCES))
    parser.add_argument("--megabytes", type=int, default=2200, help="of the model's weights")
    parser.add_argument("--search", action="store_true", help="with the search for mixed precision")
    parser.add_argument("--limit-mb", type=int, default=16000, help="budget.job_memory_mb")
    parser.add_argument("--keep", type=Path, help="folder to keep the reports in")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    blocks = max(1, round(chosen.megabytes * 1e6 / BLOCK_BYTES))
    model_bytes = blocks * BLOCK_BYTES
    with tempfile.TemporaryDirectory() as scratch, results.recording("memory", chosen.save) as record:
        record.settings |= {"model_mb": round(model_bytes / 1e6), "blocks": blocks, "width": WIDTH, "samples": SAMPLES}
        for source in chosen.sources:
            work, environment = results.workspace(chosen.keep, scratch, source)
            environment = {**environment, "PYTHONUNBUFFERED": "1", "GIT_PYTHON_REFRESH": "quiet"}
            uri = registered(source, blocks, work, environment)
            answer = stage(uri, work, environment, search=chosen.search, limit_mb=chosen.limit_mb)
            rows = rows_of(source, answer, model_bytes)
            record.rows += rows
            disk = {"worker": "cache", "call": "on disk", "peak_mb": round(answer["cache_bytes"] / 1e6)}
            record.rows.append({"source": source, **disk, "models": round(answer["cache_bytes"] / model_bytes, 2)})
            print(f"\n### {source}, {model_bytes / 1e6:.0f} MB of weights\n\n{table(record.rows, source)}\n")
            for candidate in answer["candidates"]:
                print(f"{candidate['backend']} {candidate['scheme']}: {candidate['state']} {candidate['reason'][:200]}")


def table(rows: list[dict[str, Any]], source: str) -> str:
    lines = ["| worker | call | peak MB | times the model | s |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['worker']} | {row['call']} | {row['peak_mb']} | {row['models']:.2f} | {row.get('seconds', '')} |"
        for row in rows
        if row["source"] == source
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
