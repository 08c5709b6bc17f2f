"""The rewrites, one after the other, each with a proof of its own: on real samples the graph answers as before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core import sample_files
from compile_stage.core.parallel import granted_threads
from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.graph_rewrites import early_selection, masked_softmax, single_direction, transposed_keys
from compile_stage.plugin_support import onnx_weights
from compile_stage.precision.onnx_graph import finish, name_nodes, open_session

if TYPE_CHECKING:
    from onnx import ModelProto

REWRITES: Mapping[str, Callable[[ModelProto], int]] = {
    rule.NAME: rule.rewrite for rule in (masked_softmax, transposed_keys, single_direction, early_selection)
}
"""Name → a function that rewrites a graph in place and answers how many places it found."""

COMPARED_BATCHES = 32
"""So many batches of the validation samples are asked before and after. It tells a wrong rule; what ships is validated
on all samples beside the original."""

TOLERANCE = 1e-4
"""Largest deviation, of an output's largest magnitude. Other orders of the same sums differ by 1e-6 to 1e-5."""


def rewrite_graph(model: PortableModel, samples: SampleSet, into: Path) -> PortableModel:
    """The model with every rewrite that found something and whose answers are those of before; itself, with a note,
    where there is none.

    Args:
        samples: Inputs of the graph, or whole windows of tokens.
    """
    import onnx

    bare = onnx.load(model.path, load_external_data=False)
    if model.form != "onnx" or not any(rewrite(_copy(bare)) for rewrite in REWRITES.values()):
        return model
    current, notes = model, []
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        for name, rewrite in REWRITES.items():
            graph = onnx_weights.load(current.path)
            name_nodes(graph.graph)
            nodes = len(graph.graph.node)
            if not (places := rewrite(graph)):
                continue
            made = finish(graph, current, Path(scratch) / name, current.precision)
            if (reason := _differs(current, made, samples)) is not None:
                notes.append(f"the graph rewrite {name} was not taken: {reason}")
                continue
            count = f"{places} place{'s' if places > 1 else ''}"
            notes.append(f"graph rewrite {name}: {count}, {nodes} nodes become {len(graph.graph.node)}")
            current = made
        if current is not model:
            current = finish(onnx_weights.load(current.path), model, into, model.precision)
    return replace(current, notes=(*model.notes, *notes))


def _copy(model: ModelProto) -> ModelProto:
    copy = type(model)()
    copy.CopyFrom(model)
    return copy


def _differs(before: PortableModel, after: PortableModel, samples: SampleSet) -> str | None:
    """The first answer that is another, in words; None where there is none."""
    import numpy as np

    try:
        sessions = [open_session(model.path, threads=granted_threads()) for model in (before, after)]
        batches = islice(sample_files.read_batches(samples, before.signature), COMPARED_BATCHES)
        for number, batch in enumerate(batches):
            answers = (session.run(None, dict(batch)) for session in sessions)
            for spec, was, now in zip(before.signature.outputs, *answers, strict=True):
                if was.shape != now.shape or not np.array_equal(np.isfinite(was), np.isfinite(now)):
                    return f"the output {spec.name!r} of batch {number} has another shape, or is finite elsewhere"
                finite = np.isfinite(was)
                largest = float(np.abs(was[finite]).max(initial=0))
                away = float(np.abs(was[finite].astype(np.float64) - now[finite]).max(initial=0))
                if away > TOLERANCE * max(largest, 1e-6):
                    return f"the output {spec.name!r} of batch {number} differs by {away:.3g}, of at most {largest:.3g}"
    except Exception as error:  # noqa: BLE001 - a graph that ONNX Runtime can't run is one that nothing is known of
        return f"ONNX Runtime can't run the graph before and after: {' '.join(str(error).split())[:200]}"
    return None
