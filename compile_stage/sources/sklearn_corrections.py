"""Where skl2onnx refuses what it can convert, or converts it to other answers than scikit-learn's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import SourceError
from compile_stage.sources import tabular
from compile_stage.sources.graph import put_behind
from compile_stage.sources.known_categories import column_parts
from compile_stage.sources.sklearn_parts import is_tree, parts

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compile_stage.core.tensors import Array

_FUNCTIONS, _OTHER_COUNTS = "functions that no backend has", "a graph that fails where rows differ in their neighbours"
_RUNS_NOWHERE = {  # kind of step: what its graph is, and what to take instead
    # They also fail for a row without any number.
    "KNNImputer": (_FUNCTIONS, "use a SimpleImputer, or fill missing numbers in before the model"),
    "GaussianProcessClassifier": (_FUNCTIONS, "use an SVC with probability=True, or a LogisticRegression"),
    "RadiusNeighborsClassifier": (_OTHER_COUNTS, "use a KNeighborsClassifier"),
    "RadiusNeighborsRegressor": (_OTHER_COUNTS, "use a KNeighborsRegressor"),
}
_SCALERS = ("StandardScaler", "RobustScaler", "MaxAbsScaler")
_WITHOUT_SCALE = {"StandardScaler": "with_std", "RobustScaler": "with_scaling"}
"""Scalers that may only subtract, and what says so."""


_HANDING_ON = (
    *("_BinMapper", "ColumnTransformer", "FeatureUnion", "MissingIndicator", "OneHotEncoder", "OrdinalEncoder"),
    *("Pipeline", "SimpleImputer", "StackingClassifier", "StackingRegressor", "TargetEncoder", "VotingClassifier"),
    "VotingRegressor",
)
"""Steps that give columns on as they are, or numbers of categories."""


def prepare(estimator: Any) -> None:
    """Change what changes no answer of a fitted model, and what skl2onnx refuses or gets wrong: defaults of two
    estimators, a list of weights, and what is wrapped around a fitted model."""
    held_parts = list(parts(estimator))
    trees = has_thresholds(held_parts)
    for part in held_parts:
        for name, held in list(getattr(part, "__dict__", {}).items()):
            if isinstance(held, list):
                held[:] = [thawed(item) for item in held]
            elif held is not thawed(held):
                setattr(part, name, thawed(held))
        kind, classes = type(part).__name__, getattr(part, "__dict__", {}).get("classes_")
        if isinstance(classes, np.ndarray) and classes.dtype.kind in "iu":
            part.classes_ = classes.astype(np.int64)  # converters take unsigned numbers for texts
        if kind == "VotingClassifier" and hasattr(part, "estimators_"):
            part.flatten_transform = False  # the form of transform(), which is not called
        if (
            kind in ("VotingClassifier", "VotingRegressor")
            and part.weights is not None
            and hasattr(part, "estimators_")
        ):
            # skl2onnx takes the weights of the first voters where one of them is dropped
            part.weights = np.asarray(part._weights_not_none)
            part.estimators = [(name, voter) for name, voter in part.estimators if not isinstance(voter, str)]
        if (
            trees
            and kind in _WITHOUT_SCALE
            and hasattr(part, "n_features_in_")
            and not getattr(part, _WITHOUT_SCALE[kind])
        ):
            # skl2onnx writes no division then, and subtracts in float32, which rounds before thresholds.
            setattr(part, _WITHOUT_SCALE[kind], True)
            part.scale_ = np.ones(part.n_features_in_)
        if kind == "KBinsDiscretizer" and part.encode == "onehot":
            part.encode = "onehot-dense"  # ONNX has no sparse tensors; the fitted encoder stays as it is


def refuse_what_runs_nowhere(estimator: Any) -> str | None:
    """The reason when skl2onnx's graph of a step runs in no backend."""
    for part in parts(estimator):
        if (found := _RUNS_NOWHERE.get(kind := type(part).__name__)) is not None:
            wrong, advice = found
            return f"skl2onnx converts its {kind} to {wrong}: {advice}"
    return None


def scalers_before_trees(estimator: Any, *, is_given_float32: bool) -> dict[int, dict[str, str]]:
    """Options of skl2onnx by the id of the scaler that they are for: compute in the type that scikit-learn computes in,
    and divide as it does, where the model has trees or bins. Many thresholds are values of the training data, and one
    of these that is rounded otherwise goes the other way."""
    held = list(parts(estimator))
    trees, how = has_thresholds(held), "div" if is_given_float32 else "div_cast"
    return {id(part): {"div": how} for part in held if trees and type(part).__name__ in _SCALERS}


def has_thresholds(held: Sequence[Any]) -> bool:
    """Whether one of these parts compares numbers with thresholds."""
    kinds = ("TreePredictor", "Booster", "KBinsDiscretizer", "Binarizer")
    return any(is_tree(part) or type(part).__name__ in kinds for part in held)


def scale_exactly(model: ModelProto, estimator: Any, *, is_given_float32: bool) -> None:
    """Have each MinMaxScaler before trees or bins compute in float64, as scikit-learn does, and round both of its steps
    where it is given float32. What `scalers_before_trees` asks of the others is no option of this one."""
    from onnx import numpy_helper

    held = list(parts(estimator))
    scalers = [part for part in held if type(part).__name__ == "MinMaxScaler" and hasattr(part, "scale_")]
    constants = {tensor.name: numpy_helper.to_array(tensor).ravel() for tensor in model.graph.initializer}
    users = {name: node for node in model.graph.node for name in node.input[:1]}
    for product in [node for node in model.graph.node if node.op_type == "Mul"] if has_thresholds(held) else ():
        total = users.get(product.output[0])
        if total is None or total.op_type != "Add" or not {product.input[1], total.input[1]} <= constants.keys():
            continue
        for part in scalers:
            steps = ((product, part.scale_), (total, part.min_))
            found = [np.array_equal(constants[node.input[1]], exact.astype(np.float32)) for node, exact in steps]
            if all(found) and part.scale_.dtype == np.float64:
                _compute_in_float64(model, steps, rounds_each=is_given_float32)
                break


def _compute_in_float64(model: ModelProto, steps: Sequence[tuple[NodeProto, Array]], *, rounds_each: bool) -> None:
    """Of nodes that take each other's answer and a constant: casts around each, or around all of them."""
    from onnx import TensorProto, helper, numpy_helper

    last = len(steps) - 1
    for place, (node, exact) in enumerate(steps):
        given, answer = node.input[0], node.output[0]
        node.input[1] = f"{answer}_exact"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(exact, np.float64), node.input[1]))
        if place == 0 or rounds_each:
            node.input[0] = f"{answer}_given"
            cast = helper.make_node("Cast", [given], [node.input[0]], name=node.input[0], to=TensorProto.DOUBLE)
            model.graph.node.insert(list(model.graph.node).index(node), cast)
        if place == last or rounds_each:
            node.output[0] = f"{answer}_wide"
            put_behind(
                model,
                node,
                [helper.make_node("Cast", [node.output[0]], [answer], name=node.output[0], to=TensorProto.FLOAT)],
            )


def keep_means(model: ModelProto, estimator: Any) -> None:
    """Write the means of scalers that compute in float64 as they are: skl2onnx rounds them to float32."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    scalers = [part for part in parts(estimator) if type(part).__name__ in _SCALERS]
    for node in [one for one in model.graph.node if one.op_type == "Div" and one.input[1] in tensors]:
        subtraction = makers.get(node.input[0])
        if subtraction is None or subtraction.op_type != "Sub" or subtraction.input[1] not in tensors:
            continue
        scale, written = (numpy_helper.to_array(tensors[one.input[1]]) for one in (node, subtraction))
        for part in scalers:
            mean = getattr(part, "mean_", getattr(part, "center_", None))
            if mean is None or scale.dtype != np.float64 or not np.array_equal(part.scale_, scale.ravel()):
                continue
            if np.array_equal(mean.astype(np.float32), written.ravel()):
                exact = numpy_helper.from_array(mean.reshape(written.shape), subtraction.input[1])
                tensors[subtraction.input[1]].CopyFrom(exact)
                break


@contextmanager
def thresholds_in_float32(estimator: Any, *, is_given_float32: bool) -> Iterator[None]:
    """Give histogram gradient boosting, which compares in float64, thresholds that float32 holds. Where a step before
    it computes, the number at a threshold is none that is given, and float32 rounds both to the nearest."""
    held = list(parts(estimator))
    computes = any(hasattr(type(part), "transform") and type(part).__name__ not in _HANDING_ON for part in held)
    rounds = not computes or is_given_float32
    trees = [part for part in held if type(part).__name__ == "TreePredictor" and rounds]
    before = [tree.nodes for tree in trees]
    for tree in trees:
        tree.nodes = tree.nodes.copy()
        exact = tree.nodes["num_threshold"]
        tree.nodes["num_threshold"] = tabular.thresholds_in_float32(exact, is_given_float32=is_given_float32)
    try:
        yield
    finally:
        for tree, nodes in zip(trees, before, strict=True):
            tree.nodes = nodes


@contextmanager
def columns_by_number(estimator: Any) -> Iterator[None]:
    """Each ColumnTransformer in it picks its columns by number. Only in a pipeline does skl2onnx take columns by name;
    ensembles, calibrations and the like have one matrix there."""
    pickers = [part for part in parts(estimator) if hasattr(part, "transformers_")]
    by_name = [picker.transformers_ for picker in pickers]
    for picker in pickers:
        picker.transformers_ = column_parts(picker, range(picker.n_features_in_))
    try:
        yield
    finally:
        for picker, transformers in zip(pickers, by_name, strict=True):
            picker.transformers_ = transformers


def last_step(estimator: Any) -> Any:
    """Of a pipeline, and of pipelines in it, the model at the end; else the estimator itself."""
    while hasattr(estimator := thawed(estimator), "steps"):
        estimator = estimator.steps[-1][1]
    return estimator


def without_search(estimator: Any) -> Any:
    """The model that a search (GridSearchCV, RandomizedSearchCV) found and answers with; else the estimator itself."""
    return getattr(estimator, "best_estimator_", estimator)


def thawed(value: Any) -> Any:
    """What a FrozenEstimator or a search is wrapped around; else the value itself."""
    return value.estimator if type(value).__name__ == "FrozenEstimator" else without_search(value)


def count_votes(model: ModelProto, estimator: Any) -> None:
    """Have each forest of classifiers add up its trees' answers, and divide once.

    skl2onnx divides in each leaf, in float32: ten times 1/20 are 0.50000006. Where as many trees say one class as the
    other, scikit-learn answers the first class, and the graph gave the second.
    """
    forests = {
        (len(part.estimators_), sum(inner.tree_.node_count for inner in part.estimators_))
        for part in parts(estimator)
        if type(part).__name__ in ("RandomForestClassifier", "ExtraTreesClassifier") and hasattr(part, "estimators_")
    }
    for node in list(model.graph.node):
        if node.op_type == "TreeEnsembleClassifier" and node.domain == "ai.onnx.ml":
            named = {entry.name: entry for entry in node.attribute}
            trees = len(set(named["nodes_treeids"].ints))
            if (trees, len(named["nodes_nodeids"].ints)) in forests:
                _count_votes(model, node, named, trees)


def _count_votes(model: ModelProto, node: NodeProto, named: Mapping[str, Any], trees: int) -> None:
    from onnx import helper, numpy_helper

    weights = named["class_weights"].floats
    votes = (np.asarray(weights, np.float64) * trees).astype(np.float32)
    label, probabilities = node.output
    counted = f"{probabilities}_votes"
    behind = [helper.make_node("Div", [counted, f"{counted}_most"], [probabilities], name=f"{counted}_mean")]
    constants: dict[str, Array] = {f"{counted}_most": np.asarray(trees, np.float32)}
    if (classes := _two_classes(named)) is not None:
        # The second class alone is written, under the number of the first, and the runtime takes 1 less its sum for
        # the other. The label is the second where the sum is above 0.5, which counted votes are not held against.
        for key in ("class_treeids", "class_nodeids"):
            named[key].ints[:] = np.repeat(named[key].ints, 2).tolist()
        named["class_ids"].ints[:] = [0, 1] * len(votes)
        votes = np.column_stack([np.float32(1) - votes, votes]).ravel()
        constants[f"{counted}_classes"] = classes
        behind += [
            helper.make_node("ArgMax", [counted], [f"{counted}_first"], name=f"{counted}_argmax", axis=1, keepdims=0),
            helper.make_node("Gather", [f"{counted}_classes", f"{counted}_first"], [label], name=f"{counted}_label"),
        ]
        node.output[0] = f"{label}_by_half"
    weights[:] = votes.tolist()
    node.output[1] = counted
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    put_behind(model, node, behind)


def _two_classes(named: Mapping[str, Any]) -> Array | None:
    """The labels of an ensemble that says for each leaf how likely the second of two classes is; None of others."""
    numbers, texts = (named.get(f"classlabels_{kind}") for kind in ("int64s", "strings"))
    if set(named["class_ids"].ints) != {0}:
        return None
    labels = (
        np.asarray(numbers.ints, np.int64)
        if numbers is not None
        else np.asarray([text.decode() for text in texts.strings], object)
        if texts is not None
        else np.empty(0)
    )
    return labels if len(labels) == 2 else None


def keep_fractions(model: ModelProto) -> None:
    """Have each one-hot encoder of whole numbers know no number between two of them. skl2onnx cuts the fraction off:
    3.5 would be answered as category 3, which the original takes for an unknown one."""
    from onnx import TensorProto, helper, numpy_helper

    makers = {output: node for node in model.graph.node for output in node.output}
    for node in [one for one in model.graph.node if one.op_type == "OneHotEncoder"]:
        known = next((list(entry.ints) for entry in node.attribute if entry.name == "cats_int64s"), [])
        cut = makers.get(node.input[0])
        if not known or cut is None or cut.op_type != "Cast":
            continue
        whole, name = node.input[0], f"{node.output[0]}_whole"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(max(known) + 1, np.int64), f"{name}_unknown"))
        checks = [
            helper.make_node("Cast", [cut.input[0]], [f"{name}_given"], name=f"{name}_given", to=TensorProto.FLOAT),
            helper.make_node("Cast", [whole], [f"{name}_back"], name=f"{name}_back", to=TensorProto.FLOAT),
            helper.make_node("Equal", [f"{name}_given", f"{name}_back"], [f"{name}_same"], name=f"{name}_same"),
            helper.make_node("Where", [f"{name}_same", whole, f"{name}_unknown"], [name], name=name),
        ]
        node.input[0] = name
        put_behind(model, cut, checks)


def divide_by_magnitude(model: ModelProto) -> None:
    """Have each Normalizer(norm='max') divide by the largest magnitude of a row, as scikit-learn does. The operator of
    ONNX that skl2onnx writes divides by the largest number: of [-4, 1] it makes [-4, 1] in the place of [-1, 0.25]."""
    from onnx import helper, numpy_helper

    for node in [one for one in model.graph.node if one.op_type == "Normalizer"]:
        if not any(entry.name == "norm" and entry.s == b"MAX" for entry in node.attribute):
            continue
        given, answer = node.input[0], node.output[0]
        columns, zero, one = (f"{answer}_{word}" for word in ("columns", "zero", "one"))
        constants = {columns: np.asarray([1], np.int64), zero: np.float32(0), one: np.float32(1)}
        model.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
        )
        steps = [
            ("Abs", [given], f"{answer}_magnitudes"),
            ("ReduceMax", [f"{answer}_magnitudes", columns], f"{answer}_most"),
            ("Equal", [f"{answer}_most", zero], f"{answer}_is_zero"),
            ("Where", [f"{answer}_is_zero", one, f"{answer}_most"], f"{answer}_divisor"),
            ("Div", [given, f"{answer}_divisor"], answer),
        ]
        put_behind(model, node, [helper.make_node(kind, taken, [made], name=made) for kind, taken, made in steps])
        model.graph.node.remove(node)


def label_by_score(model: ModelProto, estimator: Any) -> None:
    """Have each SGDClassifier of several classes with probabilities take the class of the highest score, as
    scikit-learn does. skl2onnx takes that of the highest probability, and these are cut off at 0 and 1, or are 1 in
    float32 from a score of 17 up: where two classes are certain, it is the first of them."""
    from onnx import numpy_helper

    written = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for part in parts(estimator):
        fitted = type(part).__name__ == "SGDClassifier" and hasattr(part, "coef_")
        if not fitted or part.loss not in ("modified_huber", "log_loss") or len(part.classes_) < 3:
            continue
        weights = np.asarray(part.coef_.T, np.float32)
        for node in [one for one in model.graph.node if one.op_type == "MatMul" and one.input[1] in written]:
            if np.array_equal(written[node.input[1]], weights):
                _choose_by_score(model, node)


def _choose_by_score(model: ModelProto, product: NodeProto) -> None:
    """The classes' scores are the product and an intercept; what chooses a class lies behind their probabilities."""
    reached = set(product.output)
    scores = ""
    for node in model.graph.node:  # in the order of computation
        if not reached & set(node.input):
            continue
        if node.op_type == "Add" and not scores:
            scores = node.output[0]
        if node.op_type == "ArgMax":
            if scores:
                node.input[0] = scores
            return
        reached.update(node.output)


def name_pairs_classes(model: ModelProto, estimator: Any) -> None:
    """Have each OneVsOneClassifier answer with its labels: skl2onnx answers with the numbers of the classes."""
    from onnx import helper, numpy_helper

    pairs = [
        part for part in parts(estimator) if type(part).__name__ == "OneVsOneClassifier" and hasattr(part, "classes_")
    ]
    chosen = [node for node in model.graph.node if node.op_type == "ArgMax" and node.input[0] == "ovr_output"]
    for part, node in zip(pairs, chosen, strict=False):
        label = node.output[0]
        node.output[0], classes = f"{label}_number", f"{label}_classes"
        held = np.asarray(part.classes_, object if part.classes_.dtype.kind in "OU" else np.int64)
        model.graph.initializer.append(numpy_helper.from_array(held, classes))
        made = helper.make_node("Gather", [classes, node.output[0]], [label], name=f"{label}_of_class")
        put_behind(model, node, [made])


def choose_one_against_rest_by_score(model: ModelProto) -> None:
    """Have each OneVsRestClassifier of logistic regressions take the class of the highest score, as scikit-learn does.
    skl2onnx takes that of the highest probability: from a score of 17 up it is 1 in float32, and of two such classes
    the first one was the answer."""
    from onnx import NodeProto, helper

    makers = {output: node for node in model.graph.node for output in node.output}
    for chosen in [node for node in model.graph.node if node.op_type == "ArgMax"]:
        joined = makers.get(chosen.input[0])
        if joined is None or joined.op_type != "Concat":
            continue
        columns = [makers.get(name) for name in joined.input]
        models = [makers.get(one.input[0]) for one in columns if one is not None and one.op_type == "Slice"]
        if not models or len(models) != len(columns) or not all(map(_is_logistic, models)):
            continue
        made, scores = [], []
        for column, classifier in zip(columns, models, strict=True):
            scorer, score = NodeProto(), NodeProto()
            scorer.CopyFrom(classifier)
            score.CopyFrom(column)
            scorer.name, scorer.output[:] = f"{scorer.name}_scores", [f"{name}_scores" for name in scorer.output]
            next(entry for entry in scorer.attribute if entry.name == "post_transform").s = b"NONE"
            score.name, score.input[0] = f"{score.name}_scores", scorer.output[1]
            score.output[0] = f"{score.output[0]}_score"
            scores.append(score.output[0])
            made += [scorer, score]
        table = f"{joined.output[0]}_scores"
        put_behind(model, joined, [*made, helper.make_node("Concat", scores, [table], name=table, axis=1)])
        chosen.input[0] = table


def _is_logistic(node: NodeProto | None) -> bool:
    """Whether it makes the two probabilities of a logistic regression."""
    return (
        node is not None
        and node.op_type == "LinearClassifier"
        and any(entry.name == "post_transform" and entry.s == b"LOGISTIC" for entry in node.attribute)
    )


def halve_scores(model: ModelProto, estimator: Any) -> None:
    """Halve the coefficients of each linear discriminant of two classes: skl2onnx takes the softmax of the score and
    its negative, which is the logistic function of twice the score, and scikit-learn that of the score."""
    for part in parts(estimator):
        if type(part).__name__ != "LinearDiscriminantAnalysis" or len(getattr(part, "classes_", ())) != 2:
            continue
        scores = np.asarray(part.coef_, np.float32).ravel()
        for node in [one for one in model.graph.node if one.op_type == "LinearClassifier"]:
            named = {entry.name: entry for entry in node.attribute}
            written = np.asarray(named["coefficients"].floats, np.float32)
            if named["post_transform"].s == b"SOFTMAX" and np.array_equal(written, np.append(-scores, scores)):
                for key in ("coefficients", "intercepts"):
                    named[key].floats[:] = [value / 2 for value in named[key].floats]


def count_bagged_labels(model: ModelProto, estimator: Any) -> None:
    """Have bagged classifiers without probabilities count each row's labels over the models. skl2onnx counts those of
    each model over the rows."""
    from onnx import numpy_helper

    without = [
        len(part.classes_)
        for part in parts(estimator)
        if type(part).__name__ == "BaggingClassifier"
        and hasattr(part, "estimators_")
        and not hasattr(part.estimators_[0], "predict_proba")
    ]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    for total in [node for node in model.graph.node if node.op_type == "ReduceSum" and len(node.input) > 1]:
        cast = makers.get(total.input[0])
        is_class = makers.get(cast.input[0]) if cast is not None and cast.op_type == "Cast" else None
        classes = tensors.get(is_class.input[0]) if is_class is not None and is_class.op_type == "Equal" else None
        if classes is not None and list(classes.dims[:2]) == [1, 1] and classes.dims[-1] in without:
            models = f"{total.output[0]}_models"
            model.graph.initializer.append(numpy_helper.from_array(np.asarray([0], np.int64), models))
            total.input[1] = models


def start_at_zero(model: ModelProto) -> None:
    """Write a base value for each class of gradient boosting with `init="zero"`. skl2onnx writes one for all classes,
    and the runtime opens no such graph."""
    for node in model.graph.node:
        named = {entry.name: entry for entry in node.attribute}
        if node.op_type == "TreeEnsembleClassifier" and "base_values" in named:
            base = named["base_values"].floats
            classes = len(set(named["class_ids"].ints))
            if len(base) == 1 and base[0] == 0 and classes > 1:
                base[:] = [0.0] * classes


def write_logarithms(model: ModelProto, estimator: Any) -> None:
    """Histogram gradient boosting adds up logarithms where its loss is `poisson` or `gamma`, and answers with the
    exponential of the sum, which skl2onnx leaves out.

    Raises:
        SourceError: One of its trees is not found in the graph.
    """
    from onnx import helper

    for part in parts(estimator):
        fitted = type(part).__name__ == "HistGradientBoostingRegressor" and hasattr(part, "_predictors")
        if not fitted or part.loss not in ("poisson", "gamma"):
            continue
        nodes = list(_made_of(model, part))
        if not nodes:
            raise SourceError(
                f"skl2onnx converts no HistGradientBoostingRegressor(loss={part.loss!r}) inside another model",
                fix="train it with loss='squared_error' on the logarithm of the target, or log it by itself",
            )
        for node in nodes:
            answer = node.output[0]
            node.output[0] = f"{answer}_log"
            exponential = helper.make_node("Exp", [node.output[0]], [answer], name=f"{answer}_exp")
            put_behind(model, node, [exponential])


def _made_of(model: ModelProto, booster: Any) -> Iterator[NodeProto]:
    """The nodes with the same baseline and as many leaves."""
    count = sum(int(tree.nodes["is_leaf"].sum()) for trees in booster._predictors for tree in trees)
    baseline = np.asarray(booster._baseline_prediction, np.float32).ravel()
    for node in model.graph.node:
        if node.op_type == "TreeEnsembleRegressor" and node.domain == "ai.onnx.ml":
            named = {entry.name: entry for entry in node.attribute}
            based = np.asarray(named["base_values"].floats, np.float32) if "base_values" in named else None
            leaves = list(named["nodes_modes"].strings).count(b"LEAF")
            if based is not None and leaves == count and np.array_equal(based, baseline):
                yield node
