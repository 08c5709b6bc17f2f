"""A traced TensorFlow function as ONNX, by tf2onnx."""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.sources import graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_COUNTER = re.compile(r"__\d+|\d{9,}")
_WRAPPER = re.compile(r"^(?:(?:StatefulPartitionedCall|PartitionedCall)(?:_\d+)?/)+")


def convert(function: Any, specs: Sequence[Any], signature: Signature, source: SourceModel) -> ModelProto:
    """The function's graph with the names, types and dimensions of `signature`.

    Args:
        function: A `tf.function` of the inputs in order; it gives a list of tensors.
        specs: `tf.TensorSpec` of each input.

    Raises:
        SourceError: An operator has no form in ONNX.
    """
    import tf2onnx

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, on NumPy's and TensorFlow's deprecations
            model: ModelProto = tf2onnx.convert.from_function(
                function, input_signature=specs, opset=graph.OPSET, custom_op_handlers={"SelectV2": (_choose, [])}
            )[0]
    except Exception as error:
        raise SourceError(
            f"tf2onnx can't convert it: {type(error).__name__}: {first_line(error)}", where=source.uri
        ) from error
    _hold_constants(model, function.get_concrete_function(*specs).graph)
    _write_composites(model.graph)
    _demand_known(model, source)
    _fix_reshapes(model)
    _order(model.graph)
    _rename(model, signature)
    _declare(model, signature)
    return model


def _choose(_context: Any, node: Any, _name: str, _arguments: Any) -> None:
    """`tf.where` as ONNX's Where. tf2onnx writes products with 0 and 1 and a sum, which are no number where the branch
    that is not taken is infinite, as in `where(x > 0, log(x), 0)`, and round whole numbers to float32."""
    node.type = "Where"


def _hold_constants(model: ModelProto, traced: Any) -> None:
    """Tensors that the traced function holds and that are no variables, such as the mean and variance of Keras's
    Normalization, become weights: tf2onnx leaves them as inputs."""
    from onnx import numpy_helper

    held = {
        inner.name: outer.numpy()
        for outer, inner in zip(traced.external_captures, traced.internal_captures, strict=True)
        if outer.dtype.name != "resource"
    }
    for value in [value for value in model.graph.input if value.name in held]:
        model.graph.initializer.append(numpy_helper.from_array(held[value.name], value.name))
        model.graph.input.remove(value)


def _demand_known(model: ModelProto, source: SourceModel) -> None:
    """Raise SourceError for operators that tf2onnx left as TensorFlow has them: it only logs that."""
    from onnx import defs

    versions = {entry.domain: entry.version for entry in model.opset_import}
    strange = sorted(
        {
            node.op_type
            for node in graph.nodes(model.graph)
            if node.domain not in versions or not defs.has(node.op_type, versions[node.domain], node.domain)
        }
    )
    if strange:
        raise SourceError(
            f"tf2onnx has no ONNX for its operators {', '.join(strange)}",
            fix=_LOOKED_UP if any(kind in _OF_LOOKUPS for kind in strange) else "",
            where=source.uri,
        )


# What Keras's IntegerLookup and Hashing compute with.
_OF_LOOKUPS = ("LookupTableFindV2", "StringToHashBucketFast")
_LOOKED_UP = (
    "call the layer that looks up or hashes (IntegerLookup, Hashing) before the model, and log the model that takes "
    "what it gives: keras.Model(lookup.output, model.output)"
)


def _write_composites(inner: Any) -> None:
    """Operators that tf2onnx leaves as TensorFlow has them, since ONNX lacks them, by those that it has."""
    for index in reversed(range(len(inner.node))):
        node = inner.node[index]
        for nested in graph.inner_graphs(node):
            _write_composites(nested)
        if node.domain:
            continue
        if (steps := _COMPOSITES.get(node.op_type)) is not None:
            parts = list(_parts(node, steps))
        elif node.op_type == "Bucketize" and node.attribute:
            parts = list(_buckets(node))
        else:
            continue
        del inner.node[index]
        for offset, part in enumerate(parts):
            inner.node.insert(index + offset, part)


_COMPOSITES: Mapping[str, Sequence[tuple[str, str, str]]] = {
    # 1 - erf(x), which Keras writes its exact GELU with.
    "Erfc": (("erf", "Erf", "x"), ("", "Sub", "one erf")),
    # Kahan's: what 1 + x loses of a small x, the quotient restores; where 1 + x is 1, the answer is x.
    "Log1p": (
        ("sum", "Add", "x one"),
        ("lost", "Equal", "sum one"),
        ("log", "Log", "sum"),
        ("kept", "Sub", "sum one"),
        ("kept_or_one", "Where", "lost one kept"),
        ("share", "Div", "x kept_or_one"),
        ("infinite", "IsInf", "x"),
        ("share_or_one", "Where", "infinite one share"),
        ("near", "Mul", "log share_or_one"),
        ("", "Where", "lost x near"),
    ),
    # tanh(x / 2) loses nothing of a small x: exp(x) - 1 = tanh(x / 2) * (exp(x) + 1). Beyond 1 nothing is lost anyway.
    "Expm1": (
        ("two", "Add", "one one"),
        ("half", "Div", "x two"),
        ("tanh", "Tanh", "half"),
        ("exp", "Exp", "x"),
        ("sum", "Add", "exp one"),
        ("near", "Mul", "tanh sum"),
        ("far", "Sub", "exp one"),
        ("size", "Abs", "x"),
        ("is_near", "Less", "size one"),
        ("", "Where", "is_near near far"),
    ),
}
"""Operator → its steps: a name, or none for the last, an operator of ONNX and what it takes: `x`, `one` or steps."""


def _parts(node: Any, steps: Sequence[tuple[str, str, str]]) -> Iterator[Any]:
    from onnx import helper

    (x,), (y,) = node.input, node.output
    yield helper.make_node("Constant", [], [f"{y}/float_one"], name=f"{node.name}/float_one", value_float=1.0)
    yield helper.make_node("CastLike", [f"{y}/float_one", x], [f"{y}/one"], name=f"{node.name}/one")
    for name, operator, taken in steps:
        inputs = [x if word == "x" else f"{y}/{word}" for word in taken.split()]
        yield helper.make_node(operator, inputs, [f"{y}/{name}" if name else y], name=f"{node.name}/{name or 'last'}")


def _buckets(node: Any) -> Iterator[Any]:
    """For each number, how many of the boundaries it is not below, as Keras's Discretization asks; all of them for what
    is no number. In float64, which holds what TensorFlow compares there."""
    from onnx import TensorProto, helper

    (x,), (y,) = node.input, node.output
    (boundaries,) = (list(one.floats) for one in node.attribute if one.name == "boundaries")
    limits = helper.make_tensor(f"{y}/limits", TensorProto.DOUBLE, [len(boundaries)], boundaries)
    last = helper.make_tensor(f"{y}/last", TensorProto.INT64, [1], [-1])
    steps: Sequence[tuple[str, str, list[str], dict[str, Any]]] = (
        ("limits", "Constant", [], {"value": limits}),
        ("last", "Constant", [], {"value": last}),
        ("wide", "Cast", [x], {"to": TensorProto.DOUBLE}),
        ("each", "Unsqueeze", [f"{y}/wide", f"{y}/last"], {}),
        ("below", "Less", [f"{y}/each", f"{y}/limits"], {}),
        ("reached", "Not", [f"{y}/below"], {}),
        ("one", "Cast", [f"{y}/reached"], {"to": TensorProto.INT32}),
    )
    for name, operator, taken, options in steps:
        yield helper.make_node(operator, taken, [f"{y}/{name}"], name=f"{node.name}/{name}", **options)
    yield helper.make_node("ReduceSum", [f"{y}/one", f"{y}/last"], [y], name=f"{node.name}/sum", keepdims=0)


def _fix_reshapes(model: ModelProto) -> None:
    """`[-1, 1024]` in place of a shape that is joined of the batch and 1024, as Keras's Flatten computes it: compilers
    that want shapes as constants, such as TVM, take it then. Only where one size is computed and all others are known,
    so that the -1 can only mean that one."""
    from onnx import numpy_helper, shape_inference

    inferred = shape_inference.infer_shapes(model).graph
    sizes = {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in inferred.value_info}
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made_by = {output: node for node in model.graph.node for output in node.output}

    def origin(name: str) -> str:
        while (node := made_by.get(name)) is not None and node.op_type in ("Cast", "Identity"):
            name = node.input[0]
        return name

    for node in model.graph.node:
        joined = made_by.get(origin(node.input[1])) if node.op_type == "Reshape" else None
        if joined is None or joined.op_type != "Concat":
            continue
        parts = [known.get(name) for name in map(origin, joined.input)]
        computed = [name for name, part in zip(joined.input, parts, strict=True) if part is None]
        if len(computed) != 1 or sizes.get(computed[0]) != [1]:
            continue
        shape = [int(size) for part in parts for size in (part.ravel() if part is not None else [-1])]
        if sum(size < 1 for size in shape) == 1:
            name = f"{node.output[0]}/shape"
            model.graph.initializer.append(numpy_helper.from_array(_as_int64(shape), name))
            node.input[1] = name


def _as_int64(values: Sequence[int]) -> Any:
    import numpy as np

    return np.asarray(values, np.int64)


def _order(inner: Any) -> None:
    """Every node just before the first that needs it, going through the outputs in order: tf2onnx sorts by names that
    hold addresses of the process. What no output needs goes."""
    made_by = {output: node for node in inner.node for output in node.output if output}
    ordered: list[Any] = []
    seen: set[int] = set()
    # A stack in place of recursion: a graph may be thousands of nodes deep.
    waiting: list[tuple[str, bool]] = [(value.name, False) for value in reversed(inner.output)]
    while waiting:
        name, ready = waiting.pop()
        node = made_by.get(name)
        if node is None or (id(node) in seen and not ready):
            continue
        if ready:
            ordered.append(node)
            continue
        seen.add(id(node))
        waiting.append((name, True))
        waiting.extend((needed, False) for needed in reversed(list(graph.reads(node))))
    for node in ordered:
        for nested in graph.inner_graphs(node):
            _order(nested)
    copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
    del inner.node[:]
    inner.node.extend(copies)


def _rename(model: ModelProto, signature: Signature) -> None:
    """Names that are the same at every export, and those of the signature for inputs and outputs. tf2onnx numbers what
    it makes by counters and addresses of the process, and lists weights in no order."""
    taken = {spec.name for spec in (*signature.inputs, *signature.outputs)}
    names = {value.name: spec.name for value, spec in zip(model.graph.input, signature.inputs, strict=True)}
    names |= {value.name: spec.name for value, spec in zip(model.graph.output, signature.outputs, strict=True)}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    used: dict[str, None] = {}
    for node in graph.nodes(model.graph):
        _name_values_of(node, names, taken, weights, used)
    ordered = [weights[name] for name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(ordered)
    for node in graph.nodes(model.graph):
        for nested in graph.inner_graphs(node):
            for value in [*nested.input, *nested.output, *nested.value_info, *nested.initializer]:
                value.name = names.get(value.name, value.name)
    graph.rename_values(model, names)


def _name_values_of(
    node: NodeProto, names: dict[str, str], taken: set[str], weights: Container[str], used: dict[str, None]
) -> None:
    """Name the node, and give the values that it is the first to use or make new names after it.

    Args:
        names: Old name → new one; those of this node are added.
        taken: New names; those of this node are added.
        weights: Names of initializers.
        used: Those of them that were met, in order; the node's are added.
    """
    node.name = _free(node.name or node.op_type, taken)
    for index, name in enumerate(node.input):
        if name in weights and name not in used:
            used[name] = None
            names.setdefault(name, _free(f"{node.name}/{index}", taken))
    for index, name in enumerate(node.output):
        if name and name not in names:
            names[name] = _free(f"{node.name}:{index}", taken)
    for nested in graph.inner_graphs(node):
        nested.name = _free(nested.name or "body", taken)
        for value in [*nested.input, *nested.initializer]:
            names.setdefault(value.name, _free(f"{node.name}/{len(names)}", taken))


def _free(name: str, taken: set[str]) -> str:
    """The name without counters, or with a number of its own where it is taken; it is taken then."""
    base = _WRAPPER.sub("", _COUNTER.sub("", name)) or "value"
    chosen, count = base, 1
    while chosen in taken:
        count += 1
        chosen = f"{base}_{count}"
    taken.add(chosen)
    return chosen


def _declare(model: ModelProto, signature: Signature) -> None:
    """Inputs and outputs with the signature's dimensions; intermediate shapes go, with the converter's symbols."""
    from onnx import helper

    for values, specs in ((model.graph.input, signature.inputs), (model.graph.output, signature.outputs)):
        del values[:]
        for spec in specs:
            kind = helper.np_dtype_to_tensor_dtype(_numpy_dtype(spec.dtype))
            values.append(helper.make_tensor_value_info(spec.name, kind, list(spec.shape)))
    del model.graph.value_info[:]


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    return np.dtype(name)
