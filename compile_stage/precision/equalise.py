"""Equalisation: channels of an activation are brought to like magnitude, and the weights that read them take the
inverse.

An activation is quantised with one scale, so a channel of large values costs all others their precision. Dividing
channel k by s_k and multiplying row k of the weight by s_k changes nothing in exact arithmetic (SmoothQuant, Xiao et
al. 2022; between two convolutions: Nagel et al. 2019). The strength (`s = magnitude^a`, a from 0 to 1) is the one with
the least noise that quantising both operands would add to the output.

Where a convolution's own weights can take the factors on the other side of a ReLU, that costs nothing at run time; the
tensors between get new names, since they hold other values than the source's. Elsewhere a Mul stands before the Q/DQ
pair, and every tensor keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.precision.qdq import Layer, Plan, View, add_constant
from compile_stage.precision.ranges import Channels
from compile_stage.precision.wiring import Names, attribute, replace_nodes

if TYPE_CHECKING:
    from onnx import NodeProto

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
RESCALED = "/rescaled"

WORTH = 0.5
"""A group is equalised if at most this part of its noise remains: 3 dB less noise pays for a Mul and for renamed
tensors."""

_LIMIT = 1e-3  # the least factor as a part of the largest: a channel of zeros on the samples gets no unlimited factor

# f(s·x) = s·f(x) for a positive factor s of a channel.
_HOMOGENEOUS = ("Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity")


@dataclass(frozen=True)
class Group:
    """Layers that read one activation.

    Attributes:
        factor: By channel: the activation is multiplied by it, the weights are divided.
        path: The nodes from one whose weights can take the factor to the activation; empty when there is none.
    """

    x: str
    layers: tuple[Layer, ...]
    factor: Any
    path: tuple[Any, ...]


def equalise(
    view: View, plan: Plan, seen: dict[str, Channels], kept: Collection[str], levels: int
) -> tuple[Group, ...]:
    """Rescale the graph where it pays; `seen` is updated to the tensors as they are afterwards.

    Args:
        kept: Nodes that must stay as they are.
        levels: The largest integer of a weight.

    Returns:
        What was done. When it is anything, names have changed, and the caller has to plan anew.
    """
    from onnx import helper

    names = Names(view.graph)
    groups = tuple(_find(view, plan, seen, kept, levels))
    before: dict[str, Any] = {}  # node of the graph → the Mul that goes before it
    for group in sorted(
        groups, key=lambda group: not group.path
    ):  # renames nodes first: the Muls are placed by their readers' names
        for layer in group.layers:
            layer.node.input[1] = _scale(view, names, layer.node.input[1], 1.0 / group.factor, _input_axis(layer))
        if group.path:
            rescaled = _absorb(view, names, group, seen)
        else:
            rescaled, factor = names.fresh(group.x + RESCALED), names.fresh(f"{group.x}/factor")
            add_constant(view.graph, factor, group.factor)
            node = helper.make_node("Mul", [group.x, factor], [rescaled], name=names.fresh(f"{group.x}/equalise"))
            before[group.layers[0].node.name] = node
        seen[rescaled] = seen[group.x].rescaled(group.factor)
        for layer in group.layers:
            layer.node.input[0] = rescaled
    if not groups:
        return ()
    ordered = [part for node in view.graph.node for part in (before.get(node.name), node) if part is not None]
    replace_nodes(view.graph, ordered)
    return groups


def _find(view: View, plan: Plan, seen: Mapping[str, Channels], kept: Collection[str], levels: int) -> Iterator[Group]:
    by_x: dict[str, list[Layer]] = {}
    for layer in plan.layers.values():
        by_x.setdefault(layer.x, []).append(layer)
    taken: set[str] = set()
    for x, layers in by_x.items():
        channels = seen.get(x)
        if channels is None or len(channels.low) < 2 or not all(map(_has_input_channels, layers)):
            continue
        path = _path(view, x, layers, len(channels.low), kept)
        if taken.intersection(node.name for node in path):
            path = ()
        # A Mul before a convolution would keep its runtime from merging it with what comes before.
        if not path and any(layer.node.op_type not in ("MatMul", "Gemm") for layer in layers):
            continue
        factor = _factor(view, layers, channels, levels)
        if factor is not None:
            taken.update(node.name for node in path)
            yield Group(x, tuple(layers), factor, path)


def _factor(view: View, layers: Sequence[Layer], channels: Channels, levels: int) -> Any | None:
    """The best factors, or None where the gain is not worth it."""
    weights = [_by_input(view.values(layer.weight), layer) for layer in layers]
    if any(len(weight) != len(channels.low) for weight in weights):
        return None
    magnitude = np.maximum(channels.magnitude.astype(np.float64), 1e-30)
    reading = np.maximum(np.max([np.abs(weight).max((1, 2)) for weight in weights], axis=0), 1e-30)
    plain = np.ones(len(magnitude), np.float32)
    best, least = None, WORTH * sum(_noise(weight, channels, plain, levels) for weight in weights)
    for exponent in EXPONENTS:
        strength = magnitude**exponent / reading ** (1 - exponent)
        strength = np.maximum(strength / strength.max(), _LIMIT)
        factor = (np.exp(np.mean(np.log(strength))) / strength).astype(np.float32)
        noise = sum(_noise(weight, channels, factor, levels) for weight in weights)
        if noise < least:
            best, least = factor, noise
    return best


def _noise(weight: Any, channels: Channels, factor: Any, levels: int) -> float:
    """The noise power that quantisation adds to a layer's outputs, with the activation multiplied by `factor`.

    For each operand: its step squared, over 12 (the variance of a uniform error), times the power of the other operand.

    Args:
        weight: [input channel, output channel, kernel]; depthwise, there is one output channel.
    """
    low, high = min(0.0, float((channels.low * factor).min())), max(0.0, float((channels.high * factor).max()))
    scaled = np.abs(weight / factor[:, None, None])
    activation = ((high - low) / 255) ** 2 * float(np.sum(np.square(scaled, dtype=np.float64)))
    power = channels.square * factor.astype(np.float64) ** 2
    if weight.shape[1] == 1:
        steps = scaled.max((1, 2)) / levels
        of_weight = float(np.sum(steps**2 * power))
    else:
        steps = scaled.max((0, 2)) / levels
        of_weight = float(np.sum(steps**2) * np.sum(power))
    return float((activation + of_weight * weight.shape[2]) / 12)


def _groups(layer: Layer) -> int:
    return int(attribute(layer.node, "group", 1))


def _has_input_channels(layer: Layer) -> bool:
    """Whether every channel of what it reads meets weights of its own: not in a convolution by groups of several
    channels."""
    if layer.axis is None or layer.node.op_type == "ConvTranspose":
        return False
    return layer.node.op_type != "Conv" or _groups(layer) == 1 or layer.depthwise


def _by_input(weight: Any, layer: Layer) -> Any:
    """[input channel, output channel, kernel]."""
    if layer.node.op_type == "Conv":
        flat = weight.reshape(*weight.shape[:2], -1)
        return flat if layer.depthwise else flat.swapaxes(0, 1)
    return (weight.T if layer.axis == 0 else weight)[:, :, None]


def _input_axis(layer: Layer) -> int:
    if layer.node.op_type == "Conv":
        return 0 if layer.depthwise else 1
    return 1 if layer.axis == 0 else 0


# ----------------------------------------------------------------------------------------------------------- absorbing


def _path(view: View, x: str, layers: Sequence[Layer], channels: int, kept: Collection[str]) -> tuple[Any, ...]:
    """The nodes from one whose weights can take the factors to the one that makes `x`; () where there are none.

    No other node may read the tensors between: they hold other values afterwards.
    """
    own = {layer.node.name for layer in layers}
    if x in view.outputs | view.captured or any(node.name not in own for node in view.readers[x]):
        return ()
    path: list[Any] = []
    tensor = x
    while (maker := view.makers.get(tensor)) is not None and maker.name not in kept:
        path.append(maker)
        if _takes(view, maker, channels, layers[0].node.op_type == "Conv"):
            return tuple(reversed(path))
        tensor = _scaled_input(view, maker, channels)
        if not tensor or view.sole_reader(tensor) is None:
            return ()
    return ()


def _scaled_input(view: View, node: NodeProto, channels: int) -> str:
    """The input that a node hands on with each channel's positive factor as it is; "" where it has none."""
    if node.op_type in _HOMOGENEOUS and len(node.output) == 1:
        return str(node.input[0])
    if node.op_type != "Add":
        return ""
    constants = [name for name in node.input if name in view.constants]
    if len(constants) != 1 or list(view.constants[constants[0]].dims) != [channels]:
        return ""
    return next((name for name in node.input if name not in view.constants), "")


def _takes(view: View, node: NodeProto, channels: int, images: bool) -> bool:
    """Whether its weights can take a factor for each channel of its output.

    Args:
        images: The channels are on axis 1; else on the last.
    """
    constant = [name in view.constants for name in node.input[1:] if name]
    if not all(constant) or len(node.input) < 2 or not node.input[1]:  # `Clip` may have a highest value alone
        return False
    shape = list(view.constants[node.input[1]].dims)
    if images or node.op_type == "Conv":
        return images and node.op_type == "Conv" and shape[0] == channels
    if node.op_type == "Gemm":
        bias = list(view.constants[node.input[2]].dims) if len(node.input) > 2 and node.input[2] else [channels]
        return shape[_gemm_axis(node)] == channels and bias[-1] == channels
    if node.op_type == "MatMul":
        return len(shape) == 2 and shape[1] == channels
    return node.op_type == "LayerNormalization" and shape == [channels] and len(node.output) == 1


def _gemm_axis(node: NodeProto) -> int:
    return 0 if attribute(node, "transB", 0) else 1


def _absorb(view: View, names: Names, group: Group, seen: dict[str, Channels]) -> str:
    """Multiply the first node's weights, and rename all that the path makes. Returns the new name of `x`."""
    first = group.path[0]
    axis = {"Conv": 0, "Gemm": _gemm_axis(first), "MatMul": 1}.get(first.op_type, 0)
    first.input[1] = _scale(view, names, first.input[1], group.factor, axis)
    if len(first.input) > 2 and first.input[2]:
        first.input[2] = _scale(view, names, first.input[2], group.factor, -1)
    rescaled = old = ""
    for node in group.path:
        if rescaled:
            node.input[:] = [rescaled if name == old else name for name in node.input]
        if node.op_type == "Add":
            node.input[:] = [
                _scale(view, names, name, group.factor, -1) if name in view.constants else name for name in node.input
            ]
        old = node.output[0]
        rescaled = names.fresh(old + RESCALED)
        node.output[0] = rescaled
        node.name = names.fresh(node.name + RESCALED)
        if old in seen:
            seen[rescaled] = seen[old].rescaled(group.factor)
    return rescaled


def _scale(view: View, names: Names, constant: str, factor: Any, axis: int) -> str:
    """A copy of a constant, multiplied along one axis. Others may read the constant itself."""
    values = view.values(constant)
    shape = [1] * values.ndim
    shape[axis] = -1
    name = names.fresh(constant + RESCALED)
    add_constant(view.graph, name, (values * factor.reshape(shape)).astype(np.float32))
    view.constants[name] = view.graph.initializer[-1]
    return name
