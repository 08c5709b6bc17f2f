"""LightGBM: boosters saved as text, which hold data only; the scikit-learn wrappers by skops, or as pickles where the
policy allows them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.sources import graph, mlmodel, saved, tabular
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

    from compile_stage.core.tensors import Batch

_BOOSTER = "lightgbm.basic.Booster"
WRAPPERS = (
    _BOOSTER,
    "lightgbm.compat._LGBMLabelEncoder",
    *(f"lightgbm.sklearn.{name}" for name in ("LGBMClassifier", "LGBMModel", "LGBMRanker", "LGBMRegressor")),
)

# Objectives whose transformation the converter gets right, as tests/sources shows for each.
_NUMBER = (
    *("regression", "regression_l1", "huber", "quantile", "poisson", "gamma", "tweedie"),
    *("lambdarank", "rank_xendcg"),  # a score for each row
)
_CLASSES = ("binary", "multiclass")

_ZERO_IS_MISSING = 1

_BY_CATEGORY = 1  # the bit of a split's kind

_FLOAT32_WHOLE = 2**24  # the first whole number whose successor float32 does not have


class LightGBMSource(Exporter):
    """Models that `mlflow.lightgbm` logged."""

    name = "lightgbm"
    requires = ("lightgbm", "onnxmltools")
    extra = "lightgbm"
    framework = "LightGBM"
    capabilities = SourceCapabilities(computes_wider=True, asked_on_one_thread=True, planned_by_graph=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        if (reason := mlmodel.missing_file(_file(source), source) or tabular.refuse_columns(source)) is not None:
            return reason
        if not _is_text(source):
            reason = saved.refuse(_file(source), _format(source), _trusted(source), compliance, WRAPPERS)
            if reason is not None:
                return reason
        try:
            return refuse_model(_load(source))
        except SourceError as error:
            return error.reason

    def open(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target)

    def open_as_given(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target, as_given=True)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        from onnxmltools import convert_lightgbm
        from onnxmltools.convert.common.data_types import FloatTensorType

        model = _load(source)
        wanted = _signature(model, source)
        demand_shapes(wanted, shapes, source)
        if wanted.outputs[0].name == tabular.LABEL and model.classes_.dtype.kind in "bu":
            model._classes = model.classes_.astype("int64")  # the converter takes other labels for text
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside the converter
                converted = convert_lightgbm(
                    model,
                    initial_types=[(tabular.INPUT, FloatTensorType([None, _booster(model).num_feature()]))],
                    target_opset=tabular.CONVERTER_OPSET,
                    zipmap=False,
                )
        except Exception as error:
            raise SourceError(f"onnxmltools can't convert it: {first_line(error)}", where=source.uri) from error
        correct_trees(converted.graph.node, model, is_given_float32=tabular.is_given_float32(source))
        nodes, weights = cut_fractions(converted.graph.node, model)
        if nodes:
            converted.graph.node.extend(nodes)
            converted.graph.initializer.extend(weights)
            graph.sort_nodes(converted.graph)
            for entry in converted.opset_import:
                if entry.domain == "":  # the oldest that has the converter's own operators, which are unchanged since
                    entry.version = tabular.CONVERTER_OPSET
        names = [value.name for value in graph.signature_of(converted).outputs]
        tabular.standardize(converted, wanted, _repairs(names, wanted, _objective(model)))
        return graph.finish(converted, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, _signature(_load(source), source), as_given=True)

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        model = _load(source)
        output = _signature(model, source).outputs[0].name
        # LightGBM answers numbers in float64, whatever it is given.
        return tabular.prediction_format(source, [output], getattr(model, "classes_", 0.0))

    def packages(self) -> Mapping[str, str]:
        return package_versions("lightgbm", "onnxmltools", "skops", "onnx")


@contextmanager
def _open(source: SourceModel, target: Target, *, as_given: bool = False) -> Iterator[Session]:
    model = _load(source)
    signature = _signature(model, source)
    booster = _booster(model)

    def call(arrays: Sequence[Any]) -> Sequence[Any]:
        # The wrappers' own predict does this and checks the input once more.
        found = booster.predict(arrays[0], num_threads=target.threads, num_iteration=_rounds(model))
        if signature.outputs[0].name != tabular.LABEL:
            return [found]
        import numpy as np

        table = found if found.ndim > 1 else np.stack([1.0 - found, found], axis=1)
        return [model.classes_.take(table.argmax(axis=1)), table]

    with tabular.limited_threads(target.threads):
        yield SourceSession(signature, call, partial(tabular.as_predict_gets, source) if as_given else None)


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "lightgbm").get("data") or "model.lgb")


def _is_text(source: SourceModel) -> bool:
    return str(mlmodel.flavor(source, "lightgbm").get("model_class") or _BOOSTER) == _BOOSTER


def _format(source: SourceModel) -> str:
    return str(mlmodel.flavor(source, "lightgbm").get("serialization_format") or "cloudpickle")


def _trusted(source: SourceModel) -> list[str]:
    return [str(name) for name in mlmodel.flavor(source, "lightgbm").get("skops_trusted_types") or ()]


def _load(source: SourceModel) -> Any:
    import lightgbm

    if not _is_text(source):
        logged = mlmodel.flavor(source, "lightgbm").get("lgb_version", "of an unknown version")
        return saved.load(_file(source), _format(source), source, f"lightgbm {logged}")
    try:
        return lightgbm.Booster(model_file=str(_file(source)))
    except lightgbm.basic.LightGBMError as error:
        raise mlmodel.not_loaded(source, f"it can't be loaded: {error}", lightgbm, "lgb_version") from error


def _booster(model: Any) -> Any:
    return getattr(model, "booster_", model)


def _objective(model: Any) -> str:
    """The first word: `binary sigmoid:1` is `binary`."""
    return str(_booster(model).dump_model(num_iteration=1).get("objective", "")).partition(" ")[0]


def _rounds(model: Any) -> int | None:
    """Rounds that `predict` uses: up to the best one of early stopping."""
    best = getattr(model, "best_iteration_", None) or getattr(model, "best_iteration", None)
    return int(best) if best and best > 0 else None


def refuse_model(model: Any) -> str | None:
    """The reason when a booster or wrapper has no proven conversion."""
    objective = _objective(model)
    if objective not in (*_NUMBER, *_CLASSES):
        return (
            f"its objective {objective or 'of your own'!r} has no proven conversion; these have: "
            f"{', '.join((*_NUMBER, *_CLASSES))}"
        )
    lines = _booster(model).model_to_string().splitlines()
    if any(_ZERO_IS_MISSING in _missing_kinds(line) for line in lines):
        return (
            "it takes zeros for missing numbers (zero_as_missing), which its conversion would not keep: train it "
            "without, on NaN in place of the zeros"
        )
    if getattr(_booster(model), "pandas_categorical", None):
        return (
            "it was fitted on columns of pandas' type category, and its own pyfunc refuses what MLflow hands it, which "
            "are numbers and texts: fit it on whole numbers in their place, and name these columns in "
            "categorical_feature"
        )
    if _largest_category(lines) >= _FLOAT32_WHOLE:
        return (
            f"it splits on categories of {_FLOAT32_WHOLE} and more, which float32 does not tell apart: number them "
            "from 0 on"
        )
    if "is_linear=1" in lines:
        return "its leaves are linear models (linear_tree), which its conversion would not keep: train it without"
    if any(line.startswith("objective=") and " sqrt" in line for line in lines):
        return (
            "it was trained on the square root of the target (reg_sqrt), and its conversion would not square: "
            "train it without"
        )
    if "average_output" in lines:
        return (
            "its answer is the mean of its trees (boosting_type='rf'), which its conversion would not keep: train it "
            "with another boosting_type, or a forest of scikit-learn"
        )
    return None


def correct_trees(nodes: Iterable[NodeProto], model: Any, *, is_given_float32: bool) -> None:
    """Write into the trees what onnxmltools leaves out: the steepness of `binary`'s logistic function, and which way a
    number goes that is a threshold in float32.

    LightGBM compares in float64. Of a number that is given in float32, no threshold's rounding up may be seen; a number
    in float64 is rounded itself, and equals its threshold where both are rounded alike.

    Args:
        nodes: What the converter wrote of the booster or wrapper.
    """
    import numpy as np

    text = _booster(model).model_to_string()
    steepness = re.search(r"^objective=binary sigmoid:(\S+)", text, re.MULTILINE)
    lowered = _lowered(text) if is_given_float32 else set()
    for node in nodes:
        if not node.op_type.startswith("TreeEnsemble"):
            continue
        named = {entry.name: entry for entry in node.attribute}
        if steepness is not None and "class_weights" in named:
            weights = np.asarray(named["class_weights"].floats) * float(steepness[1])
            named["class_weights"].floats[:] = weights.tolist()
        if lowered:
            written = np.asarray(named["nodes_values"].floats, np.float32)
            places = zip(named["nodes_treeids"].ints, named["nodes_featureids"].ints, written.tolist(), strict=True)
            lower = np.nextafter(written, np.float32(-np.inf))
            named["nodes_values"].floats[:] = np.where([at in lowered for at in places], lower, written).tolist()


def cut_fractions(nodes: Iterable[NodeProto], model: Any) -> tuple[list[NodeProto], list[TensorProto]]:
    """Cut off what stands behind the point in columns of categories (`categorical_feature`): LightGBM reads 3.7 there
    as category 3, where the converted trees compare 3.7 itself.

    Args:
        nodes: What the converter wrote of the booster or wrapper.

    Returns:
        The nodes that cut, whose places are before the trees, and their weights.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    columns = _category_columns(_booster(model).model_to_string())
    cut: list[NodeProto] = []
    weights: list[TensorProto] = []
    for node in nodes:
        if columns and node.op_type.startswith("TreeEnsemble"):
            rows, into = node.input[0], f"{node.output[0]}_categories"
            one, mask, fractions, whole = (f"{into}_{part}" for part in ("one", "mask", "fractions", "whole"))
            cut += [
                helper.make_node("Mod", [rows, one], [fractions], name=fractions, fmod=1),  # with the number's sign
                helper.make_node("Sub", [rows, fractions], [whole], name=whole),
                helper.make_node("Where", [mask, whole, rows], [into], name=into),
            ]
            chosen = np.isin(np.arange(_booster(model).num_feature()), columns)[np.newaxis]
            weights += [numpy_helper.from_array(np.array(1, np.float32), one), numpy_helper.from_array(chosen, mask)]
            node.input[0] = into
    return cut, weights


def _category_columns(text: str) -> list[int]:
    """Of a model's text the numbers of the columns that it splits on as categories."""
    found: set[int] = set()
    for lines in _trees(text):
        kinds, columns = (lines.get(name, "").split() for name in ("decision_type", "split_feature"))
        found |= {int(column) for column, kind in zip(columns, kinds, strict=True) if int(kind) & _BY_CATEGORY}
    return sorted(found)


def _lowered(text: str) -> set[tuple[int, int, float]]:
    """Of a model's text: tree, column and threshold as float32 rounds it, of those that must lie one step lower."""
    import numpy as np

    found = set()
    for number, (columns, thresholds) in enumerate(_splits(text)):
        rounded = thresholds.astype(np.float32)
        lower = tabular.thresholds_in_float32(thresholds, is_given_float32=True) < rounded
        found |= {(number, columns[at], float(rounded[at])) for at in np.flatnonzero(lower)}
    return found


def splits(model: Any) -> Iterator[tuple[list[int], Any]]:
    """Of each tree of a booster or wrapper the columns and the thresholds of its splits, in float64."""
    return _splits(_booster(model).model_to_string())


def _splits(text: str) -> Iterator[tuple[list[int], Any]]:
    import numpy as np

    for lines in _trees(text):
        thresholds = np.array(lines.get("threshold", "").split(), np.float64)
        yield list(map(int, lines.get("split_feature", "").split())), thresholds


def _trees(text: str) -> Iterator[dict[str, str]]:
    """Of a model's text the lines `name=values` of each tree, and after its last what stands behind the trees."""
    for tree in text.split("\nTree=")[1:]:
        yield dict(line.partition("=")[::2] for line in tree.splitlines())


def _largest_category(lines: Iterable[str]) -> int:
    """Of a model's text an upper bound of the categories that it splits on: each split has their bits, in words of 32,
    from `cat_boundaries` to the next."""
    ends = [
        [int(end) for end in line.partition("=")[2].split()] for line in lines if line.startswith("cat_boundaries=")
    ]
    words = [end - start for one in ends for start, end in pairwise(one)]
    return 32 * max(words, default=0) - 1


def _missing_kinds(line: str) -> set[int]:
    """Of a line of the model's text that has the kinds of a tree's splits, what they take for missing: bits 2 and 3 of
    each."""
    if not line.startswith("decision_type="):
        return set()
    return {int(kind) >> 2 & 3 for kind in line.partition("=")[2].split()}


def _signature(model: Any, source: SourceModel) -> Signature:
    booster = _booster(model)
    features = int(booster.num_feature())
    if hasattr(model, "predict_proba"):
        dtype = tabular.label_dtype(model.classes_, source)
        return tabular.signature(features, [tabular.label(dtype), tabular.probabilities(len(model.classes_))])
    return tabular.signature(features, [tabular.prediction(int(booster.num_model_per_iteration()))])


def _repairs(names: list[str], wanted: Signature, objective: str) -> list[tuple[str, tabular.Repair]]:
    """The converter gives `label, probabilities` for every classifying objective, and `variable` for the others."""
    if wanted.outputs[0].name == tabular.LABEL:
        return [(names[0], "flatten"), (names[1], "keep")]
    if objective == "binary":
        return [(names[1], "second")]
    if objective == "multiclass":
        return [(names[1], "keep")]
    return [(names[0], "flatten")]
