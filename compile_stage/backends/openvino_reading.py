"""Reading ONNX graphs with OpenVINO, where its own reader gives operators another meaning than ONNX does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from compile_stage.core.records import PortableModel
from compile_stage.core.tensors import TensorSpec

_REDUCTIONS_WITHOUT_AXES = range(13, 18)
"""The operator sets of which OpenVINO looks for the axes of some reductions among the inputs, where they are from 18
on, and so reduces over all."""


def read_graph(model: PortableModel) -> Any:
    """The `openvino.Model` of an ONNX file. Raises RuntimeError with OpenVINO's words where it can't read it."""
    import openvino
    from openvino.frontend.onnx import ConversionExtension

    core = openvino.Core()
    core.add_extension(ConversionExtension("DFT", "", partial(_dft, -2 if model.opset >= 20 else 1)))
    core.add_extension(ConversionExtension("STFT", "", _stft))
    if model.opset in _REDUCTIONS_WITHOUT_AXES:
        for name in ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp"):
            core.add_extension(ConversionExtension(name, "", partial(_reduce, name)))
    graph = core.read_model(model.path)
    _keep_names(graph.inputs, model.signature.inputs)
    _leave_out_empty_windows(graph)
    _keep_order_of_ties(graph)
    _pad_transposed_convolutions(graph)
    return graph


def _keep_names(inputs: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Give inputs back the names that they lost: OpenVINO's reader calls what goes into a Dropout like what comes out
    of it."""
    for port, spec in zip(inputs, specs, strict=False):
        if len(inputs) == len(specs) and spec.name not in port.get_names():
            port.get_tensor().add_names({spec.name})


def _inputs(node: Any, count: int) -> list[Any]:
    """The node's inputs; None for one that is left out, which has no type where others follow."""
    given = [node.get_input(at) for at in range(node.get_input_size())]
    known = [None if value.get_element_type().is_dynamic() else value for value in given]
    return (known + [None] * count)[:count]


def _rank(value: Any) -> int:
    return int(value.get_partial_shape().rank.get_length())


def _dft(default_axis: int, node: Any) -> list[Any]:
    """ONNX's DFT. OpenVINO's reader leaves the last axis of a real signal, of size 1, in what a one-sided transform
    answers, and counts a negative axis without it."""
    from openvino import opset14 as op

    signal, length, place = _inputs(node, 3)
    sizes = signal.get_partial_shape()
    last = _rank(signal) - 1
    # An input from operator set 20 on, an attribute before.
    axis = int(node.get_attribute("axis", default_axis)) if place is None else int(place.get_node().get_data())
    how = ([axis % (last + 1)], *(() if length is None else (op.reshape(length, [1], False),)))
    one_sided, inverse = bool(node.get_attribute("onesided", 0)), bool(node.get_attribute("inverse", 0))
    if one_sided and inverse:
        return list(op.unsqueeze(op.irdft(signal, *how), [last]).outputs())
    if one_sided:
        return list(op.rdft(op.gather(signal, 0, last), *how).outputs())
    if sizes[last].is_static and sizes[last].get_length() == 1:
        signal = op.concat([signal, op.multiply(signal, op.convert_like(0.0, signal))], last)
    return list((op.idft if inverse else op.dft)(signal, *how).outputs())


def _stft(node: Any) -> list[Any]:
    """ONNX's STFT of a real signal. OpenVINO's reader takes it only where the batch is fixed."""
    from openvino import opset15 as op

    signal, step, window, length = _inputs(node, 4)
    if not node.get_attribute("onesided", 1):
        raise NotImplementedError("OpenVINO has no STFT with negative frequencies")
    if length is None:
        length = op.squeeze(op.shape_of(window), [0])
    if window is None:
        window = op.broadcast(op.convert_like(1.0, signal), op.unsqueeze(length, [0]))
    return list(op.stft(op.squeeze(signal, [2]), window, length, step, False).outputs())


def _reduce(name: str, node: Any) -> list[Any]:
    """A reduction whose axes are an attribute; over all axes where it has none."""
    import numpy as np
    from openvino import opset14 as op

    given, keep = node.get_input(0), bool(node.get_attribute("keepdims", 1))
    axes = list(node.get_attribute("axes") if node.has_attribute("axes") else range(_rank(given)))
    if name == "ReduceL1":
        return list(op.reduce_l1(given, axes, keep).outputs())
    if name == "ReduceLogSum":
        return list(op.log(op.reduce_sum(given, axes, keep)).outputs())
    # Less than its largest, so that nothing overflows; an infinite one would leave NaN.
    most = float(np.finfo(np.float32).max)
    largest = op.clamp(op.reduce_max(given, axes, True), -most, most)
    total = op.log(op.reduce_sum(op.exp(op.subtract(given, largest)), axes, keep))
    return list(op.add(total, largest if keep else op.squeeze(largest, axes)).outputs())


def _replace(node: Any, new: Any) -> None:
    """The new operation takes the node's place, and its name."""
    from openvino.utils import replace_node

    new.set_friendly_name(node.get_friendly_name())
    replace_node(node, new)


def _leave_out_empty_windows(graph: Any) -> None:
    """Have pools that round their size up do it as ONNX does: no window begins behind the end, and an average counts
    nothing that lies there. OpenVINO's reader has a maximum begin there, and its CPU plug-in counts it where padding
    counts."""
    from openvino import opset14 as op

    for node in graph.get_ordered_ops():
        kind, said = node.get_type_name(), node.get_attributes()
        rounding = said.get("rounding_type")
        if kind not in ("AvgPool", "MaxPool") or rounding not in ("ceil", "ceil_torch"):
            continue
        given, edges, window = node.input_value(0), (said["pads_begin"], said["pads_end"]), said["kernel"]
        how = ("ceil_torch", said["auto_pad"])
        if kind == "MaxPool" and rounding == "ceil":
            more = (said["index_element_type"], said["axis"])
            new = op.max_pool(given, said["strides"], said["dilations"], *edges, window, *how, *more)
        elif kind == "AvgPool" and set(said.get("dilations", [1])) == {1}:
            known = given.get_partial_shape()[2:].is_static and said["auto_pad"] == "explicit"
            if known and not said["exclude-pad"]:
                new = _average_with_padding(given, said["strides"], *edges, window)
            else:
                new = op.avg_pool(given, said["strides"], *edges, window, said["exclude-pad"], *how)
        else:
            continue
        _replace(node, new)
    graph.validate_nodes_and_infer_types()


def _keep_order_of_ties(graph: Any) -> None:
    """Have `TopK` answer the lower of two places that hold the same value, as ONNX does. OpenVINO's reader does not ask
    for that, and the CPU plug-in then does it only in batches whose size it knows beforehand."""
    from openvino import opset14 as op

    for node in graph.get_ordered_ops():
        said = node.get_attributes()
        if node.get_type_name() == "TopK" and said["sort"] != "none" and not said["stable"]:
            how = (said["axis"], said["mode"], said["sort"], said["index_element_type"])
            new = op.topk(node.input_value(0), node.input_value(1), *how, stable=True)
            _replace(node, new)


def _pad_transposed_convolutions(graph: Any) -> None:
    """Have a `ConvTranspose` with `SAME_UPPER` or `SAME_LOWER` answer its input's size times the stride, as ONNX does:
    OpenVINO's reader hands the words on, and they pad nothing where no size of the answer is given."""
    from openvino import opset14 as op

    kinds = {
        "ConvolutionBackpropData": op.convolution_backprop_data,
        "GroupConvolutionBackpropData": op.group_convolution_backprop_data,
    }
    for node in graph.get_ordered_ops():
        make, said = kinds.get(node.get_type_name()), node.get_attributes()
        if make is None or not said["auto_pad"].startswith("same") or node.get_input_size() > 2:
            continue
        strides, dilations, more = said["strides"], said["dilations"], said["output_padding"]
        window = node.input_value(1).get_partial_shape().to_shape()[-len(strides) :]
        beyond = [
            max((wide - 1) * apart + 1 - step + rest, 0)
            for wide, apart, step, rest in zip(window, dilations, strides, more, strict=True)
        ]
        half = [size // 2 for size in beyond]
        rest = [size - part for size, part in zip(beyond, half, strict=True)]
        begins, ends = (half, rest) if said["auto_pad"] == "same_upper" else (rest, half)
        how = {"pads_begin": begins, "pads_end": ends, "dilations": dilations, "output_padding": more}
        new = make(node.input_value(0), node.input_value(1), strides, auto_pad="explicit", **how)
        _replace(node, new)
    graph.validate_nodes_and_infer_types()


def _average_with_padding(
    given: Any, strides: Sequence[int], begins: Sequence[int], ends: Sequence[int], window: Sequence[int]
) -> Any:
    """The average of windows that counts padding, and nothing behind it. The CPU plug-in counts that too, so the
    windows that reach so far are averaged over all their places, and scaled."""
    import numpy as np
    from openvino import opset14 as op

    scale, reach = np.ones((), np.float32), []
    for size, step, begin, end, wide in zip(
        given.get_partial_shape()[2:].to_shape(), strides, begins, ends, window, strict=True
    ):
        count = -(-(size + begin + end - wide) // step) + 1
        starts = np.arange(count - ((count - 1) * step >= size + begin)) * step - begin
        scale = scale[..., None] * (wide / (np.minimum(starts + wide, size + end) - starts)).astype(np.float32)
        reach.append(max(int(starts[-1]) + wide - size, 0))
    average = op.avg_pool(given, strides, begins, reach, window, False, "floor", "explicit")
    return op.multiply(average, op.convert_like(scale[None, None], average))
