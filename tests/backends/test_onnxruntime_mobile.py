"""ONNX Runtime's `.ort` files, and what is written for phones: real files, and real estimates by the runtime's own
lists."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from compile_stage.backends import onnxruntime_mobile as mobile
from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core import plugins
from compile_stage.core.digest import list_tree
from compile_stage.core.errors import IntegrityError, NothingCompiledError
from compile_stage.core.records import Artifact, ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.known_sizes import asked_sizes
from compile_stage.testing import Case, check_case, models


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.transformer(tmp_path_factory.mktemp("transformer"))


def asking(device: str = "android", sizes: tuple[int, ...] = (1,), **given: Any) -> Target:
    return Target(name="phone", device=device, batch_sizes=sizes, options={"onnxruntime": given})


def compile_for(model: Any, target: Target, into: Path, precision: str = "fp32") -> Artifact:
    assert OnnxRuntime().refuse_target(target) is None
    return OnnxRuntime().compile(model, OnnxRuntime().schemes(target, precision)[0], target, "job", into)


# ----------------------------------------------------------------------------------------------------------- on the CPU


CASES = [
    (models.conv_net, "fp32"),
    (models.conv_net, "int8"),
    (models.perceptron, "int8-dynamic"),
    (models.transformer, "int4"),
]


@pytest.mark.parametrize(
    ("make", "precision"), CASES, ids=[f"{make.__name__}-{precision}" for make, precision in CASES]
)
def test_an_ort_file_conforms_on_the_cpu(make: Any, precision: str, tmp_path: Path) -> None:
    """Broken: `.ort` files would be lost, renamed, wrong, or unservable in a fresh process, as every other artifact is
    checked for."""
    model, samples = make(tmp_path / "model")
    target = asking("cpu", (1, 3), format="ort")
    scheme = OnnxRuntime().schemes(target, precision)[0]
    findings = check_case(Case(OnnxRuntime(), model, samples, scheme, tmp_path / "case", target))
    assert [f"{found.check}: {found.reason}" for found in findings if not found.passed] == []
    assert (tmp_path / "case" / "artifact" / "model.ort").is_file()


def test_an_ort_file_holds_what_the_runtime_optimised(conv: Any, tmp_path: Path) -> None:
    """Broken: a file would be published whose graph was never optimised, or is not the one that was looked at."""
    artifact = compile_for(conv[0], asking("cpu", format="ort"), tmp_path)
    assert list_tree(artifact.path) == ["model.ort", "required_operators.config"]
    assert "BatchNormalization" not in artifact.executed["ops"]
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 0, "float": 3}
    assert mobile.counted(mobile.operators(tmp_path / "model.ort")) == artifact.executed["ops"]
    listed = (tmp_path / "required_operators.config").read_text()
    assert "Gemm" in listed
    assert str(tmp_path) not in listed


def test_a_file_that_is_not_the_optimised_graph_is_an_error(
    conv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: what is said of the artifact would be said of another graph."""
    real = mobile.operators
    monkeypatch.setattr(mobile, "operators", lambda path: type(real(path))(list(real(path))[1:]))
    with pytest.raises(IntegrityError, match=r"the \.ort file holds .*, and the runtime optimised the graph to"):
        compile_for(conv[0], asking("cpu", format="ort"), tmp_path)


def test_rungs_of_an_ort_file_leave_out_mapped_weights(conv: Any) -> None:
    """Broken: the ladder would offer a setting that the backend refuses."""
    target = asking("cpu", format="ort")
    scheme = OnnxRuntime().schemes(target, "fp32")[0]
    offered = [rung.name for rung in OnnxRuntime().tuning_options(target, scheme)]
    assert "no-arena" in offered
    assert "mapped-weights" not in offered
    assert OnnxRuntime().tuning_options(asking(), scheme) == ()


@pytest.mark.parametrize(
    ("device", "given", "said"),
    [
        ("cpu", {"format": "tflite"}, "format can't be 'tflite'; it can be onnx, ort"),
        ("cpu", {"format": "ort", "mapped_weights": True}, "can't be mapped from a file of their own"),
        ("cpu", {"format": "ort", "provider": "openvino"}, "written for the providers cpu, xnnpack, coreml, nnapi"),
        ("cpu", {"format": "ort", "provider": "xnnpack"},
         "can't say which nodes of an .ort file XnnpackExecutionProvider took"),
        ("android", {"provider": "qnn", "format": "ort"}, "not for QNNExecutionProvider: set format: onnx"),
        ("android", {"provider": "qnn"}, "onnxruntime-qnn"),
        ("android", {"provider": "coreml"}, "runs on the device apple, not on 'android'"),
        ("android", {"provider": "xnnpack", "min_nodes_share": 0.5},
         "ships no list of what XnnpackExecutionProvider takes"),
    ],
)  # fmt: skip
def test_a_combination_that_can_not_be_is_refused(device: str, given: Any, said: str) -> None:
    """Broken: it would fail in the compiler, or be obeyed in part."""
    assert said in str(OnnxRuntime().refuse_target(asking(device, **given)))


def test_float16_is_not_written_as_ort() -> None:
    """Broken: the file would be called fp16 and hold float32, to which the runtime casts the graph as it writes it."""
    for target in (asking("cpu", format="ort"), asking(), asking("apple", provider="coreml", format="ort")):
        assert OnnxRuntime().schemes(target, "fp16") == ()
        assert "casts the graph to float32" in str(OnnxRuntime().capabilities_for(target).why_lacking("fp16"))
    assert OnnxRuntime().schemes(asking("apple", provider="coreml"), "fp16")


# ---------------------------------------------------------------------------------------------------------- for a phone


@pytest.mark.parametrize("provider", ["cpu", "nnapi", "xnnpack"])
def test_a_phone_gets_a_file_that_is_not_run_here(provider: str, conv: Any, tmp_path: Path) -> None:
    """Broken: the candidate would be validated on this machine's CPU and published as proven for a phone."""
    target = asking(provider=provider)
    assert OnnxRuntime().capabilities_for(target).cross_compiles
    artifact = compile_for(conv[0], target, tmp_path)
    assert "on Android, and this is" in artifact.not_runnable_here
    assert list_tree(artifact.path) == ["model.ort", "required_operators.config"]
    assert all(name.endswith(", not run") for name in artifact.executed["providers"])
    assert not any("nchwc" in op for op in artifact.executed["ops"]), "a layout of this machine's"
    with pytest.raises(NothingCompiledError, match="can't be run here"), OnnxRuntime().open(artifact, 1):
        pass


def test_what_is_merged_and_what_is_left_to_the_device(conv: Any, tmp_path: Path) -> None:
    """Broken: NNAPI would be shown merged operators that it does not know, or the CPU would get none; and a minimal
    build made from the list would lack an operator that the device's replay brings."""
    on_cpu = compile_for(conv[0], asking(), tmp_path / "cpu")
    nnapi = compile_for(conv[0], asking(provider="nnapi"), tmp_path / "nnapi")
    assert on_cpu.executed["ops"]["com.microsoft.FusedConv"] == 2
    assert nnapi.executed["ops"]["Conv"] == 2
    assert nnapi.executed["app_opens_with"]["config"] == mobile.REPLAY
    assert on_cpu.executed["app_opens_with"]["config"] == {}
    assert "FusedConv" not in nnapi.executed["ops"]
    assert "FusedConv" in (tmp_path / "nnapi" / "required_operators.config").read_text()


def test_int8_for_a_phone_is_that_of_arm(conv: Any, tmp_path: Path) -> None:
    """Broken: a phone would get this machine's scheme, and a chain of operators that ARM has no kernel for."""
    target = asking()
    (scheme,) = OnnxRuntime().schemes(target, "int8")
    assert scheme.name == "int8-s8s8"
    lowered = plugins.load("lowerings", "int8").lower(conv[0], scheme, conv[1], (), tmp_path / "low")
    artifact = compile_for(lowered, target, tmp_path / "art", "int8")
    assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 3, "float": 0}


def test_the_estimate_is_kept_and_told(transformer: Any, tmp_path: Path) -> None:
    """Broken: nobody would learn which operators keep the model off the phone's accelerator."""
    artifact = compile_for(transformer[0], asking(provider="nnapi", min_nodes_share=0.9), tmp_path)
    found = artifact.executed["estimate"]
    assert found["left"] == {"LayerNormalization": 2}
    assert found["taken"] == found["nodes"] - 2
    assert 0.9 < found["share"] < 1
    assert found["partitions"] == 2
    assert any("Gather" in condition for condition in found["unchecked"])
    assert any("in 2 parts; it does not take 2 LayerNormalization" in note for note in artifact.notes)


def test_a_share_below_the_bound_fails_by_name(transformer: Any, tmp_path: Path) -> None:
    """Broken: a policy that wants the model on the accelerator would get one that is not; or would not learn why."""
    with pytest.raises(
        NothingCompiledError,
        match=r"NnapiExecutionProvider would take an estimated 33 of 35 nodes \(94 %\), and min_nodes_share asks for "
        r"100 %: "
        "it does not take 2 LayerNormalization",
    ):
        compile_for(transformer[0], asking(provider="nnapi"), tmp_path)


def test_free_shapes_are_named_and_fixed_where_one_size_is_asked_for(conv: Any, tmp_path: Path) -> None:
    """Broken: NNAPI, which takes no free shape, would be given one and run nothing; or a batch would be fixed that must
    stay free."""
    one = compile_for(conv[0], asking(provider="nnapi"), tmp_path / "one")
    assert one.signature.inputs[0].shape == (1, 3, 16, 16)
    assert one.signature.outputs[0].shape == (1, 10)
    assert any("written for batch = 1 alone" in note for note in one.notes)
    with pytest.raises(
        NothingCompiledError, match=r"0 of 8 nodes.*input image \(batch, 3, 16, 16\); with fixed ones .* 100 %"
    ):
        compile_for(conv[0], asking(sizes=(1, 4), provider="nnapi"), tmp_path / "two")
    on_cpu = compile_for(conv[0], asking(sizes=(1, 4)), tmp_path / "cpu")
    assert on_cpu.signature.inputs[0].shape == ("batch", 3, 16, 16)


def test_sizes_are_fixed_only_where_every_input_asks_for_one(conv: Any) -> None:
    """Broken: a length that the policy leaves open would be fixed."""
    spec = TensorSpec(name="ids", dtype="int64", shape=("batch", "length"))
    signature = Signature(inputs=(spec, replace(spec, name="mask")), outputs=())
    both = {name: ShapeRange(min=(1, 8), typical=(1, 8), max=(1, 8)) for name in ("ids", "mask")}

    def sizes(target: Target) -> dict[str, int]:
        return asked_sizes(signature, target, target.batch_sizes)

    assert sizes(replace(asking(), shapes=both)) == {"batch": 1, "length": 8}
    assert sizes(replace(asking(), shapes={"ids": both["ids"]})) == {"batch": 1}
    open_ended = {**both, "mask": ShapeRange(min=(1, 8), typical=(1, 8), max=(1, 16))}
    assert sizes(replace(asking(), shapes=open_ended)) == {"batch": 1}
    assert sizes(asking(sizes=(1, 2))) == {}


def test_core_ml_is_estimated_without_a_mac(conv: Any, tmp_path: Path) -> None:
    """Broken: for Apple's devices nothing could be compiled here, or what was left out would not be told."""
    if sys.platform == "darwin":
        pytest.skip("a Mac runs it")
    target = asking("apple", (1, 4), provider="coreml", min_nodes_share=0.5)
    artifact = compile_for(conv[0], target, tmp_path / "onnx")
    assert artifact.entry == "model.onnx"
    assert artifact.executed["estimate"]["left"] == {"Flatten": 1}
    assert artifact.executed["estimate"]["free_shapes"] == artifact.executed["estimate"]["nodes"]
    assert artifact.executed["app_opens_with"]["provider_options"]["ModelFormat"] == "MLProgram"
    fixed = asking("apple", (1, 4), provider="coreml", provider_options={"RequireStaticInputShapes": True})
    with pytest.raises(NothingCompiledError, match="0 of 8 nodes"):
        compile_for(conv[0], fixed, tmp_path / "fixed")
    half = OnnxRuntime().schemes(target, "fp16")[0]
    lowered = plugins.load("lowerings", "fp16").lower(conv[0], half, None, (), tmp_path / "low")
    executed = OnnxRuntime().compile(lowered, half, target, "job", tmp_path / "half").executed
    assert executed["estimate"]["left"].keys() >= {"Flatten"}
    assert executed["estimate"]["nodes"] == sum(executed["ops"].values()), "casts that only this machine's CPU wants"


def test_a_graph_of_constants_leaves_no_node(conv: Any, tmp_path: Path) -> None:
    """Broken: a share of nothing would be a division by zero, or a pass."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1, 2], [1.0, 2.0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "g.onnx")
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 2))
    model = replace(
        conv[0],
        path=str(tmp_path / "g.onnx"),
        signature=Signature(inputs=(spec,), outputs=(replace(spec, name="y"),)),
    )
    with pytest.raises(NothingCompiledError, match="no node is left for NnapiExecutionProvider"):
        compile_for(model, asking(provider="nnapi"), tmp_path / "art")


def test_the_tools_leave_the_process_as_it_was(conv: Any, tmp_path: Path) -> None:
    """Broken: they would set up logging, change the search path, and make onnx's nodes hashable for all the process."""
    before = (list(logging.getLogger().handlers), list(sys.path), "__hash__" in vars(onnx.NodeProto))
    compile_for(conv[0], asking(provider="nnapi"), tmp_path)
    assert (list(logging.getLogger().handlers), list(sys.path), "__hash__" in vars(onnx.NodeProto)) == before
