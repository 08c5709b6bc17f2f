"""What the stage reaches on ResNet-50 and a 6-layer BERT, and what it costs itself.

    python benchmarks/stage.py                      # both models, about fifteen minutes on two cores
    python benchmarks/stage.py bert6 --seconds 30

For each model: register it in an embedded MLflow, run the whole stage without a cache, and report the winner's speed-up
over PyTorch eager FP32 (one interleaved run, 2 threads), the stage's own overhead (wall time against the workers' own
time) and the stage's peak memory. Then, for the demo's CNN, a run that finds everything in the cache (the registry in a
file, and behind an `mlflow server`), `--help` and `lint`, each in turns with `python -c "import mlflow"`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "integration")]

import results  # noqa: E402
from kill_and_resume import Server  # noqa: E402

ROOT = Path(__file__).parents[1]
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: benchmark
owner: benchmarks
data:
  validation: {{source: "mlflow-dataset:validation", max_samples: {samples}}}
  calibration: {{source: "mlflow-dataset:calibration", max_samples: {samples}}}
  min_samples: 32
targets:
  cpu:
    device: cpu
    backends: [onnxruntime, openvino]
    precisions: [int8, int8-dynamic, bf16, fp32]
    batch_sizes: [1]
    threads: 2
budget: {{measure_seconds: {seconds}}}
"""

# Runs in a process of its own, so that its peak memory is the stage's. Every call of a worker is timed where it is
# made; what is not inside of a call is the stage's own.
STAGE = """\
import json, resource, sys, threading, time
from compile_stage import api
from compile_stage.engine import local
busy, lock, call = [], threading.Lock(), local.LocalWorker.call
def timed(self, function, /, **arguments):
    began = time.monotonic()
    try:
        return call(self, function, **arguments)
    finally:
        with lock:
            busy.append((began, time.monotonic()))
local.LocalWorker.call = timed
began = time.monotonic()
result = api.run(sys.argv[1], sys.argv[2], out=sys.argv[3])
wall = time.monotonic() - began
print(json.dumps({"wall_s": wall, "workers_s": sum(e - b for b, e in busy),
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "exit_code": result.exit_code}))
"""


def stage(uri: str, work: Path, seconds: float, samples: int, environment: dict[str, str]) -> dict[str, float]:
    """One run without a cache; what it cost."""
    policy = work / "policy.yaml"
    policy.write_text(POLICY.format(seconds=seconds, samples=samples))
    command = [sys.executable, "-c", STAGE, uri, str(policy), str(work / "out")]
    done = subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def register(script: str, arguments: list[str], work: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def table(result: dict) -> str:
    lines = [
        "| backend | scheme | state | p50 ms | speed-up (95 % interval) | worst cosine | size MB | peak memory MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for candidate in sorted(result["targets"][0]["candidates"], key=lambda c: -speedup(c)):
        timing = (candidate["timing"] or {}).get("by_batch", {}).get("1")
        if not timing:
            continue
        low, high = timing["speedup_interval"]
        cosines = [
            c["measured"]
            for c in candidate["verdict"]["checks"]
            if c["metric"] == "cosine" and c["measured"] is not None
        ]
        lines.append(
            f"| {candidate['backend']} | {candidate['scheme']} | {candidate['state']} | {timing['p50_s'] * 1e3:.2f} | "
            f"{timing['speedup']:.2f} ({low:.2f} to {high:.2f}) | {min(cosines, default=float('nan')):.5f} | "
            f"{candidate['size_bytes'] / 1e6:.1f} | {candidate['timing']['peak_memory_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


def speedup(candidate: dict) -> float:
    timing = (candidate["timing"] or {}).get("by_batch", {}).get("1")
    return timing["speedup"] if timing else 0.0


def wall(command: list[str], work: Path, environment: dict[str, str]) -> float:
    began = time.monotonic()
    subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def start_up(work: Path, environment: dict[str, str], rounds: int) -> list[dict[str, object]]:
    """A cached run, of a registry in a file and of one behind a server, `--help` and `lint`, in turns with MLflow's own
    import; a row for each command."""
    program = [sys.executable, "-m", "compile_stage"]
    policy = str(ROOT / "policies" / "cpu-server.yaml")
    options = ["-p", policy, "--set", "budget.measure_seconds=10", "--out"]
    server = Server(work / "server")
    server.root.mkdir()
    server.start()
    of_server = {**environment, "MLFLOW_TRACKING_URI": server.uri}
    try:
        run = [*program, "run", register("digits_cnn.py", [], work, environment), *options, str(work / "file")]
        served = [*program, "run", register("digits_cnn.py", [], work, of_server), *options, str(work / "served")]
        commands = {
            "import mlflow": ([sys.executable, "-c", "import mlflow"], environment),
            "run, all cached": (run, environment),
            "run, all cached, registry behind a server": (served, of_server),
            "--help": ([*program, "--help"], environment),
            "lint": ([*program, "lint", policy], environment),
        }
        wall(run, work, environment)
        wall(served, work, of_server)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, (command, where) in commands.items():
                times[name].append(wall(command, work, where))
    finally:
        server.kill()
    print("\n| command | median wall s | over `import mlflow` s |\n|---|---|---|")
    reference = statistics.median(times["import mlflow"])
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {median - reference:+.2f} |")
        rows.append({"command": name, "median_s": round(median, 3), "over_import_s": round(median - reference, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet50", "bert6", "start-up"])
    parser.add_argument("--seconds", type=float, default=60.0, help="measurement budget a model")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="turns of the start-up commands")
    parser.add_argument("--keep", type=Path, help="folder to keep the reports in")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        results.recording("stage", chosen.save) as candidates,
        results.recording("own-cost", chosen.save) as costs,
        results.recording("start-up", chosen.save) as commands,
    ):
        candidates.settings |= {"batch": 1, "threads": 2, "samples": chosen.samples, "measure_seconds": chosen.seconds}
        commands.settings["rounds"] = chosen.rounds
        for name in chosen.models:
            work, environment = results.workspace(chosen.keep, scratch, name)
            if name == "start-up":
                commands.rows += start_up(work, environment, chosen.rounds)
                continue
            uri = register("models.py", [name], work, environment)
            cost = stage(uri, work, chosen.seconds, chosen.samples, environment)
            result = json.loads((work / "out" / "result.json").read_text())
            candidates.rows += results.candidate_rows(name, result)
            ratio = round(cost["wall_s"] / cost["workers_s"], 3)
            costs.rows.append({"network": name, "wall_over_workers": ratio, "stage_peak_mb": round(cost["peak_mb"])})
            print(f"\n### {name}: winner {result['targets'][0]['winner']}\n\n{table(result)}\n")
            print(f"wall {cost['wall_s']:.1f} s = {cost['wall_s'] / cost['workers_s']:.2f} x the workers' own "
                  f"{cost['workers_s']:.1f} s; "
                  f"peak memory of the stage's own process {cost['peak_mb']:.0f} MB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
