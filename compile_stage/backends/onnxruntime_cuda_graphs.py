"""Calls on an NVIDIA GPU that are recorded once for each shape and replayed: CUDA graphs.

A small network is some hundred kernels of a few microseconds each, and launching them takes longer than they run. A
recorded graph is one launch. It reads and writes the same addresses each time, so inputs are copied into buffers of
ours, and outputs out of them: they are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from compile_stage.core.tensors import Signature

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each input."""

_GRAPH_ID = "gpu_graph_id"
_NOT_RECORDED = -1

# Of the largest value of an output: kernels that add in any order differ by less.
_SAME = 1e-3


def shapes_of(signature: Signature, sizes: Sequence[Mapping[str, int]]) -> list[Shapes]:
    """The shapes that will come, where all dimensions of a size are known.

    Args:
        sizes: Free dimension → size, for each; empty where there is none.
    """
    found = []
    for size in sizes or ({},):
        shapes = [[size.get(dim) if isinstance(dim, str) else dim for dim in spec.shape] for spec in signature.inputs]
        if all(dim is not None for shape in shapes for dim in shape):
            found.append(tuple(tuple(dim for dim in shape if dim is not None) for shape in shapes))
    return found


class CudaGraphs:
    """Speaks as much of `onnxruntime.InferenceSession` as an open model needs.

    Args:
        session: Opened with `enable_cuda_graph`. ONNX Runtime opens none with a node that computes elsewhere, and
            recording fails where a kernel waits for the CPU.
        where: Kind and number of the device, as ONNX Runtime calls it: ("cuda", 0).
        shapes: That are recorded, when they first come; each keeps its buffers. Others are launched kernel by kernel.
    """

    def __init__(self, session: Any, where: tuple[str, int], shapes: Sequence[Shapes]) -> None:
        self._session, self._where = session, where
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self._inputs = [value.name for value in session.get_inputs()]
        self._calls: dict[Shapes, _Call | None] = dict.fromkeys(shapes)

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs of these names."""
        shapes = tuple(feeds[name].shape for name in self._inputs)
        if (call := self._calls.get(shapes)) is not None:
            return call.answers(feeds, names)
        outputs = self.launch(names, feeds)
        if shapes in self._calls:
            number = sum(one is not None for one in self._calls.values())
            answered = dict(zip(names, outputs, strict=True))
            self._calls[shapes] = _Call(self._session, self._where, number, feeds, answered)
        return outputs

    def launch(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """The same, kernel by kernel."""
        outputs: list[Any] = self._session.run(list(names), dict(feeds), _options(_NOT_RECORDED))
        return outputs


class _Call:
    """The call for one shape of each input. It is recorded when it is first replayed.

    Args:
        number: Of the graph in its session.
        feeds: Inputs of that shape.
        outputs: What they are answered with. Their shapes follow from those of the inputs, or nothing could be
            recorded.
    """

    def __init__(
        self,
        session: Any,
        where: tuple[str, int],
        number: int,
        feeds: Mapping[str, Any],
        outputs: Mapping[str, Any],
    ) -> None:
        from onnxruntime import OrtValue

        def buffers(arrays: Mapping[str, Any]) -> dict[str, Any]:
            made = OrtValue.ortvalue_from_shape_and_type
            return {name: made(list(array.shape), array.dtype, *where) for name, array in arrays.items()}

        self._session, self._options = session, _options(number)
        self._binding = session.io_binding()
        self._inputs, self._outputs = buffers(feeds), buffers(outputs)
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def answers(self, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        for name, value in self._inputs.items():
            value.update_inplace(np.ascontiguousarray(feeds[name]))
        self._session.run_with_iobinding(self._binding, self._options)
        return [self._outputs[name].numpy() for name in names]


def refuse(session: CudaGraphs, signature: Signature, shapes: Sequence[Shapes]) -> str | None:
    """Why calls of these shapes are not recorded: ONNX Runtime can't, or they are answered otherwise. Asked with zeros
    and ones, which are classes, tokens and switches too; a validation asks with samples."""
    names = [spec.name for spec in signature.outputs]
    try:
        for one in shapes:
            for value in (0, 1, 0):  # the first call of a shape is not recorded
                feeds = {
                    spec.name: np.full(shape, value, spec.dtype)
                    for spec, shape in zip(signature.inputs, one, strict=True)
                }
                if not all(map(_alike, session.run(names, feeds), session.launch(names, feeds))):
                    return "they are answered otherwise than kernel by kernel"
    except Exception as error:  # noqa: BLE001 - onnxruntime's own errors share no base class
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return None


def _alike(left: Any, right: Any) -> bool:
    if left.dtype.kind not in "fc" or not left.size:
        return bool(np.array_equal(left, right))
    scale = float(np.max(np.abs(right), initial=0.0, where=np.isfinite(right)))
    return bool(np.allclose(left, right, rtol=_SAME, atol=_SAME * scale, equal_nan=True))


def _options(number: int) -> Any:
    """Of one run: the graph that it records or replays."""
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry(_GRAPH_ID, str(number))
    return options
