"""What the shapes of a policy's target may ask of a model."""

from __future__ import annotations

from collections.abc import Iterable

from compile_stage.core.errors import SourceError
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature


def demand_inputs(signature: Signature, names: Iterable[str], source: SourceModel) -> None:
    """Raise SourceError when one of the inputs that shapes are given for is not the model's."""
    inputs = {spec.name for spec in signature.inputs}
    for name in names:
        if name not in inputs:
            raise SourceError(
                f"the policy gives shapes for an input {name!r} that the model does not have",
                fix=f"correct the target's shapes; the model has {', '.join(map(str, signature.inputs))}",
                where=source.uri,
            )
