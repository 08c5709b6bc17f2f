"""ONNX Runtime beyond the conformance kit: what only this backend does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compile_stage.backends import onnxruntime as module
from compile_stage.backends import onnxruntime_session as sessions
from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.digest import list_tree
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.records import ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.known_sizes import KNOWN_SIZES, known_sizes
from compile_stage.precision.int8 import DynamicInt8, StaticInt8
from compile_stage.testing import models

TARGET = Target(name="cpu", threads=1)


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


def scheme(precision: str) -> Any:
    return OnnxRuntime().schemes(TARGET, precision)[0]


def options(**given: Any) -> Target:
    return replace(TARGET, options={"onnxruntime": given})


def test_optimised_graph_is_what_is_counted(conv: Any, tmp_path: Path) -> None:
    """Batch normalisation and ReLU are merged away by the runtime; the original graph has both."""
    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    assert "BatchNormalization" not in artifact.executed["ops"]
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 0, "float": 3}
    assert set(artifact.executed["providers"]) == {"CPUExecutionProvider"}


def test_int8_graph_runs_in_integers(conv: Any, tmp_path: Path) -> None:
    lowered = StaticInt8().lower(conv[0], scheme("int8"), conv[1], (), tmp_path / "low")
    artifact = OnnxRuntime().compile(lowered, scheme("int8"), TARGET, "job", tmp_path / "art")
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 3, "float": 0}


def test_int8_graph_that_runs_in_float_is_an_error(conv: Any, tmp_path: Path) -> None:
    """A float graph that is called int8 stands for one whose kernels the runtime did not find."""
    with pytest.raises(NothingCompiledError, match="3 matrix and convolution operators stayed in float"):
        OnnxRuntime().compile(conv[0], scheme("int8"), TARGET, "job", tmp_path)


def test_partly_quantised_graph_is_noted(conv: Any, tmp_path: Path) -> None:
    kept = next(node.name for node in onnx.load(conv[0].path).graph.node if node.op_type == "Gemm")
    lowered = DynamicInt8().lower(conv[0], scheme("int8-dynamic"), None, (kept,), tmp_path / "low")
    artifact = OnnxRuntime().compile(lowered, scheme("int8-dynamic"), TARGET, "job", tmp_path / "art")
    assert any("2 matrix and convolution operators run in int8, 1 in float" in note for note in artifact.notes)


def test_unquantised_optimisation_level_is_found_out(conv: Any, tmp_path: Path) -> None:
    """With optimisation off, QDQ nodes are executed one by one around float kernels: int8 in name only."""
    lowered = StaticInt8().lower(conv[0], scheme("int8"), conv[1], (), tmp_path / "low")
    with pytest.raises(NothingCompiledError, match="none of it in integers"):
        OnnxRuntime().compile(lowered, scheme("int8"), options(graph_optimization="disabled"), "job", tmp_path / "art")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"graph_optimisation": "all"}, "no option 'graph_optimisation'; it has graph_optimization"),
        ({"graph_optimization": "max"}, "can't be 'max'; it can be disabled, basic, extended, all"),
        ({"spinning": 1}, "must be true or false, not 1"),
        ({"config": "x"}, "must be a mapping, not 'x'"),
    ],
)
def test_wrong_option_is_named(given: Any, said: str, conv: Any, tmp_path: Path) -> None:
    assert said in str(OnnxRuntime().refuse_target(options(**given)))
    with pytest.raises(UsageError):
        OnnxRuntime().compile(conv[0], scheme("fp32"), options(**given), "job", tmp_path)


def test_options_are_obeyed_when_opened_too(conv: Any, tmp_path: Path) -> None:
    asked = options(
        graph_optimization="disabled", spinning=False, memory_arena=False, config={"session.set_denormal_as_zero": 1}
    )
    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), asked, "job", tmp_path)
    assert "BatchNormalization" in artifact.executed["ops"]
    session = sessions.open_here(Path(artifact.path) / artifact.entry, artifact.options, 1)
    entry = session.get_session_options().get_session_config_entry
    assert entry("session.set_denormal_as_zero") == "1"
    assert entry("session.intra_op.allow_spinning") == "0"
    assert not session.get_session_options().enable_cpu_mem_arena


def test_external_data_comes_along_and_nothing_else(conv: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    graph = onnx.load(conv[0].path)
    onnx.save_model(graph, home / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    (home / "notes.txt").write_text("not the model's")
    artifact = OnnxRuntime().compile(
        replace(conv[0], path=str(home / "model.onnx")), scheme("fp32"), TARGET, "job", tmp_path / "art"
    )
    assert list_tree(artifact.path) == ["model.onnx", "weights.bin"]


def test_external_data_outside_the_folder_is_refused(conv: Any, tmp_path: Path) -> None:
    """A graph must not be able to name /etc/passwd as its weights."""
    graph = onnx.load(conv[0].path)
    tensor = graph.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value="../outside.bin")
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    bad = replace(conv[0], path=str(tmp_path / "model.onnx"))
    with pytest.raises(IntegrityError, match="outside its folder"):
        OnnxRuntime().compile(bad, scheme("fp32"), TARGET, "job", tmp_path / "art")


def test_lost_output_is_an_error(conv: Any, tmp_path: Path) -> None:
    renamed = replace(conv[0].signature, outputs=(replace(conv[0].signature.outputs[0], name="logits"),))
    with pytest.raises(IntegrityError, match="outputs changed on the way"):
        OnnxRuntime().compile(replace(conv[0], signature=renamed), scheme("fp32"), TARGET, "job", tmp_path)


def test_unknown_operator_is_named(conv: Any, tmp_path: Path) -> None:
    graph = onnx.load(conv[0].path)
    graph.graph.node[0].op_type, graph.graph.node[0].domain = "Magic", "my.ops"
    onnx.save(graph, tmp_path / "model.onnx")
    reason = OnnxRuntime().refuse(replace(conv[0], path=str(tmp_path / "model.onnx")), TARGET)
    assert reason is not None
    assert "my.ops.Magic" in reason


def test_operator_without_a_kernel_is_named(conv: Any, tmp_path: Path) -> None:
    """A standard operator that the CPU has no kernel for: the runtime's own words, without its error code."""
    value = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["batch", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Erf", ["x"], ["y"])], "g", value[:1], value[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx"
    )
    with pytest.raises(NothingCompiledError, match="Erf") as caught:
        OnnxRuntime().compile(
            replace(conv[0], path=str(tmp_path / "model.onnx")), scheme("fp32"), TARGET, "job", tmp_path / "art"
        )
    assert "ONNXRuntimeError" not in str(caught.value)


def test_bfloat16_is_not_offered() -> None:
    assert OnnxRuntime().schemes(TARGET, "bf16") == ()
    assert OnnxRuntime().schemes(replace(TARGET, device="cuda"), "fp32") == ()


def test_weights_lose_a_bit_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: sums of 8-bit products overflow on such a CPU, and attention runs in integers that are slower there than
    floats."""
    plain = replace(module.hardware(), machine="x86_64", features=("avx2",))
    monkeypatch.setattr(module, "hardware", lambda: plain)
    assert all(s.options == {"reduce_range": True, "products": False} for s in OnnxRuntime().schemes(TARGET, "int8"))
    monkeypatch.setattr(module, "hardware", lambda: replace(plain, features=("avx2", "avx512_vnni")))
    assert all(s.options == {"reduce_range": False, "products": True} for s in OnnxRuntime().schemes(TARGET, "int8"))
    monkeypatch.setattr(module, "hardware", lambda: replace(plain, machine="aarch64"))
    assert all(s.activations == "int8" and not s.options for s in OnnxRuntime().schemes(TARGET, "int8"))


def test_trees_run(tmp_path: Path) -> None:
    """ai.onnx.ml is served: a boosting model in fp32."""
    sklearn = pytest.importorskip("sklearn.ensemble")
    skl2onnx = pytest.importorskip("skl2onnx")
    from compile_stage.core.tensors import Signature, TensorSpec

    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    trees = sklearn.GradientBoostingRegressor(n_estimators=5, random_state=0).fit(x, x[:, 0])
    onnx.save(skl2onnx.to_onnx(trees, x[:1]), tmp_path / "model.onnx")
    spec = TensorSpec(name="X", dtype="float32", shape=("batch", 4))
    signature = Signature(inputs=(spec,), outputs=(replace(spec, name="variable", shape=("batch", 1)),))
    model, _ = models.perceptron(tmp_path / "any")
    model = replace(model, path=str(tmp_path / "model.onnx"), signature=signature)
    backend = OnnxRuntime()
    assert backend.refuse(model, TARGET) is None
    with backend.open(backend.compile(model, scheme("fp32"), TARGET, "job", tmp_path / "art"), 1) as session:
        np.testing.assert_allclose(session.run({"X": x})["variable"][:, 0], trees.predict(x), rtol=1e-4, atol=1e-5)


def test_an_input_that_is_no_array_is_named(conv: Any, tmp_path: Path) -> None:
    """A list or a single number got as far as an AttributeError, or to the runtime's own words."""
    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    with OnnxRuntime().open(artifact, 1) as session:
        for given in ([[1.0]], np.float32(1.0)):
            with pytest.raises(UsageError, match=f"'image' must be an array, not {type(given).__name__}"):
                session.run({"image": given})  # type: ignore[dict-item]


def test_a_session_is_for_the_one_batch_size_of_the_target(conv: Any, tmp_path: Path) -> None:
    """Broken: shapes are computed in each call though the target names them, or a batch of another size is refused."""
    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    assert artifact.options[KNOWN_SIZES] == [{"batch": 1}]
    assert artifact.signature == conv[0].signature
    with OnnxRuntime().open(artifact, 1) as session:
        inner: Any = session
        assert inner._free is None
        [(_, fixed)] = inner._fixed
        assert fixed.get_inputs()[0].shape[0] == 1
        name = session.signature.inputs[0].name
        batch = np.random.default_rng(0).standard_normal((3, *fixed.get_inputs()[0].shape[1:])).astype(np.float32)
        single = [session.run({name: batch[at : at + 1]}) for at in range(3)]
        assert inner._free is None
        together = session.run({name: batch})
        assert inner._free is not None
    for output, answers in together.items():
        np.testing.assert_allclose(np.concatenate([one[output] for one in single]), answers, rtol=1e-5, atol=1e-6)


def test_a_call_passes_by_the_checks_that_were_made_already(conv: Any, tmp_path: Path) -> None:
    """Broken: a call of a small network takes 1 to 3 % longer; or ONNX Runtime without its inner session, or CUDA
    graphs, which stand for a session, answer no call."""
    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    real = sessions.open_here(Path(artifact.path) / artifact.entry, {}, 1)
    [given], [output] = real.get_inputs(), real.get_outputs()
    batch = {given.name: np.ones((2, *given.shape[1:]), np.float32)}
    called: list[Any] = []

    class Public:
        def run(self, names: list[str], feeds: dict[str, Any]) -> Any:
            called.append(names)
            return real.run(names, feeds)

    [expected] = real.run([output.name], batch)
    for session in (real, Public()):
        [answer] = sessions.bare_call(session)([output.name], batch)
        np.testing.assert_array_equal(answer, expected)
    assert called == [[output.name]]
    assert sessions.bare_call(real) != real.run


def test_a_call_keeps_to_what_stands_for_the_run_of_a_session(
    conv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a library that traces ONNX Runtime, or mends its answers, sees none of the calls."""
    import onnxruntime

    artifact = OnnxRuntime().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    session, other = (sessions.open_here(Path(artifact.path) / artifact.entry, {}, 1) for _ in range(2))
    monkeypatch.setattr(other, "run", lambda *_: ["this session's"], raising=False)
    assert sessions.bare_call(other)([], {}) == ["this session's"]
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", lambda *_: ["every session's"], raising=False)
    assert sessions.bare_call(session)([], {}) == ["every session's"]


@pytest.mark.parametrize(
    ("sizes", "given", "fixed"),
    [
        ((1,), {}, [{"batch": 1}]),
        ((1,), {"fixed_shapes": False}, []),
        ((1, 8), {}, []),
        ((1, 8), {"fixed_shapes": True}, [{"batch": 1}, {"batch": 8}]),
    ],
)
def test_several_batch_sizes_share_their_weights_unless_asked(
    sizes: tuple[int, ...], given: dict[str, Any], fixed: list[dict[str, int]], conv: Any
) -> None:
    """Broken: a target with two batch sizes holds the weights twice, which nobody asked for."""
    known = known_sizes(conv[0].signature, replace(TARGET, batch_sizes=sizes))
    assert sessions.fixed_sizes({KNOWN_SIZES: known, **given}) == fixed


def test_the_largest_batch_that_shapes_promise_counts(conv: Any) -> None:
    """Broken: a server that gets it opens a second session, whose memory nobody measured."""
    name, *rest = conv[0].signature.inputs[0].name, *conv[0].signature.inputs[0].shape[1:]
    shape = ShapeRange(min=(1, *rest), typical=(1, *rest), max=(32, *rest))
    known = known_sizes(conv[0].signature, replace(TARGET, shapes={name: shape}))
    assert known == [{"batch": 1}, {"batch": 32}]
    assert sessions.fixed_sizes({KNOWN_SIZES: known}) == []


def test_sizes_that_differ_stay_free() -> None:
    """Broken: a sequence of 17 tokens is answered by a session that was opened for 128."""
    ids = TensorSpec(name="ids", dtype="int64", shape=("batch", "tokens"))
    picture = TensorSpec(name="picture", dtype="float32", shape=("batch", 3, "height", "width"))
    signature = Signature(inputs=(ids, picture), outputs=())
    lengths = ShapeRange(min=(1, 16), typical=(1, 64), max=(8, 128))
    fixed = ShapeRange(min=(1, 3, 32, 32), typical=(1, 3, 32, 32), max=(8, 3, 32, 64))
    target = replace(TARGET, batch_sizes=(1, 8), shapes={"ids": lengths, "picture": fixed})
    known = known_sizes(signature, target)
    assert known == [{"batch": 1, "height": 32}, {"batch": 8, "height": 32}]
    assert sessions.fixed_sizes({KNOWN_SIZES: known}) == [{"height": 32}]


def test_an_error_of_cuda_is_one_sentence() -> None:
    """Broken: a report would show two C++ signatures before it comes to what CUDA said."""
    call = (
        "std::conditional_t<THRW, void, onnxruntime::common::Status> onnxruntime::CudaCall(ERRTYPE, const char*, int) "
        "[with ERRTYPE = cudaError; bool THRW = true; std::conditional_t<THRW, void, common::Status> = void] "
    )
    source = "/onnxruntime_src/onnxruntime/core/providers/cuda"
    error = RuntimeError(
        f"{source}/cuda_call.cc:136 {call}{source}/cuda_call.cc:146 {call}CUDA failure 304: OS call failed or "
        f"operation not supported on this OS ; GPU=-1 ; hostname=vm ; file={source}/cuda_execution_provider.cc ; "
        "line=355 ; expr=cudaSetDevice(info_.device_id); "
    )
    assert sessions.sentence(error) == (
        "CUDA failure 304: OS call failed or operation not supported on this OS in cudaSetDevice(info_.device_id);"
    )
