"""Calls on an NVIDIA GPU that are recorded once for each shape and replayed: CUDA graphs.

A small network is some hundred kernels of a few microseconds each, and launching them takes longer than they run. A
recorded graph is one launch. It reads and writes the same addresses each time, so inputs are copied into buffers of
ours, and outputs out of them: they are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.generation import has_cache
from compile_stage.core.records import Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.known_sizes import KNOWN_SIZES, Shapes, known_sizes, shapes_of

OPTION = "cuda_graphs"
"""Of a target, and of an artifact: calls of the known sizes are recorded."""

# Of the largest value of an output: kernels that add in any order differ by less.
_SAME = 1e-3


class Recording(Protocol):
    """A recorded call."""

    def answers(self, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        """The outputs of these names, in arrays of the caller's."""


class RecordedCalls(ABC):
    """A program on a GPU whose calls of some shapes are recorded when they first come; others are launched kernel by
    kernel.

    Args:
        inputs: Their names, in the order of `shapes`.
        shapes: Each keeps its buffers on the GPU.
    """

    def __init__(self, inputs: Sequence[str], shapes: Sequence[Shapes]) -> None:
        self._inputs = list(inputs)
        self._calls: dict[Shapes, Recording | None] = dict.fromkeys(shapes)

    @abstractmethod
    def launch(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs of these names, kernel by kernel."""

    @abstractmethod
    def record(self, number: int, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> Recording:
        """A recording, or what makes one when it is first replayed.

        Args:
            number: Of the recording in this program.
            feeds: Inputs of that shape.
            outputs: What they were answered with. Their shapes follow from those of the inputs, or nothing could be
                recorded.
        """

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs of these names."""
        shapes = tuple(feeds[name].shape for name in self._inputs)
        if (call := self._calls.get(shapes)) is not None:
            return call.answers(feeds, names)
        outputs = self.launch(names, feeds)
        if shapes in self._calls:
            number = sum(one is not None for one in self._calls.values())
            self._calls[shapes] = self.record(number, feeds, dict(zip(names, outputs, strict=True)))
        return outputs


def record_where_possible(
    asked: Mapping[str, Any],
    signature: Signature,
    target: Target,
    start: Callable[[Mapping[str, Any]], AbstractContextManager[RecordedCalls]],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of an artifact whose calls are recorded, where they can be and the policy does not say otherwise; and
    a note (docs/decisions/0113).

    Args:
        asked: The artifact's options so far.
        start: Opens the program with such options.

    Raises:
        NothingCompiledError: The policy wants it and it can't be.
    """
    wanted = asked.get(OPTION)
    if wanted is False:
        return dict(asked), ()
    known = known_sizes(signature, target)
    shapes = shapes_of(signature, known)
    recording = {**asked, OPTION: True, **({KNOWN_SIZES: known} if known else {})}
    reason: str | None = "the sizes of its inputs are not known beforehand"
    if shapes and not has_cache(signature):
        try:
            with start(recording) as calls:
                reason = refuse(calls, signature, shapes)
        except NothingCompiledError as error:
            reason = error.problem
    if reason is None:
        return recording, ("calls are recorded as CUDA graphs",)
    if wanted:
        raise NothingCompiledError(f"calls can't be recorded as CUDA graphs: {reason}", fix=f"leave out {OPTION}")
    return dict(asked), (f"calls are launched kernel by kernel, not recorded as CUDA graphs: {reason}",)


def refuse(calls: RecordedCalls, signature: Signature, shapes: Sequence[Shapes]) -> str | None:
    """Why calls of these shapes are not recorded: the runtime can't, or they are answered otherwise. Asked with zeros
    and ones, which are classes, tokens and switches too; a validation asks with samples."""
    names = [spec.name for spec in signature.outputs]
    try:
        for one in shapes:
            for value in (0, 1, 0):  # the first call of a shape is not recorded
                feeds = {
                    spec.name: np.full(shape, value, spec.dtype)
                    for spec, shape in zip(signature.inputs, one, strict=True)
                }
                if not all(map(_alike, calls.run(names, feeds), calls.launch(names, feeds))):
                    return "they are answered otherwise than kernel by kernel"
    except Exception as error:  # noqa: BLE001 - errors of runtimes share no base class
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return None


def _alike(left: Any, right: Any) -> bool:
    if left.dtype.kind not in "fc" or not left.size:
        return bool(np.array_equal(left, right))
    scale = float(np.max(np.abs(right), initial=0.0, where=np.isfinite(right)))
    return bool(np.allclose(left, right, rtol=_SAME, atol=_SAME * scale, equal_nan=True))
