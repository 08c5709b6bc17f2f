"""One job and what became of it; the selection among the jobs of a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from compile_stage.core.errors import FailureKind
from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.model import Artifact, PortableModel
from compile_stage.core.records.plan import Job
from compile_stage.core.records.proof import Trial, Verdict
from compile_stage.core.records.timing import Measurement


@record
class Failure:
    """How a job ended that yielded nothing."""

    kind: FailureKind
    step: str
    problem: str
    detail: str = ""


CacheState: TypeAlias = Literal["hit", "miss"]

CandidateState: TypeAlias = Literal["won", "lost", "failed", "refused", "compiled_not_validated"]


@record
class Candidate:
    """One job and what became of it. Fields fill up along the way.

    Attributes:
        trials: Of the search for nodes to keep in higher precision, when this candidate missed its tolerance.
        note: What became of that search, or what this candidate owes to one; follows the reason.
    """

    job: Job
    portable: PortableModel | None = None
    artifact: Artifact | None = None
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    refused: str | None = None
    compile_s: float = 0.0
    cache: Mapping[str, CacheState] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    note: str = ""

    @property
    def not_runnable_here(self) -> str:
        """Why it can't be validated on this machine; empty when it can."""
        return self.job.not_runnable_here or (self.artifact.not_runnable_here if self.artifact is not None else "")

    @property
    def pruned(self) -> str:
        """Why a first look dropped it before its proof; empty when none did."""
        return self.measurement.stopped_early if self.verdict is None and self.measurement is not None else ""


@record
class Selection:
    """The winner of a target, and for each loser why it lost (job id → one sentence)."""

    target: str
    winner: str | None
    reason: str
    states: Mapping[str, CandidateState]
    reasons: Mapping[str, str]


StepKind: TypeAlias = Literal["original", "graph", "precision", "memory", "tuning"]


@record
class OptimizationStep:
    """One step of the way from the original to the best that was found; its latency, memory, size and error are those of its candidate.

    Attributes:
        name: A scheme's or a rung's; empty for the original.
        job_id: Its candidate's; empty for the original, and where nothing was tried.
        accepted: False for what was tried and dropped, or not tried: then it is not one that the next is compared with.
        reason: One sentence: why it was kept, or not.
        options: Those that it lays over what is below it.
        speedup: Median latency of the climbed step before / its own, at the batch size that selection looks at, from turns of one
            interleaved run; None where one of the two was not measured there.
        speedup_interval: 95 % bootstrap interval of `speedup`.
    """

    kind: StepKind
    name: str
    job_id: str = ""
    accepted: bool = True
    reason: str = ""
    options: JsonMap = field(default_factory=dict)
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
