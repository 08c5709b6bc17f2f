"""Calls on an NVIDIA GPU that are recorded once for each shape and replayed: CUDA graphs.

A small network is some hundred kernels of a few microseconds each, and launching them takes longer than they run. A
recorded graph is one launch. It reads and writes the same addresses each time, so inputs are copied into buffers of
ours, and outputs out of them: they are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_SHAPES = 16
"""So many are recorded; each keeps its own buffers on the GPU. Other shapes are run without."""

_GRAPH_ID = "gpu_graph_id"
_NOT_RECORDED = -1


class CudaGraphs:
    """Speaks as much of `onnxruntime.InferenceSession` as an open model needs.

    Args:
        session: Opened with `enable_cuda_graph`. ONNX Runtime opens none with a node that computes elsewhere, and
            recording fails where a kernel waits for the CPU.
        where: Kind and number of the device, as ONNX Runtime calls it: ("cuda", 0).
    """

    def __init__(self, session: Any, where: tuple[str, int]) -> None:
        self._session, self._where = session, where
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self._inputs = [value.name for value in session.get_inputs()]
        self._calls: dict[tuple[tuple[int, ...], ...], _Call] = {}

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs of these names."""
        shapes = tuple(feeds[name].shape for name in self._inputs)
        call = self._calls.get(shapes)
        if call is None:
            outputs: list[Any] = self._session.run(list(names), dict(feeds), _options(_NOT_RECORDED))
            if len(self._calls) < MOST_SHAPES:
                self._calls[shapes] = _Call(
                    self._session, self._where, len(self._calls), feeds, dict(zip(names, outputs, strict=True))
                )
            return outputs
        return call.answers(feeds, names)


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

        self._session, self._options = session, _options(number)
        self._binding = session.io_binding()

        def buffers(arrays: Mapping[str, Any]) -> dict[str, Any]:
            made = OrtValue.ortvalue_from_shape_and_type
            return {name: made(list(array.shape), array.dtype, *where) for name, array in arrays.items()}

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


def _options(number: int) -> Any:
    """Of one run: the graph that it records or replays."""
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry(_GRAPH_ID, str(number))
    return options
