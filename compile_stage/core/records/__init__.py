"""The records that travel from step to step, one file for each part of a run, in the order in which they come to be.

Every record is frozen, holds plain values only, and goes to and from canonical JSON (`core.digest`), so it
can be cached, hashed, sent to a worker of another interpreter, and published. Paths are strings. Units stand in
the name: `_s` seconds, `_bytes`, `_mb` (10^6 bytes), `_ms` milliseconds.
"""

from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.candidate import (
    CacheState,
    Candidate,
    CandidateState,
    Failure,
    OptimizationStep,
    ResultState,
    Selection,
    StepKind,
)
from compile_stage.core.records.model import Artifact, Origin, PortableModel, Predictions, Processor, SampleSet
from compile_stage.core.records.plan import Job, Plan, Refusal, Scheme, SourceModel, TuningOption
from compile_stage.core.records.policy import (
    AppliesTo,
    Budget,
    Compliance,
    Data,
    DataSpec,
    Direction,
    Fallback,
    Gate,
    Policy,
    Promotion,
    Robustness,
    ShapeRange,
    Target,
    TargetPolicy,
    Waiver,
)
from compile_stage.core.records.publication import Bundle, FetchedVersion, Receipt, UnvalidatedBundle
from compile_stage.core.records.result import Event, RunOutcome, RunResult, RunStatus, TargetResult, Verification
from compile_stage.core.records.timing import Measurement, Timing
from compile_stage.core.records.verdict import Check, Outcome, Sensitivity, Trial, Verdict

__all__ = [
    "AppliesTo",
    "Artifact",
    "Budget",
    "Bundle",
    "CacheState",
    "Candidate",
    "CandidateState",
    "Check",
    "Compliance",
    "Data",
    "DataSpec",
    "Direction",
    "Event",
    "Failure",
    "Fallback",
    "FetchedVersion",
    "Gate",
    "Job",
    "JsonMap",
    "Measurement",
    "OptimizationStep",
    "Origin",
    "Outcome",
    "Plan",
    "Policy",
    "PortableModel",
    "Predictions",
    "Processor",
    "Promotion",
    "Receipt",
    "Refusal",
    "ResultState",
    "Robustness",
    "RunOutcome",
    "RunResult",
    "RunStatus",
    "SampleSet",
    "Scheme",
    "Selection",
    "Sensitivity",
    "ShapeRange",
    "SourceModel",
    "StepKind",
    "Target",
    "TargetPolicy",
    "TargetResult",
    "Timing",
    "Trial",
    "TuningOption",
    "UnvalidatedBundle",
    "Verdict",
    "Verification",
    "Waiver",
    "record",
]
