"""The policy language: with `policy.limits` and `policy.values` the only description of the YAML.

The JSON Schema for editors and the reference in docs/policy.md are printed from these models. No field has a default
here: `defaults.yaml` lists every one, so that all of them can be read in one place. A single file may leave out
anything; the merged whole may not.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from compile_stage.policy.limits import Performance, Tolerance
from compile_stage.policy.values import (
    AS_LIST,
    AS_WORD,
    CURRENCY,
    MAX_MEMORY_MB,
    MAX_SEED,
    MAX_TOKENS,
    SOURCE,
    Count,
    Device,
    Distance,
    HardwareField,
    HardwareWords,
    Name,
    Positive,
    Precision,
    RowCount,
    Section,
    Shape,
    Size,
    TagKey,
    Text,
    Threads,
    date_from_text,
    word_or_list,
)


class AppliesTo(Section):
    """Which models the policy is for. A run on a model that does not match is an error."""

    names: list[Text] = Field(description="Glob patterns over the registered name; an empty list means every model.")
    tags: dict[str, str] = Field(description="Tags of the model version that must be equal.")
    flavors: list[Text] = Field(
        description="Flavors that the model may have been logged with (`onnx`, `pytorch`, `sklearn`, ...); an empty "
        "list means any."
    )


class DataSet(Section):
    """Where samples come from."""

    source: Annotated[str, StringConstraints(pattern=SOURCE)] = Field(
        description="`input_example` (what was logged with the model), `file:PATH` (.npz, .parquet or .csv; relative "
        "to the policy file), `mlflow-dataset:NAME` (logged on the run that made the model), "
        "`python:package.module:function`, or `synthetic`, which never counts as real."
    )
    labels: Text | None = Field(
        description="The array or column that holds the true labels; null when there are none. Task metrics need it."
    )
    max_samples: Size = Field(description="At most so many samples are taken, by a seeded choice.")


class Robustness(Section):
    """Samples that are made of the validation samples, and whose answers the original model computes: an artifact that
    is right on the validation set alone is not right (docs/proof.md)."""

    samples: Count = Field(
        description="About so many, of five kinds: noise, mixed, scaled, permuted, synthetic; at most a quarter of the "
        "validation samples, and ten at least. 0: none."
    )
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        description="How many times its tolerance a gate may use on them."
    )


class Data(Section):
    """What "real samples" are. Every number in a report says which data it comes from, and how many samples."""

    validation: DataSet = Field(description="The samples that a candidate is compared with its baseline on.")
    calibration: DataSet = Field(description="The samples that quantisation ranges are taken from.")
    groups: Text | None = Field(
        description="The array or column that says which samples belong together: the patient, the video, the "
        "document. They are no independent samples: `min_samples` and `confidence` then count groups. null: each "
        "sample is independent."
    )
    queries: Text | None = Field(
        description="The array or column that says which query a sample is a candidate of, for rankings: as `groups`, "
        "and whole queries are taken where there are more samples than max_samples. Instead of `groups`."
    )
    min_samples: Size = Field(
        description="Fewer real validation samples (or groups of them) than this prove nothing: the checks are "
        "NOT_RUN, which never passes."
    )
    robustness: Robustness = Field(description="Samples beyond those of the validation set.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = Field(
        description="Seed of every random choice: samples, bootstrap, shuffling."
    )


class ShapeRange(Section):
    """The shapes that one input must be able to take. Axis 0 is the batch; min <= typical <= max in every axis."""

    min: Shape = Field(description="The smallest shape that is promised to work.")
    typical: Shape = Field(description="The shape that is optimised for.")
    max: Shape = Field(
        description="The largest shape that is promised to work; the published model refuses larger ones."
    )


class Serving(Section):
    """How the winner is measured behind its HTTP server, under load (docs/serving-cost.md). It is where `p99_ms` or
    `rates` are given."""

    p99_ms: Positive | None = Field(
        description="The latency that 99 % of the requests must hold, in milliseconds, from when a request arrives; "
        "the highest rate that holds it is looked for. null: none is."
    )
    rates: list[Positive] = Field(
        description="Requests a second that arrive whether or not the server keeps up, each measured."
    )
    clients: list[Threads] = Field(description="So many clients at a time that wait for their answers, each measured.")
    instances: list[Threads] = Field(
        description="How many server processes are tried, the fastest is taken; an empty list: 1, 2, 4, ... as far as "
        "the machine has cores for their threads."
    )
    threads: list[Threads] = Field(
        description="Compute threads of a server process that are tried; an empty list: the target's."
    )
    rows: RowCount | None = Field(description="Rows of a request; null: the target's first batch size.")
    seconds: Positive = Field(description="For all trials of a target, in seconds; starts of servers come on top.")
    price_per_hour: Positive | None = Field(
        description="Of a machine like the one that measures, in `currency`; null: no cost is computed."
    )
    currency: Annotated[str, StringConstraints(pattern=CURRENCY)] = Field(
        description="Three letters, as ISO 4217 has them."
    )


class Select(Section):
    """Which passing candidate wins. Ties within the noise go to the simpler one (higher precision, fewer steps), if it
    is at most 5 % slower by its figure. Of two as precise and as fast, one that takes at most 3/4 of the other's CPU
    time wins."""

    prefer: Literal["latency", "throughput", "memory", "size"] = Field(
        description="What is compared: `latency` of a call at the first of `batch_sizes`, `throughput` at the size "
        "with the least time per sample, peak `memory` of a process, or `size` of the artifact."
    )
    confidence_of: Literal["candidate", "winner"] = Field(
        description="Whose the `confidence` of a limit is. `candidate`: each one's by itself; of many that lose a "
        "little too much, one passes by luck more often. `winner`: where m candidates miss a limit for its interval "
        "alone, the winner is judged at 1 - (1 - confidence) / (1 + m), so that one that loses more than the limit "
        "is published about as seldom as `confidence` says, however many are tried. It takes more samples: "
        "about 1,000 for a limit of 0.01 at 0.95. Beside `serving`, each that passes is judged once, the best first, "
        "before anything is served: by the m of that moment (docs/proof.md)."
    )


class Fallback(Section):
    """What happens when a lower precision misses its tolerance."""

    mixed_precision: bool = Field(description="Nodes may stay in FP32 or bf16 until the tolerance holds.")
    max_evaluations: Count = Field(description="At most so many trials of all searches of a target.")
    max_minutes: Positive = Field(description="At most so long all searches of a target, in minutes.")


class Budget(Section):
    """What a run may cost."""

    minutes: Positive = Field(description="The whole run, in minutes.")
    tuning_trials: Count = Field(description="Trials of an autotuner per job; 0: no tuning.")
    job_minutes: Positive = Field(description="One call of one worker, in minutes.")
    job_memory_mb: Annotated[float, Field(ge=256, le=MAX_MEMORY_MB, allow_inf_nan=False)] = Field(
        description="The memory of one worker, in megabytes (10^6 bytes)."
    )
    measure_seconds: Positive = Field(
        description="The measurement of one target's candidates, in seconds; at most three times that where a slow "
        "model or a busy machine leaves too few rounds."
    )
    soak_seconds: Distance = Field(
        description="Calls in a row before a candidate may win, their answers checked at random, in seconds; 0: none."
    )
    predict_seconds: Distance = Field(
        description="The winner's predict() and the original's, as MLflow loads them: their answers are compared, and "
        "both are timed in turns, in seconds; 0: neither."
    )
    search_minutes: Distance = Field(
        description="Where a target says `ladder: true`: the search over combinations of its runtime's settings, in "
        "minutes; 0: one setting after another."
    )


class Publish(Section):
    """Where the result goes."""

    name: Text = Field(description="Registered name of the published model; `{model}` stands for the source's name.")
    elsewhere: Literal["refuse", "portable-fp32"] = Field(
        description="Of a version that holds a family: what loading it does on a machine that no variant is proven "
        "for. `portable-fp32` loads an fp32 artifact that runs anywhere, with a warning: its speed there is not known."
    )


class Promote(Section):
    """Which alias moves to a published version that passed."""

    alias: Text | None = Field(
        description="The alias; `{target}` stands for the target's name, or its family's. null: nothing is promoted."
    )
    max_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        description="Largest ratio of the new latency to that of what the alias points to now (1.02 = 2 % slower)."
    )
    approval: TagKey | None = Field(
        description="A tag: the run publishes, and the alias waits until somebody sets the tag on the published "
        "version (docs/watch.md). null: nobody is asked."
    )
    approvers: list[Text] = Field(
        description="Who may approve: the tag's value must be one of these names. An empty list: it must be `approved`."
    )


class Report(Section):
    """What reports show beside numbers."""

    samples: bool = Field(
        description="Show the validation samples with the largest errors, at most three of a target: pictures made "
        "small, values in words, and both models' answers. Reports are published with the model, so leave it false "
        "where samples are private."
    )
    profile: bool = Field(
        description="Where the baseline and the winner spend their time, and which nodes were fused, by their "
        "runtimes' own profilers, in sessions of their own after the verdict (docs/profile.md)."
    )


class Compliance(Section):
    """What the platform team allows."""

    allow_pickle: bool = Field(
        description="Pickled models may be loaded, in a child process. They execute code when loaded."
    )
    allow_python: bool = Field(
        description="The policy may name Python functions (`python:` as samples or metrics), which run with the "
        "stage's rights. Whoever may write the policy then may run code: set it to false, and lock it, in a base of "
        "policies that others write."
    )
    allowed_backends: list[Text] | None = Field(description="No backend but these may be used; null: any.")
    require_signature: bool = Field(
        description="Runs sign what they publish, and what is not signed by a trusted key is neither promoted nor "
        "loaded."
    )
    trusted_keys: list[Text] = Field(
        description="Files with the public keys, certificate authorities or trust files of those who may sign; "
        "relative to the file that names them."
    )
    on_hardware_mismatch: Literal["error", "warn", "ignore"] = Field(
        description="What loading a published model does on a machine other than the one it was measured on."
    )
    sandbox: Literal["required", "best-effort"] = Field(
        description="Workers are confined as far as the machine can (docs/security.md). `required`: a machine that "
        "can't keep them from the network and from files that were not handed to them is refused."
    )
    reuse_verdicts: Literal["never", "same-machine", "same-fingerprint"] = Field(
        description="Which verdicts of earlier runs are used in place of validating again: none, those of this "
        "machine, or those of any machine with the same hardware, where caches are shared (docs/shared-cache.md)."
    )
    reuse_timings: Literal["never", "same-machine", "same-fingerprint"] = Field(
        description="The same of measured times. Two machines with the same hardware differ in their load, cooling and "
        "neighbours."
    )


class Waiver(Section):
    """A named, owned, dated exception to one gate on one target. While it holds, the published version says so."""

    gate: Text = Field(description="The metric that may be missed: `accuracy`, `cosine`, `speedup`, ...")
    target: Text = Field(description="The target's name.")
    reason: Text = Field(description="Why, for the people who will read the published version.")
    owner: Text = Field(description="Who is responsible for it.")
    expires: Annotated[date, BeforeValidator(date_from_text)] = Field(
        description="The last day on which it holds, as YYYY-MM-DD, in UTC. After it, the policy is in error."
    )


class Generation(Section):
    """How much text a call of a language model reads and writes where it is validated and measured. A sample is a
    window of that many tokens."""

    prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = Field(
        description="Tokens that go in at once, with an empty cache."
    )
    new_tokens: Annotated[int, Field(ge=2, le=MAX_TOKENS)] = Field(
        description="Tokens that follow one by one, each through the cache. They are given, so that candidate and "
        "original do the same work; each one's distribution is compared."
    )


Tolerances: TypeAlias = dict[Precision, Tolerance | None]

_OVERRIDE = "Laid over the section of the same name for this target alone."


class Target(Section):
    """Where an artifact must run, and what is tried for it."""

    device: Device = Field(description="The kind of device.")
    backends: Annotated[
        Annotated[Literal["auto"], Tag(AS_WORD)] | Annotated[list[Text], Field(min_length=1), Tag(AS_LIST)],
        Discriminator(word_or_list),
    ] = Field(description="Backend names, preferred first, or `auto`: every installed one that suits the device.")
    precisions: Annotated[list[Precision], Field(min_length=1)] = Field(
        description="The candidates. fp32 is always among them as the safe floor, unless `tolerances: {fp32: null}`."
    )
    shapes: dict[Text, ShapeRange] = Field(
        description="By input name; empty when the model's own shapes are enough. Axis 0 is the batch."
    )
    batch_sizes: Annotated[list[RowCount], Field(min_length=1)] = Field(
        description="Each is validated and measured; selection looks at the first, or as `select.prefer` says. "
        "More rows are served in parts of the largest: name what users send."
    )
    threads: Threads = Field(description="Compute threads of the runtime, and of the baseline too.")
    required: bool = Field(
        description="Without a winner for it the run fails. Where no target is required, one must have a winner."
    )
    hardware: dict[HardwareField, HardwareWords] = Field(
        description="Words that the machine's field must hold, as `doctor` prints it, e.g. {features: avx512_vnni "
        "amx_int8}, {cores: 8} or {fingerprint: ...}; `without` names features that it must not have. Where the "
        "machine is another, backends that cross-compile make artifacts that are not validated there."
    )
    family: Name | None = Field(
        description="Targets of one family are published together, as variants in one version, and the loader picks "
        "the fastest that is proven for its machine (docs/variants.md). null: a version of its own."
    )
    options: dict[Text, dict[str, Any]] = Field(description="By backend name: options that are handed to it untouched.")
    generation: Generation = Field(description="Of language models: how long a call is. No other model looks at it.")
    ladder: bool = Field(
        description="The fastest that passes is taken further: its backend's options for memory, then for tuning, one "
        "by one, each validated and measured against the one before; then settings of the runtime in combination, for "
        "at most `budget.search_minutes`."
    )
    tolerances: Tolerances = Field(description=_OVERRIDE)
    performance: Performance = Field(description=_OVERRIDE)
    select: Select = Field(description=_OVERRIDE)
    fallback: Fallback = Field(description=_OVERRIDE)
    promote: Promote = Field(description=_OVERRIDE)
    serving: Serving = Field(description=_OVERRIDE)


# The sections of a policy that a target may override.
OVERRIDABLE = ("tolerances", "performance", "select", "fallback", "promote", "serving")


class PolicyDocument(Section):
    """A policy: what must hold for a model to be compiled, published and promoted."""

    apiVersion: Literal["compile-stage/v1"] = Field(description="The version of this language.")  # noqa: N815
    kind: Literal["OptimizationPolicy"] = Field(description="The kind of document.")
    name: Name = Field(description="The policy's name: letters, digits, `-` and `_`.")
    owner: str = Field(description="Who is responsible for the policy: a team or a person.")
    extends: list[Text] = Field(
        description="Policy files that this one is laid over, in order, relative to this file. Maps merge, lists and "
        "scalars replace."
    )
    locked: list[Text] = Field(
        description="Dotted paths of values or sections, as for `--set`, that files which extend this one, and "
        "`--set`, may not change."
    )
    applies_to: AppliesTo = Field(description="Which models the policy is for.")
    data: Data = Field(description="What real samples are.")
    targets: dict[Name, Target] = Field(
        description="By name: where artifacts must run. Only a base that others extend may have none."
    )
    tolerances: Tolerances = Field(description="By precision: what must hold against the FP32 baseline.")
    performance: Performance = Field(description="What is worth shipping.")
    select: Select = Field(description="Which passing candidate wins.")
    fallback: Fallback = Field(description="What happens when a lower precision misses its tolerance.")
    budget: Budget = Field(description="What a run may cost.")
    publish: Publish = Field(description="Where the result goes.")
    promote: Promote = Field(description="Which alias moves.")
    serving: Serving = Field(description="What of serving is measured.")
    report: Report = Field(description="What reports show.")
    compliance: Compliance = Field(description="What the platform team allows.")
    waivers: list[Waiver] = Field(description="Exceptions, each owned and dated.")
