"""CatBoost: models in its own format `cbm`, which holds data only."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
    from compile_stage.core.tensors import Batch

_CLASSIFIER, _REGRESSOR, _RANKER, _PLAIN = "CatBoostClassifier", "CatBoostRegressor", "CatBoostRanker", "CatBoost"

# Losses whose predictions CatBoost's own ONNX export gets right, as tests/sources shows for each. It writes a softmax
# for MultiClassOneVsAll, and leaves out the exponential of Poisson and Tweedie.
_NUMBERS = ("RMSE", "MAE", "Quantile", "Huber", "MAPE", "LogCosh")
_RANKS = (
    *("YetiRank", "YetiRankPairwise", "PairLogit", "PairLogitPairwise", "QueryRMSE", "QuerySoftMax"),
    *("StochasticFilter", "StochasticRank", "LambdaMart", "GroupQuantile"),
)
_LOSSES: Mapping[str, tuple[str, ...]] = {
    _CLASSIFIER: ("Logloss", "CrossEntropy", "MultiClass"),
    _REGRESSOR: _NUMBERS,
    _RANKER: _RANKS,
    _PLAIN: (*_NUMBERS, *_RANKS),
}

# The first version of ONNX's format in which an initializer need not be an input; CatBoost writes 3.
_CONSTANTS_ARE_NO_INPUTS = 4


class CatBoostSource(Exporter):
    """Models that `mlflow.catboost` logged."""

    name = "catboost"
    requires = ("catboost",)
    extra = "catboost"
    framework = "CatBoost"
    capabilities = SourceCapabilities(asked_on_one_thread=True, planned_by_graph=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        if (reason := mlmodel.missing_file(_file(source), source) or tabular.refuse_columns(source)) is not None:
            return reason
        settings = mlmodel.flavor(source, self.name)
        if (kind := settings.get("model_type")) not in _LOSSES:
            return f"a model of class {kind} can't be converted; there are conversions for {', '.join(_LOSSES)}"
        if (form := settings.get("save_format", "cbm")) != "cbm":
            return f"it is saved as {form}, and only cbm is read: log it again without format="
        try:
            model = _load(source)
            return _refuse_model(model) or _refuse_names(model, source)
        except SourceError as error:
            return error.reason

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        model = _load(source)
        signature, order = _signature(model, source), _order(model, source)

        def call(arrays: Sequence[Any]) -> Sequence[Any]:
            rows = arrays[0] if order is None else arrays[0][:, order]
            if signature.outputs[0].name != tabular.LABEL:
                return [model.predict(rows, thread_count=target.threads)]
            # `predict` computes the same once more and takes the largest.
            table = model.predict_proba(rows, thread_count=target.threads)
            labels = model.classes_.take(table.argmax(axis=1))
            return [labels.reshape(-1, *signature.outputs[0].shape[1:]), table]

        with tabular.limited_threads(target.threads):
            yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        import onnx

        model = _load(source)
        wanted = _signature(model, source)
        demand_shapes(wanted, shapes, source)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as folder:
            path = str(Path(folder) / "model.onnx")
            try:
                _with_whole_labels(model, Path(folder)).save_model(path, format="onnx")
            except Exception as error:
                raise SourceError(f"CatBoost can't export it to ONNX: {first_line(error)}", where=source.uri) from error
            converted = onnx.load(path)
        converted.ir_version = max(converted.ir_version, _CONSTANTS_ARE_NO_INPUTS)
        if wanted.outputs[0].name == tabular.LABEL:
            _drop_zipmap(converted)
            _name_two_classes(converted, model)
            repairs: list[tuple[str, tabular.Repair]] = [
                ("label", "column" if len(wanted.outputs[0].shape) > 1 else "flatten"),
                ("probability_tensor", "keep"),
            ]
        else:
            repairs = [("predictions", "flatten")]
        tabular.standardize(converted, wanted, repairs)
        if (order := _order(model, source)) is not None:
            tabular.pick_columns(converted, order)
        return graph.finish(converted, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, _signature(_load(source), source))

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        import numpy as np

        model = _load(source)
        output = _signature(model, source).outputs[0].name
        # All but classifiers have no classes, or an empty list of them, and answer in float64. Texts are answered as
        # objects.
        classes = np.asarray(getattr(model, "classes_", ()))
        labels = classes.astype(object) if classes.dtype.kind == "U" else classes
        answered = labels if labels.size else 0.0
        return {**tabular.prediction_format(source, [output], answered, fitted=_names(model)), "no_rows": True}

    def packages(self) -> Mapping[str, str]:
        return package_versions("catboost", "onnx")


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "catboost").get("data") or "model.cb")


def _load(source: SourceModel) -> Any:
    import catboost

    settings = mlmodel.flavor(source, "catboost")
    model = getattr(catboost, str(settings["model_type"]))()
    try:
        return model.load_model(str(_file(source)))
    except catboost.CatBoostError as error:
        problem = f"it can't be loaded: {first_line(error)}"
        raise mlmodel.not_loaded(source, problem, catboost, "catboost_version") from error


def _with_whole_labels(model: Any, folder: Path) -> Any:
    """The same trees, with 0 and 1 for truth values, which CatBoost's export to ONNX does not know as labels."""
    if type(model).__name__ != _CLASSIFIER or model.classes_.dtype.kind != "b":
        return model
    path = folder / "model.json"
    model.save_model(str(path), format="json")
    described = json.loads(path.read_text(encoding="utf-8"))
    names = described["model_info"]["class_params"]["class_names"]
    described["model_info"]["class_params"] |= {
        "class_label_type": "Integer",
        "class_names": [int(name) for name in names],
    }
    path.write_text(json.dumps(described), encoding="utf-8")
    return type(model)().load_model(str(path), format="json")


def _loss(model: Any) -> str:
    """Without its parameters: `Quantile:alpha=0.9` is `Quantile`."""
    return str(model.get_all_params().get("loss_function", "")).partition(":")[0]


def _refuse_model(model: Any) -> str | None:
    proven = _LOSSES[type(model).__name__]
    if (loss := _loss(model)) not in proven:
        return f"its loss function {loss or 'of your own'!r} has no proven conversion; these have: {', '.join(proven)}"
    for kind, indices in (
        ("categories", model.get_cat_feature_indices()),
        ("text", model.get_text_feature_indices()),
        ("embeddings", model.get_embedding_feature_indices()),
    ):
        if indices:
            return (
                f"it splits on {kind} (columns {', '.join(map(str, indices[:5]))}), which CatBoost can't export to "
                "ONNX: encode them as numbers"
            )
    if (policy := model.get_all_params().get("grow_policy", "SymmetricTree")) != "SymmetricTree":
        return (
            f"its trees are not symmetric (grow_policy={policy!r}), and CatBoost exports no others to ONNX: "
            "train it with grow_policy='SymmetricTree'"
        )
    if type(model).__name__ == _CLASSIFIER and model.get_probability_threshold() not in (None, 0.5):
        return "it has a probability threshold of its own, which its export to ONNX would not keep"
    if type(model).__name__ == _CLASSIFIER and model.classes_.dtype.kind == "f":
        return "its labels are floats, which CatBoost can't export to ONNX: train it on whole numbers or on text"
    return None


def _names(model: Any) -> list[str]:
    """The columns that it was fitted on; empty where they had no names, for which CatBoost writes 0, 1, 2, ..."""
    names = [str(name) for name in model.feature_names_]
    return [] if names == [str(number) for number in range(len(names))] else names


def _order(model: Any, source: SourceModel) -> list[int] | None:
    """Of each column that it was fitted on, its place in the signature: CatBoost picks a data frame's columns by name.
    None where both have one order."""
    names, logged = _names(model), mlmodel.columns(source)
    if logged is None or list(logged) == names or sorted(logged) != sorted(names):
        return None
    return [logged.index(name) for name in names]


def _refuse_names(model: Any, source: SourceModel) -> str | None:
    return None if _order(model, source) is not None else tabular.refuse_names(source, _names(model))


def _signature(model: Any, source: SourceModel) -> Signature:
    features = len(model.feature_names_)
    if type(model).__name__ != _CLASSIFIER:
        return tabular.signature(features, [tabular.prediction()])
    classes = len(model.classes_)
    label = tabular.label(tabular.label_dtype(model.classes_, source), targets=1 if classes > 2 else None)
    return tabular.signature(features, [label, tabular.probabilities(classes)])


def _drop_zipmap(model: Any) -> None:
    """The exporter gives each row's probabilities as a map; the table before it is what is wanted."""
    from onnx import helper

    kept = [node for node in model.graph.node if node.op_type != "ZipMap"]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    del model.graph.output[1:]
    model.graph.output.append(helper.make_tensor_value_info("probability_tensor", 1, [None, None]))


def _name_two_classes(graph_of_trees: Any, model: Any) -> None:
    """Have the trees of two classes number them 0 and 1, and look the label up. Of two whole numbers with a weight for
    each ONNX Runtime answers 0 and 1, whatever the graph calls them."""
    import numpy as np
    from onnx import helper, numpy_helper

    if len(model.classes_) != 2 or model.classes_.dtype.kind not in "iu" or model.classes_.tolist() == [0, 1]:
        return
    trees = next(node for node in graph_of_trees.graph.node if node.op_type == "TreeEnsembleClassifier")
    next(entry for entry in trees.attribute if entry.name == "classlabels_int64s").ints[:] = [0, 1]
    label = trees.output[0]
    trees.output[0] = "label_number"
    classes = numpy_helper.from_array(np.asarray(model.classes_, np.int64), "label_classes")
    graph_of_trees.graph.initializer.append(classes)
    graph_of_trees.graph.node.append(
        helper.make_node("Gather", [classes.name, trees.output[0]], [label], name="label_of_class")
    )
