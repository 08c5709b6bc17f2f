"""Real samples on disk: chosen once, by seed, in the model's own tensor names and dtypes, then only memory-mapped.

How they lie in their folder is said in `core.sample_files`; a name's characters that a file name can't hold are
percent-encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.digest import canonical_json
from compile_stage.core.errors import IntegrityError, PolicyError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import DataSpec, SampleSet
from compile_stage.core.sample_files import GIVEN, GROUPS, LABELS, RAW, digest_of_samples, read_index, write_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.fitting import check_shape, convert
from compile_stage.measure.readers import Fills, Rows, SampleRequest, Table, read
from compile_stage.measure.windows import Windows, cut, demand_known, with_new_tokens_as_labels

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch


# -------------------------------------------------------------------------------------------------------------- prepare


@dataclass(frozen=True)
class FromModel:
    """What only the model itself knows of samples.

    Attributes:
        example: The input example that was logged with it, for the source `input_example`.
        network_inputs: Of a model whose samples are those of its predict(): columns → the network's inputs. The columns
            are kept (`core.sample_files.RAW`).
        reader: Of a source that reads text, so that samples may be texts.
        columns: The data frame's columns that make up a single input, in order; None where the model names none.
        windows: Of a language model: texts, and a number of tokens → of each text its windows of so many.
        fills: What its predict() fills missing texts in with (`core.ports.Exporter.prediction_format`).
    """

    example: Batch | None = None
    network_inputs: Callable[[Mapping[str, Array]], Batch] | None = None
    reader: TextReader | None = None
    columns: Callable[[], Sequence[str] | None] | None = None
    windows: Windows | None = None
    fills: Fills = dict


def prepare(request: SampleRequest, into: Path, model: FromModel) -> SampleSet:
    """Write the samples that a policy names into the folder `into`.

    Raises:
        PolicyError: the data can't be read, is empty, or does not fit the model; the message says which input and why.
        SourceError: the model has no input example.
    """
    spec, signature, seed = request.spec, request.signature, request.seed
    table = read(request, model.example, model.fills if request.fills is None else lambda: request.fills or {})
    if model.network_inputs is not None and table.real:
        table = _through_predict(spec, table, seed, model.network_inputs, into)
    if model.reader is not None:
        table = _read_texts(spec, table, signature, seed, model.reader)
    if model.windows is not None and table.real:
        table = _read_windows(request, table, model.windows)
    notes = list(table.notes)
    named = model.columns if request.columns is None else lambda: request.columns
    chosen = _choose(spec, _inputs(spec, table, signature, notes, named), table, seed)
    files = {name: f"inputs/{file}" for name, file in tensor_files([t.name for t in signature.inputs]).items()}
    (into / "inputs").mkdir(parents=True, exist_ok=True)
    symbols: dict[str, tuple[str, int]] = {}
    given = into / GIVEN if request.keep_given and table.real else None
    rounded = False
    for tensor, rows in zip(signature.inputs, chosen.inputs, strict=True):
        as_read = rows()
        if request.keep_given:
            as_read = _without_whole(as_read, tensor)
        array = convert(spec, tensor, as_read, notes)
        if given is not None:
            kept = _as_given(as_read, array)
            rounded |= kept is not array
            (given / "inputs").mkdir(parents=True, exist_ok=True)
            np.save(given / files[tensor.name], kept, allow_pickle=False)
            del kept
        del as_read  # no more than one input is held twice
        check_shape(spec, tensor, array.shape, request.shapes.get(tensor.name), symbols)
        if model.windows is not None:
            demand_known(request, array)
        if array.dtype.kind == "f" and (strange := int(np.count_nonzero(~np.isfinite(array)))):
            notes.append(f"input {tensor.name!r} has {strange} values that are NaN or infinite")
        np.save(into / files[tensor.name], array, allow_pickle=False)
    if given is not None and rounded:
        write_index(given, files, labels=False, count=len(chosen.indices))
    elif given is not None:
        rmtree(given)
    if table.labels is not None:
        _save_labels(spec, table.labels, chosen.indices, into)
    groups = _save_groups(spec, table.groups, chosen.indices, into) if table.groups is not None else 0
    write_index(into, files, labels=table.labels is not None, count=len(chosen.indices))
    written = SampleSet(
        path=str(into),
        digest="",
        count=len(chosen.indices),
        real=table.real,
        source=spec.source,
        has_labels=table.labels is not None,
        notes=tuple(notes),
        groups=groups,
    )
    return replace(written, digest=digest_of_samples(written))


def _without_whole(rows: Array, tensor: TensorSpec) -> Array:
    """Whole numbers as float64, which computes them as the original does, for an input of floats; as they are where
    float64 has not all of them, and `convert` refuses what the network can't take."""
    if rows.dtype.kind not in "iu" or not tensor.dtype.startswith("float"):
        return rows
    limit = 2**53
    if rows.size and not (-limit <= int(rows.min()) and int(rows.max()) <= limit):
        return rows
    return rows.astype(np.float64)


def _as_given(rows: Array, converted: Array) -> Array:
    """The rows in the type that the samples have, where the conversion rounded them; else what it made of them."""
    if rows.dtype.kind != "f" or converted.dtype.kind != "f":
        return converted
    rows = rows.reshape(converted.shape)
    return converted if np.array_equal(rows, converted, equal_nan=True) else rows


def _through_predict(
    spec: DataSpec, table: Table, seed: int, network_inputs: Callable[[Mapping[str, Array]], Batch], into: Path
) -> Table:
    """The chosen rows, with the network's inputs in place of predict()'s, which are written beside them."""
    names = list(table.columns)
    chosen = _choose(spec, [[table.columns[name]] for name in names], table, seed)
    columns = {name: take() for name, take in zip(names, chosen.inputs, strict=True)}
    files = tensor_files(names)
    (into / RAW).mkdir(parents=True, exist_ok=True)
    for name, array in columns.items():
        np.save(into / RAW / files[name], array, allow_pickle=False)
    (into / RAW / "columns.json").write_text(canonical_json(files), encoding="utf-8")
    labels, groups = (
        None if rows is None else Rows.of(rows.take(chosen.indices)) for rows in (table.labels, table.groups)
    )
    return replace(
        table,
        columns={name: Rows.of(np.asarray(array)) for name, array in network_inputs(columns).items()},
        labels=labels,
        groups=groups,
        notes=(*table.notes, f"the network's inputs are those that predict() made of {_some(names)}"),
    )


def open_raw(folder: Path) -> dict[str, Array]:
    """The columns that predict() was given. Raises IntegrityError when they can't be read."""
    try:
        files = read_json_object(folder / "columns.json")
        return {str(name): np.load(folder / Path(str(file)).name, allow_pickle=False) for name, file in files.items()}
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=str(folder)) from error


@dataclass(frozen=True)
class TextReader:
    """How samples that are texts, pictures or recordings become those of a network.

    Attributes:
        tokenize: Texts, or pairs of them, or arrays → the network's inputs, a row each; None for a model that reads
            tensors only.
        class_names: The classes' names in the order of its scores; empty where it has none.
    """

    tokenize: Callable[[Sequence[Any]], Batch | None]
    class_names: Callable[[], Sequence[str]]


def _read_windows(request: SampleRequest, table: Table, windows: Windows) -> Table:
    """Windows of tokens in place of texts, and the tokens that the model has to find as labels; those that the table
    has itself stay. Raises PolicyError where no text is long enough."""
    spec, name = request.spec, request.signature.inputs[0].name
    if name not in table.columns and (used := _used_columns(table)):
        chosen = _choose(spec, [[table.columns[used[0]]]], replace(table, labels=None), request.seed)
        groups = table.groups.take(chosen.indices) if table.groups is not None else None
        table = cut(request, [str(text) for text in chosen.inputs[0]()], groups, windows)
    return with_new_tokens_as_labels(request, table)


def _read_texts(spec: DataSpec, table: Table, signature: Signature, seed: int, reader: TextReader) -> Table:
    """The table with the network's inputs in place of its column `text` (and `text_pair`), `image` or `audio`, or of
    its only column of texts; labels that are names of classes become their numbers. A table that has the
    network's inputs stays as it is."""
    names = {tensor.name for tensor in signature.inputs}
    used = [] if names <= set(table.columns) else _used_columns(table)
    if not used:
        return table
    chosen = _choose(spec, [[table.columns[name]] for name in used], table, seed)
    columns = [[_plain(item) for item in take()] for take in chosen.inputs]
    tokens = reader.tokenize(columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)))
    if tokens is None:
        return table
    labels = table.labels.take(chosen.indices) if table.labels is not None else None
    return Table(
        {name: Rows.of(array) for name, array in tokens.items()},
        Rows.of(_class_numbers(spec, labels, reader.class_names())) if labels is not None else None,
        Rows.of(table.groups.take(chosen.indices)) if table.groups is not None else None,
        real=table.real,
        notes=(
            *table.notes,
            f"{' and '.join(used)} was prepared by the model's own {_PREPARED_BY.get(used[0], 'tokenizer')}",
        ),
    )


_PREPARED_BY = {"image": "image processor", "audio": "feature extractor"}


def _used_columns(table: Table) -> list[str]:
    texts = {name: rows for name, rows in table.columns.items() if rows.dtype.kind == "U" and len(rows.shape) == 1}
    if found := [name for name in texts if name in ("text", "text_pair")]:
        found.sort()
        return found if found[0] == "text" or len(table.columns) == 1 else []
    if media := [name for name in _PREPARED_BY if name in table.columns]:
        return media[:1]
    return list(texts) if len(table.columns) == 1 else []


def _plain(item: Any) -> Any:
    return str(item) if isinstance(item, str) else item


def _class_numbers(spec: DataSpec, labels: Array, names: Sequence[str]) -> Array:
    if labels.dtype.kind != "U" or not names:
        return labels
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := sorted({str(label) for label in labels} - set(numbers)):
        raise PolicyError(
            f"the labels have {unknown[0]!r}, and the model's classes are {_some(list(names))}",
            fix="name the labels as the model names its classes, or give their numbers",
            where=spec.source,
        )
    return np.array([numbers[str(label)] for label in labels], np.int64)


@dataclass(frozen=True)
class _Chosen:
    indices: NDArray[np.int64]
    inputs: tuple[Any, ...]  # for each input, a function that reads the chosen rows


def _inputs(
    spec: DataSpec,
    table: Table,
    signature: Signature,
    notes: list[str],
    named: Callable[[], Sequence[str] | None] | None,
) -> list[list[Rows]]:
    """For each input of the model the columns that make it up: one of its own name, or all of them for a model with one
    matrix, by the names that the model has for them, else as the file has them."""
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
                f"input {matrix.name!r} takes {width} features, and the samples have {len(columns)} columns beside the "
                f"labels: {_some(list(columns))}{_without_groups(spec, table)}",
                fix="drop the other columns from the file, and name the labels' column as data.*.labels",
                where=spec.source,
            )
        order = (named() if named is not None else None) or ()
        return [[columns[name] for name in (order if sorted(order) == sorted(columns) else columns)]]
    missing = [name for name in wanted if name not in columns]
    raise PolicyError(
        f"the samples have no array for input {', '.join(map(repr, missing))}; they have {_some(list(columns))}"
        f"{_without_groups(spec, table)}",
        fix=f"name the arrays (or columns) like the model's inputs: {', '.join(wanted)}",
        where=spec.source,
    )


def _without_groups(spec: DataSpec, table: Table) -> str:
    """A column too many may be the one that `data.groups` means."""
    return f"; none is called {spec.groups!r} (data.groups)" if spec.groups and table.groups is None else ""


def _choose(spec: DataSpec, inputs: list[list[Rows]], table: Table, seed: int) -> _Chosen:
    everything = [rows for group in inputs for rows in group]
    everything += [rows for rows in (table.labels, table.groups) if rows is not None]
    if any(not rows.shape for rows in everything):
        raise PolicyError("an array of the samples is a single number; axis 0 must be the sample", where=spec.source)
    counts = {rows.shape[0] for rows in everything}
    if len(counts) > 1:
        special = ((table.labels, f"the labels {spec.labels!r}"), (table.groups, f"the groups {spec.groups!r}"))
        named = [f"{name} have {rows.shape[0]}" for rows, name in special if rows is not None]
        of_inputs = sorted({rows.shape[0] for group in inputs for rows in group})
        each = ", ".join([f"the inputs have {' and '.join(map(str, of_inputs))} rows", *named])
        raise PolicyError(
            f"the arrays of the samples differ in length: {each}; axis 0 must be the sample",
            where=spec.source,
        )
    count = counts.pop() if counts else 0
    if count == 0:
        raise PolicyError("the samples are empty", where=spec.source)
    indices = np.arange(count)
    if count > spec.max_samples:
        indices = _some_rows(spec, table, count, seed)

    def reader(group: list[Rows]) -> Any:
        if len(group) == 1:
            return lambda: group[0].take(indices)
        return lambda: np.stack([rows.take(indices) for rows in group], axis=1)

    return _Chosen(indices, tuple(reader(group) for group in inputs))


def _some_rows(spec: DataSpec, table: Table, count: int, seed: int) -> NDArray[np.int64]:
    """At most `max_samples` of the `count` rows, in order; of a ranking whole queries."""
    random = np.random.default_rng(seed)
    if not spec.whole_groups or table.groups is None:
        return np.sort(random.permutation(count)[: spec.max_samples])
    _, number = np.unique(table.groups.take(np.arange(count)), return_inverse=True)
    sizes = np.bincount(number)
    order = random.permutation(len(sizes))
    taken = order[np.cumsum(sizes[order]) <= spec.max_samples]
    if not len(taken):
        raise PolicyError(
            f"the first query that is chosen has {sizes[order[0]]} samples, more than max_samples ({spec.max_samples})",
            fix="raise data.*.max_samples",
            where=spec.source,
        )
    return np.flatnonzero(np.isin(number, taken))


def _save_labels(spec: DataSpec, rows: Rows, indices: NDArray[np.int64], into: Path) -> None:
    labels = rows.take(indices)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    for test, are in ((np.isnan, "missing (NaN)"), (np.isinf, "infinite")):
        if labels.dtype.kind == "f" and (count := int(np.count_nonzero(test(labels)))):
            raise PolicyError(
                f"{count} of the {len(labels)} labels are {are}", fix="leave these samples out", where=spec.source
            )
    if labels.dtype.kind not in "biufUS":
        raise PolicyError(f"labels are numbers or text, not {labels.dtype}", where=spec.source)
    np.save(into / LABELS, labels, allow_pickle=False)


def _save_groups(spec: DataSpec, rows: Rows, indices: NDArray[np.int64], into: Path) -> int:
    """Each sample's group as a number from 0; returns how many groups there are."""
    groups = rows.take(indices)
    if groups.ndim == 2 and groups.shape[1] == 1:
        groups = groups[:, 0]
    if groups.ndim != 1 or groups.dtype.kind not in "biufUSM":
        raise PolicyError(
            f"groups are one number or text for each sample, and {spec.groups!r} is {groups.dtype}{list(groups.shape)}",
            fix="correct data.groups in the policy",
            where=spec.source,
        )
    unknown = np.isnat(groups) if groups.dtype.kind == "M" else groups != groups  # a NaN is not equal to itself
    if missing := int(np.count_nonzero(unknown)):
        raise PolicyError(
            f"{missing} of the {len(groups)} samples have no group: {spec.groups!r} is "
            f"{'NaT' if groups.dtype.kind == 'M' else 'NaN'} there",
            fix="give each of them its group, or one of its own, or leave them out of the file",
            where=spec.source,
        )
    names, numbers = np.unique(groups, return_inverse=True)
    np.save(into / GROUPS, numbers.astype(np.int64), allow_pickle=False)
    return len(names)


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


# ----------------------------------------------------------------------------------------------------------------- open


@dataclass(frozen=True)
class Samples:
    """Samples, memory-mapped.

    Attributes:
        inputs: Input name → array, axis 0 being the sample, in the model's order.
        labels: `[count]` or `[count, k]`; None when there are none.
        groups: `[count]`, the number of each sample's group; None where each is independent.
    """

    count: int
    inputs: Mapping[str, Array]
    labels: Array | None
    groups: Array | None = None

    def batch(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop - 1`, in memory."""
        return {name: np.ascontiguousarray(array[start:stop]) for name, array in self.inputs.items()}

    def some(self, indices: Sequence[int]) -> Batch:
        """The samples of these indices, in their order, in memory."""
        return {name: np.ascontiguousarray(array[list(indices)]) for name, array in self.inputs.items()}

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
        groups = np.load(Path(sample_set.path) / GROUPS, allow_pickle=False) if sample_set.groups else None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=sample_set.path) from error
    arrays = [*inputs.values(), *(array for array in (labels, groups) if array is not None)]
    if any(len(array) != sample_set.count for array in arrays):
        raise IntegrityError(
            f"the folder does not hold the {sample_set.count} samples of its record", where=sample_set.path
        )
    return Samples(sample_set.count, inputs, labels, groups)


def overlap(a: SampleSet, b: SampleSet) -> int:
    """How many different samples are in both sets: a model that is judged on what it was calibrated on flatters
    itself."""
    return len(set(_fingerprints(open_samples(a))) & set(_fingerprints(open_samples(b))))


def _fingerprints(samples: Samples) -> list[bytes]:
    digests = []
    for batch in samples.batches(1):
        digest = sha256()
        for name in sorted(batch):
            array = batch[name]
            digest.update(plain_bytes(array))
        digests.append(digest.digest())
    return digests


def plain_bytes(array: Array) -> bytes:
    """Equal for equal values of one type. Text is as wide as the set's longest; here it is without that padding."""
    return repr(array.tolist()).encode() if array.dtype.kind == "U" else array.tobytes()
