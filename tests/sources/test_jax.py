"""JAX artifacts: what is refused without JAX, from their bytes and from what lies beside them.

What JAX itself makes of them is in tests/integration/test_jax.py, in its toolchain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core import plugins
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, SourceModel
from compile_stage.core.tensors import TensorSpec
from compile_stage.sources import jax_export
from compile_stage.sources.jax import JaxSource

from .conftest import source_of
from .jax_exports import CALLBACK, DOUBLE, FOREIGN

X = {"name": "x", "dtype": "float32", "shape": ["batch", 4]}
Y = {"name": "output", "dtype": "float32", "shape": ["batch", 4]}
SETTINGS = {
    "format": 1,
    "inputs": [X],
    "outputs": [Y],
    "answer": "array",
    "onnx": None,
    "no_onnx": "it was not asked for",
}


def logged(folder: Path, artifact: bytes = DOUBLE, **settings: Any) -> SourceModel:
    """A model folder as `compile_stage.jax` writes it."""
    (folder / "model" / "data").mkdir(parents=True)
    (folder / "model" / "data" / "model.jaxexport").write_bytes(artifact)
    (folder / "model" / "data" / "model.json").write_text(json.dumps({**SETTINGS, **settings}))
    (folder / "model" / "MLmodel").write_text(json.dumps({"flavors": {"jax": {"data": "data"}}}))
    return source_of(folder / "model", "jax")


def test_an_artifact_is_read_without_jax(tmp_path: Path) -> None:
    """Broken: people would have to install JAX to be told whether their model is taken, or how it is answered."""
    source = logged(tmp_path)
    assert JaxSource().refuse(source, Compliance()) is None
    assert JaxSource().prediction_format(source)["kind"] == "array"
    described = jax_export.settings(Path(source.path) / "data")
    assert described.signature.inputs == (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)
    assert {"multiply_v1", "add_v1"} <= set(jax_export.strings(jax_export.module_of(DOUBLE)))


@pytest.mark.parametrize("allowed", [False, True])
def test_a_callback_is_refused_whatever_the_policy_says(tmp_path: Path, allowed: bool) -> None:
    """Broken: opening a registered model would call whatever lies at an address that its file names."""
    reason = JaxSource().refuse(logged(tmp_path, CALLBACK), Compliance(allow_pickle=allowed))
    assert reason is not None
    assert "calls back into Python (xla_ffi_python_cpu_callback)" in reason


@pytest.mark.parametrize(
    ("target", "taken"),
    [
        ("shape_assertion", True),
        ("lapack_spotrf_ffi", True),
        ("lapack_spotrf", False),  # takes sizes from its operands, and looks at no tensor's own
        ("xla_python_cpu_callback", False),
        ("xla_ffi_python_cpu_callback", False),
        ("launch_missiles", False),
        ("shape_assertion_", False),
    ],
)
def test_calls_are_taken_by_a_list_of_what_computes(target: str, taken: bool) -> None:
    """Broken: a module could call any function that some library registered in the process."""
    reason = jax_export.refuse_calls({"shape_assertion", target})
    assert (reason is None) == taken
    assert taken or target in str(reason)


@given(place=st.integers(0, len(FOREIGN) - 1), value=st.integers(0, 255), end=st.integers(0, len(FOREIGN)))
def test_damaged_bytes_are_refused_and_never_raise(place: int, value: int, end: int) -> None:
    """Broken: a damaged or hostile artifact would end in a traceback of the stage's own, or keep it busy."""
    damaged = bytearray(FOREIGN)
    damaged[place] = value
    for raw in (bytes(damaged), FOREIGN[:end]):
        try:
            names = jax_export.strings(jax_export.module_of(raw))
        except jax_export.RefusedError:
            continue
        assert len(names) <= len(raw)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": 2}, "is not of format 1"),
        ({"inputs": []}, "names no inputs"),
        ({"inputs": "x"}, "has no list of inputs"),
        ({"inputs": [X, X]}, "names two inputs alike"),
        ({"inputs": [{"name": "x"}]}, "without name, dtype and shape"),
        ({"inputs": [{**X, "name": "x\n"}]}, "no name that a tensor can have"),
        ({"inputs": [{**X, "dtype": "bfloat16"}]}, "which NumPy has no arrays of"),
        ({"inputs": [{**X, "dtype": ["float32"]}]}, "has a dtype that names no type"),
        ({"inputs": [{**X, "dtype": "str"}]}, "has a dtype that names no type"),
        ({"inputs": [{**X, "shape": []}]}, "no shape with a batch dimension"),
        ({"inputs": [{**X, "shape": [True, 4]}]}, "no shape with a batch dimension"),
        ({"outputs": [{**Y, "shape": ["__import__('os')", 4]}]}, "no shape with a batch dimension"),
        ({"onnx": "../../secret.onnx"}, "names an ONNX file that is not beside it"),
    ],
)
def test_a_description_that_can_not_be_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """Broken: names and shapes that nobody checked would reach file names, reports and compilers."""
    assert said in str(JaxSource().refuse(logged(tmp_path, **settings), Compliance()))


def test_without_onnx_the_reason_says_what_to_log(tmp_path: Path) -> None:
    """Broken: who wants OpenVINO for a JAX model would not learn that it takes jax2onnx where the model is logged."""
    with pytest.raises(SourceError, match="it was not asked for") as caught:
        JaxSource().export(logged(tmp_path), {}, tmp_path / "into")
    assert "log it where jax2onnx is installed" in str(caught.value)


def test_an_onnx_of_other_tensors_is_refused(tmp_path: Path) -> None:
    """Broken: a graph that has nothing to do with the artifact would be compiled, or weights of another folder read."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4])

    source = logged(tmp_path, onnx="model.onnx")
    file = Path(source.path) / "data" / "model.onnx"
    for name, said in (("x", None), ("other", "its ONNX has the inputs")):
        made = helper.make_graph([helper.make_node("Relu", [name], ["output"])], "g", [value(name)], [value("output")])
        onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
        if said is None:
            assert JaxSource().export(source, {}, tmp_path / "into").form == "onnx"
            continue
        with pytest.raises(SourceError, match=said):
            JaxSource().export(source, {}, tmp_path / "other")


def test_the_flavor_has_its_source() -> None:
    """Broken: a model of the flavor would be told to be unknown."""
    if "jax" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    assert isinstance(plugins.load("sources", "jax"), JaxSource)
    assert plugins.toolchain_name(plugins.load("sources", "jax")) == "jax"
    assert plugins.lock_of("jax") is not None
