"""Which way scikit-learn's trees send a missing number (NaN), written into their ONNX.

A split sends a NaN to the left or to the right as it was learned, and where no NaN was seen, to where more samples went
(scikit-learn 1.3 and later). ONNX has a place for it, `nodes_missing_value_tracks_true`, that skl2onnx fills for
histogram gradient boosting alone: each NaN would go to the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from compile_stage.sources.sklearn_parts import is_tree, parts

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compile_stage.core.tensors import Array

_LEAF = b"LEAF"
_NEAR = 1e-5  # relative; thresholds are float64 in scikit-learn and float32 in ONNX


def write_missing_directions(model: ModelProto, estimator: Any) -> None:
    """Have each tree of the graph send a NaN where the fitted tree sends it. A tree that is none of the estimator's is
    left as it is: whether a NaN is then answered as by the original is compared later (`measure.missing`).

    Args:
        model: As skl2onnx made it of the estimator.
    """
    fitted: dict[int, list[Any]] = {}  # by their number of nodes
    for tree in filter(is_tree, parts(estimator)):
        if np.any(_goes_left(tree)):
            fitted.setdefault(tree.node_count, []).append(tree)
    if not fitted:
        return
    for node in model.graph.node:
        if node.domain == "ai.onnx.ml" and node.op_type in ("TreeEnsembleClassifier", "TreeEnsembleRegressor"):
            _write(node, fitted)


def _write(node: NodeProto, fitted: Mapping[int, Sequence[Any]]) -> None:
    named = {entry.name: entry for entry in node.attribute}
    directions = named["nodes_missing_value_tracks_true"].ints
    if any(directions):  # the converter knew
        return
    # Read once: all trees of a forest are in one node, whose lists have an element for each of their nodes.
    nodes = _Nodes(
        ids=np.asarray(named["nodes_nodeids"].ints),
        splits=np.array([mode != _LEAF for mode in named["nodes_modes"].strings]),
        features=np.asarray(named["nodes_featureids"].ints),
        left=np.asarray(named["nodes_truenodeids"].ints),
        thresholds=np.asarray(named["nodes_values"].floats),
    )
    of_tree, written = np.asarray(named["nodes_treeids"].ints), np.zeros(len(directions), np.int64)
    for number in np.unique(of_tree):
        places = np.flatnonzero(of_tree == number)
        if (tree := _same(nodes, places, fitted.get(len(places), ()))) is not None:
            written[places] = _goes_left(tree)
    directions[:] = written.tolist()


class _Nodes(NamedTuple):
    """All nodes of an ensemble, as `[nodes]`: the number within the tree, whether it splits, and by what."""

    ids: Array
    splits: Array
    features: Array
    left: Array
    thresholds: Array


def _same(nodes: _Nodes, places: Array, fitted: Sequence[Any]) -> Any:
    """Which of the fitted trees, each of as many nodes, those at these places were made of; None where there is none.
    Trees are found by their splits, since an estimator may hold them in any of its attributes."""
    if nodes.ids[places[0]] != 0:
        return None
    splits = nodes.splits[places]
    features, left, thresholds = (held[places][splits] for held in (nodes.features, nodes.left, nodes.thresholds))
    for tree in fitted:
        if (
            np.array_equal(tree.children_left >= 0, splits)
            and np.array_equal(tree.feature[splits], features)
            and np.array_equal(tree.children_left[splits], left)
            and np.allclose(tree.threshold[splits], thresholds, rtol=_NEAR, atol=1e-30)
        ):
            return tree
    return None


def _goes_left(tree: Any) -> Array:
    """For each node whether a NaN goes to the left; at leaves 0."""
    said: Array = np.asarray(getattr(tree, "missing_go_to_left", np.zeros(tree.node_count)), np.int64)
    return np.where(tree.children_left >= 0, said, 0)
