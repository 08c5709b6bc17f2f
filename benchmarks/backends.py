"""Every installed backend on seven models: what each makes of it, and which wins.

    python benchmarks/backends.py                          # all seven, half an hour on two cores with eight backends
    python benchmarks/backends.py small vit --seconds 20   # some of them
    python benchmarks/backends.py small --trials 100       # backends that tune may try so many schedules

Each model is registered in an embedded MLflow and taken through the whole stage with `backends: auto` at batch 1 on two
threads, so every figure is one of the stage's own: latency and speed-up over the original framework from one
interleaved run, error from the gate that stands for it, size on disk, peak memory of a fresh process, and the
compiler's own time. What was refused is listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

ROOT = Path(__file__).parents[1]
NEURAL = ("small", "resnet50", "separable", "bert6", "vit", "lstm")
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: backends
owner: benchmarks
data:
  validation: {{source: "mlflow-dataset:validation", max_samples: 64}}
  calibration: {{source: "mlflow-dataset:calibration", max_samples: 64}}
  min_samples: 32
targets:
  cpu: {{device: cpu, backends: {backends}, precisions: [int8, int8-dynamic, bf16, fp32], batch_sizes: [1], threads: 2}}
fallback: {{mixed_precision: false}}
budget: {{measure_seconds: {seconds}, tuning_trials: {trials}, job_minutes: 12, minutes: 60}}
"""


def register(name: str, work: Path, environment: dict[str, str]) -> str:
    if name == "boosting":
        command = [sys.executable, str(ROOT / "examples" / "digits_boosting.py")]
    else:
        call = f"import networks; print(networks.register({name!r}))"
        command = [sys.executable, "-c", call]
        environment = {**environment, "PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def run(name: str, work: Path, chosen: argparse.Namespace, environment: dict[str, str]) -> dict:
    uri = register(name, work, environment)
    policy = work / "policy.yaml"
    policy.write_text(POLICY.format(backends=chosen.backends, seconds=chosen.seconds, trials=chosen.trials))
    command = [sys.executable, "-m", "compile_stage", "run", uri, "-p", str(policy), "--out", str(work / "out"), "-q"]
    subprocess.run(command, env=environment, cwd=work, check=False, stdout=subprocess.DEVNULL)
    return json.loads((work / "out" / "result.json").read_text())


def rows(result: dict) -> list[str]:
    lines = [
        "| backend | scheme | state | p50 ms | speed-up (95 % interval) | error | compile s | size MB | peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    refused: dict[str, list[str]] = {}
    for candidate in sorted(result["targets"][0]["candidates"], key=lambda c: -speedup(c)):
        if candidate["state"] == "refused":
            refused.setdefault(candidate["backend"], []).append(candidate["reason"])
            continue
        timing = timed(candidate)
        spread = (
            ""
            if timing is None
            else f"{timing['speedup']:.2f} ({timing['speedup_interval'][0]:.2f} to {timing['speedup_interval'][1]:.2f})"
        )
        p50 = "" if timing is None or timing["p50_s"] is None else f"{timing['p50_s'] * 1e3:.2f}"
        size = "" if candidate["size_bytes"] is None else f"{candidate['size_bytes'] / 1e6:.1f}"
        peak = "" if timing is None else f"{candidate['timing']['peak_memory_bytes'] / 1e6:.0f}"
        state = (
            candidate["state"]
            if timing or candidate["state"] == "won"
            else f"{candidate['state']}: {candidate['reason'][:120]}"
        )
        lines.append(
            f"| {candidate['backend']} | {candidate['scheme']} | {state} | {p50} | {spread} | {error(candidate)} | "
            f"{candidate['compile_s']:.1f} | {size} | {peak} |"
        )
    for backend, reasons in refused.items():
        lines.append(f"| {backend} | | refused {len(reasons)}: {min(reasons, key=len)[:110]} | | | | | | |")
    return lines


def timed(candidate: dict) -> dict | None:
    return (candidate["timing"] or {}).get("by_batch", {}).get("1")


def speedup(candidate: dict) -> float:
    timing = timed(candidate)
    return timing["speedup"] if timing and timing["speedup"] else 0.0


def error(candidate: dict) -> str:
    """The worst cosine distance, or, without one, the worst absolute error."""
    checks = (candidate["verdict"] or {"checks": []})["checks"]
    for metric, show in (("cosine", lambda value: f"1 − {1 - value:.0e}"), ("max_abs", lambda value: f"{value:.0e}")):
        values = [c["measured"] for c in checks if c["metric"] == metric and isinstance(c["measured"], float)]
        if values:
            return f"{metric} {show(min(values) if metric == 'cosine' else max(values))}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*NEURAL, "boosting"])
    parser.add_argument("--seconds", type=float, default=45.0, help="measurement budget a model")
    parser.add_argument("--trials", type=int, default=0, help="schedules that a backend which tunes may try, a job")
    parser.add_argument("--backends", default="auto", help="auto, or a YAML list")
    parser.add_argument("--keep", type=Path, help="folder to keep the reports in")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    won: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch, results.recording("backends", chosen.save) as record:
        record.settings |= {"batch": 1, "threads": 2, "measure_seconds": chosen.seconds, "total_s": {}}
        for name in chosen.models:
            work, environment = results.workspace(chosen.keep, scratch, name)
            result = run(name, work, chosen, environment)
            record.rows += results.candidate_rows(name, result)
            record.settings["total_s"][name] = round(result["duration_s"])
            winner = next((c for c in result["targets"][0]["candidates"] if c["state"] == "won"), None)
            title = f"{winner['backend']} {winner['scheme']}" if winner else "no winner"
            print(f"\n### {name}: {title}, {result['duration_s']:.0f} s\n", *rows(result), sep="\n", flush=True)
            if winner is not None and name in NEURAL:
                won[name] = speedup(winner)
    if won:
        mean = math.exp(sum(map(math.log, won.values())) / len(won))
        print(f"\nGeometric mean of the winners' speed-up over {', '.join(won)}: {mean:.2f}")


if __name__ == "__main__":
    main()
