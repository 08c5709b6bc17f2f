"""What each quantised node does to the model's output, measured.

One instrumented graph holds the source and, beside each node that the lowering quantised, its quantised twin under a
switch. With all switches off it is the source; with one on, the output's error is what that one node causes, through
everything that follows it. A run costs about one run of the source, activations live no longer than within any run, and
no session is built twice.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.records import PortableModel, SampleSet, Sensitivity
from compile_stage.core.sample_files import read_batches
from compile_stage.precision.mixed import Unit, find_units, load_pair, merge_orders, restore_activations
from compile_stage.precision.onnx_graph import open_session, write_graph
from compile_stage.precision.wiring import attribute, copy_message, reads

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compile_stage.core.tensors import Batch

SWITCHES = "compile_stage_switches"
PASSES = 5
"""The measurement costs about as much as so many plain passes over the calibration samples; it takes at least 2."""

_MOST_SAMPLES = 16  # enough for a ranking: effects of nodes differ by orders of magnitude


def rank_nodes(
    model: PortableModel, lowered: PortableModel, samples: SampleSet, threads: int
) -> tuple[Sensitivity, ...]:
    """Every quantised node with its effect on the output, in the source's order.

    Args:
        samples: The first few are run: as many as `PASSES` allows.
    """
    source, twin = load_pair(model, lowered)
    restore_activations(source.graph, twin.graph)
    units = find_units(source.graph, twin.graph)
    if not units:
        return ()
    count = min(_MOST_SAMPLES, max(2, PASSES * samples.count // len(units)))
    batches = list(islice(read_batches(samples, model.signature), count))
    costs = _costs(model, units, batches[0])
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as folder:
        _instrument(source, twin, units)
        path = write_graph(source, Path(folder))
        del source, twin
        effects = _measure(path, len(units), batches, threads)
    return tuple(
        Sensitivity(node=unit.node, op=unit.op, effect=effect, cost=costs[unit.node], together=unit.together)
        for unit, effect in zip(units, effects, strict=True)
    )


def _measure(path: Path, count: int, batches: Sequence[Batch], threads: int) -> list[float]:
    """Noise power over signal power at the outputs, by switch, averaged over the batches and summed over the
    outputs."""
    session = open_session(path, threads=threads)
    effects = np.zeros(count)
    for batch in batches:
        clean = session.run(None, {**batch, SWITCHES: np.zeros(count, bool)})
        for number in range(count):
            switches = np.zeros(count, bool)
            switches[number] = True
            effects[number] += _noise(clean, session.run(None, {**batch, SWITCHES: switches}))
    return [float(value) / len(batches) for value in effects]


def _noise(clean: Sequence[Any], noisy: Sequence[Any]) -> float:
    total = 0.0
    for before, after in zip(clean, noisy, strict=True):
        if not isinstance(before, np.ndarray) or before.dtype.kind != "f":
            continue
        signal = float(np.sum(np.square(before, dtype=np.float64)))
        noise = float(np.sum(np.square(after.astype(np.float64) - before)))
        total += math.inf if math.isnan(noise) else noise / max(signal, 1e-30)
    return total


def _instrument(source_model: ModelProto, twin_model: ModelProto, units: Sequence[Unit]) -> None:
    """Put the twin of every unit beside it in the source graph, behind a switch.

    An `If` computes the unit's tensors: either hands on what the source's nodes make (now called `TENSOR/float`), or
    runs the twin's nodes. Its condition is the unit's element of the graph input `SWITCHES`.
    """
    from onnx import TensorProto, helper

    graph = source_model.graph
    constants = {tensor.name: tensor for tensor in twin_model.graph.initializer}
    copied: set[str] = set()
    makers = {name: node for node in graph.node for name in node.output if name}
    known = {entry.domain for entry in source_model.opset_import}
    source_model.opset_import.extend(entry for entry in twin_model.opset_import if entry.domain not in known)
    graph.input.append(helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [len(units)]))
    for number, unit in enumerate(units):
        for name in sorted({name for node in unit.cone for name in reads(node)} & constants.keys() - copied):
            copied.add(name)
            graph.initializer.append(copy_message(constants[name], name=f"twin/{name}"))
        plain = {tensor: f"{tensor}/float" for tensor in unit.tensors}
        maker = makers[unit.tensors[0]]
        maker.output[:] = [plain.get(name, name) for name in maker.output]
        graph.initializer.append(helper.make_tensor(f"unit{number}/index", TensorProto.INT64, [], [number]))
        graph.node.extend(_switch(number, unit, plain, constants.keys()))
    del graph.value_info[:]
    merge_orders(graph)


def _switch(number: int, unit: Unit, plain: Mapping[str, str], constants: Collection[str]) -> Iterator[Any]:
    """The nodes that compute a unit's tensors in float32 or in integers, by its switch.

    Args:
        plain: Each of the unit's tensors → what it is called in float32.
        constants: Names of the twin's constants, which the graph holds as `twin/NAME`.
    """
    from onnx import helper

    prefix = f"unit{number}"
    rename = {name: f"{prefix}/{name}" for node in unit.cone for name in node.output if name}
    rename |= {name: f"twin/{name}" for node in unit.cone for name in reads(node) if name in constants}
    quantised = []
    for node in unit.cone:
        copy = copy_message(node, name=f"{prefix}/{node.name}")
        copy.input[:] = [rename.get(name, name) for name in node.input]
        copy.output[:] = [rename.get(name, name) for name in node.output]
        quantised.append(copy)
    untouched = [helper.make_node("Identity", [plain[tensor]], [f"{prefix}/else/{tensor}"]) for tensor in unit.tensors]
    then_values = [_float_value(rename[tensor]) for tensor in unit.tensors]
    else_values = [_float_value(node.output[0]) for node in untouched]
    yield helper.make_node("Gather", [SWITCHES, f"{prefix}/index"], [f"{prefix}/switch"], axis=0)
    yield helper.make_node(
        "If",
        [f"{prefix}/switch"],
        list(unit.tensors),
        then_branch=helper.make_graph(quantised, f"{prefix}/quantised", [], then_values),
        else_branch=helper.make_graph(untouched, f"{prefix}/float", [], else_values),
    )


def _float_value(name: str) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _costs(model: PortableModel, units: Sequence[Unit], batch: Batch) -> dict[str, float]:
    """Multiplications of each unit's heaviest node at the sample's shape; 1 where shapes can't be inferred."""
    import onnx

    graph = onnx.load(model.path, load_external_data=False)
    for value in graph.graph.input:
        if value.name in batch:
            for dim, size in zip(value.type.tensor_type.shape.dim, batch[value.name].shape, strict=True):
                dim.dim_value = size
    del graph.graph.value_info[:]  # they hold the symbolic sizes
    for value in graph.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(graph, data_prop=True).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes.setdefault(value.name, [dim.dim_value for dim in dims])
    return {unit.node: max(_multiplications(node, shapes) for node in unit.source) for unit in units}


def _multiplications(node: NodeProto, shapes: dict[str, list[int]]) -> float:
    output_shape = shapes.get(node.output[0])
    read = [shapes.get(name) for name in node.input]
    if output_shape is None:
        return 1.0
    each = 1
    if node.op_type == "Conv" and len(read) > 1 and read[1]:
        each = math.prod(read[1][1:])
    elif node.op_type in ("MatMul", "Gemm") and read[0]:
        each = read[0][0] if attribute(node, "transA", 0) else read[0][-1]
    return float(math.prod(output_shape) * each)
