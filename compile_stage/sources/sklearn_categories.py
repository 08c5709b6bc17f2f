"""Histogram gradient boosting with `categorical_features`: its splits on sets of categories, as ONNX's trees have them.

skl2onnx reads each split as one on a threshold. ONNX has no split on a set that every version of ONNX Runtime runs; a
set becomes as many nodes as it has categories, each of which compares one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_CLASSIFIER, _REGRESSOR = "HistGradientBoostingClassifier", "HistGradientBoostingRegressor"


def refuse_categories(estimator: Any) -> str | None:
    """The reason when a model's categories are no numbers, or numbers that float32 rounds."""
    import numpy as np

    for part in _of_categories(estimator):
        for known in _encoder(part).categories_:
            if np.asarray(known).dtype.kind not in "biuf":
                return (
                    f"categories of its {type(part).__name__} are no numbers: number them in a step before it "
                    "(OrdinalEncoder with handle_unknown='use_encoded_value', unknown_value=-1, in a "
                    "ColumnTransformer), and name these columns by their place in categorical_features"
                )
            numbers = _numbers(known)
            if np.any(numbers.astype(np.float32) != numbers):
                return (
                    f"its {type(part).__name__} knows categories that float32 rounds: number them from 0 on in a step "
                    "before it (OrdinalEncoder)"
                )
    return None


def register_category_converters(estimator: Any) -> None:
    """Have skl2onnx write the nodes of `compared_one_by_one` as comparisons with a category."""
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import (
        calculate_linear_classifier_output_shapes,
        calculate_linear_regressor_output_shapes,
    )

    for kind in {type(part) for part in _of_categories(estimator)}:
        classifies = kind.__name__ == _CLASSIFIER
        options: dict[str, Any] = {"raw_scores": [True, False]}
        if classifies:
            options |= {"zipmap": [True, False, "columns"], "nocl": [True, False], "output_class_labels": [False, True]}
        update_registered_converter(
            kind,
            f"CompileStage{kind.__name__}",
            calculate_linear_classifier_output_shapes if classifies else calculate_linear_regressor_output_shapes,
            _convert,
            options=options,
        )


@contextmanager
def compared_one_by_one(estimator: Any) -> Iterator[None]:
    """Each split on a set of categories is a chain of nodes that compare one, in the columns of the input. What the
    chain leaves over is what the set does not hold, and what goes its way: missing and unknown categories."""
    changed = [
        (tree, tree.nodes, _unfolded(part, tree))
        for part in _of_categories(estimator)
        for trees in part._predictors
        for tree in trees
    ]
    for tree, _, unfolded in changed:
        tree.nodes = unfolded
    try:
        yield
    finally:
        for tree, before, _ in changed:
            tree.nodes = before


def _of_categories(estimator: Any) -> Iterator[Any]:
    for part in parts(estimator):
        fitted = type(part).__name__ in (_CLASSIFIER, _REGRESSOR) and hasattr(part, "_predictors")
        if fitted and part.is_categorical_ is not None and part.is_categorical_.any():
            yield part


def _encoder(part: Any) -> Any:
    return part._preprocessor.named_transformers_["encoder"]


def _numbers(known: Any) -> Array:
    """The categories of a column without the missing one, in the order of their codes: float64 [categories]."""
    import numpy as np

    numbers: Array = np.asarray(known, np.float64)
    return numbers[~np.isnan(numbers)]


def _unfolded(part: Any, tree: Any) -> Array:
    """The tree's nodes, with those that were added at the end. `left` is where an equal number goes."""
    import numpy as np

    # It puts the columns of categories first.
    columns = np.concatenate([np.flatnonzero(part.is_categorical_), np.flatnonzero(~part.is_categorical_)])
    known = [_numbers(values) for values in _encoder(part).categories_]
    nodes = tree.nodes.copy()
    added: list[Any] = []
    for place in np.flatnonzero(tree.nodes["is_leaf"] == 0):
        node = nodes[place]
        codes = known[node["feature_idx"]] if node["is_categorical"] else None
        node["feature_idx"] = columns[node["feature_idx"]]
        if codes is None:
            continue
        words = tree.raw_left_cat_bitsets[node["bitset_idx"]]
        goes_left = np.array([bool(words[code // 32] >> (code % 32) & 1) for code in range(len(codes))])
        rest, compared = node["right"], node["left"]
        if node["missing_go_to_left"]:
            rest, compared, goes_left = compared, rest, ~goes_left
        values = codes[goes_left]
        if not len(values):
            values, compared = codes[:1], rest
        node["missing_go_to_left"], node["left"] = 0, compared
        chain = [node, *(node.copy() for _ in values[1:])]
        for at, (link, value) in enumerate(zip(chain, values, strict=True)):
            link["num_threshold"] = value
            link["right"] = rest if at == len(chain) - 1 else len(nodes) + len(added) + at
        added += chain[1:]
    return np.concatenate([nodes, np.array(added, nodes.dtype)]) if added else nodes


def _convert(scope: Any, operator: Any, container: Any) -> None:
    import numpy as np
    from skl2onnx.operator_converters.random_forest import (
        convert_sklearn_random_forest_classifier,
        convert_sklearn_random_forest_regressor_converter,
    )

    model = operator.raw_operator
    classifies = type(model).__name__ == _CLASSIFIER
    written = len(container.nodes)
    if classifies:
        convert_sklearn_random_forest_classifier(scope, operator, container, op_version=1)
    else:
        convert_sklearn_random_forest_regressor_converter(scope, operator, container, op_version=1)
    by_category = np.concatenate([tree.nodes["is_categorical"] for trees in model._predictors for tree in trees])
    for node in container.nodes[written:]:
        for entry in node.attribute if node.op_type.startswith("TreeEnsemble") else ():
            if entry.name == "nodes_modes":
                for place in np.flatnonzero(by_category):
                    entry.strings[place] = b"BRANCH_EQ"
