"""XLA: what it reads back, its threads, 64-bit types, what its artifacts need, and what programs it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import saved_program

from compile_stage.backends import xla_hlo
from compile_stage.backends.xla import Xla
from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import Artifact, PortableModel, Scheme, ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import models, programs

TARGET = Target(name="cpu", batch_sizes=(1, 3), threads=1)
FP32 = Scheme(precision="fp32", name="fp32", native=True)

needs_xla = [
    pytest.mark.compilers,
    pytest.mark.skipif(
        plugins.missing_for_form(Xla(), "torch-export") is not None, reason="PyTorch programs need torchax"
    ),
    pytest.mark.skipif(not plugins.importable(Xla()), reason="xla needs jax and jaxlib"),
]


def spec(name: str, dtype: str = "float32", shape: tuple[Any, ...] = ("batch", 12)) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def save(module: Any, args: tuple[Any, ...], folder: Path, signature: Signature, **kwargs: Any) -> PortableModel:
    """A PyTorch module as a program whose batch is free."""
    import torch

    tree = torch.utils._pytree
    free = tree.tree_map(lambda _: {0: torch.export.Dim.AUTO}, (args, kwargs))
    names = module.forward.__code__.co_varnames[1:]
    shapes = {**dict(zip(names, free[0], strict=False)), **free[1]}
    program = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=shapes)
    return saved_program(program, folder, signature)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A dict, an integer and a keyword argument in; out: an input as it came, a weight as it is, a boolean, an integer,
    and a sum."""
    import torch

    class Several(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(12, dtype=torch.float32), requires_grad=False)

        def forward(self, parts: dict[str, Any], count: Any, *, scale: Any) -> Any:
            mixed = (parts["b"] - parts["a"]) * scale + self.weight
            return {"weight": self.weight, "same": scale, "positive": mixed > 0, "next": count + 1, "mixed": mixed}

    tmp_path = tmp_path_factory.mktemp("several")
    signature = Signature(
        inputs=(spec("b"), spec("a"), spec("count", "int64", ("batch",)), spec("scale")),
        outputs=(
            spec("weight", shape=(12,)),
            spec("same"),
            spec("positive", "bool"),
            spec("next", "int64", ("batch",)),
            spec("mixed"),
        ),
    )
    b, a, scale = (torch.ones(2, 12) for _ in range(3))  # one tensor given three times would be traced as one input
    parts = ({"b": b, "a": a}, torch.ones(2, dtype=torch.int64))
    model = save(Several(), parts, tmp_path / "model", signature, scale=scale)
    return Xla().compile(model, FP32, TARGET, "job", tmp_path / "artifact")


def rows_of(count: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    floats = {name: random.standard_normal((count, 12)).astype(np.float32) for name in ("b", "a", "scale")}
    return {**floats, "count": np.arange(count, dtype=np.int64) + 2**40}


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> tuple[PortableModel, Path]:
    """The kit's convolutional net as a program, and its samples."""
    folder = tmp_path_factory.mktemp("conv")
    model, samples = models.conv_net(folder / "model")
    return programs.to_program(model, folder / "program"), Path(samples.path) / "inputs" / "image.npy"


class TestRunning:
    pytestmark = needs_xla

    def test_inputs_of_a_dict_and_a_keyword_are_fed_in_the_programs_order(self, several: Artifact) -> None:
        """Broken: two inputs of one shape would be mixed up, and the answer would be wrong without any error."""
        with Xla().open(several, 1) as session:
            for count in (1, 3):
                batch = rows_of(count)
                answer = session.run(batch)
                mixed = (batch["b"] - batch["a"]) * batch["scale"] + np.arange(12, dtype=np.float32)
                np.testing.assert_allclose(answer["mixed"], mixed, rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(answer["positive"], answer["mixed"] > 0)
                assert answer["positive"].dtype == np.bool_

    def test_64_bit_integers_keep_their_bits(self, several: Artifact) -> None:
        """Broken: JAX makes int64 to int32 unless told otherwise, and 2**40 would come back as 1."""
        with Xla().open(several, 1) as session:
            batch = rows_of(3)
            answer = session.run(batch)
        assert answer["next"].dtype == np.int64
        np.testing.assert_array_equal(answer["next"], batch["count"] + 1)

    def test_an_output_that_is_an_input_or_a_weight_is_the_callers_own(self, several: Artifact) -> None:
        """Broken: who writes into an answer would change his own input, or the model's weights for everybody after
        him."""
        with Xla().open(several, 1) as session:
            batch = rows_of(1)
            kept = batch["scale"].copy()
            answer = session.run(batch)
            for name in ("same", "weight"):
                answer[name][...] = -7
            again = session.run(batch)
        np.testing.assert_array_equal(batch["scale"], kept)
        np.testing.assert_array_equal(again["same"], kept)
        np.testing.assert_array_equal(again["weight"], np.arange(12, dtype=np.float32))

    def test_arrays_in_any_layout_are_read_right(self, several: Artifact) -> None:
        """Broken: XLA would read a transposed or a misaligned array in another order, or beyond its end."""
        batch = rows_of(3)
        odd = {name: np.asfortranarray(array) for name, array in batch.items()}
        odd["a"].flags.writeable = False
        shifted = np.zeros(batch["b"].nbytes + 4, np.uint8)[4:].view(np.float32).reshape(3, 12)
        shifted[...] = batch["b"]
        odd["b"] = shifted
        with Xla().open(several, 1) as session:
            np.testing.assert_array_equal(session.run(odd)["mixed"], session.run(batch)["mixed"])

    def test_another_batch_size_is_padded_or_refused_in_words(self, several: Artifact) -> None:
        """Broken: a request of another size would fail deep in XLA, be cut, or be answered with padding in it."""
        with Xla().open(several, 1) as session:
            two = session.run(rows_of(2))
            for row in (0, 1):
                alone = session.run({name: array[row : row + 1] for name, array in rows_of(2).items()})
                np.testing.assert_allclose(two["mixed"][row : row + 1], alone["mixed"], rtol=1e-6)
            assert {len(two[name]) for name in ("same", "positive", "next", "mixed")} == {2}
            with pytest.raises(UsageError, match=r"up to \[3, 12\]"):
                session.run(rows_of(4))

    @pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in Linux's /proc")
    def test_threads_are_those_of_the_session(self, conv: tuple[PortableModel, Path], tmp_path: Path) -> None:
        """Broken: XLA would take every CPU of the machine, whatever the target says, and be compared with a baseline
        that has one."""
        model, samples = conv
        batch = {"image": np.load(samples)[:3]}
        artifact = Xla().compile(model, FP32, replace(TARGET, threads=2), "job", tmp_path / "artifact")
        before, nproc = pool_threads(), os.environ.get("NPROC")
        for threads in (1, 2, 3):
            with Xla().open(artifact, threads) as session:
                assert len(pool_threads() - before) == threads
                session.run(batch)
                if threads == 1:
                    busy = processor_time()
                    for _ in range(300):
                        session.run(batch)
                    spent = {task: after - busy.get(task, 0) for task, after in processor_time().items()}
                    # What is not the caller's is other sessions' idle housekeeping, at most a tick or two of 10 ms.
                    assert spent.pop(str(os.getpid())) > 5 * sum(spent.values())
            assert pool_threads() == before
        assert os.environ.get("NPROC") == nproc


def pool_threads() -> set[str]:
    """Threads of XLA's pools in this process."""
    tasks = Path("/proc/self/task")
    return {task.name for task in tasks.iterdir() if "XLAEigen" in (task / "comm").read_text()}


def processor_time() -> dict[str, int]:
    """Thread → clock ticks that it has computed."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = int(fields[11]) + int(fields[12])
    return found


class TestArtifact:
    pytestmark = needs_xla

    def test_it_opens_where_there_is_no_torch(self, several: Artifact, tmp_path: Path) -> None:
        """Broken: who serves the model would have to install PyTorch and torchax beside the 350 MB of XLA."""
        (tmp_path / "artifact.json").write_text(canonical_json(several))
        np.savez(tmp_path / "batch.npz", **rows_of(3))
        code = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "torchax"):
            raise ImportError(f"{name} may not be imported here")
sys.meta_path.insert(0, Refuse())
import numpy as np
from compile_stage.backends.xla import Xla
from compile_stage.core.digest import load_record
from compile_stage.core.records import Artifact
artifact = load_record(Artifact, open("artifact.json").read())
with Xla().open(artifact, 1) as session:
    np.savez("answer.npz", **session.run(dict(np.load("batch.npz"))))
assert not {"torch", "torchax", "compile_stage.backends.xla_program"} & set(sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        with Xla().open(several, 1) as session:
            here = session.run(rows_of(3))
        there = np.load(tmp_path / "answer.npz")
        assert set(there) == set(here)
        for name, array in here.items():
            np.testing.assert_array_equal(there[name], array)

    def test_lengths_between_the_compiled_ones_are_padded_and_cut(self, tmp_path: Path) -> None:
        """Broken: a sentence of another length than min, typical and max would be refused, or answered with its padding
        in it."""
        import torch

        class Masked(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Embedding(50, 6)

            def forward(self, ids: Any, mask: Any) -> Any:
                words = self.table(ids) * mask[:, :, None]
                return words.sum(1) / mask.sum(1, keepdim=True), words.sum(2)

        torch.manual_seed(0)
        length = torch.export.Dim("length", min=2, max=64)
        dims = {0: torch.export.Dim.AUTO, 1: length}
        example = (torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8))
        program = torch.export.export(Masked().eval(), example, dynamic_shapes=(dims, dims))
        free = ("batch", "length")
        signature = Signature(
            inputs=(spec("ids", "int64", free), spec("mask", "float32", free)),
            outputs=(spec("mean", "float32", ("batch", 6)), spec("each", "float32", free)),
        )
        model = saved_program(program, tmp_path / "model", signature)
        promised = {"ids": ShapeRange(min=(1, 4), typical=(1, 8), max=(1, 16))}
        target = replace(TARGET, batch_sizes=(1, 3), shapes=promised)
        artifact = Xla().compile(model, FP32, target, "job", tmp_path / "out")
        assert any("6 shapes are compiled" in note for note in artifact.notes)
        original = program.module()
        with Xla().open(artifact, 1) as session:
            for rows, size in ((1, 4), (1, 5), (2, 8), (3, 9), (2, 16), (3, 2)):
                ids = np.random.default_rng(size).integers(0, 50, (rows, size))
                batch = {"ids": ids, "mask": np.ones((rows, size), np.float32)}
                right = original(torch.from_numpy(ids), torch.from_numpy(batch["mask"]))
                found = session.run(batch)
                for name, expected in zip(("mean", "each"), right, strict=True):
                    np.testing.assert_allclose(found[name], expected.detach().numpy(), rtol=1e-5, atol=1e-6)

    def test_no_pickle_and_no_path_of_the_machine_is_in_it(self, several: Artifact) -> None:
        """Broken: opening a published model would run whatever a pickle says, or the model would tell where it was
        compiled."""
        files = {path.name: path.read_bytes() for path in Path(several.path).iterdir()}
        assert set(files) == {"model.json"} | {f"batch_{n}.{end}" for n in (1, 3) for end in ("xla", "stablehlo.txt")}
        for content in files.values():
            for place in (sys.prefix, str(Path(__file__).parent), str(Path(several.path).parents[1]), ".py"):
                assert place.encode() not in content
            assert b"jaxlib._jax" not in content  # what a pickle of JAX's executables names
        assert b"stablehlo.multiply" in files["batch_3.stablehlo.txt"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"jaxlib": "0.1.2"}, "made for jaxlib 0.1.2"),
            ({"machine": "pdp11"}, "made for machine pdp11"),
            ({"features": ["avx2", "avx1024"]}, "a CPU with avx1024"),
        ],
    )
    def test_another_machine_or_version_is_told(
        self, several: Artifact, change: dict[str, Any], words: str, tmp_path: Path
    ) -> None:
        """Broken: XLA would log a line and run into an illegal instruction, or fail in words that name nothing."""
        index = json.loads((Path(several.path) / "model.json").read_text())
        index["made_by"] |= change
        for file in Path(several.path).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "model.json").write_text(json.dumps(index))
        elsewhere = replace(several, path=str(tmp_path))
        with pytest.raises(NothingCompiledError, match=words), Xla().open(elsewhere, 1):
            pass

    def test_a_damaged_executable_is_an_error_in_words(self, several: Artifact, tmp_path: Path) -> None:
        """Broken: a cut download would end the server instead of being told."""
        for file in Path(several.path).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes()[:500])
        (tmp_path / "model.json").write_bytes((Path(several.path) / "model.json").read_bytes())
        with (
            pytest.raises(NothingCompiledError, match="can't load"),
            Xla().open(replace(several, path=str(tmp_path)), 1),
        ):
            pass

    def test_weights_in_a_file_are_shared_by_all_batch_sizes(
        self, conv: tuple[PortableModel, Path], tmp_path: Path
    ) -> None:
        """Broken: the rung for memory would change answers, or save nothing."""
        model, samples = conv
        images = np.load(samples)
        (rung,) = Xla().tuning_options(TARGET, FP32)
        found, sizes = [], []
        for options in ({}, rung.options):
            target = replace(TARGET, options={"xla": options})
            artifact = Xla().compile(model, FP32, target, "job", tmp_path / artifact_name(options))
            sizes.append(artifact.options["weights"])
            with Xla().open(artifact, 1) as session:
                found.append([session.run({"image": images[:count]})["scores"] for count in (1, 3)])
        assert sizes == ["constants", "file"]
        assert (tmp_path / "file" / "weights.bin").stat().st_size >= 3848  # the net's weights, once
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_what_runs_is_read_back(self, conv: tuple[PortableModel, Path], tmp_path: Path) -> None:
        """Broken: a report would not tell convolutions from generated loops, nor in what type they are computed."""
        artifact = Xla().compile(conv[0], FP32, replace(TARGET, batch_sizes=(3,)), "job", tmp_path / "artifact")
        precision = artifact.executed["precision"]
        assert precision["matrix_and_convolution"] == {"f32": 3}  # two convolutions and a matrix product
        assert set(precision["all"]) == {"f32"}
        assert artifact.executed["providers"]["generated kernels"] > 0
        assert "jaxlib" in artifact.toolchain


def artifact_name(options: Any) -> str:
    return str(options.get("weights", "constants"))


class TestPrograms:
    pytestmark = needs_xla

    def test_pooling_stays_in_float32(self, tmp_path: Path) -> None:
        """Broken: with 64-bit types on, torchax pools in float64, and the artifact would be slow without anyone being
        told."""
        import torch

        class Pool(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return torch.nn.functional.max_pool2d(x, 3, 2, 1)

        signature = Signature(
            inputs=(spec("x", shape=("batch", 2, 8, 8)),), outputs=(spec("y", shape=("batch", 2, 4, 4)),)
        )
        model = save(Pool(), (torch.ones(2, 2, 8, 8),), tmp_path / "model", signature)
        artifact = Xla().compile(model, FP32, TARGET, "job", tmp_path / "artifact")
        assert set(artifact.executed["precision"]["all"]) == {"f32"}
        x = np.random.default_rng(0).standard_normal((3, 2, 8, 8)).astype(np.float32)
        with Xla().open(artifact, 1) as session:
            np.testing.assert_array_equal(session.run({"x": x})["y"], Pool()(torch.from_numpy(x)).numpy())

    def test_a_float_that_becomes_an_integer_keeps_64_bits(self, tmp_path: Path) -> None:
        """Broken: where no input is of 64 bits, an answer of 64 bits would be computed in 32."""
        import torch

        class Widen(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return x.to(torch.int64) * 4

        signature = Signature(inputs=(spec("x"),), outputs=(spec("y", "int64"),))
        model = save(Widen(), (torch.ones(2, 12),), tmp_path / "model", signature)
        artifact = Xla().compile(model, FP32, TARGET, "job", tmp_path / "artifact")
        with Xla().open(artifact, 1) as session:
            answer = session.run({"x": np.full((1, 12), 2**33, np.float32)})["y"]
        assert answer.tolist() == [[2**35] * 12]

    def test_a_program_that_changes_itself_is_refused(self, tmp_path: Path) -> None:
        """Broken: a counter in the model would stand still, and nobody would be told."""
        import torch

        class Counts(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Any) -> Any:
                self.calls += 1
                return x * self.calls

        signature = Signature(inputs=(spec("x"),), outputs=(spec("y"),))
        model = save(Counts(), (torch.ones(2, 12),), tmp_path / "model", signature)
        with pytest.raises(NothingCompiledError, match="changes 'calls'"):
            Xla().compile(model, FP32, TARGET, "job", tmp_path / "artifact")

    def test_an_operator_that_torchax_lacks_is_named(self, tmp_path: Path) -> None:
        """Broken: the report would show an assertion of torchax instead of what is missing."""
        import torch

        class Rare(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                return torch.special.airy_ai(x)

        signature = Signature(inputs=(spec("x"),), outputs=(spec("y"),))
        model = save(Rare(), (torch.ones(2, 12),), tmp_path / "model", signature)
        with pytest.raises(NothingCompiledError, match=r"does not know the operators.*airy_ai"):
            Xla().compile(model, FP32, TARGET, "job", tmp_path / "artifact")

    def test_bfloat16_that_did_not_happen_is_an_error(self, conv: tuple[PortableModel, Path], tmp_path: Path) -> None:
        """Broken: on a CPU without bfloat16 XLA would multiply in float32, and the report would say bf16."""
        if hardware().multiplies_bf16:
            pytest.skip("this CPU has bfloat16")
        scheme = Scheme(precision="bf16", name="bf16", native=True)
        with pytest.raises(NothingCompiledError, match="asked for bf16 and runs no"):
            Xla().compile(conv[0], scheme, replace(TARGET, batch_sizes=(1,)), "job", tmp_path / "artifact")


EMPTY = Signature(inputs=(), outputs=())
MODEL = PortableModel(path="", digest="", form="torch-export", opset=0, precision="fp32", signature=EMPTY)


@pytest.mark.parametrize(
    ("options", "word"), [({"weights": "elsewhere"}, "it can be constants, file"), ({"fast": True}, "no option 'fast'")]
)
def test_options_are_refused_in_words(options: dict[str, Any], word: str) -> None:
    """Broken: a typo in a policy would be ignored."""
    assert word in str(Xla().refuse_target(replace(TARGET, options={"xla": options})))


def test_a_length_that_is_free_is_refused(tmp_path: Path) -> None:
    """Broken: one length would be compiled, and every other refused in production."""
    free = Signature(inputs=(spec("ids", "int64", ("batch", "length")),), outputs=())
    model = replace(MODEL, signature=free)
    assert "size of 'length'" in str(Xla().refuse(model, TARGET))

    def promise(longest: int) -> Target:
        return replace(TARGET, shapes={"ids": ShapeRange(min=(1, 8), typical=(1, 8), max=(1, longest))})

    assert Xla().refuse(model, promise(8)) is None
    many = replace(promise(16), batch_sizes=tuple(range(1, 20)))
    assert "asks for 38 of them" in str(Xla().refuse(model, many))


def test_a_product_in_another_type_is_an_error() -> None:
    """Broken: a float32 model multiplied in float64 or bfloat16 would be published as fp32."""
    text = """HloModule jit_model

ENTRY %main (x: f64[2,2]) -> f64[2,2] {
  %x = f64[2,2]{1,0} parameter(0)
  ROOT %y = f64[2,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    with pytest.raises(NothingCompiledError, match="multiplies in f64"):
        xla_hlo.read_back([text], FP32, frozenset({"float32"}))
    _, notes = xla_hlo.read_back([text], FP32, frozenset({"float32", "float64"}))
    assert notes == ("matrix products and convolutions beside those in f32: 1 in f64",)
    with pytest.raises(NothingCompiledError, match="computes nothing"):
        xla_hlo.read_back([text.replace("  ROOT %y = f64[2,2]{1,0} dot(%x, %x)", "  // ")], FP32, frozenset())


def test_flags_of_xla_are_a_part_of_the_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an artifact made with other switches would come from the cache."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    without = Xla().toolchain()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert Xla().toolchain() != without


@pytest.mark.compilers
@pytest.mark.skipif(not plugins.importable(Xla()), reason="xla needs jax and jaxlib")
@pytest.mark.parametrize("weights", ["constants", "file"])
def test_a_table_is_read_by_index(weights: str, tmp_path: Path) -> None:
    """How onnx2torch writes an embedding. Broken: JAX would ask a traced tensor for its numbers, and no language model
    from ONNX would compile."""
    import torch

    class Table(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(12.0).reshape(6, 2), requires_grad=False)

        def forward(self, ids: Any) -> Any:
            return self.table[ids]

    signature = Signature(inputs=(spec("ids", "int64", ("batch", 3)),), outputs=(spec("y", shape=("batch", 3, 2)),))
    model = save(Table(), (torch.zeros((2, 3), dtype=torch.int64),), tmp_path / "m", signature)
    target = replace(TARGET, options={"xla": {"weights": weights}})
    artifact = Xla().compile(model, FP32, target, "m--xla", tmp_path / "a")
    ids = np.array([[5, 0, 3]])
    with Xla().open(artifact, 1) as session:
        np.testing.assert_array_equal(session.run({"ids": ids})["y"], np.arange(12.0).reshape(6, 2)[ids])
