"""Calls and samples beyond the validation set: asked of the original once, and of each artifact that may still pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core.errors import CompileStageError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Worker
from compile_stage.core.records import Check, Data, Gate, Job, Outcome, SampleSet, SourceModel, Target, record
from compile_stage.measure import missing as missing_numbers
from compile_stage.measure import robustness, taken_values
from compile_stage.measure.answered_samples import AnsweredSamples, ask
from compile_stage.measure.behaviour import calls_to_compare, judge_calls, parts_of
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.predict import open_outputs, try_predict
from compile_stage.measure.samples import open_samples
from compile_stage.measure.structure import BEHAVIOUR
from compile_stage.measure.tolerance import elementwise_gates, worst


@record
class OtherSamples:
    """One kind of `measure.robustness`.

    Attributes:
        rows: Those that have a finite answer.
        steady: Only the whole output is judged: the answers lie out of the calibrated ranges, or hardly differ.
    """

    kind: str
    answered: AnsweredSamples
    rows: tuple[int, ...]
    steady: bool


@record
class ExtraCalls:
    """What was asked of the original beyond the validation samples, and its answers.

    Attributes:
        calls: `{"check", "rows"}` each (`measure.behaviour`).
        answers: What `measure.behaviour.make_calls` says of the original.
        kinds: Samples beyond those of the validation set.
        missing: Where it takes missing numbers.
        taken: Which whole numbers and categories it takes.
        mixed: Why an answer of its graph is not shown to depend on its own row alone (`measure.graph_rows`); empty
            where it is, or where no graph was read.
    """

    calls: tuple[Mapping[str, Any], ...]
    answers: Mapping[str, Any]
    kinds: tuple[OtherSamples, ...]
    missing: missing_numbers.MissingAnswers
    taken: taken_values.TakenAnswers
    mixed: str = ""

    def below(self, root: Path) -> ExtraCalls:
        """With paths relative to `root`."""
        return self._moved(lambda path: Path(path).relative_to(root).as_posix())

    def above(self, root: Path) -> ExtraCalls:
        """With paths that were relative to `root`."""
        return self._moved(lambda path: str(root / path))

    def _moved(self, move: Any) -> ExtraCalls:
        def files(outputs: Mapping[str, str]) -> dict[str, str]:
            return {name: move(path) for name, path in outputs.items()}

        answers = [outputs and files(outputs) for outputs in self.answers["answers"]]
        return replace(self._with(lambda answered: answered.moved(move)), answers={**self.answers, "answers": answers})

    def rounded(self, like: SampleSet) -> ExtraCalls:
        """With samples in the types of `like`, which artifacts take, where the original was asked in wider ones."""
        found = self._with(lambda answered: answered.rounded(like))
        return replace(found, taken=taken_values.with_rounded_rules(found.taken, like))

    def _with(self, change: Callable[[AnsweredSamples], AnsweredSamples]) -> ExtraCalls:
        """With all samples changed so."""

        def changed(answered: AnsweredSamples | None) -> AnsweredSamples | None:
            return change(answered) if answered is not None else None

        return replace(
            self,
            kinds=tuple(replace(kind, answered=change(kind.answered)) for kind in self.kinds),
            missing=replace(self.missing, answered=changed(self.missing.answered)),
            taken=self.taken.changed(change),
        )


def ask_original(
    worker: Worker,
    source: SourceModel,
    samples: SampleSet,
    data: Data,
    target: Target,
    outputs: Mapping[str, str],
    into: Path,
) -> ExtraCalls:
    """Make the calls with the original, which the worker has open, and have it answer other samples.

    Args:
        target: What it is open for.
        outputs: Output name → `.npy` file: what it answers to the validation samples.
        into: A folder for all files.
    """
    batch_sizes = list(target.batch_sizes)
    calls = calls_to_compare(samples.count, batch_sizes, data.seed)
    answers = worker.call("make_calls", samples=samples, calls=calls, into=str(into / "calls"))
    kinds = _other_samples(worker, samples, data, batch_sizes, outputs, into)
    of_missing = missing_numbers.ask_original(worker, samples, min(batch_sizes), into)
    taken = taken_values.TakenAnswers(rules=None, notes=(f"not asked: the original runs on {target.device}",))
    if target.device == "cpu":
        taken = taken_values.ask_original(worker, source, samples, min(batch_sizes), into)
    return ExtraCalls(calls=tuple(calls), answers=answers, kinds=tuple(kinds), missing=of_missing, taken=taken)


def _other_samples(
    worker: Worker, samples: SampleSet, data: Data, batch_sizes: Sequence[int], outputs: Mapping[str, str], into: Path
) -> Iterator[OtherSamples]:
    """Each kind with the original's answers. A kind that the original refuses, such as values that it was not trained
    for, is left out. They run in the largest batch that they fill by half: the rest of a larger one would be copies."""
    if data.robustness is None:
        return
    reference = open_outputs(outputs)
    count = min(data.robustness.samples, max(10, samples.count // 4))
    for kind, batch in robustness.other_samples(open_samples(samples), count, data.seed).items():
        rows_made = len(next(iter(batch.values())))
        batch_size = max((size for size in batch_sizes if size <= 2 * rows_made), default=min(batch_sizes))
        answered = ask(
            worker, batch, samples, batch_size, into / "robustness" / kind, into / "robustness-answers" / kind
        )
        if answered is None:
            continue
        answers = open_outputs(answered.outputs)
        rows = tuple(int(row) for row in robustness.answered(answers).nonzero()[0])
        if rows:
            finite = {name: array[list(rows)] for name, array in answers.items()}
            steady = kind in robustness.BEYOND_RANGES or not robustness.moves_as_much(finite, reference)
            yield OtherSamples(kind=kind, answered=answered, rows=rows, steady=steady)


def check_calls(
    worker: Worker, job: Job, gates: Sequence[Gate], extra: ExtraCalls, samples: SampleSet, seed: int
) -> list[Check]:
    """How the artifact, which the worker has open, behaves from call to call, with missing numbers and with values
    that the samples don't have, beside the original."""
    suited = elementwise_gates(gates, has_labels=samples.has_labels, few_rows=True)
    with temporary_folder("calls") as folder:
        parts = parts_of(extra.calls, job.target.batch_sizes)
        answers = worker.call("make_calls", samples=samples, calls=parts, into=folder)
        checks = judge_calls(suited, extra.calls, answers, extra.answers, seed, extra.mixed)
    return [
        *checks,
        missing_numbers.check_missing(worker, suited, extra.missing, seed),
        taken_values.check_taken(worker, suited, extra.taken, seed),
    ]


def check_other_samples(
    worker: Worker, job: Job, gates: Sequence[Gate], extra: ExtraCalls, samples: SampleSet, data: Data
) -> Iterator[Check]:
    """One check for each kind."""
    if data.robustness is None:
        return
    for other in extra.kinds:
        rows, theirs = list(other.rows), other.answered
        with temporary_folder("robustness") as folder:
            written = try_predict(worker, theirs.samples, theirs.batch_size, folder)
            if isinstance(written, CompileStageError):
                yield robustness.refused_kind(other.kind, data.robustness.factor, len(rows), written.problem)
                continue
            own, original = (
                {name: array[rows] for name, array in open_outputs(files).items()}
                for files in (written, theirs.outputs)
            )
            suited = elementwise_gates(gates, has_labels=samples.has_labels, few_rows=other.steady)
            judged = [
                check_outputs(wanted, own, original, SINGLE_CALL, batch_size=theirs.batch_size, seed=data.seed)
                for wanted in (suited, robustness.usual_gates(suited, other.kind, job.scheme.precision))
                if wanted
            ]
        if not judged:  # of its gates, none held on the validation samples: it has failed
            continue
        checks = min(judged, key=lambda checks: worst(checks)[0])
        yield robustness.judge_kind(other.kind, checks, data.robustness.factor, len(rows))


def not_looked_at(because: str, data: Data) -> Iterator[Check]:
    """In place of both, where they can't make the verdict a pass."""
    kinds = [(BEHAVIOUR[0], "calls in another order and in other batch sizes")]
    kinds += [(robustness.ROBUSTNESS, "samples beyond the validation set")] if data.robustness is not None else []
    for metric, what in kinds:
        gate = Gate(metric=metric, limit=0.0, direction="at_most")
        reason = f"{what} were not looked at: {because}"
        yield Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=reason)
