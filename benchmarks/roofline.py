"""How near is each winner to what the machine can do?

    python benchmarks/roofline.py                     # peaks, and six networks; three minutes on two cores
    python benchmarks/roofline.py small --seconds 0.5 # shorter
    python benchmarks/roofline.py --winners FILE      # a file of benchmarks/by_hand.py --save

Measured are the highest rates of this machine with two threads: products of square matrices in float32, bfloat16 and
int8, by OpenVINO, ONNX Runtime and PyTorch, the best of all sizes; and memory, by the triad a = b + s·c over arrays
beyond every cache and by reading one. Rates are of the fastest call in each: a peak is what can be reached.

A network can't be faster than its operations (convolutions, matrix products, LSTMs) at the rate of the winner's
precision, nor than its weights, inputs and outputs can be read and written once. The longer of both over the winner's
latency is its share of the roofline. Weights that stay in a cache from call to call (those of small networks) are read
faster than from memory, so bytes are counted at the rate that was measured at the network's own size. Winners are those
of the newest `by_hand.py` run of this kind of hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import graph_cost  # noqa: E402
import networks  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import results  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from compile_stage.core.environment import hardware  # noqa: E402

NETWORKS = ("resnet50", "bert6", "separable", "vit", "lstm", "small")
SIZES = (512, 1024, 2048)
BATCHES = (1, 8)
THREADS = 2
MEMORY_MB = (1, 4, 16, 64, 256)
"""Sizes of what is read; the largest is beyond the caches."""

Call = Callable[[], Any]


# ------------------------------------------------------------------------------------------------------------ the peaks


def product(size: int, path: Path, *, quantised: bool) -> Path:
    """Write x · w, [size, size] each, w constant; in int8 with Q/DQ pairs where asked."""
    random = np.random.default_rng(0)
    weights = random.integers(-127, 128, (size, size), dtype=np.int8)
    nodes: list[onnx.NodeProto] = []
    constants = []
    if quantised:
        ends = {"x": (np.float32(0.03), np.uint8(128)), "w": (np.float32(0.01), np.int8(0))}
        for name, (scale, zero) in ends.items():
            constants += [numpy_helper.from_array(np.asarray(scale), f"{name}/scale")]
            constants += [numpy_helper.from_array(np.asarray(zero), f"{name}/zero")]
        constants.append(numpy_helper.from_array(weights, "w/int"))
        nodes.append(helper.make_node("QuantizeLinear", ["x", "x/scale", "x/zero"], ["x/int"]))
        nodes += [
            helper.make_node("DequantizeLinear", [f"{name}/int", f"{name}/scale", f"{name}/zero"], [f"{name}/f"])
            for name in ends
        ]
        nodes.append(helper.make_node("MatMul", ["x/f", "w/f"], ["y"]))
    else:
        constants.append(numpy_helper.from_array(weights.astype(np.float32) / 100, "w"))
        nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    ends_of = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "product", ends_of[:1], ends_of[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def in_openvino(path: Path, x: np.ndarray, hint: str) -> Call:
    import openvino

    config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(path, "CPU", config).create_infer_request()
    return lambda: request.infer([x], share_inputs=True)


def in_onnxruntime(path: Path, x: np.ndarray) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})


def in_torch(size: int, kind: str) -> Call:
    import torch

    torch.set_num_threads(THREADS)
    a, b = (torch.randn(size, size).to(getattr(torch, kind)) for _ in range(2))
    out = torch.empty(size, size, dtype=a.dtype)
    return lambda: torch.mm(a, b, out=out)


def products(size: int, folder: Path) -> Iterator[tuple[str, str, Call]]:
    """(precision, by what, one call)."""
    import openvino

    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    x = np.random.default_rng(1).standard_normal((size, size), dtype=np.float32)
    plain = product(size, folder / f"{size}.onnx", quantised=False)
    rounded = product(size, folder / f"{size}-int8.onnx", quantised=True)
    yield "fp32", "OpenVINO", in_openvino(plain, x, "f32")
    yield "fp32", "ONNX Runtime", in_onnxruntime(plain, x)
    yield "fp32", "PyTorch", in_torch(size, "float32")
    if has_bf16:
        yield "bf16", "OpenVINO", in_openvino(plain, x, "bf16")
        yield "bf16", "PyTorch", in_torch(size, "bfloat16")
    yield "int8", "OpenVINO", in_openvino(rounded, x, "f32")
    if has_bf16:
        yield "int8", "OpenVINO, answer in bf16", in_openvino(rounded, x, "bf16")
    yield "int8", "ONNX Runtime", in_onnxruntime(rounded, x)


def fastest_s(call: Call, seconds: float) -> float:
    """Seconds of the fastest call: what disturbs one only makes it slower."""
    call()
    best, ends = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return float(best)


def rates(seconds: float) -> list[dict[str, Any]]:
    """The highest rate of each precision, in 10^9 operations a second; a row each."""
    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            for precision, by, call in products(size, Path(folder)):
                gflops = 2 * size**3 / fastest_s(call, seconds) / 1e9
                print(f"{precision} {by} {size}: {gflops:.0f} GFLOP/s", flush=True)
                if gflops > best.get(precision, {"gflops": 0.0})["gflops"]:
                    best[precision] = {"what": precision, "gflops": round(gflops, 1), "by": f"{by}, {size} × {size}"}
    return list(best.values())


def memory(seconds: float) -> list[dict[str, Any]]:
    """Triad beyond the caches, and reading at several sizes, in 10^9 bytes a second; a row each."""
    import torch

    torch.set_num_threads(THREADS)
    count = MEMORY_MB[-1] * 1_000_000 // 4
    a, b, c = (torch.ones(count) for _ in range(3))
    triad = 3 * 4 * count / fastest_s(lambda: torch.add(b, c, alpha=3.0, out=a), seconds) / 1e9
    rows = [{"what": "memory, triad", "mb": 3 * MEMORY_MB[-1], "gb_per_s": round(triad, 2)}]
    for size in MEMORY_MB:
        part = b[: size * 1_000_000 // 4]
        read = 4 * len(part) / fastest_s(lambda part=part: torch.sum(part), seconds) / 1e9
        rows.append({"what": f"memory, read {size} MB", "mb": size, "gb_per_s": round(read, 2)})
    for row in rows:
        row["by"] = "PyTorch, 2 threads"
        print(f"{row['what']}: {row['gb_per_s']:.1f} GB/s", flush=True)
    return rows


# --------------------------------------------------------------------------------------------------------- the networks


def read_rate(rows: Sequence[dict[str, Any]], mb: float) -> float:
    """GB/s of reading so many MB again and again: of the largest measured size that is no larger, which no slower cache
    holds. Beyond the caches the triad counts too, where it is faster."""
    reads = [row for row in rows if "read" in row["what"]]
    fitting = [row for row in reads if row["mb"] <= mb] or reads[:1]
    rate = fitting[-1]["gb_per_s"]
    beyond = fitting[-1] is reads[-1]
    return max(rate, *(row["gb_per_s"] for row in rows if "triad" in row["what"])) if beyond else rate


def winners(runs: Sequence[results.Run], kind: str) -> dict[tuple[str, int], dict[str, Any]]:
    """By network and batch size, the winner of the newest by-hand run on that hardware that has one: its job, its
    latency, and the run's file."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:  # the oldest first
        if run.content["benchmark"] != "by-hand" or run.hardware != kind:
            continue
        for row in run.content["rows"]:
            if row["batch"] and "ours_p50_ms" in row:
                known = {"winner": row["ours"], "p50_ms": row["ours_p50_ms"], "winners_from": run.name}
                found[row["network"], row["batch"]] = known
    return found


def precision_of(job: str) -> str:
    """Whose rate a winner is held to: `openvino int8-sym` to int8's."""
    scheme = job.partition(" ")[2]
    return next((one for one in ("int8", "bf16") if scheme.startswith(one)), "fp32")


def bound(cost: graph_cost.Cost, precision: str, rows: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Seconds that a call takes at least, and what decides it."""
    rate = max(row["gflops"] for row in rows if row["what"] == precision)
    moved = cost.bytes_at(precision)
    times = {"operations": cost.flops / rate / 1e9, "bytes": moved / read_rate(rows, moved / 1e6) / 1e9}
    decides = max(times, key=lambda key: times[key])
    return times[decides], decides


def network_rows(
    name: str, rows: Sequence[dict[str, Any]], known: dict[tuple[str, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row for each batch size."""
    model = networks.export(name)
    for batch in BATCHES:
        cost = graph_cost.cost(model, networks.samples(name, batch, 0))
        won = known.get((name, batch))
        precision = precision_of(won["winner"]) if won else "fp32"
        least_s, decides = bound(cost, precision, rows)
        row = {"what": "network", "network": name, "batch": batch, "gflop": round(cost.flops / 1e9, 4)}
        row |= {"mb": round(cost.bytes_at(precision) / 1e6, 3), "precision": precision}
        row |= {"least_ms": round(1e3 * least_s, 4), "bound_by": decides}
        if won:
            row |= {**won, "share": round(1e3 * least_s / won["p50_ms"], 4)}
        print(row, flush=True)
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each product and each size of memory")
    parser.add_argument("--winners", type=Path, help="a by-hand file; the newest of this hardware when left out")
    results.add_save_option(parser)
    chosen = parser.parse_args(arguments)
    with results.recording("roofline", chosen.save) as record:
        record.settings |= {"threads": THREADS, "seconds": chosen.seconds}
        peaks = [*rates(chosen.seconds), *memory(chosen.seconds)]
        record.rows += peaks
        runs = results.load() if chosen.winners is None else [_run(chosen.winners)]
        known = winners(runs, _kind())
        for name in chosen.networks:
            record.rows += network_rows(name, peaks, known)
        if any(row.get("share", 0.0) > 1.0 for row in record.rows):
            note = "A share above 100 %: the peaks were measured while others used the machine. Measure on a quiet one"
            record.notes.append(note)
            print(note)


def _run(path: Path) -> results.Run:
    return results.Run(name=path.name, content=json.loads(path.read_text(encoding="utf-8")))


def _kind() -> str:
    """This machine's kind of hardware, as results call it."""
    from compile_stage.core.digest import plain

    return results.Run(name="", content={"hardware": plain(hardware())}).hardware


if __name__ == "__main__":
    main()
