"""Sources that mean harm: nothing of them runs, and nothing outside of their folder is read or written."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from factories import prepare
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core import plugins
from compile_stage.core.errors import CompileStageError, PolicyError, SourceError, WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Compliance, DataSpec, SourceModel, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.policy.data_files import read_contents
from compile_stage.sources.onnx import OnnxSource

from .conftest import source_of

SECRET = b"s3cret-s3cret-16"
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 4)),),
)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def linear(*nodes: Any, weights: list[Any] | None = None) -> Any:
    """x [batch, 4] plus `w`, or these nodes in place of the sum."""
    nodes = nodes or (helper.make_node("Add", ["x", "w"], ["y"], name="add"),)
    weights = [numpy_helper.from_array(np.ones(4, np.float32), "w")] if weights is None else weights
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def external(location: str, name: str = "w") -> Any:
    """Weights that stand in a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def saved(tmp_path: Path, model: Any) -> SourceModel:
    """The model as MLflow writes it, beside a file that it must not read."""
    (tmp_path / "secret").write_bytes(SECRET)
    folder = tmp_path / "net"
    mlflow.onnx.save_model(linear(), folder, pip_requirements=["onnx"])
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return source_of(folder, "onnx")


def in_branch(tensor: Any) -> Any:
    """A graph whose `If` has the tensor in a branch of its own."""
    branch = helper.make_graph(
        [helper.make_node("Identity", [tensor.name], ["out"])],
        "branch",
        [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [4])],
        [tensor],
    )
    condition = numpy_helper.from_array(np.array(True), "c")
    return linear(
        helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["x", "o"], ["y"]),
        weights=[condition],
    )


ONNX: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights above": (lambda at: linear(weights=[external("../secret")]), "point outside"),
    "weights of an absolute path": (lambda at: linear(weights=[external(str(at / "secret"))]), "point outside"),
    "weights below and above": (lambda at: linear(weights=[external("data/../../secret")]), "point outside"),
    "weights behind a link": (lambda at: linear(weights=[external("link")]), "point outside"),
    "weights in a branch": (lambda at: in_branch(external("../secret", "b")), "point outside"),
    "weights in a constant": (
        lambda at: linear(
            helper.make_node("Constant", [], ["k"], value=external("../secret", "k")),
            helper.make_node("Add", ["x", "k"], ["y"]),
        ),
        "point outside",
    ),
    "a part compiled for one machine": (
        lambda at: linear(
            helper.make_node(
                "EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context=str(at / "evil.so"), embed_mode=0
            )
        ),
        "compiled for one machine",
    ),
}


@pytest.mark.parametrize("what", ONNX)
def test_an_onnx_file_names_files_of_its_own_only(tmp_path: Path, what: str) -> None:
    """Broken: a graph's weights would be any file of the machine, published with the model; or a library, loaded."""
    make, says = ONNX[what]
    source = saved(tmp_path, make(tmp_path))
    (tmp_path / "net" / "link").symlink_to(tmp_path / "secret")
    assert says in (OnnxSource().refuse(source, Compliance()) or "")


def test_an_operator_of_a_library_is_an_error_and_no_library_is_looked_for(tmp_path: Path) -> None:
    """Broken: a graph could name the library of its operators."""
    model = linear(helper.make_node("Evil", ["x"], ["y"], domain="custom", library=str(tmp_path / "evil.so")))
    model.opset_import.append(helper.make_opsetid("custom", 1))
    for key in ("ort_config", "custom_op_library", "session.register_custom_ops"):
        model.metadata_props.add(key=key, value=json.dumps({"session_options": {"library": str(tmp_path / "evil.so")}}))
    source = saved(tmp_path, model)
    with pytest.raises(SourceError, match="Evil"), OnnxSource().open(source, Target(name="cpu")):
        pass


def test_code_that_comes_with_a_model_is_never_imported(tmp_path: Path) -> None:
    """Broken: MLmodel names a loader and folders of code, as those of any pyfunc, and they would be loaded."""
    source, marker = saved(tmp_path, linear()), tmp_path / "it-ran"
    code = Path(source.path) / "code"
    code.mkdir()
    for module in ("evil", "mlflow_evil", "onnx", "sitecustomize"):
        (code / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    described = mlflow.models.Model.load(source.path)
    described.flavors["python_function"] |= {"loader_module": "evil", "code": "code"}
    described.flavors["onnx"] |= {"code": "code", "onnx_session_options": {"custom_ops": "code/evil.so"}}
    described.save(str(Path(source.path) / "MLmodel"))
    exporter = plugins.load("sources", "onnx")
    assert exporter.refuse(source, Compliance()) is None
    exporter.prediction_format(source)
    exporter.example(source)
    exporter.export(source, {}, tmp_path / "out")
    with exporter.open(source, Target(name="cpu")) as session:
        session.run({"x": np.ones((2, 4), np.float32)})
    assert not marker.exists()


CLASSES = {
    "xgboost": ("model_class", ["evil.Model", "xgboost.sys.exit", "xgboost.train", "os.system", "xgboost.core.os"]),
    "lightgbm": ("model_class", ["evil.Model", "lightgbm.basic.ctypes", "os.system"]),
}


@pytest.mark.parametrize("flavor", CLASSES)
def test_a_class_that_mlmodel_names_is_not_imported(
    tmp_path: Path, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: MLmodel could name any class or function to be called."""
    pytest.importorskip(flavor, reason=f"the {flavor} source needs it")
    marker = tmp_path / "it-ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nModel = dict\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    key, names = CLASSES[flavor]
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.bin").write_bytes(pickle.dumps(Touch(marker)))
        described = mlflow.models.Model()
        described.add_flavor(flavor, **{"data": "model.bin", key: name})
        described.save(str(folder / "MLmodel"))
        assert plugins.load("sources", flavor).refuse(source_of(folder, flavor), Compliance()), name
    assert not marker.exists()


def test_an_input_example_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    """Broken: the example of a model would be any JSON file of the machine, and be published with it."""
    source = saved(tmp_path, linear())
    (tmp_path / "other.json").write_text(json.dumps({"inputs": [[1.0, 2.0, 3.0, 4.0]]}))
    described = mlflow.models.Model.load(source.path)
    for name in ("../other.json", str(tmp_path / "other.json"), "MLmodel/../../other.json", 3):
        described.saved_input_example_info = {"artifact_path": name, "type": "ndarray"}
        described.save(str(Path(source.path) / "MLmodel"))
        with pytest.raises(SourceError, match="input example"):
            OnnxSource().example(source)


# ------------------------------------------------------------------------------------------------------ huge counts

LIGHTGBM = """tree
version=v4
num_class=1
num_tree_per_iteration=1
label_index=0
max_feature_idx=2147483646
objective=regression
feature_names=a
feature_infos=[0:1]
tree_sizes=99999999999

Tree=0
num_leaves=2147483647
num_cat=2147483647
"""


def xgboost_document() -> str:
    """A booster whose counts are far beyond what it holds."""
    huge = str(2**31 - 1)
    return json.dumps(
        {
            "version": [3, 0, 0],
            "learner": {
                "attributes": {},
                "feature_names": [],
                "feature_types": [],
                "learner_model_param": {"num_feature": huge, "num_class": huge, "num_target": huge, "base_score": "0"},
                "objective": {"name": "reg:squarederror", "reg_loss_param": {}},
                "gradient_booster": {
                    "name": "gbtree",
                    "model": {
                        "gbtree_model_param": {"num_trees": huge, "num_parallel_tree": huge},
                        "tree_info": [],
                        "trees": [],
                    },
                },
            },
        }
    )


@pytest.mark.parametrize("flavor", ["lightgbm", "xgboost"])
def test_a_file_with_huge_counts_ends_in_its_worker(tmp_path: Path, flavor: str) -> None:
    """Broken: a file of some lines would take all memory of the machine, or crash the stage."""
    pytest.importorskip(flavor, reason=f"the {flavor} source needs it")
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "model.json").write_text(LIGHTGBM if flavor == "lightgbm" else xgboost_document())
    described = mlflow.models.Model()
    described.add_flavor(flavor, data="model.json")
    described.save(str(folder / "MLmodel"))
    engine = plugins.load("engines", "local")
    limits = WorkerLimits(cpus=1, memory_bytes=2 * 2**30, timeout_s=120.0)
    try:
        with engine.worker("source", limits) as worker, pytest.raises((SourceError, WorkerError)):
            worker.call("inspect_source", source=source_of(folder, flavor), compliance=Compliance())
    finally:
        engine.close()


# ----------------------------------------------------------------------------------------------------------- samples


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: Any = None, *, header: str = "") -> bytes:
    """An array's file; with a header of our own, if one is given."""
    stream = io.BytesIO()
    if not header:
        np.save(stream, array, allow_pickle=True)
        return stream.getvalue()
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def samples(path: Path, into: Path) -> Any:
    return prepare(DataSpec(source=f"file:{path}"), SIGNATURE, into, seed=0)


def test_a_pickle_in_a_file_of_samples_is_not_loaded(tmp_path: Path) -> None:
    """Broken: whoever may log a data set to the source's run could run code."""
    marker = tmp_path / "it-ran"
    path = npz(tmp_path / "data.npz", x=npy(np.array([Touch(marker)], dtype=object)))
    with pytest.raises(PolicyError, match="Python objects"):
        samples(path, tmp_path / "out")
    read_contents(path, 10)
    assert not marker.exists()


HEADERS = {
    "a row more than a machine can hold": "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4)}",
    "a row that is endless": "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4000000000000)}",
    "a shape below zero": "{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 4)}",
    "a call": "{'descr': '<f4', 'fortran_order': False, 'shape': __import__('os').getcwd()}",
    "brackets without end": "(" * 3000 + ")" * 3000,
}


@pytest.mark.parametrize("what", HEADERS)
def test_an_array_that_says_more_than_it_holds_is_refused_at_once(tmp_path: Path, what: str) -> None:
    """Broken: a file of a hundred bytes would take all memory, or be evaluated as Python."""
    path = npz(tmp_path / "data.npz", x=npy(header=HEADERS[what]) + bytes(64))
    began = time.monotonic()
    with pytest.raises(PolicyError, match=r"data\.npz.*can't be read"):
        samples(path, tmp_path / "out")
    assert time.monotonic() - began < 20


WIDE = {
    "columns": (lambda: "a" + ",".join(map(str, range(200_001))) + "\n" + "1," * 200_000 + "1\n", "200,001 columns"),
    "columns of one name": (
        lambda: ",".join(["a"] * 90_000) + "\n" + ",".join(["1"] * 90_000) + "\n",
        "have a name that",
    ),
    "a line without end": (lambda: "a" * (65 * 2**20), "longer than 64 MiB"),
    "a cell beside many rows": (lambda: "a\n" + "x" * 20_000_000 + "\n" + "y\n" * 1000, "GiB"),
}


@pytest.mark.parametrize("what", WIDE)
def test_a_text_table_of_any_width_is_read_in_bounded_time(tmp_path: Path, what: str) -> None:
    """Broken: a CSV file of some megabytes would take minutes, or hundreds of gigabytes."""
    make, says = WIDE[what]
    path = tmp_path / "data.csv"
    path.write_text(make())
    began = time.monotonic()
    with pytest.raises(PolicyError, match=says):
        samples(path, tmp_path / "out")
    if what != "a cell beside many rows":
        with pytest.raises((ValueError, CompileStageError), match=says):
            read_contents(path, 10)
    assert time.monotonic() - began < 60


def test_a_wide_table_is_read(tmp_path: Path) -> None:
    """Broken: the bound would keep out tables that people have."""
    path = tmp_path / "data.csv"
    path.write_text(",".join(f"c{n}" for n in range(20_000)) + "\n" + ("1.5," * 19_999 + "2\n") * 3)
    wide = Signature(inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 20_000)),), outputs=())
    assert prepare(DataSpec(source=f"file:{path}"), wide, tmp_path / "out", seed=0).count == 3
    assert len(read_contents(path, 10).names) == 20_000


def test_a_named_pipe_is_no_file_of_samples(tmp_path: Path) -> None:
    """Broken: reading it would never end."""
    os.mkfifo(tmp_path / "data.csv")
    with pytest.raises(PolicyError, match="no such file"):
        samples(tmp_path / "data.csv", tmp_path / "out")
