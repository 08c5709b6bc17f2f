"""Language models: how far two models' distributions of the next token lie apart, prompt by prompt.

An output is `[prompts, new tokens, vocabulary]` logits, each the distribution of one token after all tokens before it.
Tokens of one prompt depend on each other, so a prompt is the unit of every mean and of every interval. Labels
`[prompts, new tokens]` are the tokens of the text; those that are -100 are not looked at, in any metric.

Logits are read a few rows at a time: `[prompts, new tokens, vocabulary]` in float64 would be some gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Gate
from compile_stage.core.sample_sizes import samples_for_drop
from compile_stage.measure.elementwise import BLOCK, F64, Measured, NotMeasurableError, release
from compile_stage.measure.proportions import FEW_CHANGES, share_interval
from compile_stage.measure.skewed_means import Means, means_interval
from compile_stage.measure.stats import Interval, Statistic, bootstrap
from compile_stage.measure.task_intervals import FAR, TaskResult, mean_interval

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

TOKEN_METRICS = ("token_kl", "token_top1_agreement")
"""Of the two models' logits alone."""

TEXT_METRICS = ("perplexity", "token_accuracy")
"""Of each model's logits and the text that was given."""

IGNORED = -100
"""The label of a token that is not looked at: the fill behind the end of a text."""

SHOWN_CONFIDENCE = 0.95
"""Of intervals that are shown where the gate asks for none."""

_WIDEST = 2.0  # times the bootstrap's reach: prompts with next to no divergence put the logarithm's interval anywhere
_FLOOR = 1e-3  # of the mean: a prompt's divergence counts as this on the logarithm at least


@dataclass(frozen=True)
class Tokens:
    """What is known of each prompt; all arrays are `[prompts]`.

    Attributes:
        count: Tokens that were looked at.
        kl: Sum over them of KL(baseline || candidate), in nats.
        same: How many of them have the same likeliest token in both.
        loss, base_loss: Sum of -ln p of the text's tokens, of candidate and baseline; None without labels.
        right, base_right: How many of the text's tokens are the likeliest; None without labels.
    """

    count: F64
    kl: F64
    same: F64
    loss: F64 | None = None
    base_loss: F64 | None = None
    right: F64 | None = None
    base_right: F64 | None = None


def is_text(labels: Array | None, output: Array) -> bool:
    """Whether the labels are the tokens that this output `[prompts, new tokens, vocabulary]` is of."""
    return labels is not None and output.ndim == 3 and labels.dtype.kind in "iu" and labels.shape == output.shape[:2]


def compare_tokens(a: Array, b: Array, labels: Array | None) -> Tokens:
    """Candidate `a` beside baseline `b`, both logits `[prompts, new tokens, vocabulary]`.

    Args:
        labels: `[prompts, new tokens]`; None, or of another shape: all tokens are looked at, and none is known.

    Raises:
        NotMeasurableError: These are no logits of tokens, none is left to look at, or the candidate's are not finite
            where the baseline's are.
    """
    if b.ndim != 3 or b.dtype.kind != "f" or b.shape[2] < 2:
        raise NotMeasurableError(f"tokens have logits [prompts, new tokens, vocabulary], and this is {list(b.shape)}")
    text = np.asarray(labels, dtype=np.int64).ravel() if labels is not None and is_text(labels, b) else None
    prompts, new, vocabulary = b.shape
    if text is not None and bool(np.any((text != IGNORED) & ((text < 0) | (text >= vocabulary)))):
        raise NotMeasurableError(f"some labels are no tokens of a vocabulary of {vocabulary:,}")
    looked_at = np.ones(prompts * new, dtype=bool) if text is None else text != IGNORED
    sums = {name: np.zeros(prompts * new) for name in ("kl", "same", "loss", "base_loss", "right", "base_right")}
    flat_a, flat_b = a.reshape(-1, vocabulary), b.reshape(-1, vocabulary)
    step = max(1, BLOCK // vocabulary)
    for start in range(0, prompts * new, step):
        rows = slice(start, start + step)
        with np.errstate(divide="ignore", invalid="ignore"):
            q, p = _log_softmax(flat_a[rows]), _log_softmax(flat_b[rows])
            probable = np.exp(p)
            nats = np.where(probable > 0, probable * (p - q), 0).sum(axis=1)
        looked_at[rows] &= ~np.isnan(p).any(axis=1)
        if bool(np.any(np.isnan(q).any(axis=1) & looked_at[rows])):
            raise NotMeasurableError("some logits are NaN or infinite where the baseline's are not")
        sums["kl"][rows] = np.maximum(nats, 0)  # Gibbs: never below zero but for rounding
        best, base_best = q.argmax(axis=1), p.argmax(axis=1)
        sums["same"][rows] = best == base_best
        if text is not None:
            token = np.maximum(text[rows], 0)
            at = np.arange(len(token))
            sums["loss"][rows], sums["base_loss"][rows] = -q[at, token], -p[at, token]
            sums["right"][rows], sums["base_right"][rows] = best == token, base_best == token
        release(a, b)
    if not looked_at.any():
        raise NotMeasurableError("no token is left to look at: all labels are -100, or no logit is finite")
    by_prompt = {k: np.where(looked_at, v, 0).reshape(prompts, new).sum(axis=1) for k, v in sums.items()}
    count = looked_at.reshape(prompts, new).sum(axis=1).astype(np.float64)
    if text is None:
        return Tokens(count, by_prompt["kl"], by_prompt["same"])
    return Tokens(count, **by_prompt)


def _log_softmax(logits: Array) -> F64:
    """`[rows, vocabulary]`; a row of which no logit is finite, or one is NaN or +infinite, is NaN."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)  # infinity - infinity is NaN
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


# ----------------------------------------------------------------------------------------- of the two models' logits


def measure_tokens(gate: Gate, tokens: Tokens, *, seed: int, groups: NDArray[np.int64] | None) -> Measured:
    """One of TOKEN_METRICS, with its interval over the prompts where there are at least two.

    Args:
        groups: `[prompts]`, numbered from 0: prompts that belong together; None where each is independent.
    """
    confidence = SHOWN_CONFIDENCE if gate.confidence is None else gate.confidence
    kept = tokens.count > 0
    groups = None if groups is None else np.unique(groups[kept], return_inverse=True)[1].astype(np.int64)
    counts, total = tokens.count[kept], int(tokens.count.sum())
    note = f"over {total:,} tokens of {len(counts)} prompts"
    if gate.metric == "token_top1_agreement":
        shares = tokens.same[kept] / counts
        interval = mean_interval(shares, confidence, seed=seed, groups=groups, shares=True)
        needed = None if gate.confidence is None else samples_for_drop(1 - gate.limit, gate.confidence)
        badness = _spread(kept, 1 - shares)
        return Measured(float(shares.mean()), badness, note, shares, _ends(interval), needed)
    parts = tokens.kl[kept] / counts
    interval = divergence_interval(parts, confidence, seed=seed, groups=groups)
    note += f", {parts.max():.3g} in the worst prompt"
    if not parts.any():
        note += "; no distribution differs at all"
    return Measured(float(parts.mean()), _spread(kept, parts), note, parts, _ends(interval))


def divergence_interval(
    parts: F64, confidence: float, *, seed: int, groups: NDArray[np.int64] | None = None
) -> Interval | None:
    """Of the mean of `[prompts]` divergences, which are 0 or more, and of which a few may be many times the others.

    The bootstrap's (BCa), whose upper end is too low for such values: so it is that of the mean of a lognormal
    distribution where that lies further out (Cox's, with Student's t: Zhou and Gao, Statistics in Medicine 16:783,
    1997), but at most twice as far. Where fewer than 10 prompts differ at all, so many more of them may as the others
    can't rule out (Clopper and Pearson), each as far off as the worst that was seen. None for fewer than two prompts.
    """
    if len(parts) < 2:
        return None
    mean = _mean_of(parts)
    interval = bootstrap(mean, len(parts), seed=seed, confidence=confidence, groups=groups)
    if interval is None:
        return None
    units = parts if groups is None else np.bincount(groups, weights=parts) / np.bincount(groups)
    seen = int(np.count_nonzero(units))
    if seen < FEW_CHANGES:
        more = share_interval(seen, len(units), confidence).high - seen / len(units)
        return replace(interval, high=max(interval.high, interval.value + more * float(units.max())))
    furthest = interval.value + _WIDEST * (interval.high - interval.value)
    return replace(interval, high=max(interval.high, min(furthest, _lognormal_end(units, confidence))))


def _lognormal_end(units: F64, confidence: float) -> float:
    from scipy.special import stdtrit

    logs = np.log(np.maximum(units, _FLOOR * units.mean()))
    count, variance = len(logs), float(logs.var(ddof=1))
    error = math.sqrt(variance / count + variance**2 / (2 * (count - 1)))
    return math.exp(float(logs.mean()) + variance / 2 + float(stdtrit(count - 1, confidence)) * error)


# ------------------------------------------------------------------------------------------------------ of the text


def measure_text(gate: Gate, tokens: Tokens, *, seed: int, groups: NDArray[np.int64] | None) -> TaskResult:
    """One of TEXT_METRICS: what the candidate loses against the baseline on the same tokens.

    `perplexity`: exp(mean of -ln p over all tokens); the loss is the candidate's over the baseline's, less 1.
    `token_accuracy`: the share of the text's tokens that are the likeliest. Intervals draw prompts, the same of both.
    Where fewer than 10 prompts changed at all, so many more may have as the others can't rule out.

    Raises:
        NotMeasurableError: There are no labels of tokens, or too few prompts for an interval that is asked for.
    """
    kept = tokens.count > 0
    groups = None if groups is None else np.unique(groups[kept], return_inverse=True)[1].astype(np.int64)
    confidence = SHOWN_CONFIDENCE if gate.confidence is None else gate.confidence
    relative = gate.options.get("drop") == "max_relative_drop"
    loss = _perplexity(tokens, kept) if gate.metric == "perplexity" else _accuracy(tokens, kept, relative=relative)
    number = len(loss.lost)
    value = float(loss.of(np.ones((1, number)))[0])
    if loss.means is not None:
        interval = means_interval(loss.means, seed=seed, confidence=confidence, groups=groups)
    else:
        interval = bootstrap(loss.of, number, seed=seed, confidence=confidence, groups=groups)
    if interval is None and gate.confidence is not None:
        raise NotMeasurableError(f"{number} prompts are too few to put an interval around {gate.metric}")
    needed = None
    if interval is not None:
        changed, units = _changed(np.abs(loss.lost) > loss.apart, groups)
        if changed < FEW_CHANGES:
            more = (share_interval(changed, units, confidence).high - changed / units) * loss.worst
            interval = replace(interval, low=interval.low - more, high=interval.high + more)
            needed = samples_for_drop(gate.limit / loss.worst, confidence) if gate.metric == "token_accuracy" else None
    note = f"over {int(tokens.count.sum()):,} tokens"
    return TaskResult(loss.candidate, loss.baseline, value, interval, _spread(kept, loss.lost), note, needed)


@dataclass(frozen=True)
class _Loss:
    """What is lost of the text.

    Attributes:
        candidate, baseline: The metric's own values.
        of: What the gate compares with its limit, as a function of the prompts' weights.
        lost: `[prompts]`: what each loses per token; 0 where nothing changed.
        worst: What a whole share of prompts of 1 that change can cost at most, as far as it is known.
        apart: A prompt that loses more, or gains it, has changed.
        means: The same as a function of means, where a prompt may lose any amount; None where no prompt can decide it
            by itself.
    """

    candidate: float
    baseline: float
    of: Statistic
    lost: F64
    worst: float
    apart: float
    means: Means | None = None


def _perplexity(tokens: Tokens, kept: NDArray[np.bool_]) -> _Loss:
    if tokens.loss is None or tokens.base_loss is None:
        raise NotMeasurableError(_NO_TEXT)
    counts, own, base = tokens.count[kept], tokens.loss[kept], tokens.base_loss[kept]
    if not np.isfinite(base).all():
        raise NotMeasurableError("the original gives a token of the text no probability: its perplexity is infinite")
    with np.errstate(over="ignore"):
        candidate, baseline = (float(np.exp(side.sum() / counts.sum())) for side in (own, base))

    def increase(means: F64) -> F64:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(np.expm1(means[:, 0] / means[:, 1]))

    def slopes(means: F64) -> F64:
        rise = (increase(means) + 1) / means[:, 1]
        return np.stack([rise, -rise * means[:, 0] / means[:, 1]], axis=1)

    means = Means(np.stack([own - base, counts], axis=1), increase, slopes)
    # A text has no worst loss: as far as the worst prompt that was seen.
    lost = (own - base) / counts
    return _Loss(candidate, baseline, means.weighted, lost, float(np.expm1(np.abs(lost).max())), 0.0, means)


def _accuracy(tokens: Tokens, kept: NDArray[np.bool_], *, relative: bool) -> _Loss:
    if tokens.right is None or tokens.base_right is None:
        raise NotMeasurableError(_NO_TEXT)
    counts, own, base = tokens.count[kept], tokens.right[kept], tokens.base_right[kept]
    baseline = float(base.sum() / counts.sum())
    if relative and baseline == 0:
        raise NotMeasurableError("the baseline gets no token right, of which there is no share")

    def drop(weights: F64) -> F64:
        of = weights @ base if relative else weights @ counts
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((weights @ (base - own)) / of)

    worst = 1 / baseline if relative else 1.0
    return _Loss(float(own.sum() / counts.sum()), baseline, drop, (base - own) / counts, worst, FAR)


_NO_TEXT = "it needs the text's own tokens as labels, whole numbers [prompts, new tokens]"


def _changed(changed: NDArray[np.bool_], groups: NDArray[np.int64] | None) -> tuple[int, int]:
    """Prompts, or groups of them, of which something changed, and of how many."""
    if groups is None:
        return int(changed.sum()), len(changed)
    return len(np.unique(groups[changed])), int(groups.max()) + 1


def _mean_of(parts: F64) -> Statistic:
    return lambda weights: np.asarray(weights @ parts / weights.sum(axis=1))


def _spread(kept: NDArray[np.bool_], values: F64) -> F64:
    """`[prompts]`, with 0 for those that have no token to look at."""
    spread = np.zeros(len(kept))
    spread[kept] = values
    return spread


def _ends(interval: Interval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)
