"""A model file as nodes and tensors, and a session that returns the tensors in between.

Two kinds of file: ONNX (run by ONNX Runtime, its optimisations off, so that what runs is what the graph says) and
OpenVINO's IR. A tensor is named as its file names it; names survive lowering and conversion, which is what makes two
graphs comparable.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.records import record
from compile_stage.plugin_support import onnx_weights

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

INPUT_OP = "input"
QUANTISED_SUFFIX = "_DequantizeLinear_Output"
"""What ONNX Runtime's quantizer calls a tensor after its round trip through integers; OpenVINO keeps the name."""

_CONSTANT_OPS = ("Constant", "ConstantOfShape")
_NO_TENSOR_OPS = ("ZipMap", "SequenceConstruct", "SplitToSequence", "SequenceEmpty", "SequenceInsert", "Optional")


@record
class Node:
    """One operator. Inputs and outputs are tensor names; an input that is a constant is left out."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Run = Callable[["Batch"], "Batch"]
"""Inputs by name → the tensors that were asked for, by name."""


class Graph(Protocol):
    """What a trace needs of a model file.

    Attributes:
        nodes: In an order in which they can run; constants, and what is computed of constants alone, are not among
            them.
        inputs, outputs: Names, as the model has them.
        precision: Of its weights and quantisations: `fp32`, `fp16`, `bf16`, `int8`.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    precision: str

    def round_trips(self, tensor: str) -> tuple[tuple[str, ...], bool]:
        """The same tensor after quantisation, for each way in which it is quantised.

        And whether that is all that anyone sees of it.
        """

    def open(self, tensors: Sequence[str], threads: int) -> Any:
        """A context of `Run` for these tensors.

        With none, of the model as it is served: its own outputs, all optimisations on.
        """


def open_graph(path: str | Path, *, hint: str = "f32") -> Graph:
    """The graph of an `.onnx` or `.xml` file.

    Args:
        hint: For OpenVINO's IR: the precision that it executes in (`f32`, `bf16`).

    Raises:
        UsageError: It is neither kind of file, or can't be read.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return OnnxGraph(path)
    if path.suffix == ".xml":
        return OpenVinoGraph(path, hint)
    raise UsageError(
        f"a {path.suffix or 'nameless'} file can't be looked into", fix="give an .onnx or .xml file", where=str(path)
    )


class OnnxGraph:
    """An ONNX file."""

    def __init__(self, path: Path) -> None:
        import onnx

        from compile_stage.precision.onnx_graph import QUANTISED_OPS, name_nodes

        self._path = path
        try:
            graph = onnx.load(path, load_external_data=False).graph
        except Exception as error:  # protobuf's own error has no base class that onnx promises
            raise UsageError("this is not an ONNX graph", where=str(path)) from error
        name_nodes(graph)
        constants = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        self.inputs = tuple(value.name for value in graph.input if value.name not in constants)
        self.outputs = tuple(value.name for value in graph.output)
        nodes = []
        for node in graph.node:
            varying = tuple(name for name in node.input if name and name not in constants)
            if node.op_type in _CONSTANT_OPS or (node.input and not varying):
                constants.update(node.output)
                continue
            op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            nodes.append(Node(name=node.name, op=op, inputs=varying, outputs=tuple(filter(None, node.output))))
        self.nodes = tuple(nodes)
        self._consumers = _consumers(self.nodes)
        types, known = {tensor.data_type for tensor in graph.initializer}, onnx.TensorProto
        narrow = "fp16" if known.FLOAT16 in types else "bf16" if known.BFLOAT16 in types else "fp32"
        self.precision = "int8" if {node.op_type for node in graph.node}.intersection(QUANTISED_OPS) else narrow

    def round_trips(self, tensor: str) -> tuple[tuple[str, ...], bool]:
        consumers = self._consumers[tensor]
        quantisers = [node for node in consumers if node.op == "QuantizeLinear"]
        twins = [
            back.outputs[0]
            for node in quantisers
            for back in self._consumers[node.outputs[0]]
            if back.op == "DequantizeLinear"
        ]
        alone = bool(twins) and len(quantisers) == len(consumers) and tensor not in self.outputs
        return tuple(twins), alone

    @contextmanager
    def open(self, tensors: Sequence[str], threads: int) -> Iterator[Run]:
        import onnx
        import onnxruntime

        from compile_stage.precision.onnx_graph import name_nodes, write_graph

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        wanted = tuple(tensors) or self.outputs
        with tempfile.TemporaryDirectory(prefix="compile-stage-trace-") as scratch:
            path = self._path
            if tensors:
                model = onnx_weights.load_whole(path)
                name_nodes(model.graph)
                listed = {value.name for value in model.graph.output}
                # Without a type: the runtime infers it.
                model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in listed)
                path = write_graph(model, Path(scratch))
                del model
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            try:
                session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime's own errors share no base class
                raise SourceError(f"ONNX Runtime can't load the graph: {error}", where=str(self._path)) from error
        yield lambda batch: dict(
            zip(wanted, session.run(list(wanted), {name: batch[name] for name in self.inputs}), strict=True)
        )


class OpenVinoGraph:
    """OpenVINO's intermediate representation, a `.xml` file with its `.bin`."""

    def __init__(self, path: Path, hint: str) -> None:
        import openvino

        self._path, self._hint = path, hint
        try:
            model = openvino.Core().read_model(path)
        except RuntimeError as error:
            raise UsageError("this is not a model that OpenVINO can read", where=str(path)) from error
        self._aliases: dict[str, str] = {}
        constants: set[str] = set()
        nodes = []
        for operation in model.get_ordered_ops():
            kind = operation.get_type_name()
            outputs = tuple(map(self._name, operation.outputs()))
            inputs = tuple(self._name(port.get_source_output()) for port in operation.inputs())
            varying = tuple(name for name in inputs if name not in constants)
            if kind == "Constant" or (inputs and not varying):
                constants.update(outputs)
            elif kind not in ("Parameter", "Result"):
                nodes.append(Node(name=operation.get_friendly_name(), op=kind, inputs=varying, outputs=outputs))
        self.nodes = tuple(nodes)
        self.inputs = tuple(map(self._name, model.inputs))
        # A result has the name of what it reads.
        self.outputs = tuple(self._name(port.get_node().input(0).get_source_output()) for port in model.outputs)
        self._consumers = _consumers(self.nodes)
        quantised = any(node.op == "FakeQuantize" for node in self.nodes)
        self.precision = "int8" if quantised else {"bf16": "bf16", "f16": "fp16"}.get(hint, "fp32")

    def round_trips(self, tensor: str) -> tuple[tuple[str, ...], bool]:
        consumers = self._consumers[tensor]
        quantisers = [node for node in consumers if node.op == "FakeQuantize"]
        named = self._aliases.get(tensor + QUANTISED_SUFFIX)
        # A quantisation that came from ONNX has integer outputs, and its round trip has a name of its own; NNCF's
        # has outputs in the tensor's own scale.
        twins = (named,) if named else tuple(node.outputs[0] for node in quantisers)
        alone = bool(quantisers) and len(quantisers) == len(consumers) and tensor not in self.outputs
        return twins, alone

    @contextmanager
    def open(self, tensors: Sequence[str], threads: int) -> Iterator[Run]:
        import openvino

        core = openvino.Core()
        model = core.read_model(self._path)
        keys = list(self.outputs)
        if tensors:
            ports = {
                self._name(port): port for operation in model.get_ordered_ops() for port in operation.outputs()
            }  # fmt: skip
            for name in tensors:
                if name not in keys and name in ports and name not in self.inputs:
                    model.add_outputs([ports[name]])
                    keys.append(name)
        config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": self._hint, "INFERENCE_NUM_THREADS": threads}
        if tensors:
            # As the graph says, in float: with a result on both sides of a quantisation its integer kernels have
            # other outputs than without (seen in 2026.4), and the wrong node would be named.
            config["LP_TRANSFORMS_MODE"] = "NO"
        try:
            compiled = core.compile_model(model, "CPU", config)
        except RuntimeError as error:
            raise SourceError(f"OpenVINO can't compile the graph: {error}", where=str(self._path)) from error
        request, wanted = compiled.create_infer_request(), tuple(tensors) or self.outputs

        def run(batch: Batch) -> Batch:
            request.infer([batch[name] for name in self.inputs])
            values = {key: tensor.data.copy() for key, tensor in zip(keys, request.output_tensors, strict=True)}
            return {name: batch[name] if name in self.inputs else values[name] for name in wanted}

        yield run

    def _name(self, port: Any) -> str:
        """One name for a port: its own shortest if it has any (all of them find it), else that of its operation."""
        names = sorted(port.get_names(), key=lambda name: (len(name), name))
        chosen = names[0] if names else f"{port.get_node().get_friendly_name()}:{port.get_index()}"
        self._aliases |= dict.fromkeys(names, chosen)
        return chosen

    def find(self, tensor: str) -> str | None:
        """The name under which a tensor is listed here, given any of its names."""
        return self._aliases.get(tensor)


def find_tensors(reference: Graph, candidate: Graph) -> Mapping[str, str]:
    """Tensors that both graphs have, those of the inputs first: name in the reference → name in the candidate."""
    here = {name for node in candidate.nodes if node.op not in _NO_TENSOR_OPS for name in node.outputs}
    here |= set(candidate.inputs)
    tensors = list(reference.inputs)
    tensors += [name for node in reference.nodes if node.op not in _NO_TENSOR_OPS for name in node.outputs]
    if isinstance(candidate, OpenVinoGraph):
        return {name: own for name in tensors if (own := candidate.find(name)) in here and own is not None}
    # A node that stays in fp32 amid fp16 keeps its name while its outputs get new ones.
    nodes = {node.name: node for node in candidate.nodes}
    renamed = {
        name: same.outputs[position]
        for node in reference.nodes
        if (same := nodes.get(node.name)) is not None and (same.op, len(same.outputs)) == (node.op, len(node.outputs))
        for position, name in enumerate(node.outputs)
        if same.outputs[position] not in tensors  # else the candidate has merged nodes, and this is another tensor
    }
    if isinstance(reference, OpenVinoGraph):  # a port has several names, any of which may be the other graph's
        own_names = {alias: name for alias, name in reference._aliases.items() if alias in here}
        return {name: alias for alias, name in sorted(own_names.items()) if name in tensors}
    return {name: name if name in here else renamed[name] for name in tensors if name in here or name in renamed}


def pair_outputs(reference: Graph, candidate: Graph, shared: Mapping[str, str]) -> Mapping[str, str]:
    """Outputs of the reference → those of the candidate: by name, whatever their order; what has lost its name, by its
    place among the rest.

    Args:
        shared: What `find_tensors` says of the two.
    """
    named = {name: own for name in reference.outputs if (own := shared.get(name, "")) in candidate.outputs}
    rest = iter([own for own in candidate.outputs if own not in named.values()])
    pairs = {name: named.get(name) or next(rest, "") for name in reference.outputs}
    return {name: own for name, own in pairs.items() if own}


def is_float(array: Any) -> bool:
    """True for arrays whose elements have a distance."""
    return bool(np.asarray(array).dtype.kind == "f" and np.asarray(array).size)


def _consumers(nodes: Sequence[Node]) -> Mapping[str, list[Node]]:
    consumers: defaultdict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        for name in node.inputs:
            consumers[name].append(node)
    return consumers
