"""Which part of a custom pyfunc is compiled: the mark that a `mlflow.pyfunc.PythonModel` puts on its network.

    import compile_stage.pyfunc

    model.net = compile_stage.pyfunc.compiled(model.net, example=ids)
    mlflow.pyfunc.log_model(name="model", python_model=model, ...)

The published version is the same pyfunc, with the network replaced by the artifact that was proven. docs/sources.md has
what a network must be like. The mark is an attribute of the network: whoever loads the original needs nothing of this
package, unless `load_context` itself calls `compiled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

Network = TypeVar("Network")

MARK = "_compile_stage_example"


class Example(NamedTuple):
    """What a marked network is called with: NumPy arrays, by position and by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def compiled(network: Network, *, example: Any) -> Network:
    """Mark a network as the part that is compiled. It stays the same object, and computes as before.

    Args:
        network: A `torch.nn.Module`, which the PythonModel holds as an attribute of its own.
        example: What it is called with: a tensor or array, a tuple of them, or a dict of them by the name of the
            argument. Axis 0 is the batch; give two rows or more, since a size of one would be fixed. In arguments of
            whole numbers (tokens) axis 1 stays free too.

    Returns:
        The network.

    Raises:
        TypeError: An example is no tensor and no array.
    """
    if isinstance(example, Mapping):
        held = Example((), {str(name): _array(value) for name, value in example.items()})
    else:
        values = example if isinstance(example, tuple | list) else (example,)
        held = Example(tuple(_array(value) for value in values), {})
    if not held.args and not held.kwargs:
        message = "the example is empty: give what the network is called with"
        raise TypeError(message)
    setattr(
        network, MARK, (held.args, dict(held.kwargs))
    )  # plain values, so that a pickle of it needs no class of ours
    return network


def example_of(network: Any) -> Example | None:
    """The example that a network was marked with; None for one without a mark."""
    held = vars(network).get(MARK) if hasattr(network, "__dict__") else None
    return None if held is None else Example(*held)


def _array(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        message = f"an example is a tensor or an array of numbers with a batch axis, not {type(value).__name__}"
        raise TypeError(message)
    return array
