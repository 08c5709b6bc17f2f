"""What the search over combinations of runtime settings gains over one setting after another.

    python benchmarks/runtime_settings.py [NETWORK]...      default: small bert6 resnet50
    python benchmarks/runtime_settings.py small --backend openvino --minutes 4

Each network goes through the stage twice with one cache: with `budget.search_minutes: 0`, and with the search. Then the
last accepted candidate of each, and the one without options, are measured in turns: fresh processes, A B C C B A.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: settings
owner: benchmarks
data:
  validation: {{source: "mlflow-dataset:validation", max_samples: 32}}
  calibration: {{source: "mlflow-dataset:calibration", max_samples: 32}}
performance: {{min_speedup: null}}
report: {{profile: false}}
tolerances:
  int8: {{cosine: 0.9, max_rel: null, top1_agreement: null}}
targets:
  cpu: {{device: cpu, backends: [{backend}], precisions: [{precision}], threads: 2, ladder: true}}
budget: {{measure_seconds: 5, soak_seconds: 0, predict_seconds: 0, search_minutes: {minutes}}}
"""


def tuned(uri: str, work: Path, arguments: argparse.Namespace, minutes: float) -> tuple[Any, Any, float]:
    """The last accepted candidate, the one without options, and how long the run took in seconds."""
    from compile_stage import api

    policy = work / f"policy-{minutes:g}.yaml"
    policy.write_text(
        POLICY.format(backend=arguments.backend, precision=arguments.precision, minutes=minutes), encoding="utf-8"
    )
    began = time.monotonic()
    result = api.run(uri, policy, out=work / f"out-{minutes:g}", publish=False)
    took_s = time.monotonic() - began
    (target,) = result.targets
    for step in target.ladder:
        print(f"  {step.kind} {step.name}: {step.reason}", flush=True)
    tuned = [c for c in target.candidates if c.has_passed and c.artifact]
    plain = min(tuned, key=lambda c: len(c.job.tuning_options))
    last = max(tuned, key=lambda c: (c.job.scheme == plain.job.scheme, len(c.job.tuning_options)))
    return last, plain, took_s


def serve(candidate: Any, inputs: dict[str, Any], pipe: Any) -> None:
    """A process of one participant: a turn of 40 ms for each message, until None comes."""
    from compile_stage.core import plugins
    from compile_stage.measure.timing import settle, turn, warm_up

    backend = plugins.load("backends", candidate.job.backend)
    with backend.open(candidate.artifact, candidate.job.target.threads) as session:
        warmed = warm_up(lambda: session.run(inputs), max_seconds=2.0)
        calls = max(1, round(0.04 / warmed["latency_s"]))
        pipe.send("ready")
        while pipe.recv():
            session.run(inputs)
            pipe.send(turn(session.run, [inputs] * calls, seconds=2.0))
            settle()


def race(candidates: dict[str, Any], inputs: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Median seconds of a call in each round, by participant; three starts of all processes."""
    spawn, medians = multiprocessing.get_context("spawn"), {name: [] for name in candidates}
    for _ in range(3):
        pipes, processes = {}, []
        for name, candidate in candidates.items():
            pipes[name], theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(candidate, inputs, theirs)))
            processes[-1].start()
            pipes[name].recv()
        ends, order = time.monotonic() + seconds / 3, list(candidates)
        while time.monotonic() < ends:
            for name in [*order, *reversed(order)]:
                pipes[name].send(True)
                medians[name].append(statistics.median(pipes[name].recv()))
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["small", "bert6", "resnet50"])
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the search")
    parser.add_argument("--seconds", type=float, default=45.0, help="of the last comparison")
    results.add_save_option(parser)
    arguments = parser.parse_args()
    import networks

    with results.recording("runtime-settings", arguments.save) as record:
        compare(arguments, networks, record)


def compare(arguments: argparse.Namespace, networks: Any, record: results.Recording) -> None:
    """A row for each network: what each way found, and how fast it is beside the others."""
    for name in arguments.networks:
        with tempfile.TemporaryDirectory() as folder:
            uri = networks.register(name)
            found = {}
            for word, minutes in (("one by one", 0.0), ("search", arguments.minutes)):
                print(f"{name}, {word}:", flush=True)
                found[word], plain, took_s = tuned(uri, Path(folder), arguments, minutes)
                print(f"  took {took_s:.0f} s, {'+'.join(found[word].job.tuning_options) or 'nothing accepted'}")
            inputs = {key: value[:1] for key, value in networks.samples(name, 1, 0).items()}
            load = os.getloadavg()[0]
            medians = race({"plain": plain, **found}, inputs, arguments.seconds)
            row: dict[str, Any] = {"network": name, "load": round(load, 1), "rounds": len(medians["plain"])}
            for one, other in (("plain", "one by one"), ("plain", "search"), ("one by one", "search")):
                quotients = [math.log(a / b) for a, b in zip(medians[one], medians[other], strict=True)]
                cuts = statistics.quantiles(quotients, n=4)
                row[f"{other} over {one}"] = [round(math.exp(x), 3) for x in (statistics.median(quotients), *cuts[::2])]
            print(json.dumps(row), flush=True)
            record.rows.append(row)


if __name__ == "__main__":
    main()
