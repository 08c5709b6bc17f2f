"""Support vector machines for regression and outliers with a linear kernel, which are linear models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_KINDS = ("SVR", "NuSVR", "OneClassSVM")


def write_linear_kernels(model: ModelProto, estimator: Any) -> None:
    """Write each SVR, NuSVR and OneClassSVM with a linear kernel by its coefficients: one for each column.

    skl2onnx writes its support vectors, and the runtime adds up their products in float32. Where columns are in the
    hundreds, large numbers cancel there: answers were off by 17 %, and depended on the size of the batch.
    """
    from onnx import helper

    machines = [part for part in parts(estimator) if type(part).__name__ in _KINDS and hasattr(part, "dual_coef_")]
    for node in list(model.graph.node):
        machine = next((one for one in machines if node.op_type == "SVMRegressor" and _is_of(node, one)), None)
        if machine is None:
            continue
        linear = helper.make_node(
            "LinearRegressor",
            list(node.input),
            list(node.output),
            name=node.name,
            domain="ai.onnx.ml",
            coefficients=np.asarray(machine.coef_, np.float32).ravel().tolist(),
            intercepts=np.asarray(machine.intercept_, np.float32).ravel().tolist(),
            targets=1,
        )
        node.CopyFrom(linear)


def _is_of(node: NodeProto, machine: Any) -> bool:
    named = {entry.name: entry for entry in node.attribute}
    held = ((machine.support_vectors_, "support_vectors"), (machine.dual_coef_, "coefficients"))
    return machine.kernel == "linear" and all(
        isinstance(exact, np.ndarray)
        and np.array_equal(np.asarray(named[key].floats, np.float32), exact.astype(np.float32).ravel())
        for exact, key in held
    )
