"""Whole numbers and categories: which the original takes, and whether an artifact then answers as it does.

What does not hold is no failure of an artifact: the published model refuses these values (`serving.taken_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

_RULE = ("input", "columns", "least", "most")  # what a rule consists of, beside its reason

_ROWS = 4
"""So many rows of each number that artifacts are asked for."""


@record
class Question:
    """Numbers that the original takes, and the samples don't have: does an artifact answer them as it does?

    Attributes:
        rule: What the published model takes where it does not, as the manifest lists it.
        of: The number of the rule whose place it takes then; None where it is one more.
        answered: Real samples with such numbers; None where the original's answers can't be compared.
    """

    rule: Mapping[str, Any]
    of: int | None
    answered: AnsweredSamples | None


@record
class TakenAnswers:
    """What the original says.

    Attributes:
        rules: As the manifest lists them; None where it was not asked.
        notes: What could not be found out.
        questions: About negative numbers, which some originals count from the end of their table, and about numbers
            that take more than 32 bits, which some runtimes don't have.
    """

    rules: tuple[Mapping[str, Any], ...] | None = ()
    notes: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()

    def changed(self, change: Callable[[AnsweredSamples], AnsweredSamples]) -> TakenAnswers:
        """With all samples changed so."""
        questions = [replace(one, answered=one.answered and change(one.answered)) for one in self.questions]
        return replace(self, questions=tuple(questions))


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
    rules, own = tuple(found["rules"]), open_samples(samples)
    made: list[tuple[int | None, dict[str, Any], Sequence[int]]] = [
        (number, {**rule, "least": 0}, (-1, rule["least"]))
        for number, rule in enumerate(rules)
        if (rule.get("least") or 0) < 0 <= int(_at(own.inputs[rule["input"]], rule["columns"]).min())
    ]
    made += [(None, {key: one[key] for key in _RULE}, one["asked"]) for one in found["wide"]]
    questions = []
    for place, (number, rule, values) in enumerate(made):
        batch = _samples_with(own, rule, values, everywhere=number is None)
        folders = into / "taken" / str(place), into / "taken-answers" / str(place)
        answered = ask(worker, batch, samples, batch_size, *folders)
        questions.append(Question(rule=rule, of=number, answered=answered))
    return TakenAnswers(rules=rules, notes=tuple(found["notes"]), questions=tuple(questions))


def _at(array: Array, columns: Sequence[int] | None) -> Array:
    return array if columns is None else array[:, list(columns)]


def _samples_with(
    samples: Samples, rule: Mapping[str, Any], values: Sequence[int], *, everywhere: bool
) -> dict[str, Array]:
    """Real samples with each of these numbers in `_ROWS` of them.

    Args:
        everywhere: In all that the rule speaks of, and not in one element alone.
    """
    rows = np.arange(_ROWS * len(values)) % samples.count
    batch = {name: np.ascontiguousarray(array[rows]) for name, array in samples.inputs.items()}
    own, columns = batch[rule["input"]], rule["columns"]
    all_of_it = list(range(own[0].size)) if columns is None else list(columns)
    one = columns[0] if columns else None
    for number, value in enumerate(values):
        part = slice(_ROWS * number, _ROWS * (number + 1))
        own[part] = with_value(own[part], all_of_it if everywhere else one, value)
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
    """Whether the artifact, which the worker has open, answers as the original does what is asked. It never fails:
    its gate says which values the published model takes.

    Args:
        gates: Those that few rows without labels can be judged by.
    """
    if asked.rules is None:
        gate = Gate(metric=TAKEN, limit=0.0, direction="at_most")
        return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason="; ".join(asked.notes))
    rules = [dict(rule) for rule in asked.rules]
    for question in asked.questions:
        if (reason := _unlike(worker, gates, question, seed)) is None:
            continue
        rule = {**question.rule, "reason": reason}
        if question.of is None:
            rules.append(rule)
        else:
            rules[question.of] = rule
    said = [f"{place_text(rule)} takes {taken_text(rule)}: {rule['reason']}" for rule in rules]
    gate = Gate(metric=TAKEN, limit=0.0, direction="at_most", options={"rules": rules})
    reason = "; ".join([*said, *asked.notes]) or "no whole number and no category is refused"
    return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason=reason)


def _unlike(worker: Worker, gates: Sequence[Gate], question: Question, seed: int) -> str | None:
    """How the artifact answers otherwise than the original; None where it does not."""
    if (theirs := question.answered) is None:
        what = "negative numbers" if question.of is not None else "larger numbers"
        return f"the original's answer to {what} can't be compared"
    with temporary_folder("taken") as folder:
        written = try_predict(worker, theirs.samples, theirs.batch_size, folder)
        if isinstance(written, CompileStageError):
            return f"the compiled model does not take it ({written.problem})"
        own, original = open_outputs(written), open_outputs(theirs.outputs)
        rows = slice(0, theirs.samples.count)
        return UNLIKE if are_apart(gates, own, original, rows, theirs.batch_size, seed) else None
