"""Real samples on disk: chosen once, by seed, in the model's own tensor names and dtypes, then only memory-mapped.

How they lie in their folder is said in `core.sample_files`; a name's characters that a file name can't hold are
percent-encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.digest import digest_file, digest_of
from compile_stage.core.errors import IntegrityError, PolicyError
from compile_stage.core.records import DataSpec, SampleSet, ShapeRange
from compile_stage.core.sample_files import LABELS, read_index, write_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.readers import Rows, Table, read

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch


# -------------------------------------------------------------------------------------------------------------- prepare


def prepare(
    spec: DataSpec,
    signature: Signature,
    into: Path,
    *,
    seed: int,
    example: Batch | None = None,
    dataset: Path | None = None,
    shapes: Mapping[str, ShapeRange] | None = None,
) -> SampleSet:
    """Write the samples that a policy names into the folder `into`.

    Args:
        signature: The model's; its inputs decide names, dtypes and shapes.
        seed: Chooses which `max_samples` are taken when there are more; they keep their order.
        example: The input example that was logged with the model, for the source `input_example`.
        dataset: The file of an `mlflow-dataset`, which the caller has fetched.
        shapes: What the policy promises of dynamic inputs; samples outside are refused.

    Raises:
        PolicyError: the data can't be read, is empty, or does not fit the model; the message says which input and why.
        SourceError: the model has no input example.
    """
    shapes = shapes or {}
    table = read(spec, signature, seed=seed, example=example, dataset=dataset, shapes=shapes)
    notes = list(table.notes)
    chosen = _choose(spec, _inputs(spec, table, signature, notes), table, seed)
    files = {name: f"inputs/{file}" for name, file in tensor_files([t.name for t in signature.inputs]).items()}
    (into / "inputs").mkdir(parents=True, exist_ok=True)
    symbols: dict[str, tuple[str, int]] = {}
    for tensor, rows in zip(signature.inputs, chosen.inputs, strict=True):
        array = _convert(spec, tensor, rows(), notes)
        _check_shape(spec, tensor, array.shape, shapes.get(tensor.name), symbols)
        if array.dtype.kind == "f" and (strange := int(np.count_nonzero(~np.isfinite(array)))):
            notes.append(f"input {tensor.name!r} has {strange} values that are NaN or infinite")
        np.save(into / files[tensor.name], array, allow_pickle=False)
    if table.labels is not None:
        _save_labels(spec, table.labels, chosen.indices, into)
    digests = {name: digest_file(into / file) for name, file in files.items()}
    labels_digest = digest_file(into / LABELS) if table.labels is not None else None
    write_index(into, files, labels=labels_digest is not None, count=len(chosen.indices))
    return SampleSet(
        path=str(into),
        digest=digest_of({"inputs": digests, "labels": labels_digest, "real": table.real}),
        count=len(chosen.indices),
        real=table.real,
        source=spec.source,
        has_labels=labels_digest is not None,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Chosen:
    indices: NDArray[np.int64]
    inputs: tuple[Any, ...]  # for each input, a function that reads the chosen rows


def _inputs(spec: DataSpec, table: Table, signature: Signature, notes: list[str]) -> list[list[Rows]]:
    """For each input of the model the columns that make it up: one of its own name, or all of them for a model with one
    matrix."""
    wanted = [tensor.name for tensor in signature.inputs]
    columns = dict(table.columns)
    if all(name in columns for name in wanted):
        if unused := [name for name in columns if name not in wanted]:
            notes.append(f"not used: {', '.join(unused)}")
        return [[columns[name]] for name in wanted]
    if len(wanted) == 1 and len(columns) == 1:
        notes.append(f"{next(iter(columns))!r} was taken as input {wanted[0]!r}")
        return [list(columns.values())]
    matrix = signature.inputs[0]
    if len(wanted) == 1 and len(matrix.shape) == 2 and columns and all(len(c.shape) == 1 for c in columns.values()):
        width = matrix.shape[1]
        if isinstance(width, int) and width != len(columns):
            raise PolicyError(
                f"input {matrix.name!r} takes {width} features, and the samples have {len(columns)} columns beside the labels: "
                f"{_some(list(columns))}",
                fix="drop the other columns from the file, and name the labels' column as data.*.labels",
                where=spec.source,
            )
        return [list(columns.values())]
    missing = [name for name in wanted if name not in columns]
    raise PolicyError(
        f"the samples have no array for input {', '.join(map(repr, missing))}; they have {_some(list(columns))}",
        fix=f"name the arrays (or columns) like the model's inputs: {', '.join(wanted)}",
        where=spec.source,
    )


def _choose(spec: DataSpec, inputs: list[list[Rows]], table: Table, seed: int) -> _Chosen:
    everything = [rows for group in inputs for rows in group] + ([table.labels] if table.labels else [])
    if any(not rows.shape for rows in everything):
        raise PolicyError("an array of the samples is a single number; axis 0 must be the sample", where=spec.source)
    counts = {rows.shape[0] for rows in everything}
    if len(counts) > 1:
        raise PolicyError(
            f"the arrays of the samples differ in length: {', '.join(map(str, sorted(counts)))}; axis 0 must be the sample",
            where=spec.source,
        )
    count = counts.pop() if counts else 0
    if count == 0:
        raise PolicyError("the samples are empty", where=spec.source)
    indices = np.arange(count)
    if count > spec.max_samples:
        indices = np.sort(np.random.default_rng(seed).permutation(count)[: spec.max_samples])

    def reader(group: list[Rows]) -> Any:
        if len(group) == 1:
            return lambda: group[0].take(indices)
        return lambda: np.stack([rows.take(indices) for rows in group], axis=1)

    return _Chosen(indices, tuple(reader(group) for group in inputs))


def _convert(spec: DataSpec, tensor: TensorSpec, array: Array, notes: list[str]) -> Array:
    """To the input's dtype, without loss. Rounding to a narrower float is the one exception, since files rarely hold
    anything but float64, and it is noted."""
    if array.ndim == 1 and len(tensor.shape) == 2 and tensor.shape[1] in (1, *_symbols(tensor)):
        array = array[:, None]
    if tensor.dtype == "str":
        if array.dtype.kind not in "US":
            raise _misfit(spec, tensor, f"is {array.dtype}, and text is wanted")
        return array.astype(str)
    wanted = _dtype(spec, tensor)
    if array.dtype == wanted:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf":
        raise _misfit(spec, tensor, f"is {array.dtype}, which is no number")
    with np.errstate(all="ignore"):  # what is lost is found by the comparison below
        converted = array.astype(wanted)
        if array.dtype.kind == "f" and wanted.kind == "f":
            kept = np.isfinite(converted) == np.isfinite(array)
            if bool(np.any(kept & (converted.astype(array.dtype) != array) & np.isfinite(array))):
                notes.append(f"input {tensor.name!r} was rounded from {array.dtype} to {wanted}")
        else:
            # Through the wider of both there and back: a value that changed on the way was not representable.
            back = converted.astype(array.dtype)
            kept = (back == array) & (np.less(converted, 0) == np.less(array, 0))
            if wanted.kind == "f":  # infinity, or 2^63, comes back as a whole number that it is not
                kept &= _in_range(converted, array.dtype)
    if not bool(np.all(kept)):
        first = array[~kept].flat[0]
        raise _misfit(spec, tensor, f"is {array.dtype} and holds {first}, which {wanted} can't")
    return np.ascontiguousarray(converted)


def _in_range(floats: Array, whole: np.dtype[Any]) -> NDArray[np.bool_]:
    """Which floats lie between the least and the largest value of a type of whole numbers."""
    least, largest = (0, 1) if whole.kind == "b" else (int(np.iinfo(whole).min), int(np.iinfo(whole).max))
    top = float(largest) if int(float(largest)) == largest else float(np.nextafter(float(largest), 0))
    values = floats.astype(np.float64)
    return np.asarray((values >= least) & (values <= top))


def _dtype(spec: DataSpec, tensor: TensorSpec) -> np.dtype[Any]:
    try:
        return np.dtype(tensor.dtype)
    except TypeError as error:
        raise _misfit(spec, tensor, f"is wanted as {tensor.dtype}, which samples can't have") from error


def _symbols(tensor: TensorSpec) -> tuple[str, ...]:
    return tuple(dim for dim in tensor.shape if isinstance(dim, str))


def _check_shape(
    spec: DataSpec,
    tensor: TensorSpec,
    shape: tuple[int, ...],
    allowed: ShapeRange | None,
    symbols: dict[str, tuple[str, int]],
) -> None:
    def text(sizes: Sequence[object]) -> str:
        return f"[{', '.join(['batch', *map(str, sizes)])}]"

    wanted = tensor.shape[1:]
    fixed_fit = len(shape) == len(tensor.shape) and all(
        isinstance(want, str) or want == size for want, size in zip(wanted, shape[1:], strict=True)
    )
    if not fixed_fit:
        raise _misfit(spec, tensor, f"has the shape {text(shape[1:])}, and {text(wanted)} is wanted")
    for want, size in zip(wanted, shape[1:], strict=True):
        if isinstance(want, str):
            other, bound = symbols.setdefault(want, (tensor.name, size))
            if bound != size:
                raise _misfit(spec, tensor, f"has {size} for {want!r}, and input {other!r} has {bound}")
    if allowed is not None:
        for low, size, high in zip(allowed.min[1:], shape[1:], allowed.max[1:], strict=False):
            if not low <= size <= high:
                raise _misfit(
                    spec,
                    tensor,
                    f"has the shape {text(shape[1:])}, outside the policy's {text(allowed.min[1:])} to {text(allowed.max[1:])}",
                )


def _misfit(spec: DataSpec, tensor: TensorSpec, what: str) -> PolicyError:
    return PolicyError(
        f"the samples for input {tensor.name!r} don't fit the model: the array {what}",
        fix=f"give an array that fits `{tensor}`",
        where=spec.source,
    )


def _save_labels(spec: DataSpec, rows: Rows, indices: NDArray[np.int64], into: Path) -> None:
    labels = rows.take(indices)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and (missing := int(np.count_nonzero(np.isnan(labels)))):
        raise PolicyError(f"{missing} of the {len(labels)} labels are missing (NaN)", where=spec.source)
    if labels.dtype.kind not in "biufUS":
        raise PolicyError(f"labels are numbers or text, not {labels.dtype}", where=spec.source)
    np.save(into / LABELS, labels, allow_pickle=False)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return (f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown) or "nothing"


def tensor_files(names: Sequence[str]) -> dict[str, str]:
    """Tensor name → file name: readable, safe on any file system, and different even where case does not count."""
    files: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem = quote(name, safe="")
        if len(stem) > 120 or stem.lower() in taken:
            stem = f"{stem[:100]}~{sha256(name.encode()).hexdigest()[:12]}"
        taken.add(stem.lower())
        files[name] = f"{stem}.npy"
    return files


# ------------------------------------------------------------------------------------------------------------------ open


@dataclass(frozen=True)
class Samples:
    """Samples, memory-mapped.

    Attributes:
        inputs: Input name → array, axis 0 being the sample, in the model's order.
        labels: `[count]` or `[count, k]`; None when there are none.
    """

    count: int
    inputs: Mapping[str, Array]
    labels: Array | None

    def batch(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop - 1`, in memory."""
        return {name: np.ascontiguousarray(array[start:stop]) for name, array in self.inputs.items()}

    def batches(self, size: int) -> Iterator[Batch]:
        """All samples in batches; the last may be smaller."""
        for start in range(0, self.count, size):
            yield self.batch(start, min(start + size, self.count))


def open_samples(sample_set: SampleSet) -> Samples:
    """The samples behind a record. Raises IntegrityError when the folder is not what the record says."""
    files, labels_file = read_index(sample_set)
    try:
        inputs = {name: np.load(file, mmap_mode="r", allow_pickle=False) for name, file in files.items()}
        labels = np.load(labels_file, mmap_mode="r", allow_pickle=False) if labels_file else None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=sample_set.path) from error
    arrays = [*inputs.values(), *([labels] if labels is not None else [])]
    if any(len(array) != sample_set.count for array in arrays):
        raise IntegrityError(
            f"the folder does not hold the {sample_set.count} samples of its record", where=sample_set.path
        )
    return Samples(sample_set.count, inputs, labels)


def overlap(a: SampleSet, b: SampleSet) -> int:
    """How many different samples are in both sets: a model that is judged on what it was calibrated on flatters
    itself."""
    return len(_fingerprints(open_samples(a)) & _fingerprints(open_samples(b)))


def _fingerprints(samples: Samples) -> set[bytes]:
    digests = set()
    for batch in samples.batches(1):
        digest = sha256()
        for name in sorted(batch):
            array = batch[name]
            # Text is as wide as the set's longest; without the padding, equal text has equal bytes.
            digest.update(repr(array.tolist()).encode() if array.dtype.kind == "U" else array.tobytes())
        digests.add(digest.digest())
    return digests
