"""A BentoML service of the published bundle beside it, by the loader that it carries.

Copied by `compile-stage export --to bentoml`. Nothing of it is of one model: names and types are those of the bundle's
manifest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import bentoml

BUNDLE = Path(__file__).parent / "bundle"
MANIFEST = json.loads((BUNDLE / "data" / "manifest.json").read_text(encoding="utf-8"))
ANSWERS_REQUESTS = any(MANIFEST["answer"].get(key) for key in ("text", "media", "python_model"))
MISMATCH = os.environ.get("COMPILE_STAGE_ON_HARDWARE_MISMATCH", MANIFEST["on_hardware_mismatch"])


@bentoml.service(resources={"cpu": str(MANIFEST["threads"])}, workers=1)
class PublishedModel:
    """One process, and as many threads as the artifact was proven with."""

    def __init__(self) -> None:
        sys.path.insert(0, str(BUNDLE / "code"))
        if ANSWERS_REQUESTS:
            import mlflow.pyfunc

            self.model = mlflow.pyfunc.load_model(str(BUNDLE), model_config={"on_hardware_mismatch": MISMATCH})
        else:
            from compile_stage.flavor import CompiledModel

            self.model = CompiledModel(BUNDLE, on_hardware_mismatch=MISMATCH)

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Answer tensors by name, nested lists in and out; a model of texts, pictures or recordings takes a request of
        MLflow's scoring protocol, and answers as its scoring server does."""
        try:
            return self.respond(inputs) if ANSWERS_REQUESTS else self.run(inputs)
        except Exception as error:
            if (problem := getattr(error, "problem", None)) is None and not isinstance(error, ValueError):
                raise
            raise bentoml.exceptions.InvalidArgument(problem or str(error)) from error

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        kinds = {spec.name: spec.dtype for spec in self.model.signature.inputs}
        batch = {name: converted(name, value, kinds.get(name)) for name, value in inputs.items()}
        refused = getattr(
            self.model, "refused_values", getattr(self.model, "missing", None)
        )  # bundles of earlier versions have one or none
        if refused is not None and (reason := refused.refuse(batch)) is not None:
            raise ValueError(reason)
        return {name: array.tolist() for name, array in self.model.run(batch).items()}

    def respond(self, inputs: dict[str, Any]) -> dict[str, Any]:
        from mlflow.pyfunc import scoring_server

        schema = self.model.metadata.get_input_schema()
        answer = scoring_server.invocations(json.dumps(inputs), "application/json", self.model, schema)
        if answer.status != 200:
            raise ValueError(answer.response)
        answered: dict[str, Any] = json.loads(answer.response)
        return answered


def converted(name: str, value: Any, kind: str | None) -> Any:
    """JSON's value as an array of that type. Raises ValueError for an infinite value, and where the type can't hold
    what is given: NumPy cuts off fractions, makes an overflow infinite, a null false, text of anything, and numbers of
    text."""
    import numpy as np

    entries = np.asarray(value, dtype=object).ravel().tolist()
    is_text = [isinstance(entry, str) for entry in entries]
    if kind == "str" and not all(is_text):
        other = entries[is_text.index(False)]
        raise ValueError(f"input {name!r} must be text, and holds {'a missing one' if other is None else repr(other)}")
    if kind not in ("str", None) and any(is_text):
        raise ValueError(f"input {name!r} holds the text {entries[is_text.index(True)]!r}, which {kind} can't hold")
    given = np.asarray(value)
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, kind)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"input {name!r} holds what {kind} can't hold: {error}") from error
    if array.dtype.kind == "f":  # an overflow becomes infinite too; predict() refuses both
        lost = np.isinf(array)
    elif given.dtype.kind in "iufO" and array.dtype.kind in "iub":  # objects: a null, or more than 64 bits
        lost = array != given
    else:
        return array
    if lost.any():
        what = "an infinite value, or one that" if array.dtype.kind == "f" else "which"
        raise ValueError(f"input {name!r} holds {given[lost].flat[0]}, {what} {kind} can't hold")
    return array
