"""The largest magnitudes that a graph's tensors reach on samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.precision.onnx_graph import open_session, read_types
from compile_stage.precision.wiring import copy_message

if TYPE_CHECKING:
    from onnx import ModelProto

    from compile_stage.core.tensors import Batch


def measure_peaks(model: ModelProto, batches: Iterable[Batch], only: Collection[str] | None = None) -> dict[str, float]:
    """Tensor → largest magnitude over all batches, for every float32 tensor that the graph computes or is given.

    Args:
        only: Names of the tensors to measure; None for all.

    Returns:
        Infinity for a tensor that was infinite or not a number anywhere.
    """
    from onnx import TensorProto, helper

    watched = copy_message(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    floats = sorted(
        name
        for name, kind in read_types(model).items()
        if kind == TensorProto.FLOAT and name not in constants and (only is None or name in only)
    )
    for position, name in enumerate(floats):
        # Reduced inside the graph, so that no activation is kept: one number for each tensor comes out.
        magnitude, peak = f"compile_stage/magnitude/{position}", f"compile_stage/peak/{position}"
        watched.graph.node.append(helper.make_node("Abs", [name], [magnitude]))
        watched.graph.node.append(helper.make_node("ReduceMax", [magnitude], [peak], keepdims=0))
        watched.graph.output.append(helper.make_tensor_value_info(peak, TensorProto.FLOAT, []))
    peaks = dict.fromkeys(floats, 0.0)
    session = open_session(watched, optimise=False)
    del watched
    wanted = [f"compile_stage/peak/{position}" for position in range(len(floats))]
    for batch in batches:
        for name, peak in zip(floats, session.run(wanted, dict(batch)), strict=True):
            peaks[name] = float(np.fmax(peaks[name], peak)) if np.isfinite(peak) else float("inf")
    return peaks
