"""The records that travel from step to step, in the order in which they come to be.

Every record is frozen, holds plain values only, and goes to and from canonical JSON (`core.digest`), so it
can be cached, hashed, sent to a worker of another interpreter, and published. Paths are strings. Units stand in
the name: `_s` seconds, `_bytes`, `_mb` (10^6 bytes), `_ms` milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar, dataclass_transform

from compile_stage.core.errors import EXIT_OK, FailureKind
from compile_stage.core.tensors import Signature

T = TypeVar("T")
JsonMap: TypeAlias = Mapping[str, Any]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Frozen, slotted, keyword-only: the only kind of dataclass that crosses a step."""
    make: Callable[[type[T]], type[T]] = dataclass(frozen=True, slots=True, kw_only=True)
    return make(cls)


# ---------------------------------------------------------------------------------------------- what the policy says


@record
class DataSpec:
    """Where samples come from.

    Attributes:
        source: `input_example`, `file:PATH`, `mlflow-dataset:NAME`, `python:package.module:function` or `synthetic`.
            A relative file path was made absolute (against the policy file that named it) when the policy was loaded.
        labels: The column or array that holds the true labels; None when there are none.
        max_samples: At most so many are taken, by a seeded deterministic choice.
    """

    source: str
    labels: str | None = None
    max_samples: int = 256


@record
class Data:
    """The two sets of samples, and how many real ones a proof needs at least."""

    validation: DataSpec
    calibration: DataSpec
    min_samples: int = 32
    seed: int = 0


@record
class ShapeRange:
    """The shapes that one input must be able to take, axis 0 being the batch."""

    min: tuple[int, ...]
    typical: tuple[int, ...]
    max: tuple[int, ...]


@record
class Target:
    """Where an artifact must run.

    Attributes:
        device: `cpu`, `cuda`, `apple`, ...
        backends: Names, or `("auto",)` for all installed ones that suit the device.
        precisions: The candidates, in the policy's order: `fp32`, `fp16`, `bf16`, `int8`, `int8-dynamic`, ...
        shapes: Per input name; empty when the model's own shapes are enough.
        batch_sizes: Each is validated and measured; the first is the one that selection looks at.
        threads: Compute threads of the runtime, for the baseline too.
        hardware: What the machine must match, by `Hardware` field name (`{"machine": "x86_64", "features": "avx512_vnni"}`).
        options: Per backend name, options handed to it untouched.
    """

    name: str
    device: str = "cpu"
    backends: tuple[str, ...] = ("auto",)
    precisions: tuple[str, ...] = ("fp32",)
    shapes: Mapping[str, ShapeRange] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = (1,)
    threads: int = 1
    required: bool = True
    hardware: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, JsonMap] = field(default_factory=dict)


Direction: TypeAlias = Literal["at_most", "at_least"]


@record
class Gate:
    """A limit that must hold.

    Attributes:
        metric: `max_abs`, `cosine`, `accuracy`, `allclose`, `speedup`, `python:package.module:function`, ...
        limit: In the metric's unit. For a task metric it is the largest drop against the baseline.
        direction: `at_most` passes when measured <= limit; `at_least` when measured >= limit.
        unit: `""`, `ratio`, `dB`, `ms`, `MB`.
        output: The output it looks at; None for every output.
        confidence: With it, the worse end of the interval of that confidence must hold, not the mean.
        options: What the metric needs beside the limit: `{"rtol": .., "atol": ..}`, `{"drop": "max_relative_drop"}`, `{"k": 5}`.
        origin: `file:line` of the policy, for messages.
    """

    metric: str
    limit: float
    direction: Direction
    unit: str = ""
    output: str | None = None
    confidence: float | None = None
    options: JsonMap = field(default_factory=dict)
    origin: str = ""


@record
class Waiver:
    """A named, owned, dated exception to one gate on one target. `expires` is an ISO date, the last day on which it holds."""

    gate: str
    target: str
    reason: str
    owner: str
    expires: str


@record
class Fallback:
    """May nodes stay in higher precision when a candidate misses its tolerance, and how long may the search be."""

    mixed_precision: bool = True
    max_evaluations: int = 24
    max_minutes: float = 15.0


@record
class Budget:
    """How much a run may cost. `job_*` bound one worker; `measure_seconds` bounds one target's measurement."""

    minutes: float = 60.0
    tuning_trials: int = 0
    job_minutes: float = 15.0
    job_memory_mb: float = 12_000.0
    measure_seconds: float = 60.0


@record
class Promotion:
    """Which alias moves, and how much slower than what it points to now the new version may be (1.02 = 2 %)."""

    alias: str | None = None
    max_slowdown: float = 1.02


@record
class Compliance:
    """What the platform team allows."""

    allow_pickle: bool = False
    allowed_backends: tuple[str, ...] | None = None
    require_signature: bool = False
    on_hardware_mismatch: Literal["error", "warn", "ignore"] = "error"


@record
class TargetPolicy:
    """Everything the policy says of one target, all layers resolved.

    Attributes:
        tolerances: By precision (`fp32`, `int8`, ...). A precision without an entry has no gates, so its verdict can't pass.
        performance: Gates on `speedup`, `p95_latency_ms`, `size_mb`, `memory_mb`.
        ladder: What passes is taken further: the backend's settings for memory, then those for tuning, one by one.
    """

    target: Target
    tolerances: Mapping[str, tuple[Gate, ...]]
    performance: tuple[Gate, ...]
    prefer: Literal["latency", "throughput", "memory", "size"] = "latency"
    fallback: Fallback = field(default_factory=Fallback)
    promote: Promotion = field(default_factory=Promotion)
    ladder: bool = False

    @property
    def drops_hopeless(self) -> bool:
        """True where a candidate that is hopelessly slow need not be taken to the end: what is named always is; `auto` names nothing, and brings whatever is
        installed. Behind by far in latency matters only to who looks at latency."""
        return self.target.backends == ("auto",) and self.prefer == "latency"


@record
class AppliesTo:
    """Which models the policy is for: glob patterns over names, and tags that must be equal. Empty means all."""

    names: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


@record
class Policy:
    """A resolved policy: all that the rest of the program ever sees of the YAML.

    Attributes:
        digest: Of the resolved values, so that a comment or a reordering does not change it.
        files: Every file that had a say, in layer order.
        publish_name: Template with `{model}`.
    """

    name: str
    owner: str
    digest: str
    files: tuple[str, ...]
    data: Data
    targets: tuple[TargetPolicy, ...]
    applies_to: AppliesTo = field(default_factory=AppliesTo)
    budget: Budget = field(default_factory=Budget)
    compliance: Compliance = field(default_factory=Compliance)
    waivers: tuple[Waiver, ...] = ()
    publish_name: str = "{model}-compiled"


# ------------------------------------------------------------------------------------------------ source and the plan


@record
class SourceModel:
    """A model in a registry, pinned and downloaded.

    Attributes:
        uri: Immutable: `models:/fraud/7`, `models:/m-0123...`, `folder:/path#sha256:...`.
        name: Registered name, or a name made from the URI.
        version: As a string; empty when the source has none.
        flavor: `pytorch`, `sklearn`, `onnx`, ...: the source plug-in that reads it.
        path: The downloaded MLflow model directory (holds `MLmodel`), inside our cache.
        digest: `sha256:...` of the payload, without `MLmodel` and `registered_model_meta`, which carry ids and times.
        described: `sha256:...` of what `MLmodel` says of how the payload is read (flavors, signature, input example): the same weights logged
            with another signature are another model to whoever reads them.
        signature: The MLflow signature as tensor specs where it has one; None when it does not describe the graph.
        registry: Plug-in name of the registry it came from.
        logged_model_id: MLflow's `m-...`, for lineage; empty elsewhere.
        run_id: The run that made it; empty when unknown.
        tags: Of the version, for `applies_to`.
        mlmodel: The parts of `MLmodel` that say how the payload is read, as its registry parsed them. Empty: whoever wants them reads the file, with
            MLflow, whose import takes seconds and a hundred megabytes.
    """

    uri: str
    name: str
    version: str
    flavor: str
    path: str
    digest: str
    signature: Signature | None = None
    registry: str = "mlflow"
    logged_model_id: str = ""
    run_id: str = ""
    experiment_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    described: str = ""
    mlmodel: JsonMap = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str, str]:
        """What everything that is made from the model depends on."""
        return self.digest, self.flavor, self.described


UNCALIBRATED = ("fp32", "bf16", "int4")
"""Precisions that look at no samples: float32's range, or weights alone."""


@record
class Scheme:
    """How a backend wants a precision expressed.

    Attributes:
        precision: The policy's word: `fp32`, `fp16`, `bf16`, `int8`, `int8-dynamic`, ...
        name: Readable and unique within backend and precision: `fp32`, `int8-u8s8`, `int8-sym`.
        native: True when the backend does it itself and the graph is not rewritten.
        activations: `uint8`, `int8`, or empty.
        weights: `int8`, `uint4`, `int4`, `float16`, or empty.
        symmetric: Symmetric activations.
        per_channel: Weights have one scale per output channel.
        ops: Op types to quantise; empty means all that the lowering knows.
        options: What only this lowering or backend understands.
        float_type: Precision in which the backend runs what a lowering left in float32.
        float_types: Those that it offers for that, besides fp32: a search for mixed precision tries them.
    """

    precision: str
    name: str
    native: bool = False
    activations: str = ""
    weights: str = ""
    symmetric: bool = False
    per_channel: bool = True
    ops: tuple[str, ...] = ()
    options: JsonMap = field(default_factory=dict)
    float_type: str = "fp32"
    float_types: tuple[str, ...] = ()


@record
class Rung:
    """A setting that a backend offers to try on top of what passes.

    Attributes:
        kind: `memory` is tried before `tuning`.
        name: Readable, a part of a job's id, unique within the backend: `no-arena`.
        options: Options of that backend, laid over those of the target.
    """

    kind: Literal["memory", "tuning"]
    name: str
    options: JsonMap


@record
class Job:
    """One attempt: a target, a backend, a precision in its scheme.

    Attributes:
        id: Readable and stable: `fraud-7--cpu-server--openvino--int8-sym`.
        form: The portable form that the backend is given: `onnx` or `torch-export`.
        rungs: Names of the settings that were laid over the target's options, in order.
        elsewhere: Why what it compiles is not for this machine, and so is not validated here; empty when it is.
    """

    id: str
    source: str
    target: Target
    backend: str
    scheme: Scheme
    gates: tuple[Gate, ...]
    form: str = "onnx"
    rungs: tuple[str, ...] = ()
    elsewhere: str = ""


@record
class Refusal:
    """A job that was not tried, and why, in words a user can act on."""

    job_id: str
    target: str
    backend: str
    precision: str
    reason: str


@record
class Plan:
    """What will run, what is refused and why.

    Attributes:
        held: Job id → the steps that the cache holds already; empty where nobody looked.
    """

    source: SourceModel
    policy: Policy
    jobs: tuple[Job, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ models and artifacts


@record
class PortableModel:
    """A model in a portable form.

    Attributes:
        path: The file (`model.onnx`); external data lies beside it.
        digest: Of the folder that holds the file.
        form: `onnx` or `torch-export`.
        precision: `fp32`, or what a lowering made of it.
        kept: Per precision, the node names that stay in it although the rest was lowered.
        made_from: Digest of what it was made from.
        notes: What a reader of the report should know (`3 nodes stay in FP32: they overflow float16`).
    """

    path: str
    digest: str
    form: Literal["onnx", "torch-export"]
    opset: int
    precision: str
    signature: Signature
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made_from: str = ""
    notes: tuple[str, ...] = ()


@record
class SampleSet:
    """Samples on disk, one `.npy` per input, so that no process has to hold them whole.

    Attributes:
        path: Folder, laid out as `core.sample_files` says.
        count: Number of samples.
        real: False for synthetic data, which never proves anything.
        source: As in the policy.
    """

    path: str
    digest: str
    count: int
    real: bool
    source: str
    has_labels: bool = False
    notes: tuple[str, ...] = ()


@record
class Artifact:
    """What a backend compiled: a folder.

    Attributes:
        path: The folder.
        entry: The file in it that the backend opens.
        toolchain: Package → version of all that had a say in the bytes or runs them.
        hardware: Fingerprint of the machine it was compiled on (`core.environment`).
        options: What `Backend.open` needs beside the files (threads, hints).
        executed: What the runtime says it really runs: `{"providers": {...}, "ops": {...}, "precision": {...}}`.
        elsewhere: Why this machine can't run it: it was compiled for another. Empty when it can.
    """

    path: str
    entry: str
    digest: str
    job_id: str
    backend: str
    precision: str
    toolchain: Mapping[str, str]
    hardware: str
    signature: Signature
    size_bytes: int
    made_from: str = ""
    options: JsonMap = field(default_factory=dict)
    executed: JsonMap = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    elsewhere: str = ""


# ----------------------------------------------------------------------------------------------------- proof and time


class Outcome(StrEnum):
    """NOT_RUN never passes."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_RUN = "not_run"


@record
class Check:
    """One gate, looked at once.

    Attributes:
        measured: None when it could not be measured.
        interval: (low, high) where the gate asked for confidence.
        samples: How many samples it saw.
        reason: One sentence, for a pass too (`0.9981 >= 0.99 over 256 samples`).
        worst: Indices of the worst samples, worst first (at most 5).
        waived: The waiver under which a failure was let through; the outcome stays FAIL.
    """

    gate: Gate
    outcome: Outcome
    measured: float | None
    reason: str
    output: str | None = None
    batch_size: int | None = None
    interval: tuple[float, float] | None = None
    samples: int = 0
    worst: tuple[int, ...] = ()
    waived: Waiver | None = None


@record
class Verdict:
    """All checks of one artifact."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True only if there are checks, and every one passed or is waived by name (a NOT_RUN can't be waived)."""
        return bool(self.checks) and all(
            check.outcome is Outcome.PASS or (check.outcome is Outcome.FAIL and check.waived is not None)
            for check in self.checks
        )

    @property
    def waivers(self) -> tuple[Waiver, ...]:
        """The waivers that were needed."""
        found = {
            (w.gate, w.target): w
            for check in self.checks
            if (w := check.waived) is not None and check.outcome is Outcome.FAIL
        }
        return tuple(found.values())


@record
class Sensitivity:
    """What one quantised node does to the output.

    Attributes:
        node: Name in the source graph.
        effect: Noise power over signal power at the outputs, when this node alone is quantised.
        cost: Multiplications of one run; what keeping the node in higher precision forgoes grows with it.
        together: Matrix nodes that can only be kept or quantised with it, itself not among them.
    """

    node: str
    op: str
    effect: float
    cost: float
    together: tuple[str, ...] = ()


@record
class Trial:
    """One evaluation of a search for mixed precision.

    Attributes:
        kept: Nodes of the source that stay in `float_type`.
        passed: The verdict's word.
        decisive: The check that failed by most, or passed by least.
        latency_s: Median call, measured quickly and alone; None when it was not measured.
        problem: Why there is no verdict; empty when there is one.
    """

    kept: tuple[str, ...]
    float_type: str
    passed: bool
    decisive: Check | None = None
    latency_s: float | None = None
    problem: str = ""


@record
class Timing:
    """Raw latencies at one batch size; summaries are derived from them (`measure.stats`).

    Attributes:
        latency_s: One value per call, in seconds, in order.
        speedup: Baseline median / own median, from rounds that were interleaved; None for the baseline itself.
        speedup_interval: 95 % bootstrap interval of `speedup`.
        rounds: Interleaved turns.
        disturbed: Rounds that were dropped because others used the cores meanwhile; when too few would be left, none is dropped and
            `stable` is False.
        turns: How many of `latency_s` belong to each round, in order, so that two participants can be compared round by round.
        stable: The interval became narrow enough before the budget ended.
        environment: Hardware fingerprint.
    """

    latency_s: tuple[float, ...]
    batch_size: int
    stable: bool
    environment: str
    rounds: int = 0
    turns: tuple[int, ...] = ()
    disturbed: int = 0
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None


@record
class Measurement:
    """Everything measured of one artifact (or the baseline) in fresh processes.

    Attributes:
        dropped: Why it was not measured further after a first short look, or not even proven; empty when it was.
    """

    timings: tuple[Timing, ...]
    load_s: float
    peak_memory_bytes: int
    dropped: str = ""

    def timing(self, batch_size: int) -> Timing | None:
        """The timing at that batch size, if it was measured."""
        return next((t for t in self.timings if t.batch_size == batch_size), None)


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
    def elsewhere(self) -> str:
        """Why it can't be validated on this machine; empty when it can."""
        return self.job.elsewhere or (self.artifact.elsewhere if self.artifact is not None else "")

    @property
    def set_aside(self) -> str:
        """Why a first look dropped it before its proof; empty when none did."""
        return self.measurement.dropped if self.verdict is None and self.measurement is not None else ""


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
class LadderStep:
    """One step of the way from the original to the best that was found; its latency, memory, size and error are those of its candidate.

    Attributes:
        name: A scheme's or a rung's; empty for the original.
        job_id: Its candidate's; empty for the original, and where nothing was tried.
        climbed: False for what was tried and dropped, or not tried: then it is not one that the next is compared with.
        reason: One sentence: why it was kept, or not.
        options: Those that it lays over what is below it.
        speedup: Median latency of the climbed step before / its own, at the batch size that selection looks at, from turns of one
            interleaved run; None where one of the two was not measured there.
        speedup_interval: 95 % bootstrap interval of `speedup`.
    """

    kind: StepKind
    name: str
    job_id: str = ""
    climbed: bool = True
    reason: str = ""
    options: JsonMap = field(default_factory=dict)
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None


# -------------------------------------------------------------------------------------------------- out of the house


@record
class Bundle:
    """What is published for one target: a folder that `compile_stage.flavor` can load.

    Attributes:
        path: An MLflow model directory: `MLmodel`, `data/` (artifact, `manifest.json`), `code/` (vendored loader).
        key: Idempotency key: same source, policy, target and toolchain give the same key.
        manifest: Content of `manifest.json`.
    """

    path: str
    digest: str
    key: str
    target: str
    name: str
    manifest: JsonMap
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    params: Mapping[str, str]


@record
class Receipt:
    """What the registry holds after publication."""

    uri: str
    name: str
    version: str
    digest: str
    created: bool
    promoted_to: str | None = None
    previous: str | None = None
    note: str = ""


@record
class Draft:
    """A candidate that was compiled for hardware that is not here. It may be published; what promotes it is a validation on such hardware."""

    job_id: str
    bundle: Bundle
    receipt: Receipt | None = None


@record
class TargetResult:
    """One target, from candidates to receipt.

    Attributes:
        samples: By role: what its candidates were calibrated and validated on.
        baseline: What the original was measured at beside them; None when nothing was measured.
        ladder: From the original upwards, when the policy asks for it.
        notes: What a reader should know of its data.
        drafts: What was compiled and could not be validated here; only where there is no winner.
    """

    policy: TargetPolicy
    candidates: tuple[Candidate, ...]
    selection: Selection
    samples: Mapping[str, SampleSet] = field(default_factory=dict)
    baseline: Measurement | None = None
    bundle: Bundle | None = None
    receipt: Receipt | None = None
    notes: tuple[str, ...] = ()
    ladder: tuple[LadderStep, ...] = ()
    drafts: tuple[Draft, ...] = ()

    @property
    def winner(self) -> Candidate | None:
        """The candidate that was selected."""
        return next((c for c in self.candidates if c.job.id == self.selection.winner), None)


RunStatus: TypeAlias = Literal["passed", "failed", "refused"]


@record
class Ending:
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
