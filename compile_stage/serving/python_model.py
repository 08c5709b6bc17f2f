"""A custom pyfunc around a compiled network: its predict() is the original's own code, and the network that it calls is
the artifact.

Vendored into every published model beside `compile_stage.flavor`. A model whose manifest has `answer.python_model`
carries the original's model directory as `data/pyfunc/`:

    attribute   where the PythonModel holds the network
    parameters  names of the network's arguments, in order, each an input of the graph
    outputs     the graph's outputs in the order in which the network gave them
    form        what it gave them as: tensor, tuple, list or dict
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

PYFUNC_FOLDER = "pyfunc"


class CompiledNetwork:
    """Stands where a PythonModel held its network, and answers with what that answered with.

    Args:
        how: The manifest's `answer.python_model`.
        run: The artifact: all inputs by name → all outputs by name.
    """

    def __init__(self, how: Mapping[str, Any], run: Callable[[Batch], Batch]) -> None:
        self._how, self._run = how, run
        self.training = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors are answered with tensors, arrays with arrays. Raises TypeError for other arguments than the
        network's."""
        names: Sequence[str] = self._how["parameters"]
        given = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if v is not None}}
        if len(args) > len(names) or set(given) != set(names):
            message = f"the compiled network takes {', '.join(names)}, and was called with {', '.join(given) or 'none'}"
            raise TypeError(message)
        tensors = any(hasattr(value, "detach") for value in given.values())
        answers = self._run({name: _array(value) for name, value in given.items()})
        return self._as_before([answers[name] for name in self._how["outputs"]], tensors=tensors)

    forward = __call__

    def _as_before(self, values: list[Any], *, tensors: bool) -> Any:
        if tensors:
            import torch

            values = [torch.from_numpy(value) for value in values]
        form = self._how["form"]
        if form == "tensor":
            return values[0]
        if form == "dict":
            return _Fields(zip(self._how["keys"], values, strict=True))
        return tuple(values) if form == "tuple" else values

    def _itself(self, *_: Any, **__: Any) -> CompiledNetwork:
        return self

    eval = to = cpu = float = requires_grad_ = _itself  # it is in evaluation mode, on the CPU and in FP32 already


class _Fields(dict):  # type: ignore[type-arg]
    """A dict whose values are attributes too, as those of transformers' answers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def load_python_model(folder: Path, config: Mapping[str, Any] | None = None) -> Any:
    """The original pyfunc, as MLflow loads it. It runs the code that lies in the folder.

    Args:
        config: Settings that its code reads, in place of those that it was logged with.
    """
    import mlflow.pyfunc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other versions of what it was logged with: its answers are compared
        return mlflow.pyfunc.load_model(str(folder), model_config=dict(config) if config else None)


@contextmanager
def replaced(loaded: Any, attribute: str, network: Any) -> Iterator[None]:
    """The pyfunc with another network in that attribute, until the context ends."""
    model = loaded.unwrap_python_model()
    original = getattr(model, attribute)
    setattr(model, attribute, network)
    try:
        yield
    finally:
        setattr(model, attribute, original)


def with_network(loaded: Any, how: Mapping[str, Any], run: Callable[[Batch], Batch]) -> Any:
    """The pyfunc with the artifact in place of its network, for good."""
    setattr(loaded.unwrap_python_model(), how["attribute"], CompiledNetwork(how, run))
    return loaded


def _array(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value)
