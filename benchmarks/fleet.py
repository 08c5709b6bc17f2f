"""Fleets: how long a plan takes, what scheduling costs, and whether each version is published once through kills.

    python benchmarks/fleet.py plan --models 1000 --targets 10         # wall seconds and peak memory of `fleet plan`
    python benchmarks/fleet.py simulate --jobs 100000 --nodes 500      # overhead of a job; none lost, none doubled
    python benchmarks/fleet.py run --models 200 --targets 2 --kill 2 --engine ray

plan: a registry of SQLite with so many registered models, and a policy with so many targets; the command is a process
of its own. simulate: the scheduler, the journal and the loop of a real fleet, with tasks that take simulated time on
nodes that fail and come back. run: so many small networks, some of them the same, in a registry of their own; the
fleet's process is killed with SIGKILL so often, and started again; then every model must have exactly one published
version for each target, and the report must say so. With --engine ray the jobs run on a cluster of this machine that
the benchmark starts, with --cores of it, and that outlives the fleet's process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results

ROOT = Path(__file__).parents[1]
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: fleet
owner: benchmarks
report: {{profile: false}}
data:
  validation: {{source: "{data}", max_samples: 64}}
  calibration: {{source: "{data}", max_samples: 32}}
  min_samples: 32
targets:
{targets}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}}
promote: {{alias: "{{target}}-prod"}}
"""
TARGET = "  cpu-{0}: {{device: cpu, backends: [onnxruntime], precisions: [fp32], batch_sizes: [{1}], threads: 1}}"
RAY_TOKEN = secrets.token_hex(32)


def environment(work: Path) -> dict[str, str]:
    return {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{work}/mlflow.db",
        "COMPILE_STAGE_CACHE": str(work / "cache"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Ray's daemons have 30 seconds to come up, which are too few beside much else.
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": RAY_TOKEN,
    }


def write_policy(work: Path, targets: int, data: str) -> Path:
    folder = work / "policies"
    folder.mkdir(exist_ok=True)
    lines = "\n".join(TARGET.format(number, number + 1) for number in range(targets))
    (folder / "fleet.yaml").write_text(POLICY.format(data=data, targets=lines))
    return folder


def register_empty(models: int, work: Path) -> None:
    """Registered models without files, each with a version, an alias, tags and an owner: a plan opens no model."""
    from mlflow import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = MlflowClient(f"sqlite:///{work}/mlflow.db")
        for number in range(models):
            name = f"vision-{number:05d}"
            client.create_registered_model(name, tags={"owner": f"team-{number % 7}"})
            made = client.create_model_version(name, f"{work}/none-{number}", tags={"task": "x"}, await_creation_for=0)
            client.set_registered_model_alias(name, "candidate", made.version)


def plan(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    register_empty(arguments.models, work)
    folder = write_policy(work, arguments.targets, "input_example")
    command = [
        sys.executable,
        "-m",
        "compile_stage",
        "fleet",
        "plan",
        "vision-*@candidate",
        "-p",
        str(folder),
        "--json",
    ]
    began = time.monotonic()
    with (work / "plan.json").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, env=environment(work), cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    assert status == 0, status
    counts = json.loads((work / "plan.json").read_text())["counts"]
    assert (counts["jobs"], counts["targets"]) == (arguments.models, arguments.models * arguments.targets), counts
    return {
        "what": "plan",
        "models": arguments.models,
        "targets": arguments.targets,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024, 1),
    }


def simulated(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    from compile_stage.fleet.simulation import Plan, simulate

    found = simulate(
        Plan(jobs=arguments.jobs, nodes=arguments.nodes, seed=arguments.seed, failure_hours=arguments.failure_hours),
        work / "state",
    )
    assert not found["lost"], found
    assert not found["doubled"], found
    return {"what": "simulate", "jobs": arguments.jobs, "nodes": arguments.nodes, **found}


def network(seed: int) -> Any:
    """A small network of its own weights: x [batch, 8] -> y [batch, 4]."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array(rng.standard_normal((8, 64)).astype(np.float32), "w1"),
        numpy_helper.from_array(rng.standard_normal((64, 4)).astype(np.float32), "w2"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def register_networks(models: int, work: Path) -> str:
    """So many small networks, of which every tenth is the same as the one before; returns their samples' source."""
    import mlflow
    import numpy as np
    from mlflow import MlflowClient

    data = work / "data.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    uri = f"sqlite:///{work}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(uri)
    experiment = client.create_experiment("fleet", artifact_location=(work / "artifacts").as_uri())
    example = np.zeros((2, 8), np.float32)
    with warnings.catch_warnings(), mlflow.start_run(experiment_id=experiment):
        warnings.simplefilter("ignore")
        signature = mlflow.models.infer_signature({"x": example}, {"y": np.zeros((2, 4), np.float32)})
        for number in range(models):
            seed = number - 1 if number % 10 == 9 else number
            name = f"small-{number:04d}"
            mlflow.onnx.log_model(
                network(seed), name=name, signature=signature, registered_model_name=name,
                pip_requirements=["onnxruntime"],  # else found by a process that loads the model
            )  # fmt: skip
            client.set_registered_model_alias(name, "candidate", "1")
            client.set_model_version_tag(name, "1", "owner", f"team-{number % 3}")
    return f"file:{data}"


def published(work: Path, models: int, targets: int) -> Counter[str]:
    """How often each model has a version for each target."""
    from mlflow import MlflowClient

    client, found = MlflowClient(f"sqlite:///{work}/mlflow.db"), Counter[str]()
    for number in range(models):
        for version in client.search_model_versions(f"name = 'small-{number:04d}-compiled'"):
            found[f"{number} {version.tags['compile_stage.target']}"] += 1
    return found


@contextmanager
def cluster(work: Path, cores: int) -> Iterator[str]:
    """A Ray cluster of this machine alone; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", f"--num-cpus={cores}", f"--temp-dir={work}/r", "--include-dashboard=false",
        "--disable-usage-stats",
    ]  # fmt: skip
    with (work / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment(work), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        # The command's own words once the raylet is there; the port is open long before.
        while b"Ray runtime started" not in (work / "ray.log").read_bytes():
            if head.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Ray did not start:\n{(work / 'ray.log').read_text()}")
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)


def run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    if arguments.engine == "local":
        return go(arguments, work, [])
    with cluster(work, arguments.cores) as address:
        return go(arguments, work, ["--ray-address", address])


def go(arguments: argparse.Namespace, work: Path, place: list[str]) -> dict[str, Any]:
    models, targets, state = arguments.models, arguments.targets, work / "state"
    folder = write_policy(work, targets, register_networks(models, work))
    command = [
        sys.executable, "-m", "compile_stage", "fleet", "run", "small-*@candidate", "-p", str(folder), "--state",
        str(state), "--engine", arguments.engine, *place,
    ]  # fmt: skip
    if arguments.at_once:
        command += ["--jobs", str(arguments.at_once)]
    began, kills = time.monotonic(), []
    for kill in range(arguments.kill + 1):
        process = subprocess.Popen(command, env=environment(work), cwd=work, start_new_session=True)
        goal = models * (kill + 1) // (arguments.kill + 1)
        while kill < arguments.kill and process.poll() is None and ended(state) < goal:
            time.sleep(0.2)
        if kill < arguments.kill and process.poll() is None:
            time.sleep(random.Random(arguments.seed + kill).uniform(0, 2))
            # The whole group: of a cluster on this machine its processes too, as when the machine's owner kills all.
            os.killpg(process.pid, signal.SIGKILL)
            kills.append(ended(state))
            print(f"killed with {kills[-1]} of {models} jobs ended", flush=True)
        process.wait()
    document = json.loads((state / "1" / "fleet.json").read_text())
    found = published(work, models, targets)
    if arguments.keep:
        shutil.copytree(state / "1", arguments.keep, dirs_exist_ok=True)
    expected = {f"{number} cpu-{target}" for number in range(models) for target in range(targets)}
    row = {
        "what": "run",
        "models": models,
        "targets": targets,
        "engine": arguments.engine,
        "kills": len(kills),
        "exit_code": process.returncode,
        "jobs_passed": document["counts"]["passed"],
        "attempts": sum(node["attempts"] for node in document["nodes"]),
        "missing": len(expected - set(found)),
        "doubled": sum(count > 1 for count in found.values()),
        "wall_s": round(time.monotonic() - began, 1),
    }
    assert (row["exit_code"], row["missing"], row["doubled"], row["jobs_passed"]) == (0, 0, 0, models), row
    return row


def ended(state: Path) -> int:
    import sqlite3

    try:
        with sqlite3.connect(f"file:{state / 'fleet.db'}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM jobs WHERE state='done'").fetchone()[0])
    except sqlite3.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "simulate", "run"])
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--failure-hours", type=float, default=50.0, help="mean hours until a node fails")
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--at-once", type=int, help="run: so many jobs")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="run: of the Ray cluster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run: a folder for the fleet's reports")
    results.add_save_option(parser)
    arguments = parser.parse_args()
    doing = {"plan": plan, "simulate": simulated, "run": run}[arguments.what]
    with results.recording("fleet", arguments.save) as record, tempfile.TemporaryDirectory() as scratch:
        row = doing(arguments, Path(scratch).resolve())
        record.rows.append(row)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
