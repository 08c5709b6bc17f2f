"""TorchScript: a trace is kept only while it answers as the program does."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import saved_program

from compile_stage.backends import torchscript
from compile_stage.backends.torchscript import TorchScript
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec

torch = pytest.importorskip("torch", reason="the backend torchscript needs torch")

TARGET = Target(name="cpu", batch_sizes=(1, 3))
FP32 = Scheme(precision="fp32", name="fp32", native=True)
ROWS = TensorSpec(name="rows", dtype="float32", shape=("batch", 4))


class Outputs(torch.nn.Module):
    """An input as it came, a weight as it is, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(8, dtype=torch.float32).reshape(2, 4), requires_grad=False)

    def forward(self, rows: Any) -> Any:
        product = rows @ self.weight.T
        return rows, self.weight, product, product.reshape(rows.shape[0], 2)


def portable(module: Any, outputs: tuple[TensorSpec, ...], folder: Path) -> PortableModel:
    program = torch.export.export(module.eval(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    return saved_program(program, folder, Signature(inputs=(ROWS,), outputs=outputs))


def out(name: str, *shape: Any) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


OUTPUTS = (out("same", "batch", 4), out("weight", 2, 4), out("product", "batch", 2), out("again", "batch", 2))


def test_outputs_are_the_callers_whatever_memory_they_are(tmp_path: Path) -> None:
    """Broken: who writes into an answer would change his own input, the model's weights, or another output."""
    artifact = TorchScript().compile(
        portable(Outputs(), OUTPUTS, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact"
    )
    assert artifact.executed["ops"]["aten::matmul"] == 1
    rows = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    with TorchScript().open(artifact, 1) as session:
        for _ in range(2):
            kept = rows.copy()
            answer = session.run({"rows": rows})
            np.testing.assert_array_equal(answer["weight"], weight)
            np.testing.assert_allclose(answer["again"], rows @ weight.T, rtol=1e-5)
            for name in ("same", "weight", "product"):
                answer[name][...] = -7
            np.testing.assert_array_equal(rows, kept)
            np.testing.assert_allclose(answer["again"], rows @ weight.T, rtol=1e-5)


def test_rows_in_any_order_of_memory_are_read_right(tmp_path: Path) -> None:
    """Reversed rows have a negative stride, one reversed row too, which NumPy calls contiguous. Broken: the call is
    refused by PyTorch, in words on its tensors."""
    artifact = TorchScript().compile(
        portable(Outputs(), OUTPUTS, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact"
    )
    rows = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    frozen = rows.copy()
    frozen.flags.writeable = False
    with TorchScript().open(artifact, 1) as session:
        for given in (rows[::-1], rows[:1][::-1], rows[:, ::-1], np.asfortranarray(rows), frozen):
            np.testing.assert_array_equal(session.run({"rows": given})["same"], given)


def test_no_path_of_the_machine_is_in_it(tmp_path: Path) -> None:
    """Broken: the archive's debugging records would publish where the model was compiled."""
    artifact = TorchScript().compile(
        portable(Outputs(), OUTPUTS, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact"
    )
    with zipfile.ZipFile(Path(artifact.path) / artifact.entry) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert str(Path(torch.__file__).parents[1]).encode() not in content
    assert str(Path(__file__).parents[1]).encode() not in content


class Pairs(torch.nn.Module):
    """Adds up neighbours: of an even number of columns only, as a U-Net takes even heights only."""

    def forward(self, rows: Any) -> Any:
        return rows[:, ::2] + rows[:, 1::2]


def test_sizes_that_the_program_does_not_take_are_not_asked_for(tmp_path: Path) -> None:
    """Broken: a network that takes every second size fails with a traceback from within the program."""
    program = torch.export.export(Pairs(), (torch.ones(2, 4),))
    signature = Signature(
        inputs=(TensorSpec(name="rows", dtype="float32", shape=("batch", "columns")),),
        outputs=(out("sum", "batch", "pairs"),),
    )
    artifact = TorchScript().compile(
        saved_program(program, tmp_path / "model", signature), FP32, TARGET, "job", tmp_path / "artifact"
    )
    assert artifact.executed["ops"]["aten::add"] == 1


def test_a_trace_that_wrote_a_size_down_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a model traced with two rows would answer wrongly, or not at all, for any other number of rows where it
    is served.

    Without the sizes being opened first, the tracer writes down every one."""
    monkeypatch.setattr(torchscript, "_open_sizes", lambda module: module._forward_pre_hooks.clear())
    model = portable(Outputs(), OUTPUTS, tmp_path / "model")
    with pytest.raises(NothingCompiledError, match=r"the trace takes no inputs of \[3, 4\], though the program does"):
        TorchScript().compile(model, FP32, TARGET, "job", tmp_path / "artifact")


class Places(torch.nn.Module):
    """Middles of the rows, as a detector places its boxes."""

    def forward(self, rows: Any) -> Any:
        return rows + (torch.arange(rows.shape[0]) + 0.5)[:, None], 1 / (torch.arange(rows.shape[0]) * 0.5 + 1)


def test_whole_numbers_and_a_fraction_are_float32_in_the_file_too(tmp_path: Path) -> None:
    """Broken: what is read from the file answers float64, or fails where types must be the same (`meshgrid`)."""
    model = portable(Places(), (out("rows", "batch", 4), out("shares", "batch")), tmp_path / "model")
    artifact = TorchScript().compile(model, FP32, TARGET, "job", tmp_path / "artifact")
    rows = np.ones((3, 4), np.float32)
    with TorchScript().open(artifact, 1) as session:
        found = session.run({"rows": rows})
    for answer, wanted in zip(found.values(), Places()(torch.from_numpy(rows)), strict=True):
        assert answer.dtype == np.float32
        np.testing.assert_array_equal(answer, wanted.numpy())


def test_what_the_file_holds_is_compared_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a module that answers otherwise once it is saved and read passes compile, and fails in the proof, with
    a traceback from within PyTorch."""
    monkeypatch.setattr(torchscript, "_cast_whole_numbers", lambda module: None)
    model = portable(Places(), (out("rows", "batch", 4), out("shares", "batch")), tmp_path / "model")
    with pytest.raises(
        NothingCompiledError, match=r"the trace answers otherwise than the program for inputs of \[2, 4\]"
    ):
        TorchScript().compile(model, FP32, TARGET, "job", tmp_path / "artifact")
