"""IREE beyond the conformance kit: what only this backend does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from compile_stage.backends import iree as module
from compile_stage.backends import iree_compiler, iree_module
from compile_stage.backends.iree import Iree
from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import models
from compile_stage.testing.node_cases import Found, collect, judge

TARGET = Target(name="cpu", threads=1, batch_sizes=(1, 3))
FP32 = Scheme(precision="fp32", name="fp32", native=True)

needs_iree = pytest.mark.skipif(not plugins.importable(Iree()), reason="iree-base-compiler is not installed here")


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


def options(**given: Any) -> Target:
    return replace(TARGET, options={"iree": given})


def saved(g: models.Graph, signature: Signature, folder: Path) -> PortableModel:
    """A float32 graph with the inputs and outputs of a signature, as `folder/model.onnx`."""
    described = (signature.inputs, signature.outputs)
    inputs, outputs = ([onnx.helper.make_tensor_value_info(s.name, 1, s.shape) for s in specs] for specs in described)
    graph = onnx.helper.make_graph(g.nodes, "net", inputs, outputs, g.weights)
    opset = onnx.helper.make_opsetid("", 18)
    path = folder / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return PortableModel(path=str(path), digest="", form="onnx", opset=18, precision="fp32", signature=signature)


@pytest.fixture
def killed_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Path]:
    """In place of IREE's compiler a program that is ended by a signal so many times, and then writes its flags as the
    module; returns a file with a line for each run."""

    def install(times: int, number: int) -> Path:
        runs, program = tmp_path / "runs", tmp_path / "iree-compile"
        program.write_text(
            f"#!/bin/sh\necho \"$*\" >> '{runs}'\n"
            f"[ $(wc -l < '{runs}') -gt {times} ] || kill -{number} $$\n"
            'echo "$*" > main.vmfb\n'
        )
        program.chmod(0o700)
        found = ModuleType("iree.compiler.tools.binaries")
        found.find_tool = lambda name: str(program)  # type: ignore[attr-defined]
        for name in ("iree", "iree.compiler", "iree.compiler.tools"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, found.__name__, found)
        return runs

    return install


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_compiler_that_is_killed_leaves_no_optimisation_out(
    number: int, killed_compiler: Callable[[int, int], Path], tmp_path: Path
) -> None:
    """Broken: a kill, as where memory runs out, was taken for a failure of aggressive fusion, and the module was
    compiled without it, published and kept in the cache."""
    runs = killed_compiler(1, number)
    left_out, note = iree_compiler._compile_module({}, {}, tmp_path, doubles=False)
    assert (left_out, note) == ({}, "")
    first, second = runs.read_text().splitlines()
    assert first == second


def test_a_compiler_that_is_killed_again_fails_the_job(
    killed_compiler: Callable[[int, int], Path], tmp_path: Path
) -> None:
    """Broken: with memory short throughout, what came of it was compiled without all that makes it fast."""
    runs = killed_compiler(2, signal.SIGKILL)
    with pytest.raises(NothingCompiledError, match="IREE's compiler was killed, and killed again"):
        iree_compiler._compile_module({}, {}, tmp_path, doubles=False)
    assert len(runs.read_text().splitlines()) == 2


def test_a_compiler_that_crashes_by_itself_is_tried_without_an_optimisation(
    killed_compiler: Callable[[int, int], Path], tmp_path: Path
) -> None:
    """Broken: a graph at which aggressive fusion crashes could not be compiled at all."""
    killed_compiler(1, signal.SIGSEGV)
    left_out, note = iree_compiler._compile_module({}, {}, tmp_path, doubles=False)
    assert left_out == {"aggressive_fusion": False}
    assert "compiled without aggressive fusion, since with it: IREE's compiler crashed with signal 11" in note


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stack_limit": 5000}, "power of two"),
        ({"stack_limit": True}, "power of two"),
        ({"data_tiling": "yes"}, "true or false"),
        ({"optimization": "O9"}, "O0, O1, O2, O3"),
        ({"target_triple": "vax-dec-ultrix"}, "aarch64-linux-gnu"),
        ({"target_triple": "aarch64-linux --evil"}, "can't be"),
        ({"target_device": "cuda"}, "needs the option target_chip, such as sm_80"),
        ({"target_device": "metal", "target_chip": "m1"}, "takes no target_chip"),
        ({"target_device": "cuda", "target_chip": "sm_80", "stack_limit": 4096}, "is for a CPU"),
    ],
)
def test_options_that_can_not_be_are_refused(given: dict[str, Any], said: str) -> None:
    """Broken: the compiler's own message, minutes later; or a word that is a flag of its own on its command line."""
    assert said in str(Iree().refuse_target(options(**given)))


def test_a_device_must_be_named_in_the_options() -> None:
    """A target's device is not compiled for silently: its chip has to be known."""
    assert "target_device" in str(Iree().refuse_target(replace(TARGET, device="cuda")))
    asked = replace(options(target_device="cuda", target_chip="sm_80"), device="cuda")
    assert Iree().refuse_target(asked) is None


def test_names_of_dispatches_are_read() -> None:
    """What runs is told from the names that the compiler gives its functions; other text of the file may run into a
    name."""
    raw = (
        b"main$async_dispatch_0_conv_Dx8x16x16x3x3x3_f32\0main$async_dispatch_1_matmul_like_Dx16x16_f16xf16xf32L"
        b" main$async_dispatch_1_matmul_like_Dx16x16_f16xf16xf32\0main$async_dispatch_2_slow_memcpy\0"
        b"main$async_dispatch_3_softmax_Dx2x8x8xf32_dispatch_tensor_store\0"
        b"main$async_dispatch_10_elementwise_D_i64xf32\0"
    )
    assert iree_module.read_dispatches(raw) == [
        ("conv", "f32"),
        ("matmul_like", "f16xf16xf32"),
        ("slow_memcpy", "other"),
        ("softmax", "f32"),
        ("elementwise", "i64xf32"),
    ]


def test_precision_that_was_not_taken_is_an_error() -> None:
    """Broken: an fp16 graph whose products all run in float32 would pass as fp16."""
    half = Scheme(precision="fp16", name="fp16", weights="float16")
    assert iree_module.check_precision(half, Counter({"f16xf16xf32": 3})) == []
    assert "1 in f32" in iree_module.check_precision(half, Counter({"f16xf16xf32": 3, "f32": 1}))[0]
    with pytest.raises(NothingCompiledError, match="none of its matrix products"):
        iree_module.check_precision(half, Counter({"f32": 3}))


def test_what_the_source_computes_itself_is_no_precision_that_was_not_taken() -> None:
    """Broken: a source in float16, or one that multiplies integers, fails as fp32, which asks for no lowering; or a
    float32 one passes in float16."""
    whole = Scheme(precision="fp32", name="fp32")
    (note,) = iree_module.check_precision(whole, Counter({"f16xf16xf32": 3}), ["f16"])
    assert note == "the source's own graph has matrix products that are not in float32: 3 in f16xf16xf32"
    for own in ([], ["i8"]):
        with pytest.raises(NothingCompiledError, match="none of its matrix products"):
            iree_module.check_precision(whole, Counter({"f16xf16xf32": 3}), own)


@needs_iree
def test_scalars_and_inputs_of_unlike_first_axes_are_taken(tmp_path: Path) -> None:
    """Broken: a scalar would reach the module as a vector, and a model whose weights are inputs be refused for a batch
    that it has not got."""
    g = models.Graph(0)
    g.add("Add", g.add("MatMul", "x", "w"), "s", name="y")
    arrays = {
        "x": np.ones((3, 4), np.float32),
        "w": np.full((4, 2), 2, np.float32),
        "s": np.array(0.5, np.float32),
    }
    shapes = {"x": (3, 4), "w": (4, 2), "s": ()}
    signature = Signature(
        inputs=tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(3, 2)),),
    )
    model = saved(g, signature, tmp_path)
    artifact = Iree().compile(model, FP32, replace(TARGET, batch_sizes=(3,)), "job", tmp_path / "out")
    with Iree().open(artifact, 1) as session:
        np.testing.assert_array_equal(session.run(arrays)["y"], np.full((3, 2), 8.5, np.float32))


@needs_iree
@pytest.mark.parametrize("shapes", ["fixed", "free"])
def test_strided_convolutions_with_a_window_of_one_compile(shapes: str, tmp_path: Path) -> None:
    """Broken: IREE refuses ResNet-50, since a value that the rewritten graph has more has no type."""
    g = models.Graph(0)
    middle = g.add("Conv", "image", g.weight(4, 3, 1, 1), strides=[2, 3])
    g.add("Conv", middle, g.weight(5, 4, 1, 1), name="answer", strides=[2, 1])
    signature = Signature(
        inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 3, 7, 8)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", 5, 2, 3)),),
    )
    model = saved(g, signature, tmp_path)
    artifact = Iree().compile(model, FP32, options(shapes=shapes), "job", tmp_path / "out")
    batch = {"image": np.random.default_rng(0).standard_normal((3, 3, 7, 8), dtype=np.float32)}
    right = onnxruntime.InferenceSession(model.path).run(None, batch)[0]
    with Iree().open(artifact, 1) as session:
        np.testing.assert_allclose(session.run(batch)["answer"], right, rtol=1e-4, atol=1e-5)


@needs_iree
def test_a_module_for_each_size_unless_free_shapes_are_asked_for(conv: Any, tmp_path: Path) -> None:
    """Broken: code for a free batch, which takes twice the time; or a batch between two sizes is answered wrong."""
    fixed = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path / "fixed")
    free = Iree().compile(conv[0], FP32, options(shapes="free"), "job", tmp_path / "free")
    assert [one["file"] for one in fixed.options["modules"]] == ["batch_1.vmfb", "batch_3.vmfb"]
    assert (fixed.options["shapes"], fixed.options["channels_last"]) == ("fixed", True)
    assert (free.entry, "modules" in free.options) == ("model.vmfb", False)
    images = np.load(Path(conv[1].path) / "inputs" / "image.npy")
    with Iree().open(fixed, 1) as first, Iree().open(free, 1) as second:
        for size in (1, 2, 3):
            batch = {"image": images[:size]}
            np.testing.assert_allclose(first.run(batch)["scores"], second.run(batch)["scores"], rtol=1e-4, atol=1e-5)
        with pytest.raises(UsageError, match="larger"):
            first.run({"image": images[:4]})


@needs_iree
def test_same_model_same_bytes(conv: Any, tmp_path: Path) -> None:
    """Neither a time nor a path of this machine is in the module."""
    first = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path / "one")
    second = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path / "two")
    assert first.digest == second.digest
    assert str(tmp_path).encode() not in (tmp_path / "one" / first.entry).read_bytes()


@needs_iree
def test_code_for_this_machine_only(conv: Any, tmp_path: Path) -> None:
    """Broken: code with instructions that a machine lacks ends its process without a word."""
    artifact = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path)
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"f32": 6}, "three for each of two sizes"
    assert set(artifact.options["needs"]["features"]) <= set(module.hardware().features)
    elsewhere = replace(
        artifact, options={**artifact.options, "needs": {**artifact.options["needs"], "features": ["amx_int8x"]}}
    )
    with pytest.raises(NothingCompiledError, match="its code uses amx_int8x"), Iree().open(elsewhere, 1):
        pass


@needs_iree
@pytest.mark.parametrize(
    ("given", "provider", "machine"),
    [
        (
            {"target_triple": "aarch64-linux-gnu", "target_cpu": "cortex-a76"},
            "llvm-cpu (embedded-elf-arm_64)",
            "code for aarch64, and this machine is",
        ),
        ({"target_device": "cuda", "target_chip": "sm_80"}, "cuda (cuda-nvptx-fb)", "code for cuda"),
    ],
    ids=["aarch64", "cuda"],
)
def test_cross_compiled_is_not_run(given: Any, provider: str, machine: str, conv: Any, tmp_path: Path) -> None:
    """It is compiled, its functions are listed, and opening it here is refused with the reason: no gate can pass."""
    if (
        module._refuse_machine(
            {"device": given.get("target_device", "local"), "chip": "", "machine": "aarch64", "features": []}
        )
        is None
    ):
        pytest.skip("this machine is of that kind")
    target = replace(options(**given), device=given.get("target_device", "cpu"))
    artifact = Iree().compile(conv[0], FP32, target, "job", tmp_path)
    assert set(artifact.executed["providers"]) == {provider}
    assert artifact.executed["ops"]["conv"] == 4, "two for each of two sizes"
    assert machine in artifact.not_runnable_here
    with pytest.raises(NothingCompiledError, match=machine), Iree().open(artifact, 1):
        pass


@needs_iree
def test_a_pool_has_one_device_for_as_long_as_the_process_lives() -> None:
    """Broken: taking a device down waits for its threads, which may wait for Python: sessions of ResNet-50 hung at
    their end, one in three."""
    same = "from compile_stage.backends.iree import _device; print(_device('local', 2) is _device('local', 2))"
    done = subprocess.run([sys.executable, "-c", same], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


_THREADS = """
import json, os, sys
from compile_stage.backends.iree import Iree
from compile_stage.core.digest import load_record
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Artifact
artifact = load_record(Artifact, sys.stdin.read())
def workers():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith("iree-worker") for name in names)
with Iree().open(artifact, 1):
    one = workers()
with Iree().open(artifact, 3):
    three = workers()
try:
    with Iree().open(artifact, 2):
        said = "opened"
except UsageError as error:
    said = error.problem
print(json.dumps([one, three, said, sorted({"onnx", "iree.compiler"} & set(sys.modules))]))
"""


@needs_iree
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_threads_are_what_was_asked_for(conv: Any, tmp_path: Path) -> None:
    """The runtime makes its threads once per process: another number is refused there, not taken and forgotten. Serving
    imports no compiler."""

    artifact = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path)
    text = canonical_json(artifact)
    done = subprocess.run(
        [sys.executable, "-c", _THREADS],
        input=text if isinstance(text, str) else text.decode(),
        capture_output=True,
        text=True,
        check=True,
    )
    import json

    one, three, said, loaded = json.loads(done.stdout)
    assert (one, three, loaded) == (0, 3, [])
    assert "has 3 threads in this process, and can't have 2" in said


@needs_iree
def test_float16_is_close_and_not_equal(conv: Any, tmp_path: Path) -> None:
    """Half precision rounds: no error would mean that it ran in float32."""
    from compile_stage.precision.float16 import Float16

    half = Iree().schemes(TARGET, "fp16")[0]
    low = Float16().lower(conv[0], half, conv[1], (), tmp_path / "low")
    artifact = Iree().compile(low, half, TARGET, "job", tmp_path / "half")
    exact = Iree().compile(conv[0], FP32, TARGET, "job", tmp_path / "exact")
    batch = {"image": np.load(Path(conv[1].path) / "inputs" / "image.npy")[:2]}
    with Iree().open(artifact, 1) as halved, Iree().open(exact, 1) as whole:
        error = np.max(np.abs(halved.run(batch)["scores"] - whole.run(batch)["scores"]))
    assert 1e-6 < error < 0.02


@needs_iree
def test_float64_in_and_out_is_computed_in_float64(tmp_path: Path) -> None:
    """Seconds since 1970, less those of another day, in sixteenths of a second. Broken: IREE would compute in float32,
    which has no such numbers, and could not run what it compiled."""
    when = onnx.helper.make_tensor_value_info("when", onnx.TensorProto.DOUBLE, ["batch", 2])
    since = onnx.helper.make_tensor_value_info("since", onnx.TensorProto.DOUBLE, ["batch", 2])
    start = onnx.numpy_helper.from_array(np.array([1.7e9, 1.6e9]), "start")
    node = onnx.helper.make_node("Sub", ["when", "start"], ["since"])
    graph = onnx.helper.make_graph([node], "net", [when], [since], [start])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    signature = Signature(
        inputs=(TensorSpec(name="when", dtype="float64", shape=("batch", 2)),),
        outputs=(TensorSpec(name="since", dtype="float64", shape=("batch", 2)),),
    )
    model = PortableModel(path=str(path), digest="", form="onnx", opset=18, precision="fp32", signature=signature)
    artifact = Iree().compile(model, FP32, TARGET, "job", tmp_path / "out")
    rows = np.array([[1.7e9 + 1 / 16, 1.7e9 + 3 / 16]])
    with Iree().open(artifact, 1) as session:
        answer = session.run({"when": rows})["since"]
    np.testing.assert_array_equal(answer, [[1 / 16, 1e8 + 3 / 16]])
    assert answer.dtype == np.float64


@needs_iree
def test_what_its_runtime_raises_in_a_call_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that reads past a buffer (onnx's own case of a Bernoulli in doubles, compiled in float32 as for a GPU
    without them). Broken: it would leave the session as a bare IndexError."""
    monkeypatch.setattr(iree_compiler, "_WITH_DOUBLES", ())
    (case,) = (one for one in collect(("bernoulli",)) if one.name == "test_bernoulli_double_expanded")
    finding = judge(Iree(), case, tmp_path)
    assert finding.found is Found.CAUGHT, finding
    assert "NothingCompiledError: IREE could not run the module" in finding.reason
