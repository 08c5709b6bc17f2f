"""What a job costs beyond its compiler: the stage's worker, protocol, digests and cache beside a plain script that
compiles the same.

    python benchmarks/overhead.py                        # every installed backend, on the small convolutional network
    python benchmarks/overhead.py onnxruntime litert --network separable --repeats 9

The script is a fresh process of the interpreter that the backend runs in (that of its toolchain, where it has one),
which loads the backend and compiles once. The job is what a run does: start a worker there, have it compile, take
digests, store the artifact in an empty cache, end the worker. Both get the same model and folder layout, and take
turns, the order drawn anew each round; reported are the medians over the rounds and that of the differences. Compilers'
own caches are cold or warm alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import int8 as nets  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from compile_stage.core import plugins  # noqa: E402
from compile_stage.core.digest import digest_tree, plain  # noqa: E402
from compile_stage.core.errors import CompileStageError  # noqa: E402
from compile_stage.core.ports import WorkerLimits  # noqa: E402
from compile_stage.core.records import Job, PortableModel, Target  # noqa: E402
from compile_stage.core.run_context import open_context  # noqa: E402
from compile_stage.steps.compile import compile_job  # noqa: E402

THREADS = 2
SCRIPT = """\
import json, sys
from pathlib import Path
from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.records import PortableModel, Scheme, Target
asked = json.loads(Path(sys.argv[1]).read_text())
backend = plugins.load("backends", asked["backend"])
model, scheme, target = (revive(kind, asked[kind.__name__]) for kind in (PortableModel, Scheme, Target))
backend.compile(model, scheme, target, "job", Path(sys.argv[2]))
"""


def as_program(model: PortableModel, name: str, folder: Path) -> PortableModel:
    example = nets.networks.samples(name, 2, 0)
    sizes = tuple({0: torch.export.Dim("batch")} for _ in example)
    program = torch.export.export(
        nets.networks.NETWORKS[name](), tuple(map(torch.from_numpy, example.values())), dynamic_shapes=sizes
    )
    folder.mkdir()
    torch.export.save(program, folder / "model.pt2")
    return PortableModel(
        path=str(folder / "model.pt2"), digest=digest_tree(folder), form="torch-export", opset=0, precision="fp32",
        signature=model.signature,
    )  # fmt: skip


def by_script(job: Job, model: PortableModel, work: Path) -> float:
    interpreter = plugins.interpreter_of(job.backend)
    linked = work / "linked"
    if not linked.exists():
        plugins.link_packages(linked)
    asked = work / "asked.json"
    records = {type(one).__name__: plain(one) for one in (model, job.scheme, job.target)}
    asked.write_text(json.dumps({"backend": job.backend, **records}))
    threads = str(THREADS)
    environment = {**os.environ, "PYTHONPATH": str(linked), "OMP_NUM_THREADS": threads, "TVM_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory(dir=work) as into:
        began = time.monotonic()
        subprocess.run(
            [interpreter or sys.executable, "-P", "-c", SCRIPT, asked, into],
            check=True, env=environment, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return time.monotonic() - began


def by_stage(job: Job, model: PortableModel, work: Path) -> float:
    with tempfile.TemporaryDirectory(dir=work) as cache:
        os.environ["COMPILE_STAGE_CACHE"] = cache
        with open_context(None, "local") as context:
            limits = WorkerLimits(cpus=THREADS, interpreter=plugins.interpreter_of(job.backend))
            began = time.monotonic()
            with context.worker(job.id, limits) as worker:
                compile_job(context, worker, job, model, None)
            return time.monotonic() - began


def measure(backend_name: str, models: dict[str, PortableModel], repeats: int, work: Path) -> dict[str, object] | None:
    """The figures of a backend; None for a backend that is not installed or does not take the model."""
    target = Target(name="here", device="cpu", threads=THREADS, batch_sizes=(1,))
    backend = plugins.load("backends", backend_name)
    schemes = () if backend.refuse_target(target) else backend.schemes(target, "fp32")
    if not schemes or (plugins.missing(backend) and not plugins.interpreter_of(backend_name)):
        return None
    model = models[next(form for form in backend.capabilities.forms if form in models)]
    job = Job(id="job", source="", target=target, backend=backend_name, scheme=schemes[0], gates=(), form=model.form)
    order, times = np.random.default_rng(0), {by_script: [], by_stage: []}
    for round_number in range(repeats + 1):  # the first fills the file system's cache, and is not counted
        for way in order.permutation(list(times)):
            took = way(job, model, work)
            if round_number:
                times[way].append(took)
    more = [job_s - script_s for script_s, job_s in zip(times[by_script], times[by_stage], strict=True)]
    where = "toolchain" if plugins.interpreter_of(backend_name) else "this environment"
    script_s, job_s = (statistics.median(times[way]) for way in (by_script, by_stage))
    return {
        "backend": backend_name, "runs_in": where, "script_s": round(script_s, 3), "job_s": round(job_s, 3),
        "more_s": round(statistics.median(more), 3), "more_low_s": round(min(more), 3),
        "more_high_s": round(max(more), 3),
    }  # fmt: skip


def line(row: dict[str, object]) -> str:
    """Of the table."""
    more = f"{row['more_s']:+.2f} ({row['more_low_s']:+.2f} to {row['more_high_s']:+.2f})"
    return f"| {row['backend']} | {row['runs_in']} | {row['script_s']:.2f} | {row['job_s']:.2f} | {more} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=sorted(plugins.names("backends")))
    parser.add_argument("--network", default="small", choices=sorted(nets.networks.NETWORKS))
    parser.add_argument("--repeats", type=int, default=5)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    print("| backend | runs in | script s | job s | more s (least to most) |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch, results.recording("overhead", chosen.save) as record:
        record.settings |= {"network": chosen.network, "precision": "fp32", "repeats": chosen.repeats}
        work = Path(scratch)
        onnx_model, _ = nets.export(chosen.network, work / "model")
        models = {"onnx": onnx_model, "torch-export": as_program(onnx_model, chosen.network, work / "program")}
        for name in chosen.backends:
            try:
                row = measure(name, models, chosen.repeats, work)
            except (CompileStageError, subprocess.CalledProcessError) as error:
                print(f"| {name} | | | | failed: {error} |", flush=True)
                continue
            if row is not None:
                print(line(row), flush=True)
                record.rows.append(row)


if __name__ == "__main__":
    main()
