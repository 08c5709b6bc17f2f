"""One job and what became of it; the selection among the jobs of a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal, TypeAlias

from compile_stage.core.errors import FailureKind
from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.model import Artifact, PortableModel
from compile_stage.core.records.plan import Job
from compile_stage.core.records.timing import Measurement
from compile_stage.core.records.verdict import Check, OutputErrors, Trial, Verdict

NOT_STARTED = "plan"
"""The step of a failure that kept a job from being started at all."""


@record
class Failure:
    """How a job ended that yielded nothing. `step` is the one that was running, or `NOT_STARTED`."""

    kind: FailureKind
    step: str
    problem: str
    detail: str = ""

    @property
    def is_late(self) -> bool:
        """True where nothing is wrong with the job: no time was left to start or to measure it."""
        return self.kind == "timeout" and self.step == NOT_STARTED


CacheState: TypeAlias = Literal["hit", "miss"]

CandidateState: TypeAlias = Literal[
    "planned", "refused", "failed", "pruned", "compiled_not_validated", "passed", "won", "lost"
]
"""How far a candidate came. `planned`: nothing is known yet. `passed`: every gate looked at so far holds. `pruned`: so
much slower than another that the rest was not measured. `won` and `lost` are given by selection, among those that
passed."""

ResultState: TypeAlias = Literal["won", "lost", "failed", "refused", "compiled_not_validated"]
"""The states that `result.json` knows."""


@record
class Candidate:
    """One job and what became of it. Fields fill up along the way; `state` and `reason` change together, by `in_state`.

    Attributes:
        reason: One sentence on why it is in its state; empty while it is planned.
        trials: Of the search for nodes to keep in higher precision, when this candidate missed its tolerance.
        note: What became of that search, or what this candidate owes to one; follows the reason.
        errors: By output, of each validation sample; empty where nothing could be compared.
    """

    job: Job
    state: CandidateState = "planned"
    reason: str = ""
    portable: PortableModel | None = None
    artifact: Artifact | None = None
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    compile_s: float = 0.0
    cache: Mapping[str, CacheState] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    note: str = ""
    errors: tuple[OutputErrors, ...] = ()

    def in_state(self, state: CandidateState, reason: str) -> Candidate:
        """The candidate with its new state, and the sentence that says why."""
        return replace(self, state=state, reason=reason)

    def failed(self, failure: Failure) -> Candidate:
        """The candidate as it ends with a crash, a time-out, too little memory or an error."""
        kind = _KINDS[failure.kind]
        where = f"{failure.step}: {kind}" if kind else failure.step
        reason = failure.problem if failure.step == NOT_STARTED else f"{where}: {failure.problem}"
        return replace(self, failure=failure).in_state("failed", reason)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Those of its verdict; none when it was never validated."""
        return self.verdict.checks if self.verdict is not None else ()

    @property
    def has_passed(self) -> bool:
        """True when every gate that was looked at holds, and it ran to the end."""
        return self.state in ("passed", "won", "lost")

    @property
    def result_state(self) -> ResultState:
        """The state as `result.json` has it, which knows no pruned candidates: one that was validated before has
        lost."""
        if self.state == "pruned" and self.verdict is not None:
            return "lost"
        if self.state == "planned" or self.state == "pruned":
            return "compiled_not_validated"
        return "lost" if self.state == "passed" else self.state

    @property
    def full_reason(self) -> str:
        """The reason, and the note on the search behind it."""
        return f"{self.reason}; {self.note}" if self.note else self.reason

    @property
    def not_runnable_here(self) -> str:
        """Why it can't be validated on this machine; empty when it can."""
        return self.job.not_runnable_here or (self.artifact.not_runnable_here if self.artifact is not None else "")


_KINDS: Mapping[FailureKind, str] = {
    "crash": "crashed",
    "out_of_memory": "out of memory",
    "timeout": "timed out",
    "exception": "",
}


@record
class Selection:
    """The winner of a target, and for each loser why it lost (job id → one sentence)."""

    target: str
    winner: str | None
    reason: str
    states: Mapping[str, ResultState]
    reasons: Mapping[str, str]


StepKind: TypeAlias = Literal["original", "graph", "precision", "memory", "tuning"]


@record
class OptimizationStep:
    """One step from the original to the best candidate; its latency, memory, size and error are those of its candidate.

    Attributes:
        name: A scheme's or a tuning option's; empty for the original.
        job_id: Its candidate's; empty for the original, and where nothing was tried.
        accepted: False for what was tried and dropped, or not tried: then it is not one that the next is compared with.
        tried: It was compiled or measured, by itself or in the search over combinations.
        reason: One sentence: why it was kept, or not.
        options: Those that it lays over the step before.
        speedup: Median latency of the accepted step before / its own, at the batch size that selection looks at, from
            turns of one interleaved run; None where one of the two was not measured there.
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
    tried: bool = True
