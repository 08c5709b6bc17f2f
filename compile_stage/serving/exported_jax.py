"""The pyfunc of a model that `compile_stage.jax` logged: copied into the model, so that serving it needs no package of
ours.

It imports jax and NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _load_pyfunc(data_path: str) -> ExportedModel:
    return ExportedModel(Path(data_path))


class ExportedModel:
    """A `jax.export` artifact that answers arrays with an array, or with a dict where it has several outputs.

    Args:
        folder: Holds `model.jaxexport` and `model.json`.
    """

    def __init__(self, folder: Path) -> None:
        import jax
        from jax import export

        self._settings: Mapping[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        exported = export.deserialize(bytearray((folder / "model.jaxexport").read_bytes()))
        if any(spec["dtype"] in ("int64", "uint64", "float64") for spec in self._settings["inputs"]):
            jax.config.update("jax_enable_x64", True)

        def call(*arrays: Any) -> Any:
            given, named = jax.tree_util.tree_unflatten(exported.in_tree, list(arrays))
            return jax.tree_util.tree_leaves(exported.call(*given, **named))

        self._call = jax.jit(call)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Answer one batch."""
        import numpy as np

        inputs = self._settings["inputs"]
        if len(inputs) == 1 and not isinstance(model_input, Mapping):
            values = [model_input.to_numpy() if hasattr(model_input, "to_numpy") else model_input]
        else:
            values = [model_input[spec["name"]] for spec in inputs]
        arrays = [np.asarray(value, dtype=spec["dtype"]) for value, spec in zip(values, inputs, strict=True)]
        answers = [np.asarray(answer) for answer in self._call(*arrays)]
        if self._settings["answer"] == "array":
            return answers[0]
        return {spec["name"]: answer for spec, answer in zip(self._settings["outputs"], answers, strict=True)}
