"""Core ML: what the saved package says, its schemes, its shapes, and why it can't be run here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends import coreml
from compile_stage.backends.coreml import CoreMl
from compile_stage.core import plugins
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.testing import models, programs

TARGET = Target(name="phone", device="apple", batch_sizes=(1, 3))
NEW = replace(TARGET, options={"coreml": {"minimum_deployment_target": "iOS18"}})

converts = [
    pytest.mark.compilers,
    pytest.mark.skipif(not plugins.importable(CoreMl()), reason="coreml needs coremltools and torch"),
]


def scheme(name: str, target: Target = TARGET) -> Scheme:
    (found,) = (one for one in CoreMl().schemes(target, name.partition("-")[0]) if one.name == name)
    return found


def wide(folder: Path) -> tuple[PortableModel, SampleSet]:
    """Two linear layers, of which one has 4096 weights: x [64] → y [8]."""
    g = models.Graph(3)
    hidden = g.add("Relu", g.add("Gemm", "x", g.weight(64, 64), g.weight(64, scale=0.1)))
    g.add("Gemm", hidden, g.weight(64, 8), g.weight(8, scale=0.1), name="y")
    rows = g.random.standard_normal((16, 64)).astype(np.float32)
    return models.write(g, folder, {"x": rows}, {"y": ("float32", ("batch", 8))})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> PortableModel:
    folder = tmp_path_factory.mktemp("wide")
    return programs.to_program(wide(folder / "model")[0], folder / "program")


@pytest.fixture(scope="module")
def whole(program: PortableModel, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return CoreMl().compile(program, scheme("fp32"), TARGET, "job", tmp_path_factory.mktemp("artifact") / "a")


def description(artifact: Artifact) -> Any:
    return coreml._read_program(Path(artifact.path) / "model.mlpackage").description


class TestConverted:
    pytestmark = converts

    def test_the_package_is_read_back(self, whole: Artifact) -> None:
        """Broken: a report would not say what was converted, or would say that it ran."""
        assert whole.executed["ops"]["linear"] == 2
        assert whole.executed["precision"]["matrix_and_convolution"] == {"FLOAT32": 2}
        assert set(whole.executed["providers"]) == {"ML program, not run"}

    @pytest.mark.parametrize(
        ("name", "target", "stored", "smaller"),
        [
            ("fp16", TARGET, "FLOAT16", 1.5),
            ("int8-weights", TARGET, "INT8", 2.2),
            ("int8-palette", TARGET, "UINT8", 2.0),
            ("int4-palette", TARGET, "UINT8", 3.0),
            ("int8-weights", NEW, "INT8", 2.2),
            ("int4-weights", NEW, "INT4", 3.0),
            ("int4-palette", NEW, "UINT4", 3.0),
        ],
    )
    def test_weights_are_in_the_precision_that_was_asked_for(
        self,
        name: str,
        target: Target,
        stored: str,
        smaller: float,
        program: PortableModel,
        whole: Artifact,
        tmp_path: Path,
    ) -> None:
        """Broken: a package called int8 would hold floats, and be as large as before."""
        artifact = CoreMl().compile(program, scheme(name, target), target, "job", tmp_path / "artifact")
        precision = artifact.executed["precision"]
        assert precision["matrix_and_convolution"] == {"FLOAT16": 2}
        assert precision["weights"][stored] >= 1, precision
        assert precision["compressed_weights"] == (0 if name == "fp16" else 1)
        assert weights_of(whole) / weights_of(artifact) > smaller
        kinds = [
            coreml._array_type(one.type.multiArrayType.dataType)
            for one in (*description(artifact).input, *description(artifact).output)
        ]
        assert kinds == ["FLOAT32", "FLOAT32"]  # at the door the source's types stay

    def test_same_model_same_bytes_and_no_place_in_them(
        self, program: PortableModel, whole: Artifact, tmp_path: Path
    ) -> None:
        """Broken: each run would publish another digest, or tell the folder that it was made in."""
        again = CoreMl().compile(program, scheme("fp32"), TARGET, "job", tmp_path / "artifact")
        assert again.digest == whole.digest
        for file in Path(again.path).rglob("*"):
            if file.is_file():
                assert str(tmp_path).encode() not in file.read_bytes()
        manifest = json.loads((Path(again.path) / again.entry).read_text())
        assert manifest["rootModelIdentifier"] in manifest["itemInfoEntries"]

    def test_coremltools_reads_the_settled_package(self, whole: Artifact) -> None:
        """Broken: the package whose identifiers we wrote anew would not be one any more."""
        import coremltools

        with coreml._quiet():
            loaded = coremltools.models.MLModel(str(Path(whole.path) / "model.mlpackage"), skip_model_load=True)
        assert loaded.get_spec().specificationVersion == 8  # iOS 17
        assert [one.name for one in loaded.get_spec().description.input] == ["x"]

    def test_two_integer_inputs_keep_their_names_and_their_use(self, tmp_path: Path) -> None:
        """Broken: tokens and mask have one shape and one type, and could change places without any error."""
        model, _ = models.transformer(tmp_path / "model")
        model = programs.to_program(model, tmp_path / "program")
        for target, flexible in ((TARGET, "shapeRange"), (NEW, "enumeratedShapes")):
            artifact = CoreMl().compile(model, scheme("fp32"), target, "job", tmp_path / flexible)
            for one in description(artifact).input:
                assert one.type.multiArrayType.WhichOneof("ShapeFlexibility") == flexible
            assert any("range from 1 to 3" in note for note in artifact.notes) == (target is TARGET)
            whole = coreml._read_program(Path(artifact.path) / "model.mlpackage").mlProgram.functions["main"]
            operations = whole.block_specializations[whole.opset].operations
            (mask,) = (one for one in operations if one.type == "cast")  # the mask alone becomes a float
            assert mask.inputs["x"].arguments[0].name == "attention_mask"
        assert artifact.signature == model.signature
        with pytest.raises(IntegrityError, match="does not take the shape"):
            coreml._demand_signature(description(artifact), model.signature, replace(TARGET, batch_sizes=(2,)))

    def test_a_lost_output_is_an_error(self, whole: Artifact) -> None:
        """Broken: a renamed or dropped output would be found by whoever calls the app."""
        spec = TensorSpec(name="z", dtype="float32", shape=("batch", 8))
        signature = replace(whole.signature, outputs=(*whole.signature.outputs, spec))
        with pytest.raises(IntegrityError, match="outputs changed on the way"):
            coreml._demand_signature(description(whole), signature, TARGET)

    def test_weights_too_small_to_compress_are_told(self, tmp_path: Path) -> None:
        """Broken: an int8 package without any int8 weight would be called int8."""
        model, _ = models.perceptron(tmp_path / "model")
        model = programs.to_program(model, tmp_path / "program")
        with pytest.raises(NothingCompiledError, match="compressed no weight"):
            CoreMl().compile(model, scheme("int8-weights"), TARGET, "job", tmp_path / "artifact")

    @pytest.mark.skipif(sys.platform == "darwin", reason="here it can be run")
    def test_elsewhere_it_says_why_it_can_not_be_run(self, whole: Artifact) -> None:
        """Broken: a job would end in a trace of coremltools, or a package that nobody ran would count as run."""
        with pytest.raises(NothingCompiledError, match="predicts on macOS only"), CoreMl().open(whole, 1):
            pass
        assert "Core ML predicts on macOS only" in whole.not_runnable_here

    @pytest.mark.macos
    @pytest.mark.skipif(sys.platform != "darwin", reason="Core ML predicts on macOS only")
    @pytest.mark.parametrize("name", ["fp32", "fp16", "int8-weights"])
    def test_it_predicts_as_the_reference(self, name: str, tmp_path: Path) -> None:
        """Broken: the conversion would be wrong."""
        from onnx.reference import ReferenceEvaluator

        model, samples = wide(tmp_path / "model")
        rows = np.load(Path(samples.path) / "inputs" / "x.npy")[:3]
        (wanted,) = ReferenceEvaluator(model.path).run(None, {"x": rows})
        portable = programs.to_program(model, tmp_path / "program")
        artifact = CoreMl().compile(portable, scheme(name), TARGET, "job", tmp_path / "artifact")
        with CoreMl().open(artifact, 1) as session:
            np.testing.assert_allclose(session.run({"x": rows})["y"], wanted, rtol=0.05, atol=0.05)
            with pytest.raises(UsageError, match="batches of 1, 3"):
                session.run({"x": rows[:2]})


def weights_of(artifact: Artifact) -> int:
    return (Path(artifact.path) / "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size


def refused(*inputs: TensorSpec, target: Target = TARGET) -> str:
    signature = Signature(inputs=inputs, outputs=())
    model = PortableModel(path="", digest="", form="torch-export", opset=0, precision="fp32", signature=signature)
    return str(CoreMl().refuse(model, target))


def test_what_it_can_not_take_is_refused_in_words() -> None:
    """Broken: coremltools would rename, retype or fix it, and the job would fail after the conversion."""

    def spec(name: str = "x", dtype: str = "float32", shape: tuple[Any, ...] = ("batch", 4)) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    assert refused(spec()) == "None"
    assert "'x' is bool" in refused(spec(dtype="bool"))
    assert "would rename 'x.1'" in refused(spec(name="x.1"))
    assert "'length' in x" in refused(spec(shape=("batch", "length")))
    assert "device apple" in str(CoreMl().refuse_target(replace(TARGET, device="cpu")))
    for options, word in (
        ({"compute_units": "toaster"}, "compute_units can't be 'toaster'"),
        ({"minimum_deployment_target": "iOS9"}, "can't be 'iOS9'"),
        ({"fast": True}, "no option 'fast'"),
    ):
        assert word in str(CoreMl().refuse_target(replace(TARGET, options={"coreml": options})))


def test_schemes_are_those_of_the_system_that_is_asked_for() -> None:
    """Broken: blocks of 4 bits would be asked of a system that has none, and what is lacking would not be explained."""
    assert [one.name for one in CoreMl().schemes(TARGET, "int4")] == ["int4-palette"]
    assert [one.name for one in CoreMl().schemes(NEW, "int4")] == ["int4-palette", "int4-weights"]
    assert CoreMl().schemes(replace(TARGET, device="cpu"), "fp32") == ()
