"""The words of the tolerance language: each metric, its formula, its direction and its unit.

`a` is the candidate's output, `b` the baseline's, over all samples. The numbers are computed in `measure`; this
table is what a policy may ask for, and the reference in docs/policy.md is printed from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compile_stage.core.records import Direction

Family = Literal["elementwise", "discrete", "task", "tokens", "performance"]

CUSTOM = "python:"


@dataclass(frozen=True, slots=True)
class Metric:
    """One word.

    Attributes:
        family: `elementwise` looks at floating outputs, `discrete` at integer, bool and string outputs, `task` needs
            labels, `tokens` is for language models.
        formula: As the reference shows it.
        direction: Which side of the limit is good. For a task metric that of its drop: always `at_most`.
        better: For a task metric, whether a higher or a lower value is better.
    """

    name: str
    family: Family
    formula: str
    direction: Direction
    unit: str = ""
    better: Literal["", "higher", "lower"] = ""

    @property
    def unbounded(self) -> bool:
        """Its values have a unit of their own or no end, so a percentage says nothing but of the baseline's value."""
        return self.name in ("log_loss", "mae", "rmse")


def _task(name: str, formula: str, better: Literal["higher", "lower"]) -> Metric:
    return Metric(name, "task", formula, "at_most", better=better)


_ALL = (
    Metric("max_abs", "elementwise", "max |a - b|", "at_most"),
    Metric("mean_abs", "elementwise", "mean |a - b|", "at_most"),
    Metric("max_rel", "elementwise", "max |a - b| / max |b|: relative to the output's range", "at_most"),
    Metric("allclose", "elementwise", "max |a - b| / (atol + rtol * |b|), at most 1", "at_most"),
    Metric("cosine", "elementwise", "a.b / (|a| |b|) per sample, the worst sample's", "at_least"),
    Metric("mean_cosine", "elementwise", "the same, the mean over the samples", "at_least"),
    Metric(
        "snr_db", "elementwise", "10 log10(sum b^2 / sum (a - b)^2) per sample, the worst sample's", "at_least", "dB"
    ),
    Metric(
        "mean_snr_db",
        "elementwise",
        "the same over all samples at once: powers are added, not decibels",
        "at_least",
        "dB",
    ),
    Metric(
        "psnr_db",
        "elementwise",
        "10 log10(max |b|^2 / mean (a - b)^2) per sample, the peak being that of all samples; the worst sample's",
        "at_least",
        "dB",
    ),
    Metric("mean_psnr_db", "elementwise", "the same over all samples at once", "at_least", "dB"),
    Metric(
        "kl",
        "elementwise",
        "sum b ln(b / a) over the classes (last axis), after softmax where b holds logits; the worst sample's",
        "at_most",
    ),
    Metric("mean_kl", "elementwise", "the same, the mean over the samples", "at_most"),
    Metric("top1_agreement", "elementwise", "share of samples where argmax a = argmax b", "at_least"),
    Metric(
        "topk_agreement", "elementwise", "share of the k largest of b that are among the k largest of a", "at_least"
    ),
    Metric(
        "top1_regret",
        "elementwise",
        "mean of (max b - b at argmax a) / mean of (max b - mean b): 0 the same best class, 1 one picked at random; "
        "left out without classes",
        "at_most",
    ),
    Metric(
        "column_nrmse",
        "elementwise",
        "(root mean square of a - b, less floor * root mean square of b) / standard deviation of b over the samples, "
        "the worst column's; of 20 columns or more, one in twenty may miss it where the floor is 0.001 or more",
        "at_most",
    ),
    Metric(
        "column_spread",
        "elementwise",
        "standard deviation of a over the samples / that of b, the least column's: 0 for a constant answer",
        "at_least",
    ),
    Metric(
        "similarity_spearman",
        "elementwise",
        "rank correlation, over all pairs of samples, of the cosine between their vectors in a and in b",
        "at_least",
    ),
    Metric(
        "nearest_kept",
        "elementwise",
        "share of each sample's k nearest others, by the cosine in b, that are among its k nearest in a; the mean",
        "at_least",
    ),
    Metric("agreement", "discrete", "share of equal elements: for labels, tokens and texts", "at_least"),
    _task("accuracy", "share of right labels", "higher"),
    _task("f1", "F1 of class 1 where the labels are 0 and 1, else the mean over the labels' classes", "higher"),
    _task("class_recall", "share of a class's right answers that are lost, the class that loses most", "higher"),
    _task("roc_auc", "area under the ROC curve; one against the rest for several classes", "higher"),
    _task("log_loss", "mean of -ln(probability of the true label)", "lower"),
    _task("mae", "mean |prediction - truth|", "lower"),
    _task("rmse", "root of the mean squared error", "lower"),
    _task("r2", "coefficient of determination", "higher"),
    _task(
        "spearman",
        "rank correlation of scores and labels, over all samples or `per_query`, then the mean of the queries",
        "higher",
    ),
    _task(
        "ndcg", "sum of label / log2(1 + rank) of the k best, over that of the best order; the queries' mean", "higher"
    ),
    _task(
        "coco_map",
        "mean over classes and over IoU 0.50 to 0.95 of the average precision of the 100 best boxes of each image",
        "higher",
    ),
    _task("wer", "(substitutions + deletions + insertions) / words of the labels", "lower"),
    _task(
        "ece",
        "sum over bins of the largest probability of |right answers - probabilities| / samples",
        "lower",
    ),
    Metric(
        "token_kl",
        "tokens",
        "mean over a prompt's tokens of sum b ln(b / a) over the vocabulary, after softmax; the mean of the prompts",
        "at_most",
    ),
    Metric(
        "token_top1_agreement",
        "tokens",
        "share of a prompt's tokens where argmax a = argmax b; the mean of the prompts",
        "at_least",
    ),
    Metric("perplexity", "tokens", "exp(mean of -ln(probability of the text's token))", "at_most", better="lower"),
    Metric("token_accuracy", "tokens", "share of the text's tokens that are the likeliest", "at_most", better="higher"),
    Metric(
        "speedup", "performance", "baseline's median latency / own median latency, interleaved", "at_least", "ratio"
    ),
    Metric("p95_latency_ms", "performance", "95th percentile of the latency of one call", "at_most", "ms"),
    Metric(
        "ttft_p95_ms",
        "performance",
        "95th percentile of the time to the first token: a prompt, to the distribution of the token after it",
        "at_most",
        "ms",
    ),
    Metric(
        "tpot_p95_ms",
        "performance",
        "95th percentile of the time per output token: (a whole generation - its first token) / the tokens after it",
        "at_most",
        "ms",
    ),
    Metric(
        "tokens_per_s",
        "performance",
        "output tokens of all sequences of a batch / median latency of a whole generation, at the largest batch size",
        "at_least",
        "tokens/s",
    ),
    Metric(
        "throughput_at_p99",
        "performance",
        "highest rate of Poisson arrivals at which 99 % of the requests are answered rightly within serving.p99_ms",
        "at_least",
        "requests/s",
    ),
    Metric(
        "cost_per_million",
        "performance",
        "serving.price_per_hour / 3600 / (throughput_at_p99 x serving.rows) x 10^6",
        "at_most",
        "currency",
    ),
    Metric("size_mb", "performance", "size of the artifact on disk, 1 MB = 10^6 bytes", "at_most", "MB"),
    Metric("memory_mb", "performance", "peak memory of a fresh process that loads and runs it", "at_most", "MB"),
)

METRICS = {metric.name: metric for metric in _ALL}

SERVED = ("throughput_at_p99", "cost_per_million")
"""Metrics of what is served, which are measured of the winner alone."""


def tolerance_names() -> tuple[str, ...]:
    """What a tolerance may name, in the reference's order."""
    return tuple(m.name for m in _ALL if m.family != "performance")
