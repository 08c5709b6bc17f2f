"""A model of Triton's Python backend: the published bundle beside it, by the loader that it carries.

Copied by `compile-stage export --to triton`. Nothing of it is of one model: names and types are those of the
configuration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model: Any
        config = json.loads(args["model_config"])
        home = Path(args["model_repository"])
        if not (home / "config.pbtxt").is_file():  # some versions name the repository, not the model's folder
            home = home / config["name"]
        bundle = home / "compile-stage" / "bundle"
        settings = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        wanted = {
            "threads": int(settings["threads"]),
            "on_hardware_mismatch": settings["on_hardware_mismatch"],
        }
        self._inputs = [one["name"] for one in config["input"]]
        self._outputs = [one["name"] for one in config["output"]]
        self._answers_requests = self._inputs == ["request"] and self._outputs == ["response"]
        sys.path.insert(0, str(bundle / "code"))
        if self._answers_requests:
            import mlflow.pyfunc

            self._model = mlflow.pyfunc.load_model(str(bundle), model_config=wanted)
        else:
            from compile_stage.flavor import CompiledModel

            self._model = CompiledModel(bundle, **wanted)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            given = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
            answered = self._respond(given) if self._answers_requests else self._run(given)
        except Exception as error:  # noqa: BLE001 - one request's error is not another's
            reason = getattr(error, "problem", None) or str(error)
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(reason))
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, answered[name]) for name in self._outputs]
        )

    def _run(self, given: dict[str, Any]) -> dict[str, Any]:
        texts = {spec.name for spec in self._model.signature.inputs if spec.dtype == "str"}
        batch = {name: _decoded(array) if name in texts else array for name, array in given.items()}
        refused = getattr(
            self._model, "refused_values", getattr(self._model, "missing", None)
        )  # bundles of earlier versions have one or none
        if refused is not None and (reason := refused.refuse(batch)) is not None:
            raise ValueError(reason)
        answered = self._model.run(batch)
        return {
            name: value.astype(object) if value.dtype.kind == "U" else np.ascontiguousarray(value)
            for name, value in answered.items()
        }

    def _respond(self, given: dict[str, Any]) -> dict[str, Any]:
        from mlflow.pyfunc import scoring_server

        text = given["request"].reshape(-1)[0]
        text = text.decode("utf-8") if isinstance(text, bytes) else str(text)
        answer = scoring_server.invocations(
            text, "application/json", self._model, self._model.metadata.get_input_schema()
        )
        if answer.status != 200:
            raise ValueError(answer.response)
        return {"response": np.array([answer.response.encode("utf-8")], dtype=object)}

    def finalize(self) -> None:
        if not self._answers_requests:
            self._model.close()


def _decoded(array: Any) -> Any:
    """Texts from the bytes that Triton hands over. As objects: NumPy's own type of text drops zero bytes at its end."""
    decoded = np.empty(array.shape, dtype=object)
    decoded.flat[:] = [text.decode("utf-8") for text in array.flat]
    return decoded
