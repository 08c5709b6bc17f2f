"""Embedding tables in 8 bits: stored as integers, and made floats of behind the Gather that reads them, so that only
the rows that are read are ever floats.

A table is cut into blocks along its rows, each with its own step: one scale for all rows, or one for each column,
leaves few steps for rows of small values or blocks without an outlier (1.3 dB of a BERT's output, against 0.3). A step
is one float32 scale of the whole table times the block's ratio in float16, which costs an eighth of what the integers
need. In ONNX's standard operators:

    Gather(integers) → DequantizeLinear(scale) → Mul → Reshape
            Gather(ratios) → Cast to float32 ─────↗
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.precision.qdq import View, add_constant
from compile_stage.precision.wiring import Names, drop_unused_weights, is_standard, replace_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

LEVELS = 127

_BLOCK = 16  # of twice as many a BERT's output loses 0.1 dB more; half as many would add an eighth to the table
_BLOCKS = range(8, 33)

# Steps that are tried, as parts of the least that holds the block's largest value: so few values round now better, now
# worse, by chance. None is below 1: nothing is clipped, and no error passes half a step.
_PARTS = tuple(1 + part / 100 for part in range(9))

# A smaller table stays in float32. The nodes behind a Gather take about 10 µs a call, whatever they hold, which a small
# network would feel; and a position or a token type counts in the sum as much as a word does, while its table saves
# next to nothing.
_LEAST_BYTES = 8 << 20

_MAGNITUDES = (1e-30, 1e38)  # of a table: between these, steps and products are normal float32 numbers
_AT_ONCE = 1 << 20  # elements that are rounded at once


@dataclass(frozen=True)
class Table:
    """A table in 8 bits: `integers * scale * ratios`.

    Attributes:
        integers: int8 [rows, blocks, block].
        scale: Of the whole table.
        ratios: float16 [rows, blocks, 1], above 0.
    """

    integers: Any
    scale: np.float32
    ratios: Any


def round_tables(graph: GraphProto, kept: Collection[str]) -> int:
    """Store what Gathers read from the first axis of a float32 matrix as integers. Returns how many tables.

    The name of a Gather's output moves to the node that makes the floats; the Gather keeps its own. A table that is
    read otherwise too (a node that is kept, a subgraph, a product in float, the graph's output) stays as it is: it
    would be stored twice.

    Args:
        kept: Names of nodes that stay as they are.
    """
    view, names = View(graph), Names(graph)
    behind: dict[str, list[Any]] = {}
    chosen = _choose(view, kept)
    for name in chosen:
        readers = view.readers[name]
        ranks = {node.name: view.rank(node.input[1]) for node in readers}
        values = view.values(name)
        # A row in blocks has an axis more, and to lose it again one must know how many there are.
        block = values.shape[1] if None in ranks.values() else _block(values.shape[1])
        table = round_table(values, block)
        held = _add(graph, names, name, table)
        for node in readers:
            rank = ranks[node.name]
            behind[node.name] = _read(graph, names, node, held, rank, table.integers.shape)
    if chosen:
        replace_nodes(graph, [part for node in graph.node for part in (node, *behind.get(node.name, ()))])
        drop_unused_weights(graph)
    return len(chosen)


def say_tables(count: int) -> str:
    """The sentence for a report."""
    return f"{count} embedding table{'s are' if count > 1 else ' is'} stored in 8 bits"


def round_table(values: Any, block: int) -> Table:
    """A float32 matrix [rows, width] in 8 bits, in blocks of so many columns, which divides the width.

    No error passes half a step.
    """
    rows, width = values.shape
    scale = np.float32(_largest(values) / LEVELS)
    blocks = values.reshape(-1, block)
    integers = np.empty(blocks.shape, np.int8)
    ratios = np.empty(len(blocks), np.float16)
    each = max(1, _AT_ONCE // block)
    for start in range(0, len(blocks), each):
        part = slice(start, start + each)
        integers[part], ratios[part] = _round_blocks(blocks[part] / scale)
    shape = (rows, width // block)
    return Table(integers.reshape(*shape, block), scale, ratios.reshape(*shape, 1))


def _round_blocks(blocks: Any) -> tuple[Any, Any]:
    """Integers and ratios of blocks, one a row, in units of the table's scale: no square overflows."""
    least = np.abs(blocks).max(1) / np.float32(LEVELS)
    ratios, errors = np.ones(len(blocks), np.float16), np.full(len(blocks), np.inf)
    for part in _PARTS:
        tried = _round_up(least * np.float32(part))
        off = np.rint(blocks / tried[:, None])
        off *= tried[:, None]
        off -= blocks
        error = np.einsum("ij,ij->i", off, off)
        better = error < errors
        ratios[better], errors[better] = tried[better], error[better]
    whole = np.rint(blocks / ratios.astype(np.float32)[:, None])
    return np.clip(whole, -LEVELS, LEVELS).astype(np.int8), ratios


def _round_up(ratios: Any) -> Any:
    """The next float16 numbers that are no less, as float32; for 0, 1, since any is right."""
    near = ratios.astype(np.float16)
    up = np.where(near < ratios, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)
    return np.where(ratios > 0, up, np.float32(1))


def _block(width: int) -> int:
    """How many columns share a step: of the divisors near `_BLOCK` the nearest; the whole row where there is none."""
    fitting = [block for block in _BLOCKS if width % block == 0]
    return min(fitting, key=lambda block: (abs(block - _BLOCK), block), default=width)


def _choose(view: View, kept: Collection[str]) -> list[str]:
    """The tables that are stored as integers, in the graph's order."""
    tables = [name for name in view.constants if _is_table(view, name, kept)]
    low, high = _MAGNITUDES
    return [name for name in tables if low < _largest(view.values(name)) < high]  # false of NaN and infinity too


def _largest(values: Any) -> float:
    """The largest magnitude, without a copy of what may be gigabytes."""
    return float(np.maximum(values.max(), -values.min()))


def _is_table(view: View, name: str, kept: Collection[str]) -> bool:
    """True for a float32 matrix that Gathers read by rows, and nobody else."""
    from onnx import TensorProto

    tensor, readers = view.constants[name], view.readers.get(name, [])
    given = {value.name for value in view.graph.input}  # a caller may put another in its place
    if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2 or not tensor.dims[0]:
        return False
    return (
        tensor.dims[1] >= _BLOCKS.start
        and 4 * math.prod(tensor.dims) >= _LEAST_BYTES
        and bool(readers)
        and name not in view.outputs | view.captured | given
        and all(node.name not in kept and _reads_rows(node, name) for node in readers)
    )


def _reads_rows(node: NodeProto, table: str) -> bool:
    if node.op_type != "Gather" or not is_standard(node) or node.input[0] != table:
        return False
    return all(attribute.i in (0, -2) for attribute in node.attribute if attribute.name == "axis")


@dataclass(frozen=True)
class _Held:
    """Names of a table's parts in the graph."""

    integers: str
    scale: str
    zero: str
    ratios: str


def _add(graph: GraphProto, names: Names, base: str, table: Table) -> _Held:
    endings = ("quantized", "scale", "zero_point", "ratios")
    held = _Held(*(names.fresh(f"{base}_{ending}") for ending in endings))
    blocks = table.integers.shape[1] > 1
    add_constant(graph, held.integers, table.integers if blocks else table.integers[:, 0])
    add_constant(graph, held.scale, table.scale)
    add_constant(graph, held.zero, np.int8(0))
    add_constant(graph, held.ratios, table.ratios if blocks else table.ratios[:, 0])
    return held


def _read(
    graph: GraphProto, names: Names, node: NodeProto, held: _Held, rank: int | None, shape: tuple[int, int, int]
) -> list[Any]:
    """Let a Gather read the integers; returns the nodes that make of them what it returned before."""
    from onnx import TensorProto, helper

    output, indices = node.output[0], node.input[1]
    whole, steps, ratios, factors, product = (
        names.fresh(f"{output}/{part}") for part in ("integers", "steps", "ratios", "factors", "blocks")
    )
    node.input[0], node.output[0] = held.integers, whole
    del node.attribute[:]  # the first axis may have been counted from behind, and there may be one more now
    if shape[1] == 1:
        product = output

    def made(op: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        return helper.make_node(op, inputs, [output], name=names.fresh(f"{output}_{op}"), **attributes)

    nodes = [
        made("DequantizeLinear", [whole, held.scale, held.zero], steps),
        made("Gather", [held.ratios, indices], ratios, axis=0),
        made("Cast", [ratios], factors, to=TensorProto.FLOAT),
        made("Mul", [steps, factors], product),
    ]
    if product != output:
        assert rank is not None
        rows = names.fresh(f"{output}/shape")
        add_constant(graph, rows, np.array([0] * rank + [shape[1] * shape[2]], np.int64))  # 0: as it is
        nodes.append(made("Reshape", [product, rows], output))
    return nodes
