"""What the policy says, all layers resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, TypeAlias

from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.serving import Serving


@record
class DataSpec:
    """Where samples come from.

    Attributes:
        source: `input_example`, `file:PATH`, `mlflow-dataset:NAME`, `python:package.module:function` or `synthetic`.
            A relative file path was made absolute (against the policy file that named it) when the policy was loaded.
        labels: The column or array that holds the true labels; None when there are none.
        max_samples: At most so many are taken, by a seeded deterministic choice.
        groups: The column or array that says which samples belong together; None when each is independent.
        whole_groups: Groups are taken whole: they are queries of a ranking.
    """

    source: str
    labels: str | None = None
    max_samples: int = 256
    groups: str | None = None
    whole_groups: bool = False


@record
class Robustness:
    """How an artifact is compared beyond the validation samples.

    Attributes:
        samples: About so many are made of them, of all kinds together.
        factor: Times its tolerance that a gate may use on them.
    """

    samples: int = 40
    factor: float = 5.0


@record
class Data:
    """The two sets of samples, and how many real ones a validation needs at least.

    Attributes:
        robustness: None: artifacts are compared on the validation samples alone.
    """

    validation: DataSpec
    calibration: DataSpec
    min_samples: int = 32
    seed: int = 0
    robustness: Robustness | None = None


@record
class ShapeRange:
    """The shapes that one input must be able to take, axis 0 being the batch."""

    min: tuple[int, ...]
    typical: tuple[int, ...]
    max: tuple[int, ...]


@record
class Generation:
    """How much text a call of a language model reads and writes, where it is validated and measured.

    Attributes:
        prompt_tokens: That go in at once, before the cache holds any.
        new_tokens: That are added one by one, each through the cache.
    """

    prompt_tokens: int = 64
    new_tokens: int = 32

    @property
    def tokens(self) -> int:
        """Of a sample: the prompt, and what follows it."""
        return self.prompt_tokens + self.new_tokens


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
        hardware: What the machine must match, by `Hardware` field name
            (`{"machine": "x86_64", "features": "avx512_vnni"}`).
        options: Per backend name, options handed to it untouched.
        generation: Of language models alone.
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
    generation: Generation = field(default_factory=Generation)


Direction: TypeAlias = Literal["at_most", "at_least"]
Reach: TypeAlias = Literal["never", "same-machine", "same-fingerprint"]
"""Which earlier results of a machine are used: of no run, of its own runs, or of any machine with its hardware."""


@record
class Gate:
    """A limit that must hold.

    Attributes:
        metric: `max_abs`, `cosine`, `accuracy`, `allclose`, `speedup`, `python:package.module:function`, ...
        limit: In the metric's unit. For a task metric it is the largest drop against the baseline.
        direction: `at_most` passes when measured <= limit; `at_least` when measured >= limit.
        unit: `""`, `ratio`, `dB`, `ms`, `MB`.
        output: The output it looks at; None for every output.
        confidence: With it, the worse end of the interval must hold, not the mean: of what misses the limit, at most a
            share of 1 - confidence passes.
        options: What the metric needs beside the limit: `{"rtol": .., "atol": ..}`, `{"drop": "max_relative_drop"}`,
            `{"k": 5}`.
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
    """A named, owned, dated exception to one gate on one target. `expires` is an ISO date, the last day on which it
    holds."""

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
    """How much a run may cost. `job_*` bound one worker; `measure_seconds` bounds one target's measurement;
    `soak_seconds` is how long a winner is called before it is one, `predict_seconds` how long its predict() and the
    original's take turns; 0 for not at all. `search_minutes` bounds the search over combinations of one target's
    runtime settings; 0 tries them one by one."""

    minutes: float = 60.0
    tuning_trials: int = 0
    job_minutes: float = 15.0
    job_memory_mb: float = 12_000.0
    measure_seconds: float = 60.0
    soak_seconds: float = 2.0
    predict_seconds: float = 1.0
    search_minutes: float = 8.0


@record
class Promotion:
    """Which alias moves, and how much slower than what it points to now the new version may be (1.02 = 2 %).

    Attributes:
        approval: Tag of the published version that somebody must set before the alias moves; None: nobody is asked.
        approvers: Names, one of which must be the tag's value; empty: the value is `approved`.
    """

    alias: str | None = None
    max_slowdown: float = 1.02
    approval: str | None = None
    approvers: tuple[str, ...] = ()


@record
class Compliance:
    """What the platform team allows.

    Attributes:
        trusted_keys: Files that name who may sign (`serving.trust`), absolute once the policy was loaded.
        sandbox: `required` refuses where workers can't be confined (`engine.confinement`).
        reuse_verdicts, reuse_timings: Which results of earlier runs are used (`core.reuse`).
    """

    allow_pickle: bool = False
    allow_python: bool = True
    allowed_backends: tuple[str, ...] | None = None
    require_signature: bool = False
    trusted_keys: tuple[str, ...] = ()
    on_hardware_mismatch: Literal["error", "warn", "ignore"] = "error"
    sandbox: Literal["required", "best-effort"] = "best-effort"
    reuse_verdicts: Reach = "same-fingerprint"
    reuse_timings: Reach = "same-machine"


@record
class TargetPolicy:
    """Everything the policy says of one target, all layers resolved.

    Attributes:
        tolerances: By precision (`fp32`, `int8`, ...). A precision without an entry has no gates, so its verdict can't
            pass.
        performance: Gates on `speedup`, `p95_latency_ms`, `size_mb`, `memory_mb`; of language models on `ttft_p95_ms`,
            `tpot_p95_ms` and `tokens_per_s`; of what is served on `throughput_at_p99` and `cost_per_million`.
        ladder: Tune the backend's options on the fastest candidate that passes: those for memory, then those for speed,
            one by one.
        serving: How the winner is measured behind its server.
        family: Of targets that are published together, as variants in one version; empty for a version of its own.
        confidence_of: Whose a gate's confidence is: each candidate's by itself, or the winner's, however many miss.
    """

    target: Target
    tolerances: Mapping[str, tuple[Gate, ...]]
    performance: tuple[Gate, ...]
    prefer: Literal["latency", "throughput", "memory", "size"] = "latency"
    fallback: Fallback = field(default_factory=Fallback)
    promote: Promotion = field(default_factory=Promotion)
    ladder: bool = False
    serving: Serving = field(default_factory=Serving)
    family: str = ""
    confidence_of: Literal["candidate", "winner"] = "candidate"

    @property
    def published_as(self) -> str:
        """Whose version it is published in: its family's, or its own."""
        return self.family or self.target.name

    @property
    def alias(self) -> str | None:
        """The alias that is moved (`{target}-prod` → `cpu-server-prod`); None where none is."""
        template = self.promote.alias
        return template.replace("{target}", self.published_as) if template else None

    @property
    def prunes_slow(self) -> bool:
        """True where a candidate that is far slower than another need not be validated: what is named always is; `auto`
        names nothing, and brings whatever is installed. Behind by far in latency matters only to who looks at
        latency."""
        return self.target.backends == ("auto",) and self.prefer == "latency"


@record
class ReportContent:
    """What reports may show beside numbers.

    Attributes:
        samples: The validation samples with the largest errors, at most three of a target, made small.
        profile: What the baseline's and the winner's runtimes spend their time on.
    """

    samples: bool = False
    profile: bool = False


@record
class PolicyValue:
    """One resolved value of a policy.

    Attributes:
        path: Dotted: `targets.edge.tolerances.int8.cosine`.
        value: A plain JSON value; None where a limit was taken away.
        origin: `file:line`, or the `--set` argument.
        is_default: It is the shipped default.
        locked_by: `file:line` of the lock that keeps later layers from changing it; empty where none does.
    """

    path: str
    value: Any
    origin: str
    is_default: bool
    locked_by: str = ""


@record
class AppliesTo:
    """Which models the policy is for: glob patterns over names, tags that must be equal, and flavors of which it must
    have been logged with one. Empty means all."""

    names: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    flavors: tuple[str, ...] = ()


@record
class Policy:
    """A resolved policy: all that the rest of the program ever sees of the YAML.

    Attributes:
        digest: Of the resolved values, so that a comment or a reordering does not change it.
        files: Every file that had a say, in layer order.
        publish_name: Template with `{model}`.
        elsewhere: What a version that holds a family does on a machine that no variant is proven for.
        warnings: Limits that can't fail and waivers without an end, located; no part of the digest.
        report: What reports may show; no part of the digest, since it changes nothing that is compiled.
        families: Family → its targets, also those that this run was not asked for (`--target`) or that another node of
            a cluster has; no part of the digest, since the targets say it.
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
    elsewhere: Literal["refuse", "portable-fp32"] = "refuse"
    warnings: tuple[str, ...] = ()
    report: ReportContent = field(default_factory=ReportContent)
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
