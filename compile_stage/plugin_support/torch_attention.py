"""Attention of a PyTorch program, before a converter takes it: rows that may look at nothing."""

from __future__ import annotations

import math
from typing import Any

from compile_stage.plugin_support.torch_programs import read_for, use_instead


def answer_masked_rows(program: Any) -> None:
    """Write into the program what PyTorch's attention answers where a mask hides everything: zeros.

    PyTorch's ONNX exporter and LiteRT's converter leave that out: they answer a sample of padding alone with NaN, or as
    if nothing were hidden. The zeros are put in behind the attention, whose own operators stay as runtimes know them. A
    mask that does not depend on the inputs is left alone: it hides the same in every sample, so validation sees it.
    """
    import torch

    graph, aten = program.graph_module.graph, torch.ops.aten
    inputs = set(map(str, program.graph_signature.user_inputs))
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask is None or inputs.isdisjoint(read_for([mask], sizes=False)):
            continue
        with graph.inserting_before(node.next):
            if mask.meta["val"].dtype == torch.bool:
                closed = graph.call_function(aten.logical_not.default, (mask,))
            else:  # each number by itself: OpenVINO's largest of infinities alone is finite
                closed = graph.call_function(aten.eq.Scalar, (mask, -math.inf))
            hidden = graph.call_function(aten.all.dim, (closed, -1, True))
            answer = graph.call_function(aten.masked_fill.Scalar, (node, hidden, 0.0))
        use_instead(program, node, answer)
    program.graph_module.recompile()
