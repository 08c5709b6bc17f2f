"""Whole numbers and categories: which the original takes, and whether an artifact then answers as it does.

What does not hold is no failure of an artifact: the published model refuses these values (`serving.taken_values`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import CompileStageError, SourceError, WorkerError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Worker
from compile_stage.core.records import Check, Gate, Outcome, SampleSet, SourceModel, record
from compile_stage.measure.answered_samples import AnsweredSamples, are_apart, ask
from compile_stage.measure.missing import UNLIKE
from compile_stage.measure.predict import open_outputs, try_predict
from compile_stage.measure.samples import open_samples
from compile_stage.measure.taken_search import with_value
from compile_stage.serving.taken_values import TAKEN, place_text, taken_text

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array
    from compile_stage.measure.samples import Samples

_ROWS = 4
"""So many rows of each number that artifacts are asked for."""


@record
class TakenAnswers:
    """What the original says.

    Attributes:
        rules: As the manifest lists them; None where it was not asked.
        notes: What could not be found out.
        asked: The numbers of the rules for which the original takes negative numbers, and the samples have none. Some
            originals count these from the end of their table.
        answered: Samples with -1 and with the smallest number, for each of these; None where there is none, or its
            answers can't be compared.
    """

    rules: tuple[Mapping[str, Any], ...] | None = ()
    notes: tuple[str, ...] = ()
    asked: tuple[int, ...] = ()
    answered: AnsweredSamples | None = None


def ask_original(worker: Worker, source: SourceModel, samples: SampleSet, batch_size: int, into: Path) -> TakenAnswers:
    """What the original, which the worker has open on the CPU, takes. (On a GPU a number beyond a table can end the
    process, or is answered with what lies there.)

    Args:
        into: A folder for its answers, and for the samples that they answer.

    Raises:
        SourceError: It ends its process over a value that it does not take.
    """
    try:
        found = worker.call("find_taken_values", source=source, samples=samples, batch_size=batch_size)
    except WorkerError as error:
        if not error.worker_is_gone:
            raise
        raise SourceError(
            f"the original ended its process while it was asked which whole numbers it takes: {error.problem}",
            fix="let it check its inputs: a number beyond its tables must be an error, not a crash",
        ) from error
    rules = tuple(found["rules"])
    answers = TakenAnswers(rules=rules, notes=tuple(found["notes"]))
    own = open_samples(samples)
    negative = tuple(
        number
        for number, rule in enumerate(rules)
        if (rule.get("least") or 0) < 0 <= int(_at(own.inputs[rule["input"]], rule["columns"]).min())
    )
    if not negative:
        return answers
    made = _negative_samples(own, rules, negative)
    answered = ask(worker, made, samples, batch_size, into / "taken", into / "taken-answers")
    return replace(answers, asked=negative, answered=answered)


def _at(array: Array, columns: Sequence[int] | None) -> Array:
    return array if columns is None else array[:, list(columns)]


def _negative_samples(samples: Samples, rules: Sequence[Mapping[str, Any]], asked: Sequence[int]) -> dict[str, Array]:
    """Real samples with -1 in `_ROWS` of them and with the smallest number in as many, for each rule."""
    rows = np.arange(2 * _ROWS * len(asked)) % samples.count
    batch = {name: np.ascontiguousarray(array[rows]) for name, array in samples.inputs.items()}
    for number, index in enumerate(asked):
        rule, first = rules[index], 2 * _ROWS * number
        own = batch[rule["input"]]
        column = rule["columns"][0] if rule["columns"] else None
        for value in (-1, rule["least"]):
            own[first : first + _ROWS] = with_value(own[first : first + _ROWS], column, value)
            first += _ROWS
    return batch


def with_rounded_rules(asked: TakenAnswers, samples: SampleSet) -> TakenAnswers:
    """With categories in the types of `samples`, which the published model takes, where the original was asked in wider
    ones."""
    types = {name: array.dtype for name, array in open_samples(samples).inputs.items()}

    def rounded(rule: Mapping[str, Any]) -> Mapping[str, Any]:
        of = types[rule["input"]]
        if "values" not in rule or of.kind not in "biuf":
            return rule
        return {**rule, "values": [of.type(value).item() for value in rule["values"]]}

    return asked if asked.rules is None else replace(asked, rules=tuple(map(rounded, asked.rules)))


def check_taken(worker: Worker, gates: Sequence[Gate], asked: TakenAnswers, seed: int) -> Check:
    """Whether the artifact, which the worker has open, answers negative numbers as the original does. It never fails:
    its gate says which values the published model takes.

    Args:
        gates: Those that few rows without labels can be judged by.
    """
    if asked.rules is None:
        gate = Gate(metric=TAKEN, limit=0.0, direction="at_most")
        return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason="; ".join(asked.notes))
    unlike = _unlike(worker, gates, asked, seed)
    rules = [
        {**rule, "least": 0, "reason": unlike[number]} if number in unlike else dict(rule)
        for number, rule in enumerate(asked.rules)
    ]
    said = [f"{place_text(rule)} takes {taken_text(rule)}: {rule['reason']}" for rule in rules]
    gate = Gate(metric=TAKEN, limit=0.0, direction="at_most", options={"rules": rules})
    reason = "; ".join([*said, *asked.notes]) or "no whole number and no category is refused"
    return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason=reason)


def _unlike(worker: Worker, gates: Sequence[Gate], asked: TakenAnswers, seed: int) -> dict[int, str]:
    """The rules whose negative numbers it answers otherwise, and how."""
    if not asked.asked:
        return {}
    if (theirs := asked.answered) is None:
        return dict.fromkeys(asked.asked, "the original's answer to negative numbers can't be compared")
    with temporary_folder("taken") as folder:
        written = try_predict(worker, theirs.samples, theirs.batch_size, folder)
        if isinstance(written, CompileStageError):
            return dict.fromkeys(asked.asked, f"the compiled model does not take it ({written.problem})")
        own, original = open_outputs(written), open_outputs(theirs.outputs)
        found = {}
        for number, index in enumerate(asked.asked):
            rows = slice(2 * _ROWS * number, 2 * _ROWS * (number + 1))
            if are_apart(gates, own, original, rows, theirs.batch_size, seed):
                found[index] = UNLIKE
        return found
