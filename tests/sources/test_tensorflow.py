"""Keras and TensorFlow models: what is refused without TensorFlow, and what its toolchain makes of real ones.

The files of the second part are made and read in the toolchain, which COMPILE_STAGE_TOOLCHAINS names a folder for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.errors import MissingDependencyError
from compile_stage.core.records import Compliance, SourceModel
from compile_stage.core.tensors import TensorSpec
from compile_stage.engine import toolchains
from compile_stage.sources import tensorflow
from compile_stage.sources.tensorflow import KerasSource, TensorFlowSource

from .conftest import source_of
from .test_keras_archive import DENSE, INPUT, LAMBDA, archive, sequential
from .test_saved_model import CALL, function, node, signature, tensor, written

NAMED = '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 8, 8, 1]}, "name": "pixels"}]'


def logged(folder: Path, flavor: str, signature: str = "", **settings: Any) -> SourceModel:
    """A model folder as MLflow writes it."""
    folder.mkdir(exist_ok=True)
    described = {"flavors": {flavor: settings, "python_function": {"loader_module": f"mlflow.{flavor}"}}}
    if signature:
        described["signature"] = {"inputs": signature, "outputs": None}
    (folder / "MLmodel").write_text(json.dumps(described))  # JSON is YAML
    return source_of(folder, flavor)


def keras_model(folder: Path, config: Mapping[str, Any], **settings: Any) -> SourceModel:
    (folder / "model" / "data").mkdir(parents=True)
    archive(folder / "model" / "data", config)
    return logged(folder / "model", "keras", data="data", keras_backend="tensorflow", **settings)


def module(folder: Path, *functions: bytes, **more: Any) -> SourceModel:
    (folder / "model" / "tf2model").mkdir(parents=True)
    written(folder / "model" / "tf2model", functions, **more)
    return logged(folder / "model", "tensorflow", saved_model_dir="tf2model", model_type="tf2-module")


# ------------------------------------------------------------------------------------------- without TensorFlow


def test_a_lambda_is_refused_and_taken_only_by_opt_in(tmp_path: Path) -> None:
    """Broken: the code in a registered model would run, or those who trust it could not compile it."""
    source = keras_model(tmp_path, sequential(LAMBDA))
    reason = KerasSource().refuse(source, Compliance())
    assert reason is not None
    assert "is Python code (a Lambda)" in reason
    assert KerasSource().refuse(source, Compliance(allow_pickle=True)) is None


def test_pickled_custom_objects_are_refused_and_taken_only_by_opt_in(tmp_path: Path) -> None:
    """Broken: MLflow's pickle of custom objects, beside a harmless archive, would be loaded."""
    source = keras_model(tmp_path, sequential(DENSE))
    assert KerasSource().refuse(source, Compliance()) is None
    (tmp_path / "model" / "data" / "custom_objects.cloudpickle").write_bytes(b"\x80\x05.")
    reason = KerasSource().refuse(source, Compliance())
    assert reason is not None
    assert "custom objects, which are a pickle" in reason
    assert "log it again after keras.saving.get_custom_objects().clear()" in reason  # the model uses none of them
    assert KerasSource().refuse(source, Compliance(allow_pickle=True)) is None


def test_a_model_that_needs_its_custom_objects_is_not_told_to_log_it_without(tmp_path: Path) -> None:
    """Broken: who follows the advice has a model that Keras can't load."""
    source = keras_model(tmp_path, sequential(LAMBDA))
    (tmp_path / "model" / "data" / "global_custom_objects.cloudpickle").write_bytes(b"\x80\x05.")
    reason = KerasSource().refuse(source, Compliance()) or ""
    assert "use layers of Keras in their place" in reason
    assert "clear()" not in reason


def test_a_python_function_is_refused_whatever_the_policy_says(tmp_path: Path) -> None:
    """Broken: a SavedModel with a py_function would be run."""
    source = module(tmp_path, function("__inference_call_1", node("EagerPyFunc")))
    for allowed in (False, True):
        reason = TensorFlowSource().refuse(source, Compliance(allow_pickle=allowed))
        assert reason is not None
        assert "calls Python code (EagerPyFunc" in reason


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"save_format": "h5"}, "saved as HDF5"),
        ({"keras_backend": "torch"}, "Keras's torch backend"),
        ({"keras_backend": "jax"}, "KERAS_BACKEND=tensorflow"),
        ({"signature_def_key": "predict", "meta_graph_tags": ["serve"]}, "TensorFlow 1"),
        ({"data": "../elsewhere"}, "outside of the model's folder"),
        ({"data": "gone"}, "is missing from the registry"),
    ],
)
def test_other_ways_to_log_are_refused_with_what_to_do(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    """Broken: such a model would fail in the toolchain, with a message of Keras's about a file."""
    keras_model(tmp_path, sequential(DENSE))
    source = logged(tmp_path / "model", "keras", **{"data": "data", **settings})
    try:
        reason = KerasSource().refuse(source, Compliance())
    except Exception as error:  # noqa: BLE001 - a file outside is an error of the reader's own
        reason = str(error)
    assert reason is not None
    assert says in reason


def test_text_is_no_input_of_a_compiled_model(tmp_path: Path) -> None:
    """Broken: the export would fail with an operator's name, after minutes."""
    text = signature("serving_default", [tensor("words", 7, -1)], [tensor("output_0", 1, -1)])
    reason = TensorFlowSource().refuse(module(tmp_path, CALL, signatures=[text]), Compliance())
    assert reason == "its input words is text: log the model that takes what the text becomes"


def test_how_the_pyfunc_answers_is_known_without_tensorflow(tmp_path: Path) -> None:
    """Broken: clients of the published version would get a dict where the original answered with an array."""
    source = keras_model(tmp_path / "a", sequential(DENSE))
    assert KerasSource().prediction_format(source) == {
        "kind": "array",
        "outputs": [],
        "columns": None,
        "frame_in_frame_out": True,
    }
    named = signature("serving_default", [tensor("x", 1, -1, 4)], [tensor("score", 1, -1, 2)])
    source = module(tmp_path / "b", CALL, signatures=[named])
    assert TensorFlowSource().prediction_format(source)["kind"] == "dict"


def two_heads(*named: str) -> dict[str, Any]:
    """A Keras model that answers with a list: of the layer `classes` [batch, 3], and of `size` [batch, 1]."""
    described = sequential(DENSE)
    inner = described["config"] | {"input_layers": ["image", 0, 0], "output_layers": [[name, 0, 0] for name in named]}
    return described | {"class_name": "Functional", "config": inner}


def outputs_of(*named: tuple[str, int]) -> str:
    specs = [
        {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, size]}, "name": name}
        for name, size in named
    ]
    return json.dumps(specs)


def test_a_list_of_outputs_is_answered_as_a_list_by_the_flavor_that_does(tmp_path: Path) -> None:
    """Broken: clients of a Keras model with two outputs, logged by mlflow.tensorflow, read `predictions[0]` of the
    original and would get a dict of the published version; or those of mlflow.keras a list that it never gives."""
    settings = {"data": "data", "keras_backend": "tensorflow"}
    for flavor, reader, kind in (("tensorflow", TensorFlowSource(), "list"), ("keras", KerasSource(), "array")):
        keras_model(tmp_path / flavor, two_heads("classes", "size"))
        assert reader.prediction_format(logged(tmp_path / flavor / "model", flavor, **settings))["kind"] == kind
    keras_model(tmp_path / "one", two_heads("classes"))
    source = logged(tmp_path / "one" / "model", "tensorflow", **settings)
    assert TensorFlowSource().prediction_format(source)["kind"] == "array", "Keras gives the only one as it is"


@pytest.mark.parametrize(
    ("signature", "layers", "names"),
    [
        ([("classes", 3), ("size", 1)], ("classes", "size"), ["classes", "size"]),
        ([("size", 1), ("classes", 3)], ("classes", "size"), ["classes", "size"]),  # by the layers, in any order
        ([("label", 3), ("length", 1)], ("classes", "size"), ["label", "length"]),  # in order, where they fit
        ([("length", 1), ("label", 3)], ("classes", "size"), ["output_0", "output_1"]),
        ([("label", -1), ("length", 1)], (), ["label", "length"]),
        ([("label", 3)], (), ["output_0", "output_1"]),
        ([("same", 3), ("same", 1)], (), ["output_0", "output_1"]),
    ],
)
def test_several_outputs_have_the_names_of_the_signature(
    tmp_path: Path, signature: list[tuple[str, int]], layers: tuple[str, ...], names: list[str]
) -> None:
    """Broken: a version's signature promises `classes` and `size`, and it answers `output_0` and `output_1`; or an
    output is published under the other's name."""
    (tmp_path / "MLmodel").write_text(
        json.dumps({"flavors": {"keras": {}}, "signature": {"inputs": NAMED, "outputs": outputs_of(*signature)}})
    )
    given = [("output_0", "float32", (None, 3)), ("output_1", "float32", (None, 1))]
    found = tensorflow._named_outputs(given, layers, source_of(tmp_path, "keras"))
    assert [name for name, _, _ in found] == names
    assert [shape for _, _, shape in found] == [(None, 3), (None, 1)]
    keyed = [("b", "float32", (None, 3)), ("a", "float32", (None, 1))]
    assert tensorflow._named_outputs(keyed, layers, source_of(tmp_path, "keras")) == keyed, "a dict has its own keys"


def test_an_output_that_is_named_as_an_input_has_another_name() -> None:
    """Broken: a model whose signature calls input and output alike would be a graph in which both are one value."""
    x, y = (TensorSpec(name=name, dtype="float32", shape=("batch", 2)) for name in "xy")
    assert [spec.name for spec in tensorflow._apart([x, y], [x])] == ["x_out", "y"]


def test_an_example_has_the_name_that_callers_write(tmp_path: Path) -> None:
    """Broken: samples from the logged example would be refused as those of another model."""
    source = keras_model(tmp_path, sequential(DENSE))
    source = logged(tmp_path / "model", "keras", NAMED, data="data")
    assert KerasSource().example(source) is None, "none was logged"
    described = json.loads((tmp_path / "model" / "MLmodel").read_text())
    described["saved_input_example_info"] = {"artifact_path": "input_example.json", "type": "ndarray", "format": "tf"}
    (tmp_path / "model" / "MLmodel").write_text(json.dumps(described))
    (tmp_path / "model" / "input_example.json").write_text(json.dumps(np.ones((2, 8, 8, 1)).tolist()))
    example = KerasSource().example(source_of(tmp_path / "model", "keras"))
    assert example is not None
    assert {name: (array.shape, str(array.dtype)) for name, array in example.items()} == {
        "pixels": ((2, 8, 8, 1), "float32")
    }
    assert INPUT["config"]["name"] != "pixels"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TensorFlow: neither in this environment nor as a toolchain."""
    if "keras" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    if plugins.importable(plugins.load("sources", "keras")):
        pytest.skip("TensorFlow is installed in this environment")
    monkeypatch.setenv("COMPILE_STAGE_TOOLCHAINS", str(tmp_path / "none"))


@pytest.mark.usefixtures("absent")
@pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations
def test_without_tensorflow_the_refusal_names_the_command(tmp_path: Path) -> None:
    """Broken: a user of Keras would be sent away, or told of an import error; and a hostile model would only be refused
    after TensorFlow was installed for it."""
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {backends: [onnxruntime]}}\n"
    )
    good = keras_model(tmp_path / "good", sequential(DENSE))
    with pytest.raises(Exception, match="keras needs tensorflow, keras, tf2onnx, which are not installed") as caught:
        api.plan(f"folder:{good.path}", policy)
    assert "compile-stage toolchain install tensorflow" in str(caught.value)
    hostile = keras_model(tmp_path / "hostile", sequential(LAMBDA))
    result = api.run(f"folder:{hostile.path}", policy, publish=False, out=tmp_path / "out")
    assert (result.status, result.exit_code) == ("refused", 5)
    assert "is Python code (a Lambda)" in result.problem


# ---------------------------------------------------------------------------------------------- with TensorFlow


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the source made, in TensorFlow's toolchain, of each model of `tensorflow_models.py`: the folder, and what it
    said, by model. Made once."""
    if "keras" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    if "COMPILE_STAGE_TOOLCHAINS" not in os.environ and not plugins.importable(plugins.load("sources", "keras")):
        pytest.skip(
            "TensorFlow is not installed, and making its toolchain takes a minute and the network: name a folder for "
            "it in COMPILE_STAGE_TOOLCHAINS"
        )
    try:
        interpreter = toolchains.install("tensorflow").interpreter
    except MissingDependencyError as error:
        pytest.skip(f"its packages can't be had: {str(error).splitlines()[-1]}")
    folder = tmp_path_factory.mktemp("tensorflow")
    done = subprocess.run(
        [interpreter, "-P", str(Path(__file__).with_name("tensorflow_models.py")), str(folder)],
        env={**os.environ, "PYTHONPATH": str(plugins.link_packages(folder / "linked")), "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


ANSWERS = {
    "sequential": ["output"],
    "functional": ["left", "right"],
    "normalized": ["output"],
    "recurrent": ["output_0", "output_1"],
    "named-outputs": ["classes", "size"],
    "attention": ["output"],
    "separable": ["output"],
    "deferred": ["output"],
    "module": ["output"],
    "module-of-two": ["norm", "sum"],
    "exported": ["output"],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ANSWERS)
def test_onnx_answers_as_the_original_does(proofs: tuple[Path, dict[str, Any]], model: str) -> None:
    """Broken: the graph that every backend compiles would be another function than the model; or two exports of one
    model would differ, and nothing would be found in the cache."""
    import onnxruntime

    folder, said = proofs
    proof = said[model]
    assert "error" not in proof, proof
    same = proof["digests"][0] == proof["digests"][1]
    assert same or model == "recurrent", "two exports of one model differ"  # docs/sources.md, "Same model, same bytes"
    assert proof["exported"] == proof["opened"], "the original and its export have other names, types or shapes"
    assert [spec["name"] for spec in proof["opened"]["outputs"]] == ANSWERS[model]
    assert all(spec["shape"][0] == "batch" for spec in proof["opened"]["inputs"])
    session = onnxruntime.InferenceSession(folder / model / "first" / "model.onnx")
    for size in (1, 3):
        with np.load(folder / model / f"batch-{size}.npz") as arrays:
            inputs = {spec["name"]: arrays["in:" + spec["name"]] for spec in proof["opened"]["inputs"]}
            found = session.run(ANSWERS[model], inputs)
            for name, array in zip(ANSWERS[model], found, strict=True):
                expected = arrays["out:" + name]
                assert array.shape == expected.shape
                np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_flatten_has_a_constant_shape(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: compilers that want shapes as constants, such as TVM, would refuse every network with a Flatten."""
    import onnx

    graph = onnx.load(proofs[0] / "sequential" / "first" / "model.onnx").graph
    assert "Reshape" in {node.op_type for node in graph.node}
    assert not {"Shape", "Concat"} & {node.op_type for node in graph.node}


@pytest.mark.slow
def test_tflite_and_stablehlo_are_written_for_each_shape(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: LiteRT or XLA would have no file for a batch size of the target, files would differ from run to run, or
    the weights and folders of the machine would be asked for or told."""
    folder, said = proofs
    for form, suffix in (("tflite", "tflite"), ("stablehlo", "mlir")):
        first, again = said["sequential"][form]
        assert first, "the form has other names, types or shapes than the original"
        assert first == again
        written = folder / "sequential" / f"{form}-1"
        index = json.loads((written / "model.json").read_text())
        assert [one["shapes"] for one in index["modules"]] == [[[1, 8, 8, 3]], [[3, 8, 8, 3]]]
        assert sorted(path.name for path in written.glob(f"*.{suffix}")) == [f"batch_1.{suffix}", f"batch_3.{suffix}"]
    text = (folder / "sequential" / "stablehlo-1" / "batch_3.mlir").read_text()
    assert "site-packages" not in text
    (main,) = (line for line in text.splitlines() if "func.func @main(" in line)
    assert "%arg0" in main
    assert "%arg1" not in main


@pytest.mark.slow
def test_images_stay_as_their_callers_have_them(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: whoever calls the compiled model would have to transpose the images that the original took."""
    (image,) = proofs[1]["sequential"]["opened"]["inputs"]
    assert image == {"name": "image", "dtype": "float32", "shape": ["batch", 8, 8, 3]}


@pytest.mark.slow
def test_a_lambda_is_run_only_where_the_policy_allows_it(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: those who trust their own Lambda could not compile it; others would run it."""
    said = proofs[1]["lambda"]
    assert "is Python code (a Lambda)" in said["refused"]
    assert said["allowed"] is None
    assert "error" not in said, said


@pytest.mark.slow
def test_what_tensorflow_writes_is_refused_where_it_calls_python(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: the operators of a py_function that TensorFlow writes today would not be those that are looked for."""
    said = proofs[1]["python-function"]
    assert "calls Python code" in said["refused"]
    assert "calls Python code" in said["allowed"]
    assert "ReadFile" in proofs[1]["reads-a-file"]["refused"]
    assert "HashTableV2" in proofs[1]["table"]["refused"]


@pytest.mark.slow
def test_operators_without_a_form_in_onnx_are_named(proofs: tuple[Path, dict[str, Any]]) -> None:
    """Broken: the user would see a stack of tf2onnx's."""
    assert "tf2onnx has no ONNX for its operators MatrixInverse" in proofs[1]["unconverted"]["error"]
