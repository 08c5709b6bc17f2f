"""How long is it until the verdict, beside an earlier commit?

    python benchmarks/time_to_verdict.py --before c17ed4a              # about six minutes on two quiet cores
    python benchmarks/time_to_verdict.py --before c17ed4a --rounds 1

The demo's digits CNN, ONNX Runtime and OpenVINO, int8, bf16 and fp32, batch 1, two threads, without a cache and
without publishing: from the command to its end, wall and CPU seconds. Both commits take turns, each run in a new
process with an empty cache, on one registered model. An earlier commit is checked out into a folder of its own; it runs
with the packages that are installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402
from stage import register  # noqa: E402

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: verdict
owner: benchmarks
data:
  validation: {source: "mlflow-dataset:validation", labels: y}
  calibration: {source: "mlflow-dataset:calibration", labels: y}
targets:
  cpu: {device: cpu, backends: [onnxruntime, openvino], precisions: [int8, bf16, fp32], batch_sizes: [1], threads: 2}
"""


def run(code: Path, uri: str, work: Path, environment: dict[str, str]) -> dict[str, Any]:
    """One run of the stage at a checkout."""
    with tempfile.TemporaryDirectory() as cache:
        there = {**environment, "PYTHONPATH": str(code), "COMPILE_STAGE_CACHE": cache}
        command = [sys.executable, "-m", "compile_stage", "run", uri, "-p", str(work / "policy.yaml"), "-q"]
        command += ["--no-publish", "--out", f"{cache}/out"]
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        # From the checkout's folder: `-m` looks there before it looks at what is installed.
        done = subprocess.run(command, env=there, cwd=code, check=False, stdout=subprocess.DEVNULL)
        wall_s, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"the run at {code} ended with {done.returncode}")
        [target] = json.loads(Path(f"{cache}/out/result.json").read_text())["targets"]
    [winner] = [one for one in target["candidates"] if one["job_id"] == target["winner"]]
    timing = winner["timing"]["by_batch"]["1"]
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {
        "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "winner": f"{winner['backend']} {winner['scheme']}",
        "speedup": timing["speedup"], "low": timing["speedup_interval"][0], "high": timing["speedup_interval"][1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="c17ed4a", help="a commit of this repository")
    parser.add_argument("--rounds", type=int, default=2)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    with (
        tempfile.TemporaryDirectory() as scratch,
        results.recording("time-to-verdict", chosen.save) as record,
        results.checkout(chosen.before, Path(scratch) / "earlier") as earlier,
    ):
        work, environment = results.workspace(None, scratch, "digits")
        uri = register("digits_cnn.py", [], work, environment)
        (work / "policy.yaml").write_text(POLICY)
        for number in range(2 * chosen.rounds):
            before = number % 4 in (1, 2)  # A B B A
            row = run(earlier if before else results.ROOT, uri, work, environment)
            record.rows.append({"network": "digits", "commit": chosen.before if before else "this", **row})
            print(record.rows[-1], flush=True)


if __name__ == "__main__":
    main()
