"""The policy language: the only description of the YAML.

The JSON Schema for editors and the reference in docs/policy.md are printed from these models. No field has a default
here: `defaults.yaml` lists every one, so that all of them can be read in one place. A single file may leave out
anything; the merged whole may not.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
)

# Those that we ship lowerings for. A plug-in may bring others, so which ones a policy may name is asked of the plug-ins
# that
# are installed: `checks` does, and the JSON Schema lists what lowerings bring.
SHIPPED_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4", "fp8")
Precision: TypeAlias = Annotated[str, WithJsonSchema({"enum": list(SHIPPED_PRECISIONS), "type": "string"})]
Device: TypeAlias = Literal["cpu", "cuda", "rocm", "vulkan", "apple", "android", "browser"]
HardwareField: TypeAlias = Literal["fingerprint", "system", "machine", "cpu", "features", "cores", "accelerators"]

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](-?[A-Za-z0-9_])*$", max_length=64)]
Size: TypeAlias = Annotated[int, Field(ge=1)]
MAX_THREADS = 1024  # more than any machine's cores: a runtime that is asked for more starts them, and never ends
Shape: TypeAlias = Annotated[list[Size], Field(min_length=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Distance: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ShareLoss: TypeAlias = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cosine: TypeAlias = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Decibel: TypeAlias = Annotated[float, Field(ge=-200, le=400, allow_inf_nan=False)]
Confidence: TypeAlias = Annotated[float, Field(gt=0.5, lt=1)]

_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
FUNCTION_METRIC = rf"^python:{_FUNCTION}$"
SOURCE = rf"^(input_example|synthetic|file:[^\x00]+\.(npz|parquet|csv)|mlflow-dataset:.+|python:{_FUNCTION})$"

# Tags of the alternatives of a union; the message writer takes them out of an error's path.
AS_NUMBER, AS_MAP, AS_WORD, AS_LIST = "<number>", "<map>", "<word>", "<list>"


def _number_or_map(value: Any) -> str:
    return AS_MAP if isinstance(value, dict) else AS_NUMBER


def _word_or_list(value: Any) -> str:
    return AS_LIST if isinstance(value, list) else AS_WORD


def _date_from_text(value: Any) -> Any:
    """A quoted date is as good as YAML's own."""
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            return value
    return value


def _text_from_count(value: Any) -> Any:
    """`cores: 8` is the text that the machine's own count is compared with."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


HardwareWords: TypeAlias = Annotated[Text, BeforeValidator(_text_from_count, json_schema_input_type=str | int)]


class Section(BaseModel):
    """Strict: an unknown key is an error, and nothing is converted silently."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, defer_build=True, use_attribute_docstrings=False
    )


class AppliesTo(Section):
    """Which models the policy is for. A run on a model that does not match is an error."""

    names: list[Text] = Field(description="Glob patterns over the registered name; an empty list means every model.")
    tags: dict[str, str] = Field(description="Tags of the model version that must be equal.")


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

    samples: Annotated[int, Field(ge=0)] = Field(
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
    seed: Annotated[int, Field(ge=0)] = Field(description="Seed of every random choice: samples, bootstrap, shuffling.")


class ShapeRange(Section):
    """The shapes that one input must be able to take. Axis 0 is the batch; min <= typical <= max in every axis."""

    min: Shape = Field(description="The smallest shape that is promised to work.")
    typical: Shape = Field(description="The shape that is optimised for.")
    max: Shape = Field(description="The largest shape that is promised to work.")


class Drop(Section):
    """How much worse than the baseline a task metric may become, on the same samples."""

    max_drop: Distance | None = Field(
        None, description="The largest drop, in the metric's own unit (0.01 = one point of accuracy)."
    )
    max_relative_drop: Distance | None = Field(
        None, description="The largest drop, as a share of the baseline's value; given instead of max_drop."
    )
    confidence: Confidence | None = Field(
        description="The worse end of the drop's interval must hold, not its mean: at most a share of 1 - confidence "
        "of what loses more than the limit passes. It takes samples (docs/proof.md): 299 for a drop of 0.01 at 0.95. "
        "null: the mean."
    )


class ShareDrop(Drop):
    """The same for accuracy, f1 and roc_auc, which lie between 0 and 1: a drop of 1 % is 0.01."""

    max_drop: ShareLoss | None = Field(None, description="The largest drop: 0.01 is one point, 0.95 to 0.94.")
    max_relative_drop: ShareLoss | None = Field(
        None, description="The largest drop, as a share of the baseline's value; given instead of max_drop."
    )


class RankDrop(ShareDrop):
    """The same for spearman: per query where the samples of a query are ranked among themselves."""

    per_query: bool | None = Field(
        None, description="The mean over the queries (`data.queries`), not the correlation of all samples at once."
    )


class GainDrop(ShareDrop):
    """The same for ndcg."""

    k: Size | None = Field(None, description="How many of the best are looked at; 10 where it is not said.")


class BoxDrop(ShareDrop):
    """The same for coco_map: which outputs hold what. Left out, they are recognised by their shapes."""

    boxes: Text | None = Field(None, description="The output with boxes, `[n, boxes, 4]`.")
    scores: Text | None = Field(
        None,
        description="The output with the score of each box, `[n, boxes]`, or of each class, `[n, boxes, classes]`.",
    )
    classes: Text | None = Field(None, description="The output with the class of each box, `[n, boxes]`.")
    format: Literal["xyxy", "xywh", "cxcywh"] | None = Field(
        None, description="What the four numbers of a box are, of the model and of the labels; `xyxy` if not said."
    )
    activation: Literal["none", "sigmoid", "softmax"] | None = Field(
        None, description="What makes probabilities of `[n, boxes, classes]`; `none` if not said."
    )
    background: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="The class that means no object: -1 the last. Boxes of the next best class then count."
    )


class WordDrop(Drop):
    """The same for wer: how CTC scores `[n, frames, tokens]` become text."""

    vocabulary: list[Text] | None = Field(None, description="The tokens, in the model's order.")
    blank: Text | None = Field(None, description="The token that means nothing; the first one if not said.")
    delimiter: Text | None = Field(None, description="The token between words; a space if not said.")


class BinDrop(ShareDrop):
    """The same for ece."""

    bins: Annotated[int, Field(ge=2, le=1000)] | None = Field(None, description="Of equal width; 15 if not said.")


class Closeness(Section):
    """Elementwise |a - b| <= atol + rtol * |b|."""

    rtol: Distance = Field(description="Relative part.")
    atol: Distance = Field(description="Absolute part, in the output's unit.")


class TopK(Section):
    """Agreement of the k best classes."""

    limit: Share = Field(
        description="The smallest share of the baseline's k best that the candidate's k best must hold."
    )
    k: Size = Field(description="How many of the best classes are compared.")


class ColumnLimit(Section):
    """A limit on each column of an output, beside the noise that is granted to every column."""

    limit: Distance = Field(description="The limit, as a share of the column's standard deviation over the samples.")
    floor: ShareLoss = Field(
        description="Noise that is granted, as a share of the column's root mean square: the rounding of the precision."
    )


class CustomLimit(Section):
    """The limit of an own metric, `python:package.module:function`, which takes (candidate, baseline, labels) arrays
    and returns a number, or one number for each sample, whose mean counts."""

    limit: float = Field(description="The limit, in the metric's unit.", allow_inf_nan=False)
    direction: Literal["at_most", "at_least"] = Field(description="Which side of the limit is good.")
    confidence: Confidence | None = Field(
        None,
        description="The worse end of a paired bootstrap's interval must hold, not the number. null: the number.",
    )


TaskLimit: TypeAlias = Annotated[
    Annotated[Distance, Tag(AS_NUMBER)] | Annotated[Drop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
ShareTaskLimit: TypeAlias = Annotated[
    Annotated[ShareLoss, Tag(AS_NUMBER)] | Annotated[ShareDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
RankLimit: TypeAlias = Annotated[
    Annotated[ShareLoss, Tag(AS_NUMBER)] | Annotated[RankDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
GainLimit: TypeAlias = Annotated[
    Annotated[ShareLoss, Tag(AS_NUMBER)] | Annotated[GainDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
BoxLimit: TypeAlias = Annotated[
    Annotated[ShareLoss, Tag(AS_NUMBER)] | Annotated[BoxDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
WordLimit: TypeAlias = Annotated[
    Annotated[Distance, Tag(AS_NUMBER)] | Annotated[WordDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
BinLimit: TypeAlias = Annotated[
    Annotated[ShareLoss, Tag(AS_NUMBER)] | Annotated[BinDrop, Tag(AS_MAP)], Discriminator(_number_or_map)
]
TopKLimit: TypeAlias = Annotated[
    Annotated[Share, Tag(AS_NUMBER)] | Annotated[TopK, Tag(AS_MAP)], Discriminator(_number_or_map)
]

ColumnsLimit: TypeAlias = Annotated[
    Annotated[Distance, Tag(AS_NUMBER)] | Annotated[ColumnLimit, Tag(AS_MAP)], Discriminator(_number_or_map)
]

_TASK = "A number is its max_drop. Needs labels."


class Limits(Section):
    """Limits on one output, or on all of them. All must hold; null takes an inherited one away; what is not named has
    none."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, CustomLimit | None]

    max_abs: Distance | None = Field(None, description="Largest absolute difference, in the output's unit.")
    mean_abs: Distance | None = Field(None, description="Mean absolute difference, in the output's unit.")
    max_rel: Distance | None = Field(None, description="Largest difference over the baseline's largest magnitude.")
    allclose: Closeness | None = Field(None, description="Elementwise |a - b| <= atol + rtol * |b|.")
    cosine: Cosine | None = Field(None, description="Smallest cosine similarity of a sample.")
    mean_cosine: Cosine | None = Field(None, description="Mean cosine similarity of the samples.")
    snr_db: Decibel | None = Field(None, description="Smallest signal-to-noise ratio of a sample, in dB.")
    mean_snr_db: Decibel | None = Field(None, description="Signal-to-noise ratio over all samples at once, in dB.")
    psnr_db: Decibel | None = Field(None, description="Smallest peak signal-to-noise ratio of a sample, in dB.")
    mean_psnr_db: Decibel | None = Field(
        None, description="Peak signal-to-noise ratio over all samples at once, in dB."
    )
    kl: Distance | None = Field(None, description="Largest Kullback-Leibler divergence of a sample, in nats.")
    mean_kl: Distance | None = Field(None, description="Mean Kullback-Leibler divergence of the samples, in nats.")
    top1_agreement: Share | None = Field(None, description="Share of samples with the same best class.")
    topk_agreement: TopKLimit | None = Field(
        None, description="Share of the k best classes that both have. A number is its limit."
    )
    top1_regret: Distance | None = Field(
        None,
        description="How much worse the candidate's best class is by the baseline's scores: 0 the same, 1 any one.",
    )
    column_nrmse: ColumnsLimit | None = Field(
        None, description="Error of the worst column over its own standard deviation. A number is its limit."
    )
    column_spread: ColumnsLimit | None = Field(
        None, description="Least standard deviation of a column, as a share of the baseline's. A number is its limit."
    )
    similarity_spearman: Share | None = Field(
        None, description="Rank correlation of how near the samples' vectors are to each other."
    )
    nearest_kept: TopKLimit | None = Field(
        None, description="Share of each sample's k nearest others that stay among them (k: 10). A number is its limit."
    )
    agreement: Share | None = Field(None, description="Share of equal elements of integer, bool and text outputs.")
    accuracy: ShareTaskLimit | None = Field(None, description=f"Drop in accuracy. {_TASK}")
    f1: ShareTaskLimit | None = Field(None, description=f"Drop in F1. {_TASK}")
    class_recall: ShareTaskLimit | None = Field(
        None,
        description="Share of a class's right answers that may be lost, of the class that loses most. " + _TASK,
    )
    roc_auc: ShareTaskLimit | None = Field(None, description=f"Drop in area under the ROC curve. {_TASK}")
    log_loss: TaskLimit | None = Field(None, description=f"Rise in log loss, in nats. {_TASK}")
    mae: TaskLimit | None = Field(None, description=f"Rise in mean absolute error, in the label's unit. {_TASK}")
    rmse: TaskLimit | None = Field(None, description=f"Rise in root mean squared error, in the label's unit. {_TASK}")
    r2: TaskLimit | None = Field(None, description=f"Drop in the coefficient of determination. {_TASK}")
    spearman: RankLimit | None = Field(None, description=f"Drop in the rank correlation with the labels. {_TASK}")
    ndcg: GainLimit | None = Field(None, description=f"Drop in nDCG@k, of the queries of `data.queries`. {_TASK}")
    coco_map: BoxLimit | None = Field(None, description=f"Drop in COCO's mean average precision of boxes. {_TASK}")
    wer: WordLimit | None = Field(None, description=f"Rise in the word error rate. {_TASK}")
    ece: BinLimit | None = Field(None, description=f"Rise in the expected calibration error. {_TASK}")


class Tolerance(Limits):
    """The limits of one precision. An own metric is a key `python:package.module:function` with {limit, direction}."""

    outputs: dict[Text, Limits | None] | None = Field(
        None,
        description="By output name: a limit named here takes the place of the general limit of the same metric for "
        "that output.",
    )


class Performance(Section):
    """What is worth shipping. null: no limit."""

    min_speedup: Positive | None = Field(
        description="Smallest ratio of the baseline's latency to the candidate's (1.0 = not slower)."
    )
    p95_latency_ms: Positive | None = Field(description="Largest 95th percentile of the latency, in milliseconds.")
    max_size_mb: Positive | None = Field(description="Largest artifact on disk, in megabytes (10^6 bytes).")
    max_memory_mb: Positive | None = Field(description="Largest peak memory of a serving process, in megabytes.")


class Select(Section):
    """Which passing candidate wins. Ties within the noise go to the simpler one: higher precision, fewer steps."""

    prefer: Literal["latency", "throughput", "memory", "size"] = Field(description="What is compared.")


class Fallback(Section):
    """What happens when a lower precision misses its tolerance."""

    mixed_precision: bool = Field(description="Nodes may stay in FP32 or bf16 until the tolerance holds.")
    max_evaluations: Annotated[int, Field(ge=0)] = Field(
        description="At most so many trials of all searches of a target."
    )
    max_minutes: Positive = Field(description="At most so long all searches of a target, in minutes.")


class Budget(Section):
    """What a run may cost."""

    minutes: Positive = Field(description="The whole run, in minutes.")
    tuning_trials: Annotated[int, Field(ge=0)] = Field(description="Trials of an autotuner per job; 0: no tuning.")
    job_minutes: Positive = Field(description="One call of one worker, in minutes.")
    job_memory_mb: Annotated[float, Field(ge=256, allow_inf_nan=False)] = Field(
        description="The memory of one worker, in megabytes (10^6 bytes)."
    )
    measure_seconds: Positive = Field(
        description="The measurement of one target's candidates, in seconds; at most three times that where a slow "
        "model or a busy machine leaves too few rounds."
    )
    soak_seconds: Distance = Field(
        description="Calls in a row before a candidate may win, their answers checked at random, in seconds; 0: none."
    )


class Publish(Section):
    """Where the result goes."""

    name: Text = Field(description="Registered name of the published model; `{model}` stands for the source's name.")


class Promote(Section):
    """Which alias moves to a published version that passed."""

    alias: Text | None = Field(
        description="The alias; `{target}` stands for the target's name. null: nothing is promoted."
    )
    max_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        description="Largest ratio of the new latency to that of what the alias points to now (1.02 = 2 % slower)."
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


class Waiver(Section):
    """A named, owned, dated exception to one gate on one target. While it holds, the published version says so."""

    gate: Text = Field(description="The metric that may be missed: `accuracy`, `cosine`, `speedup`, ...")
    target: Text = Field(description="The target's name.")
    reason: Text = Field(description="Why, for the people who will read the published version.")
    owner: Text = Field(description="Who is responsible for it.")
    expires: Annotated[date, BeforeValidator(_date_from_text)] = Field(
        description="The last day on which it holds, as YYYY-MM-DD. After it, the policy is in error."
    )


Tolerances: TypeAlias = dict[Precision, Tolerance | None]

_OVERRIDE = "Laid over the section of the same name for this target alone."


class Target(Section):
    """Where an artifact must run, and what is tried for it."""

    device: Device = Field(description="The kind of device.")
    backends: Annotated[
        Annotated[Literal["auto"], Tag(AS_WORD)] | Annotated[list[Text], Field(min_length=1), Tag(AS_LIST)],
        Discriminator(_word_or_list),
    ] = Field(description="Backend names, preferred first, or `auto`: every installed one that suits the device.")
    precisions: Annotated[list[Precision], Field(min_length=1)] = Field(
        description="The candidates. fp32 is always among them as the safe floor, unless `tolerances: {fp32: null}`."
    )
    shapes: dict[Text, ShapeRange] = Field(
        description="By input name; empty when the model's own shapes are enough. Axis 0 is the batch."
    )
    batch_sizes: Annotated[list[Size], Field(min_length=1)] = Field(
        description="Each is validated and measured; selection looks at the first."
    )
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = Field(
        description="Compute threads of the runtime, and of the baseline too."
    )
    required: bool = Field(
        description="Without a winner for it the run fails. Where no target is required, one must have a winner."
    )
    hardware: dict[HardwareField, HardwareWords] = Field(
        description="Words that the machine's field must hold, as `doctor` prints it, e.g. {features: avx512_vnni "
        "amx_int8}, {cores: 8} or {fingerprint: ...}. Where the machine is another, backends that cross-compile make "
        "artifacts that are not validated there."
    )
    options: dict[Text, dict[str, Any]] = Field(description="By backend name: options that are handed to it untouched.")
    ladder: bool = Field(
        description="The fastest that passes is taken further: its backend's settings for memory, then for tuning, one "
        "by one, each validated and measured against the one before."
    )
    tolerances: Tolerances = Field(description=_OVERRIDE)
    performance: Performance = Field(description=_OVERRIDE)
    select: Select = Field(description=_OVERRIDE)
    fallback: Fallback = Field(description=_OVERRIDE)
    promote: Promote = Field(description=_OVERRIDE)


# The sections of a policy that a target may override.
OVERRIDABLE = ("tolerances", "performance", "select", "fallback", "promote")


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
    compliance: Compliance = Field(description="What the platform team allows.")
    waivers: list[Waiver] = Field(description="Exceptions, each owned and dated.")
