"""Missing numbers (NaN): where the original takes them, and whether an artifact then answers as it does.

What does not hold is no failure of an artifact: the published model refuses a NaN there (`serving.missing_numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import CompileStageError, first_line
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Session, Worker
from compile_stage.core.records import Check, Gate, Outcome, SampleSet, record
from compile_stage.core.tensors import CACHE_INPUTS, TensorSpec
from compile_stage.measure.answered_samples import AnsweredSamples, are_apart, ask
from compile_stage.measure.predict import open_outputs, try_predict
from compile_stage.measure.samples import open_samples
from compile_stage.serving.missing_numbers import MISSING

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch
    from compile_stage.measure.samples import Samples

_MOST_COLUMNS = 256
"""A wider matrix is looked at as a whole."""

_ROWS = 4
"""So many rows of each place. A call of a large network takes a second, and each candidate answers them."""

_ROWS_OF_A_COLUMN, _ALL_ROWS = 32, 512
"""More of each column of a matrix, and of all together: which way a tree sends a NaN shows in those rows alone that get
to the split. Of 227 columns of classifiers that answered a NaN otherwise, 4 rows missed 31."""

UNLIKE = "the compiled model answers it otherwise than the original"


@record
class Place:
    """Where a NaN may stand.

    Attributes:
        columns: Of a matrix; None for the whole input.
        rows: First and end, of the samples that have one there.
    """

    input: str
    columns: tuple[int, ...] | None
    rows: tuple[int, int]


@record
class MissingAnswers:
    """What the original says of missing numbers.

    Attributes:
        refused: Where it refuses them, as the manifest lists it.
        places: Where it takes them.
        answered: Samples with a NaN at each place, and at last at all of them; None where there is no place, or its
            answers can't be compared.
    """

    refused: tuple[Mapping[str, Any], ...] = ()
    places: tuple[Place, ...] = ()
    answered: AnsweredSamples | None = None


# -------------------------------------------------------------------------------------------------- in the worker


def find_refused(session: Session, samples: Samples, batch_size: int) -> list[dict[str, Any]]:
    """Call the open model with NaN in each input of floats, and column by column where it refuses a matrix.

    Returns:
        `{"input", "width", "refused"}` for each such input: its number of columns, None where it is no narrow matrix;
        and `{"columns", "reason"}` of what is refused, `columns` None for all of it.
    """
    rows = np.arange(batch_size) % samples.count
    batch = {name: np.ascontiguousarray(array[rows]) for name, array in samples.inputs.items()}
    found = []
    for spec in session.signature.inputs:
        if not spec.dtype.startswith("float") or spec.name not in batch or spec.name.startswith(CACHE_INPUTS):
            continue
        width = _width(spec)
        columns = None if width is None else list(range(width))
        found.append({"input": spec.name, "width": width, "refused": _refused(session, batch, spec.name, columns)})
    return found


def refusal_of(session: Session, batch: Batch) -> str:
    """Why the original does not take this batch; empty where it does."""
    try:
        session.run(batch)
    except Exception as error:  # noqa: BLE001 - whatever the original's framework says
        return f"the original refuses it ({type(error).__name__}: {first_line(error)[:200]})"
    return ""


def _refused(session: Session, batch: Batch, name: str, columns: list[int] | None) -> list[dict[str, Any]]:
    """By halves: mostly all columns are taken, or all are refused by one reason."""
    given = {**batch, name: batch[name].copy()}
    _put_nan(given[name], columns)
    if not (reason := refusal_of(session, given)):
        return []
    refusal = {"columns": columns, "reason": reason}
    if columns is None or len(columns) == 1:
        return [refusal]
    half = len(columns) // 2
    both = [*_refused(session, batch, name, columns[:half]), *_refused(session, batch, name, columns[half:])]
    if not both:  # one alone is taken, several at once are not
        return [refusal]
    first = both[0]
    if all(one["reason"] == first["reason"] for one in both):
        return [{**first, "columns": sorted(column for one in both for column in one["columns"])}]
    return both


def _width(spec: TensorSpec) -> int | None:
    columns = spec.shape[1] if len(spec.shape) == 2 else None
    return columns if isinstance(columns, int) and columns <= _MOST_COLUMNS else None


def _put_nan(rows: Array, columns: Sequence[int] | None) -> None:
    """In these columns; otherwise one in the middle of each row."""
    flat = rows.reshape(len(rows), -1)
    flat[:, list(columns) if columns is not None else flat.shape[1] // 2] = np.nan


# ------------------------------------------------------------------------------------------------- in the parent


def ask_original(worker: Worker, samples: SampleSet, batch_size: int, into: Path) -> MissingAnswers:
    """What the original, which the worker has open, says of missing numbers.

    Args:
        into: A folder for its answers, and for the samples that they answer.
    """
    found = worker.call("find_refused_missing", samples=samples, batch_size=batch_size)
    refused = tuple({"input": one["input"], **entry} for one in found for entry in one["refused"])
    places = _places(found)
    if not places:
        return MissingAnswers(refused=refused)
    made = _samples(open_samples(samples), places)
    answered = ask(worker, made, samples, batch_size, into / "missing", into / "missing-answers")
    return MissingAnswers(refused=refused, places=places, answered=answered)


def check_missing(worker: Worker, gates: Sequence[Gate], asked: MissingAnswers, seed: int) -> Check:
    """Whether the artifact, which the worker has open, answers as the original where that takes a NaN. It never fails:
    its gate says where the published model refuses one.

    Args:
        gates: Those that few rows without labels can be judged by.
    """
    unlike = _unlike(worker, gates, asked, seed)
    refused = [*(dict(entry) for entry in asked.refused), *unlike]
    taken = [place for place in asked.places if not any(one["input"] == place.input for one in refused)]
    said = [f"NaN in {_words(one)} is refused: {one['reason']}" for one in refused]
    if taken:
        names = dict.fromkeys(place.input for place in taken)
        said.append(f"NaN in {', '.join(map(repr, names))} is answered as by the original")
    gate = Gate(metric=MISSING, limit=0.0, direction="at_most", options={"refused": refused})
    reason = "; ".join(said) or "no input can hold a NaN"
    return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason=reason)


def _unlike(worker: Worker, gates: Sequence[Gate], asked: MissingAnswers, seed: int) -> list[dict[str, Any]]:
    """The places where it does not, as the manifest lists them."""
    if not asked.places:
        return []
    if (theirs := asked.answered) is None:
        return _merged([(place, "the original's answer can't be compared") for place in asked.places])
    with temporary_folder("missing") as folder:
        written = try_predict(worker, theirs.samples, theirs.batch_size, folder)
        if isinstance(written, CompileStageError):
            refusal = f"the compiled model does not take it ({written.problem})"
            return _merged([(place, refusal) for place in asked.places])
        own, original = open_outputs(written), open_outputs(theirs.outputs)

        def apart(rows: slice) -> bool:
            return are_apart(gates, own, original, rows, theirs.batch_size, seed)

        together = slice(max(place.rows[1] for place in asked.places), theirs.samples.count)
        if len(asked.places) > 1 and apart(together):
            return _merged([(place, UNLIKE) for place in asked.places])
        return _merged([(place, UNLIKE) for place in asked.places if apart(slice(*place.rows))])


def _places(found: Sequence[Mapping[str, Any]]) -> tuple[Place, ...]:
    taken: list[tuple[str, tuple[int, ...] | None]] = []
    for one in found:
        if one["width"] is None:
            taken += [] if one["refused"] else [(one["input"], None)]
            continue
        refused = {column for entry in one["refused"] for column in entry["columns"]}
        taken += [(one["input"], (column,)) for column in range(one["width"]) if column not in refused]
    each = _ROWS
    if all(columns is not None for _, columns in taken):
        each = max(_ROWS, min(_ROWS_OF_A_COLUMN, _ALL_ROWS // max(1, len(taken))))
    return tuple(
        Place(input=name, columns=columns, rows=(number * each, (number + 1) * each))
        for number, (name, columns) in enumerate(taken)
    )


def _samples(samples: Samples, places: Sequence[Place]) -> dict[str, Array]:
    """Real samples with a NaN at each place, and, where there are several, as many rows with all of them."""
    each = places[0].rows[1]
    count = each * (len(places) + (len(places) > 1))
    rows = np.arange(count) % samples.count
    batch = {name: np.ascontiguousarray(array[rows]) for name, array in samples.inputs.items()}
    for place in places:
        _put_nan(batch[place.input][slice(*place.rows)], place.columns)
        if len(places) > 1:
            _put_nan(batch[place.input][each * len(places) :], place.columns)
    return batch


def _merged(unlike: Sequence[tuple[Place, str]]) -> list[dict[str, Any]]:
    """One entry for each input and reason."""
    entries: dict[tuple[str, str], list[int] | None] = {}
    for place, reason in unlike:
        known = entries.setdefault((place.input, reason), None if place.columns is None else [])
        if known is not None and place.columns is not None:
            known.extend(place.columns)
    return [{"input": name, "columns": columns, "reason": reason} for (name, reason), columns in entries.items()]


def _words(entry: Mapping[str, Any]) -> str:
    columns = entry["columns"]
    if columns is None:
        return repr(entry["input"])
    shown = ", ".join(map(str, columns[:5])) + (f" and {len(columns) - 5} more" if len(columns) > 5 else "")
    return f"column{'s' if len(columns) != 1 else ''} {shown} of {entry['input']!r}"
