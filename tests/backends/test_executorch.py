"""ExecuTorch: what XNNPACK takes, in what types, up to what sizes, and on how many threads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import saved_program

from compile_stage.backends.executorch import DELEGATE, ExecuTorch
from compile_stage.core import plugins
from compile_stage.core.digest import digest_tree
from compile_stage.core.environment import usable_cores
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme, ShapeRange, Target
from compile_stage.core.sample_files import write_index
from compile_stage.core.tensors import Signature, TensorSpec

BACKEND = ExecuTorch()
TARGET = Target(name="cpu", batch_sizes=(1, 3))
FP32 = Scheme(precision="fp32", name="fp32", native=True)
ROWS = TensorSpec(name="rows", dtype="float32", shape=("batch", 4))


@pytest.fixture
def torch() -> Any:
    if (reason := plugins.missing(BACKEND)) is not None:
        pytest.skip(reason)
    import torch

    return torch


def portable(module: Any, example: tuple[Any, ...], signature: Signature, folder: Path) -> PortableModel:
    import torch

    free = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in signature.inputs
    )
    program = torch.export.export(module.eval(), example, dynamic_shapes=free)
    return saved_program(program, folder, signature)


def linear(torch: Any, folder: Path) -> PortableModel:
    torch.manual_seed(0)
    answer = TensorSpec(name="answer", dtype="float32", shape=("batch", 2))
    return portable(torch.nn.Linear(4, 2), (torch.ones(2, 4),), Signature(inputs=(ROWS,), outputs=(answer,)), folder)


def samples(folder: Path, **arrays: Any) -> SampleSet:
    (folder / "inputs").mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / "inputs" / f"{name}.npy", array)
    count = len(next(iter(arrays.values())))
    write_index(folder, {name: f"inputs/{name}.npy" for name in arrays}, labels=False, count=count)
    return SampleSet(path=str(folder), digest=digest_tree(folder), count=count, real=True, source="test")


def test_a_free_axis_without_bounds_is_refused() -> None:
    """Broken: ExecuTorch would plan memory for a size of its own, and longer sentences would fail where the model is
    served."""
    tokens = TensorSpec(name="tokens", dtype="int64", shape=("batch", "sequence"))
    model = PortableModel(
        path="model.pt2",
        digest="",
        form="torch-export",
        opset=0,
        precision="fp32",
        signature=Signature(inputs=(tokens,), outputs=()),
    )
    assert "shapes.tokens of the target" in str(BACKEND.refuse(model, TARGET))
    bounds = ShapeRange(min=(1, 8), typical=(1, 16), max=(4, 32))
    assert BACKEND.refuse(model, Target(name="cpu", shapes={"tokens": bounds})) is None


@pytest.mark.compilers
def test_the_file_takes_what_the_target_names_and_says_so_when_more_comes(torch: Any, tmp_path: Path) -> None:
    """Broken: a batch beyond what memory was planned for would end in the runtime's error number; one below, that the
    program's export did not know, would be refused."""
    artifact = BACKEND.compile(linear(torch, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact")
    assert artifact.executed["providers"] == {DELEGATE: 1}
    assert "takes batches of at most 3" in " ".join(artifact.notes)
    with BACKEND.open(artifact, 1) as session:
        for size in (1, 2, 3):
            assert session.run({"rows": np.ones((size, 4), np.float32)})["answer"].shape == (size, 2)
        with pytest.raises(UsageError, match=r"larger than the program has room for, \[3, 4\]"):
            session.run({"rows": np.ones((4, 4), np.float32)})


@pytest.mark.compilers
def test_tensors_that_the_program_makes_are_as_large_as_the_batch(torch: Any, tmp_path: Path) -> None:
    """Broken: what makes its own state (a GRU), or pads round a corner, answers the largest batch alone."""

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.out = torch.nn.GRUCell(4, 4), torch.nn.Linear(6, 2)

        def forward(self, rows: Any) -> Any:
            state = self.step(rows, rows.new_zeros(rows.shape[0], 4))
            return self.out(torch.nn.functional.pad(state[:, None], (1, 1), mode="circular")[:, 0])

    torch.manual_seed(0)
    answer = TensorSpec(name="answer", dtype="float32", shape=("batch", 2))
    module = Recurrent().eval()
    model = portable(module, (torch.ones(2, 4),), Signature(inputs=(ROWS,), outputs=(answer,)), tmp_path / "model")
    artifact = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "artifact")
    with BACKEND.open(artifact, threads=1) as session:
        for size in (3, 1, 2):
            rows = torch.rand(size, 4)
            with torch.no_grad():
                wanted = module(rows).numpy()
            np.testing.assert_allclose(session.run({"rows": rows.numpy()})["answer"], wanted, atol=1e-5)


@pytest.mark.compilers
def test_an_operator_that_the_runtime_lacks_is_named(torch: Any, tmp_path: Path) -> None:
    """Broken: "Failed to load method forward, error: 0x:14", and nobody knows what to replace."""

    class Sorts(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return torch.sort(rows + 1)[0]

    answer = TensorSpec(name="answer", dtype="float32", shape=("batch", 4))
    model = portable(Sorts(), (torch.ones(2, 4),), Signature(inputs=(ROWS,), outputs=(answer,)), tmp_path / "model")
    with pytest.raises(NothingCompiledError, match=r"can't run aten::sort\.values"):
        BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "artifact")


@pytest.mark.compilers
def test_a_program_of_one_size_has_no_free_axis(torch: Any, tmp_path: Path) -> None:
    """Broken: a target of batch 1 alone would wait for shapes to be solved that nobody asks for, and memory would be
    planned for two rows."""
    target = replace(TARGET, batch_sizes=(1,))
    artifact = BACKEND.compile(linear(torch, tmp_path / "model"), FP32, target, "job", tmp_path / "artifact")
    assert "takes batches of at most 1," in " ".join(artifact.notes)
    with BACKEND.open(artifact, 1) as session:
        assert session.run({"rows": np.ones((1, 4), np.float32)})["answer"].shape == (1, 2)
        with pytest.raises(UsageError, match=r"larger than the program has room for, \[1, 4\]"):
            session.run({"rows": np.ones((2, 4), np.float32)})


@pytest.mark.compilers
def test_the_same_program_gives_the_same_bytes_and_no_noise(
    torch: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Broken: a cache would hold two results for one key, an artifact would publish where it was compiled, or a
    pipeline's log would be full of PyTorch's warnings about its own parts."""
    model = linear(torch, tmp_path / "model")
    one = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "one")
    other = BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "other")
    with BACKEND.open(one, 2) as session:
        session.run({"rows": np.ones((1, 4), np.float32)})
    assert one.digest == other.digest
    content = (Path(one.path) / one.entry).read_bytes()
    assert str(tmp_path).encode() not in content
    assert str(Path(torch.__file__).parents[1]).encode() not in content
    assert capfd.readouterr() == ("", "")


@pytest.mark.compilers
def test_a_program_that_xnnpack_does_not_take_is_an_error(torch: Any, tmp_path: Path) -> None:
    """Broken: a program that runs in portable operators alone, without a vector instruction, would pass for a compiled
    one."""

    class Sorted(torch.nn.Module):  # type: ignore[misc]
        def forward(self, rows: Any) -> Any:
            return rows.sort(dim=1).values

    answer = TensorSpec(name="answer", dtype="float32", shape=("batch", 4))
    model = portable(Sorted(), (torch.rand(2, 4),), Signature(inputs=(ROWS,), outputs=(answer,)), tmp_path / "model")
    with pytest.raises(NothingCompiledError, match=r"XNNPACK took none of the program's nodes; left are 1 aten::sort"):
        BACKEND.compile(model, FP32, TARGET, "job", tmp_path / "artifact")


@pytest.mark.compilers
def test_threads_are_the_sessions_even_when_two_are_open(torch: Any, tmp_path: Path) -> None:
    """Broken: a measurement would say that it used the target's threads, and have used another number; or the second
    session would replace the pool that the first one's program still points at.

    The pool is counted by the kernel: the caller is one of its threads."""
    artifact = BACKEND.compile(linear(torch, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact")
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("only Linux lists a process's threads in /proc")
    batch = {"rows": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    with BACKEND.open(artifact, 1) as one, BACKEND.open(artifact, 3) as three:
        wanted = one.run(batch)["answer"]
        alone = len(list(tasks.iterdir()))
        for _ in range(3):
            np.testing.assert_allclose(three.run(batch)["answer"], wanted, rtol=1e-6)
            assert len(list(tasks.iterdir())) == alone + 2
            np.testing.assert_array_equal(one.run(batch)["answer"], wanted)
            assert len(list(tasks.iterdir())) == alone


@pytest.mark.compilers
def test_the_pools_threads_have_a_core_each_unless_the_policy_says_otherwise(torch: Any, tmp_path: Path) -> None:
    """Broken: threads that the pool has already would be kept as they are, and a small network would take twice as
    long; or a policy could not turn it off."""
    cores = usable_cores()[:2]
    if len(cores) < 2:
        pytest.skip("needs Linux, and two cores to pin threads to")
    pinned = BACKEND.compile(linear(torch, tmp_path / "model"), FP32, TARGET, "job", tmp_path / "artifact")
    free = Target(name="cpu", batch_sizes=(1, 3), options={"executorch": {"affinity": False}})
    as_it_is = BACKEND.compile(linear(torch, tmp_path / "other"), FP32, free, "job", tmp_path / "free")
    allowed, batch = os.sched_getaffinity(0), {"rows": np.ones((1, 4), np.float32)}

    def of_all_threads() -> list[set[int]]:
        return [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]

    os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
    try:
        before = of_all_threads().count({cores[1]})
        with BACKEND.open(pinned, 2) as session:
            session.run(batch)
            assert of_all_threads().count({cores[1]}) == before + 1
            assert os.sched_getaffinity(0) == set(cores)
        with BACKEND.open(as_it_is, 2) as session:
            session.run(batch)
            assert of_all_threads().count({cores[1]}) == before
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.compilers
def test_whole_numbers_are_not_rounded(torch: Any, tmp_path: Path) -> None:
    """Broken: int8 of a model that computes its indices would fail (XNNPACK's own quantizer scales them), and a product
    by a weight that is not written as a linear layer would stay in float."""

    class Lookup(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 8)
            self.weight = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, tokens: Any) -> Any:
            return torch.relu(self.table(tokens * 2 + 1).mean(1)) @ self.weight

    torch.manual_seed(0)
    module = Lookup()
    signature = Signature(
        inputs=(TensorSpec(name="tokens", dtype="int64", shape=("batch", 5)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", 4)),),
    )
    model = portable(module, (torch.ones(2, 5, dtype=torch.int64),), signature, tmp_path / "model")
    tokens = np.random.default_rng(0).integers(0, 7, (16, 5))
    (scheme,) = BACKEND.schemes(TARGET, "int8")
    with pytest.raises(UsageError, match=r"int8 needs calibration samples"):
        BACKEND.compile(model, scheme, TARGET, "job", tmp_path / "none")
    given = samples(tmp_path / "samples", tokens=tokens)
    artifact = BACKEND.compile(model, scheme, TARGET, "job", tmp_path / "artifact", calibration=given)
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"qint8": 1}
    assert artifact.executed["ops"]["aten::embedding"] == 1
    with BACKEND.open(artifact, 1) as session:
        answer = session.run({"tokens": tokens[:3]})["answer"]
    wanted = module(torch.from_numpy(tokens[:3])).detach().numpy()
    assert 0 < np.max(np.abs(answer - wanted)) < 0.05 * np.max(np.abs(wanted))


@pytest.mark.compilers
def test_int8_that_rounds_nothing_is_an_error(torch: Any, tmp_path: Path) -> None:
    """Broken: a program whose every product stayed in float would be published as int8."""

    class Product(torch.nn.Module):  # type: ignore[misc]
        def forward(self, rows: Any) -> Any:
            return torch.bmm(rows[:, :, None], rows[:, None, :])

    answer = TensorSpec(name="answer", dtype="float32", shape=("batch", 4, 4))
    model = portable(Product(), (torch.rand(2, 4),), Signature(inputs=(ROWS,), outputs=(answer,)), tmp_path / "model")
    (scheme,) = BACKEND.schemes(TARGET, "int8")
    given = samples(tmp_path / "samples", rows=np.random.default_rng(0).random((8, 4), np.float32))
    with pytest.raises(NothingCompiledError, match=r"no convolution or matrix product in integers: 1 stayed in float"):
        BACKEND.compile(model, scheme, TARGET, "job", tmp_path / "artifact", calibration=given)
