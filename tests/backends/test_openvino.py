"""OpenVINO beyond the conformance kit: what only this backend does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile_stage.backends import openvino as module
from compile_stage.backends import openvino_layers, openvino_profile, openvino_session
from compile_stage.backends.openvino import OpenVino
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.profiling import ProfileRequest
from compile_stage.precision.int8 import StaticInt8
from compile_stage.testing import models
from compile_stage.testing.node_cases import Found, collect, judge

pytest.importorskip("openvino")

TARGET = Target(name="cpu", threads=1)


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


def scheme(precision: str, name: str = "") -> Scheme:
    found: tuple[Scheme, ...] = OpenVino().schemes(TARGET, precision)
    return next(s for s in found if not name or s.name == name)


def options(**given: Any) -> Target:
    return replace(TARGET, options={"openvino": given})


needs_bf16 = pytest.mark.skipif(not hardware().multiplies_bf16, reason="this CPU has no bfloat16 instructions")


def test_float32_is_asked_for_and_read_back(conv: Any, tmp_path: Path) -> None:
    """The plug-in's own default is bfloat16 on a CPU that has it."""
    artifact = OpenVino().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"f32": 3}
    assert artifact.options["hint"] == "f32"


def error_of_16_bits(precision: str, runs_in: str, conv: Any, folder: Path) -> float:
    """The largest difference to float32 of a model that is asked for in `precision` and says that it `runs_in` that."""
    artifact = OpenVino().compile(conv[0], scheme(precision), TARGET, "job", folder / precision)
    assert artifact.executed["precision"]["matrix_and_convolution"] == {runs_in: 3}
    exact = OpenVino().compile(conv[0], scheme("fp32"), TARGET, "job", folder / "fp32")
    batch = {"image": np.load(Path(conv[1].path) / "inputs" / "image.npy")[:2]}
    with OpenVino().open(artifact, 1) as low, OpenVino().open(exact, 1) as high:
        return float(np.max(np.abs(low.run(batch)["scores"] - high.run(batch)["scores"])))


@needs_bf16
def test_bfloat16_runs_and_survives_reopening(conv: Any, tmp_path: Path) -> None:
    error = error_of_16_bits("bf16", "bf16", conv, tmp_path)
    assert 1e-5 < error < 0.05, "bfloat16 rounds: no error would mean that it ran in float32"


needs_fp16 = pytest.mark.skipif(
    not hardware().multiplies_fp16, reason="this CPU has no matrix instructions for float16"
)


@needs_fp16
def test_float16_runs_and_survives_reopening(conv: Any, tmp_path: Path) -> None:
    """Broken: a CPU with AMX-FP16 would not be offered its float16, or what runs would be bfloat16, 8 times coarser."""
    error = error_of_16_bits("fp16", "f16", conv, tmp_path)
    assert 1e-6 < error < 0.01, "float16 rounds: no error would mean that it ran in float32"


@needs_bf16
@pytest.mark.skipif("avx512_fp16" in hardware().features, reason="this CPU has float16, so an f16 hint is taken")
def test_precision_that_was_not_taken_is_an_error(conv: Any, tmp_path: Path) -> None:
    """Without AVX512-FP16 an f16 hint would be run as bf16 by this plug-in, without a word."""
    artifact = OpenVino().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    asked = replace(artifact, options={**artifact.options, "hint": "f16"})
    with (
        pytest.raises(NothingCompiledError, match="says that this machine has no arithmetic in f16"),
        OpenVino().open(asked, 1),
    ):
        pass


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_floats_are_not_offered_without_the_instructions(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    plain = replace(module.hardware(), features=("avx2",))
    monkeypatch.setattr(module, "hardware", lambda: plain)
    assert OpenVino().schemes(TARGET, precision) == ()


def test_int8_graph_runs_in_integers(conv: Any, tmp_path: Path) -> None:
    wanted = scheme("int8", "int8-u8")
    lowered = StaticInt8().lower(conv[0], wanted, conv[1], (), tmp_path / "low")
    artifact = OpenVino().compile(lowered, wanted, TARGET, "job", tmp_path / "art")
    assert set(artifact.executed["precision"]["matrix_and_convolution"]) <= {"u8", "i8"}


def test_int8_graph_that_runs_in_float_is_an_error(conv: Any, tmp_path: Path) -> None:
    with pytest.raises(NothingCompiledError, match="runs none of the matrix and convolution layers in it: 3 in f32"):
        OpenVino().compile(conv[0], scheme("int8", "int8-sym"), TARGET, "job", tmp_path)


def test_fp32_graph_that_runs_lower_is_an_error() -> None:
    with pytest.raises(NothingCompiledError, match="in another precision: 2 in bf16"):
        openvino_layers.check_precision(
            Scheme(precision="fp32", name="fp32"), Counter({"f32": 1, "bf16": 2}), quantised=True
        )
    with pytest.raises(NothingCompiledError, match="in another precision: 2 in u8"):
        openvino_layers.check_precision(
            Scheme(precision="fp32", name="fp32"), Counter({"f32": 1, "u8": 2}), quantised=False
        )


def test_quantised_source_is_noted_not_failed(conv: Any, tmp_path: Path) -> None:
    """Broken: a source that is quantised already fails as fp32, which asks for no lowering."""
    lowered = StaticInt8().lower(conv[0], scheme("int8", "int8-u8"), conv[1], (), tmp_path / "low")
    artifact = OpenVino().compile(lowered, scheme("fp32", "fp32"), TARGET, "job", tmp_path / "art")
    assert artifact.notes == (
        "the source's own graph is quantised: 3 matrix and convolution layers do not run in float",
    )


def test_partly_quantised_graph_is_noted() -> None:
    (note,) = openvino_layers.check_precision(
        Scheme(precision="int8", name="int8"), Counter({"u8": 4, "i8": 1, "f32": 2}), quantised=True
    )
    assert note == "5 matrix and convolution layers run in int8, 2 in f32"


def test_native_int8_needs_samples(conv: Any, tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    native = scheme("int8", "int8-nncf")
    with pytest.raises(UsageError, match=r"set data\.calibration"):
        OpenVino().compile(conv[0], native, TARGET, "job", tmp_path)


@pytest.mark.skipif(hardware().sums_saturate, reason="OpenVINO's LSTM in 8 bits needs VNNI")
@pytest.mark.parametrize("starts_from", ["zeros", "nothing"])
def test_native_int8_takes_an_lstm_in_8_bits(starts_from: str, tmp_path: Path) -> None:
    """Broken: OpenVINO puts an LSTM's gates in order by nodes, NNCF sees no constant there, and `int8` runs the LSTM in
    float32, twice as slow."""
    pytest.importorskip("nncf")
    graph = models.Graph(4)
    steps = graph.add("Transpose", "x", perm=[1, 0, 2])
    rows = graph.add("Shape", steps, start=1, end=2)
    shape = graph.add("Concat", graph.constant(np.array([1])), rows, graph.constant(np.array([8])), axis=0)
    zeros = graph.add("Expand", graph.constant(np.zeros(1, np.float32)), shape)
    states = {"zeros": ("", zeros, zeros), "nothing": ()}
    weights = (graph.weight(1, 32, 4), graph.weight(1, 32, 8), graph.weight(1, 64))
    hidden = graph.add("LSTM", steps, *weights, *states[starts_from], hidden_size=8)
    last = graph.add("Squeeze", graph.add("Gather", hidden, graph.constant(np.array(2))), graph.constant(np.array([0])))
    graph.add("MatMul", last, graph.weight(8, 8), name="y")
    given = np.random.default_rng(0).standard_normal((64, 3, 4)).astype(np.float32)
    model, samples = models.write(graph, tmp_path, {"x": given}, {"y": ("float32", ("batch", 8))})
    artifact = OpenVino().compile(model, scheme("int8", "int8-nncf"), TARGET, "job", tmp_path / "art", samples)
    runs_in = artifact.executed["precision"]["matrix_and_convolution"]
    assert sum(runs_in.values()) == 2, "the LSTM and the product behind it"
    assert set(runs_in) <= {"u8", "i8"}


def test_native_int8_is_not_offered_without_nncf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert [s.name for s in OpenVino().schemes(TARGET, "int8")] == ["int8-sym", "int8-u8"]


def test_our_schemes_come_first_and_weights_lose_a_bit_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a tie would go to the less accurate graph, or sums of products would saturate on an older CPU."""
    pytest.importorskip("nncf")
    plain = replace(module.hardware(), machine="x86_64", features=("avx2",))
    monkeypatch.setattr(module, "hardware", lambda: plain)
    found = OpenVino().schemes(TARGET, "int8")
    assert [s.name for s in found] == ["int8-sym", "int8-u8", "int8-nncf"]
    assert all(s.options["reduce_range"] and not s.options["products"] for s in found[:2])
    monkeypatch.setattr(module, "hardware", lambda: replace(plain, features=("avx2", "avx512_vnni")))
    assert not any(s.options.get("reduce_range") for s in OpenVino().schemes(TARGET, "int8"))


def test_names_say_the_place_in_the_graph_and_in_the_bodies_of_its_conditions() -> None:
    """Broken: OpenVINO's own numbers count on over all graphs of a process, so `verify` could not make a file again
    that was compiled behind another; or a name of the model's own would be lost, by which layers are found."""

    def build() -> Any:
        given = ops.parameter([2, 3], np.float32, name="given")
        inside = [ops.parameter([2, 3], np.float32) for _ in range(2)]
        bodies = [
            openvino.Model([ops.result(ops.add(one, ops.constant(np.float32(number))))], [one])
            for number, one in enumerate(inside)
        ]
        positive = ops.greater(ops.reduce_max(given, [0, 1]), ops.constant(np.float32(0)))
        chosen = ops.if_op(positive.output(0))
        chosen.set_then_body(bodies[0])
        chosen.set_else_body(bodies[1])
        chosen.set_input(given.output(0), inside[0], inside[1])
        answer = chosen.set_output(bodies[0].get_results()[0], bodies[1].get_results()[0])
        kept = ops.relu(answer)
        kept.set_friendly_name("Constant_0")  # as OpenVINO names others
        graph = openvino.Model([ops.result(kept)], [given])
        module.name_by_place(graph)
        return graph

    import openvino
    from openvino import opset13 as ops

    def names(graph: Any) -> list[str]:
        operations = graph.get_ordered_ops()
        within = [name for one in operations for body in module._bodies(one) for name in names(body)]
        return [operation.get_friendly_name() for operation in operations] + within

    first, second = names(build()), names(build())
    assert first == second
    assert {"given", "Constant_0", "Constant_1", "Constant_2", "If_0"} <= set(first)
    assert first.count("Constant_0") == 3, "the name that was given, and one in each body"


def test_attention_is_seen_through_what_exporters_put_between() -> None:
    """PyTorch's exporter guards attention against rows of NaN between Softmax and MatMul; unseen, NNCF fails on such a
    graph."""
    import openvino
    from openvino import opset13 as ops

    scores = ops.parameter([4, 4], np.float32)
    weights = ops.softmax(scores, axis=1)
    guarded = ops.select(ops.is_nan(weights), ops.constant(np.float32(0)), weights)
    product = ops.matmul(guarded, ops.constant(np.ones((4, 4), np.float32)), False, False)
    assert module._has_attention(openvino.Model([product], [scores]))


def test_a_classifiers_softmax_is_no_attention(tmp_path: Path) -> None:
    """NNCF's transformer rules are for attention; a network that only ends in a Softmax is none."""
    import openvino

    read = openvino.Core().read_model
    assert not module._has_attention(read(models.perceptron(tmp_path / "a")[0].path))
    assert module._has_attention(read(models.transformer(tmp_path / "b")[0].path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_stream": 1}, "no option 'num_stream'; it has performance_hint, num_streams"),
        ({"performance_hint": "fast"}, "can't be 'fast'; it can be latency, throughput"),
        ({"num_streams": 0}, "must be a whole number of at least 1, not 0"),
        ({"num_streams": True}, "must be a whole number of at least 1, not True"),
        ({"cpu_pinning": "no"}, "must be true or false, not 'no'"),
    ],
)
def test_wrong_option_is_named(given: Any, said: str, conv: Any, tmp_path: Path) -> None:
    assert said in str(OpenVino().refuse_target(options(**given)))
    with pytest.raises(UsageError):
        OpenVino().compile(conv[0], scheme("fp32"), options(**given), "job", tmp_path)


def test_options_and_threads_are_obeyed_when_opened_too(conv: Any, tmp_path: Path) -> None:
    import openvino

    asked = options(performance_hint="throughput", num_streams=1, cpu_pinning=False)
    artifact = OpenVino().compile(conv[0], scheme("fp32"), asked, "job", tmp_path)
    path = Path(artifact.path) / artifact.entry
    compiled = openvino_session._compile(openvino.Core(), path, artifact.options, 2, None, streams=1)
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 2
    assert "THROUGHPUT" in str(compiled.get_property("PERFORMANCE_HINT"))
    assert compiled.get_property("NUM_STREAMS") == 1
    assert compiled.get_property("ENABLE_CPU_PINNING") is False


def test_a_shared_batch_answers_as_a_whole_one(tmp_path: Path) -> None:
    """Broken: rows come back in another order, or a batch that can't be shared out evenly loses some."""
    model, samples = models.conv_net(tmp_path / "model")
    target = replace(TARGET, threads=2, batch_sizes=(1, 3, 4), options={"openvino": {"requests": 2}})
    shared = OpenVino().compile(model, scheme("fp32"), target, "job", tmp_path / "shared")
    plain = OpenVino().compile(model, scheme("fp32"), replace(target, options={}), "job", tmp_path / "plain")
    images = np.load(Path(samples.path) / "inputs" / "image.npy")
    with OpenVino().open(shared, 2) as session, OpenVino().open(plain, 2) as whole, OpenVino().open(shared, 1) as one:
        for rows in (1, 2, 3, 4, 5):  # 2 and 5 are no batch size of the target
            batch = {"image": images[:rows]}
            expected = whole.run(batch)["scores"]
            for own in (session, one):
                np.testing.assert_allclose(own.run(batch)["scores"], expected, rtol=1e-4, atol=1e-5)
        first = session.run({"image": images[:4]})["scores"]
        kept = first.copy()
        session.run({"image": images[4:8]})
        np.testing.assert_array_equal(first, kept)  # what was handed out is the caller's


@pytest.mark.parametrize("requests", [1, 2])
def test_a_call_runs_in_the_thread_that_makes_it(requests: int, tmp_path: Path) -> None:
    """Broken: another thread is woken for it, which takes 35 to 70 us of a call of 60 to 220 us after a pause."""
    model, samples = models.conv_net(tmp_path / "model")
    images = np.load(Path(samples.path) / "inputs" / "image.npy")
    target = replace(TARGET, threads=2, batch_sizes=(4,), options={"openvino": {"requests": requests}})
    artifact = OpenVino().compile(model, scheme("fp32"), target, "job", tmp_path / "artifact")
    called: list[str] = []

    class Watched:
        def __init__(self, request: Any) -> None:
            self._request = request

        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(self._request, name)

    with OpenVino().open(artifact, 2) as session:
        session._requests = {key: tuple(map(Watched, held)) for key, held in session._requests.items()}
        session.run({"image": images[:4]})
    assert called.count("infer") == 1
    assert called.count("start_async") == called.count("wait") == requests - 1


@pytest.mark.parametrize("requests", [1, 2])
def test_a_profile_holds_the_calls_after_the_warm_up_and_no_other(requests: int, tmp_path: Path) -> None:
    """Broken: OpenVINO counts the mean of all calls since it compiled the model. Taken for the time of the last one,
    the first call, a hundred times as long, puts the wrong layer at the top, and layers take longer than the calls."""
    model, samples = models.conv_net(tmp_path / "model")
    given = {"openvino": {"requests": requests}} if requests > 1 else {}
    target = replace(TARGET, threads=2, batch_sizes=(4,), options=given)
    artifact = OpenVino().compile(model, scheme("fp32"), target, "job", tmp_path / "artifact")
    images = np.load(Path(samples.path) / "inputs" / "image.npy")
    asked = ProfileRequest(threads=2, device="cpu", batches=[{"image": images[:4]}], batch_size=4, into=tmp_path)
    profile = openvino_profile.profile_artifact(OpenVino(), artifact, asked)
    assert {operator.calls for operator in profile.operators} == {profile.calls}
    assert profile.kernels_s <= profile.calls * profile.call_s
    assert any("share" in note for note in profile.notes) == (requests > 1)


def test_the_time_of_some_calls_is_read_from_means_over_all() -> None:
    """Broken: what came before the profiled calls is in their time."""
    before = openvino_profile.Means(3, {("a", "Convolution", "jit"): 1000e-6, ("b", "Reorder", "ref"): 4e-6})
    after = openvino_profile.Means(13, {("a", "Convolution", "jit"): 250e-6, ("c", "Softmax", "ref"): 2e-6})
    assert openvino_profile.seconds_a_call(before, after) == pytest.approx(
        {("a", "Convolution", "jit"): 25e-6, ("b", "Reorder", "ref"): 0.0, ("c", "Softmax", "ref"): 2.6e-6}
    )


def test_a_batch_is_shared_where_it_has_rows(conv: Any, tmp_path: Path) -> None:
    """Broken: an input that is the same for all rows is cut in two; or more requests run than there are threads."""
    target = replace(options(requests=2), threads=2)
    fixed = replace(conv[0].signature.outputs[0], shape=(1, 4))
    model = replace(conv[0], signature=replace(conv[0].signature, outputs=(fixed,)))
    with pytest.raises(UsageError, match="needs a free batch size"):
        OpenVino().compile(model, scheme("fp32"), target, "job", tmp_path / "a")
    with pytest.raises(UsageError, match="more than the target's threads: 1"):
        OpenVino().compile(conv[0], scheme("fp32"), options(requests=2), "job", tmp_path / "b")


def test_trees_are_refused_with_the_operator(conv: Any, tmp_path: Path) -> None:
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=[0], nodes_nodeids=[0], nodes_featureids=[0], nodes_modes=["LEAF"], nodes_values=[0.0],
        nodes_truenodeids=[0], nodes_falsenodeids=[0], target_treeids=[0], target_nodeids=[0], target_ids=[0],
        target_weights=[1.0],
    )  # fmt: skip
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", n]) for name, n in (("x", 2), ("y", 1))]
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(
        helper.make_model(helper.make_graph([node], "g", value[:1], value[1:]), opset_imports=sets),
        tmp_path / "model.onnx",
    )
    reason = OpenVino().refuse(replace(conv[0], path=str(tmp_path / "model.onnx")), TARGET)
    assert reason is not None
    assert "TreeEnsembleRegressor" in reason
    assert "\n" not in reason
    assert ".cpp" not in reason


def test_float16_is_not_offered_on_a_cpu() -> None:
    """The plug-in would run it as bfloat16."""
    assert OpenVino().schemes(TARGET, "fp16") == ()
    assert OpenVino().schemes(replace(TARGET, device="gpu"), "fp32") == ()


def test_lost_output_is_an_error(conv: Any, tmp_path: Path) -> None:
    renamed = replace(conv[0].signature, outputs=(replace(conv[0].signature.outputs[0], name="logits"),))
    with pytest.raises(IntegrityError, match="outputs changed on the way"):
        OpenVino().compile(replace(conv[0], signature=renamed), scheme("fp32"), TARGET, "job", tmp_path)


def test_read_only_and_strided_inputs_are_taken(conv: Any, tmp_path: Path) -> None:
    """Samples come memory-mapped: read-only, and sometimes as a slice."""
    images = np.load(Path(conv[1].path) / "inputs" / "image.npy", mmap_mode="r")
    artifact = OpenVino().compile(conv[0], scheme("fp32"), TARGET, "job", tmp_path)
    with OpenVino().open(artifact, 1) as session:
        whole = session.run({"image": images})["scores"]
        np.testing.assert_allclose(session.run({"image": images[::2]})["scores"], whole[::2], atol=1e-5)
        wide = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(session.run({"image": wide})["scores"], whole, atol=1e-5)


def test_a_read_only_number_stays_one(tmp_path: Path) -> None:
    """Broken: an input without axes that nobody may write to arrives as a list of one."""
    from compile_stage.core.tensors import Signature, TensorSpec

    shapes: dict[str, list[Any]] = {"x": ["batch", 2], "factor": [], "y": ["batch", 2]}
    x, factor, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["y"])], "g", [x, factor], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    specs = [TensorSpec(name=name, dtype="float32", shape=tuple(shape)) for name, shape in shapes.items()]
    signature = Signature(inputs=tuple(specs[:2]), outputs=(specs[2],))
    options = {"config": {}, "hint": "f32", "shapes": [{"x": (3, 2), "factor": ()}]}
    given = {"x": np.ones((3, 2), np.float32), "factor": np.array(2.0, np.float32)}
    for array in given.values():
        array.flags.writeable = False
    with openvino_session.open_model(tmp_path / "model.onnx", options, 1, signature) as session:
        np.testing.assert_array_equal(session.run(given)["y"], 2 * given["x"])


def test_operators_that_it_lacks_are_named_and_nothing_else() -> None:
    """Broken: a plan would show a paragraph about the runtime's front end for each tree model."""
    from compile_stage.backends.openvino import _why_unread

    said = (
        "FrontEnd API failed with OpConversionFailure:\nModel wasn't fully converted.\nSummary:\n"
        "-- No conversion rule found for operations: ai.onnx.ml.LinearClassifier, ai.onnx.ml.Scaler\n"
    )
    found = _why_unread(RuntimeError(said))
    assert found == "OpenVINO does not know the operators ai.onnx.ml.LinearClassifier, ai.onnx.ml.Scaler"


def test_a_mask_of_truth_values_does_not_make_a_layer_integer(tmp_path: Path) -> None:
    """The plug-in names a fused attention after its first input, the mask; it was taken for a layer in uint8, and the
    model failed as none of fp32."""
    (case,) = (c for c in collect(("attention",)) if c.name == "test_attention_4d_attn_mask_bool_expanded")
    finding = judge(OpenVino(), case, tmp_path)
    assert finding.found is Found.RIGHT, finding


def test_types_that_numpy_lacks_are_refused(tmp_path: Path) -> None:
    """OpenVINO hands out bfloat16 as float16 of the same bits, so every value is another."""
    (case,) = (c for c in collect(("compress",)) if c.name == "test_compress_bfloat16")
    finding = judge(OpenVino(), case, tmp_path)
    assert finding.found is Found.REFUSED, finding
    assert "'input' is bfloat16" in finding.reason


def answers(graph: models.Graph, given: np.ndarray, folder: Path, sizes: tuple[Any, ...]) -> tuple[Any, Any]:
    """What OpenVINO and ONNX Runtime answer as `answer`, of these sizes, of a graph that reads `given`."""
    model, _ = models.write(graph, folder, {"given": given}, {"answer": ("float32", ("batch", *sizes))})
    artifact = OpenVino().compile(model, scheme("fp32"), TARGET, "job", folder / "artifact")
    expected = onnxruntime.InferenceSession(model.path).run(None, {"given": given})[0]
    with OpenVino().open(artifact, 1) as session:
        return session.run({"given": given})["answer"], expected


@pytest.mark.parametrize(
    "attributes",
    [
        {"op": "MaxPool", "kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"op": "MaxPool", "kernel_shape": [2, 2], "strides": [3, 3], "dilations": [2, 1]},
        {"op": "AveragePool", "kernel_shape": [3, 2], "strides": [3, 2], "pads": [1, 0, 1, 0], "count_include_pad": 1},
        {"op": "AveragePool", "kernel_shape": [3, 3], "strides": [2, 3], "pads": [0, 1, 1, 1], "count_include_pad": 1},
        {"op": "AveragePool", "kernel_shape": [3, 3], "strides": [3, 2], "pads": [1, 1, 1, 1]},
    ],
)
def test_pools_that_round_their_size_up_have_no_window_behind_the_end(attributes: Any, tmp_path: Path) -> None:
    """Broken: OpenVINO gives a maximum another shape than the model has, and an average counts what lies behind the
    end, so that the model of a network with `ceil_mode` is refused."""
    graph = models.Graph()
    given = graph.random.standard_normal((4, 3, 9, 12)).astype(np.float32)
    pool = {**attributes, "ceil_mode": 1}
    graph.add(pool.pop("op"), "given", name="answer", **pool)
    found, expected = answers(graph, given, tmp_path, (3, "height", "width"))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("form", ["onesided", "twosided", "inverse", "stft"])
def test_spectra_are_those_of_onnx(form: str, axis: int, tmp_path: Path) -> None:
    """Broken: OpenVINO gives the spectrum of a recording an axis too many, transforms another axis than a negative one
    names, and reads no STFT of a free batch: every model that makes its own spectrogram is refused."""
    graph = models.Graph()
    given = graph.random.standard_normal((4, 16)).astype(np.float32)
    signal = graph.add("Unsqueeze", "given", graph.constant(np.array([2], np.int64)))
    if form == "stft":
        window = graph.constant(np.hanning(8).astype(np.float32))
        graph.add("STFT", signal, graph.constant(np.int64(4)), window, name="answer")
    elif form == "inverse":
        half = graph.add("DFT", signal, axis=1, onesided=1)
        graph.add("DFT", half, graph.constant(np.int64(16)), name="answer", axis=axis, inverse=1)
    else:
        graph.add("DFT", signal, name="answer", axis=axis, onesided=int(form == "onesided"))
    found, expected = answers(graph, given, tmp_path, ("a", "b", "c")[: 3 if form == "stft" else 2])
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_input_before_a_dropout_keeps_its_name(tmp_path: Path) -> None:
    """Broken: OpenVINO calls what goes into a Dropout like what comes out, so that a network that begins with one was
    refused, as one whose inputs had changed."""
    graph = models.Graph()
    given = graph.random.standard_normal((4, 8)).astype(np.float32)
    graph.add("MatMul", graph.add("Dropout", "given"), graph.weight(8, 3), name="answer")
    found, expected = answers(graph, given, tmp_path, (3,))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def written(
    nodes: Any, given: tuple[int, ...], answer: tuple[Any, ...], opset: int, folder: Path, weights: Any = None
) -> PortableModel:
    """A graph from `given` [batch, ...] to `answer`, of an operator set other than the kit's."""
    signature = Signature(
        inputs=(TensorSpec(name="given", dtype="float32", shape=("batch", *given)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=answer),),
    )
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, spec.shape) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    held = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, held)
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return PortableModel(
        path=str(path), digest="sha256:m", form="onnx", opset=opset, precision="fp32", signature=signature
    )


@pytest.mark.parametrize("name", ["ReduceL1", "ReduceLogSum", "ReduceLogSumExp"])
@pytest.mark.parametrize(("axes", "keep"), [((1,), 0), ((-1, 1), 1), ((), 1)])
def test_a_reduction_is_over_its_own_axes(name: str, axes: tuple[int, ...], keep: int, tmp_path: Path) -> None:
    """Broken: of operator sets 13 to 17, OpenVINO reduces over all axes, so that the model of a network with a
    `logsumexp` is refused, as one whose outputs have another shape."""
    given = np.random.default_rng(5).random((3, 4, 5), dtype=np.float32) * 200
    if name == "ReduceLogSumExp":
        given[0] = -np.inf
    node = helper.make_node(name, ["given"], ["answer"], keepdims=keep, **({"axes": list(axes)} if axes else {}))
    model = written([node], (4, 5), ("a", "b", "c")[: 3 if keep else 2], 17, tmp_path / "model")
    artifact = OpenVino().compile(model, scheme("fp32"), TARGET, "job", tmp_path / "artifact")
    with OpenVino().open(artifact, 1) as session:
        found = session.run({"given": given})["answer"]
    expected = onnxruntime.InferenceSession(model.path).run(None, {"given": given})[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_source_with_quantised_weights_alone_is_noted_too(tmp_path: Path) -> None:
    """Broken: a source whose weights are kept in 8 bits, by blocks, fails as fp32, which asks for no lowering."""
    weight = np.random.default_rng(6).integers(-127, 127, (64, 32)).astype(np.int8)
    weights = {"weight": weight, "scale": np.full((4, 32), 0.01, np.float32)}
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["wide"], axis=0, block_size=16),
        helper.make_node("MatMul", ["given", "wide"], ["answer"]),
    ]
    model = written(nodes, (64,), ("batch", 32), 21, tmp_path / "model", weights)
    artifact = OpenVino().compile(model, scheme("fp32"), TARGET, "job", tmp_path / "artifact")
    assert artifact.notes == (
        "the source's own graph is quantised: 1 matrix and convolution layers do not run in float",
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_of_equal_values_the_first_comes_first_in_every_batch(rows: int, tmp_path: Path) -> None:
    """Broken: OpenVINO keeps ONNX's order of equal values in batches of the target's sizes, which are proven, and gives
    places of its own choice in any other."""
    nodes = [
        helper.make_node("TopK", ["given", "count"], ["values", "places"], axis=1),
        helper.make_node("Cast", ["places"], ["answer"], to=TensorProto.FLOAT),
    ]
    model = written(nodes, (20,), ("batch", 5), 18, tmp_path / "model", {"count": np.array([5])})
    artifact = OpenVino().compile(model, scheme("fp32"), TARGET, "job", tmp_path / "artifact")
    given = np.random.default_rng(7).integers(0, 4, (rows, 20)).astype(np.float32)
    with OpenVino().open(artifact, 1) as session:
        found = session.run({"given": given})["answer"]
    np.testing.assert_array_equal(found, np.argsort(-given, axis=1, kind="stable")[:, :5])


@pytest.mark.parametrize("side", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("attributes", [{"group": 1}, {"group": 2, "output_padding": [1, 0]}])
def test_a_transposed_convolution_has_the_size_that_onnx_gives_it(side: str, attributes: Any, tmp_path: Path) -> None:
    """Broken: OpenVINO pads nothing, so that every network with such an upsampling is refused, as one whose outputs
    have another shape."""
    graph = models.Graph()
    given = graph.random.standard_normal((3, 4, 5, 6)).astype(np.float32)
    graph.add(
        "ConvTranspose", "given", graph.weight(4, 2, 4, 3), name="answer", auto_pad=side, strides=[2, 2], **attributes
    )
    found, expected = answers(graph, given, tmp_path, ("channels", "height", "width"))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
