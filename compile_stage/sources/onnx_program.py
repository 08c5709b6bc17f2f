"""ONNX → PyTorch program, by way of onnx2torch, for compilers that start from one.

onnx2torch 1.5 makes a module of each operator; torch.export then traces them. What it can't trace as it stands is
sizes: onnx2torch holds them as tensors, also constant ones (`Reshape`'s second input), and torch.export does not know
what is in a tensor. So sizes are followed here beside the tensors, as numbers and symbols, and operators that take
sizes are given those. What still depends on the data is refused, by its operator.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError
from compile_stage.core.records import PortableModel, ShapeRange, SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.opset_conversion import converter_errors
from compile_stage.plugin_support.torch_programs import free_axes, tracing
from compile_stage.sources import graph, torch_forward, torch_portable, torch_signature

if TYPE_CHECKING:
    from onnx import ModelProto

    from compile_stage.core.tensors import Batch

NEWEST_OPSET = 17
"""The newest operator set that onnx2torch 1.5 knows; what is newer is converted down where it must be."""

_LARGEST_SIZES = 64
"""Integers of more elements are data, not sizes."""

_NEEDS_TORCHVISION = {"NonMaxSuppression", "RoiAlign"}
"""onnx2torch computes them with torchvision, and how many boxes come out depends on the data."""


def export(
    model: PortableModel, source: SourceModel, shapes: Mapping[str, ShapeRange], example: Batch | None, into: Path
) -> PortableModel:
    """Write the ONNX file of `model` as `into/model.pt2`. Names, types and shapes of its inputs and outputs stay.

    Args:
        example: Whose sizes are traced with, where `shapes` does not give one.

    Raises:
        SourceError: An operator, a type or a size that can't be had as a program; it is named.
    """

    arguments = _arguments(model.signature, shapes, example, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside both packages
        onnx2torch = _onnx2torch()
        prepared = _prepare(onnx_weights.load_whole(model.path), source)
        try:
            converted = onnx2torch.convert(prepared).eval().requires_grad_(False)
        except Exception as error:
            raise SourceError(
                f"onnx2torch can't convert it: {torch_forward.named_line(error)}", where=source.uri
            ) from error
        nodes = importlib.import_module("onnx2torch.onnx_graph").OnnxGraph(prepared.graph).nodes
        program = _trace(converted, nodes, model.signature, arguments, source)
    signature = _signature(program, model.signature, source)
    return replace(torch_portable.save_program(program, signature, source, shapes, into), notes=model.notes)


# ------------------------------------------------------------------------------------------------------------ the graph


def _onnx2torch() -> Any:
    """The package. It imports torchvision, for two operators that are refused here anyway; where there is none, or one
    that does not fit the installed PyTorch, empty modules stand in its place while it is imported."""
    try:
        return importlib.import_module("onnx2torch")
    except (ImportError, RuntimeError):  # RuntimeError: torchvision's own operators are for another PyTorch
        absent, operators = ModuleType("torchvision"), ModuleType("torchvision.ops")
        for module in (absent, operators):
            vars(module).update(ops=operators, roi_align=None)
        _forget("torchvision", "onnx2torch")
        sys.modules.update({"torchvision": absent, "torchvision.ops": operators})
        try:
            return importlib.import_module("onnx2torch")
        finally:
            _forget("torchvision")


def _forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def _prepare(model: ModelProto, source: SourceModel) -> ModelProto:
    """The graph as onnx2torch wants it. Raises SourceError when it has no module for one of its operators."""
    import onnx

    _drop_allowzero(model)
    missing = _unknown(model)
    if missing and graph.opset(model) > NEWEST_OPSET:
        try:
            older = onnx.version_converter.convert_version(model, NEWEST_OPSET)
        except converter_errors():
            older = model
        if not (left := _unknown(older)):
            model, missing = older, left
    if missing:
        raise SourceError(
            f"onnx2torch has no {', '.join(missing)}",
            fix="name a backend that takes onnx, or log the model with its framework's own flavor",
            where=source.uri,
        )
    # onnx2torch answers with the outputs of nodes, each node once: so each output gets a node of its own, which has
    # that output alone.
    inner = {value.name: f"{value.name}__inner" for value in model.graph.output}
    own = {value.name for value in model.graph.input}
    for node in model.graph.node:
        node.output[:] = [inner.get(name, name) for name in node.output]
        node.input[:] = [inner.get(name, name) if name not in own else name for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = inner.get(tensor.name, tensor.name)
    del model.graph.value_info[:]
    for value in model.graph.output:
        name = value.name if value.name in own else inner[value.name]
        if name == value.name:  # it answers with its own input
            value.name = f"{name}__outer"
        model.graph.node.append(onnx.helper.make_node("Identity", [name], [value.name], name=f"out {value.name}"))
    return model


def _drop_allowzero(model: ModelProto) -> None:
    """Exporters say it of shapes that have no zero, where it has no effect; onnx2torch refuses it."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
    for node in model.graph.node:
        shape = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is not None and (numpy_helper.to_array(shape) != 0).all():
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _unknown(model: ModelProto) -> list[str]:
    """Operators that onnx2torch has no module for, with the version of their operator set."""
    registry = importlib.import_module("onnx2torch.node_converters")
    versions = {entry.domain: entry.version for entry in model.opset_import}
    names = set()
    for node in model.graph.node:
        version = versions.get(node.domain, 0)
        named = f"{node.domain or 'ai.onnx'}.{node.op_type} ({version})"
        if node.op_type in _NEEDS_TORCHVISION:
            names.add(named)
        try:
            registry.get_converter(domain=node.domain, operation_type=node.op_type, version=version)
        except NotImplementedError:
            names.add(named)
    return sorted(names)


# -------------------------------------------------------------------------------------------------------------- tracing


def _arguments(
    signature: Signature, shapes: Mapping[str, ShapeRange], example: Batch | None, source: SourceModel
) -> list[tuple[int, ...]]:
    """The shape of each input to trace with; a free batch is 2, since a size of 1 would stick."""
    sizes_of = []
    for spec in signature.inputs:
        if spec.dtype == "str":
            raise SourceError(
                f"its input {spec.name!r} is text, which a PyTorch program does not take", where=source.uri
            )
        sizes = []
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int):
                sizes.append(dim)
            elif axis == 0:
                sizes.append(2)
            elif spec.name in shapes:
                sizes.append(shapes[spec.name].typical[axis])
            elif example is not None and spec.name in example:
                sizes.append(int(example[spec.name].shape[axis]))
            else:
                raise SourceError(
                    f"the size {dim!r} of its input {spec.name!r} is free, and a program is traced with one",
                    fix="give the target shapes in the policy, or log the model with an input example",
                    where=source.uri,
                )
        sizes_of.append(tuple(sizes))
    return sizes_of


@dataclass(frozen=True)
class _Sizes:
    """A tensor of integers whose values are known while tracing.

    Attributes:
        values: Array of objects: numbers, and symbols of torch.export.
        tensor: The same as a tensor, for operators that take data.
    """

    values: Any
    tensor: Callable[[], Any]


def _trace(
    converted: Any,
    nodes: Mapping[str, Any],
    signature: Signature,
    arguments: Sequence[tuple[int, ...]],
    source: SourceModel,
) -> Any:
    """torch.export's program of the modules. Raises SourceError with the operator at which it ended."""
    import torch

    last: list[Any] = []
    follow = _follower(nodes, _constant_sizes(converted), last)

    class Program(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.converted = converted

        def forward(self, *inputs: Any) -> Any:
            return follow(self.converted).run(*inputs, enable_io_processing=False)

    example = tuple(
        torch.ones(shape, dtype=getattr(torch, spec.dtype))
        for spec, shape in zip(signature.inputs, arguments, strict=True)
    )
    free = free_axes(signature)
    try:
        with tracing(), torch.no_grad():
            return torch.export.export(Program().eval(), example, dynamic_shapes=(free,))
    except Exception as error:
        where = f" at {last[0].operation_type} (node {last[0].name!r})" if last else ""
        raise SourceError(
            f"torch.export can't trace it{where}: {torch_forward.named_line(error)}",
            fix="name a backend that takes onnx, or log the model with its framework's own flavor",
            where=source.uri,
        ) from error


def _follower(nodes: Mapping[str, Any], constants: Mapping[str, Any], last: list[Any]) -> Any:
    """A class that runs onnx2torch's modules one after another, and follows sizes beside them.

    Args:
        nodes: Module → its ONNX node.
        constants: As `_constant_sizes` gives them.
        last: Is kept holding the node that runs, for the message when it is the last one.
    """
    import torch

    class Follow(torch.fx.Interpreter):  # type: ignore[misc]
        def fetch_attr(self, target: str) -> Any:
            held = super().fetch_attr(target)
            return _Sizes(constants[target], lambda: held) if target in constants else held

        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            node = nodes[str(target)]
            last[:] = [node]
            if node.operation_type == "Constant" and f"{target}.value" in constants:
                held = super().call_module(target, args, kwargs)
                return _Sizes(constants[f"{target}.value"], lambda: held)
            answer = _of_sizes(node, args, kwargs)
            if answer is not None:
                return answer
            args, kwargs = torch.utils._pytree.tree_map(_as_tensor, (args, kwargs))
            if node.operation_type == "GatherND" and not node.attributes.get("batch_dims", 0):
                return args[0][tuple(args[1].unbind(-1))]  # onnx2torch's way fixes the sizes that it gathers from
            return super().call_module(target, args, kwargs)

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(target, *torch.utils._pytree.tree_map(_as_tensor, (args, kwargs)))

        def output(self, target: Any, args: Any, kwargs: Any) -> Any:
            answers = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            return tuple(map(_as_tensor, answers))

    return Follow


def _constant_sizes(converted: Any) -> dict[str, Any]:
    """Small tensors of integers that the modules hold: initializers by their own name, nodes `Constant` by that of the
    node and `.value`; as arrays of objects."""
    import numpy as np
    import torch

    def known(value: Any) -> bool:
        return value.dtype in (torch.int64, torch.int32) and value.ndim < 2 and value.numel() <= _LARGEST_SIZES

    return {name: np.array(value.tolist(), dtype=object) for name, value in converted.named_buffers() if known(value)}


def _sizes(values: Any) -> _Sizes:
    """The sizes `values`, an array of objects, with the tensor that they make where one is asked for."""
    import numpy as np
    import torch

    def tensor() -> Any:
        if all(isinstance(value, int) for value in values.flat):
            return torch.tensor(values.astype(np.int64))
        flat = [torch.scalar_tensor(value, dtype=torch.int64) for value in values.flat]
        return torch.stack(flat).reshape(values.shape)

    return _Sizes(values, tensor)


def _as_tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Sizes) else value


def _of_sizes(node: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the operator answers where it makes sizes, computes with them alone, or takes them; None where it is one of
    data."""
    import numpy as np

    kind, attributes = node.operation_type, node.attributes
    if kind == "Shape" and not isinstance(args[0], _Sizes):
        whole = np.array(list(args[0].shape), dtype=object)
        return _sizes(whole[attributes.get("start", 0) : attributes.get("end", len(whole))])
    given = [*args, *kwargs.values()]
    if given and all(isinstance(value, _Sizes) for value in given):
        if kind == "Identity" or (kind == "Cast" and attributes.get("to") == 7):  # int64
            return args[0]
        answer = _with_sizes_alone(kind, attributes, [value.values for value in given], bare=not kwargs)
        if answer is not None:
            return answer
    beside = args[1:]
    if not kwargs and beside and not isinstance(args[0], _Sizes) and all(isinstance(a, _Sizes) for a in beside):
        return _with_sizes(kind, attributes, args[0], [argument.values for argument in beside])
    return None


def _with_sizes_alone(kind: str, attributes: Mapping[str, Any], values: Sequence[Any], *, bare: bool) -> Any:
    """Operators whose every input is sizes, all given by position if `bare`; None for any other."""
    import numpy as np
    import torch

    first = values[0]
    if kind in _ARITHMETIC:
        return _sizes(np.asarray(_ARITHMETIC[kind](*values), dtype=object))
    if kind == "Range":
        return torch.arange(*(value.item() for value in values))
    if kind == "ConstantOfShape":
        return _filled(first, attributes.get("value"))
    if kind == "Gather":
        return _sizes(np.asarray(np.take(first, values[1].astype(np.int64)), dtype=object))
    if kind == "Concat":
        return _sizes(np.concatenate(values))
    if kind in ("Unsqueeze", "Squeeze"):
        one = first.size == 1 and first.ndim == (0 if kind == "Unsqueeze" else 1)
        return _sizes(first.reshape((1,) if kind == "Unsqueeze" else ())) if one else None
    if kind == "Slice" and bare and first.ndim == 1:
        start, end = int(values[1][0]), int(values[2][0])
        return _sizes(first[start : end : int(values[4][0]) if len(values) > 4 else 1])
    return None


def _filled(sizes: Any, filler: Any) -> Any:
    """`ConstantOfShape`: of integers it may be sizes again."""
    import numpy as np
    import torch

    one = torch.zeros(1) if filler is None else filler.to_torch()
    if one.dtype == torch.int64 and all(isinstance(size, int) for size in sizes):
        return _sizes(np.full(tuple(sizes), one.item(), dtype=object))
    return torch.full(tuple(sizes), one.item(), dtype=one.dtype)


def _with_sizes(kind: str, attributes: Mapping[str, Any], x: Any, sizes: Sequence[Any]) -> Any:
    """Operators of a tensor that take sizes beside it; None for any other."""
    import torch

    wanted = list(sizes[0].flat)
    if kind == "Gather" and sizes[0].ndim == 0:
        # With a tensor as its place, the program would take a number out of data (`item`), which most compilers of
        # programs refuse.
        return x.select(attributes.get("axis", 0), wanted[0])
    if kind == "Reshape":
        keeps = not attributes.get("allowzero", 0)
        return x.reshape([x.shape[axis] if keeps and _is(size, 0) else size for axis, size in enumerate(wanted)])
    if kind == "Expand":
        ones = [1] * (x.ndim - len(wanted)) + wanted  # as in ONNX, a 1 keeps what is there
        have = [1] * (len(ones) - x.ndim) + list(x.shape)
        return x.expand([had if _is(size, 1) else size for size, had in zip(ones, have, strict=True)])
    if kind == "Tile":
        return x.repeat(wanted)
    if kind == "Slice":
        starts, ends = wanted, list(sizes[1].flat)
        axes = [int(axis) for axis in sizes[2].flat] if len(sizes) > 2 else list(range(len(starts)))
        steps = [int(step) for step in sizes[3].flat] if len(sizes) > 3 else [1] * len(starts)
        if min(steps) < 1:
            return None
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
            x = torch.ops.aten.slice.Tensor(x, axis, start, end, step)
        return x
    return None


def _is(size: Any, number: int) -> bool:
    """True for that very number: a symbol is never taken for one, which would fix it."""
    return isinstance(size, int) and size == number


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.floordiv,  # sizes are not negative
    "ReduceProd": lambda values, *_: [math.prod(values.flat)],
}


def _signature(program: Any, wanted: Signature, source: SourceModel) -> Signature:
    """The graph's own. Raises SourceError where the program is of other tensors, or where tracing fixed a size that is
    free."""
    specs = list(torch_signature.tensors(program))
    known = (*wanted.inputs, *wanted.outputs)
    actual = [f"{spec.dtype} with {len(spec.shape)} dimensions" for spec in specs]
    meant = [f"{spec.dtype} with {len(spec.shape)} dimensions" for spec in known]
    if actual != meant:
        raise SourceError(
            f"onnx2torch's program takes and gives {', '.join(actual)}; the graph has {', '.join(meant)}",
            where=source.uri,
        )
    for spec, own in zip(specs, known, strict=True):
        for axis, (dim, name) in enumerate(zip(spec.shape, own.shape, strict=True)):
            if isinstance(name, int) and str(dim) != str(name):
                raise SourceError(f"onnx2torch's program has {spec} where the graph has {own}", where=source.uri)
            if isinstance(name, str) and str(dim).isdigit():  # a symbol that was solved is written as its number
                raise SourceError(
                    f"one of its operators can't be traced without fixing dimension {axis} of {own} to {dim}",
                    fix="name a backend that takes onnx, or log the model with its framework's own flavor",
                    where=source.uri,
                )
    return wanted
