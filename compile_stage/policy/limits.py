"""The limits of the policy language: how far off a candidate may be, how slow and how large (`policy.schema` has the
rest)."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag

from compile_stage.policy.values import (
    AS_MAP,
    AS_NUMBER,
    MAX_COUNT,
    Confidence,
    Cosine,
    Decibel,
    Distance,
    Positive,
    Section,
    Share,
    ShareLoss,
    Size,
    Text,
    number_or_map,
)


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
    background: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(
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


_PROMPTS = "The worse end of the interval over prompts must hold, not the mean. null: the mean."


class DivergenceLimit(Section):
    """How far a language model's distributions of the next token may lie from the baseline's."""

    limit: Distance = Field(description="The limit, in nats a token.")
    confidence: Confidence | None = Field(description=_PROMPTS)


class TokenShare(Section):
    """How many of a language model's likeliest tokens must be the baseline's."""

    limit: Share = Field(description="The smallest share.")
    confidence: Confidence | None = Field(
        description=f"{_PROMPTS} Where every token is the same, a limit of 0.99 takes 299 prompts at 0.95."
    )


class Increase(Section):
    """How much worse than the baseline's the perplexity may become, on the same text."""

    max_relative_increase: Distance = Field(
        description="The candidate's perplexity over the baseline's, less 1: 0.01 is one per cent."
    )
    confidence: Confidence | None = Field(description=_PROMPTS)


class CustomLimit(Section):
    """The limit of an own metric, `python:package.module:function`, which takes (candidate, baseline, labels) arrays
    and returns a number, or one number for each sample, whose mean counts."""

    limit: float = Field(description="The limit, in the metric's unit.", allow_inf_nan=False)
    direction: Literal["at_most", "at_least"] = Field(description="Which side of the limit is good.")
    confidence: Confidence | None = Field(
        None,
        description="The worse end of a paired bootstrap's interval must hold, not the number. null: the number.",
    )


_Number = TypeVar("_Number")
_Map = TypeVar("_Map")
NumberOr: TypeAlias = Annotated[
    Annotated[_Number, Tag(AS_NUMBER)] | Annotated[_Map, Tag(AS_MAP)], Discriminator(number_or_map)
]
TaskLimit: TypeAlias = NumberOr[Distance, Drop]
ShareTaskLimit: TypeAlias = NumberOr[ShareLoss, ShareDrop]
RankLimit: TypeAlias = NumberOr[ShareLoss, RankDrop]
GainLimit: TypeAlias = NumberOr[ShareLoss, GainDrop]
BoxLimit: TypeAlias = NumberOr[ShareLoss, BoxDrop]
WordLimit: TypeAlias = NumberOr[Distance, WordDrop]
BinLimit: TypeAlias = NumberOr[ShareLoss, BinDrop]
TopKLimit: TypeAlias = NumberOr[Share, TopK]
ColumnsLimit: TypeAlias = NumberOr[Distance, ColumnLimit]
DivergencesLimit: TypeAlias = NumberOr[Distance, DivergenceLimit]
TokenShareLimit: TypeAlias = NumberOr[Share, TokenShare]
IncreaseLimit: TypeAlias = NumberOr[Distance, Increase]

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
    token_kl: DivergencesLimit | None = Field(
        None, description="Of language models: mean divergence of the next token's distribution. A number is its limit."
    )
    token_top1_agreement: TokenShareLimit | None = Field(
        None, description="Of language models: share of tokens with the same likeliest token. A number is its limit."
    )
    perplexity: IncreaseLimit | None = Field(
        None, description="Of language models: rise in perplexity. A number is its max_relative_increase."
    )
    token_accuracy: ShareTaskLimit | None = Field(
        None, description="Of language models: drop in right next tokens. A number is its max_drop."
    )


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
        description="Smallest ratio of the baseline's latency to the candidate's, at each batch size "
        "(1.0 = not slower)."
    )
    p95_latency_ms: Positive | None = Field(
        description="Largest 95th percentile of the latency at the first of `batch_sizes`, in milliseconds."
    )
    ttft_p95_ms: Positive | None = Field(
        description="Of language models: largest 95th percentile of the time to the first token, in milliseconds."
    )
    tpot_p95_ms: Positive | None = Field(
        description="Of language models: largest 95th percentile of the time per output token, in milliseconds."
    )
    min_tokens_per_s: Positive | None = Field(
        description="Of language models: fewest output tokens a second, of all sequences of the largest batch size."
    )
    throughput_at_p99: Positive | None = Field(
        description="Fewest requests a second that the server answers with 99 % of them within `p99_ms` of "
        "`serving`; the lower end of the interval must hold (docs/serving-cost.md)."
    )
    max_cost_per_million: Positive | None = Field(
        description="Largest cost of a million inferences at that throughput, in the currency "
        "and by the price of `serving`; the upper end of the interval must hold."
    )
    max_size_mb: Positive | None = Field(description="Largest artifact on disk, in megabytes (10^6 bytes).")
    max_memory_mb: Positive | None = Field(description="Largest peak memory of a serving process, in megabytes.")
