"""The tensors of a PyTorch program: names, types and sizes, with readable symbols for the sizes that are open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.sources import graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def signature_of(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str] | None = None
) -> Signature:
    """The program's tensors under the given names. `symbols` names dimensions; `symbol_names` by default."""
    rename = graph.symbol_renamer(symbol_names(program, inputs) if symbols is None else symbols)
    specs = list(tensors(program, rename))
    named = [
        TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)
        for name, spec in zip((*inputs, *outputs), specs, strict=True)
    ]
    return Signature(inputs=tuple(named[: len(inputs)]), outputs=tuple(named[len(inputs) :]))


def symbol_names(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, str]:
    """The exporter's symbols (`s40`) → readable names: `batch` for axis 0 of every input, `NAME_AXIS` for others.

    The exporter may keep the batches of two inputs apart, because they could be broadcast; all samples have one batch.
    """
    names: dict[str, str] = {}
    for name, spec in zip(inputs, tensors(program), strict=False):
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str) and size.isidentifier():
                names.setdefault(size, graph.BATCH if axis == 0 else f"{name}_{axis}")
    return names


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """Keys of a dict (or of a dataclass) that the model returns, with those of dicts, lists and tuples within it behind
    dots (`boxes.0`); `output` for a single tensor, else `output_0`, ..."""
    import torch

    spec = program.call_spec.out_spec
    answer = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(answer, Mapping):
        paths = dict(_paths(answer))
        if sorted(paths.values()) == list(range(spec.num_leaves)):  # else two have one name, or one lies elsewhere
            return tuple(sorted(paths, key=paths.__getitem__))
    return ("output",) if spec.num_leaves == 1 else tuple(f"output_{i}" for i in range(spec.num_leaves))


def _paths(answer: Any) -> Iterator[tuple[str, int]]:
    """Name → number of each tensor in dicts, lists and tuples."""
    items = answer.items() if isinstance(answer, Mapping) else enumerate(answer)
    for key, value in items:
        if isinstance(value, int):
            yield str(key), value
        elif isinstance(value, Mapping | list | tuple):
            yield from ((f"{key}.{name}", number) for name, number in _paths(value))


def tensors(program: ExportedProgram, rename: Any = str) -> Iterator[TensorSpec]:
    """User inputs, then user outputs, as the program describes them."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name in (*program.graph_signature.user_inputs, *program.graph_signature.user_outputs):
        value: Any = nodes[str(name)].meta["val"] if str(name) in nodes else None
        if not hasattr(value, "shape"):
            continue
        # As in `torch_portable._write_fixed_sizes`.
        sizes = [size if isinstance(size, int) else str(size) for size in value.shape]
        shape: tuple[Dim, ...] = tuple(
            size if isinstance(size, int) else int(size) if size.isdigit() else rename(size) for size in sizes
        )
        yield TensorSpec(name=str(name), dtype=str(value.dtype).removeprefix("torch."), shape=shape)
