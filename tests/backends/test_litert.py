"""LiteRT: a file for each batch size, 64-bit numbers in 32 bits, and what XNNPACK took.

Its compiler is in an environment of its own. These run there, by hand or in CI: with pytest and onnx beside the
toolchain's packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends.litert import DELEGATE, LiteRt, _left_out, _narrowed
from compile_stage.core import plugins
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.records import PortableModel, Scheme, ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec

BACKEND = LiteRt()
TARGET = Target(name="cpu", batch_sizes=(1, 3))
FP32 = Scheme(precision="fp32", name="fp32", native=True)
TOKENS = TensorSpec(name="tokens", dtype="int64", shape=("batch", "sequence"))


@pytest.fixture
def torch() -> Any:
    if not plugins.importable(BACKEND):
        pytest.skip("litert's compiler is not in this environment: it has a toolchain of its own")
    import torch

    return torch


def described(*inputs: TensorSpec, path: str = "model.pt2", digest: str = "") -> PortableModel:
    answer = TensorSpec(name="answer", dtype="int64", shape=("batch", 4))
    return PortableModel(
        path=path,
        digest=digest,
        form="torch-export",
        opset=0,
        precision="fp32",
        signature=Signature(inputs=inputs, outputs=(answer,)),
    )


def sums(torch: Any, folder: Path) -> PortableModel:
    """tokens [batch, 4], int64 → the largest of a product, and the tokens plus one, int64."""

    class Sums(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, tokens: Any) -> Any:
            return tokens + self.layer(tokens.float()).argmax(1, keepdim=True)

    torch.manual_seed(0)
    folder.mkdir()
    free = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(Sums().eval(), (torch.ones(2, 4, dtype=torch.int64),), dynamic_shapes=free)
    torch.export.save(program, str(folder / "model.pt2"))
    tokens = TensorSpec(name="tokens", dtype="int64", shape=("batch", 4))
    return described(tokens, path=str(folder / "model.pt2"), digest=digest_tree(folder))


def test_what_a_file_with_fixed_shapes_can_not_be_is_refused() -> None:
    """Broken: a model of any sequence length would be compiled for one that nobody named, or float64 would quietly be
    float32."""
    assert "under the target's shapes" in str(BACKEND.refuse(described(TOKENS), TARGET))
    several = ShapeRange(min=(1, 8), typical=(1, 16), max=(4, 32))
    many = Target(name="cpu", batch_sizes=tuple(range(1, 8)), shapes={"tokens": several})
    assert "asks for 21 of them" in str(BACKEND.refuse(described(TOKENS), many))
    one = ShapeRange(min=(1, 16), typical=(1, 16), max=(4, 16))
    assert BACKEND.refuse(described(TOKENS), Target(name="cpu", shapes={"tokens": one})) is None
    wide = TensorSpec(name="wide", dtype="float64", shape=("batch", 4))
    assert "'wide' is float64" in str(BACKEND.refuse(described(wide), TARGET))


def test_a_number_that_does_not_fit_is_refused() -> None:
    """Broken: a token beyond 32 bits would be wrapped around to another token, and answered with confidence."""
    assert _narrowed(TOKENS, np.array([[2**31 - 1]]), np.dtype(np.int32)).dtype == np.int32
    with pytest.raises(
        UsageError, match=r"input 'tokens' holds 1 to 2147483648, and the compiled model takes int32 only"
    ):
        _narrowed(TOKENS, np.array([[1, 2**31]]), np.dtype(np.int32))


def test_operators_are_counted_where_they_run() -> None:
    """Broken: operators that a delegate took would count as left out, since the interpreter lists both, or the other
    way round."""

    def node(index: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[str, Any]:
        return {"index": index, "op_name": name, "inputs": inputs, "outputs": outputs}

    nodes = [
        node(0, "GATHER", (0,), (1,)),
        node(1, "CONV_2D", (1, 9), (2,)),
        node(2, "RELU", (2,), (3,)),
        node(3, "ARG_MAX", (3,), (4,)),
        node(4, "DELEGATE", (1, 9), (3,)),
    ]
    assert _left_out(nodes, [4]) == {0, 3}
    assert _left_out(nodes, [2]) == {0, 1}
    assert _left_out(nodes[:4], [4]) == {0, 1, 2, 3}


@pytest.mark.compilers
def test_a_file_for_each_batch_size_and_the_sources_types(
    torch: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Broken: a batch that no file was made for would be answered by another's, int64 would come back as int32, a cache
    would hold two results for one key, or the converter's progress would be drawn into a pipeline's log."""
    model = sums(torch, tmp_path / "model")
    artifact = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "artifact")
    assert sorted(path.name for path in Path(artifact.path).iterdir()) == [
        "model-batch_1.tflite",
        "model-batch_3.tflite",
    ]
    assert artifact.executed["providers"][DELEGATE] >= 1
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"float32 by float32": 1}
    tokens = np.random.default_rng(0).integers(0, 9, (3, 4))
    wanted = torch.export.load(model.path).module()(torch.from_numpy(tokens)).numpy()
    with BACKEND.open(artifact, 2) as session:
        answer = session.run({"tokens": tokens})["answer"]
        assert answer.dtype == np.int64
        np.testing.assert_array_equal(answer, wanted)
        np.testing.assert_array_equal(session.run({"tokens": tokens[:1]})["answer"], wanted[:1])
        np.testing.assert_array_equal(session.run({"tokens": tokens[:2]})["answer"], wanted[:2])
        with pytest.raises(UsageError, match=r"shapes up to \[3, 4\]"):
            session.run({"tokens": np.concatenate([tokens, tokens])})
        with pytest.raises(UsageError, match=r"takes int32 only"):
            session.run({"tokens": tokens + 2**40})
    one, three = artifact.options["files"]
    swapped = [{**one, "file": three["file"]}, {**three, "file": one["file"]}]
    wrong = replace(artifact, options={**artifact.options, "files": swapped})
    with pytest.raises(IntegrityError, match="takes inputs of"), BACKEND.open(wrong, 2):
        pass
    again = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "again")
    assert again.digest == artifact.digest
    content = b"".join(path.read_bytes() for path in Path(artifact.path).iterdir())
    assert str(tmp_path).encode() not in content
    assert str(Path(torch.__file__).parents[1]).encode() not in content
    assert capfd.readouterr() == ("", "")


@pytest.mark.compilers
def test_a_sample_of_padding_alone_is_answered_as_by_the_original(torch: Any, tmp_path: Path) -> None:
    """Broken: where a mask hides everything LiteRT would answer NaN, and PyTorch answers zeros."""

    class Attends(torch.nn.Module):  # type: ignore[misc]
        def forward(self, rows: Any, mask: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask[:, None])

    (tmp_path / "model").mkdir()
    rows, mask = torch.rand(3, 4, 4), torch.tensor([[0.0, 0, 0, 0], [-torch.inf] * 4, [0, 0, -torch.inf, 0]])
    program = torch.export.export(Attends(), (rows, mask), dynamic_shapes=({0: torch.export.Dim.AUTO},) * 2)
    torch.export.save(program, str(tmp_path / "model" / "model.pt2"))
    given = [TensorSpec(name=name, dtype="float32", shape=("batch", 4, 4)) for name in ("rows", "answer")]
    masks = TensorSpec(name="mask", dtype="float32", shape=("batch", 4))
    model = replace(
        described(path=str(tmp_path / "model" / "model.pt2"), digest=digest_tree(tmp_path / "model")),
        signature=Signature(inputs=(given[0], masks), outputs=(given[1],)),
    )
    artifact = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "artifact")
    with BACKEND.open(artifact, 1) as session:
        answer = session.run({"rows": rows.numpy(), "mask": mask.numpy()})["answer"]
    np.testing.assert_allclose(answer, Attends()(rows, mask).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.compilers
def test_threads_are_the_sessions(torch: Any, tmp_path: Path) -> None:
    """Broken: a measurement would say that it used the target's threads, and have used another number. The caller is
    one of them."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("only Linux lists a process's threads in /proc")
    one_size = Target(name="cpu", batch_sizes=(1,))
    artifact = BACKEND.compile(sums(torch, tmp_path / "model"), FP32, one_size, "job", tmp_path / "artifact")
    batch = {"tokens": np.ones((1, 4), np.int64)}
    counts = {}
    for threads in (1, 3):
        with BACKEND.open(artifact, threads) as session:
            session.run(batch)
            counts[threads] = len(list(tasks.iterdir()))
    assert counts[3] == counts[1] + 2
