"""ONNX Runtime's calls on an NVIDIA GPU, recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compile_stage.plugin_support.known_sizes import Shapes
from compile_stage.plugin_support.recorded_calls import RecordedCalls

_GRAPH_ID = "gpu_graph_id"
_NOT_RECORDED = -1


class CudaGraphs(RecordedCalls):
    """Speaks as much of `onnxruntime.InferenceSession` as an open model needs.

    Args:
        session: Opened with `enable_cuda_graph`. ONNX Runtime opens none with a node that computes elsewhere, and
            recording fails where a kernel waits for the CPU.
        where: Kind and number of the device, as ONNX Runtime calls it: ("cuda", 0).
        shapes: That are recorded.
    """

    def __init__(self, session: Any, where: tuple[str, int], shapes: Sequence[Shapes]) -> None:
        super().__init__([value.name for value in session.get_inputs()], shapes)
        self._session, self._where = session, where
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs

    def launch(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        outputs: list[Any] = self._session.run(list(names), dict(feeds), _options(_NOT_RECORDED))
        return outputs

    def record(self, number: int, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> _Call:
        return _Call(self._session, self._where, number, feeds, outputs)


class _Call:
    """The call for one shape of each input. ONNX Runtime records it when it is first replayed.

    Args:
        number: Of the graph in its session.
        feeds: Inputs of that shape.
        outputs: What they are answered with.
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


def _options(number: int) -> Any:
    """Of one run: the graph that it records or replays."""
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry(_GRAPH_ID, str(number))
    return options
