"""Attention in 8 bits or in floats: products of two activations, with a Softmax between them, in OpenVINO.

    python benchmarks/products.py                 # about a minute on two cores

What `Scheme` option `products` is chosen by (docs/int8.md): on a CPU without VNNI floats are faster. On one with it,
see for yourself. Batch 1, two threads, both graphs in turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path[:0] = [str(Path(__file__).parent)]

import int8 as nets  # noqa: E402
import results  # noqa: E402
from turns import in_turns  # noqa: E402

SIZES = ((64, 32, 6), (128, 32, 12), (128, 64, 6), (145, 64, 3), (256, 64, 12), (512, 64, 12), (1024, 64, 8))
"""Length of the sequence, width of a head, heads."""


def attention(length: int, width: int, heads: int, path: Path, *, quantised: bool) -> None:
    """Write softmax(query · keys) · values; with what each product reads in int8, and the Softmax in uint8, where
    asked.
    """
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def read(name: str, scale: float = 0.03, zero: type = np.int8) -> str:
        if not quantised:
            return name
        constants.extend(
            (
                numpy_helper.from_array(np.float32(scale), f"{name}/scale"),
                numpy_helper.from_array(zero(0), f"{name}/zero"),
            )
        )
        ends = [f"{name}/scale", f"{name}/zero"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *ends], [f"{name}/int"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}/int", *ends], [f"{name}/back"]))
        return f"{name}/back"

    nodes.append(helper.make_node("MatMul", [read("query"), read("keys")], ["scores"]))
    nodes.append(helper.make_node("Softmax", ["scores"], ["shares"], axis=-1))
    nodes.append(helper.make_node("MatMul", [read("shares", 1 / 255, np.uint8), read("values")], ["answer"]))
    rows, columns = [1, heads, length, width], [1, heads, width, length]
    shapes = {"query": rows, "keys": columns, "values": rows}
    graph = helper.make_graph(
        nodes, "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, rows)], constants,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of taking turns, a size")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("products", chosen.save) as record:
        record.settings |= {"batch": 1, "threads": nets.THREADS, "backend": "openvino"}
        record.rows += measure(chosen.seconds)


def measure(seconds: float) -> list[dict[str, object]]:
    """A row for each size."""
    figures: list[dict[str, object]] = []
    print("| length, width of a head, heads | float32, ms | int8 over float32 |\n|---|---|---|")
    random = np.random.default_rng(0)
    for length, width, heads in SIZES:
        example = {
            name: random.standard_normal((1, heads, *shape), dtype=np.float32)
            for name, shape in (("query", (length, width)), ("keys", (width, length)), ("values", (length, width)))
        }
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for kind in ("float32", "int8"):
                path = Path(folder) / f"{kind}.onnx"
                attention(length, width, heads, path, quantised=kind == "int8")
                runs[kind] = nets.on_openvino(path, example)
            times = in_turns(runs, example, seconds)
        ratio = statistics.median(mine / other for mine, other in zip(times["int8"], times["float32"], strict=True))
        print(
            f"| {length}, {width}, {heads} | {statistics.median(times['float32']) * 1e3:.2f} | {ratio:.2f} |",
            flush=True,
        )
        figures.append({"length": length, "width": width, "heads": heads, "int8_over_float32": round(ratio, 3)})
    return figures


if __name__ == "__main__":
    main()
