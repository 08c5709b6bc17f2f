"""What a job costs on a node of a Ray cluster beyond the same job in this process.

    python benchmarks/ray_overhead.py               # about a minute

A job is what a run has a node do for it (`cluster.tasks.compile_job`): fetch source and samples, export the small
convolutional network, compile it with one backend, and put the result into the cache that the machines share. `here`
calls it in this process; `node` has the pool place it on the one node of a cluster that this command starts; both start
the same confined workers. They take turns, the order drawn anew each round; each job has weights of its own, so that
nothing is cached. `empty` is a task that does nothing, and `first` is the first of all tasks: it starts a process
there, which imports compile-stage. `first` is taken once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage.cluster import files, tasks  # noqa: E402
from compile_stage.cluster.nodes import Needs  # noqa: E402
from compile_stage.cluster.pool import Pool  # noqa: E402
from compile_stage.cluster.remote import NodeSide  # noqa: E402
from compile_stage.core.digest import plain  # noqa: E402
from compile_stage.core.events import Silent  # noqa: E402
from compile_stage.core.run_context import open_context  # noqa: E402
from compile_stage.pipeline.run import plan_for  # noqa: E402
from compile_stage.policy.load import load_policy  # noqa: E402
from compile_stage.steps.resolve import resolve  # noqa: E402

EMPTY_TASKS = 20
STORE_BYTES = 100_000_000
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: overhead
owner: benchmarks
data:
  validation: {source: "file:%s", max_samples: 64}
targets:
  cpu: {device: cpu, threads: 1, backends: [%s], precisions: [fp32]}
"""


def write_model(folder: Path, seed: int) -> tuple[Path, Path]:
    """An MLflow model of a convolutional network with random weights, and 64 samples for it."""
    import mlflow
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    shapes = {"w1": (16, 3, 3, 3), "w2": (32, 16, 3, 3), "w3": (32, 10)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 32, 32])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "small", [given], [made], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    folder.mkdir()
    mlflow.onnx.save_model(model, str(folder / "model"), pip_requirements=["onnx"])
    np.savez(folder / "data.npz", x=rng.standard_normal((64, 3, 32, 32)).astype(np.float32))
    return folder / "model", folder / "data.npz"


def asked(folder: Path, backend: str, seed: int, shared: str) -> dict[str, Any]:
    """The arguments of `compile_job` for a model of its own."""
    model, samples = write_model(folder, seed)
    file = folder / "policy.yaml"
    file.write_text(POLICY % (samples, backend))
    policy = load_policy(file)
    with open_context(None, "local") as context:
        source = resolve(context, f"folder:{model}")
        plan = plan_for(context, policy, source)
        order = tasks.Given(
            source=source,
            policy=policy,
            files={path: files.send(Path(path), shared) for path in (source.path, str(samples))},
            started=time.time(),
            hardware=context.hardware,
            shared=shared,
        )
    (job,) = plan.jobs
    return {"given": plain(order), "plan": plain(plan), "job_id": job.id}


def here(_: Pool, arguments: dict[str, Any]) -> Any:
    return tasks.compile_job(NodeSide(Silent()), **arguments)  # type: ignore[arg-type]


def node(pool: Pool, arguments: dict[str, Any]) -> Any:
    return pool.submit("compile_stage.cluster.tasks:compile_job", arguments, Needs()).result()


def empty(pool: Pool) -> float:
    began = time.monotonic()
    pool.submit("compile_stage.cluster.tasks:sees", {"token": "none"}, Needs()).result()
    return time.monotonic() - began


def row(backend: str, way: str, seconds: list[float]) -> dict[str, Any]:
    figures = {"median_s": statistics.median(seconds), "low_s": min(seconds), "high_s": max(seconds)}
    return {"backend": backend, "way": way, **{name: round(value, 4) for name, value in figures.items()}}


def measure(pool: Pool, backend: str, repeats: int, work: Path) -> list[dict[str, Any]]:
    """The rows of a backend: both ways, and the differences of their rounds."""
    order = np.random.default_rng(0)
    ways = {"here": here, "node": node}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):  # the first fills the file system's cache, and is not counted
        for way in order.permutation(list(ways)):
            folder = work / f"{backend}-{number}-{way}"
            seed = 2 * number + list(ways).index(way)
            arguments = asked(folder, backend, seed, f"file://{work / 'shared'}")
            began = time.monotonic()
            answer = ways[way](pool, arguments)
            took = time.monotonic() - began
            if answer["failure"]:
                raise SystemExit(f"{backend}: {answer['failure']['problem']}")
            if number:
                times[way].append(took)
    more = [there - ours for ours, there in zip(times["here"], times["node"], strict=True)]
    return [row(backend, way, seconds) for way, seconds in {**times, "more": more}.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["onnxruntime"])
    parser.add_argument("--repeats", type=int, default=5)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        results.recording("ray-overhead", chosen.save) as record,
    ):
        work = Path(scratch)
        record.settings |= {"repeats": chosen.repeats, "precision": "fp32", "threads": 1}
        os.environ |= {"COMPILE_STAGE_CACHE": str(work / "node"), "COMPILE_STAGE_CACHE_KEY": str(work / "key")}
        (work / "key").write_bytes(os.urandom(32))
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
        os.environ["COMPILE_STAGE_CACHE"] = str(work / "driver")
        with Pool.connect() as pool:
            first = empty(pool)
            record.rows.append(row("", "first", [first]))
            record.rows.append(row("", "empty", [empty(pool) for _ in range(EMPTY_TASKS)]))
            for backend in chosen.backends:
                record.rows.extend(measure(pool, backend, chosen.repeats, work))
    for one in record.rows:
        print(
            f"{one['backend']:12} {one['way']:6} {one['median_s']:8.3f} s ({one['low_s']:.3f} to {one['high_s']:.3f})"
        )


if __name__ == "__main__":
    main()
