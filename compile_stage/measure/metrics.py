"""The gates of a verdict, looked at: candidate outputs against the baseline's.

A check says PASS only when something real was compared and held. What could not be compared is NOT_RUN with the reason,
and never a pass; an output that is lost, renamed, of another shape or newly NaN is a FAIL of its own, whatever the
gates say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.quantities import quantity, told_apart
from compile_stage.core.records import Check, Gate, Outcome, Waiver
from compile_stage.core.sample_sizes import too_few_samples
from compile_stage.measure.classes import CLASS_METRICS, LOOKS_LIKE_SCORES, measure_classes
from compile_stage.measure.columns import COLUMN_METRICS, Columns, columns_along_axes, measure_columns
from compile_stage.measure.detection import read_detections
from compile_stage.measure.elementwise import (
    DISTANCE_METRICS,
    Distances,
    Measured,
    NotMeasurableError,
    agreement,
    allclose,
    distances,
)
from compile_stage.measure.gates import FLOAT_METRICS, change_text, deciding, fitting, holds, in_force, suits
from compile_stage.measure.own_metric import measure_own
from compile_stage.measure.recall import measure_recall
from compile_stage.measure.resemblance import RESEMBLES, measure_resemblance
from compile_stage.measure.similarity import SIMILARITY_METRICS, measure_similarity
from compile_stage.measure.structure import (
    STRUCTURE,
    listed,
    outputs_problem,
    samples_problem,
    shape_problem,
    values_are,
)
from compile_stage.measure.task_intervals import Amount, TaskResult, mean_interval, of_too_few
from compile_stage.measure.tasks import HIGHER_IS_BETTER, measure_task, scored_output
from compile_stage.measure.tokens import (
    IGNORED,
    TEXT_METRICS,
    TOKEN_METRICS,
    Tokens,
    compare_tokens,
    is_text,
    measure_text,
    measure_tokens,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_ROUNDING = 1e-12
"""What float64 may do to a mean, or to the difference of two: 0.96 - 0.95 is more than 0.01 there, and a drop of
exactly its limit is allowed."""


@dataclass(frozen=True, kw_only=True)
class ComparedSamples:
    """What is known of the samples whose outputs are compared.

    Attributes:
        min_samples: Fewer real samples than this prove nothing: what would have passed or failed is NOT_RUN.
        real: False for synthetic samples, which prove nothing either.
        labels: True labels, one row for each sample; None when there are none.
        groups: Which samples belong together, one value for each: they count as one for `min_samples`, and are drawn
            together for intervals. None where all are independent.
        distinct: How many of the samples differ and have a finite baseline; None when all do. These are what
            `min_samples` counts.
    """

    min_samples: int
    real: bool
    labels: Array | None = None
    groups: Array | None = None
    distinct: int | None = None


SINGLE_CALL = ComparedSamples(min_samples=1, real=True)
"""Of a call, or some, made beside the validation set: few rows without labels, and each of them counts."""


def check_outputs(
    gates: Sequence[Gate],
    candidate: Mapping[str, Array],
    baseline: Mapping[str, Array],
    samples: ComparedSamples,
    *,
    batch_size: int,
    seed: int,
) -> tuple[Check, ...]:
    """One check for each gate and output that it applies to, and the structural ones of `STRUCTURE`.

    A gate that names an output takes the place, for that output, of a gate of the same metric that names none. Every
    output that no gate looks at gets a NOT_RUN, or the check of `RESEMBLANCE` where that is among the gates.

    Args:
        candidate: Output name → array (memory-mapped ones are read in pieces), axis 0 being the sample.
        baseline: What the original model answered for the same samples, in the same order.
        batch_size: The size that the candidate was run at, for the record.
        seed: Of the bootstrap.
    """
    labels, groups = samples.labels, samples.groups
    numbered = None if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1].astype(np.int64)
    comparison = _Comparison(candidate, baseline, labels, batch_size, seed, numbered)
    rough = next((gate for gate in gates if gate.metric == RESEMBLES), None)
    gates, without = fitting([gate for gate in gates if gate.metric != RESEMBLES], baseline, labels)
    checks = [comparison.samples(samples, gates)]
    checks = [replace(checks[0], reason="; ".join([checks[0].reason, *without]))]
    if comparison.count == 0:
        return (*checks, *(comparison.not_run(gate, "there are no samples") for gate in gates))
    checks += comparison.structure()
    gate_checks = [check for gate in gates for check in comparison.gate(gate, gates)]
    seen = {check.output for check in gate_checks} | comparison.also_read
    gate_checks += [comparison.unseen(name, rough) for name in baseline if name not in seen]
    if checks[0].outcome is Outcome.NOT_RUN:
        gate_checks = [_not_judged(check, checks[0].reason) for check in gate_checks]
    return (*checks, *gate_checks)


def apply_waivers(checks: Sequence[Check], waivers: Sequence[Waiver], target: str, today: date) -> tuple[Check, ...]:
    """The checks, with failures of gates that hold a waiver for this target marked. The outcome stays FAIL.

    Not waived are NOT_RUN (nothing is known that could be waived), structural failures, and what a waiver past its end
    names.
    """
    held = held_waivers(waivers, target, today)
    return tuple(
        replace(check, waived=held[check.gate.metric])
        if check.outcome is Outcome.FAIL and check.gate.metric in held
        else check
        for check in checks
    )


def held_waivers(waivers: Sequence[Waiver], target: str, today: date) -> dict[str, Waiver]:
    """The waivers that hold on this target today, by the metric whose FAIL they let through."""
    return {
        waiver.gate: waiver
        for waiver in waivers
        if waiver.target == target and date.fromisoformat(waiver.expires) >= today and waiver.gate not in STRUCTURE
    }


@dataclass
class _Comparison:
    """One candidate at one batch size. `broken` says, by output, why its values are not to be compared."""

    candidate: Mapping[str, Array]
    baseline: Mapping[str, Array]
    labels: Array | None
    batch_size: int
    seed: int
    groups: NDArray[np.int64] | None = None
    broken: dict[str, str] = field(default_factory=dict)
    also_read: set[str] = field(default_factory=set)
    _distances: dict[str, Distances] = field(default_factory=dict)
    _columns: dict[str, list[Columns]] = field(default_factory=dict)
    _tokens: dict[str, Tokens] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max((len(array) for array in self.baseline.values() if array.ndim), default=0)

    @property
    def amount(self) -> Amount:
        return Amount(self.count, None if self.groups is None else len(np.unique(self.groups)))

    # ------------------------------------------------------------------------------------------------------ structure

    def samples(self, compared: ComparedSamples, gates: Sequence[Gate]) -> Check:
        min_samples, distinct = compared.min_samples, self.count if compared.distinct is None else compared.distinct
        gate = Gate(metric="samples", limit=float(min_samples), direction="at_least")
        independent = min(self.amount.independent, distinct)
        if problem := samples_problem(self.amount, distinct, min_samples, real=compared.real):
            return self._check(gate, Outcome.NOT_RUN, float(independent), problem)
        known = self._prompts_looked_at(gates)
        if known is not None and known < min_samples:
            problem = (
                f"of {self.amount.real} {known} have a token that is looked at (a label other than {IGNORED}), fewer "
                f"than the {min_samples} that the policy asks for (data.min_samples)"
            )
            return self._check(gate, Outcome.NOT_RUN, float(known), problem)
        some = "" if distinct == self.count else f", {distinct} of them different ones that the baseline answers"
        reason = f"{self.amount.real}{some}, at least {min_samples} are asked for"
        return self._check(gate, Outcome.PASS, float(independent), reason)

    def _prompts_looked_at(self, gates: Sequence[Gate]) -> int | None:
        """How many prompts, or groups of them, the metrics of language models look at; None where all of them, or where
        there is no such metric."""
        asked = any(gate.metric in (*TOKEN_METRICS, *TEXT_METRICS) for gate in gates)
        if not asked or self.labels is None or not any(is_text(self.labels, b) for b in self.baseline.values()):
            return None
        known = np.asarray(self.labels != IGNORED).any(axis=1)
        return int(known.sum()) if self.groups is None else len(np.unique(self.groups[known]))

    def structure(self) -> Iterator[Check]:
        yield self._outputs()
        for name, expected in self.baseline.items():
            if name not in self.candidate:
                self.broken[name] = "the candidate does not have it"
                continue
            check = self._shape(name, self.candidate[name], expected)
            yield check
            if check.outcome is Outcome.FAIL:
                self.broken[name] = "its shape or kind is wrong"
            elif expected.dtype.kind == "f":
                check = self._finite(name)
                yield check
                if check.outcome is Outcome.FAIL:
                    self.broken[name] = "it is not finite where the baseline is, or the other way round"

    def _outputs(self) -> Check:
        gate = Gate(metric="outputs", limit=0, direction="at_most")
        wrong, problem = outputs_problem(self.candidate, self.baseline)
        if problem:
            return self._check(gate, Outcome.FAIL, float(wrong), problem)
        return self._check(gate, Outcome.PASS, 0.0, f"it has the baseline's outputs: {listed(self.baseline)}")

    def _shape(self, name: str, own: Array, expected: Array) -> Check:
        gate = Gate(metric="shape", limit=0, direction="at_most", output=name)
        if problem := shape_problem(own, expected, self.count):
            return self._check(gate, Outcome.FAIL, 1.0, f"output {name!r}: {problem}")
        kept = f"{own.dtype}{list(own.shape[1:])}"
        change = (
            "" if own.dtype == expected.dtype or own.dtype.kind in "US" else f" (the baseline's is {expected.dtype})"
        )
        return self._check(gate, Outcome.PASS, 0.0, f"output {name!r} is {kept} for each of {len(own)} samples{change}")

    def _finite(self, name: str) -> Check:
        gate = Gate(metric="finite", limit=0, direction="at_most", output=name)
        distances = self.distances(name)
        strange, shared = int(distances.strange.sum()), int(distances.shared.sum())
        note = f"; {values_are(shared)} the same NaN or infinity on both sides, and left out" if shared else ""
        if strange:
            samples = int(np.count_nonzero(distances.strange))
            reason = (
                f"output {name!r}: {values_are(strange)} NaN or infinite on one side only, in {samples} of "
                f"{self.count} samples{note}"
            )
            check = self._check(gate, Outcome.FAIL, float(strange), reason)
            return replace(check, worst=Measured(0, distances.strange).worst())
        return self._check(gate, Outcome.PASS, 0.0, f"output {name!r} is finite wherever the baseline is{note}")

    def distances(self, name: str) -> Distances:
        """Computed once, for all the metrics that are made of it."""
        if name not in self._distances:
            self._distances[name] = distances(self.candidate[name], self.baseline[name])
        return self._distances[name]

    def columns(self, name: str) -> list[Columns]:
        """Computed once, for both of the metrics that are made of them."""
        if name not in self._columns:
            self._columns[name] = columns_along_axes(self.candidate[name], self.baseline[name])
        return self._columns[name]

    def tokens(self, name: str) -> Tokens:
        """Computed once, for all the metrics of language models."""
        if name not in self._tokens:
            self._tokens[name] = compare_tokens(self.candidate[name], self.baseline[name], self.labels)
        return self._tokens[name]

    # ----------------------------------------------------------------------------------------------------------- gates

    def gate(self, gate: Gate, gates: Sequence[Gate]) -> Iterator[Check]:
        if gate.output is not None and gate.output not in self.baseline:
            reason = f"{gate.metric} is asked of output {gate.output!r}, and the model has {listed(self.baseline)}"
            yield self.not_run(gate, reason)
        elif gate.metric in HIGHER_IS_BETTER or gate.metric in TEXT_METRICS:
            if not self._yields(gate, gates):
                yield self._task(gate)
        else:
            named = [name for name in self.baseline if gate in in_force(gates, name)]
            suited = [name for name in named if gate.output is not None or suits(gate, self.baseline[name])]
            for name in suited:
                yield self._measure(gate, name)
            # Floats without an axis of classes are no reason to pass over a gate in silence.
            needs_classes = gate.metric in CLASS_METRICS and gate.metric != LOOKS_LIKE_SCORES
            if not suited and needs_classes and len(named) == len(self.baseline):
                yield self.not_run(gate, f"{gate.metric} needs scores of at least two classes, and no output has them")

    def _yields(self, gate: Gate, gates: Sequence[Gate]) -> bool:
        """Whether a task gate that names no output gives way to one of the same metric that names its output: it does
        unless it clearly reads another output."""
        named = any(other.metric == gate.metric and other.output is not None for other in gates)
        if gate.output is not None or not named or self.labels is None:
            return False
        if gate.metric in TEXT_METRICS:
            return True
        try:
            return gate not in in_force(gates, scored_output(gate.metric, self.baseline, self.labels))
        except NotMeasurableError:
            return True

    def _measure(self, gate: Gate, name: str) -> Check:
        if name in self.broken:
            return self.not_run(gate, f"output {name!r} was not measured: {self.broken[name]}", name)
        try:
            return self._judge(gate, name, self._value(gate, name))
        except NotMeasurableError as error:
            return self.not_run(gate, f"output {name!r}: {error}", name)

    def _value(self, gate: Gate, name: str) -> Measured:
        own, expected = self.candidate[name], self.baseline[name]
        if gate.metric in FLOAT_METRICS:
            if expected.dtype.kind != "f":
                raise NotMeasurableError(f"{gate.metric} is for floats, and it holds {expected.dtype}; use agreement")
            distances = self.distances(name)
            if not distances.compared.any():
                raise NotMeasurableError("no value is finite, so there is nothing to compare")
            if gate.metric in COLUMN_METRICS:
                return measure_columns(gate.metric, self.columns(name), gate.options)
            return (
                allclose(own, expected, gate.options)
                if gate.metric == "allclose"
                else DISTANCE_METRICS[gate.metric](distances)
            )
        if gate.metric in CLASS_METRICS:
            return measure_classes(gate.metric, own, expected, gate.options)
        if gate.metric in SIMILARITY_METRICS:
            return measure_similarity(gate.metric, own, expected, gate.options)
        if gate.metric in TOKEN_METRICS:
            return measure_tokens(gate, self.tokens(name), seed=self.seed, groups=self.groups)
        if gate.metric == "agreement":
            return agreement(own, expected)
        if gate.metric == RESEMBLES:
            return measure_resemblance(own, expected)
        if gate.metric.startswith("python:"):
            return measure_own(gate, own, expected, self.labels, seed=self.seed, groups=self.groups)
        raise NotMeasurableError(f"there is no metric {gate.metric!r}")

    def _judge(self, gate: Gate, name: str, measured: Measured) -> Check:
        if math.isnan(measured.value):
            return self.not_run(gate, f"output {name!r}: {gate.metric} came out as NaN", name)
        ends = self._interval(gate, measured)
        worse = deciding(gate, measured.value, ends)
        held = holds(gate, measured.value, ends, _ROUNDING if measured.parts is not None else 0.0)
        unit = f" {gate.unit}" if gate.unit else ""
        sign = {"at_most": ("<=", ">"), "at_least": (">=", "<")}[gate.direction][0 if held else 1]
        compared, limit = told_apart(worse, gate.limit)
        what = f"{gate.metric} of output {name!r} is {compared if ends is None else quantity(measured.value)}"
        if ends is not None:
            what += f", its {_percent(gate.confidence)} interval's worse end {compared}"
        reason = f"{what} {sign} {limit}{unit} over {self.count} samples"
        if measured.note:
            reason += f" ({measured.note})"
        outcome = Outcome.PASS if held else Outcome.FAIL
        independent = self.amount.independent
        if not held and measured.needed is not None and independent < measured.needed and holds(gate, measured.value):
            outcome = Outcome.NOT_RUN
            reason += f", and {too_few_samples(gate, measured.needed, independent, self.amount.unit)}"
        check = self._check(gate, outcome, measured.value, reason, name)
        return replace(check, interval=ends or measured.interval, worst=measured.worst())

    def _interval(self, gate: Gate, measured: Measured) -> tuple[float, float] | None:
        if gate.confidence is None:
            return None
        if measured.interval is not None:
            return measured.interval
        if measured.parts is None:
            raise NotMeasurableError(
                f"{gate.metric} is no mean over samples, so it has no interval; leave `confidence` out"
            )
        interval = mean_interval(measured.parts, gate.confidence, seed=self.seed, groups=self.groups)
        if interval is None:
            raise NotMeasurableError(f"{len(measured.parts)} samples are too few for an interval of {gate.metric}")
        return interval.low, interval.high

    def _task(self, gate: Gate) -> Check:
        if self.labels is None:
            reason = f"{gate.metric} needs labels, and the samples have none: name them as data.validation.labels"
            return self.not_run(gate, reason)
        name = gate.output
        try:
            name, own, base = self._read(gate)
            if gate.metric in TEXT_METRICS:
                result = measure_text(gate, self.tokens(name), seed=self.seed, groups=self.groups)
            else:
                measure = measure_recall if gate.metric == "class_recall" else measure_task
                result = measure(gate, own, base, self.labels, seed=self.seed, groups=self.groups)
        except (NotMeasurableError, ValueError) as error:  # scikit-learn says what it can't do as ValueError
            return self.not_run(gate, f"{gate.metric} was not measured: {error}", name)
        if math.isnan(result.value):
            return self.not_run(gate, f"{gate.metric} came out as NaN", name)
        return self._judge_task(gate, name, result)

    def _read(self, gate: Gate) -> tuple[str, Array, Array]:
        """The output that a task metric reads, or the first of several, and both models' answers."""
        if gate.metric == "coco_map":
            names, base = read_detections(self.baseline, gate.options)
            self.also_read.update(names)
        elif gate.metric in TEXT_METRICS:
            texts = [name for name, array in self.baseline.items() if is_text(self.labels, array)]
            if gate.output is None and len(texts) != 1:
                raise NotMeasurableError(f"{len(texts)} outputs are logits of the tokens that the labels are")
            names = (gate.output or texts[0],)
        else:
            names = (gate.output or scored_output(gate.metric, self.baseline, np.asarray(self.labels)),)
        if wrong := [self.broken[name] for name in names if name in self.broken]:
            raise NotMeasurableError(wrong[0])
        if gate.metric == "coco_map":
            return names[0], read_detections(self.candidate, gate.options)[1], base
        return names[0], self.candidate[names[0]], self.baseline[names[0]]

    def _judge_task(self, gate: Gate, name: str, result: TaskResult) -> Check:
        # Metrics of texts have an interval to be shown where the gate asks for none.
        decides = result.interval if gate.confidence is not None else None
        ends = (decides.low, decides.high) if decides else None
        worse = deciding(gate, result.value, ends)
        relative = gate.options.get("drop") == "max_relative_drop"
        slack = _ROUNDING * (1.0 if relative else max(abs(result.candidate), abs(result.baseline)))
        held = holds(gate, result.value, ends, slack)
        word = "bounds" if gate.metric in ("accuracy", "class_recall") else "interval"
        spread = f" ({_percent(gate.confidence)} {word} {ends[0]:.4g} to {ends[1]:.4g})" if ends else ""
        reason = (
            f"{gate.metric} {change_text(gate, result.value)}{spread}, from {result.baseline:.4g} to "
            f"{result.candidate:.4g} over {self.amount}; {gate.direction.replace('_', ' ')} {gate.limit:g} is "
            f"{'allowed' if gate.direction == 'at_most' else 'asked for'}"
        )
        if result.note:
            reason += f" ({result.note})"
        outcome = Outcome.PASS if held else Outcome.FAIL
        if not held and holds(gate, result.value, slack=slack):
            outcome, why = of_too_few(gate, result, worse, self.amount)
            reason += why
        check = self._check(gate, outcome, result.value, reason, name)
        worst = Measured(result.value, result.badness).worst()
        return replace(check, interval=ends, worst=worst)

    def unseen(self, name: str, rough: Gate | None) -> Check:
        """The check of an output that no gate looks at.

        Args:
            rough: What it is then judged by, if anything.
        """
        if rough is not None:
            return self._measure(rough, name)
        kind = self.baseline[name].dtype
        metric = "max_abs" if kind.kind == "f" else "agreement"
        gate = Gate(metric="covered", limit=1, direction="at_least", output=name)
        advice = f"give the precision's tolerances one for {kind} outputs, such as {metric}"
        return self.not_run(gate, f"no gate looks at output {name!r}; {advice}", name)

    def not_run(self, gate: Gate, reason: str, output: str | None = None) -> Check:
        return self._check(gate, Outcome.NOT_RUN, None, reason, output)

    def _check(
        self, gate: Gate, outcome: Outcome, measured: float | None, reason: str, output: str | None = None
    ) -> Check:
        return Check(
            gate=gate,
            outcome=outcome,
            measured=measured,
            reason=reason,
            output=output if output is not None else gate.output,
            batch_size=self.batch_size,
            samples=self.count,
        )


def _percent(confidence: float | None) -> str:
    """As many digits as a confidence over several tries needs: `95 %`, `98.33 %`."""
    return f"{100 * (confidence or 0.0):.4g} %"


def _not_judged(check: Check, why: str) -> Check:
    """What a check would have said, had there been enough to prove it with."""
    prefix = "" if check.outcome is Outcome.NOT_RUN else f"it would {check.outcome.value}: "
    return replace(check, outcome=Outcome.NOT_RUN, reason=f"{prefix}{check.reason}; but {why}")
