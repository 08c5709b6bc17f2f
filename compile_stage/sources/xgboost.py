"""XGBoost: boosters and the scikit-learn wrappers, saved as `.ubj` or `.json`, which hold data only."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.sources import graph, mlmodel, tabular
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from onnx import NodeProto

    from compile_stage.core.tensors import Batch

WRAPPERS = ("XGBClassifier", "XGBRegressor", "XGBRFClassifier", "XGBRFRegressor", "XGBRanker")

# Objectives whose transformation the converter gets right, as tests/sources shows for each.
_NUMBER = (
    *("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:squaredlogerror", "reg:quantileerror"),
    *("count:poisson", "reg:gamma", "reg:tweedie"),
)
_RANKS = ("rank:ndcg", "rank:map", "rank:pairwise")
_SURVIVAL = ("survival:cox", "survival:aft")
_CLASSES = ("binary:logistic", "multi:softprob", "multi:softmax")

# The list of a tree's categories in UBJSON, with a length other than 0. Whoever sets `feature_types` to None takes the
# types away from the file, and the splits stay.
_CATEGORIES = re.compile(rb"categories_nodes\[\$.#L(?!\x00{8})", re.DOTALL)


class XGBoostSource(Exporter):
    """Models that `mlflow.xgboost` logged."""

    name = "xgboost"
    requires = ("xgboost", "onnxmltools")
    extra = "xgboost"
    framework = "XGBoost"
    capabilities = SourceCapabilities(asked_on_one_thread=True, planned_by_graph=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        if (reason := mlmodel.missing_file(_file(source), source) or tabular.refuse_columns(source)) is not None:
            return reason
        kind = _class_name(source)
        if kind not in ("Booster", *WRAPPERS):
            return (
                f"a model of class {kind} can't be converted; there are converters for Booster, {', '.join(WRAPPERS)}"
            )
        try:
            model = _load(source)
            booster = _booster(model)
            return (
                refuse_booster(booster)
                or refuse_dropout(_file(source).read_bytes(), booster)
                or tabular.refuse_names(source, booster.feature_names or ())
                or mlmodel.refuse_params(source, _own_params(model))
            )
        except SourceError as error:
            return error.reason

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        model = _load(source)
        signature = _signature(model)
        booster = _booster(model)
        booster.set_param({"nthread": target.threads})
        booster.feature_names = None  # rows come as a bare matrix
        if hasattr(model, "set_params"):
            model.set_params(n_jobs=target.threads)

        def call(arrays: Sequence[Any]) -> Sequence[Any]:
            if signature.outputs[0].name == tabular.LABEL:
                found = model.predict_proba(arrays[0], validate_features=False)
                return [found.argmax(axis=1), found]
            if model is booster:
                return [booster.inplace_predict(arrays[0], validate_features=False)]
            return [model.predict(arrays[0], validate_features=False)]

        with tabular.limited_threads(target.threads):
            yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        from onnxmltools import convert_xgboost
        from onnxmltools.convert.common.data_types import FloatTensorType

        model = _load(source)
        wanted = _signature(model)
        demand_shapes(wanted, shapes, source)
        booster = _booster(model)
        if alike := _converted_as(booster):
            model = booster = _with_objective(model, alike)
        try:
            with warnings.catch_warnings(), convertible(model):
                warnings.simplefilter("ignore")  # deprecations inside the converter
                converted = convert_xgboost(
                    model,
                    initial_types=[(tabular.INPUT, FloatTensorType([None, booster.num_features()]))],
                    target_opset=tabular.CONVERTER_OPSET,
                )
        except Exception as error:
            raise SourceError(f"onnxmltools can't convert it: {first_line(error)}", where=source.uri) from error
        name_classes(converted.graph.node, model)
        write_probabilities(converted.graph.node, model)
        names = [value.name for value in graph.signature_of(converted).outputs]
        tabular.standardize(converted, wanted, _repairs(names, model, booster))
        return graph.finish(converted, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, _signature(_load(source)))

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        import numpy as np

        model = _load(source)
        named, own = mlmodel.params(source), _own_params(model)
        fitted = _booster(model).feature_names or ()
        output = _signature(model).outputs[0].name
        # XGBClassifier.predict() answers int64, but for this objective what the trees answer, in int32.
        narrow = output == tabular.LABEL and getattr(model, "objective", None) == "multi:softmax"
        how = tabular.prediction_format(source, [output], np.int32(0) if narrow else None, fitted=fitted)
        compiled = {name: value for name, value in own.items() if name in named}
        # A booster of several classes answers no rows without the axis of the classes.
        answers_none = len(_signature(model).outputs[0].shape) == 1
        return {**how, **({"no_rows": True} if answers_none else {}), **({"params": compiled} if compiled else {})}

    def packages(self) -> Mapping[str, str]:
        return package_versions("xgboost", "xgboost-cpu", "onnxmltools", "onnx")


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "xgboost").get("data") or "model.ubj")


def _class_name(source: SourceModel) -> str:
    """The class within xgboost; anything else is refused, because loading it would import a stranger's module."""
    path = str(mlmodel.flavor(source, "xgboost").get("model_class") or "xgboost.core.Booster")
    package, _, name = path.rpartition(".")
    return name if package.partition(".")[0] == "xgboost" else path


def _load(source: SourceModel) -> Any:
    import xgboost

    try:
        model = getattr(xgboost, _class_name(source))()
        model.load_model(_file(source))
    except Exception as error:
        problem = f"it can't be loaded: {first_line(error)}"
        raise mlmodel.not_loaded(source, problem, xgboost, "xgb_version") from error
    return model


def _booster(model: Any) -> Any:
    return model.get_booster() if hasattr(model, "get_booster") else model


def _learner(booster: Any) -> Any:
    return json.loads(booster.save_config())["learner"]


def _trees(booster: Any) -> Any:
    """All trees, which for a large model are seconds of text."""
    return json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]


def _objective(booster: Any) -> str:
    return str(_learner(booster)["objective"]["name"])


def _converted_as(booster: Any) -> str | None:
    """The objective that answers alike and that the converter knows, of rankers and models of survival: a ranker
    answers the sum of its trees, a model of survival the exponential of that, as a rate or a time."""
    objective = _objective(booster)
    if objective in _RANKS:
        return "reg:squarederror"
    return "count:poisson" if objective in _SURVIVAL else None


def refuse_inside(booster: Any) -> str | None:
    """The reason when it is compiled by itself alone, and not as a part of another model."""
    if _converted_as(booster) is None:
        return None
    objective = _objective(booster)
    return f"its objective is {objective!r}, and such a model is compiled by itself alone: log it with mlflow.xgboost"


def refuse_booster(booster: Any) -> str | None:
    """The reason when it has no proven conversion."""
    learner = _learner(booster)
    kind, objective = learner["gradient_booster"]["name"], learner["objective"]["name"]
    if kind != "gbtree":
        return f"its booster is {kind!r}, and only trees (gbtree) have a converter"
    proven = (*_NUMBER, *_RANKS, *_SURVIVAL, *_CLASSES)
    if objective not in proven:
        return f"its objective {objective!r} has no proven conversion; these have: {', '.join(proven)}"
    if "c" in (booster.feature_types or []) or _CATEGORIES.search(booster.save_raw("ubj")) is not None:
        return (
            "it splits on categories (enable_categorical, feature_types), for which there is no converter: train it on "
            "the same columns as plain numbers, or one-hot encoded, without enable_categorical"
        )
    if int(learner["learner_model_param"].get("num_target", 1)) > 1:
        return "it predicts several targets at once, for which there is no converter"
    if int(learner["learner_model_param"]["num_class"]) > 1 and _has_wide_leaves(booster):
        return (
            "each of its trees answers for all classes (multi_strategy='multi_output_tree'), for which there is no "
            "converter: train it with multi_strategy='one_output_per_tree'"
        )
    return None


def _has_wide_leaves(booster: Any) -> bool:
    """Of the first round alone: all have leaves of one width, and all trees of a large model are seconds of text."""
    trees = _trees(booster[:1])["trees"] if booster.num_boosted_rounds() else []
    return any(int(tree["tree_param"].get("size_leaf_vector", 1)) > 1 for tree in trees)


def refuse_dropout(file: bytes, booster: Any) -> str | None:
    """Why a model can't be taken in which dropout left a weight for each tree.

    XGBoost 3.4 and newer say `gbtree` of these models too. Older ones load such a file and predict without the weights.
    """
    # The key in .ubj or .json: the trees are parsed only where it is there.
    if re.search(rb'weight_drop(\[|"\s*:)', file) is None:
        return None
    weights = _trees(booster).get("weight_drop")
    if weights is not None and all(weight == 1 for weight in weights):
        return None
    return "it was trained with dropout (dart, rate_drop), and the converter leaves out the weights of its trees"


def _with_objective(model: Any, objective: str) -> Any:
    """The model as a booster with the same answers, of another objective. The converter takes these models for
    classifiers of two classes, and knows no XGBRanker."""
    booster, best = _booster(model), _booster(model).attr("best_iteration")
    # The wrapper predicts with the trees up to the best round of early stopping, a bare booster with all.
    made = booster.copy() if model is booster or best is None else booster[: int(best) + 1]
    made.set_attr(best_iteration=None)
    made.set_param({"objective": objective})
    return made


def _trees_at_once(booster: Any) -> int:
    """How many trees a round adds for each class: more than one in a random forest."""
    return int(_learner(booster)["gradient_booster"]["gbtree_model_param"]["num_parallel_tree"])


@contextmanager
def convertible(model: Any) -> Iterator[None]:
    """A booster or wrapper as onnxmltools converts it to the model's own answers, and afterwards as it was."""
    booster = _booster(model)
    names, types, best = booster.feature_names, booster.feature_types, booster.attr("best_iteration")
    booster.feature_names = None  # the converter knows columns by number only
    # Else XGBoost writes no threshold of truth values, and cuts whole ones beyond 32 bits.
    booster.feature_types = None
    if model is booster:
        # A bare booster predicts with all its trees; the converter would stop at the best round of early stopping.
        booster.set_attr(best_iteration=None)
    elif best is not None:
        # The converter takes one tree of each class for a round.
        booster.set_attr(best_iteration=str((int(best) + 1) * _trees_at_once(booster) - 1))
    try:
        yield
    finally:
        booster.feature_names, booster.feature_types = names, types
        booster.set_attr(best_iteration=best)


def name_classes(nodes: Iterable[NodeProto], model: Any) -> None:
    """Say in the graph which class each tree is of.

    The converter takes the trees for one of each class in turn. Where a round adds several of a class, they stand
    beside each other.

    Args:
        nodes: What the converter wrote of the booster or wrapper.
    """
    booster = _booster(model)
    if _trees_at_once(booster) == 1:
        return
    for node in nodes:
        found = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "TreeEnsembleClassifier" and len(set(found["class_ids"].ints)) > 1:
            classes = _trees(booster)["tree_info"]
            found["class_ids"].ints[:] = [classes[tree] for tree in found["class_treeids"].ints]


def write_probabilities(nodes: Iterable[NodeProto], model: Any) -> None:
    """Have a classifier of the objective `multi:softmax` answer with probabilities. The converter writes the sums of
    its trees; `predict_proba` of XGBoost's wrappers answers with their softmax, as it does for `multi:softprob`.

    Args:
        nodes: What the converter wrote of the booster or wrapper.
    """
    if not hasattr(model, "predict_proba") or _objective(_booster(model)) != "multi:softmax":
        return
    for node in nodes:
        if node.op_type == "TreeEnsembleClassifier":
            next(entry for entry in node.attribute if entry.name == "post_transform").s = b"SOFTMAX"


def _own_params(model: Any) -> dict[str, Any]:
    """What `predict` takes beside its rows, with its defaults: MLflow's pyfunc passes the signature's params on to
    it."""
    return {name: value for name, value in mlmodel.defaults(model.predict).items() if name != "validate_features"}


def _signature(model: Any) -> Signature:
    booster = _booster(model)
    classes = int(_learner(booster)["learner_model_param"]["num_class"])
    features = int(booster.num_features())
    if hasattr(model, "predict_proba"):
        return tabular.signature(features, [tabular.label("int64"), tabular.probabilities(max(classes, 2))])
    several = _objective(booster) == "multi:softprob"
    return tabular.signature(features, [tabular.prediction(classes if several else 1)])


def _repairs(names: list[str], model: Any, booster: Any) -> list[tuple[str, tabular.Repair]]:
    """The converter gives `label, probabilities` for every classifying objective, and `variable` for the others."""
    if hasattr(model, "predict_proba"):
        return [(names[0], "flatten"), (names[1], "keep")]
    objective = _objective(booster)
    if objective == "binary:logistic":
        return [(names[1], "second")]
    if objective == "multi:softprob":
        return [(names[1], "keep")]
    return [(names[0], "number" if objective == "multi:softmax" else "flatten")]
