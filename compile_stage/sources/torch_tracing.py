"""A pickled PyTorch module → the exported program that torch.export traces on its input example."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError
from compile_stage.core.records import ShapeRange, SourceModel
from compile_stage.plugin_support.torch_programs import tracing
from compile_stage.sources import mlmodel, torch_forward

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export_module(source: SourceModel, module: Any, shapes: Mapping[str, ShapeRange]) -> ExportedProgram:
    """Trace the module on `example_of` it, with those dimensions open that its signature leaves open, or for which
    `shapes` asks for other sizes; with the batch alone where it can't be traced so."""
    import numpy as np

    raw = example_of(source)
    names, _ = mlmodel.tensor_names(source)
    if isinstance(raw, Mapping):
        own = _arguments(module, len(raw))
        if names is not None and set(names) == set(own):  # given by name: the order of forward's arguments holds
            names = own
        values = [raw[name] for name in names or tuple(raw)]
    else:
        values = list(raw) if isinstance(raw, list | tuple) else [raw.to_numpy() if hasattr(raw, "to_numpy") else raw]
    floats = np.dtype(np.float32) if hasattr(raw, "to_numpy") else _example_floats(source, module)
    arrays = [
        array.astype(floats or array.dtype) if array.dtype.kind == "f" or hasattr(raw, "to_numpy") else array
        for array in map(np.asarray, values)
    ]
    named = names if names is not None and len(names) == len(arrays) else _arguments(module, len(arrays))
    try:
        inspect.signature(module.forward).bind(*arrays)
    except TypeError as error:
        count = f"{len(arrays)} tensor{'' if len(arrays) == 1 else 's'}"
        raise SourceError(
            f"its forward can't be called with the {count} of its input example: {error}",
            fix="give forward an argument for each tensor; a dict of tensors as one argument can't be compiled",
            where=source.uri,
        ) from error
    wanted = _open_axes(source, named, arrays, shapes)
    batch_alone: list[tuple[int, ...]] = [(0,) for _ in arrays]
    for axes in [wanted, batch_alone] if wanted != batch_alone else [batch_alone]:
        try:
            return _trace(module, arrays, axes)
        except Exception as error:
            if axes == wanted and wanted != batch_alone:
                continue
            raise SourceError(
                f"torch.export can't trace it{torch_forward.place_of(error)}: {torch_forward.reason(error)}",
                fix=torch_forward.advice(error),
                where=source.uri,
            ) from error
    raise AssertionError("unreachable")


def example_of(source: SourceModel) -> Any:
    """Its input example, or numbers that fit its signature; None where there is neither."""
    logged = mlmodel.raw_example(source)
    return mlmodel.drawn_example(source) if logged is None else logged


def _example_floats(source: SourceModel, module: Any) -> Any:
    """The NumPy type that the floats of its input example were logged in, as far as anybody knows: None for the type
    that they were read in. MLflow writes them as JSON, which has no types, and reads float64 where no signature says
    otherwise; it makes none for a module that answers a dict. What the module was given then computes in the type of
    its parameters."""
    if mlmodel.read(source).inputs is not None:
        return None
    return next((_numpy_type(p.dtype) for p in module.parameters() if p.is_floating_point()), None)


def _numpy_type(dtype: Any) -> Any:
    """None where NumPy has none of its own, such as for bfloat16."""
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def _trace(module: Any, arrays: Sequence[Any], axes: Sequence[Sequence[int]]) -> ExportedProgram:
    """The program, with these axes of each input open. A size of 1 is doubled, because it would be fixed."""
    import numpy as np
    import torch

    example = []
    for array, opened in zip(arrays, axes, strict=True):
        for axis in opened:
            array = np.concatenate([array, array], axis=axis) if array.shape[axis] == 1 else array
        example.append(torch.from_numpy(array))
    dynamic = tuple(dict.fromkeys(opened, torch.export.Dim.AUTO) for opened in axes)
    shapes = _by_argument(module, dynamic)
    with tracing():
        try:
            program = torch.export.export(module, tuple(example), dynamic_shapes=shapes)
        except Exception as error:
            if not torch_forward.has_unknown_answer(error):
                raise
        else:
            if not torch_forward.has_absent_answer(program) and not torch_forward.has_fields(program):
                return program
        torch_forward.answers_plainly(module)
        return torch.export.export(module, tuple(example), dynamic_shapes=shapes)


def _open_axes(
    source: SourceModel, names: Sequence[str], arrays: Sequence[Any], shapes: Mapping[str, ShapeRange]
) -> list[tuple[int, ...]]:
    """Of each input: the batch, the axes that the signature leaves open, and those of which another size is asked."""
    logged = mlmodel.open_axes(source, names)
    found = []
    for name, array in zip(names, arrays, strict=True):
        axes = {0, *logged.get(name, ())}
        if name in shapes:
            ends = zip(array.shape, shapes[name].min, shapes[name].typical, shapes[name].max, strict=False)
            axes |= {axis for axis, sizes in enumerate(ends) if len(set(sizes)) > 1}
        found.append(tuple(sorted(axis for axis in axes if axis < array.ndim)))
    return found


def _arguments(module: Any, count: int) -> tuple[str, ...]:
    """Names of the forward's first arguments, as the program has them; empty names where it has fewer."""
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_POSITIONAL]
    return tuple([*names, *[""] * count][:count])


def _by_argument(module: Any, dynamic: tuple[Any, ...]) -> Any:
    """Dynamic shapes in the form that torch.export wants for this forward: nested for `*args`."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return (dynamic,)
    return dynamic
