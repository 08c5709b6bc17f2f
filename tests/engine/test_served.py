"""A model is opened by the code that it carries, in a worker that goes on with the installed package."""

from __future__ import annotations

import json
import py_compile
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import target
from tiny_bundle import WEIGHTS, describe, save_bundle, write_onnx

from compile_stage import flavor
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Artifact, SampleSet
from compile_stage.core.sample_files import digest_of_samples, write_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.engine.local import LocalEngine
from compile_stage.measure import drafts
from compile_stage.measure.drafts import Drafts
from compile_stage.serving.manifest import read_manifest, sealed

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """As the backend made it; its folder is what the cache would hold."""
    write_onnx(tmp_path / "cache" / "artifact")
    made: Artifact = describe(tmp_path / "cache" / "artifact")["artifact"]
    return replace(made, path=str(tmp_path / "cache" / "artifact"))


@pytest.fixture
def draft(artifact: Artifact, tmp_path: Path) -> Iterator[Path]:
    """A model directory that a measurement lays out."""
    (tmp_path / "scratch").mkdir()
    with ExitStack() as stack:
        yield Path(Drafts(tmp_path / "scratch", stack).of(artifact, target(threads=1, batch_sizes=(4,)))["path"])


@pytest.fixture
def worker() -> Iterator[Worker]:
    engine = LocalEngine()
    with engine.worker("test", WorkerLimits(timeout_s=60.0)) as started:
        yield started
    engine.close()


def samples(folder: Path) -> SampleSet:
    (folder / "inputs").mkdir(parents=True)
    np.save(folder / "inputs" / "x.npy", np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))
    write_index(folder, {"x": "inputs/x.npy"}, labels=False, count=16)
    written = SampleSet(path=str(folder), digest="", count=16, real=True, source="file:x")
    return replace(written, digest=digest_of_samples(written))


def test_what_is_laid_out_is_what_is_published(draft: Path, artifact: Artifact, tmp_path: Path) -> None:
    """Broken: other code would be measured than the code that serves, or a large artifact would be copied for each
    candidate."""
    published = read_manifest(save_bundle(tmp_path))
    laid_out = read_manifest(draft)
    assert laid_out["code"] == published["code"]
    assert laid_out["files"] == published["files"]
    linked = draft / "data" / "artifact" / artifact.entry
    assert linked.stat().st_ino == (Path(artifact.path) / artifact.entry).stat().st_ino


def test_copies_of_installed_files_have_their_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each process that measures would compile fifty files first; or it would run the bytecode of another
    file."""
    installed, name = tmp_path / "installed", Path("core") / "tensors.py"
    for file in (name, Path("flavor.py")):
        (installed / file).parent.mkdir(parents=True, exist_ok=True)
        (installed / file).write_bytes((drafts._INSTALLED / file).read_bytes())
    (installed / "flavor.py").write_text("changed = True\n")
    compiled = [Path(py_compile.compile(str(installed / file))) for file in (name, Path("flavor.py"))]
    monkeypatch.setattr(drafts, "_INSTALLED", installed)
    package = drafts.loader_code("onnxruntime", tmp_path / "loaders") / "compile_stage"
    assert (package / name).stat().st_mtime_ns == (installed / name).stat().st_mtime_ns
    assert (package / "core" / "__pycache__" / compiled[0].name).read_bytes() == compiled[0].read_bytes()
    assert not (package / "__pycache__" / compiled[1].name).exists()


def test_it_answers_and_the_worker_goes_on_with_what_is_installed(draft: Path, worker: Worker, tmp_path: Path) -> None:
    """Broken: after the model's own code was loaded, the worker would look for its own functions there, where they are
    not."""
    given = samples(tmp_path / "samples")
    opened = worker.call("open_served", model={"path": str(draft)})
    assert opened["load_s"] > 0
    answers = worker.call("predict_batch", samples=given, batch_size=4, into=str(tmp_path / "answers"))
    inputs = np.load(tmp_path / "samples" / "inputs" / "x.npy")
    np.testing.assert_allclose(np.load(answers["y"]), inputs[:4] @ WEIGHTS, rtol=1e-5)
    assert worker.call("warm_up", samples=given, batch_size=4, seconds=0.0)["latency_s"] > 0
    assert worker.call("prepare_turn", samples=given, batch_size=4, calls=3, seed=0, checked_seed=None) == 3
    assert len(worker.call("time_turn", seconds=1.0)) == 3


def text_model(folder: Path) -> Path:
    """A model directory that answers with the text that it is given: s [batch, 1] -> label [batch, 1]."""
    from onnx import TensorProto, helper, save

    s, label = (helper.make_tensor_value_info(name, TensorProto.STRING, ["batch", 1]) for name in ("s", "label"))
    graph = helper.make_graph([helper.make_node("Identity", ["s"], ["label"])], "text", [s], [label])
    write_onnx(folder / "data" / "artifact")
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        folder / "data" / "artifact" / "model.onnx",
    )
    signature = Signature(
        inputs=(TensorSpec(name="s", dtype="str", shape=("batch", 1)),),
        outputs=(TensorSpec(name="label", dtype="str", shape=("batch", 1)),),
    )
    manifest = describe(folder / "data" / "artifact", signature=signature)
    manifest["artifact"] = replace(manifest["artifact"], signature=signature)
    manifest["answer"] = {**manifest["answer"], "outputs": ["label"]}
    flavor.save_model(folder / "data", folder / "model", manifest=manifest, source_model=None, signature=None)
    return folder / "model"


def test_a_model_that_answers_with_text_is_loaded_as_serving_loads_it(worker: Worker, tmp_path: Path) -> None:
    """Broken: no classifier with text labels could be promoted or exported: its answers, which ONNX Runtime gives as
    Python objects, were written to a file that takes none, and that was taken for a model that serving can't load."""
    model = text_model(tmp_path)
    texts = np.array([["yes"], ["no"], ["Zürich"], [""]])
    (tmp_path / "texts" / "inputs").mkdir(parents=True)
    np.save(tmp_path / "texts" / "inputs" / "s.npy", texts)
    write_index(tmp_path / "texts", {"s": "inputs/s.npy"}, labels=False, count=4)
    given = SampleSet(path=str(tmp_path / "texts"), digest="", count=4, real=True, source="file:s")
    given = replace(given, digest=digest_of_samples(given))
    answer = worker.call(
        "load_published", model={"path": str(model)}, samples=given, batch_size=4, into=str(tmp_path / "served")
    )
    assert np.load(answer["outputs"]["label"], allow_pickle=False).tolist() == texts.tolist()


def _reseal(model: Path) -> None:
    """Seal the digests of the code as it is now, so that only the code itself can be what is wrong."""
    file, code = model / "data" / "manifest.json", model / "code"
    names = [name for name in list_tree(code) if "__pycache__" not in name]
    digests = {f"code/{name}": digest_file(code / name) for name in names}
    file.write_text(json.dumps(sealed({**read_manifest(model), "code": digests})))


def test_what_is_missing_in_the_model_is_missing_though_it_is_installed(draft: Path, worker: Worker) -> None:
    """Broken: the installed package would fill what the published model lacks, and it would load nowhere else."""
    shutil.rmtree(draft / "code" / "compile_stage" / "plugin_support")
    _reseal(draft)
    with pytest.raises(UsageError, match=r"serving can't load it: ModuleNotFoundError: No module named 'compile_stage"):
        worker.call("open_served", model={"path": str(draft)})


def test_an_error_of_the_models_own_code_keeps_its_class_and_its_advice(draft: Path, worker: Worker) -> None:
    """Broken: of a file that was changed, the report would show a stack trace of somebody's loader."""
    file = draft / "data" / "artifact" / "model.onnx"
    content = file.read_bytes()
    file.unlink()  # a link to what the cache holds
    file.write_bytes(content + b"\0")
    with pytest.raises(IntegrityError, match=r"artifact/model.onnx is not what was published") as caught:
        worker.call("open_served", model={"path": str(draft)})
    assert caught.value.fix == "fetch the model again"
