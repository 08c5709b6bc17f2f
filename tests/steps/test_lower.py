"""What the cache gives for a graph that two originals share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import pytest

from compile_stage.core.digest import plain
from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.core.tensors import Signature
from compile_stage.steps.lower import lower
from compile_stage.steps.rewrite import rewrite


def written(folder: Path) -> PortableModel:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_text("graph")
    path, signature = str(folder / "model.onnx"), Signature(inputs=(), outputs=())
    return PortableModel(path=path, digest="d", form="onnx", opset=18, precision="fp32", signature=signature)


class Worker:
    """It writes another graph of the model that it is given, once."""

    def call(self, function: str, /, *, model: PortableModel, into: str, **_: Any) -> Any:
        return plain(replace(written(Path(into)), smallest=model.smallest, largest=model.largest))


@pytest.mark.parametrize("step", ["lower", "rewrite"])
def test_limits_of_sizes_are_those_of_the_model_at_hand(tmp_path: Path, step: str) -> None:
    """Broken: where the traces of two originals that go another way at other sizes give one graph, the second's int8
    or rewritten graph is published with the limits of the first, and answers wrongly between the two."""
    context, worker = factories.run_context(tmp_path), Worker()
    exported = written(tmp_path / "exported")
    samples = SampleSet(path="", digest="", count=1, real=True, source="")
    for size in (8, 16):
        limits = {"smallest": {"x": (None, size)}, "largest": {"x": (None, 9 * size)}}
        model = replace(exported, **limits)
        if step == "lower":
            made = lower(context, worker, factories.job(precision="int8-dynamic", native=False), model, None)
        else:
            made = rewrite(context, worker, model, samples)
        assert {"smallest": made.smallest, "largest": made.largest} == limits
