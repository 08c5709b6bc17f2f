"""What a run, and a verification, found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from compile_stage.core.errors import EXIT_OK
from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.candidate import Candidate, OptimizationStep, Selection
from compile_stage.core.records.model import Answers, Predictions, SampleSet
from compile_stage.core.records.plan import Refusal, SourceModel
from compile_stage.core.records.policy import Policy, PolicyValue, TargetPolicy
from compile_stage.core.records.profile import Profiled
from compile_stage.core.records.publication import Bundle, Receipt, UnvalidatedBundle
from compile_stage.core.records.serving import ServingCost
from compile_stage.core.records.timing import Measurement
from compile_stage.core.records.verdict import Check


@record
class SamplePreview:
    """One validation sample, made small for a report.

    Attributes:
        sample: Its index.
        kind: `picture`, or `values`.
        content: A PNG file in base64; or the values in words.
        label: Its true label; empty without one.
    """

    sample: int
    kind: Literal["picture", "values"]
    content: str
    label: str = ""


@record
class WrittenText:
    """What a language model writes after a prompt, the likeliest token each time. All texts are printable.

    Attributes:
        job_id: Of the candidate; empty for the original.
        same: The beginning that the original writes too.
        rest: What follows, from the first token on that is another.
    """

    job_id: str
    prompt: str
    same: str
    rest: str = ""


@record
class Replacement:
    """A published version measured against the one that its alias pointed to.

    Attributes:
        uri: Of the version that the alias pointed to when they were compared.
        measurement: Of the new one with the old one as its baseline: its speedup is old time / new time. None where
            they could not be compared.
        note: Why they could not.
    """

    alias: str
    uri: str
    measurement: Measurement | None = None
    note: str = ""


@record
class PredictSpeedup:
    """How much faster the published model's predict() is than the original's, both as MLflow loads them.

    Attributes:
        speedup: The quotient of the medians of both, from calls in turns; None where it was not measured.
        interval: 95 % interval of that quotient.
        stable: The interval's half width is at most 10 % of `speedup`.
        rows: Of a call.
        pairs: Calls of each that were timed.
        original_s, compiled_s: Medians in seconds; None where only their quotient is known (a custom pyfunc). The
            original's is with one thread where `slowed_s` is known.
        given: What predict() was given, in words: `a data frame`.
        reason: Why it was not measured; empty where it was.
        contradiction: What of it shows that the baseline was slowed down, so that the speedups of the runtime are not
            to be relied on; empty where nothing does.
        slowed_s: The original's median with the target's threads, in seconds, where these only held it up, so that it
            was compared with one thread; else None.
        served_s: Median in seconds of the artifact's own calls in the process that has the published model loaded,
            without predict(); None where they were not made.
    """

    speedup: float | None = None
    interval: tuple[float, float] | None = None
    stable: bool = False
    rows: int = 0
    pairs: int = 0
    original_s: float | None = None
    compiled_s: float | None = None
    given: str = ""
    reason: str = ""
    contradiction: str = ""
    slowed_s: float | None = None
    served_s: float | None = None


@record
class TargetResult:
    """One target, from candidates to receipt.

    Attributes:
        refused: Jobs that were not compiled, since what was compiled of them could not have passed.
        samples: By role: what its candidates were calibrated and validated on.
        baseline: What the original was measured at beside them; None when nothing was measured.
        ladder: The steps of option tuning, from the original on, when the policy asks for it.
        notes: What a reader should know of its data.
        unvalidated: What was compiled and could not be validated here; only where there is no winner.
        original: What the original answered, which a soak's answers are compared with.
        predictions: What the original's predict() answers to texts; None where predict() takes no text.
        previews: The validation samples with the largest errors; empty unless the policy allows it.
        predict_speedup: Of the winner's predict(); None where the run did not get there, or the policy does not ask.
        texts: Of a language model, what the original and the candidates write; empty unless the policy allows it.
        replaced: What promotion compared it with; None where the alias was free, or nothing was promoted.
        serving: What serving the winner costs; None where the policy does not ask, or the run did not get there.
        profiles: Of the baseline and of the winner, by their runtimes' own profilers; empty where none was asked for.
    """

    policy: TargetPolicy
    candidates: tuple[Candidate, ...]
    selection: Selection
    samples: Mapping[str, SampleSet] = field(default_factory=dict)
    baseline: Measurement | None = None
    bundle: Bundle | None = None
    receipt: Receipt | None = None
    notes: tuple[str, ...] = ()
    ladder: tuple[OptimizationStep, ...] = ()
    unvalidated: tuple[UnvalidatedBundle, ...] = ()
    original: Answers | None = None
    predictions: Predictions | None = None
    previews: tuple[SamplePreview, ...] = ()
    texts: tuple[WrittenText, ...] = ()
    replaced: Replacement | None = None
    predict_speedup: PredictSpeedup | None = None
    profiles: tuple[Profiled, ...] = ()
    serving: ServingCost | None = None
    refused: tuple[Refusal, ...] = ()

    @property
    def winner(self) -> Candidate | None:
        """The candidate that was selected."""
        return next((c for c in self.candidates if c.job.id == self.selection.winner), None)

    @property
    def contradiction(self) -> str:
        """Why no speedup over the baseline is to be shown; empty where there is no such reason."""
        return self.predict_speedup.contradiction if self.predict_speedup is not None else ""

    @property
    def measurement_notes(self) -> tuple[str, ...]:
        """What a reader should know of all its measurements, such as that the machine was busy."""
        return self.baseline.notes if self.baseline is not None else ()


RunStatus: TypeAlias = Literal["passed", "failed", "refused"]


@record
class RunOutcome:
    """How a run ended; without a problem it passed."""

    status: RunStatus = "passed"
    exit_code: int = EXIT_OK
    problem: str = ""


@record
class Event:
    """One step of one job, in seconds since the run began."""

    step: str
    job_id: str
    started_s: float
    ended_s: float
    cached: bool = False


@record
class RunResult:
    """The whole truth of a run: result.json, the reports and the exit code all come from here.

    Attributes:
        started_at: When the run began, in UTC: `2026-11-23T20:05:16Z`.
        policy_values: Every value of the policy with its origin; empty where it could not be read.
    """

    status: RunStatus
    exit_code: int
    source: SourceModel
    policy: Policy
    environment: JsonMap
    targets: tuple[TargetResult, ...]
    refused: tuple[Refusal, ...]
    baseline_framework: str
    baseline: Mapping[str, Measurement]
    samples: Mapping[str, SampleSet]
    duration_s: float
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    problem: str = ""
    started_at: str = ""
    policy_values: tuple[PolicyValue, ...] = ()


@record
class Verification:
    """What `verify` found of a published version or a bundle on disk."""

    uri: str
    passed: bool
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
