"""Where samples come from → named arrays and labels, nothing chosen or converted yet."""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.errors import MissingDependencyError, PolicyError, SourceError
from compile_stage.core.records import DataSpec, ShapeRange, record
from compile_stage.core.table_files import demand_bounded_csv, demand_bounded_text
from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.serving.prediction_io import fill_texts

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

_npy: Any = np.lib.format  # NumPy leaves it untyped

Fills = Callable[[], Mapping[str, Mapping[str, str]]]

UNKNOWN_SIZE = 16
"""What a synthetic sample has for a symbolic dimension of which the policy says nothing."""


@dataclass(frozen=True)
class Rows:
    """One array by rows: its whole shape is known, and rows are read when they are wanted.

    Attributes:
        take: Sorted row numbers → those rows.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    take: Callable[[NDArray[np.int64]], Array]

    @staticmethod
    def of(array: Array) -> Rows:
        """Of an array in memory."""
        return Rows(array.shape, array.dtype, lambda indices: array[indices])


@dataclass(frozen=True)
class Table:
    """What a source holds.

    Attributes:
        columns: Name → rows; labels and groups are not among them.
        labels: None when the source has none.
        groups: Which samples belong together; None when nothing says so.
    """

    columns: Mapping[str, Rows]
    labels: Rows | None = None
    groups: Rows | None = None
    real: bool = True
    notes: tuple[str, ...] = field(default=())


@record
class SampleRequest:
    """Which samples are asked for.

    Attributes:
        signature: The model's; its inputs decide names, dtypes and shapes.
        seed: Chooses which `max_samples` are taken when there are more; they keep their order.
        shapes: What the policy promises of dynamic inputs; samples outside are refused.
        dataset: The file of an `mlflow-dataset`, which was fetched.
        keep_given: Keep the samples as they were too, where they are rounded to the types of the inputs
            (`core.sample_files.GIVEN`); whole numbers may be rounded then as well.
        columns: Of a data frame, those that make up a single input, in order, where a manifest says so and the original
            is not here to be asked; empty where it names none.
        fills: What missing texts of a data frame are filled in with (`core.ports.Exporter.prediction_format`), where a
            manifest says so; None where the original is asked.
    """

    spec: DataSpec
    signature: Signature
    seed: int
    shapes: Mapping[str, ShapeRange] = field(default_factory=dict)
    dataset: str | None = None
    keep_given: bool = False
    columns: tuple[str, ...] | None = None
    fills: Mapping[str, Mapping[str, str]] | None = None


def read(request: SampleRequest, example: Batch | None, fills: Fills = dict) -> Table:
    """The source that a policy names. Raises PolicyError or SourceError, in words, when it can't be read.

    Args:
        example: The input example that was logged with the model.
        fills: What missing texts are filled in with, by column; called where a file has some.
    """
    spec = request.spec
    kind, _, rest = spec.source.partition(":")
    if kind == "input_example":
        if not example:
            raise SourceError(
                "the model was logged without an input example",
                fix="log it with input_example=..., or name other samples under `data` in the policy",
                where=spec.source,
            )
        return _from_arrays(spec, dict(example), None)
    if kind == "file":
        return _from_file(spec, Path(rest), fills)
    if kind == "mlflow-dataset":
        if request.dataset is None:
            raise PolicyError(f"the data set {rest!r} was not fetched", where=spec.source)
        return _from_file(spec, Path(request.dataset), fills)
    if kind == "python":
        return _from_function(spec, rest)
    if kind == "synthetic":
        return _synthetic(spec, request.signature, request.seed, request.shapes)
    raise PolicyError(
        f"{spec.source!r} is no source of samples",
        fix="use input_example, file:PATH (.npz, .parquet, .csv), mlflow-dataset:NAME, python:package.module:function "
        "or synthetic",
    )


# ---------------------------------------------------------------------------------------------------------------- files


def _from_file(spec: DataSpec, path: Path, fills: Fills) -> Table:
    frame = partial(_frame, fills=fills)
    readers: dict[str, Callable[[DataSpec, Path], dict[str, Rows]]] = {".npz": _npz, ".parquet": frame, ".csv": frame}
    if path.suffix not in readers:
        raise PolicyError(
            f"{path.name}: samples are read from .npz, .parquet and .csv, not from "
            f"{path.suffix or 'a file without a suffix'!r}",
            where=spec.source,
        )
    if not path.is_file():
        raise PolicyError("there is no such file", fix="correct data.*.source in the policy", where=str(path))
    try:
        return _split(spec, readers[path.suffix](spec, path))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise PolicyError(f"the file can't be read: {error}", where=str(path)) from error


def _npz(spec: DataSpec, path: Path) -> dict[str, Rows]:
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name.removesuffix(".npy"): _npz_rows(spec, path, archive, name) for name in members}


def _npz_rows(spec: DataSpec, path: Path, archive: zipfile.ZipFile, member: str) -> Rows:
    """A member whose chosen rows are read in passing, so that a data set larger than memory can be sampled."""
    name = member.removesuffix(".npy")
    with archive.open(member) as stream:
        shape, fortran, dtype = _header(stream)
        held = archive.getinfo(member).file_size - stream.tell()
    if dtype.hasobject:
        raise _pickled(spec, name)
    if (
        math.prod(shape) * dtype.itemsize != held
    ):  # its rows would be chosen, and room made for them, before any is read
        raise ValueError(f"array {name!r} says that its shape is {shape}, and holds {held:,} bytes")

    def take(indices: NDArray[np.int64]) -> Array:
        with zipfile.ZipFile(path) as again, again.open(member) as stream:
            if fortran or not shape:
                whole: Array = _npy.read_array(stream, allow_pickle=False)
                return whole[indices]
            _header(stream)
            row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            taken = np.empty((len(indices), *shape[1:]), dtype)
            here = 0
            for position, index in enumerate(indices):
                stream.seek((int(index) - here) * row_bytes, 1)
                data = stream.read(row_bytes)
                taken[position] = np.frombuffer(data, dtype).reshape(shape[1:])
                here = int(index) + 1
            return taken

    return Rows(shape, dtype, take)


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = _npy.read_magic(stream)
    read_header = _npy.read_array_header_1_0 if version == (1, 0) else _npy.read_array_header_2_0
    try:
        shape, fortran, dtype = read_header(stream)
    except TokenError as error:  # from NumPy with Python 3.12 and newer, where it says ValueError otherwise
        raise ValueError(f"the header of an array is no header: {error.args[0]}") from error
    return tuple(shape), bool(fortran), dtype


def _frame(spec: DataSpec, path: Path, fills: Fills) -> dict[str, Rows]:
    import pandas

    if path.suffix == ".csv":
        demand_bounded_csv(path)
    try:
        frame = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    except ImportError as error:
        raise MissingDependencyError(
            "parquet files are read with pyarrow, which is not installed",
            fix='pip install "compile-stage[parquet]"',
            where=str(path),
        ) from error
    if path.suffix == ".csv":
        frame = _with_words_as_written(path, frame)
    return {str(name): Rows.of(_column(spec, str(name), frame[name], fills)) for name in frame.columns}


def _with_words_as_written(path: Path, frame: Any) -> Any:
    """The frame with the words in its columns of text that pandas takes for no value: "NA" is Namibia's code, "None" a
    class of some. An empty cell stays one, and so does such a word among numbers."""
    import pandas

    places = [
        place
        for place, (_, column) in enumerate(frame.items())
        if column.dtype.kind == "O" and column.isna().any() and all(isinstance(c, str) for c in column.dropna())
    ]
    if not places:
        return frame
    words = pandas.read_csv(path, usecols=places, dtype=str, keep_default_na=False, na_values=[""])
    return frame.assign(**{name: words[name] for name in frame.columns[places]})


def _column(spec: DataSpec, name: str, series: Any, fills: Fills) -> Array:
    """A data frame's column. Cells may be numbers, text, or lists of one length (a tensor for each row)."""
    values: Array = series.to_numpy()
    if values.dtype != object:
        return values
    cells = [c for c in values if c is not None and not (isinstance(c, float) and c != c)]  # pandas' two empties
    if cells and all(isinstance(cell, str) for cell in cells):
        if len(cells) != len(values) and (fill := fills().get(name)):
            values = fill_texts(values, fill)
            cells = [cell for cell in values if isinstance(cell, str)]
        if len(cells) != len(values):
            raise PolicyError(f"column {name!r} has {len(values) - len(cells)} empty cells", where=spec.source)
        demand_bounded_text(name, len(cells), max(map(len, cells)))
        return values.astype(str)
    if cells and all(isinstance(cell, list | tuple | np.ndarray) for cell in values):
        try:
            stacked = np.array([np.array(_nested(cell)) for cell in values])
        except ValueError as error:
            raise _uneven(spec, name) from error
        if stacked.dtype != object:
            return stacked
    if len(cells) != len(values):
        raise PolicyError(f"column {name!r} has {len(values) - len(cells)} empty cells", where=spec.source)
    raise PolicyError(f"column {name!r} mixes values that are no numbers and no text", where=spec.source)


def _uneven(spec: DataSpec, name: str) -> PolicyError:
    return PolicyError(
        f"the lists in column {name!r} differ in length, and samples are arrays with one length for all",
        fix="fill them up to one length in the file, with what the model takes for padding, or keep rows of one length",
        where=spec.source,
    )


def demand_even_lists(spec: DataSpec) -> None:
    """Raises PolicyError where a column of a parquet file holds lists of unlike length. Nothing else of the file is
    read, and what is wrong with it otherwise is said when it is.

    Args:
        spec: Its source is `file:PATH.parquet`.
    """
    path = spec.source.removeprefix("file:")
    try:
        from pyarrow import compute, parquet
        from pyarrow.lib import ArrowException
        from pyarrow.types import is_large_list, is_list
    except ImportError:
        return
    try:
        with parquet.ParquetFile(path) as file:
            names = [field.name for field in file.schema_arrow if is_list(field.type) or is_large_list(field.type)]
            lengths: dict[str, set[Any]] = {name: set() for name in names}
            for rows in file.iter_batches(columns=names) if names else ():
                for name in names:
                    bounds = compute.min_max(compute.list_value_length(rows[name])).as_py()
                    lengths[name] |= {value for value in bounds.values() if value is not None}
                    if len(lengths[name]) > 1:
                        raise _uneven(spec, name)
    except (OSError, ArrowException):
        return


def _nested(cell: Any) -> Any:
    """A parquet cell of nested lists is an array of arrays; NumPy stacks lists only."""
    return [_nested(item) for item in cell] if isinstance(cell, list | tuple | np.ndarray) else cell


# ---------------------------------------------------------------------------------------------------- python, synthetic


def demand_importable(spec: DataSpec) -> None:
    """Raises PolicyError where the package of the function that makes the samples is not there. Nothing is imported."""
    path = spec.source.partition(":")[2]
    package = path.partition(":")[0].partition(".")[0]
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put among those that are loaded, without a spec
        found = True
    if not found:
        raise _not_importable(spec, path, f"No module named {package!r}")


def _not_importable(spec: DataSpec, path: str, why: object) -> PolicyError:
    return PolicyError(
        f"the function {path!r} can't be imported: {why}",
        fix="write python:package.module:function, and put the package's folder on PYTHONPATH",
        where=spec.source,
    )


def _from_function(spec: DataSpec, path: str) -> Table:
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_importable(spec, path, error) from error
    try:
        answer = function()
    except Exception as error:
        raise PolicyError(f"{path} raised {type(error).__name__}: {error}", where=spec.source) from error
    labels = None
    if isinstance(answer, tuple) and len(answer) == 2:
        answer, labels = answer
    if not isinstance(answer, Mapping):
        raise PolicyError(
            f"{path} answered with {type(answer).__name__}; a dict of arrays is wanted, or (dict, labels)",
            where=spec.source,
        )
    return _from_arrays(spec, answer, labels)


def _synthetic(spec: DataSpec, signature: Signature, seed: int, shapes: Mapping[str, ShapeRange]) -> Table:
    generator = np.random.default_rng(seed)
    sizes: dict[str, int] = {}
    for tensor in signature.inputs:
        if tensor.name in shapes:
            typical = shapes[tensor.name].typical
            sizes |= {d: n for d, n in zip(tensor.shape[1:], typical[1:], strict=False) if isinstance(d, str)}
    columns: dict[str, Rows] = {}
    for tensor in signature.inputs:
        size = (spec.max_samples, *(_size(dim, sizes) for dim in tensor.shape[1:]))
        columns[tensor.name] = Rows.of(_random(generator, tensor, size))
    notes = ["synthetic samples: they show that the model runs, and prove nothing about its outputs"]
    guessed = {d for t in signature.inputs for d in t.shape[1:] if isinstance(d, str) and d not in sizes}
    if guessed:
        notes.append(f"nothing is known of the size of {', '.join(sorted(guessed))}; {UNKNOWN_SIZE} was taken")
    return Table(columns, None, real=False, notes=tuple(notes))


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else sizes.get(dim, UNKNOWN_SIZE)


def _random(generator: np.random.Generator, tensor: TensorSpec, size: tuple[int, ...]) -> Array:
    if tensor.dtype == "str":
        return np.full(size, "a")
    dtype = np.dtype(tensor.dtype)
    if dtype.kind in "iub":  # 0 and 1 are in every vocabulary, and good as masks
        return generator.integers(0, 2, size).astype(dtype)
    return generator.standard_normal(size).astype(dtype)


# --------------------------------------------------------------------------------------------------------------- shared


def _from_arrays(spec: DataSpec, arrays: Mapping[str, Any], labels: Any) -> Table:
    columns = {str(name): Rows.of(_plain(spec, str(name), np.asarray(a))) for name, a in arrays.items()}
    if labels is None:
        return _split(spec, columns)
    return replace(
        _split(replace(spec, labels=None), columns), labels=Rows.of(_plain(spec, "the labels", np.asarray(labels)))
    )


def _plain(spec: DataSpec, name: str, array: Array) -> Array:
    if array.dtype == object:
        if all(isinstance(item, str) for item in array.flat):
            demand_bounded_text(name, array.size, max((len(str(item)) for item in array.flat), default=0))
            return array.astype(str)
        raise _pickled(spec, name)
    return array


def _pickled(spec: DataSpec, name: str) -> PolicyError:
    return PolicyError(
        f"array {name!r} holds Python objects (a pickle, or rows of different lengths), which are not read",
        fix="save it with a number or text dtype: np.savez(path, x=np.asarray(x, dtype=np.float32))",
        where=spec.source,
    )


def _split(spec: DataSpec, columns: dict[str, Rows]) -> Table:
    """Take labels and groups out of the columns. Whether there must be groups is the caller's to know: calibration
    samples need none."""
    left = dict(columns)
    labels = None if spec.labels is None else left.pop(spec.labels, None)
    groups = None if spec.groups is None else left.pop(spec.groups, None)
    if spec.labels is not None and labels is None:
        raise PolicyError(
            f"there are no labels {spec.labels!r} in the samples, which have "
            f"{', '.join(map(repr, columns)) or 'nothing'}",
            fix="correct data.*.labels in the policy, or write `labels: null` where there are none",
            where=spec.source,
        )
    return Table(left, labels, groups)
