"""Operators that PyTorch's ONNX exporter would write with other answers than PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compile_stage.plugin_support.torch_programs import use_instead

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def stable_logarithms() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations for `torch.onnx.export(custom_translation_table=...)`.

    The exporter writes `logsigmoid` as Log(Sigmoid(x)), which in ONNX Runtime is -inf from -30 down and 4 % off at -16,
    and `logaddexp` as Log(Exp(a) + Exp(b)), which is inf from 89 up. ONNX's Softplus, log(1 + exp(x)), has neither.
    """
    import torch
    from onnxscript import opset18 as op

    def log_sigmoid(x: Any) -> Any:
        return op.Neg(op.Softplus(op.Neg(x)))

    def logaddexp(a: Any, b: Any) -> Any:
        apart = op.Where(op.Equal(a, b), op.CastLike(0.0, a), op.Sub(a, b))  # infinity less infinity is no number
        return op.Add(op.Max(a, b), op.Softplus(op.Neg(op.Abs(apart))))

    aten = torch.ops.aten
    return {aten.log_sigmoid.default: log_sigmoid, aten.logaddexp.default: logaddexp}


def write_own_divisors(program: ExportedProgram) -> None:
    """Write an average pool with a `divisor_override`, which the exporter leaves out, as the average of its window and
    a factor. With `ceil_mode` the windows at the ends are smaller, and it is left to the proof."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target not in (aten.avg_pool2d.default, aten.avg_pool3d.default) or len(node.args) < 7:
            continue
        given, window, stride, padding, ceil_mode, _, divisor = node.args
        if divisor is None or ceil_mode:
            continue
        axes = 2 if node.target is aten.avg_pool2d.default else 3
        elements = math.prod(window) if len(window) > 1 else window[0] ** axes
        node.args = (given, window, stride, padding, False, True)
        with program_graph.inserting_before(node.next):
            scaled = program_graph.call_function(aten.mul.Tensor, (node, elements / divisor))
        use_instead(program, node, scaled)
    program.graph_module.recompile()


@contextmanager
def small_numbers_kept() -> Iterator[None]:
    """Have the exporter's optimiser leave additions of 0 and products by 1 alone. It takes 1e-9 for 0, so the graph of
    `log(x + 1e-9)` would answer -inf for 0, and that of `x / (x.sum() + 1e-12)` NaN. Runtimes drop what adds nothing
    themselves."""
    from onnxscript import rewriter

    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", ())
    rounding = getattr(rewriter, "_no_op", None) or getattr(rewriter, "no_op", None)
    left_out = set(map(id, getattr(getattr(rounding, "rules", ()), "rules", ())))
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if id(rule) not in left_out)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules
