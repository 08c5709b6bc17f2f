"""What is published loads, checks itself, and answers as its source did."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_bundle import SIGNATURE, WEIGHTS, save_bundle

from compile_stage import flavor
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, MissingDependencyError, UsageError
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.buckets import Router
from compile_stage.serving import saving
from compile_stage.serving.manifest import sealed
from compile_stage.serving.prediction_io import InputRefusedError, from_outputs, to_batch

pytestmark = [  # MLflow's own: its queries, and what `import mlflow.pyfunc` says of its own type hints
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(name: str = "model", **changes: Any) -> Path:
        return save_bundle(tmp_path, name, **changes)

    return save


@pytest.fixture
def source_model(tmp_path: Path) -> Path:
    """What a user logged: an sklearn-like model with a signature of columns and an input example."""
    from mlflow.models import Model, infer_signature
    from mlflow.models.utils import _save_example

    frame = pd.DataFrame({name: [0.5, 1.0] for name in "abcd"})
    model = Model(signature=infer_signature(frame, np.zeros(2)))
    folder = tmp_path / "source"
    folder.mkdir()
    _save_example(model, frame, str(folder))
    model.add_flavor("sklearn")
    model.save(str(folder / "MLmodel"))
    return folder


# ------------------------------------------------------------------------------------------------------ load and answer


def test_pyfunc_and_native_loading_answer_as_the_graph_does(save: Save) -> None:
    import mlflow

    path, x = save(), np.random.default_rng(0).random((5, 4), np.float32)
    model = mlflow.pyfunc.load_model(str(path))
    np.testing.assert_allclose(model.predict(x), x @ WEIGHTS, rtol=1e-5)
    np.testing.assert_allclose(model.predict(x.astype(np.float64)), x @ WEIGHTS, rtol=1e-5)
    framed = model.predict(pd.DataFrame(x, columns=list("abcd"), index=[3, 1, 4, 1, 5]))
    assert isinstance(framed, pd.DataFrame)
    assert list(framed.index) == [3, 1, 4, 1, 5]
    np.testing.assert_allclose(framed.to_numpy(), x @ WEIGHTS, rtol=1e-5)
    with flavor.load_model(str(path)) as native:
        np.testing.assert_allclose(native.run({"x": x})["y"], x @ WEIGHTS, rtol=1e-5)
        assert str(native.signature.inputs[0]) == "x: float32[batch, 4]"


def test_threads_share_one_model(save: Save) -> None:
    import mlflow

    model, wrong = mlflow.pyfunc.load_model(str(save())), []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x = rng.random((seed + 1, 4), np.float32)
            if not np.allclose(model.predict(x), x @ WEIGHTS, rtol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_session_is_called_by_two_threads_at_once(save: Save) -> None:
    """Broken: a backend that answers rightly call by call, which is all that a run proves, answers wrongly or crashes
    in MLflow's server, which calls from several threads."""

    class Alone:
        """A session with one place for its input."""

        def __init__(self, session: Any) -> None:
            self.session, self.held, self.overlapped = session, threading.Lock(), 0

        def run(self, batch: Any) -> Any:
            if not self.held.acquire(blocking=False):
                self.overlapped += 1
                return {}
            try:
                time.sleep(0.002)
                return self.session.run(batch)
            finally:
                self.held.release()

    with flavor.load_model(str(save())) as model:
        model._session = alone = Alone(model._session)
        x = np.ones((2, 4), np.float32)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: model.run({"x": x}), range(40)))
    assert alone.overlapped == 0
    assert all("y" in answer for answer in answers)


@pytest.mark.filterwarnings("ignore:Operation with range is deprecated:DeprecationWarning")  # MLflow on pandas 3
def test_the_sources_signature_and_example_are_kept(save: Save, source_model: Path) -> None:
    import mlflow
    from mlflow.models import Model

    answer = {"kind": "array", "outputs": ["y"], "columns": list("abcd"), "frame_in_frame_out": False}
    path = save(source_model=source_model, signature=SIGNATURE, answer=answer)
    saved = Model.load(str(path))
    assert saved.signature == Model.load(str(source_model)).signature
    assert (path / "input_example.json").is_file()
    model = mlflow.pyfunc.load_model(str(path))
    assert model.input_example.columns.tolist() == list("abcd")
    shuffled = pd.DataFrame({name: [float(i)] for i, name in enumerate("abcd")})[list("dbca")]
    answered = model.predict(shuffled)
    assert isinstance(answered, np.ndarray)
    np.testing.assert_allclose(answered, np.arange(4.0)[None] @ WEIGHTS)


def test_a_signature_that_does_not_describe_the_graph_is_replaced(save: Save, tmp_path: Path) -> None:
    from mlflow.models import Model, infer_signature

    source = tmp_path / "text"
    source.mkdir()
    Model(signature=infer_signature(["some text"], ["label"])).save(str(source / "MLmodel"))
    path = save(source_model=source, signature=SIGNATURE)
    assert Model.load(str(path)).signature.inputs.input_names() == ["x"]


@pytest.mark.filterwarnings("ignore:Operation with range is deprecated:DeprecationWarning")  # MLflow on pandas 3
@pytest.mark.parametrize("make", [np.asarray, lambda rows: pd.DataFrame(rows, columns=list("abcd")), np.ndarray.tolist])
def test_a_source_without_a_signature_is_published_without_one(save: Save, tmp_path: Path, make: Callable) -> None:
    """Broken: MLflow would refuse float64, data frames and lists, which the original answers."""
    import mlflow
    from mlflow.models import Model

    source = tmp_path / "unsigned"
    source.mkdir()
    Model().save(str(source / "MLmodel"))
    path = save(source_model=source, signature=SIGNATURE)
    assert Model.load(str(path)).signature is None
    rows = np.arange(8.0).reshape(2, 4)
    np.testing.assert_allclose(mlflow.pyfunc.load_model(str(path)).predict(make(rows)), rows @ WEIGHTS, rtol=1e-6)


def test_requirements_name_the_runtime_and_nothing_of_ours(save: Save) -> None:
    lines = (save() / "requirements.txt").read_text().split()
    assert sorted(line.partition("==")[0] for line in lines) == ["mlflow", "numpy", "onnxruntime"]
    assert f"onnxruntime=={version('onnxruntime')}" in lines


def test_a_custom_pyfuncs_constraints_come_with_its_requirements(save: Save, tmp_path: Path) -> None:
    """Broken: the requirements name a file that is not there, and MLflow can neither load the version nor make its
    environment."""
    from mlflow.models import Model
    from mlflow.utils.requirements_utils import _parse_requirements

    source = tmp_path / "source"
    source.mkdir()
    Model().save(str(source / "MLmodel"))
    (source / "requirements.txt").write_text("numpy<99\nsix\n-c constraints.txt\n")
    answer = {"python_model": {"attribute": "net", "parameters": ["x"], "outputs": ["y"], "form": "tensor"}}
    for name, constraints, left in (("some", "numpy<99\nsix<2\n", ["six<2"]), ("none", "numpy<99\n", [])):
        (source / "constraints.txt").write_text(constraints)
        path = save(name, source_model=source, answer=answer)
        parsed = list(_parse_requirements(str(path / "requirements.txt"), is_constraint=False))
        assert [each.req_str for each in parsed if each.is_constraint] == left
        named = sorted(each.req_str.partition("==")[0] for each in parsed if not each.is_constraint)
        assert named == ["mlflow", "numpy", "onnxruntime", "six"]


@pytest.mark.filterwarnings("ignore")
def test_a_custom_pyfuncs_own_settings_reach_its_code(save: Save, tmp_path: Path) -> None:
    """Broken: the threshold that a server sets for the original is dropped by the published version."""
    import mlflow

    class Model(mlflow.pyfunc.PythonModel):
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return self.net(model_input) > context.model_config["threshold"]

    model, source = Model(), tmp_path / "source"
    model.net = np.asarray
    settings = {"threshold": 20.0, "threads": 7}
    mlflow.pyfunc.save_model(str(source), python_model=model, model_config=settings, pip_requirements=["numpy"])
    answer = {"python_model": {"attribute": "net", "parameters": ["x"], "outputs": ["y"], "form": "tensor"}}
    path, x = str(save(source_model=source, answer=answer)), np.ones((1, 4), np.float32)
    assert mlflow.pyfunc.load_model(path).predict(x).tolist() == [[False, True, True]]  # of 18, 22, 26
    loaded = mlflow.pyfunc.load_model(path, model_config={"threshold": 25.0, "threads": 2})
    assert loaded.predict(x).tolist() == [[False, False, True]]


def test_the_environment_files_are_those_that_mlflow_writes(save: Save, tmp_path: Path) -> None:
    """Broken: `mlflow models serve --env-manager virtualenv` or `conda` would read something else than we mean."""
    import mlflow
    import yaml

    path, theirs = save(), tmp_path / "theirs"
    (tmp_path / "loader.py").write_text("def _load_pyfunc(path): ...\n")
    requirements = (path / "requirements.txt").read_text().split()
    mlflow.pyfunc.save_model(
        theirs, loader_module="loader", code_paths=[str(tmp_path / "loader.py")], pip_requirements=requirements
    )
    for name in ("conda.yaml", "python_env.yaml"):
        assert yaml.safe_load((path / name).read_text()) == yaml.safe_load((theirs / name).read_text()), name
    assert (path / "requirements.txt").read_text().split() == (theirs / "requirements.txt").read_text().split()


def test_nothing_is_saved_over_files_that_are_there(save: Save, tmp_path: Path) -> None:
    """Broken: what lay in the folder before would be published with the model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="over files that are there"):
        save()


def test_requirements_name_mlflow_where_only_mlflow_skinny_is_installed(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: our own extras install mlflow-skinny, and a model published from there would ask for no MLflow: its
    environment could not load it."""
    import mlflow

    from compile_stage.core import plugins

    installed = plugins.distribution

    def as_in_an_extra(name: str) -> Any:
        if name == "mlflow":
            raise plugins.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(plugins, "distribution", as_in_an_extra)
    assert f"mlflow=={mlflow.__version__}" in (save() / "requirements.txt").read_text().split()


def test_requirements_can_be_had_from_an_index_and_the_manifest_keeps_the_build(save: Save) -> None:
    """Broken: `torch==2.13.0+cpu` is in no public index, so no environment could be made; or another build than the
    proven one would load without a word."""
    pytest.importorskip("torch")
    path = save(runtime={"torch": "2.13.0+rocm"})
    assert "torch==2.13.0" in (path / "requirements.txt").read_text().split()
    # The package index's CUDA build is called 2.13.0, and says 2.13.0+cu130 of itself.
    with pytest.raises(IntegrityError, match=re.escape(f"torch: 2.13.0+rocm there, {version('torch')} here")):
        flavor.load_model(str(path))


@pytest.mark.parametrize("backend", sorted(flavor.BACKENDS))
def test_the_vendored_loader_of_every_backend_imports_with_the_standard_library_alone(
    backend: str, tmp_path: Path
) -> None:
    """Broken: a model published by `tvm` asked for filelock, which its requirements do not bring, and loaded nowhere
    but beside compile-stage."""
    saving.copy_loader(backend, tmp_path / "compile_stage")
    script = f"""
import os, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("compile_stage", "numpy"):
            raise ModuleNotFoundError(name + " is not there")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(tmp_path)!r})
from compile_stage import flavor
assert flavor.__file__.startswith({str(tmp_path)!r})
module, _, name = flavor.BACKENDS[{backend!r}].partition(":")
getattr(__import__(module, fromlist=[name]), name)()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


def test_what_the_session_refuses_reaches_the_client(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: of a batch larger than was compiled for, a client of the scoring server would read `unexpected error` and
    a stack trace."""
    import mlflow
    from mlflow.exceptions import MlflowException

    loaded = mlflow.pyfunc.load_model(str(save()))
    sizes = Router("tvm", SIGNATURE, [((8, 4),)])
    session = loaded.get_raw_model()._session
    monkeypatch.setattr(type(session), "run", lambda _self, batch: sizes.fit(batch))
    with pytest.raises(MlflowException, match=r"shapes up to \[8, 4\] of 'x', and \[9, 4\] is larger") as caught:
        loaded.predict(np.zeros((9, 4), np.float32))
    assert caught.value.get_http_status_code() == 400


def test_a_pipelines_own_settings_become_defaults_of_its_params(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the original scores by the `function_to_apply` that a server sets, and the published version does not."""
    import mlflow
    from mlflow.models import Model

    source, seen = tmp_path / "source", []
    source.mkdir()
    logged = Model()
    logged.add_flavor("python_function", loader_module="mlflow.transformers", config={"function_to_apply": "softmax"})
    logged.save(str(source / "MLmodel"))
    text = {"task": "text-classification", "defaults": {"function_to_apply": "softmax", "truncation": True}}
    path = str(save(source_model=source, answer={"kind": "dict", "text": text}))
    monkeypatch.setattr(flavor, "_open_processor", lambda _data, answer, *_: seen.append(answer["text"]["defaults"]))
    mlflow.pyfunc.load_model(path)
    mlflow.pyfunc.load_model(path, model_config={"function_to_apply": "none", "threads": 1})
    assert seen == [text["defaults"], {"function_to_apply": "none", "truncation": True}]


def test_a_loaded_model_says_that_it_cant_be_pickled(save: Save) -> None:
    """Broken: who hands a model to other processes reads `cannot pickle 'generator' object`."""
    import copy
    import pickle

    import mlflow

    path = str(save())
    for model in (mlflow.pyfunc.load_model(path), flavor.load_model(path)):
        for use in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="load it by its URI in each process"):
                use(model)


def test_a_param_that_is_not_compiled_is_refused(save: Save, tmp_path: Path) -> None:
    """Broken: XGBoost's original answers margins to `output_margin=True`, and the published model others."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model, infer_signature

    x = np.ones((2, 4), np.float32)
    source = tmp_path / "source"
    source.mkdir()
    params = {"output_margin": False, "iteration_range": [0, 0], "unknown": 1}
    Model(signature=infer_signature(x, x @ WEIGHTS, params=params)).save(str(source / "MLmodel"))
    answer = {"kind": "array", "outputs": ["y"], "params": {"output_margin": False, "iteration_range": (0, 0)}}
    model = mlflow.pyfunc.load_model(str(save(source_model=source, answer=answer)))
    np.testing.assert_allclose(model.predict(x), x @ WEIGHTS, rtol=1e-5)
    model.predict(x, params={"output_margin": False, "iteration_range": [0, 0], "unknown": 2})
    with pytest.raises(MlflowException, match="the param 'output_margin' can't be True here") as caught:
        model.predict(x, params={"output_margin": True})
    assert caught.value.get_http_status_code() == 400


def test_it_loads_where_compile_stage_is_not_installed(save: Save, tmp_path: Path) -> None:
    """The vendored copy is complete, and needs nothing but the runtime and MLflow."""
    script = f"""
import os, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        absent = ("filelock", "platformdirs", "onnx", "pydantic", "rich", "click", "psutil", "torch")
        if name.partition(".")[0] in absent:
            raise ImportError(name + " is not there")
sys.path = [p for p in sys.path if not os.path.exists(os.path.join(p, "compile_stage", "flavor.py"))]
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
import importlib.util
if importlib.util.find_spec("compile_stage") and importlib.util.find_spec("compile_stage.flavor"):
    raise SystemExit("compile_stage is importable, so this proves nothing")
sys.modules.pop("compile_stage", None)  # an editable install leaves a folder of that name, with the policies only
import mlflow, numpy as np
sys.meta_path.insert(0, Block())
model = mlflow.pyfunc.load_model({str(save())!r})
import compile_stage
assert {str(tmp_path)!r} in compile_stage.__file__, compile_stage.__file__
print(model.predict(np.ones((1, 4), np.float32)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[18.0, 22.0, 26.0]]


def test_model_config_sets_threads_and_the_mismatch_rule_only(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    path = str(save(fingerprint="aarch64-0000", on_hardware_mismatch="error"))
    with pytest.raises(IntegrityError, match="validated elsewhere"):
        mlflow.pyfunc.load_model(path)
    model = mlflow.pyfunc.load_model(path, model_config={"on_hardware_mismatch": "ignore", "threads": 2})
    assert model.model_config == {"threads": 2, "on_hardware_mismatch": "ignore"}
    with pytest.raises(UsageError, match="threads must be"):
        mlflow.pyfunc.load_model(path, model_config={"on_hardware_mismatch": "ignore", "threads": 0})
    with pytest.raises(UsageError, match="can't be 'never'"):
        mlflow.pyfunc.load_model(path, model_config={"on_hardware_mismatch": "never"})


# --------------------------------------------------------------------------------------------------- what must not load


@pytest.mark.parametrize("file", ["artifact/model.onnx", "code/compile_stage/flavor.py"])
def test_a_changed_file_is_named(save: Save, file: str) -> None:
    path = save()
    target = path / (file if file.startswith("code") else f"data/{file}")
    target.write_bytes(target.read_bytes() + b"\n")
    with pytest.raises(IntegrityError) as caught:
        flavor.load_model(str(path))
    assert file in caught.value.problem


def test_a_missing_and_an_added_file_are_named(save: Save) -> None:
    path = save()
    (path / "data" / "artifact" / "extra.bin").write_bytes(b"1")
    with pytest.raises(IntegrityError, match=r"artifact/extra\.bin is not among"):
        flavor.check_integrity(path)
    (path / "data" / "artifact" / "extra.bin").unlink()
    (path / "code" / "numpy.py").write_text("raise SystemExit")
    with pytest.raises(IntegrityError, match=r"code/numpy\.py is not among"):
        flavor.check_integrity(path)
    (path / "code" / "numpy.py").unlink()
    assert flavor.check_integrity(path)["schema"] == flavor.MANIFEST_SCHEMA
    (path / "data" / "artifact" / "model.onnx").unlink()
    with pytest.raises(IntegrityError, match=r"artifact/model\.onnx is missing"):
        flavor.check_integrity(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no manifest"),
        ("{", "can't be read"),
        ('{"schema": "other/v9"}', "of the schema 'other/v9'"),
        ("[]", "no JSON object"),
    ],
)
def test_a_manifest_that_is_none(save: Save, text: str | None, words: str) -> None:
    manifest = save() / "data" / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(IntegrityError, match=words):
        flavor.read_manifest(manifest.parents[1])


@pytest.mark.parametrize("kind", [flavor._Pyfunc, flavor._Wrapped])
def test_the_signature_of_predict_is_kept(kind: Any) -> None:
    """Broken: MLflow derives it anew in every call, which takes longer than all else of a small model's predict()."""
    kept = vars(kind.predict)["__signature__"]
    del kind.predict.__signature__
    try:
        assert inspect.signature(kind.predict) == kept
    finally:
        kind.predict.__signature__ = kept
    assert list(inspect.signature(kind.predict.__get__(object())).parameters) == ["data", "params"]


def test_a_manifest_without_a_digest_is_none(save: Save) -> None:
    """Broken: a version that an early compile-stage published is called tampered with, and fetching it again is
    advised, which changes nothing."""
    path = save()
    manifest = json.loads((path / "data" / "manifest.json").read_text())
    del manifest["digest"]
    (path / "data" / "manifest.json").write_text(json.dumps(manifest))
    for look in (flavor.check_integrity, flavor.load_model):
        with pytest.raises(IntegrityError, match=r"has no digest.*early version"):
            look(path)


def test_a_changed_manifest_is_no_manifest(save: Save) -> None:
    """Broken: a verdict, or the rule for other hardware, could be changed by hand in what was published."""
    path = save()
    file = path / "data" / "manifest.json"
    file.write_text(file.read_text().replace('"on_hardware_mismatch": "error"', '"on_hardware_mismatch": "ignore"'))
    for look in (flavor.check_integrity, flavor.load_model):
        with pytest.raises(IntegrityError, match="the manifest was changed after it was written"):
            look(str(path))


def test_what_lies_beside_is_checked_where_it_is_asked(save: Save) -> None:
    """Broken: `verify` would pass a bundle with a file more, or with other requirements than were published."""
    path = save()
    assert flavor.check_integrity(path, beside=True)["beside"].keys() == {
        "conda.yaml",
        "python_env.yaml",
        "requirements.txt",
    }
    (path / "extra.txt").write_text("x")
    with pytest.raises(IntegrityError, match=r"extra\.txt is not among"):
        flavor.check_integrity(path, beside=True)
    (path / "extra.txt").unlink()
    (path / "requirements.txt").write_text("evil")
    with pytest.raises(IntegrityError, match=r"requirements\.txt is not what was published"):
        flavor.check_integrity(path, beside=True)


def test_an_entry_outside_of_the_artifact_is_refused(save: Save) -> None:
    path = save()
    manifest = json.loads((path / "data" / "manifest.json").read_text())
    manifest["artifact"]["entry"] = "../../../../etc/passwd"
    (path / "data" / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(IntegrityError, match="is missing"):
        flavor.load_model(str(path))


def test_another_machine_is_an_error_a_warning_or_nothing(save: Save) -> None:
    other = replace(hardware(), cores=hardware().cores + 6, cpu="Another CPU")
    path = str(save(hardware=other, fingerprint=other.fingerprint))
    with pytest.raises(IntegrityError, match=r"cpu: Another CPU there, .* here; cores: \d+ there"):
        flavor.load_model(path)
    with pytest.warns(RuntimeWarning, match="validated elsewhere"):
        flavor.load_model(path, on_hardware_mismatch="warn").close()
    flavor.load_model(path, on_hardware_mismatch="ignore").close()


def test_no_install_is_named_where_the_machine_is_another_too(save: Save) -> None:
    """Broken: an install would be named as what mends it, and the next load would be refused all the same."""
    other = replace(hardware(), cpu="Another CPU")
    path = save(hardware=other, fingerprint=other.fingerprint, runtime={"onnxruntime": "1.0.0"})
    with pytest.raises(IntegrityError, match=r"Another CPU there.*onnxruntime: 1\.0\.0 there") as refused:
        flavor.load_model(str(path))
    assert refused.value.fix.startswith("run compile-stage")


def test_another_version_of_the_runtime_counts_as_another_machine(save: Save) -> None:
    with pytest.raises(IntegrityError, match=r"onnxruntime: 1\.0\.0 there"):
        flavor.load_model(str(save(runtime={"onnxruntime": "1.0.0"})))


def test_the_proven_version_of_the_runtime_is_named_with_its_pip_install(save: Save) -> None:
    """Broken: who has another version would read "on this kind of machine", compile anew, and not learn that one
    install mends it."""
    with pytest.raises(IntegrityError) as refused:
        flavor.load_model(str(save(runtime={"onnxruntime": "1.0.0+cpu"})))
    assert refused.value.fix.startswith("pip install onnxruntime==1.0.0, or run compile-stage")


def test_another_build_of_the_same_version_names_no_pip_install(save: Save) -> None:
    """Broken: the advice would be to install what is there already, since no public index has the label of a build."""
    here = version("onnxruntime").partition("+")[0]
    with pytest.raises(IntegrityError, match=r"\+elsewhere there") as refused:
        flavor.load_model(str(save(runtime={"onnxruntime": f"{here}+elsewhere"})))
    assert refused.value.fix.startswith("run compile-stage")


def test_a_missing_runtime_names_the_pip_line(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save()
    real = flavor.importlib.util.find_spec
    monkeypatch.setattr(
        flavor.importlib.util, "find_spec", lambda name, *a: None if name == "onnxruntime" else real(name, *a)
    )
    with pytest.raises(MissingDependencyError) as caught:
        flavor.load_model(str(path))
    assert caught.value.fix.startswith("pip install onnxruntime==")


# ----------------------------------------------------------------------------------------------------- input and answer

TWO = Signature(
    inputs=(
        TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name="mask", dtype="int64", shape=("batch", "sequence")),
    ),
    outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 2)),),
)
TEXT = Signature(inputs=(TensorSpec(name="s", dtype="str", shape=("batch", 1)),), outputs=())
SMALL = Signature(inputs=(TensorSpec(name="i", dtype="int8", shape=("batch",)),), outputs=())


@pytest.mark.parametrize(
    ("data", "signature", "words"),
    [
        (np.ones((2, 5), np.float32), SIGNATURE, "does not fit x: float32"),
        (np.ones(4, np.float32), SIGNATURE, "does not fit"),
        (np.ones((0, 4), np.float32), SIGNATURE, "empty"),
        ({"z": np.ones((2, 4))}, SIGNATURE, "'x' is missing"),
        ({"x": np.ones((2, 4)), "z": [1]}, SIGNATURE, "no input 'z'"),
        ([["a", "b", "c", "d"]], SIGNATURE, "must be float32"),
        ([[1.0, 2.0], [3.0]], SIGNATURE, "not a regular array"),
        (np.full((1, 4), 1e300), SIGNATURE, "can't hold"),
        (np.array([[1, 1, 1, np.inf]], np.float32), SIGNATURE, "an infinite value, or one that float32 can't hold"),
        (np.ones((1, 4), complex), SIGNATURE, "must be float32"),
        (np.ones((2, 3)), TWO, "the model has 2 inputs"),
        (
            {"ids": np.full((2, 3), 1.5), "mask": np.ones((2, 3), int)},
            TWO,
            "'ids' must be int64, and holds a number that",
        ),
        (np.array([1.0, np.nan]), SMALL, "'i' must be int8, and holds a number that is not whole"),
        (np.array([np.inf]), SMALL, "'i' must be int8, and holds a number that is not whole"),
        (np.array([300.0]), SMALL, "int8 can't hold"),
        (
            {"ids": np.ones((2, 3), int), "mask": np.ones((2, 4), int)},
            TWO,
            "does not fit mask: int64[batch, sequence], since sequence is 3 before it",
        ),
        (pd.DataFrame({"ids": [[1, 2]]}), TWO, "lacks 'mask'"),
        (pd.DataFrame({"ids": [[1, 2], [1]], "mask": [[1, 1], [1]]}), TWO, "one shape"),
        (np.array([[1]]), TEXT, "must be text, and holds 1 (int): send it as text"),
        (np.array([["a"], [None], [2.5]], dtype=object), TEXT, "must be text, and holds 2.5 (float)"),
        (np.array([300]), SMALL, "int8 can't hold"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(data: Any, signature: Signature, words: str) -> None:
    with pytest.raises(InputRefusedError) as caught:
        to_batch(data, signature, {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "signature"),
    [
        ([[1, 2, 3, 4]], SIGNATURE),
        ({"x": [[1.0, 2.0, 3.0, 4.0]]}, SIGNATURE),
        (pd.DataFrame([[1, 2, 3, 4]]), SIGNATURE),
        (pd.DataFrame({"x": [[1, 2, 3, 4]]}), SIGNATURE),
        (pd.DataFrame([[1, 2.5, True, 4]], dtype=object), SIGNATURE),
        (pd.DataFrame({"ids": [[1, 2]], "mask": [[1, 1]]}), TWO),
        ({"ids": np.ones((1, 2), np.int32), "mask": np.ones((1, 2), bool)}, TWO),
        (pd.Series(["a", "b"]), TEXT),
        (np.array([-128, 127]), SMALL),
        (np.array([-128.0, 127.0]), SMALL),  # JSON and pandas write whole numbers so, and the original takes them
    ],
)
def test_what_fits_gets_exactly_the_models_types(data: Any, signature: Signature) -> None:
    batch = to_batch(data, signature, {})
    assert signature.refuse(batch) is None


def test_columns_are_taken_by_name_and_in_order() -> None:
    frame = pd.DataFrame({"unused": [9], "d": [4], "b": [2], "c": [3], "a": [1]})
    how = {"columns": list("abcd")}
    assert to_batch(frame, SIGNATURE, how)["x"].tolist() == [[1, 2, 3, 4]]
    assert to_batch({name: frame[name].tolist() for name in "dcba"}, SIGNATURE, how)["x"].tolist() == [[1, 2, 3, 4]]
    with pytest.raises(InputRefusedError, match="lacks 'a'"):
        to_batch(frame.drop(columns="a"), SIGNATURE, how)


def test_answers_take_the_sources_form() -> None:
    outputs = {"label": np.array([1, 0]), "probabilities": np.array([[0.1, 0.9], [0.8, 0.2]])}
    x, frame = np.ones((2, 4)), pd.DataFrame(np.ones((2, 4)), index=["p", "q"])

    label = from_outputs(outputs, x, {"kind": "array", "outputs": ["label"]})
    assert label.tolist() == [1, 0]
    both = from_outputs(outputs, x, {"kind": "dict", "outputs": ["label", "probabilities"]})
    assert list(both) == ["label", "probabilities"]
    plain = from_outputs(outputs, frame, {"kind": "array", "outputs": ["label"], "frame_in_frame_out": False})
    assert isinstance(plain, np.ndarray)
    framed = from_outputs(outputs, frame, {"kind": "array", "outputs": ["probabilities"], "frame_in_frame_out": True})
    assert list(framed.index) == ["p", "q"]
    assert framed.shape == (2, 2)
    flat = from_outputs({"y": np.ones((2, 1))}, frame, {"kind": "dict", "frame_in_frame_out": True})
    assert flat["y"].tolist() == [1.0, 1.0]
    table = from_outputs(outputs, x, {"kind": "dataframe", "outputs": None})
    assert table["label"].tolist() == [1, 0]
    assert table["probabilities"][1].tolist() == [0.8, 0.2]


# ------------------------------------------------------------------------------------------------------ served


@pytest.fixture
def served(save: Save, tmp_path: Path) -> Iterator[str]:
    """`mlflow models serve` of a published model, in a process group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = save(signature=SIGNATURE, answer={"kind": "array", "outputs": ["y"], "frame_in_frame_out": True})
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(path), "-p", str(port)]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # it calls uvicorn by name
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-h", "127.0.0.1", "--env-manager", "local"],
            stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300  # it starts in 5 s, but on a busy machine in minutes
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=20).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
                assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()[-2000:]
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        shutil.rmtree(path, ignore_errors=True)


def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=200) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_mlflow_serves_it(served: str) -> None:
    status, answer = ask(served, {"inputs": {"x": [[1, 1, 1, 1]]}})
    assert (status, answer) == (200, {"predictions": [[18.0, 22.0, 26.0]]})
    status, answer = ask(served, {"inputs": {"z": [[1, 1, 1, 1]]}})
    assert status == 400
    assert "x" in answer["message"]
    status, answer = ask(served, {"inputs": {"x": [[1e39, 1, 1, 1]]}})  # MLflow makes it infinity before we see it
    assert status == 400
    assert "float32 can't hold" in answer["message"]
    status, answer = ask(served, {"inputs": {"x": [[1e38, 1, 1, 1]]}})
    assert status == 200


def test_a_loader_that_lacks_the_backend_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two published models of different backends in one process. Broken: the second would end in a bare
    ModuleNotFoundError."""
    monkeypatch.setitem(flavor.BACKENDS, "litert", "compile_stage.backends.not_in_this_copy:LiteRt")
    with pytest.raises(MissingDependencyError, match="the loader of another published model") as caught:
        flavor._backend("litert", {})
    assert "processes of their own" in caught.value.fix
