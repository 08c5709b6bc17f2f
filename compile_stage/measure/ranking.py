"""Metrics of rankings: rank correlation (Spearman) and normalised discounted cumulative gain (nDCG@k).

Where the lists to rank come from:

- labels `[n, k]` and scores `[n, k]`: each sample is a query with a list of k items; a label below 0 is padding;
- labels `[n]`, one score for each sample, and queries (`data.queries`): the samples of a query are its list;
- labels `[n]`, embeddings `[n, d]`, and queries: the score of a sample is the cosine of its embedding with that of the
  query's first sample, which is the query itself and is not ranked. Pairs of texts are queries of two samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.stats import Statistic
from compile_stage.measure.task_intervals import FAR, Score, far_apart

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array

K = 10
"""As BEIR and MS MARCO report it."""


@dataclass(frozen=True)
class _Ranked:
    """Items to be ranked; all arrays are `[items]`.

    Attributes:
        sample: Which of the `count` samples an item belongs to.
        query: Numbered from 0; all 0 where there are no queries.
    """

    truth: F64
    scores: F64
    sample: NDArray[np.int64]
    query: NDArray[np.int64]
    count: int

    def lists(self) -> list[NDArray[np.int64]]:
        """The items of each query that has at least two, in order."""
        order = np.argsort(self.query, kind="stable")
        starts = np.flatnonzero(np.diff(self.query[order], prepend=-1))
        return [items for items in np.split(order, starts[1:]) if len(items) > 1]


def ranking(metric: str, truth: Array, output: Array, options: JsonMap, groups: NDArray[np.int64] | None) -> Score:
    """`spearman` or `ndcg` of one model. Raises NotMeasurableError.

    Args:
        truth: `[n]` or `[n, k]`: the larger, the further up.
        output: `[n]`, `[n, k]` or embeddings `[n, d]`.
        groups: `[n]`, numbered from 0: the query of each sample, if there are queries.
    """
    ranked = _ranked(metric, truth, output, groups)
    if _is_by_query(metric, truth, options):
        return _by_query(metric, ranked, int(options.get("k", K)))
    return _spearman(ranked)


def ranked_lists(
    metric: str, truth: Array, output: Array, options: JsonMap, groups: NDArray[np.int64] | None
) -> list[tuple[F64, F64]]:
    """The same as sums over the items of each list that is ranked: what the labels bring, and by how much each item's
    place counts, both `[items]`. The metric is the mean of these sums over the lists; arguments as for `ranking`."""
    ranked = _ranked(metric, truth, output, groups)
    if not _is_by_query(metric, truth, options):
        return [(_standard(ranked.truth), _standard(ranked.scores) / len(ranked.truth))]
    lists = []
    for items in _with_order(metric, ranked):
        labels, scores = ranked.truth[items], ranked.scores[items]
        if metric == "spearman":
            lists.append((_standard(labels), _standard(scores) / len(items)))
            continue
        counts = np.where(np.arange(len(items)) < int(options.get("k", K)), 1 / np.log2(np.arange(len(items)) + 2), 0.0)
        ideal = float(np.sort(labels)[::-1] @ counts)
        order, tie = np.argsort(-scores, kind="stable"), np.unique(-scores, return_inverse=True)[1]
        of_ties = np.bincount(tie[order], weights=counts) / np.bincount(tie)
        lists.append((labels, of_ties[tie] / ideal))
    return lists


def _is_by_query(metric: str, truth: Array, options: JsonMap) -> bool:
    return metric == "ndcg" or truth.ndim == 2 or bool(options.get("per_query"))


def _ranked(metric: str, truth: Array, output: Array, groups: NDArray[np.int64] | None) -> _Ranked:
    if output.dtype.kind not in "iuf":
        raise NotMeasurableError(f"{metric} compares numbers, and the output is {output.dtype}")
    count, values = len(truth), output.astype(np.float64)
    own = np.arange(count)
    if not bool(np.isfinite(values).all()):
        raise NotMeasurableError("some scores are NaN or infinite, so there is no order")
    if truth.ndim == 2:
        if values.shape != truth.shape:
            raise NotMeasurableError(f"labels are {list(truth.shape)} and scores {list(values.shape)}")
        used = (truth.astype(np.float64) >= 0).ravel() if metric == "ndcg" else np.ones(truth.size, dtype=bool)
        sample = np.repeat(own, truth.shape[1])[used]
        return _Ranked(truth.ravel()[used].astype(np.float64), values.ravel()[used], sample, sample, count)
    query = np.zeros(count, dtype=np.int64) if groups is None else groups
    known = truth.astype(np.float64)
    if values.ndim == 1:
        return _Ranked(known, values, own, query, count)
    if values.ndim != 2 or groups is None:
        needs = (
            "name the column that says which belong together as data.queries" if values.ndim == 2 else "none is read"
        )
        raise NotMeasurableError(f"the output is {list(values.shape)}: one score is read for each sample; {needs}")
    first = np.unique(groups, return_index=True)[1]
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    unit = values / np.where(lengths > 0, lengths, 1)
    rest = np.setdiff1d(own, first)
    cosine = np.einsum("nd,nd->n", unit[rest], unit[first[groups[rest]]])
    return _Ranked(known[rest], cosine, rest, groups[rest], count)


# ------------------------------------------------------------------------------------------------------------ by query


def _by_query(metric: str, ranked: _Ranked, k: int) -> Score:
    """The mean over the queries. Those whose labels have no order, and for ndcg those without a relevant item, are left
    out, of both models alike."""
    values, samples = [], []
    for items in _with_order(metric, ranked):
        truth = ranked.truth[items]
        values.append(_ndcg(truth, ranked.scores[items], k) if metric == "ndcg" else _rho(truth, ranked.scores[items]))
        samples.append(ranked.sample[items[0]])
    of_query, first = np.array(values), np.array(samples)

    def of(weights: F64) -> F64:
        drawn = weights[:, first]
        total = drawn.sum(axis=1)
        return np.asarray(drawn @ of_query / np.where(total > 0, total, np.nan))

    # A query may lose all that it has, and for a correlation as much again.
    worst = float(of_query.max()) + (1.0 if metric == "spearman" else 0.0)
    answers = np.zeros(ranked.count)
    answers[first] = of_query
    return Score(float(of_query.mean()), of, None, answers, worst / ranked.count, FAR * worst)


def _with_order(metric: str, ranked: _Ranked) -> list[NDArray[np.int64]]:
    """The items of each query whose labels have an order, and for ndcg a relevant item."""
    lists = [items for items in ranked.lists() if np.ptp(ranked.truth[items]) > 0]
    lists = [items for items in lists if metric != "ndcg" or ranked.truth[items].max() > 0]
    if not lists:
        raise NotMeasurableError("no query has two items with different labels, so there is nothing to rank")
    return lists


def _ndcg(truth: F64, scores: F64, k: int) -> float:
    """scikit-learn's: gains are the labels themselves, ties are averaged."""
    from sklearn.metrics import ndcg_score

    if truth.min() < 0:
        raise NotMeasurableError("ndcg needs relevances of 0 and more")
    return float(ndcg_score(truth[None], scores[None], k=k))


def _rho(truth: F64, scores: F64) -> float:
    """SciPy's; 0 for a constant answer, which ranks nothing."""
    from scipy.stats import spearmanr

    return float(spearmanr(truth, scores).statistic) if np.ptp(scores) > 0 else 0.0


# --------------------------------------------------------------------------------------------------------- all at once


def _spearman(ranked: _Ranked) -> Score:
    if len(ranked.truth) < 3 or np.ptp(ranked.truth) == 0:
        raise NotMeasurableError("spearman needs at least three samples, and labels that differ")
    truth, scores = _ranks(ranked.truth), _ranks(ranked.scores)

    def of(weights: F64) -> F64:
        drawn = weights[:, ranked.sample]
        x, y = truth(drawn), scores(drawn)
        total = drawn.sum(axis=1, keepdims=True)
        x, y = (v - (drawn * v).sum(axis=1, keepdims=True) / np.where(total > 0, total, np.nan) for v in (x, y))
        scale = np.sqrt((drawn * x * x).sum(axis=1) * (drawn * y * y).sum(axis=1))
        known = (drawn * x * x).sum(axis=1) > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            rho = np.where(scale > 0, (drawn * x * y).sum(axis=1) / scale, 0.0)
        return np.where(known, rho, np.nan)

    value = _rho(ranked.truth, ranked.scores)
    places, parts = np.zeros((2, ranked.count))
    places[ranked.sample] = _standard(ranked.scores)
    parts[ranked.sample] = -_standard(ranked.truth) * _standard(ranked.scores) / len(ranked.truth)
    # A ruined answer has the place of another item, which tells nothing of its own.
    return Score(value, of, None, places, max(value, 0.0) / len(ranked.truth), far_apart(places), parts)


def _standard(values: F64) -> F64:
    """Ranks with mean 0 and standard deviation 1, whose mean product is the rank correlation."""
    from scipy.stats import rankdata

    ranks = rankdata(values)
    spread = float(ranks.std())
    return np.asarray((ranks - ranks.mean()) / (spread if spread > 0 else 1.0))


def _ranks(values: F64) -> Statistic:
    """`[resamples, n]` weights → the mean rank of each value among the resampled ones."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=-np.inf) > 0)
    tie = np.empty(len(values), dtype=np.int64)
    tie[order] = np.repeat(np.arange(len(starts)), np.diff([*starts, len(values)]))

    def of(weights: F64) -> F64:
        sums = np.add.reduceat(weights[:, order], starts, axis=1)
        middle = np.cumsum(sums, axis=1) - sums / 2 + 0.5
        return np.asarray(middle[:, tie])

    return of
