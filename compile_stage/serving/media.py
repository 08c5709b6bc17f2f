"""Pictures or recordings in, ranked labels out: what stands in front of and behind a network that classifies them.

Vendored into every published model beside `compile_stage.flavor`. A model whose manifest has `answer.media` takes what
its source's pyfunc took, and answers as that did: `mlflow.transformers` and the pipelines of transformers 5, which
`tests/sources/test_media_pipelines.py` compares it with. It needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.tensors import Signature
from compile_stage.serving.audio import read_audio
from compile_stage.serving.images import read_image
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.text_answers import FUNCTIONS

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

PARAMS = frozenset(("top_k", "function_to_apply", "batch_size"))
_READERS = {"image": read_image, "audio": read_audio}
_RANKED = {"image": ("label", "score"), "audio": ("score", "label")}  # columns, in the pipelines' own order
_IMAGE_TOP_K = 5  # the pipeline's default; that for audio answers with all labels


class MediaProcessor:
    """What goes in and out of one published model. Safe for several threads.

    Args:
        how: The manifest's `answer.media`: `kind` (`image` or `audio`), `processor` (`serving.images`,
            `serving.audio`), `labels`, `function` that makes scores of logits, `defaults` of its params, `output`.
        signature: Of the graph.
        batch_size: At most so many go through the graph at once.
    """

    def __init__(self, how: Mapping[str, Any], signature: Signature, batch_size: int = 1) -> None:
        if how["kind"] == "image":
            import PIL  # noqa: F401 - the error is wanted when the model is loaded, not when it is asked
        self._how, self._input = how, signature.inputs[0]
        self._fixed_batch = signature.fixed_batch
        self._batch_size = self._fixed_batch or batch_size

    def takes(self, data: Any) -> bool:
        """True for pictures and recordings; False for the network's own tensor, by name."""
        return not hasattr(data, "keys") or self._input.name not in {str(key) for key in data}

    def tensors(self, data: Any) -> Any:
        """The network's input, of a dict or data frame that has it by name."""
        return data

    def predict(self, data: Any, params: Mapping[str, Any] | None, run: Callable[[Batch], Batch]) -> Any:
        """A data frame: of one bare picture or recording a row for each label, best first; of several a row for each,
        with a column for each rank, whose cells are dicts.

        Args:
            run: The network: all inputs by name → all outputs by name.

        Raises:
            InputRefusedError: It is none, it does not fit the graph, or params are not known.
        """
        import pandas as pd

        wanted = {**self._how.get("defaults", {}), **(params or {})}
        if unknown := sorted(set(wanted) - PARAMS):
            raise InputRefusedError(f"there is no param {unknown[0]!r} here; there are {', '.join(sorted(PARAMS))}")
        items, single = read_items(data, self._how["kind"])
        if self._how["kind"] == "audio":
            single = len(items) == 1  # MLflow's pyfunc takes a list of one recording for a bare one
        outputs = self.run_network(self.encode(items), run)
        ranked = [self._ranked(scores, wanted) for scores in outputs]
        return pd.DataFrame(ranked[0] if single else ranked)

    def encode(self, items: Sequence[Any]) -> list[Array]:
        """The network's input for each, without the batch's axis. Raises InputRefusedError, with its number."""
        read, arrays = _READERS[self._how["kind"]], []
        for number, item in enumerate(items):
            try:
                arrays.append(read(item, self._how["processor"]))
            except InputRefusedError as error:
                raise InputRefusedError(f"{self._how['kind']} {number}: {error}") from error
            shape, wanted = arrays[-1].shape, self._input.shape[1:]
            fits = len(shape) == len(wanted) and all(
                not isinstance(size, int) or size == have for size, have in zip(wanted, shape, strict=True)
            )
            if not fits:
                raise InputRefusedError(
                    f"{self._how['kind']} {number} becomes an input of shape {list(shape)}, and the model takes "
                    f"{list(wanted)}"
                )
        return arrays

    def run_network(self, arrays: Sequence[Array], run: Callable[[Batch], Batch]) -> list[Array]:
        """The output for each. Those of one shape share a batch; none is padded."""
        import numpy as np

        answers: list[Any] = [None] * len(arrays)
        shapes: dict[tuple[int, ...], list[int]] = {}
        for index, array in enumerate(arrays):
            shapes.setdefault(array.shape, []).append(index)
        for indices in shapes.values():
            for start in range(0, len(indices), self._batch_size):
                chunk = indices[start : start + self._batch_size]
                rows = [*chunk, *[chunk[-1]] * ((self._fixed_batch or 0) - len(chunk))]
                batch = np.stack([arrays[index] for index in rows]).astype(self._input.dtype, copy=False)
                found = run({self._input.name: batch})[self._how["output"]]
                for row, index in enumerate(chunk):
                    answers[index] = found[row]
        return answers

    def _ranked(self, logits: Array, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        name = str(params.get("function_to_apply") or self._how["function"]).lower()
        if name not in FUNCTIONS:
            raise InputRefusedError(f"function_to_apply can be {', '.join(FUNCTIONS)}, not {name!r}")
        top = params.get("top_k")
        if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
            raise InputRefusedError(f"top_k is a whole number from 1, not {top!r}")
        kind, labels = self._how["kind"], self._how["labels"]
        top = top or (_IMAGE_TOP_K if kind == "image" else len(labels))
        scores = FUNCTIONS[name](logits)
        best = sorted(range(len(labels)), key=lambda index: -scores[index])[:top]
        entries = ({"label": labels[index], "score": scores[index].item()} for index in best)
        return [{column: entry[column] for column in _RANKED[kind]} for entry in entries]


def read_items(data: Any, kind: str) -> tuple[list[Any], bool]:
    """What was given, one by one, and whether it was one bare picture or recording.

    Raises:
        InputRefusedError: There is none, or a mapping of several.
    """
    if isinstance(data, str | bytes):
        return [data], True
    if hasattr(data, "columns"):
        return _some(list(data[data.columns[0]])), False
    if isinstance(data, Mapping):
        if len(data) != 1:
            raise InputRefusedError(f"give one {kind}, or a list of them, under one name")
        return read_items(next(iter(data.values())), kind)
    dtype = getattr(data, "dtype", None)
    if dtype is not None and not hasattr(data, "index") and dtype.kind in "uif":
        # The pipeline takes a stack of pictures, and answers the first.
        return [data[0] if kind == "image" and data.ndim == 4 else data], True
    if not isinstance(data, list | tuple) and not hasattr(data, "tolist"):
        raise InputRefusedError(f"the model takes an {kind}, a list of them or a data frame, not {type(data).__name__}")
    items = data.tolist() if hasattr(data, "tolist") else data
    return _some([next(iter(item.values())) if isinstance(item, Mapping) and item else item for item in items]), False


def _some(items: list[Any]) -> list[Any]:
    if not items:
        raise InputRefusedError("there is nothing to classify")
    return items
