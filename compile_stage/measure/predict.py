"""Run a model over all samples; its outputs go to disk as they come, so that nobody holds them whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import IntegrityError, SourceError, UsageError, WorkerError
from compile_stage.core.ports import Session, Worker
from compile_stage.core.records import SampleSet
from compile_stage.measure.samples import Samples, tensor_files

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

_MAPPED_BYTES = 1_000_000  # of a file of outputs; smaller ones are read whole


def predict(session: Session, samples: Samples, batch_size: int, into: Path) -> dict[str, str]:
    """The outputs for all samples.

    Every batch has `batch_size` rows: an artifact may be compiled for the target's sizes alone. The rows of the last
    are repeated to fill it, which changes no range that is taken from a batch, and their outputs are dropped.

    Returns:
        Output name → `.npy` file below `into`, axis 0 being the sample.

    Raises:
        SourceError: the model does not take that batch size, or what it answers can't be laid out by sample: an output
            without the batch on axis 0, one whose shape or dtype changes from batch to batch, or other names than its
            signature.
    """
    fixed = session.signature.fixed_batch
    if fixed is not None and fixed != batch_size:
        raise SourceError(
            f"the model takes batches of {fixed} only, and batches of {batch_size} are wanted",
            fix="export it with a dynamic batch, or ask for that batch size in the policy",
        )
    if samples.count == 0:
        raise SourceError("there are no samples to run the model on")
    into.mkdir(parents=True, exist_ok=True)
    names = tuple(tensor.name for tensor in session.signature.outputs)
    writers = {name: _Writer(name, into / file, samples.count) for name, file in tensor_files(names).items()}
    for start, batch, rows in _batches(samples, batch_size):
        outputs = session.run(batch)
        require_arrays(outputs)
        if set(outputs) != set(names):
            raise SourceError(
                f"the model answered with {_names(outputs)}, and its signature says {_names(dict.fromkeys(names))}"
            )
        size = len(next(iter(batch.values())))
        for name, writer in writers.items():
            writer.write(start, rows, size, np.asarray(outputs[name]))
    return {name: writer.close() for name, writer in writers.items()}


def require_arrays(answer: object) -> None:
    """Refuse an answer that is not output name → NumPy array (or scalar), or whose arrays are of a subclass: what
    computes or copies only when it is looked at has not answered yet.

    Raises:
        SourceError: It is something else; the message says what.
    """
    if not isinstance(answer, Mapping):
        raise SourceError(f"the model answered with a {_type(answer)}, and a mapping of output name to array is wanted")
    for name, value in answer.items():
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise SourceError(
                f"output {name!r} is a {_type(value)}, and a numpy.ndarray is wanted",
                fix="let the session's run return arrays that are computed and in the host's memory",
            )


def try_predict(
    worker: Worker, samples: SampleSet, batch_size: int, into: Path
) -> Mapping[str, str] | SourceError | UsageError | WorkerError:
    """Have the model that a worker has open answer samples, which it may refuse.

    Args:
        into: A folder for the answers.

    Returns:
        Output name → `.npy` file, axis 0 being the sample; or the error that it refused them with.

    Raises:
        WorkerError: The worker is gone.
    """
    try:
        written: Mapping[str, str] = worker.call("predict", samples=samples, batch_size=batch_size, into=into)
    except (SourceError, UsageError) as error:  # a backend's session refuses with the latter what it has no type for
        return error
    except WorkerError as error:
        if error.worker_is_gone:
            raise
        return error
    return written


def open_outputs(files: Mapping[str, str] | Path) -> dict[str, Array]:
    """Outputs as `predict` wrote them, read-only; large ones are memory-mapped.

    Args:
        files: Output name → `.npy` file, as `predict` returns it; or the folder, for outputs whose names are file
            names.
    """
    if isinstance(files, Path):
        files = {path.stem: str(path) for path in sorted(files.glob("*.npy"))}
    try:
        return {name: _open_array(path) for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the model's outputs can't be read back: {error}") from error


def _open_array(path: str) -> Array:
    """A mapped file stays open as long as its array lives, and a process may often have 1,024 open: the answers that
    are kept of a model with 30 outputs are more."""
    if Path(path).stat().st_size > _MAPPED_BYTES:
        mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return mapped
    array: Array = np.load(path, allow_pickle=False)
    array.flags.writeable = False
    return array


def _batches(samples: Samples, size: int) -> Iterator[tuple[int, Batch, int]]:
    """(first sample, batch, how many of its rows are samples)."""
    for start in range(0, samples.count, size):
        rows = min(size, samples.count - start)
        batch = samples.batch(start, start + rows)
        if rows < size:
            fill = np.arange(size) % rows
            batch = {name: np.ascontiguousarray(array[fill]) for name, array in batch.items()}
        yield start, batch, rows


class _Writer:
    """One output on its way to disk. The first batch decides shape and dtype."""

    def __init__(self, name: str, path: Path, count: int) -> None:
        self._name = name
        self._path = path
        self._count = count
        self._file: np.memmap[Any, np.dtype[Any]] | None = None
        self._text: list[Array] = []  # the longest text is only known at the end; labels are small

    def write(self, start: int, rows: int, size: int, array: Array) -> None:
        array = plain_array(self._name, array)
        if array.ndim == 0 or len(array) != size:
            shape = list(array.shape)
            raise SourceError(
                f"output {self._name!r} has the shape {shape} for a batch of {size}; its axis 0 must be the batch",
                fix="log a model that leaves out what is no answer to a sample (a loss, a constant), and that answers "
                "each with as many results (the best k, or padded)",
            )
        if array.dtype.kind == "U":
            self._text.append(array[:rows])
            return
        if self._file is None:
            npy: Any = np.lib.format  # NumPy leaves it untyped
            self._file = npy.open_memmap(
                self._path, mode="w+", dtype=array.dtype, shape=(self._count, *array.shape[1:])
            )
        if array.shape[1:] != self._file.shape[1:] or array.dtype != self._file.dtype:
            raise SourceError(
                f"output {self._name!r} is {array.dtype}{list(array.shape[1:])} for the samples from {start} on and "
                f"{self._file.dtype}{list(self._file.shape[1:])} for those before: what depends on the values in its "
                "shape can't be compared"
            )
        self._file[start : start + rows] = array[:rows]

    def close(self) -> str:
        if self._text:
            try:
                np.save(self._path, np.concatenate(self._text), allow_pickle=False)
            except ValueError as error:
                raise SourceError(f"output {self._name!r} changes its shape from batch to batch") from error
        elif self._file is not None:
            self._file.flush()
            self._file = None
        return str(self._path)


def plain_array(name: str, array: Array) -> Array:
    """An output as a dtype that `.npy` knows. Raises SourceError for one that holds neither numbers nor text."""
    if array.dtype.kind == "V" and array.dtype.names is None:  # bfloat16, float8: every value is a float32 too
        return array.astype(np.float32)
    if array.dtype.kind == "S":
        return array.astype(str)
    if array.dtype == object:
        if all(isinstance(item, str) for item in array.flat):
            return array.astype(str)
        raise SourceError(f"output {name!r} holds Python objects; numbers or text can be compared")
    return array


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _names(outputs: Mapping[str, object]) -> str:
    return ", ".join(map(repr, outputs)) or "nothing"
