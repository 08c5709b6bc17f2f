"""Static int8: from a float graph and samples to a graph with Q/DQ pairs.

Decide what is quantised (`qdq`), observe the samples (`ranges`), equalise channels of large values (`equalise`), choose
the ranges, quantise the weights (`weights`) and write; embedding tables come last (`tables`). Quantising a weight
shifts the mean of an output; the bias takes the shift out again (Nagel et al. 2019, bias correction).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.plugin_support import onnx_weights
from compile_stage.precision import qdq, ranges, weights
from compile_stage.precision.equalise import equalise
from compile_stage.precision.onnx_graph import raise_opset, read_opset, write_graph
from compile_stage.precision.tables import round_tables, say_tables
from compile_stage.precision.wiring import Names, drop_unused_weights, replace_nodes

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

    Batches = Callable[[], Iterable[Batch]]

CORRECTED = "/uncorrected"
"""Ends the name of a product whose mean the Add after it corrects: it holds other values than the source's tensor."""

_LEAST_OPSET = 13  # of a QuantizeLinear with one scale for each channel

# A tensor whose smallest value is at most so much of its largest, as a part, gains most of a bit from a zero point.
_ONE_SIDED = 0.3

_SHIFT_SAMPLES = 8

# Of a tensor that was equalised the extremes are known from all samples; the shape of its histogram shows in a few.
_RECOUNTED_SAMPLES = 32


@dataclass(frozen=True)
class Settings:
    """What a scheme asks for; its options are explained in `int8.StaticInt8`.

    Attributes:
        levels: The largest integer of a weight.
        whole_biases: Biases are int32; else they stay float32.
    """

    ops: tuple[str, ...] = ()
    signed: bool = False
    symmetric: bool = False
    one_sided: bool = False
    per_channel: bool = True
    chain: bool = True
    method: str = "mse"
    percentile: float = 99.999
    levels: int = 127
    equalise: bool = True
    correct: bool = True
    whole_biases: bool = True
    tables: bool = True
    products: bool = True
    kept: frozenset[str] = field(default_factory=frozenset)


def quantise(simple: Path, settings: Settings, batches: Batches, threads: int = 1) -> tuple[Any, list[str]]:
    """The graph with Q/DQ pairs, and sentences on what was done, for a report.

    Args:
        simple: The float graph, simplified; beside it is room for scratch files.
        batches: Gives the calibration samples, from the first, each time that it is called.
    """
    model, path = _load(simple)
    view, plan = _plan(model, settings)
    if not plan.reads:
        return model, []
    tensors = ranges.Activations(path, _channel_axes(plan), batches, threads)
    counted = frozenset() if settings.method == "minmax" else frozenset(plan.ranges)
    seen, counts = ranges.observe(tensors, counted)
    groups = equalise(view, plan, seen, settings.kept, settings.levels) if settings.equalise else ()
    if groups:
        path = write_graph(model, path.parent, "equalised.onnx")
        model = onnx_weights.load(path)
        view, plan = _plan(model, settings)
        tensors = ranges.Activations(path, _channel_axes(plan), batches, threads)
        if counted:  # tensors that hold other values now have other names
            renamed = [name for name in plan.ranges if name in seen and name not in counts]
            counts |= ranges.count_values(tensors, renamed, _RECOUNTED_SAMPLES)
    spans = {name: ranges.full_range(seen[name]) for name in plan.ranges if name in seen}
    params = _choose_ranges(plan, spans, counts, settings)
    moved = _measure_shifts(tensors, plan, params) if settings.correct else {}
    _round_weights(view, plan, _Calibration(params, seen, moved), settings)
    qdq.write(qdq.View(model.graph), plan, params)
    done = [f"activations equalised before {sum(len(group.layers) for group in groups)} layers"] if groups else []
    if settings.tables and params and (count := round_tables(model.graph, settings.kept)):
        done.append(say_tables(count))
    del model.graph.value_info[:]  # runtimes infer them; those of tensors that were renamed would be wrong
    drop_unused_weights(model.graph)
    return model, done


def _load(simple: Path) -> tuple[Any, Path]:
    """The model, in a version of ONNX that knows scales by channel, and its file."""
    model = onnx_weights.load(simple)
    if read_opset(model) >= _LEAST_OPSET:
        return model, simple
    model = raise_opset(model, _LEAST_OPSET)
    return model, write_graph(model, simple.parent, "converted.onnx")


def _plan(model: Any, settings: Settings) -> tuple[qdq.View, qdq.Plan]:
    view = qdq.View(model.graph)
    ops = settings.ops or qdq.KNOWN
    return view, qdq.plan(
        view, ops, settings.kept, chain=settings.chain, per_channel=settings.per_channel, products=settings.products
    )


def _channel_axes(plan: qdq.Plan) -> dict[str, int]:
    """Where the channels of each tensor are: on axis 1 before and after a convolution, else last."""
    axes = dict.fromkeys(plan.ranges, -1)
    for layer in plan.layers.values():
        images = layer.node.op_type.startswith("Conv")
        axes[layer.x] = 1 if images else -1
        if images:
            axes[plan.rounded.get(layer.x, layer.x)] = 1
    return axes


def _choose_ranges(
    plan: qdq.Plan, spans: Mapping[str, ranges.Range], counts: Mapping[str, ranges.Histogram], settings: Settings
) -> dict[str, qdq.QuantParams]:
    """Scale and zero point for each range that is needed."""
    params = {}
    for name, span in spans.items():
        # Runtimes multiply two activations in integers only when at least neither has a zero point to take out.
        one_sided = settings.one_sided and -span.low <= _ONE_SIDED * span.high
        if one_sided and span.low < 0 and name in plan.factors:
            one_sided = False
        symmetric = settings.symmetric and not one_sided
        chosen = span
        if name in counts:
            chosen = ranges.choose(settings.method, span, counts[name], symmetric, settings.percentile)
        params[name] = _quant_params(chosen, symmetric, settings.signed and not one_sided)
    return params


def _measure_shifts(
    tensors: ranges.Activations, plan: qdq.Plan, params: Mapping[str, qdq.QuantParams]
) -> dict[str, Any]:
    """By how much quantisation moves the mean of each channel that a weight reads: on the first samples, since it is
    alike on all."""
    read = dict.fromkeys(layer.x for layer in plan.layers.values() if plan.rounded.get(layer.x) in params)

    def round_trip(name: str, values: Any) -> Any:
        return params[plan.rounded[name]].apply(values)

    return ranges.rounding_shift(tensors, read, round_trip, _SHIFT_SAMPLES)


def _quant_params(chosen: ranges.Range, symmetric: bool, signed: bool) -> qdq.QuantParams:
    if symmetric:
        limit = max(-chosen.low, chosen.high) or 1.0
        return qdq.QuantParams(np.float32(limit / 127), np.int8(0))
    scale = np.float32((chosen.high - chosen.low) / 255 or 1.0)
    zero = int(np.clip(round(-chosen.low / float(scale)), 0, 255))
    return qdq.QuantParams(scale, np.int8(zero - 128) if signed else np.uint8(zero))


# ------------------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class _Calibration:
    """What the samples showed and what was chosen from it.

    Attributes:
        params: Scale and zero point, by the tensor whose range it is.
        seen: Statistics of each activation's channels.
        moved: By how much quantisation moves the mean of each channel of an activation.
    """

    params: Mapping[str, qdq.QuantParams]
    seen: Mapping[str, ranges.Channels]
    moved: Mapping[str, Any]


@dataclass(frozen=True)
class _Weight:
    """A layer's weight in integers.

    Attributes:
        integers: int8, of the weight's shape.
        scale: float32 [channels], or [1] where the weight has one scale.
        bias: float32 [channels]; None where the layer has no constant bias.
        shift: float32 [channels], what the mean of each output channel lacks; None where that is not known.
    """

    integers: Any
    scale: Any
    bias: Any | None
    shift: Any | None


def _round_weights(view: qdq.View, plan: qdq.Plan, calibration: _Calibration, settings: Settings) -> None:
    """Put integers and a DequantizeLinear in the place of each layer's weight and bias."""
    names = Names(view.graph)
    added: dict[str, list[Any]] = {}
    shared: dict[tuple[str, str], Any] = {}  # layers that read one weight share its integers where they are the same
    for layer in plan.layers.values():
        params = calibration.params.get(plan.rounded.get(layer.x, ""))
        if params is None:
            plan.reads.pop(layer.node.name, None)
            continue
        weight = _round_weight(view, layer, params, calibration, settings)
        before = added.setdefault(layer.node.name, [])
        kind = (layer.weight, hashlib.sha256(weight.integers.tobytes() + weight.scale.tobytes()).hexdigest())
        if kind not in shared:
            shared[kind] = qdq.weight_node(view, names, layer, weight.integers, _by_axis(layer, weight.scale))
            before.append(shared[kind])
        layer.node.input[1] = shared[kind].output[0]
        if layer.node.op_type == "MatMul":
            if weight.shift is not None:
                _correct_sum(view, names, layer.node, weight.shift, settings)
        elif weight.bias is not None or (weight.shift is not None and not layer.bias):
            total = sum(part for part in (weight.bias, weight.shift) if part is not None)
            if settings.whole_biases:
                units = np.asarray(weight.scale * params.scale, np.float32)
                before.append(qdq.bias_node(view, names, layer, total, _by_axis(layer, units)))
            else:
                qdq.set_bias(view, names, layer, total)
    ordered = [part for node in view.graph.node for part in (*added.get(node.name, ()), node)]
    replace_nodes(view.graph, ordered)


def _by_axis(layer: qdq.Layer, scale: Any) -> Any:
    """[channels], or a scalar for a weight with one scale."""
    return scale if layer.axis is not None else scale[0]


def _round_weight(
    view: qdq.View, layer: qdq.Layer, params: qdq.QuantParams, calibration: _Calibration, settings: Settings
) -> _Weight:
    weight = view.values(layer.weight)
    rows = weights.as_rows(weight, layer.axis)
    mean, square = _operand(layer, weight, calibration.seen.get(layer.x))
    scale = weights.scale_rows(rows, square, settings.levels, settings.method != "minmax")
    bias = _bias(view, layer, len(rows))
    if bias is not None and settings.whole_biases:
        scale = weights.fit_empty_rows(scale, rows, bias, float(params.scale))
        scale = weights.widen_for_bias(scale, bias, float(params.scale))
    whole = weights.round_rows(rows, scale, settings.levels)
    shift = None
    if settings.correct and mean is not None and layer.axis is not None:
        # The output's mean is Σ w·E[x]: quantising the weight changes w, quantising the activation changes E[x].
        rounded = whole * scale[:, None]
        shift = ((rows - rounded) * mean).sum(1)
        moved = calibration.moved.get(layer.x)
        if moved is not None and (extra := _spread(layer, weight, moved)) is not None:
            shift -= (rounded * extra).sum(1)
        shift = shift.astype(np.float32)
    return _Weight(weights.from_rows(whole.astype(np.int8), weight.shape, layer.axis), scale, bias, shift)


def _bias(view: qdq.View, layer: qdq.Layer, channels: int) -> Any | None:
    """A constant bias with one entry for each channel; None where there is none, or another."""
    if layer.bias not in view.constants:
        return None
    bias = view.values(layer.bias)
    if layer.axis is None or bias.size == channels:
        return bias.reshape(-1)
    return np.full(channels, bias.reshape(-1)[0]) if bias.size == 1 else None


def _operand(layer: qdq.Layer, weight: Any, channels: ranges.Channels | None) -> tuple[Any, Any]:
    """Mean and mean square of what each element of `weights.as_rows` is multiplied by.

    (None, 1) where that is not known.
    """
    mean = None if channels is None else _spread(layer, weight, channels.mean)
    return (None, 1.0) if channels is None or mean is None else (mean, _spread(layer, weight, channels.square))


def _spread(layer: qdq.Layer, weight: Any, channels: Any) -> Any | None:
    """A value for each input channel as one for each element of `weights.as_rows`; None where they don't fit.

    The border of padding around an image, where all is 0, is left out of account.
    """
    if layer.axis is None or layer.node.op_type == "ConvTranspose":
        return None
    if layer.node.op_type != "Conv":
        return channels[None] if len(channels) == weight.shape[1 - layer.axis] else None
    each, kernel = weight.shape[1], int(np.prod(weight.shape[2:]))
    groups = len(channels) // each
    if groups * each != len(channels) or len(weight) % groups:
        return None
    by_row = np.repeat(channels.reshape(groups, each), len(weight) // groups, axis=0)
    return np.repeat(by_row, kernel, axis=1)


def _correct_sum(view: qdq.View, names: Names, node: Any, shift: Any, settings: Settings) -> None:
    """A MatMul has no bias: the constant that is added to its output takes the correction, and the output gets a new
    name."""
    output = node.output[0]
    reader = view.sole_reader(output)
    if reader is None or reader.op_type != "Add" or reader.name in settings.kept:
        return
    constant = next((name for name in reader.input if name in view.constants), "")
    if not constant or list(view.constants[constant].dims) != [len(shift)]:
        return
    corrected, renamed = names.fresh(f"{reader.name}/corrected"), names.fresh(output + CORRECTED)
    qdq.add_constant(view.graph, corrected, view.values(constant) + shift)
    reader.input[:] = [{constant: corrected, output: renamed}.get(name, name) for name in reader.input]
    node.output[0] = renamed
