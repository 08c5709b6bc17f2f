"""TensorRT can't run here. What is tested: all that is decided before and after its calls; the order of these, over a
stand-in; and that they name members that exist. Tests marked `gpu` run the real thing where there is one."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends import tensorrt as backend_module
from compile_stage.backends.tensorrt import TIMINGS, TensorRt, profile_shapes, read_layers
from compile_stage.core import plugins, tuning_records
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, Scheme, ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import check_backend, models

pytestmark = pytest.mark.filterwarnings(  # of Polygraphy's own code, with Python 3.13 and newer
    "ignore:'maxsplit' is passed as positional argument:DeprecationWarning"
)

ROOT = Path(__file__).parents[2]
FP32 = Scheme(precision="fp32", name="fp32", native=True)


def target(**changed: Any) -> Target:
    return Target(**{"name": "gpu", "device": "cuda", "batch_sizes": (1, 8), **changed})


def signature(*shape: int | str) -> Signature:
    spec = TensorSpec(name="x", dtype="float32", shape=shape)
    return Signature(inputs=(spec,), outputs=())


# -------------------------------------------------------------------------------------------------------------- decided


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        (("batch", 3), None, ((1, 3), (1, 3), (8, 3))),  # the batch alone is free: the target's sizes are the range
        ((4, 3), None, ((4, 3), (4, 3), (4, 3))),
        (
            ("batch", "n"),
            ((2, 16), (4, 32), (4, 64)),
            ((1, 16), (4, 32), (8, 64)),
        ),  # widened to every size that is promised
        (("batch", "n"), ((1, 16), (16, 32), (16, 64)), ((1, 16), (16, 32), (16, 64))),
    ],
)
def test_the_range_holds_what_the_policy_promises(shape: Any, given: Any, expected: Any) -> None:
    """Broken: the engine would refuse a batch that the policy promised, or be tuned for one that nobody sends."""
    shapes = {"x": ShapeRange(min=given[0], typical=given[1], max=given[2])} if given else {}
    assert profile_shapes(signature(*shape), target(shapes=shapes)) == {"x": expected}


def test_a_free_axis_without_a_range_is_refused_with_what_to_write() -> None:
    """Broken: TensorRT would build for a size that it makes up."""
    model = PortableModel(
        path="", digest="", form="onnx", opset=18, precision="fp32", signature=signature("batch", "length")
    )
    reason = TensorRt().refuse(model, target())
    assert reason is not None
    assert "axis 1 of input 'x' is free" in reason
    assert "shapes.x" in reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workspce_mb": 1}, "no option 'workspce_mb'"),
        ({"workspace_mb": -1}, "must be a whole number of at least 0, not -1"),
        ({"workspace_mb": True}, "must be a whole number"),
        ({"optimization_level": 6}, "from 0 to 5"),
        ({"hardware_compatibility": "any"}, "can be none, same_compute_capability, ampere_plus"),
        ({"version_compatible": "yes"}, "true or false"),
    ],
)
def test_a_wrong_option_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str) -> None:
    """Broken: a mistyped option would be dropped, and the engine built without it."""
    _with_a_gpu(monkeypatch)
    reason = TensorRt().refuse_target(target(options={"tensorrt": options}))
    assert reason is not None
    assert words in reason


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run without a GPU would fail in a library's words, after the export."""
    _without_a_gpu(monkeypatch)
    assert "of the device cuda, not of 'cpu'" in str(TensorRt().refuse_target(target(device="cpu")))
    assert "none that nvidia-smi lists" in str(TensorRt().refuse_target(target()))
    assert TensorRt().schemes(target(device="cpu"), "fp32") == ()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "fp8", "int4"])
def test_the_lowerings_take_its_schemes(precision: str, tmp_path: Path) -> None:
    """Broken: a scheme would be declared that no lowering can make, and be refused job by job."""
    model, samples = models.conv_net(tmp_path / "model")
    lowering = plugins.load("lowerings", precision)
    for scheme in TensorRt().schemes(target(), precision):
        assert scheme.precision == precision
        reason = lowering.refuse(model, scheme)
        assert reason is None or "nothing" in reason, reason
        if reason is None:
            lowered = lowering.lower(model, scheme, samples, (), tmp_path / scheme.name)
            assert _zero_points(lowered.path) <= {0}, "TensorRT takes symmetric values only"


def _zero_points(path: str) -> set[int]:
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found: set[int] = set()
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            found |= {
                int(value) for value in np.ravel(numpy_helper.to_array(constants[node.input[2]])).astype(np.float32)
            }
    return found


# ------------------------------------------------------------------------------------------------------------ read back


def layer(kind: str, *types: str) -> dict[str, Any]:
    return {"Name": kind, "LayerType": kind, "Inputs": [{"Format/Datatype": t} for t in types], "Outputs": []}


def test_layers_are_counted_by_the_narrowest_type_that_they_touch() -> None:
    """Broken: an int8 engine whose layers all ran in float would be called int8."""
    document = json.dumps(
        {
            "Layers": [
                layer("CaskConvolution", "Row major Int8 format", "Row major linear FP32"),
                layer("gemm", "Half", "Half"),
                layer("gemm", "Channel major FP16 format where channel % 8 == 0"),
                layer("kgen", "BF16"),
                layer("kgen", "FP8"),
                layer("kgen", "Float"),
                layer("Reformat", "Int8", "Float"),
                "only a name",
            ]
        }
    )
    counted = {"int8": 1, "float16": 2, "bfloat16": 1, "fp8": 1, "float32": 1, "moves": 1, "untold": 1}
    read = read_layers(document)
    assert read["precision"] == counted
    assert read["providers"] == {"tensorrt": 8}
    assert read["ops"]["gemm"] == 2


# ----------------------------------------------------------------------------------------------- the order of the calls


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in of `fake_tensorrt.py` in place of TensorRT and PyCUDA."""
    spec = importlib.util.spec_from_file_location("fake_tensorrt", Path(__file__).with_name("fake_tensorrt.py"))
    assert spec is not None
    assert spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_tensorrt", fake)
    spec.loader.exec_module(fake)
    fake.install(lambda modules, name, module: monkeypatch.setitem(modules, name, module))
    _with_a_gpu(monkeypatch)
    monkeypatch.setattr(backend_module, "package_versions", lambda *names: dict.fromkeys(names, "11.4.0.106"))
    return fake


def test_an_engine_is_built_kept_and_run(stand_in: Any, tmp_path: Path) -> None:
    """Broken: a call would be missing or come too late: a buffer that does not grow, shapes told after the addresses, a
    context left on the stack."""
    model, samples = models.perceptron(tmp_path / "model")
    where = target(options={"tensorrt": {"workspace_mb": 64, "optimization_level": 5}})
    artifact = TensorRt().compile(model, FP32, where, "job", tmp_path / "first")
    network, config = stand_in.BUILT[-1]
    assert network.flags == 1 << stand_in.MODULE.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert config.profiles[0].shapes == {"features": [[1, 12], [1, 12], [8, 12]]}
    assert config.pools == {stand_in.MODULE.MemoryPoolType.WORKSPACE: 64 << 20}
    assert config.builder_optimization_level == 5
    assert config.flags == []
    assert stand_in.MODULE.BuilderFlag.TF32 in config.cleared, "fp32 must not be TensorFloat-32"
    assert artifact.executed["precision"]["float32"] >= 4
    assert [spec.name for spec in artifact.signature.outputs] == [spec.name for spec in model.signature.outputs]

    arrays = np.load(Path(samples.path) / "inputs" / "features.npy")
    with TensorRt().open(artifact, 1) as session:
        one = session.run({"features": arrays[:1]})
        many = session.run({"features": arrays[:8]})
        assert one["label"].tolist() == many["label"][:1].tolist()
        assert many["probabilities"].shape == (8, 4)
        np.testing.assert_allclose(one["probabilities"], many["probabilities"][:1], rtol=1e-6)
        with pytest.raises(UsageError, match="outside of the shapes"):
            session.run({"features": arrays[:9]})
    with pytest.raises(UsageError, match="closed"):
        session.run({"features": arrays[:1]})
    assert stand_in.STACK == []
    assert not any(stand_in.MEMORY.values()), "device memory was not given back"

    # The next build starts from what this one timed, and its artifact says so by its bytes.
    again = TensorRt().compile(model, FP32, where, "job", tmp_path / "second")
    assert (tmp_path / "second" / TIMINGS).read_bytes() == (tmp_path / "first" / TIMINGS).read_bytes() + b"timed"
    assert again.digest != artifact.digest
    pinned = target(options={"tensorrt": {"timing_cache": str(tmp_path / "first" / TIMINGS)}})
    TensorRt().compile(model, FP32, pinned, "job", tmp_path / "third")
    assert (tmp_path / "third" / TIMINGS).read_bytes() == (tmp_path / "second" / TIMINGS).read_bytes()


def test_timings_of_two_machines_are_put_together(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: of what two machines timed, one's would be lost; or a damaged file would end the build."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "cache"))
    model, _ = models.perceptron(tmp_path / "model")
    key = TensorRt().records_key(target(), {"tensorrt": "11.4.0.106"})
    assert key is not None
    folder = tuning_records.folder_of(key)
    for content in (b"short", b"much longer"):  # the stand-in's union is the longer
        name = tuning_records.name_of("timings", "cache", content)
        assert TensorRt().refuse_record(name, content) is None
        tuning_records.write(folder, name, content)
    (folder / tuning_records.name_of("timings", "cache", b"the longest of all")).write_bytes(
        b"damaged as it came, and longest"
    )
    TensorRt().compile(model, FP32, target(), "job", tmp_path / "out")
    made = (tmp_path / "out" / TIMINGS).read_bytes()
    assert made == b"much longer" + b"timed" * 2
    assert tuning_records.name_of("timings", "cache", made) in tuning_records.names_in(folder)
    assert TensorRt().refuse_record("notes-0.txt", b"x")
    assert TensorRt().records_key(target(options={"tensorrt": {"timing_cache": "a"}}), {}) is None


def test_a_precision_that_was_not_taken_is_an_error(stand_in: Any, tmp_path: Path) -> None:
    """Broken: an engine that runs in float32 would be shipped as fp16."""
    model, _ = models.perceptron(tmp_path / "model")
    with pytest.raises(NothingCompiledError, match="asked for fp16, and no layer"):
        TensorRt().compile(model, Scheme(precision="fp16", name="fp16"), target(), "job", tmp_path / "out")


def test_the_node_that_tensorrt_refuses_is_named(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: of a graph that TensorRT does not take a user would read "Could not parse ONNX correctly"."""
    model, _ = models.perceptron(tmp_path / "model")
    refused = types.SimpleNamespace(
        desc=lambda: "Invalid Node - back\n  input has type Int32 but must have type Int8",
        node_name=lambda: "back",
        node_operator=lambda: "DequantizeLinear",
    )
    exception = importlib.import_module("polygraphy.exception").PolygraphyException

    def refuse(*_: Any, **__: Any) -> None:
        raise exception("Could not parse ONNX correctly")

    monkeypatch.setattr("polygraphy.backend.trt.network_from_onnx_path", refuse)
    monkeypatch.setattr(stand_in.Parser, "num_errors", 1)
    monkeypatch.setattr(stand_in.Parser, "get_error", lambda self, index: refused, raising=False)
    monkeypatch.setattr(stand_in.Parser, "parse_from_file", lambda self, path: False)
    with pytest.raises(NothingCompiledError) as caught:
        TensorRt().compile(model, FP32, target(), "job", tmp_path / "out")
    assert caught.value.problem == (
        "TensorRT can't read the graph: DequantizeLinear 'back': Invalid Node - back; input has type Int32 but must "
        "have type Int8"
    )


def test_an_engine_is_called_from_any_thread(stand_in: Any, tmp_path: Path) -> None:
    """Broken: MLflow's scoring server calls from the threads of a pool, in which no CUDA context is current, and each
    request fails; or the thread that loaded the model keeps the context, and its end is that of the process."""
    model, samples = models.perceptron(tmp_path / "model")
    artifact = TensorRt().compile(model, FP32, target(batch_sizes=(1, 8)), "job", tmp_path / "out")
    rows = np.load(Path(samples.path) / "inputs" / "features.npy")[:2]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        opened = TensorRt().open(artifact, 1)
        session = one.submit(opened.__enter__).result()
        assert stand_in.STACK == []
        here, there = session.run({"features": rows}), other.submit(session.run, {"features": rows}).result()
        np.testing.assert_array_equal(here["probabilities"], there["probabilities"])
        other.submit(opened.__exit__, None, None, None).result()
    assert stand_in.STACK == []
    assert not any(stand_in.MEMORY.values()), "device memory was not given back"


def test_an_engine_of_another_version_is_named(stand_in: Any, tmp_path: Path) -> None:
    """Broken: a user would see that None has no attribute."""
    model, _ = models.perceptron(tmp_path / "model")
    artifact = TensorRt().compile(model, FP32, target(), "job", tmp_path / "out")
    (tmp_path / "out" / artifact.entry).write_bytes(b"other")
    with pytest.raises(NothingCompiledError, match="another version, or for another GPU"), TensorRt().open(artifact, 1):
        pass
    assert stand_in.STACK == []


def test_it_names_members_that_the_bindings_have() -> None:
    """Broken: it would fail at the first build, on a machine that we have not got. (The type checker sees the methods;
    this, the module's names.)"""
    stub = ast.parse((ROOT / "typings" / "tensorrt" / "__init__.pyi").read_text())
    known = {node.name for node in stub.body if isinstance(node, ast.ClassDef)} | {"__version__"}
    members = {
        node.name: {
            t.id
            for part in node.body
            if isinstance(part, ast.Assign | ast.AnnAssign)
            for t in ast.walk(part)
            if isinstance(t, ast.Name)
        }
        for node in stub.body
        if isinstance(node, ast.ClassDef)
    }
    source = ast.parse(Path(backend_module.__file__).read_text())
    seen = 0
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trt":
            assert node.attr in known, node.attr
            seen += 1
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            owner = node.value
            if isinstance(owner.value, ast.Name) and owner.value.id == "trt" and members[owner.attr]:
                assert node.attr in members[owner.attr], f"{owner.attr}.{node.attr}"
    assert seen >= 8


# --------------------------------------------------------------------------------------------------------- the real one


@pytest.mark.gpu
@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_it_conforms(make: Any, tmp_path: Path) -> None:
    """Broken: anything that the kit asks of a backend."""
    backend = TensorRt()
    if (reason := plugins.missing(backend) or backend.refuse_target(target())) is not None:
        pytest.skip(f"never run by us: {reason}")
    model, samples = make(tmp_path / "model")
    findings = check_backend(backend, model, samples, tmp_path / "work")
    assert findings
    assert [f"{f.case} {f.check}: {f.reason}" for f in findings if not f.passed] == []


def _with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "hardware", lambda: _machine(("NVIDIA H100 (driver 570.1)",)))


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "hardware", lambda: _machine(()))


def _machine(accelerators: tuple[str, ...]) -> Hardware:
    return Hardware(system="Linux", machine="x86_64", cpu="cpu", features=(), cores=2, accelerators=accelerators)
