"""What the backend `inductor` compiles for an NVIDIA GPU, beside `torch.compile` by hand on the same network.

    python benchmarks/gpu.py                     # ResNet-50 and BERT-6L, one row
    python benchmarks/gpu.py resnet50 --batch 8 --save

By hand: the network in half precision (`model.half()`) on the GPU, `torch.compile` in the modes that PyTorch's
documentation advises for latency; and PyTorch eager in FP32, without TF32. All take turns in one process, NumPy arrays
in and out, each call until its answer lies in the host's memory. The first calls, in which `torch.compile` compiles,
are not counted.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import networks  # noqa: E402
import numpy as np  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from turns import in_turns  # noqa: E402

from compile_stage.backends.inductor import Inductor  # noqa: E402
from compile_stage.core.digest import digest_tree  # noqa: E402
from compile_stage.core.errors import CompileStageError  # noqa: E402
from compile_stage.core.records import PortableModel, Target  # noqa: E402
from compile_stage.core.tensors import Signature, TensorSpec  # noqa: E402
from compile_stage.measure import speedups  # noqa: E402
from compile_stage.plugin_support.torch_cuda import exact_fp32  # noqa: E402

MODES = ("reduce-overhead", "max-autotune")
OURS = ("fp32", "fp16", "bf16")
Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


def exported(name: str, folder: Path) -> PortableModel:
    """A network as a PyTorch program with a free batch and one output, `answer`."""
    example = networks.samples(name, 2, 0)
    tensors = tuple(map(torch.from_numpy, example.values()))
    free = tuple({0: torch.export.Dim("batch")} for _ in tensors)
    program = torch.export.export(networks.NETWORKS[name](), tensors, dynamic_shapes=free)
    folder.mkdir(parents=True)
    torch.export.save(program, str(folder / "model.pt2"))
    with torch.no_grad():
        answer = program.module()(*tensors)
    inputs = [
        TensorSpec(name=key, dtype=str(array.dtype), shape=("batch", *array.shape[1:]))
        for key, array in example.items()
    ]
    output = TensorSpec(name="answer", dtype="float32", shape=("batch", *answer.shape[1:]))
    return PortableModel(
        path=str(folder / "model.pt2"),
        digest=digest_tree(folder),
        form="torch-export",
        opset=0,
        precision="fp32",
        signature=Signature(inputs=tuple(inputs), outputs=(output,)),
    )


def by_hand(name: str) -> Iterator[tuple[str, Run]]:
    """The peers: what each answers for a batch."""
    whole = networks.NETWORKS[name]().cuda()
    half = copy.deepcopy(whole).half()

    def run(module: Any, kind: torch.dtype, example: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        tensors = [torch.from_numpy(array).cuda() for array in example.values()]
        with torch.no_grad():
            answer = module(*[tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in tensors])
        return [answer.float().numpy(force=True)]

    yield "PyTorch eager fp32", lambda example: run(whole, torch.float32, example)
    for mode in MODES:
        compiled = torch.compile(half, mode=mode, dynamic=False)
        yield f"torch.compile fp16 {mode}", lambda example, it=compiled: run(it, torch.float16, example)


def ours(name: str, batch: int, folder: Path, stack: ExitStack) -> Iterator[tuple[str, Run, float]]:
    """Our artifacts: what each answers for a batch, and the seconds that its compilation took."""
    backend, model = Inductor(), exported(name, folder / "program")
    target = Target(name="gpu", device="cuda", batch_sizes=(batch,), threads=1)
    for precision in OURS:
        for tuned in (False, True) if precision == "fp16" else (False,):
            asked = replace(target, options={"inductor": {"max_autotune": tuned}})
            (scheme,) = backend.schemes(asked, precision)
            into, started = folder / f"{precision}-{tuned}", time.perf_counter()
            try:
                artifact = backend.compile(model, scheme, asked, precision, into)
            except CompileStageError as error:
                print(f"  inductor {precision}: {error}", flush=True)
                continue
            took = time.perf_counter() - started
            print(f"  inductor {precision} {tuned}: {took:.0f} s; {artifact.executed}; {artifact.notes}", flush=True)
            session = stack.enter_context(backend.open(artifact, 1))
            called = f"inductor {precision}" + (" max_autotune" if tuned else "")
            yield called, lambda example, it=session: list(it.run(example).values()), took


def measure(name: str, batch: int, seconds: float, folder: Path) -> list[dict[str, Any]]:
    print(f"\n{name}, {batch} rows", flush=True)
    with ExitStack() as stack:
        stack.enter_context(exact_fp32())
        made = list(ours(name, batch, folder, stack))
        runs = {called: run for called, run, _ in made} | dict(by_hand(name))
        example = networks.samples(name, batch, 1)
        expected = runs["PyTorch eager fp32"](example)[0]
        scale = float(np.abs(expected).max())
        errors = {called: float(np.abs(run(example)[0] - expected).max()) / scale for called, run in runs.items()}
        times = in_turns(runs, example, seconds)
    took, rows = {called: s for called, _, s in made}, []
    for called, measured in times.items():
        ratio = speedups.ratio_interval([(t,) for t in times["PyTorch eager fp32"]], [(t,) for t in measured], seed=0)
        rows.append(
            {
                "network": name,
                "batch": batch,
                "who": called,
                "ms": round(statistics.median(measured) * 1e3, 3),
                "times_as_fast_as_eager": round(ratio.value, 2),
                "interval": [round(ratio.low, 2), round(ratio.high, 2)],
                "largest_error": float(f"{errors[called]:.2g}"),
                "compile_s": round(took[called]) if called in took else None,
            }
        )
        print(f"  {rows[-1]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet50", "bert6"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15.0, help="of taking turns, a network")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    with results.recording("gpu", chosen.save) as record:
        record.settings.update(batch=chosen.batch, seconds=chosen.seconds)
        for name in chosen.networks:
            with tempfile.TemporaryDirectory() as folder:
                record.rows += measure(name, chosen.batch, chosen.seconds, Path(folder))


if __name__ == "__main__":
    main()
