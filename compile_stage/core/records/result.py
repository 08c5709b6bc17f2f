"""What a run, and a verification, found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from compile_stage.core.errors import EXIT_OK
from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.candidate import Candidate, OptimizationStep, Selection
from compile_stage.core.records.model import Predictions, SampleSet
from compile_stage.core.records.plan import Refusal, SourceModel
from compile_stage.core.records.policy import Policy, TargetPolicy
from compile_stage.core.records.publication import Bundle, Receipt, UnvalidatedBundle
from compile_stage.core.records.timing import Measurement
from compile_stage.core.records.verdict import Check


@record
class TargetResult:
    """One target, from candidates to receipt.

    Attributes:
        samples: By role: what its candidates were calibrated and validated on.
        baseline: What the original was measured at beside them; None when nothing was measured.
        ladder: The steps of option tuning, from the original on, when the policy asks for it.
        notes: What a reader should know of its data.
        unvalidated: What was compiled and could not be validated here; only where there is no winner.
        predictions: What the original's predict() answers to texts; None where predict() takes no text.
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
    predictions: Predictions | None = None

    @property
    def winner(self) -> Candidate | None:
        """The candidate that was selected."""
        return next((c for c in self.candidates if c.job.id == self.selection.winner), None)

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
    """The whole truth of a run: result.json, the reports and the exit code all come from here."""

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


@record
class Verification:
    """What `verify` found of a published version or a bundle on disk."""

    uri: str
    passed: bool
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
