"""PyTorch models that compute in bfloat16 are compiled by backends that read ONNX, which have no kernels for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compile_stage.core.records import PortableModel, SourceModel
from compile_stage.sources.torch_bfloat16 import WIDENED
from compile_stage.sources.torch_portable import export_graph
from compile_stage.sources.torch_signature import signature_of

from .conftest import run_onnx

torch = pytest.importorskip("torch")
ROWS = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)
ROUNDING = 2**-8
"""Half a unit in the last place of bfloat16's 8 bits, relative."""


def layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)
    ).eval()


class OfItsWeights(torch.nn.Module):
    """Weights in bfloat16, and a constant and a new tensor in their type."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers().bfloat16()

    def forward(self, images: Any) -> Any:
        scores = self.inner(images.to(torch.bfloat16))
        shift = torch.full((5,), 0.5, dtype=torch.bfloat16) + torch.arange(5, dtype=torch.bfloat16)
        return (scores + shift).float()


class OfAutocast(torch.nn.Module):
    """Weights in float32, and operators that autocast runs in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, images: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(images).float()


class OfBranches(torch.nn.Module):
    """A branch of a condition has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 2).bfloat16(), torch.nn.Linear(4, 2).bfloat16()

    def forward(self, rows: Any) -> Any:
        narrow = rows.to(torch.bfloat16)
        return torch.cond(rows.sum() > 0, lambda x: self.one(x) * 2, lambda x: self.other(x) - 1, (narrow,)).float()


def exported(model: Any, rows: Any, path: Path) -> PortableModel:
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(model, (torch.from_numpy(rows),), dynamic_shapes=sizes)
    source = SourceModel(uri="models:/net/1", name="net", version="1", flavor="pytorch", path=str(path), digest="")
    return export_graph(program, signature_of(program, ["x"], ["answer"]), source, {}, path / "out")


def types(message: Any) -> set[int]:
    """Every tensor type that any part of a message names."""
    found: set[int] = set()
    for field, value in message.ListFields():
        if field.name in ("elem_type", "data_type"):
            found.add(value)
        elif field.name == "attribute":
            found |= {one.i for one in value if one.name in ("to", "dtype")}
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                found |= types(one)
    return found


@pytest.mark.parametrize("kind", [OfItsWeights, OfAutocast])
def test_what_computes_in_bfloat16_is_exported_in_float32(kind: Any, tmp_path: Path) -> None:
    """ONNX Runtime's "Type tensor(bfloat16) of operator (Conv) is invalid" was all that such a model got."""
    model = kind()
    portable = exported(model, ROWS, tmp_path)
    assert portable.notes == (WIDENED,)
    assert onnx.TensorProto.BFLOAT16 not in types(onnx.load(portable.path))
    with torch.no_grad():
        wanted = model(torch.from_numpy(ROWS[:3])).numpy()
    (answer,) = run_onnx(portable, {"x": ROWS[:3]}).values()
    assert np.abs(answer - wanted).max() <= 8 * ROUNDING * np.abs(wanted).max()


def test_weights_keep_their_values(tmp_path: Path) -> None:
    """Answers of bfloat16's weights in float32: wrong weights would hide within the original's own rounding."""
    model = OfItsWeights()
    portable = exported(model, ROWS, tmp_path)
    exact = model.inner.float()
    with torch.no_grad():
        wanted = exact(torch.from_numpy(ROWS).bfloat16().float()).numpy() + np.float32(0.5) + np.arange(5, dtype="f4")
    (answer,) = run_onnx(portable, {"x": ROWS}).values()
    # What goes in is no longer rounded to bfloat16, so the bound is that of the input's rounding.
    assert np.abs(answer - wanted).max() <= ROUNDING * np.abs(wanted).max()


def test_graphs_within_the_graph_are_widened_too(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    model = OfBranches().eval()
    portable = exported(model, rows, tmp_path)
    assert onnx.TensorProto.BFLOAT16 not in types(onnx.load(portable.path))
    for batch in (np.abs(rows), -np.abs(rows)):
        with torch.no_grad():
            wanted = model(torch.from_numpy(batch)).numpy()
        (answer,) = run_onnx(portable, {"x": batch}).values()
        assert np.abs(answer - wanted).max() <= 4 * ROUNDING * np.abs(wanted).max()


def test_a_model_in_float32_is_left_as_it_is(tmp_path: Path) -> None:
    assert exported(layers(), ROWS, tmp_path).notes == ()
