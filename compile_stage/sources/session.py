"""The session that every source opens: named arrays in, named arrays out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from compile_stage.core.tensors import Batch

    Arrays = Sequence[NDArray[Any]]


class SourceSession:
    """A `core.ports.Session` around a function of arrays.

    Args:
        signature: Inputs and outputs, in the order in which `call` takes and gives them.
        call: Arrays in the order of the inputs → arrays in the order of the outputs. What it returns is copied, because
            frameworks hand out views of buffers that they use again.
        as_given: What becomes of the inputs where numbers are not converted to the types of the signature
            (`Exporter.open_as_given`).
    """

    def __init__(
        self,
        signature: Signature,
        call: Callable[[Arrays], Sequence[Any]],
        as_given: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._signature = signature
        self._call = call
        self._as_given = as_given

    @property
    def signature(self) -> Signature:
        """Names, dtypes and shapes of the original model."""
        return self._signature

    def run(self, batch: Batch) -> Batch:
        """All outputs by name; an input of another numeric dtype is converted to the model's. Text comes as a NumPy
        `str` array.

        Raises:
            SourceError: An input is missing.
        """
        import numpy as np

        absent = [spec.name for spec in self._signature.inputs if spec.name not in batch]
        if absent:
            raise SourceError(f"the samples lack the model's input {', '.join(absent)}; they have {', '.join(batch)}")
        given = batch if self._as_given is None else self._as_given(batch)
        converts = self._as_given is None
        arrays = [
            _as_dtype(given[spec.name], spec.dtype) if converts or spec.dtype == "str" else given[spec.name]
            for spec in self._signature.inputs
        ]
        answers = self._call(arrays)
        return {
            spec.name: np.array(answer, dtype=spec.dtype)
            for spec, answer in zip(self._signature.outputs, answers, strict=True)
        }


def _as_dtype(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    import numpy as np

    if dtype == "str":
        return array if array.dtype.kind == "O" else array.astype(object)
    wanted: np.dtype[Any] = np.dtype(dtype)
    return np.ascontiguousarray(array, dtype=wanted) if array.ndim else array.astype(wanted)
