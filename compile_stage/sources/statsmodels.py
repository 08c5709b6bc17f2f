"""statsmodels: models that are a linear combination of columns, with the inverse of a link around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.sources import graph, logged_code, mlmodel, tabular
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from onnx import NodeProto

    from compile_stage.core.tensors import Batch

_OPSET = 17

# What predict() makes of the linear combination, by the class of the model; of GLM the link says it.
_OF_MODELS = {
    "OLS": "identity", "WLS": "identity", "GLS": "identity", "GLSAR": "identity", "RLM": "identity",
    "QuantReg": "identity", "Logit": "logit", "Probit": "probit", "Poisson": "log",
}  # fmt: skip
_OF_LINKS = {"Identity": "identity", "Log": "log", "Logit": "logit", "Probit": "probit", "InversePower": "inverse"}


class StatsmodelsSource(Exporter):
    """Models that `mlflow.statsmodels` logged."""

    name = "statsmodels"
    requires = ("statsmodels",)
    extra = "statsmodels"
    framework = "statsmodels"
    capabilities = SourceCapabilities(computes_wider=True, asked_on_one_thread=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        if (reason := mlmodel.missing_file(_file(source), source) or tabular.refuse_columns(source)) is not None:
            return reason
        if not compliance.allow_pickle:
            return (
                "it is a pickle, the only form in which MLflow logs this flavor, and pickled models execute code when "
                "loaded: set compliance.allow_pickle in the policy if you trust where it comes from"
            )
        try:
            fitted = _load(source)
            _link(fitted)
            _weights(fitted, source)
        except SourceError as error:
            return error.reason
        return None

    def open(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target)

    def open_as_given(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        return _open(source, target, as_given=True)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        fitted = _load(source)
        weights, constant, columns = _weights(fitted, source)
        wanted = _signature(columns)
        demand_shapes(wanted, shapes, source)
        value, (nodes, numbers) = helper.make_tensor_value_info, _inverse(_link(fitted))
        model = helper.make_model(
            helper.make_graph(
                [
                    helper.make_node("MatMul", [tabular.INPUT, "weights"], ["weighted"]),
                    helper.make_node("Add", ["weighted", "constant"], ["combined"]),
                    helper.make_node("Reshape", ["combined", "flat"], ["linear"]),
                    *nodes,
                ],
                "model",
                [value(tabular.INPUT, TensorProto.FLOAT, [graph.BATCH, len(columns)])],
                [value(tabular.PREDICTION, TensorProto.FLOAT, [graph.BATCH])],
                [
                    numpy_helper.from_array(weights.astype(np.float32).reshape(-1, 1), "weights"),
                    numpy_helper.from_array(np.asarray(constant, np.float32), "constant"),
                    numpy_helper.from_array(np.array([-1], np.int64), "flat"),
                    *(numpy_helper.from_array(np.asarray(number), name) for name, number in numbers.items()),
                ],
            ),
            opset_imports=[helper.make_opsetid("", _OPSET)],
        )
        return graph.finish(model, source, shapes, into)

    def example(self, source: SourceModel) -> Batch | None:
        return mlmodel.named_example(source, _signature(_weights(_load(source), source)[2]), as_given=True)

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        fitted = _load(source)
        # What a formula was fitted on is looked for by name; a matrix comes in order.
        columns = _weights(fitted, source)[2] if _formula(fitted) is not None else ()
        # It computes and answers in float64.
        how = tabular.prediction_format(source, [tabular.PREDICTION], 0.0, fitted=columns)
        return {**how, "kind": "series", "no_rows": True}

    def packages(self) -> Mapping[str, str]:
        return package_versions("statsmodels", "patsy", "onnx")


@contextmanager
def _open(source: SourceModel, target: Target, *, as_given: bool = False) -> Iterator[Session]:
    fitted = _load(source)
    columns = _weights(fitted, source)[2]

    def call(arrays: Sequence[Any]) -> Sequence[Any]:
        import numpy as np
        import pandas as pd

        # A formula looks for its columns by name; else the matrix is the fastest that statsmodels has.
        rows = pd.DataFrame(arrays[0], columns=columns) if _formula(fitted) is not None else arrays[0]
        return [np.asarray(fitted.predict(rows), np.float32)]

    with tabular.limited_threads(target.threads):
        yield SourceSession(_signature(columns), call, partial(tabular.as_predict_gets, source) if as_given else None)


def _file(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "statsmodels").get("data") or "model.statsmodels")


def _load(source: SourceModel) -> Any:
    """The fitted model. The caller has asked `refuse`: reading it runs code."""
    import statsmodels
    from statsmodels.iolib.api import load_pickle

    def not_loaded(error: Exception) -> SourceError:
        problem = f"it can't be loaded: {first_line(error)}"
        return mlmodel.not_loaded(source, problem, statsmodels, "statsmodels_version")

    return logged_code.load_pickle(source, lambda: load_pickle(str(_file(source))), not_loaded)


def _signature(columns: Sequence[str]) -> Signature:
    return tabular.signature(len(columns), [tabular.prediction()])


def _formula(fitted: Any) -> Any:
    """What a formula made of the columns; None where the model was fitted on a matrix."""
    data = fitted.model.data
    return getattr(data, "model_spec", None) or getattr(data, "design_info", None)


def _link(fitted: Any) -> str:
    """A key of what `_inverse` knows. Raises SourceError for a model that is no such combination."""
    kind = type(fitted.model).__name__
    if kind == "GLM":
        link = type(fitted.model.family.link).__name__
        if link not in _OF_LINKS:
            raise SourceError(f"its link {link} has no conversion; these have: {', '.join(_OF_LINKS)}")
        return _OF_LINKS[link]
    if kind not in _OF_MODELS:
        raise SourceError(f"a model of class {kind} has no conversion; these have: GLM, {', '.join(_OF_MODELS)}")
    return _OF_MODELS[kind]


def _weights(fitted: Any, source: SourceModel) -> tuple[Any, float, tuple[str, ...]]:
    """(the weight of each column [columns] in float64, the constant, the columns in the order in which they come in).

    Raises:
        SourceError: A formula computes more than the columns themselves, or MLflow's signature has other columns.
    """
    import numpy as np

    parameters = dict(zip(map(str, fitted.model.exog_names), np.asarray(fitted.params, np.float64), strict=True))
    named = tuple(mlmodel.columns(source) or ())
    if _formula(fitted) is None:
        if named and len(named) != len(parameters):
            raise SourceError(
                f"it was fitted on {len(parameters)} columns, and its signature has {len(named)}: log it with a "
                "signature of the columns that predict() takes, the constant among them"
            )
        return np.array(list(parameters.values())), 0.0, named or tuple(parameters)
    constant = float(parameters.pop("Intercept", 0.0))
    columns = named or tuple(parameters)
    if computed := [name for name in parameters if name not in columns]:
        raise SourceError(
            f"its formula computes {', '.join(computed[:3])}, and only columns as they are can be converted: "
            "compute them before the model, and log it with a signature that has these columns"
        )
    return np.array([parameters.get(name, 0.0) for name in columns]), constant, columns


def _inverse(link: str) -> tuple[list[NodeProto], dict[str, Any]]:
    """(nodes from `linear` to the prediction, the numbers that they need)."""
    import numpy as np
    from onnx import helper

    single = {"identity": "Identity", "log": "Exp", "logit": "Sigmoid", "inverse": "Reciprocal"}
    if link in single:
        return [helper.make_node(single[link], ["linear"], [tabular.PREDICTION])], {}
    # The normal distribution function: (1 + erf(x / sqrt 2)) / 2.
    nodes = [
        helper.make_node("Mul", ["linear", "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["error"]),
        helper.make_node("Add", ["error", "one"], ["doubled"]),
        helper.make_node("Mul", ["doubled", "half"], [tabular.PREDICTION]),
    ]
    return nodes, {"root": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5)}
