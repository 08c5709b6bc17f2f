"""What the shapes of a policy's target may ask of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compile_stage.core.errors import SourceError
from compile_stage.core.records import ShapeRange, SourceModel
from compile_stage.core.tensors import Signature


def _demand_inputs(signature: Signature, names: Iterable[str], source: SourceModel) -> None:
    """Raise SourceError when one of the inputs that shapes are given for is not the model's."""
    inputs = {spec.name for spec in signature.inputs}
    for name in names:
        if name not in inputs:
            raise SourceError(
                f"the policy gives shapes for an input {name!r} that the model does not have",
                fix=f"correct the target's shapes; the model has {', '.join(map(str, signature.inputs))}",
                where=source.uri,
            )


def demand_shapes(signature: Signature, shapes: Mapping[str, ShapeRange], source: SourceModel) -> None:
    """Raise SourceError when `shapes` names an input that is not there or asks for a size that the model has fixed."""
    _demand_inputs(signature, shapes, source)
    for name, wanted in shapes.items():
        spec = signature.input(name)
        if len(spec.shape) != len(wanted.max):
            raise SourceError(
                f"the policy gives input {name!r} {len(wanted.max)} dimensions, the model has {spec}",
                fix="correct the target's shapes",
                where=source.uri,
            )
        for axis, size in enumerate(spec.shape):
            asked = [s for s in (wanted.min[axis], wanted.typical[axis], wanted.max[axis]) if s != size]
            if isinstance(size, int) and asked:
                raise _fixed(signature, name, axis, max(asked), source)


_OPENED = "log the model with that dimension open, if it computes with other sizes"
_OPENED_BY = {
    "pytorch": "log the model with that dimension open: -1 in its signature, and two or more of it in the input "
    "example. Where it is so already, its forward computes with this size alone",
    "onnx": "export the ONNX file with that dimension open (torch.onnx.export: dynamic_shapes) and log it again",
}

_BATCH_OPENED = "log the model with an input example of two rows or more (batch >= 2), so that its batch stays open"
_BATCH_OPENED_BY = {
    "onnx": "export the ONNX file with its first dimension open (torch.onnx.export: dynamic_shapes) and log it again",
}


def how_to_open_the_batch(signature: Signature, flavor: str) -> str:
    """What to do about a model that takes one batch size, by the flavor that it was logged with."""
    sizes = {spec.name: spec.batch for spec in signature.inputs if isinstance(spec.batch, int)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
        return (
            f"axis 0 of every input must be the batch, and is {listed}: log a model that takes a state of "
            "[layers, batch, width] as [batch, layers, width], and transposes it"
        )
    if flavor == "pytorch" and max(sizes.values(), default=0) > 1:
        return (
            "leave the batch open in its signature (-1), and have its forward compute with any: sizes from x.shape[0], "
            "not len(x), which fixes them, and no loop over the rows or list of a result for each"
        )
    return _BATCH_OPENED_BY.get(flavor, _BATCH_OPENED)


def _fixed(signature: Signature, name: str, axis: int, asked: int, source: SourceModel) -> SourceError:
    size = signature.input(name).shape[axis]
    if axis == 0:
        return SourceError(
            f"the export has fixed batch {size}, the policy asks for batch {asked}",
            fix=f"{how_to_open_the_batch(signature, source.flavor)}, or ask for that batch only",
            where=source.uri,
        )
    return SourceError(
        f"the export has fixed dimension {axis} of input {name!r} to {size}, the policy asks for {asked}",
        fix=f"correct the target's shapes, or {_OPENED_BY.get(source.flavor, _OPENED)}",
        where=source.uri,
    )
