"""The lowering to fp16 with onnx-ir's graph in place of ONNX's protobuf messages: bytes, outputs, time, memory, lines.

    python benchmarks/graph_library.py [NETWORK]...      default: small separable vit lstm bert6 resnet50

Each lowering runs in a process of its own, without calibration. The algorithm is that of
`compile_stage/precision/halves.py`; links between tensors and nodes and shape inference are the library's.
docs/decisions/0025 has the result.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

sys.path[:0] = [str(Path(__file__).parents[1])]

from compile_stage.precision import halves, onnx_graph, wiring  # noqa: E402
from compile_stage.precision.float16 import FLOAT16_MAX, HALF, _constants_past  # noqa: E402

NETWORKS = ("small", "separable", "vit", "lstm", "bert6", "resnet50")
ROUNDS = 5


def lower(model: Any, half: halves.Half, keep: Collection[str]) -> None:
    """Rewrite an `onnx_ir.Model` in place, every node of which has a name; as `halves.convert` does a ModelProto."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    graph, opset = model.graph, model.graph.opset_imports[""]
    order = list(graph.initializers)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    for name in order:  # the pass puts large ones last
        graph.initializers.add(graph.initializers.pop(name))
    places = {}
    for node in graph:
        if node.name not in keep and (found := _find_places(node, opset, half)) is not None:
            places[node] = found
    named = {value.name for value in _values(graph)}
    kind = ir.DataType(half.kind)
    inputs = [*graph.inputs]
    for value in [*inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        _retype(value, kind, half, places, named)


def _values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _find_places(node: Any, opset: int, half: halves.Half) -> Any:
    """`halves._find_places` of a node of the library."""
    import onnx_ir as ir

    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    subgraph = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
    if node.domain or node.op_type in half.float32_ops or subgraph or node.op_type == "Constant":
        return None
    if any(value.dtype is None for value in values if value.name):
        return None
    if node.op_type == "Cast" and node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {one.type_param_str for one in schema.type_constraints if half.word in one.allowed_type_strs}
    read, made = _float_places(node.inputs, schema.inputs), _float_places(node.outputs, schema.outputs)
    if node.op_type not in halves._TYPED_BY_ATTRIBUTE:
        allowed &= {formal.type_str for formal in schema.inputs}
    taken_in = frozenset(place for place, word in read.items() if word in allowed)
    taken_out = frozenset(place for place, word in made.items() if word in allowed)
    first = read.get(0) or made.get(0)
    return halves._Places(taken_in, taken_out) if (taken_in or taken_out) and first in allowed else None


def _float_places(values: Any, formals: Any) -> dict[int, str]:
    import onnx_ir as ir

    return {
        place: str(formals[min(place, len(formals) - 1)].type_str)
        for place, value in enumerate(values)
        if value is not None and value.name and value.dtype == ir.DataType.FLOAT
    }


def _retype(value: Any, kind: Any, half: halves.Half, places: Any, named: set[str]) -> None:
    """Give one tensor the type of the node that makes it; a Cast stands before each reader that wants the other."""
    import onnx_ir as ir

    if value.dtype != ir.DataType.FLOAT:
        return
    uses = [(node, place) for node, place in value.uses()]
    graph = value.graph
    in_half = [use for use in uses if use[0] in places and use[1] in places[use[0]].inputs]
    in_float = [use for use in uses if use not in in_half]
    public = value.is_graph_output() or any(node.graph is not graph for node, _ in uses)
    tensor = ir.convenience.get_const_tensor(value)
    constant = tensor is not None and not value.is_graph_input()
    maker = value.producer()

    def fresh(suffix: str) -> str:
        name = f"{value.name}{suffix}"
        while name in named:
            name += "_"
        named.add(name)
        return name

    def cast(source: Any, name: str, to: Any) -> Any:
        node = ir.node("Cast", [source], {"to": int(to)}, name=f"{name}/cast")
        node.outputs[0].name, node.outputs[0].dtype = name, to
        if source.producer() is None:
            graph.insert_before(graph[0], node)
        else:
            graph.insert_after(source.producer(), node)
        return node.outputs[0]

    def reconnect(uses: Any, to: Any) -> None:
        for node, place in uses:
            node.replace_input_with(place, to)

    if maker is not None and maker in places and value.index() in places[maker].outputs:
        _retype_attribute(maker, kind, half)
        shape, value.dtype = value.shape, kind
        if public:
            name, value.name = value.name, fresh(f".{half.precision}")
            plain = cast(value, name, ir.DataType.FLOAT)
            plain.shape = shape
            plain.metadata_props.update(value.metadata_props)
            reconnect(in_float, plain)
            if value.is_graph_output():
                graph.outputs[graph.outputs.index(value)] = plain
        elif in_float:
            reconnect(in_float, cast(value, fresh(".fp32"), ir.DataType.FLOAT))
    elif in_half and constant and maker is not None and not in_float and not public:
        maker.attributes["value"] = ir.AttrTensor(
            "value", ir.Tensor(_encode(tensor, half), dtype=kind, name=tensor.name)
        )
        value.dtype = kind
    elif in_half and constant:
        encoded = ir.Tensor(_encode(tensor, half), dtype=kind)
        if in_float or public:
            copy = ir.Value(name=fresh(f".{half.precision}"), type=ir.TensorType(kind), shape=value.shape)
            copy.const_value = encoded
            graph.register_initializer(copy)
            reconnect(in_half, copy)
        else:
            value.const_value, value.dtype = encoded, kind
    elif in_half:
        reconnect(in_half, cast(value, fresh(f".{half.precision}"), kind))


def _encode(tensor: Any, half: halves.Half) -> Any:
    import ml_dtypes

    dtype = np.float16 if half.name == "float16" else ml_dtypes.bfloat16
    values = tensor.numpy()
    return half.encode(values).view(dtype).reshape(values.shape)


def _retype_attribute(node: Any, kind: Any, half: halves.Half) -> None:
    import onnx_ir as ir

    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(kind))
    elif node.op_type == "ConstantOfShape":
        held = node.attributes.get("value")
        values = np.zeros(1, np.float32) if held is None else held.as_tensor().numpy()
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(half.encode(values).view(np.float16), dtype=kind))


# ---------------------------------------------------------------------------------------------------------- measuring


def with_library(path: Path, into: Path) -> None:
    """From file to file, as `Float16.lower` goes without samples."""
    import onnx_ir as ir

    model = ir.load(path)
    names: set[str] = set()
    for position, node in enumerate(model.graph):
        if not node.name or node.name in names:
            node.name = f"{node.op_type}_{position}"
        names.add(node.name)
    overflowing = set()
    for value in model.graph.initializers.values():
        if value.const_value.dtype == ir.DataType.FLOAT:
            magnitudes = np.abs(value.const_value.numpy())
            if np.any((magnitudes > FLOAT16_MAX) & np.isfinite(magnitudes)):
                overflowing.add(value)
    keep = {node.name for value in overflowing for node, _ in value.uses()}
    lower(model, HALF, keep)
    proto = ir.to_proto(model)
    del proto.metadata_props[:], proto.graph.value_info[:]
    proto.producer_name, proto.producer_version, proto.doc_string = "compile-stage", "", ""
    proto.graph.name = "model"
    onnx_graph.write_graph(proto, into)


def with_messages(path: Path, into: Path) -> None:
    """The lowering as it is, without samples."""
    model = onnx.load(path)
    onnx_graph.name_nodes(model.graph)
    overflowing = _constants_past(model, FLOAT16_MAX)
    keep = {node.name for node in model.graph.node if overflowing.intersection((*node.input, *node.output))}
    halves.convert(model, HALF, keep)
    del model.metadata_props[:]
    model.producer_name, model.producer_version, model.doc_string = "compile-stage", "", ""
    model.graph.name = "model"
    onnx_graph.write_graph(model, into)


WAYS = {"messages": with_messages, "library": with_library}


def run_alone(way: str, path: Path, into: Path) -> dict[str, float]:
    """CPU seconds to import and to lower (median), and peak memory above that after the imports in MB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--alone", way, str(path), str(into)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_here(way: str, path: Path, into: Path) -> None:
    begun = time.process_time()
    if way == "library":
        import onnx_ir  # noqa: F401
    imported = time.process_time() - begun
    before = peak_kib()
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()  # of the CPU: another process beside this one does not count
        WAYS[way](path, into)
        times.append(time.process_time() - begun)
    print(json.dumps({"import_s": imported, "lower_s": median(times), "peak_mb": (peak_kib() - before) / 1000}))


def peak_kib() -> int:
    """Largest resident memory of this process so far (that of `getrusage` counts the parent's before exec)."""
    return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))


def describe(path: Path) -> tuple[str, list[tuple[str, int]]]:
    """Digest of the file, and how many nodes of each kind it holds."""
    kinds: dict[str, int] = {}
    for node in onnx.load(path).graph.node:
        kinds[node.op_type] = kinds.get(node.op_type, 0) + 1
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12], sorted(kinds.items())


def outputs(path: Path, inputs: dict[str, np.ndarray]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return list(onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, inputs))


def ours() -> int:
    """The same parts of the lowering as it is: what finds types and readers, decides, and rewrites."""
    deciding = (halves.convert, halves._plan, halves._touches_float, halves._find_places, halves._must_stay)
    deciding = (*deciding, halves._allowed_variables, halves._float_places)
    rewriting = (halves._Rewriter, halves._readers, halves._float_constants, halves._encode, halves._retype)
    shared = (onnx_graph.read_types, onnx_graph.constant_tensor, onnx_graph._split_weights, onnx_graph._tensor_bytes)
    wired = (wiring.Names, wiring.has_subgraph, wiring.reads, wiring.captured, wiring.constant_weights)
    return code_lines(*deciding, *rewriting, *shared, *wired, wiring._captured_by, wiring.replace_nodes)


def code_lines(*functions: Any) -> int:
    """Lines that are neither empty nor comment nor docstring."""
    total = 0
    for function in functions:
        source = inspect.getsource(function).replace(inspect.getdoc(function) or "\0", "")
        total += sum(bool(line.strip()) and not line.strip().startswith(("#", '"""')) for line in source.splitlines())
    return total


def export(name: str, into: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The network as an ONNX file with a free batch, and two samples."""
    import networks
    import torch

    inputs = networks.samples(name, 2, seed=2)
    given = tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in inputs.values())
    free = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
    program = torch.onnx.export(
        networks.NETWORKS[name](), given, input_names=list(inputs), output_names=["y"], dynamic_shapes=free,
        dynamo=True, opset_version=18, verbose=False,
    )  # fmt: skip
    onnx.save(program.model_proto, into / "model.onnx")
    return into / "model.onnx", inputs


def main(names: list[str]) -> None:
    print(
        "| network | same bytes | same nodes | same outputs "
        "| CPU ms: messages | CPU ms: onnx-ir | peak MB: messages | peak MB: onnx-ir |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            path, inputs = export(name, place)
            figures = {way: run_alone(way, path, place / way) for way in WAYS}
            (digest, nodes), (other, others) = (describe(place / way / "model.onnx") for way in WAYS)
            same = all(map(np.array_equal, *(outputs(place / way / "model.onnx", inputs) for way in WAYS)))
            cells = [
                name, *("yes" if one else "no" for one in (digest == other, nodes == others, same)),
                *(f"{figures[way]['lower_s'] * 1e3:.0f}" for way in WAYS),
                *(f"{figures[way]['peak_mb']:.0f}" for way in WAYS),
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"import of onnx-ir beside onnx: {figures['library']['import_s']:.2f} s")
    theirs = code_lines(lower, _values, _find_places, _float_places, _retype, _encode, _retype_attribute)
    print(f"lines: {ours()} with messages, {theirs} with onnx-ir")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        measure_here(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1:] or list(NETWORKS))
