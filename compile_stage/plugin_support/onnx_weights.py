"""ONNX graphs whose weights stay in their file until one is asked for, so that a graph costs no memory for them.

`load` reads a graph and leaves what lies in a file beside it there; `values` maps one weight; `write` copies weights
from file to file. In a graph that is loaded so, a weight's place is an absolute path, which no other tool takes: what
another tool is to read is written first, or serialised by `message`.

ONNX's own reader is not used for such files: it holds all weights in memory, and refuses a file with several links,
as every file has that the stage hands to a worker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from compile_stage.core.errors import UsageError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

INLINE_LIMIT_BYTES = 200_000_000
"""Bytes of weights from which they lie beside the graph. Protobuf's own end is at 2 GiB; but a graph with its weights
in it is in memory three times while it is written, and is parsed as a whole by whoever asks for a node's name."""

SMALL_BYTES = 1024
"""A smaller weight stays in the graph: it may be a shape or an axis, which runtimes want to see there."""

_ALIGNMENT = 4096  # of a weight in its file: runtimes map whole pages
_CHUNK = 1 << 24


def load(path: str | os.PathLike[str]) -> ModelProto:
    """A graph, with those weights that lie in files beside it left there.

    Raises:
        UsageError: A file of weights is not in the graph's folder, or is absent.
    """
    import onnx

    model = onnx.load(os.fspath(path), load_external_data=False)
    folder = Path(path).resolve().parent
    for tensor in _all_initializers(model.graph):
        if is_outside(tensor):
            _set_place(tensor, str(_file_of(tensor, folder)))
            if _size(tensor) < SMALL_BYTES:
                _take_in(tensor)
    return model


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph, and all within it: branches, and bodies of loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from all_graphs(inner)


def is_outside(tensor: TensorProto) -> bool:
    """True for a weight that lies in a file."""
    from onnx import TensorProto

    return bool(tensor.data_location == TensorProto.EXTERNAL)


def values(tensor: TensorProto) -> Any:
    """A weight as an array that can't be written to: mapped from its file, or a view of what the message holds."""
    from onnx import TensorProto, helper, numpy_helper

    if not is_outside(tensor):
        return numpy_helper.to_array(tensor)
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    place, offset, length = _place(tensor)
    if length == 0:
        return np.zeros(shape, kind)
    if kind.kind in "fiub" and kind.itemsize * math.prod(shape) == length:  # no type of several values in a byte
        flat = np.memmap(place, kind.newbyteorder("<"), "r", offset, (math.prod(shape),))
        return flat.view(np.ndarray).reshape(shape)
    held = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=_bytes(tensor))
    return numpy_helper.to_array(held)


def weight_bytes(model: ModelProto) -> int:
    """Bytes of all weights. Protobuf's own count fails past 2 GiB, and costs as much as to serialise."""
    return sum(_size(tensor) for tensor in _all_initializers(model.graph))


def write(model: ModelProto, path: Path, weights: str, inline_limit: int | None = None) -> Path:
    """Write the graph, its weights beside it where they are large. Same graph, same bytes. Returns `path`.

    A weight that lies in a file of that folder already stays in it. The message refers to the written file then.

    Args:
        weights: Name of the file beside it.
        inline_limit: Bytes from which they are large; `INLINE_LIMIT_BYTES` by default.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = INLINE_LIMIT_BYTES if inline_limit is None else inline_limit
    folder = path.parent.resolve()
    if weight_bytes(model) < limit:
        take_in(model)
        (folder / weights).unlink(missing_ok=True)
        path.write_bytes(model.SerializeToString(deterministic=True))
        return path
    _put_out(model.graph, folder / weights)
    path.write_bytes(message(model, folder))
    return path


def message(model: ModelProto, folder: Path | None) -> bytes:
    """The graph as bytes, for a reader that looks for weights in the folder; None: all are in the graph."""
    outside = [tensor for tensor in _all_initializers(model.graph) if is_outside(tensor)]
    places = [_place(tensor)[0] for tensor in outside]
    for tensor, place in zip(outside, places, strict=True):
        _set_place(tensor, Path(place).relative_to(folder).as_posix() if folder else Path(place).name)
    try:
        return bytes(model.SerializeToString(deterministic=True))
    finally:
        for tensor, place in zip(outside, places, strict=True):
            _set_place(tensor, place)


def folder_of(model: ModelProto) -> Path | None:
    """The folder that all weights outside of the graph lie in; None where there are none, or several."""
    outside = [tensor for tensor in _all_initializers(model.graph) if is_outside(tensor)]
    folders = {Path(_place(tensor)[0]).parent for tensor in outside}
    return folders.pop() if len(folders) == 1 else None


def load_whole(path: str | os.PathLike[str]) -> ModelProto:
    """A graph with all of its weights in memory, for tools that take nothing else."""
    model = load(path)
    take_in(model)
    return model


def take_in(model: ModelProto) -> None:
    """Read all weights into the graph."""
    for tensor in _all_initializers(model.graph):
        if is_outside(tensor):
            _take_in(tensor)


def _take_in(tensor: TensorProto) -> None:
    content = _bytes(tensor)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = content


def _put_out(graph: GraphProto, file: Path) -> None:
    """Have every large weight lie in a file of that folder; those that do not yet are written to `file`."""
    inside = [
        tensor
        for tensor in _all_initializers(graph)
        if _size(tensor) >= SMALL_BYTES and not (is_outside(tensor) and Path(_place(tensor)[0]).parent == file.parent)
    ]
    if not inside:
        return
    taken = {_place(tensor)[0] for tensor in _all_initializers(graph) if is_outside(tensor)}
    while str(file) in taken:  # it holds what the graph reads
        file = file.with_name(f"{file.name}_")
    file.unlink(missing_ok=True)
    with open(file, "xb") as stream:
        for tensor in inside:
            stream.seek(-stream.tell() % _ALIGNMENT, os.SEEK_CUR)
            offset = stream.tell()
            _copy(tensor, stream)
            length = stream.tell() - offset
            for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(name)
            _set_place(tensor, str(file), offset, length)


def _copy(tensor: TensorProto, stream: BinaryIO) -> None:
    if not is_outside(tensor):
        stream.write(_bytes(tensor))
        return
    place, offset, left = _place(tensor)
    with open(place, "rb") as source:
        source.seek(offset)
        while left:
            chunk = source.read(min(left, _CHUNK))
            if not chunk:
                raise UsageError(f"the file of weights {Path(place).name} ends within {tensor.name!r}")
            stream.write(chunk)
            left -= len(chunk)


def _bytes(tensor: TensorProto) -> bytes:
    """A weight as `raw_data` has it."""
    from onnx import numpy_helper

    if is_outside(tensor):
        place, offset, length = _place(tensor)
        with open(place, "rb") as source:
            source.seek(offset)
            return source.read(length)
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def _size(tensor: TensorProto) -> int:
    from onnx import TensorProto, helper

    if is_outside(tensor):
        return _place(tensor)[2]
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    if tensor.data_type == TensorProto.STRING:
        return 0  # strings have no raw form, so they stay in the graph
    each: int = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    return int(math.prod(tensor.dims)) * each


def _place(tensor: TensorProto) -> tuple[str, int, int]:
    """File, offset and length in bytes."""
    from onnx import helper

    known = {entry.key: entry.value for entry in tensor.external_data}
    length = known.get("length")
    if length is None:
        length = math.prod(tensor.dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    return known["location"], int(known.get("offset", 0)), int(length)


def _set_place(tensor: TensorProto, place: str, offset: int | None = None, length: int | None = None) -> None:
    from onnx import TensorProto

    known = {entry.key: entry.value for entry in tensor.external_data}
    _, before, size = _place(tensor) if known else ("", 0, 0)
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": place, "offset": before if offset is None else offset}
    for key, value in {**entries, "length": size if length is None else length}.items():
        tensor.external_data.add(key=key, value=str(value))


def _file_of(tensor: TensorProto, folder: Path) -> Path:
    location = _place(tensor)[0]
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise UsageError(f"the weights {tensor.name!r} point outside of the graph's folder ({location})")
    if not file.is_file():
        raise UsageError(f"the file of weights {location} is missing")
    return file


def _all_initializers(graph: GraphProto) -> Iterator[TensorProto]:
    """The weights of a graph, and of the graphs within it."""
    for part in all_graphs(graph):
        yield from part.initializer
