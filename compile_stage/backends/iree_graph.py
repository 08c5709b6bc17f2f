"""What is changed in an ONNX graph before IREE imports it: its sizes are fixed, and convolutions that IREE's code
generator has no fast form for are written as ones that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.buckets import Shapes

if TYPE_CHECKING:
    import onnx


def has_convolutions(graph: onnx.GraphProto) -> bool:
    """Whether a node of the graph itself is one."""
    return any(node.op_type == "Conv" for node in graph.node)


def fix_shapes(model: onnx.ModelProto, signature: Signature, shapes: Shapes) -> onnx.ModelProto:
    """A copy whose inputs have the shapes of a bucket, given in the signature's order. What else is known of sizes is
    left for shape inference to find anew."""
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    given = dict(zip((spec.name for spec in signature.inputs), shapes, strict=True))
    sizes = {
        spec_dim: size
        for spec in signature.inputs
        for spec_dim, size in zip(spec.shape, given[spec.name], strict=True)
        if isinstance(spec_dim, str)
    }
    for value in fixed.graph.input:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name in given:
                dim.dim_value = given[value.name][at]
    for value in fixed.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    del fixed.graph.value_info[:]
    return fixed


def gather_before_strided_products(graph: onnx.GraphProto) -> int:
    """Take the elements that a strided convolution with a window of 1 reads by Gather, and convolve those with a stride
    of 1, which is a matrix product. Returns how many were rewritten.

    IREE 3.13 makes a loop over single elements of such a convolution: the three of ResNet-50 took 340 of its 480 ms
    (one core, AVX-512). A Slice in front does not help, since the compiler folds it back in. The numbers are the same:
    the same elements meet the same weights.

    Args:
        graph: With the shapes of its values, as shape inference writes them; changed in place. A convolution whose
            sizes are not known stays as it is.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    known = dict(_known_sizes(graph))
    types = {value.name: value.type for value in (*graph.value_info, *graph.input)}
    nodes, count = [], 0
    for node in graph.node:
        strides = _strides(node, known)
        if strides:
            name, source = node.name or node.output[0], node.input[0]
            narrower = helper.make_value_info("", types[source])
            for axis, stride in enumerate(strides, 2):
                picked = f"{name}.stride.{axis}"
                elements = np.arange(0, known[node.input[0]][axis], stride, dtype=np.int64)
                graph.initializer.append(numpy_helper.from_array(elements, f"{picked}.elements"))
                nodes.append(helper.make_node("Gather", [source, f"{picked}.elements"], [picked], picked, axis=axis))
                narrower.name, source = picked, picked  # IREE's importer takes no value whose type is not written
                narrower.type.tensor_type.shape.dim[axis].dim_value = len(elements)
                graph.value_info.append(narrower)
            node.input[0] = source
            for attribute in node.attribute:
                if attribute.name == "strides":
                    attribute.ints[:] = [1] * len(strides)
            count += 1
        nodes.append(node)
    kept = [type(node).FromString(node.SerializeToString()) for node in nodes] if count else []
    if count:
        del graph.node[:]
        graph.node.extend(kept)
    return count


def _strides(node: onnx.NodeProto, known: Mapping[str, list[int]]) -> list[int]:
    """Of a convolution with a window of 1 and no padding, over axes of known sizes; empty for any other node."""
    if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
        return []
    weight, image = known.get(node.input[1], []), known.get(node.input[0], [])
    if len(weight) < 3 or set(weight[2:]) != {1} or len(image) != len(weight) or not all(image[2:]):
        return []
    padding, auto, strides = (_attribute(node, name) for name in ("pads", "auto_pad", "strides"))
    if strides is None or set(strides.ints) == {1} or (padding is not None and any(padding.ints)):
        return []
    return [] if auto is not None and auto.s not in (b"NOTSET", b"VALID") else list(strides.ints)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((one for one in node.attribute if one.name == name), None)


def _known_sizes(graph: onnx.GraphProto) -> Iterator[tuple[str, list[int]]]:
    """Name and sizes of every value, 0 for one that is free."""
    for value in (*graph.value_info, *graph.input, *graph.output):
        yield value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    for tensor in graph.initializer:
        yield tensor.name, list(tensor.dims)
