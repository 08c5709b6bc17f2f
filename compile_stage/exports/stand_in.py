"""A program that runs an exported Triton model without Triton and without our package: plain ONNX Runtime, OpenVINO or
TensorRT with what `config.pbtxt` says, or `model.py` with a stand-in for the module that Triton gives it.

It reads a task as JSON from standard input and prints a marked line of JSON. It is no Triton: requests come one after
another, as arrays, and what the server does between network and backend is not there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

LEVELS = {0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", -1: "ORT_ENABLE_BASIC", 2: "ORT_DISABLE_ALL"}


def settings(config: dict[str, Any]) -> dict[str, str]:
    """The configuration's parameters."""
    return {one["key"][0]: one["value"][0]["string_value"][0] for one in config.get("parameters", [])}


def with_onnxruntime(config: dict[str, Any], home: Path) -> Any:
    """Calls of a session with the options that Triton's backend takes from the configuration."""
    import onnxruntime

    asked, options = settings(config), onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(asked["intra_op_thread_count"])
    options.inter_op_num_threads = int(asked["inter_op_thread_count"])
    options.execution_mode = [onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL][
        int(asked["execution_mode"])
    ]
    options.enable_cpu_mem_arena = asked["enable_mem_arena"] == "1"
    graph = config.get("optimization", [{}])[0].get("graph", [{}])[0]
    level = LEVELS[graph.get("level", [0])[0]]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    file = home / config["default_model_filename"][0]
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [one["name"][0] for one in config["output"]]
    return lambda batch: dict(zip(names, session.run(names, batch), strict=True))


def with_openvino(config: dict[str, Any], home: Path) -> Any:
    """Calls of a model for the largest batch, to which each request is filled up."""
    import openvino

    asked, core = settings(config), openvino.Core()
    wanted: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": int(asked["INFERENCE_NUM_THREADS"]),
        "NUM_STREAMS": asked["NUM_STREAMS"],
        "PERFORMANCE_HINT": asked["PERFORMANCE_HINT"],
    }
    if asked.get("HINT_BF16") == "YES":
        wanted["INFERENCE_PRECISION_HINT"] = "bf16"
    graph = core.read_model(home / config["default_model_filename"][0])
    largest = config["max_batch_size"][0]
    graph.reshape({one["name"][0]: [largest, *one["dims"]] for one in config["input"]})
    request = core.compile_model(graph, "CPU", wanted).create_infer_request()
    inputs, outputs = ([one["name"][0] for one in config[side]] for side in ("input", "output"))

    def call(batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(next(iter(batch.values())))
        request.infer([batch[name][np.arange(largest) % rows] for name in inputs])
        return {
            name: tensor.data[:rows].copy() for name, tensor in zip(outputs, request.output_tensors, strict=True)
        }  # fmt: skip

    return call


def with_python(config: dict[str, Any], home: Path) -> Any:
    """Calls of `model.py`."""
    sys.modules["triton_python_backend_utils"] = _backend_utils()
    spec = importlib.util.spec_from_file_location("model", home / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    plain = {
        "name": config["name"][0],
        "input": [{"name": one["name"][0], "dims": one["dims"]} for one in config["input"]],
        "output": [{"name": one["name"][0], "dims": one["dims"]} for one in config["output"]],
        "parameters": {key: {"string_value": value} for key, value in settings(config).items()},
    }
    model.initialize(
        {
            "model_config": json.dumps(plain),
            "model_repository": str(home.parent),
            "model_version": home.name,
            "model_name": plain["name"],
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )

    def call(batch: dict[str, Any]) -> dict[str, Any]:
        [response] = model.execute([_Request({name: _as_triton(array) for name, array in batch.items()})])
        if response.error is not None:
            raise RuntimeError(response.error.message())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}

    return call


def with_mlflow(config: dict[str, Any], home: Path) -> Any:
    """What MLflow's scoring server answers to a request, for a bundle."""
    import mlflow.pyfunc
    from mlflow.pyfunc import scoring_server

    model = mlflow.pyfunc.load_model(str(home), model_config={"on_hardware_mismatch": "ignore"})

    def call(batch: dict[str, Any]) -> dict[str, Any]:
        text = batch["request"][0].decode()
        answered = scoring_server.invocations(text, "application/json", model, model.metadata.get_input_schema())
        if answered.status != 200:
            raise RuntimeError(answered.response)
        return {"response": np.array([answered.response.encode()], dtype=object)}

    return call


def _as_triton(array: Any) -> Any:
    """Texts as Triton hands them over: objects that are UTF-8."""
    if array.dtype.kind not in "UO":
        return array
    texts = np.empty(array.shape, dtype=object)
    texts.flat[:] = [text if isinstance(text, bytes) else text.encode() for text in array.flat]
    return texts


class _Request:
    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch


class _Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class _Error:
    def __init__(self, message: str) -> None:
        self._message = message

    def message(self) -> str:
        return self._message


class _Response:
    def __init__(self, output_tensors: list[_Tensor], error: _Error | None = None) -> None:
        self.output_tensors, self.error = output_tensors, error


def _tensor_of(request: _Request, name: str) -> _Tensor | None:
    return _Tensor(name, request.batch[name]) if name in request.batch else None


def _backend_utils() -> types.ModuleType:
    """What of Triton's own module `model.py` uses."""
    module = types.ModuleType("triton_python_backend_utils")
    vars(module).update(
        Tensor=_Tensor, InferenceResponse=_Response, TritonError=_Error, get_input_tensor_by_name=_tensor_of
    )
    return module


OPEN = {"onnxruntime": with_onnxruntime, "openvino": with_openvino, "python": with_python, "mlflow": with_mlflow}


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Run the arrays of a task in batches of one size; output name → file."""
    config, home = task["config"], Path(task["home"])
    call = OPEN[config["backend"][0]](config, home)
    if "request" in task:
        answered = call({"request": np.array([task["request"].encode()], dtype=object)})["response"]
        return {"response": answered.reshape(-1)[0].decode()}
    whole = {name: np.load(file, allow_pickle=False) for name, file in task["inputs"].items()}
    rows = len(next(iter(whole.values())))
    written: dict[str, dict[str, str]] = {}
    for size in task["sizes"]:
        parts = []
        for start in range(0, max(1, rows - size + 1), size):  # fewer rows than a batch has are repeated
            part = np.arange(start, start + size) % rows
            parts.append(call({name: array[part] for name, array in whole.items()}))
        for number, name in enumerate(parts[0]):
            file = str(Path(task["results"]) / f"{size}-{number}.npy")
            array = np.concatenate([part[name] for part in parts])
            np.save(file, array.astype(str) if array.dtype == object else array, allow_pickle=False)
            written.setdefault(name, {})[str(size)] = file
    return {"outputs": written}


def main() -> None:
    """One task."""
    task = json.loads(sys.stdin.readline())
    try:
        found = answer(task)
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises is the answer
        found = {"error": f"{type(error).__name__}: {getattr(error, 'problem', error)}"}
    print("\n" + task["mark"] + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
