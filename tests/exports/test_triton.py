"""A Triton model repository: what its configuration says, and that the exported files answer as the version does."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports_of import exported, with_manifest

from compile_stage import api, flavor
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_file, digest_tree, list_tree
from compile_stage.core.errors import GateError, IntegrityError, MissingDependencyError, UsageError
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.exports import pbtxt, run, stand_in, triton, triton_config
from compile_stage.exports.folder import common_differences
from compile_stage.exports.version import Version, open_version, plain_name
from compile_stage.serving.manifest import check_integrity
from compile_stage.serving.missing_numbers import MissingNumbers
from compile_stage.serving.refused_values import RefusedValues
from compile_stage.serving.shape_limits import ShapeLimits
from compile_stage.serving.taken_values import TakenValues

pytestmark = [  # what MLflow says of its own type hints, and its queries
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


STORED = api.ExportOptions(storage_uri="s3://models/1")


def parsed(text: str) -> Any:
    """The configuration as Triton's own schema reads it."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(text, model_config_pb2.ModelConfig())


# ---------------------------------------------------------------------------------------------------------- end to end


def test_an_artifact_of_onnx_runtime_is_exported_as_it_was_proven(versions: Any, tmp_path: Path) -> None:
    """Broken: Triton would refuse the repository, run other sizes or threads than were proven, or another file."""
    made = exported(versions.native, "triton", tmp_path / "repository")
    home = tmp_path / "repository" / "perceptron-compiled"
    config = parsed((home / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("perceptron-compiled", "onnxruntime", 8)
    assert [(one.name, one.data_type, list(one.dims)) for one in (*config.input, *config.output)] == [
        ("x", 11, [8]),  # TYPE_FP32
        ("y", 11, [3]),
    ]
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    assert config.parameters["compile_stage.artifact_digest"].string_value == made.artifact_digest
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]  # KIND_CPU
    assert [(warm.batch_size, warm.inputs["x"].zero_data) for warm in config.model_warmup] == [(1, True), (8, True)]
    number = versions.native.rpartition("/")[2]
    assert digest_tree(home / number) == made.artifact_digest
    assert config.default_model_filename in list_tree(home / number)
    check_integrity(home / "compile-stage" / "bundle", beside=True)
    assert made.proven
    assert "64 validation samples in batches of 1 and 8" in made.said
    assert "to the last bit" in made.said
    assert any("any size up to 8 as it is; proven were 1, 2, 4, 7, 8" in line for line in made.differs)
    document = json.loads((tmp_path / "repository" / "export.json").read_text())
    held = {name: digest_file(tmp_path / "repository" / name) for name in document["files"]}
    assert held == document["files"]
    assert set(list_tree(tmp_path / "repository")) == {*document["files"], "export.json"}
    assert document["check"]["proven"]
    assert made.said in (tmp_path / "repository" / "README.md").read_text()
    # fewer samples than a batch has rows are repeated, as where the published artifact answers them
    np.save(tmp_path / "x.npy", versions.rows[:3])
    task = {
        "config": pbtxt.read((home / "config.pbtxt").read_text()), "home": str(home / number), "sizes": [8],
        "inputs": {"x": str(tmp_path / "x.npy")}, "results": str(tmp_path),
    }  # fmt: skip
    answer = np.load(stand_in.answer(task)["outputs"]["y"]["8"])
    np.testing.assert_allclose(answer, versions.answers[np.arange(8) % 3], rtol=1e-4, atol=1e-4)
    assert not list(tmp_path.glob(".part-*"))


def test_what_the_configuration_can_not_say_runs_on_the_python_backend(versions: Any, tmp_path: Path) -> None:
    """Broken: the artifact would be served with other options of the runtime than it was proven with."""
    made = exported(versions.scripted, "triton", tmp_path / "repository")
    home = tmp_path / "repository" / "perceptron-compiled"
    config = parsed((home / "config.pbtxt").read_text())
    assert (config.backend, config.default_model_filename) == ("python", "model.py")
    assert any("no place for the session's session.disable_prepacking" in line for line in made.differs)
    assert made.proven
    assert "`model.py` with a stand-in" in made.said
    # a request that does not fit is that request's error, not the model's end
    plain = pbtxt.read((home / "config.pbtxt").read_text())
    call = stand_in.with_python(plain, home / versions.scripted.rpartition("/")[2])
    np.testing.assert_allclose(call({"x": versions.rows[:3]})["y"], versions.answers[:3], rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="does not fit x: float32"):
        call({"x": versions.rows[:3, :5]})


def test_many_columns_are_named_in_one_line() -> None:
    """Broken: the README of a model with a matrix of 300 columns names them one by one, and nobody reads on."""
    for refused, named in (
        (range(300), "columns 0 to 299"),
        ([0, 1, 2, 5, 7, 8], "columns 0 to 2, 5, 7 to 8"),
        ([4], "column 4"),
    ):
        rule = MissingNumbers([{"input": "x", "columns": list(refused), "reason": "the original refuses it"}])
        assert triton._refused_missing(RefusedValues(rule, TakenValues([]))) == f"input 'x' ({named})"


@pytest.mark.slow
def test_what_the_original_does_not_take_is_refused_as_predict_does_or_said(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a server answers what the published model refuses, since the original does, and nobody is told."""
    rule = MissingNumbers([{"input": "x", "columns": [2, 5], "reason": "the original refuses it"}])
    taken = TakenValues([{"input": "x", "columns": [0], "values": [1.0, 5.0], "reason": "the original does"}])
    for home in (flavor, triton):
        monkeypatch.setattr(home, "refused_values_of", lambda *_: RefusedValues(rule, taken))
    limits = ShapeLimits({"x": [None, 9]}, {}, (), ['size("x", 1) % 2 == 0'])
    monkeypatch.setattr(triton.ShapeLimits, "of", lambda *_: limits)
    made = exported(versions.native, "triton", tmp_path / "native")
    assert any('only where `size("x", 1) <= 9` and `size("x", 1) % 2 == 0`. predict()' in line for line in made.differs)
    assert any(
        "with a missing number (NaN) in input 'x' (columns 2, 5), and the answer is not proven" in line
        for line in made.differs
    )
    assert any(
        "column 0 of input 'x' takes 1, 5. Triton answers a request with other values too" in line
        for line in made.differs
    )
    made = exported(versions.scripted, "triton", tmp_path / "scripted")
    assert not any("NaN" in line for line in made.differs)
    home = tmp_path / "scripted" / "perceptron-compiled"
    call = stand_in.with_python(
        pbtxt.read((home / "config.pbtxt").read_text()), home / versions.scripted.rpartition("/")[2]
    )
    rows = versions.rows[:3].copy()
    with pytest.raises(RuntimeError, match=r"column 0 of input 'x' holds .*, and takes 1, 5: the original does"):
        call({"x": rows})
    rows[:, 0] = 5.0
    rows[1, 3] = np.nan
    assert np.isnan(call({"x": rows})["y"][1]).any()
    rows[1, 5] = np.nan
    with pytest.raises(RuntimeError, match=r"column 5 of input 'x' holds a missing number \(NaN\), which is refused"):
        call({"x": rows})


def test_an_export_that_answers_otherwise_is_refused(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the check would pass whatever lies in the repository."""
    import onnx
    from onnx import numpy_helper

    def write(version: Version, options: Any, folder: Path) -> Any:
        written = triton.write(version, options, folder)
        file = folder / written.served_by["model"] / version.number / "model.onnx"
        model = onnx.load(file)
        weights = numpy_helper.to_array(model.graph.initializer[0])
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights * 1.01, model.graph.initializer[0].name))
        file.unlink()  # a link to the bundle's
        onnx.save(model, file)
        return written

    monkeypatch.setitem(run._WRITERS, "triton", write)
    with pytest.raises(GateError, match="answers otherwise in batches of 1: output 'y' is off by"):
        exported(versions.native, "triton", tmp_path / "repository")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_was_changed_or_never_passed_is_not_exported(versions: Any, tmp_path: Path) -> None:
    """Broken: a file that somebody changed in the registry, or a version that failed, would be served elsewhere."""
    bundle = tmp_path / "bundle"
    shutil.copytree(Path(versions.native.removeprefix("folder:")) / "model", bundle)
    (bundle / "registered_model_meta").write_text("model_name: as MLflow writes it into each download\n")
    plain = exported(str(bundle), "kserve", tmp_path / "plain", check=False, options=STORED)
    assert not (Path(plain.folder) / "bundle" / "registered_model_meta").exists()
    shutil.rmtree(plain.folder)
    with_manifest(bundle, lambda manifest: {**manifest, "job": {**manifest["job"], "gates": []}})
    with pytest.raises(GateError, match="so it is not exported"):
        exported(str(bundle), "triton", tmp_path / "failed")
    (bundle / "data" / "artifact" / "model.onnx").write_bytes(b"another")
    with pytest.raises(IntegrityError, match=r"model\.onnx is not what was published"):
        exported(str(bundle), "triton", tmp_path / "changed")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_only_an_export_is_replaced_and_only_when_that_is_asked_for(versions: Any, tmp_path: Path) -> None:
    """Broken: `--out ~` with --force would delete a home, or a second export lose the first."""
    out = tmp_path / "repository"
    exported(versions.native, "triton", out, check=False)
    (out / "left-over").touch()
    with pytest.raises(UsageError, match="there is an export already"):
        exported(versions.native, "triton", out, check=False)
    made = exported(versions.native, "triton", out, check=False, force=True)
    assert not (out / "left-over").exists()
    assert (made.proven, made.said) == (False, "It was not checked, as the option says.")
    (out / "export.json").unlink()
    with pytest.raises(UsageError, match="no export of ours"):
        exported(versions.native, "triton", out, check=False, force=True)
    assert (out / "README.md").is_file()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="a link that leads nowhere"):
        exported(versions.native, "triton", link, check=False)


def test_an_export_does_not_lie_in_its_bundle(context: Context, versions: Any, tmp_path: Path) -> None:
    """Broken: a bundle is copied into itself until the disk is full, as by `export .` in its folder."""
    bundle = tmp_path / "bundle"
    shutil.copytree(open_version(context, versions.native, None).published.folder, bundle)
    before = list_tree(bundle)
    for out in (bundle / "out", tmp_path / "other" / ".." / "bundle" / "data" / "out"):
        with pytest.raises(UsageError, match="can't lie in the bundle"):
            exported(str(bundle), "triton", out, check=False)
    assert list_tree(bundle) == before


def test_options_of_another_form_are_refused(versions: Any, tmp_path: Path) -> None:
    """Broken: a mistyped form would be a traceback, and --push without an effect."""
    with pytest.raises(UsageError, match="there is no form 'tritn'") as caught:
        exported(versions.native, "tritn", tmp_path / "out")
    assert "did you mean 'triton'?" in caught.value.fix
    with pytest.raises(UsageError, match="--push and --plain-http are of --to oci"):
        exported(versions.native, "triton", tmp_path / "out", options=api.ExportOptions(push="a.example/b"))
    with pytest.raises(UsageError, match="no --storage-uri was given") as caught:
        exported(versions.native, "kserve", tmp_path / "out")
    assert "add --storage-uri" in caught.value.fix


def test_a_push_without_its_package_is_refused_before_anything_is_written(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the command ended as "a bug of ours", and left its folder behind."""
    monkeypatch.setattr("compile_stage.registry.oci.OciRegistry.requires", ("surely_not_installed",))
    with pytest.raises(MissingDependencyError) as caught:
        exported(versions.native, "oci", tmp_path / "out", options=api.ExportOptions(push="a.example/b"))
    assert 'pip install "compile-stage[oci]"' in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_settings_of_a_policy_need_a_policy() -> None:
    """Broken: `verify URI --set ...` said "verified", and the stricter gate was never applied."""
    with pytest.raises(UsageError, match="none is named"):
        api.verify("models:/a/1", sets=["performance.min_speedup=1000"])


# --------------------------------------------------------------------------------------------------- the configuration


def changed(version: Version, **changes: Any) -> Version:
    """The version as if its manifest said something else: parts of its artifact, and whole fields."""
    artifact = {**version.manifest["artifact"], **changes.pop("artifact", {})}
    manifest = {**version.manifest, "artifact": artifact, **changes}
    return replace(version, published=replace(version.published, manifest=manifest))


@pytest.mark.parametrize(
    ("changes", "backend", "why"),
    [
        ({}, "onnxruntime", ""),
        ({"artifact": {"options": {"graph_optimization": "extended", "memory_arena": False}}}, "onnxruntime", ""),
        ({"artifact": {"options": {"provider": "cuda"}}}, "python", "proven with the provider cuda"),
        ({"artifact": {"options": {"min_nodes_share": 0.9}}}, "python", "no place for its options min_nodes_share"),
        ({"artifact": {"backend": "torchscript"}}, "python", "no backend for artifacts of torchscript"),
        ({"artifact": {"backend": "tensorrt"}}, "tensorrt", ""),
        (
            {"artifact": {"backend": "openvino", "options": {"hint": "f32"}}, "hardware": {"features": ["avx2"]}},
            "openvino",
            "",
        ),
        (
            {"artifact": {"backend": "openvino", "options": {"hint": "f32"}}, "hardware": {"features": ["amx_bf16"]}},
            "python",
            "OpenVINO computes in that unless it is asked for float32",
        ),
        ({"artifact": {"backend": "openvino", "options": {"hint": "f16"}}}, "python", "the precision f16"),
        (
            {
                "artifact": {"backend": "openvino", "options": {"hint": "f32", "requests": 2}},
                "hardware": {"features": ["avx2"]},
            },
            "python",
            "does not share the rows of a batch",
        ),
        ({"answer": {"text": {"task": "classify"}}}, "python", "predict() does more than the graph"),
    ],
    ids=[
        "plain",
        "options",
        "cuda",
        "unknown",
        "torchscript",
        "tensorrt",
        "openvino",
        "bf16",
        "f16",
        "shared-batch",
        "text",
    ],
)
def test_tritons_own_backend_is_used_only_where_it_can_be_told_everything(
    native: Version, changes: dict[str, Any], backend: str, why: str
) -> None:
    """Broken: Triton would compute in another precision, or with other options, than what was proven."""
    version = changed(native, **changes)
    choice = triton_config.choose(version)
    assert choice.backend == backend
    assert why in choice.why
    assert bool(why) == bool(choice.why)
    config = parsed(pbtxt.write(triton_config.configure(version, choice, "m")))
    assert config.backend == backend
    if changes.get("artifact", {}).get("options", {}).get("graph_optimization") == "extended":
        assert config.optimization.graph.level == 1
        assert config.parameters["enable_mem_arena"].string_value == "0"


@pytest.mark.parametrize(
    ("artifact", "parameter"),
    [
        ({"options": {"threads": 1}}, "intra_op_thread_count"),
        ({"backend": "openvino", "options": {"config": {"INFERENCE_NUM_THREADS": 1}}}, "INFERENCE_NUM_THREADS"),
    ],
)
def test_a_model_that_was_proven_on_fewer_threads_has_these(
    native: Version, artifact: dict[str, Any], parameter: str
) -> None:
    """Broken: a small model, which is faster on one thread, is served on all that the target allows, or by Python."""
    version = changed(native, threads=4, hardware={"features": []}, artifact=artifact)
    choice = triton_config.choose(version)
    assert choice.backend == artifact.get("backend", "onnxruntime")
    config = parsed(pbtxt.write(triton_config.configure(version, choice, "m")))
    assert config.parameters[parameter].string_value == "1"


def test_requests_are_put_together_only_to_sizes_that_were_proven_and_pay(native: Version) -> None:
    """Broken: Triton would make batches of sizes that nobody proved, or wait for slower ones."""

    def batching(timing: dict[str, float], *, splits: bool = True) -> Any:
        timed = {size: {"p50_s": seconds} for size, seconds in timing.items()}
        version = changed(native, timing=timed, batches={"sizes": [1, 2, 4, 7, 8], "splits": splits})
        config = parsed(pbtxt.write(triton_config.configure(version, triton_config.choose(version), "m")))
        return config.dynamic_batching if config.HasField("dynamic_batching") else None

    found = batching({"1": 0.001, "4": 0.002, "8": 0.009, "16": 0.002})
    assert list(found.preferred_batch_size) == [4]  # 8 rows cost more than eight calls, and 16 was not proven
    assert found.max_queue_delay_microseconds == 1000
    assert batching({"1": 0.001, "8": 0.009}) is None
    assert batching({"8": 0.001}) is None
    assert batching({"1": 0.001, "4": 0.002}, splits=False) is None


def test_requests_wait_for_no_others_on_the_python_backend(native: Version) -> None:
    """Broken: `model.py` answers each request by itself, and each would wait first for others to be put together
    with."""
    timing = {"1": {"p50_s": 0.001}, "4": {"p50_s": 0.002}}
    version = changed(
        native,
        timing=timing,
        batches={"sizes": [1, 4], "splits": True},
        artifact={"backend": "torchscript"},
    )
    choice = triton_config.choose(version)
    config = triton_config.configure(version, choice, "m")
    assert choice.backend == "python"
    assert "dynamic_batching" not in config
    said = " ".join(triton._differences(version, choice, config))
    assert "Requests are not put together: `model.py` answers each by itself." in said


class _Repeats:
    """Stands for a published model of one text in a row, which it answers with."""

    signature = Signature(
        inputs=(TensorSpec(name="x", dtype="str", shape=("n", 1)),),
        outputs=(TensorSpec(name="y", dtype="str", shape=("n", 1)),),
    )

    def run(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"]}


@pytest.mark.parametrize("text", ["Köln", "Köln\0", "\0", ""])
def test_texts_reach_the_model_as_they_were_sent(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a text that ends with a zero byte is answered as another text; or the check of an export fails at a
    sample that is not ASCII."""
    monkeypatch.setattr(flavor, "CompiledModel", lambda *_, **__: _Repeats())
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = {
        "name": ["m"],
        "input": [{"name": ["x"], "dims": [1]}],
        "output": [{"name": ["y"], "dims": [1]}],
        "parameters": [
            {"key": ["threads"], "value": [{"string_value": ["1"]}]},
            {"key": ["on_hardware_mismatch"], "value": [{"string_value": ["ignore"]}]},
        ],
    }
    home = tmp_path / "m" / "1"
    home.mkdir(parents=True)
    shutil.copyfile(triton._MODEL_PY, home / "model.py")
    call = stand_in.with_python(config, home)
    sent = np.array([[text.encode()]], dtype=object)  # as Triton hands it over
    assert call({"x": sent})["y"].tolist() == [[text]]
    assert call({"x": np.array([[text]], dtype=object)})["y"].tolist() == [[text]]  # as a sample has it


def test_shapes_leave_the_batch_out_where_it_is_free(native: Version) -> None:
    """Broken: Triton would refuse a scalar for each row, or a graph with a fixed batch."""
    free = native.manifest["artifact"]["signature"]
    row = {"name": "z", "dtype": "int64", "shape": ["batch"]}
    version = changed(native, artifact={"signature": {**free, "outputs": [row]}})
    config = parsed(pbtxt.write(triton_config.configure(version, triton_config.choose(version), "m")))
    assert (list(config.output[0].dims), list(config.output[0].reshape.shape)) == ([1], [])
    assert config.output[0].HasField("reshape")
    fixed = {"name": "x", "dtype": "float32", "shape": [4, 8]}
    version = changed(native, artifact={"signature": {"inputs": [fixed], "outputs": free["outputs"]}})
    config = parsed(pbtxt.write(triton_config.configure(version, triton_config.choose(version), "m")))
    assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (0, [4, 8], [-1, 3])
    assert not config.HasField("dynamic_batching")


def test_the_openvino_backend_is_asked_with_its_own_padding(versions: Any, tmp_path: Path) -> None:
    """Broken: the check of an export for Triton's OpenVINO backend would run something else than that does."""
    import openvino

    model = Path(versions.native.removeprefix("folder:")) / "model" / "data" / "artifact" / "model.onnx"
    openvino.save_model(openvino.convert_model(model), tmp_path / "model.xml", compress_to_fp16=False)
    settings = {"INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
    text = pbtxt.write(
        {
            "max_batch_size": 8,
            "default_model_filename": "model.xml",
            "input": [{"name": "x", "dims": [8]}],
            "output": [{"name": "y", "dims": [3]}],
            "parameters": [{"key": key, "value": {"string_value": value}} for key, value in settings.items()],
        }
    )
    call = stand_in.with_openvino(pbtxt.read(text), tmp_path)
    answer = call({"x": versions.rows[:3]})["y"]
    assert answer.shape == (3, 3)
    scale = float(np.abs(versions.answers[:3]).max())
    assert float(np.abs(answer - versions.answers[:3]).max()) < 0.02 * scale  # bfloat16, where the CPU has it


def test_the_text_format_is_protobufs() -> None:
    """Broken: Triton would read another value than was meant, or the check another than Triton."""
    message = {
        "name": 'quoted "and" \\ ü\n',
        "max_batch_size": 8,
        "model_warmup": [{"name": "a", "batch_size": 1}, {"name": "b", "batch_size": 2}],
        "instance_group": [{"kind": pbtxt.Word("KIND_CPU"), "passive": True}],
        "parameters": [{"key": "k", "value": {"string_value": ""}}],
    }
    text = pbtxt.write(message)
    config = parsed(text)
    assert (config.name, config.max_batch_size) == (message["name"], 8)
    assert [warm.name for warm in config.model_warmup] == ["a", "b"]
    assert config.instance_group[0].passive
    again = pbtxt.read(text)
    assert again["name"] == [message["name"]]
    assert again["model_warmup"][1] == {"name": ["b"], "batch_size": [2]}
    assert pbtxt.read("# a comment\na: -1.5 b { c: TRUE_WORD }") == {"a": [-1.5], "b": [{"c": ["TRUE_WORD"]}]}
    for wrong in ("a {", "a 1", '"a": 1', "a: @\x00{"):
        with pytest.raises(UsageError, match="text of protobuf"):
            pbtxt.read(wrong)


def test_a_server_needs_the_key_that_the_policy_requires(native: Version) -> None:
    """Broken: a signed model would not load in the server, and nothing in the export would say why."""
    assert not any("COMPILE_STAGE_TRUST" in line for line in common_differences(native))
    required = common_differences(changed(native, signature_required=True))
    assert any("opens it only where COMPILE_STAGE_TRUST names" in line for line in required)


def test_names_fit_the_server() -> None:
    """Broken: Triton or Kubernetes would refuse the name of a model that a registry takes."""
    from compile_stage.exports.version import kubernetes_name

    assert plain_name("fraud model (2)") == "fraud-model-2"
    assert plain_name("äö") == "model"
    assert kubernetes_name("7 Fraud_Model") == "m-7-fraud-model"
    assert len(kubernetes_name("a" * 300)) == 63
