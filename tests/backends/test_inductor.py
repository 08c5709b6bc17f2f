"""PyTorch's ahead-of-time compiler: what it reads back, its options, its refusals, and what programs it takes."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import saved_program

from compile_stage.backends import inductor, inductor_cuda
from compile_stage.backends.inductor import Inductor
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import models, programs

torch = pytest.importorskip("torch", reason="the backend inductor needs torch")

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not inductor._compiler_version(), reason="there is no C++ compiler here"),
]

TARGET = Target(name="cpu", batch_sizes=(1, 3), threads=1)
FP32 = Scheme(precision="fp32", name="fp32", native=True)


class Several(torch.nn.Module):
    """A dict and a keyword argument in; out: an input as it came, a part of it, a weight, a boolean, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12, dtype=torch.float32), requires_grad=False)

    def forward(self, parts: dict[str, Any], *, scale: Any) -> Any:
        mixed = (parts["b"] - parts["a"]) * scale + self.weight
        part = scale[:, 2:]
        return {"weight": self.weight, "same": scale, "part": part, "positive": mixed > 0, "mixed": mixed}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Compiled once: a compilation takes half a minute."""
    tmp_path = tmp_path_factory.mktemp("several")
    b, a, scale = (torch.ones(2, 12) for _ in range(3))  # one tensor given three times would be traced as one input
    free = {0: torch.export.Dim.AUTO}
    program = torch.export.export(
        Several().eval(),
        ({"b": b, "a": a},),
        {"scale": scale},
        dynamic_shapes={"parts": {"b": free, "a": free}, "scale": free},
    )

    def spec(name: str, dtype: str = "float32", shape: tuple[Any, ...] = ("batch", 12)) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    signature = Signature(
        inputs=(spec("b"), spec("a"), spec("scale")),
        outputs=(
            spec("weight", shape=(12,)),
            spec("same"),
            spec("part", shape=("batch", 10)),
            spec("positive", "bool"),
            spec("mixed"),
        ),
    )
    model = saved_program(program, tmp_path / "model", signature)
    return Inductor().compile(model, FP32, TARGET, "job", tmp_path / "artifact")


def rows_of(count: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((count, 12)).astype(np.float32) for name in ("b", "a", "scale")}


@pytest.mark.slow
def test_inputs_of_a_dict_and_a_keyword_are_fed_in_the_programs_order(several: Artifact) -> None:
    """Broken: two inputs of one shape would be mixed up, and the answer would be wrong without any error."""
    with Inductor().open(several, 1) as session:
        for count in (1, 2, 5):
            batch = rows_of(count)
            answer = session.run(batch)
            mixed = (batch["b"] - batch["a"]) * batch["scale"] + np.arange(12, dtype=np.float32)
            np.testing.assert_allclose(answer["mixed"], mixed, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(answer["positive"], answer["mixed"] > 0)
            assert answer["positive"].dtype == np.bool_


@pytest.mark.slow
def test_an_output_that_is_an_input_or_a_weight_is_the_callers_own(several: Artifact) -> None:
    """Broken: who writes into an answer would change his own input, or the model's weights for everybody after him."""
    with Inductor().open(several, 1) as session:
        batch = rows_of(2)
        kept = batch["scale"].copy()
        answer = session.run(batch)
        for name in ("same", "part", "weight"):
            answer[name][...] = -7
        np.testing.assert_array_equal(batch["scale"], kept)
        again = session.run(batch)
        np.testing.assert_array_equal(again["same"], kept)
        np.testing.assert_array_equal(again["part"], kept[:, 2:])
        np.testing.assert_array_equal(again["weight"], np.arange(12, dtype=np.float32))


@pytest.mark.slow
def test_arrays_in_any_layout_are_read_right(several: Artifact) -> None:
    """Broken: the generated code reads memory row by row, so a transposed array would be read in another order."""
    batch = rows_of(3)
    odd = {name: np.asfortranarray(array) for name, array in batch.items()}
    odd["a"].flags.writeable = False
    with Inductor().open(several, 1) as session:
        np.testing.assert_array_equal(session.run(odd)["mixed"], session.run(batch)["mixed"])


@pytest.mark.slow
def test_the_session_for_a_gpu_feeds_and_answers_by_name(several: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: on a GPU two inputs of one shape are mixed up, or an answer stands under another output's name. The CPU
    stands for the GPU; calls that are recorded are tested on one."""
    monkeypatch.setattr(inductor_cuda, "CUDA", "cpu")
    batch = rows_of(3)
    package = inductor._loaded(Path(several.path) / several.entry, for_recording=True)
    with (
        Inductor().open(several, 1) as session,
        inductor_cuda.opened(package, several.signature, 1, {"device": "cuda"}) as there,
    ):
        expected, answer = session.run(batch), there.run(dict(reversed(batch.items())))
    assert list(answer) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(answer[name], array)


@pytest.mark.slow
def test_no_path_of_the_machine_and_no_cache_is_left(several: Artifact) -> None:
    """Broken: a published model would tell the home folder of whoever compiled it, or a run would leave files for
    ever."""
    with zipfile.ZipFile(Path(several.path) / several.entry) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
        assert not [name for name in archive.namelist() if name.endswith(".cpp")]
    for place in (str(Path(torch.__file__).parents[2]), str(Path(several.path).parents[1]), "/compile-stage-"):
        assert place.encode() not in content
    assert "compile-stage-" not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")  # PyTorch sets it itself, too


@pytest.mark.slow
def test_what_runs_is_read_back(several: Artifact) -> None:
    """Broken: a report would not tell library kernels from generated loops."""
    assert several.executed["providers"] == {"generated loops": 1}
    assert several.options == {"freezing": True, "max_autotune": False}


@pytest.mark.slow
def test_threads_are_those_of_the_session(several: Artifact) -> None:
    """Broken: a second session with other threads, or the caller's own use of PyTorch, would change how many the first
    one uses."""
    before = torch.get_num_threads()
    with Inductor().open(several, 1) as one, Inductor().open(several, 2) as two:
        for session, threads in ((one, 1), (two, 2), (one, 1)):
            session.run(rows_of(2))
            assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_bfloat16_is_near_and_is_read_back(tmp_path: Path) -> None:
    """Broken: where the CPU has bfloat16, a job of it would answer wrongly, run in float32, or give outputs of another
    type.

    PyTorch computes bfloat16 on every CPU, slowly; so its numbers are looked at here, whatever this CPU has."""
    model, samples = models.perceptron(tmp_path / "model")
    program = programs.to_program(model, tmp_path / "program")
    scheme = Scheme(precision="bf16", name="bf16", native=True)
    artifact = Inductor().compile(program, scheme, TARGET, "job", tmp_path / "artifact")
    assert artifact.executed["precision"]["weights"]["bfloat16"] == 2
    features = np.load(Path(samples.path) / "inputs" / "features.npy")
    from onnx.reference import ReferenceEvaluator

    label, probabilities = ReferenceEvaluator(model.path).run(None, {"features": features})
    with Inductor().open(artifact, 1) as session:
        answer = session.run({"features": features})
        assert answer["probabilities"].dtype == np.float32
        error = np.abs(answer["probabilities"] - probabilities).max()
        assert 0 < error < 0.02
        assert np.mean(answer["label"] == label) > 0.9
        assert session.run({"features": features[:1]})["probabilities"].shape == (1, 4)


def test_settings_of_a_newer_pytorch_are_left_out() -> None:
    """Broken: PyTorch 2.11 refuses a setting that it does not know, and so each compilation."""
    asked = {"freezing": True, "aot_inductor.enable_line_tables": False, "aot_inductor.of_next_year": 1}
    known = inductor._known(asked)
    assert "aot_inductor.of_next_year" not in known
    assert known["freezing"] is True


def test_a_program_that_computes_nothing_is_refused(tmp_path: Path) -> None:
    """Broken: generated code that was misread would count as compiled."""
    package = tmp_path / "model.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/data/x.wrapper.cpp", "output_handles[0] = arg0.release();")
    with pytest.raises(NothingCompiledError, match="computes nothing"):
        inductor._read_back(package, FP32)
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/data/x.so", "")
    with pytest.raises(NothingCompiledError, match="can't be read back"):
        inductor._read_back(package, FP32)


def test_without_a_compiler_the_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the job would fail after half a minute with a trace of Inductor's, and the cache would serve another
    compiler's artifact."""
    assert any("++" in name for name in Inductor().toolchain())
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "needs a C++ compiler, and /nowhere/c++" in str(Inductor().refuse_target(TARGET))
    assert set(Inductor().toolchain()) == {"torch", "numpy"}


@pytest.mark.parametrize(
    ("options", "word"), [({"freezing": "yes"}, "true or false"), ({"fast": True}, "no option 'fast'")]
)
def test_options_are_refused_in_words(options: dict[str, Any], word: str, tmp_path: Path) -> None:
    """Broken: a typo in a policy would be ignored."""
    target = replace(TARGET, options={"inductor": options})
    assert word in str(Inductor().refuse_target(target))
    empty = Signature(inputs=(), outputs=())
    model = PortableModel(path="", digest="", form="torch-export", opset=0, precision="fp32", signature=empty)
    with pytest.raises(UsageError, match=word):
        Inductor().compile(model, FP32, target, "job", tmp_path / "out")
