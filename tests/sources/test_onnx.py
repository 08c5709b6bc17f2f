from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlflow.models import infer_signature
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, ShapeRange
from compile_stage.sources import graph
from compile_stage.sources.onnx import OnnxSource
from compile_stage.testing.node_cases import collect

from .conftest import Proof, run_onnx, source_of

X = np.random.default_rng(0).random((4, 3), dtype=np.float32)
WEIGHT = np.random.default_rng(1).random((3, 2), dtype=np.float32)


def linear(batch: Any = "n", opset: int = 18, weight_is_input: bool = False, weight: Any = WEIGHT) -> Any:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3])]
    if weight_is_input:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    body = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], doc_string="/home/someone/train.py:7")],
        "random-name",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, weight.shape[1]])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def save(path: Path, model: Any, example: Any = X, **options: Any) -> Any:
    signature = infer_signature(example, X[:, :2])
    mlflow.onnx.save_model(
        model, path, input_example=example, signature=signature, pip_requirements=["onnx"], **options
    )
    return source_of(path, "onnx")


@pytest.mark.parametrize("external", [True, False], ids=["external-data", "one-file"])
def test_a_graph_stays_what_it_is(tmp_path: Path, prove: Proof, external: bool) -> None:
    model = prove(save(tmp_path / "model", linear(), save_as_external_data=external), {"x": X})
    assert [str(spec) for spec in model.signature.inputs] == ["x: float32[n, 3]"]
    assert b"/home/someone" not in Path(model.path).read_bytes()
    assert [file.name for file in Path(model.path).parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("external", [True, False], ids=["external-data", "one-file"])
def test_functions_of_the_file_become_what_they_consist_of(tmp_path: Path, prove: Proof, external: bool) -> None:
    """Broken: every backend would refuse operators that the file defines itself, and that ONNX Runtime runs."""
    weight = np.random.default_rng(2).random((3, 500), dtype=np.float32)
    model = linear(weight=weight)
    model.graph.node[0].domain, model.graph.node[0].op_type = "own", "Twice"
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    inner = [helper.make_node("MatMul", ["a", "b"], ["y"]), helper.make_node("Tanh", ["y"], ["c"])]
    outer = [helper.make_node("Layer", ["a", "b"], ["y"], domain="own"), helper.make_node("Add", ["y", "y"], ["c"])]
    model.functions.append(helper.make_function("own", "Layer", ["a", "b"], ["c"], inner, sets))
    model.functions.append(helper.make_function("own", "Twice", ["a", "b"], ["c"], outer, sets))
    model.opset_import.append(sets[1])
    made = prove(save(tmp_path / "model", model, save_as_external_data=external), {"x": X})
    written = onnx.load(made.path)
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Tanh", "Add"]
    assert not written.functions


def test_a_function_of_another_operator_set_is_converted(tmp_path: Path, prove: Proof) -> None:
    """Broken: the run would end as a bug of ours: onnx's converter wants the types between nodes, and few files say."""
    model = linear()
    model.graph.node.insert(0, helper.make_node("Own", ["x"], ["h"], domain="own"))
    model.graph.node[1].input[0] = "h"
    sets = [helper.make_opsetid("", 13)]
    model.functions.append(
        helper.make_function("own", "Own", ["a"], ["c"], [helper.make_node("Relu", ["a"], ["c"])], sets)
    )
    model.opset_import.append(helper.make_opsetid("own", 1))
    exported = prove(save(tmp_path / "model", model), {"x": X})
    assert [node.op_type for node in onnx.load(exported.path).graph.node] == ["Relu", "MatMul"]


def test_unnamed_dimensions_get_names_on_both_sides(tmp_path: Path, prove: Proof) -> None:
    model = prove(save(tmp_path / "model", linear(batch=None)), {"x": X})
    assert model.signature.inputs[0].shape == ("batch", 3)


def test_weights_that_are_listed_as_inputs_are_no_inputs(tmp_path: Path, prove: Proof) -> None:
    model = prove(save(tmp_path / "model", linear(weight_is_input=True)), {"x": X})
    assert [spec.name for spec in model.signature.inputs] == ["x"]


def test_an_old_operator_set_is_raised_and_the_note_says_so(tmp_path: Path, prove: Proof) -> None:
    model = prove(save(tmp_path / "model", linear(opset=9)), {"x": X})
    assert model.opset == graph.OPSET
    assert "raised from 9" in model.notes[0]


@pytest.mark.parametrize(
    ("opset", "kind", "scales", "attributes"),
    [
        (7, "Upsample", None, {"mode": "linear", "scales": [1.0, 1.0, 2.0, 2.0]}),
        (9, "Upsample", [1, 1, 1.5, 2], {"mode": "nearest"}),
        (10, "Resize", [1, 1, 0.7, 0.6], {"mode": "nearest"}),
        (10, "Resize", [1, 1, 0.7, 1.5], {"mode": "linear"}),
        (10, "Pad", None, {"mode": "reflect", "pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 0.0}),
        (11, "Hardmax", None, {}),
    ],
)
def test_a_raised_operator_set_means_what_it_meant(
    tmp_path: Path, opset: int, kind: str, scales: Any, attributes: Any
) -> None:
    """Broken: onnx's converter has pictures scaled about other places, and one operator choose along another axis, so
    no candidate of such a model passes; or what it writes is no valid ONNX, and the run ends."""
    weights = [] if scales is None else [numpy_helper.from_array(np.array(scales, np.float32), "w")]
    body = helper.make_graph(
        [helper.make_node(kind, ["x", "w"] if weights else ["x"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 5, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, "h", "w"])],
        weights,
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    pictures = {"x": np.random.default_rng(3).random((2, 2, 5, 7), dtype=np.float32)}
    mlflow.onnx.save_model(model, tmp_path / "model", pip_requirements=["onnx"])
    made = OnnxSource().export(source_of(tmp_path / "model", "onnx"), {}, tmp_path / "out")
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, pictures)[0]
    np.testing.assert_allclose(run_onnx(made, pictures)["y"], wanted, rtol=1e-5)
    assert made.opset == (opset if kind == "Hardmax" else graph.OPSET)


def test_a_graph_whose_nodes_are_in_another_order_is_sorted(tmp_path: Path, prove: Proof) -> None:
    """Broken: float16 models of ONNX Runtime's own converter, which writes the casts of the inputs last, are refused;
    or nodes are put before those that an inner graph of theirs reads."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(kind, ["b"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2])],
        )
        for name, kind in (("then", "Identity"), ("else", "Neg"))
    }
    chosen = helper.make_node("If", ["yes"], ["y"], **branches)
    made = [helper.make_node("MatMul", ["a", "w"], ["b"]), helper.make_node("Relu", ["x"], ["a"])]
    taken, given = linear().graph.input[0], linear().graph.output[0]
    weights = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(np.array(False), "yes")]
    unsorted = helper.make_graph([chosen, *made], "unsorted", [taken], [given], weights)
    model = helper.make_model(unsorted, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    source = save(tmp_path / "model", model)
    assert OnnxSource().refuse(source, Compliance()) is None
    exported = onnx.load(prove(source, {"x": X}).path)
    assert [node.op_type for node in exported.graph.node] == ["Relu", "MatMul", "If"]
    graph.sort_nodes(exported.graph)
    assert [node.op_type for node in exported.graph.node] == ["Relu", "MatMul", "If"]


def test_a_fixed_batch_refuses_another(tmp_path: Path) -> None:
    source = save(tmp_path / "model", linear(batch=4))
    wanted = {"x": ShapeRange(min=(1, 3), typical=(1, 3), max=(8, 3))}
    with pytest.raises(SourceError, match="fixed batch 4, the policy asks for batch 8"):
        OnnxSource().export(source, wanted, tmp_path / "out")


def test_a_shape_for_an_unknown_input_names_the_real_ones(tmp_path: Path) -> None:
    wanted = {"image": ShapeRange(min=(1, 3), typical=(1, 3), max=(1, 3))}
    with pytest.raises(SourceError, match="'image'") as caught:
        OnnxSource().export(save(tmp_path / "model", linear()), wanted, tmp_path / "out")
    assert "x: float32[n, 3]" in caught.value.fix


def test_several_inputs_integers_text_and_a_scalar_output(tmp_path: Path, prove: Proof) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["a", "b"], ["sum"]),
            helper.make_node("ReduceSum", ["sum"], ["total"], keepdims=0),
            helper.make_node("Identity", ["word"], ["echo"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("a", TensorProto.INT64, ["n", 2]),
            helper.make_tensor_value_info("b", TensorProto.INT64, ["n", 2]),
            helper.make_tensor_value_info("word", TensorProto.STRING, ["n"]),
        ],
        [
            helper.make_tensor_value_info("sum", TensorProto.INT64, ["n", 2]),
            helper.make_tensor_value_info("total", TensorProto.INT64, []),
            helper.make_tensor_value_info("echo", TensorProto.STRING, ["n"]),
        ],
    )
    numbers, words = np.arange(6).reshape(3, 2), np.array(["a", "bc", "d"], dtype=object)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (tmp_path / "model").mkdir()
    onnx.save(model, tmp_path / "model" / "model.onnx")
    mlflow.models.Model(flavors={"onnx": {"data": "model.onnx"}}).save(str(tmp_path / "model" / "MLmodel"))
    made = prove(source_of(tmp_path / "model", "onnx"), {"a": numbers, "b": numbers, "word": words})
    assert [spec.dtype for spec in made.signature.outputs] == ["int64", "int64", "str"]
    assert made.signature.outputs[1].shape == ()


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model", linear(), save_as_external_data=True)
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    onnx.save_model(
        model, str(tmp_path / "model" / "model.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0
    )
    assert OnnxSource().refuse(source, Compliance()) is None
    (tmp_path / "model" / "w.bin").unlink()
    assert "w.bin is missing" in (OnnxSource().refuse(source, Compliance()) or "")


def test_weights_outside_of_the_models_folder_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model", linear(), save_as_external_data=False)
    file = tmp_path / "model" / "model.onnx"
    model = onnx.load(str(file))
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location="../../secret")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    file.write_bytes(model.SerializeToString())
    assert "outside" in (OnnxSource().refuse(source, Compliance()) or "")


def test_large_weights_lie_beside_the_file(tmp_path: Path) -> None:
    source = save(tmp_path / "model", linear())
    weight = np.random.default_rng(2).random((3, 200), dtype=np.float32)
    model = graph.finish(linear(weight=weight), source, {}, tmp_path / "out", external_data_above=8)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_allclose(run_onnx(model, {"x": X})["y"], X @ weight, rtol=1e-6)


def test_a_file_of_the_first_format_is_raised_too(tmp_path: Path, prove: Proof) -> None:
    """Broken: in that format weights must be inputs, so once they are none the converter would not find them, and end
    the export."""
    old = linear(opset=9, weight_is_input=True)
    old.ir_version = 3
    model = prove(save(tmp_path / "model", old), {"x": X})
    assert model.opset == graph.OPSET
    assert [spec.name for spec in model.signature.inputs] == ["x"]


def test_probabilities_as_a_list_of_dicts_are_refused_with_the_option_that_helps(tmp_path: Path) -> None:
    """Broken: whoever converted a classifier with skl2onnx's defaults reads `no tensor`, and not how to get one."""
    scores = helper.make_node("ZipMap", ["y"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    model = linear()
    model.graph.node.append(scores)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    row = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output[0].CopyFrom(helper.make_value_info("p", helper.make_sequence_type_proto(row)))
    source = save(tmp_path / "model", model)
    assert "{'zipmap': False}" in (OnnxSource().refuse(source, Compliance()) or "")


@pytest.mark.parametrize("kind", ["BFLOAT16", "COMPLEX64", "FLOAT8E4M3FN"])
def test_types_that_arrays_have_not_are_refused(tmp_path: Path, kind: str) -> None:
    """Broken: the run ends with the runtime's "Numpy_type 256 can't be converted to MLDataType"."""
    model = linear()
    model.graph.input[0].type.tensor_type.elem_type = getattr(TensorProto, kind)
    assert "'x' is " in str(OnnxSource().refuse(save(tmp_path / "model", model), Compliance()))


def test_a_graph_without_shapes_is_refused_with_what_helps(tmp_path: Path, prove: Proof) -> None:
    """Broken: an input whose shape the graph leaves out was called a scalar, and an output without one ended the run,
    not the plan, with "no valid ONNX: Field 'shape' of 'type' is required but missing". What is advised helps."""
    model = linear()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    reason = str(OnnxSource().refuse(save(tmp_path / "neither", model), Compliance()))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    assert "declares no shape of its input 'x'" in reason
    assert "model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info('x', 1, ['batch', 8]))" in reason
    model.graph.input[0].CopyFrom(given)
    reason = str(OnnxSource().refuse(save(tmp_path / "input", model), Compliance()))
    assert "declares no shape of its output 'y': log onnx.shape_inference.infer_shapes(model)" in reason
    source = save(tmp_path / "both", onnx.shape_inference.infer_shapes(model))
    prove(source, {"x": np.ones((3, 3), np.float32)})


def test_a_scalar_input_is_refused_with_what_helps(tmp_path: Path) -> None:
    """Broken: "the model takes batches of 1 only", and with those "the array has the shape [batch], and [batch] is
    wanted"."""
    model = linear()
    model.graph.node.append(helper.make_node("Mul", ["y", "scale"], ["scaled"]))
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    model.graph.output[0].name = "scaled"
    mlflow.onnx.save_model(model, tmp_path / "model", pip_requirements=["onnx"])
    reason = str(OnnxSource().refuse(source_of(tmp_path / "model", "onnx"), Compliance()))
    assert "its input 'scale' is a scalar" in reason


@pytest.mark.parametrize("names", [["other"], ["x", "other"]])
def test_a_signature_of_other_names_than_the_graphs_is_refused(tmp_path: Path, names: list[str]) -> None:
    """Broken: MLflow hands on what the signature names, which the graph has not, so the original answers nothing: and
    what is compiled of it was published."""
    lying = infer_signature(dict.fromkeys(names, X), X[:, :2])
    mlflow.onnx.save_model(linear(), tmp_path / "model", signature=lying, pip_requirements=["onnx"])
    reason = str(OnnxSource().refuse(source_of(tmp_path / "model", "onnx"), Compliance()))
    assert "'other', and the graph has 'x', so its own predict() refuses" in reason


def test_garbage_is_refused_and_not_raised(tmp_path: Path) -> None:
    source = save(tmp_path / "model", linear())
    (tmp_path / "model" / "model.onnx").write_bytes(b"\xff\xff\xff garbage")
    assert OnnxSource().refuse(source, Compliance()) is not None


def test_the_answer_is_what_mlflows_own_pyfunc_does(tmp_path: Path) -> None:
    import pandas as pd

    tensors = save(tmp_path / "tensors", linear())
    assert OnnxSource().prediction_format(tensors)["kind"] == "dict"
    assert list(mlflow.pyfunc.load_model(tensors.path).predict(X)) == ["y"]
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    framed = save(tmp_path / "frame", linear(), frame)
    how = OnnxSource().prediction_format(framed)
    assert how["frame_in_frame_out"]
    assert how["columns"] == ["a", "b", "c"]
    assert isinstance(mlflow.pyfunc.load_model(framed.path).predict(frame), pd.DataFrame)


def test_an_operator_set_whose_raising_changes_the_inputs_stays(tmp_path: Path) -> None:
    """Scan of operator set 8 has a batch dimension that later ones lack: onnx's converter drops it from the model's own
    inputs."""
    (case,) = (case for case in collect(("scan",)) if case.name == "test_scan_sum")
    model = OnnxSource().export(save(tmp_path / "model", case.model), {}, tmp_path / "out")
    assert model.opset == 8
    assert "would change its inputs or outputs" in model.notes[0]
    assert [len(spec.shape) for spec in model.signature.inputs] == [array.ndim for array in case.data_sets[0][0]]
