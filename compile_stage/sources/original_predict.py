"""The original's predict(), as MLflow serves it: may it be loaded, what is it given, how wide does it run.

MLflow's loaders run what a model's files say: pickles, classes by name, code in the model's folder. A source reads the
same files with more care. So without `compliance.allow_pickle` only those loaders are called that read data and nothing
else, of the very files that the source has looked at.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compile_stage.core.digest import digest_file
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import Compliance, Predictions, SourceModel, Target
from compile_stage.core.tensors import Signature
from compile_stage.sources import mlmodel

_ALLOW = "set compliance.allow_pickle in the policy if you trust where it comes from"
_COLUMN_TYPES = {
    "double": "float64", "float": "float32", "long": "int64", "integer": "int32", "boolean": "bool", "string": "str",
}  # fmt: skip
_DEVICE = "MLFLOW_DEFAULT_PREDICTION_DEVICE"
_PICKLES = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"


def refuse(source: SourceModel, compliance: Compliance) -> str | None:
    """The reason why MLflow's pyfunc of the original may not be loaded; the source itself was not refused."""
    described = mlmodel.read(source).flavors
    pyfunc = described.get("python_function")
    if pyfunc is None:
        return "it was logged without a pyfunc, so it has no predict()"
    if compliance.allow_pickle:
        return None
    own, loader = described.get(source.flavor, {}), str(pyfunc.get("loader_module"))
    if source.flavor == "jax":
        return _refuse_jax(source, pyfunc)
    if loader != f"mlflow.{source.flavor}":
        return f"its pyfunc is loaded by {loader}, which is not MLflow's own for {source.flavor}: {_ALLOW}"
    if pyfunc.get("code"):
        return f"its pyfunc brings code of its own: {_ALLOW}"
    check = _DATA_ALONE.get(source.flavor)
    return check(source, own, pyfunc) if check else f"MLflow's loader of {source.flavor} may run code: {_ALLOW}"


def describe_input(source: SourceModel, signature: Signature, predictions: Predictions | None) -> dict[str, Any]:
    """What predict() is given, as `measure.predict_turns.build_input` reads it, and its name for people (`words`).

    Args:
        signature: The network's: what samples are.
        predictions: What the original answers to texts, pictures or recordings; None where predict() takes tensors.

    Raises:
        SourceError: Samples of the network are not what predict() takes.
    """
    if predictions is not None:
        words = "one item" if predictions.each else "a data frame" if predictions.column else "a list"
        return {
            "kind": "items", "texts": list(predictions.texts), "column": predictions.column, "pair": predictions.pair,
            "each": predictions.each, "words": words,
        }  # fmt: skip
    specs = mlmodel.read(source).inputs or ()
    names = [spec.name for spec in signature.inputs]
    if specs and all(spec.get("type") == "tensor" for spec in specs):
        dtypes = {
            str(spec.get("name", names[0])): str(spec.get("tensor-spec", {}).get("dtype") or "") or None
            for spec in specs
        }
        if "name" in specs[0]:
            return {"kind": "dict", "dtypes": dtypes, "words": "a dict of arrays"}
        return {"kind": "array", "dtypes": {names[0]: next(iter(dtypes.values()))}, "words": "an array"}
    if specs and "name" in specs[0]:
        columns = [[str(spec["name"]), _COLUMN_TYPES.get(str(spec.get("type")))] for spec in specs]
        texts = [name for name, dtype in columns if dtype == "str"]
        held = {spec.name for spec in signature.inputs if spec.dtype == "str"}
        if others := [name for name in texts if name not in held]:
            raise SourceError(f"its predict() takes text ({others[0]}), and the published one tensors")
        return {"kind": "frame", "columns": columns, "words": "a data frame"}
    return _by_example(mlmodel.raw_example(source), names)


def _by_example(example: Any, names: list[str]) -> dict[str, Any]:
    if hasattr(example, "columns"):
        return {"kind": "frame", "columns": [[str(name), None] for name in example.columns], "words": "a data frame"}
    if isinstance(example, Mapping) or len(names) > 1:
        return {"kind": "dict", "dtypes": {}, "words": "a dict of arrays"}
    return {"kind": "array", "dtypes": {}, "words": "an array"}


@contextmanager
def open_predict(source: SourceModel, compliance: Compliance, target: Target) -> Iterator[Any]:
    """The original's pyfunc, with the target's threads where its framework takes a number; the caller has asked
    `refuse`. Raises SourceError where MLflow can't load it."""
    with ExitStack() as stack:
        changed = {_DEVICE: target.device} if target.device in ("cpu", "cuda") else {}
        if source.flavor == "pytorch" and not compliance.allow_pickle:
            changed[_PICKLES] = "false"  # MLflow then looks into a .pt2 archive itself; of skops files it takes none
        stack.enter_context(_environment(changed))
        try:
            import mlflow.pyfunc
        except ImportError as error:
            raise SourceError("MLflow is not installed where the original runs, in its toolchain") from error
        folder = _with_threads(source, target.threads, stack)
        stack.enter_context(limited(target.threads))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other versions of what it was logged with
                loaded = mlflow.pyfunc.load_model(folder)
                _limit_model(loaded, source.flavor, target.threads)
        except Exception as error:
            problem = f"MLflow can't load its pyfunc: {type(error).__name__}: {first_line(error)}"
            raise SourceError(problem, where=source.uri) from error
        yield loaded


def _refuse_jax(source: SourceModel, pyfunc: Mapping[str, Any]) -> str | None:
    ours = Path(__file__).parents[1] / "serving" / "exported_jax.py"
    code = Path(source.path) / str(pyfunc.get("code"))
    files = [path for path in code.rglob("*") if path.is_file()] if pyfunc.get("code") == "code" else []
    alike = [path.name for path in files] == [ours.name] and digest_file(files[0]) == digest_file(ours)
    if pyfunc.get("loader_module") == ours.stem and pyfunc.get("data") == "data" and alike:
        return None
    return f"its pyfunc is loaded by code of its own, which is not what this release logs: {_ALLOW}"


def _refuse_elsewhere(_: SourceModel, own: Mapping[str, Any], pyfunc: Mapping[str, Any]) -> str | None:
    """The reason when the pyfunc reads another file than the flavor, which is the one that was looked at."""
    names = ("data", "pickled_model", "model_data")
    theirs = next((str(own[name]) for name in names if own.get(name)), None)
    read = {str(pyfunc[name]) for name in ("data", "model_path") if pyfunc.get(name)}
    return (
        None if theirs is not None and read == {theirs} else f"its pyfunc reads other files than its flavor: {_ALLOW}"
    )


def _refuse_onnx(source: SourceModel, own: Mapping[str, Any], pyfunc: Mapping[str, Any]) -> str | None:
    plain = all(isinstance(provider, str) for provider in own.get("providers") or ())
    if not plain or (own.get("onnx_session_options") or {}).get("extra_session_config"):
        return f"it sets options of ONNX Runtime that may name libraries: {_ALLOW}"
    return _refuse_elsewhere(source, own, pyfunc)


def _refuse_xgboost(source: SourceModel, own: Mapping[str, Any], pyfunc: Mapping[str, Any]) -> str | None:
    if not str(own.get("model_class") or "xgboost.").startswith("xgboost."):
        return f"it names a class that is not XGBoost's: {_ALLOW}"
    return _refuse_elsewhere(source, own, pyfunc)


def _refuse_pytorch(source: SourceModel, own: Mapping[str, Any], pyfunc: Mapping[str, Any]) -> str | None:
    data = mlmodel.within(source, own.get("model_data") or "data")
    pickled = not (data / "model.pt2").is_file() or (data / "model.pth").exists()
    return f"it is a pickle: {_ALLOW}" if pickled else _refuse_elsewhere(source, own, pyfunc)


def _refuse_transformers(source: SourceModel, _: Mapping[str, Any], __: Mapping[str, Any]) -> str | None:
    from compile_stage.sources.transformers_text import refuse_pyfunc

    return refuse_pyfunc(source)


_DATA_ALONE = {
    "onnx": _refuse_onnx,
    "sklearn": _refuse_elsewhere,  # without the opt-in the source takes skops files alone, of types that it knows
    "lightgbm": _refuse_elsewhere,
    "catboost": _refuse_elsewhere,
    "xgboost": _refuse_xgboost,
    "pytorch": _refuse_pytorch,
    "transformers": _refuse_transformers,
}
"""Loaders of MLflow that run no code of the model, each with what is still to be asked of it."""


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _with_threads(source: SourceModel, threads: int, stack: ExitStack) -> str:
    """The model's folder. Of an ONNX model a copy by links, since MLflow takes its session's threads from `MLmodel`."""
    if source.flavor != "onnx":
        return source.path
    from mlflow.models import Model

    folder = Path(stack.enter_context(TemporaryDirectory(prefix="compile-stage-original-")))
    for path in Path(source.path).iterdir():
        if path.name != "MLmodel":
            (folder / path.name).symlink_to(path)
    model = Model.load(str(Path(source.path) / "MLmodel"))
    options = model.flavors["onnx"].get("onnx_session_options") or {}
    model.flavors["onnx"]["onnx_session_options"] = {**options, "intra_op_num_threads": threads}
    model.save(str(folder / "MLmodel"))
    return str(folder)


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """While in it, OpenMP, BLAS and PyTorch compute with at most so many threads, where they are installed."""
    import importlib.util
    import sys

    with ExitStack() as stack:
        if importlib.util.find_spec("threadpoolctl") is not None:
            from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

            stack.enter_context(threadpool_limits(limits=threads))
        if "torch" in sys.modules:
            from compile_stage.plugin_support.torch_programs import threads_restored, use_threads

            stack.enter_context(threads_restored())
            use_threads(threads)
        yield


def _limit_model(loaded: Any, flavor: str, threads: int) -> None:
    """Where the model itself says how wide it runs."""
    if flavor not in ("sklearn", "xgboost"):
        return
    raw = loaded.get_raw_model()
    if flavor == "sklearn":
        from compile_stage.sources.sklearn import limit_jobs

        limit_jobs(raw, threads)
    elif hasattr(raw, "set_params"):
        raw.set_params(n_jobs=threads)
    else:
        raw.set_param({"nthread": threads})
