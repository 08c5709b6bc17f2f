"""JAX models in MLflow, which has no flavor for them: a `jax.export` artifact with what it does not say of itself.

    import compile_stage.jax

    compile_stage.jax.log_model(lambda image: network.apply(params, image), name="model", example=images[:8])

MLflow then holds, in the model's folder `data/`:

    model.jaxexport   what `jax.export` wrote: StableHLO with the weights in it, for any batch size
    model.json        names, types and shapes of inputs and outputs; why there is no ONNX, where there is none
    model.onnx        the same function as ONNX, made by jax2onnx where that is installed

`MLmodel` has the flavor `jax`, and a pyfunc that needs jax and NumPy alone. docs/sources.md says what is made of it.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.errors import first_line

EXPORTED, SETTINGS, GRAPH = "model.jaxexport", "model.json", "model.onnx"
FLAVOR, LOADER = "jax", "exported_jax"
_OPSET = 18  # as our own exports


def log_model(function: Callable[..., Any], name: str, *, example: Any, **more: Any) -> Any:
    """`save_model`, logged to the active run. Returns MLflow's ModelInfo.

    Args:
        function: As for `save_model`.
        name: Of the model in the run.
        example: As for `save_model`.
        more: `shapes`, `outputs`, `onnx`, `signature`, `input_example` and `pip_requirements` of `save_model`, and
            arguments of `mlflow.models.Model.log`, such as `registered_model_name`.
    """
    import sys

    from mlflow.models import Model

    return Model.log(
        name=name, artifact_path=None, flavor=sys.modules[__name__], function=function, example=example, **more
    )


def save_model(
    path: str | Path,
    function: Callable[..., Any],
    *,
    example: Any,
    mlflow_model: Any = None,
    **options: Any,
) -> None:
    """Write a JAX function as an MLflow model.

    Args:
        path: Folder to make.
        function: Of arrays, with its weights bound (`lambda x: network.apply(params, x)`). It gives an array, or a
            tuple or dict of arrays.
        example: What it is called with: an array, a tuple of them, or a dict of them by the name of the argument. It
            gives types and sizes; axis 0 is the batch and stays open.
        mlflow_model: MLflow's own record, where it logs.
        options: `shapes`: argument → sizes as `jax.export.symbolic_shape` reads them, where more or less than the batch
            stays open (`{"ids": "batch, length"}`). `outputs`: names of the outputs. `onnx`: True to fail where
            jax2onnx can't write the function, False for none; by default it is tried where jax2onnx is installed, and
            the reason is noted. `signature`, `input_example`, `pip_requirements`: as MLflow's.

    Raises:
        TypeError: An example is no array of numbers with a batch axis, or an option is unknown.
        ValueError: JAX can't export the function with these sizes open.
    """
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME

    known = {"shapes", "outputs", "onnx", "signature", "input_example", "pip_requirements", "metadata"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"save_model takes no {', '.join(unknown)}: it takes {', '.join(sorted(known))}")
    folder = Path(path)
    data = folder / "data"
    data.mkdir(parents=True)
    settings = write_artifact(function, example, data, options)
    model = mlflow_model if mlflow_model is not None else Model()
    model.signature = options.get("signature") or _signature(settings)
    if options.get("metadata") is not None:
        model.metadata = options["metadata"]
    if (given := options.get("input_example")) is not None:
        from mlflow.models.utils import _save_example

        _save_example(model, given, str(folder))
    code = folder / "code"
    code.mkdir()
    shutil.copyfile(Path(__file__).parent / "serving" / f"{LOADER}.py", code / f"{LOADER}.py")
    from mlflow.utils.environment import _PythonEnv

    requirements = options.get("pip_requirements") or default_pip_requirements()
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))
    pyfunc.add_to_model(model, loader_module=LOADER, data="data", code="code", python_env="python_env.yaml")
    model.add_flavor(FLAVOR, data="data", jax_version=settings["jax"], code="code")
    model.save(str(folder / MLMODEL_FILE_NAME))


def default_pip_requirements() -> list[str]:
    """What the original needs where it is served."""
    from importlib.metadata import version

    import mlflow

    # By its module: what is installed may be mlflow-skinny, of the same version.
    others = [f"{name}=={version(name)}" for name in ("jax", "jaxlib", "flatbuffers", "numpy")]
    return [f"mlflow=={mlflow.__version__}", *others]


def write_artifact(
    function: Callable[..., Any], example: Any, data: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The files of `data/`. Returns what `model.json` says."""
    import jax
    from jax import export

    names, arrays, call = _arguments(function, example)
    structs = _symbolic(names, arrays, options.get("shapes") or {})
    answered: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        answer = call(*given)
        answered[:] = [answer]
        return list(jax.tree_util.tree_leaves(answer))

    flat.__name__ = "model"
    try:
        exported = export.export(jax.jit(flat), platforms=["cpu"])(*structs)
    except Exception as error:
        sizes = "; ".join(f"{name}: {', '.join(map(str, one.shape))}" for name, one in zip(names, structs, strict=True))
        message = (
            f"JAX can't export the function with these sizes open ({sizes}): {error}. Name fixed sizes where it needs "
            'them: shapes={"' + names[0] + '": "' + ", ".join(map(str, arrays[0].shape)) + '"}'
        )
        raise ValueError(message) from error
    outputs = list(options.get("outputs") or _output_names(answered[0]))
    if len(outputs) != len(exported.out_avals):
        raise ValueError(f"outputs names {len(outputs)}, and the function has {len(exported.out_avals)}")
    settings: dict[str, Any] = {
        "format": 1,
        "jax": jax.__version__,
        "inputs": _specs(names, exported.in_avals),
        "outputs": _specs(outputs, exported.out_avals),
        "answer": "dict" if isinstance(answered[0], Mapping) or len(outputs) > 1 else "array",
    }
    (data / EXPORTED).write_bytes(exported.serialize())
    settings["onnx"], settings["no_onnx"] = _graph(flat, structs, names, outputs, data, options.get("onnx"))
    (data / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return settings


def _arguments(function: Callable[..., Any], example: Any) -> tuple[list[str], list[Any], Callable[..., Any]]:
    """Names of the inputs, an array for each, and the function of arrays by position."""
    if isinstance(example, Mapping):
        names = [str(name) for name in example]
        return (
            names,
            [_array(example[name]) for name in example],
            lambda *a: function(**dict(zip(names, a, strict=True))),
        )
    values = example if isinstance(example, tuple | list) else (example,)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = positional[: len(values)]
    names += [f"input_{number}" for number in range(len(names), len(values))]
    return names, [_array(value) for value in values], function


def _array(value: Any) -> Any:
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise TypeError(f"an example is an array of numbers with a batch axis, not {type(value).__name__}")
    return array


def _symbolic(names: Sequence[str], arrays: Sequence[Any], shapes: Mapping[str, str]) -> list[Any]:
    """The arguments with open sizes; one symbol is one size in all of them."""
    import jax
    from jax import export

    if unknown := sorted(set(shapes) - set(names)):
        raise TypeError(f"shapes names {', '.join(unknown)}, and the function takes {', '.join(names)}")
    scope = export.SymbolicScope()
    structs = []
    for name, array in zip(names, arrays, strict=True):
        said = shapes.get(name) or ", ".join(["batch", *map(str, array.shape[1:])])
        structs.append(jax.ShapeDtypeStruct(export.symbolic_shape(said, scope=scope), array.dtype))
    return structs


def _output_names(answer: Any) -> list[str]:
    import jax

    leaves = jax.tree_util.tree_leaves(answer)
    if isinstance(answer, Mapping) and len(answer) == len(leaves):
        return [str(key) for key in sorted(answer)]  # the order in which JAX takes them
    return ["output"] if len(leaves) == 1 else [f"output_{number}" for number in range(len(leaves))]


def _specs(names: Sequence[str], avals: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": str(aval.dtype),
            "shape": [size if isinstance(size, int) else str(size) for size in aval.shape],
        }
        for name, aval in zip(names, avals, strict=True)
    ]


def _graph(
    flat: Callable[..., Any],
    structs: Sequence[Any],
    names: Sequence[str],
    outputs: Sequence[str],
    data: Path,
    wanted: bool | None,
) -> tuple[str | None, str]:
    """Write the function as ONNX. Returns the file's name, or None and why there is none."""
    from importlib.util import find_spec

    if wanted is False:
        return None, "it was logged with onnx=False"
    if find_spec("jax2onnx") is None:
        if wanted:
            raise ValueError("onnx=True needs jax2onnx: pip install jax2onnx")
        return None, "jax2onnx was not installed where it was logged"
    try:
        import jax2onnx

        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / GRAPH
            jax2onnx.to_onnx(
                flat, inputs=list(structs), opset=_OPSET, input_names=list(names), output_names=list(outputs),
                return_mode="file", output_path=str(file),
            )  # fmt: skip
            shutil.copyfile(file, data / GRAPH)
    except Exception as error:  # it raises what its many parts like
        said = first_line(error)
        if wanted:
            raise ValueError(f"jax2onnx can't write the function as ONNX: {said}") from error
        return None, f"jax2onnx can't write it: {said}"
    return GRAPH, ""


def _signature(settings: Mapping[str, Any]) -> Any:
    """MLflow's signature; a single tensor has no name, so that predict() takes a plain array."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(specs: Sequence[Mapping[str, Any]], named: bool) -> Any:
        return Schema(
            [
                TensorSpec(
                    np.dtype(spec["dtype"]),
                    [size if isinstance(size, int) else -1 for size in spec["shape"]],
                    spec["name"] if named else None,
                )
                for spec in specs
            ]
        )

    several = len(settings["inputs"]) > 1
    return ModelSignature(
        inputs=schema(settings["inputs"], several), outputs=schema(settings["outputs"], settings["answer"] == "dict")
    )
