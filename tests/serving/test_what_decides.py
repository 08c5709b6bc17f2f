"""Everything that decides what is served is compared with what was published: when it is loaded, and more strictly when
it is verified."""

from __future__ import annotations

import builtins
import codecs
import errno
import importlib.util
import io
import json
import os
import py_compile
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_bundle import SIGNATURE, WEIGHTS, save_bundle

from compile_stage import flavor
from compile_stage.core.errors import IntegrityError
from compile_stage.core.storage import storage_error
from compile_stage.serving.manifest import check_integrity, sealed

pytestmark = [  # MLflow's own
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


def edit_mlmodel(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    described = yaml.safe_load((path / "MLmodel").read_text())
    change(described)
    (path / "MLmodel").write_text(yaml.safe_dump(described))


def test_other_weights_are_not_served_through_mlmodel(tmp_path: Path) -> None:
    """Broken: `data:` of MLmodel could name another folder, with a manifest of its own, and its weights were served."""
    import mlflow

    path = save_bundle(tmp_path)
    shutil.copytree(path / "data", path / "elsewhere")
    edit_mlmodel(path, lambda m: m["flavors"]["python_function"].update(data="elsewhere"))
    with pytest.raises(
        IntegrityError, match=r"MLmodel is not what was published: its field flavors\.python_function\.data"
    ):
        mlflow.pyfunc.load_model(str(path))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("flavors.python_function.loader_module", lambda m: m["flavors"]["python_function"].update(loader_module="os")),
        ("flavors.python_function.data", lambda m: m["flavors"]["python_function"].update(data="other")),
        ("flavors.python_function.code", lambda m: m["flavors"]["python_function"].update(code="other")),
        (
            "flavors.python_function.config.on_hardware_mismatch",
            lambda m: m["flavors"]["python_function"]["config"].update(on_hardware_mismatch="ignore"),
        ),
        (
            "flavors.python_function.env.conda",
            lambda m: m["flavors"]["python_function"]["env"].update(conda="other.yaml"),
        ),
        ("flavors.sklearn", lambda m: m["flavors"].update(sklearn={"pickled_model": "m.pkl"})),
        ("metadata", lambda m: m.update(metadata={"compile_stage": {"key": "other"}})),
        ("signature", lambda m: m.pop("signature")),
    ],
)
def test_a_field_of_mlmodel_that_decides_is_named(
    tmp_path: Path, field: str, change: Callable[[dict[str, Any]], object]
) -> None:
    """Broken: a writer of the registry could have another module loaded, or another rule for other hardware, unseen."""
    path = save_bundle(tmp_path, signature=SIGNATURE)
    edit_mlmodel(path, change)
    for look in (flavor.load_model, lambda folder: flavor.check_integrity(folder, beside=True)):
        with pytest.raises(IntegrityError) as caught:
            look(str(path))
        assert field in caught.value.problem


def test_ids_and_times_are_not_the_model(tmp_path: Path) -> None:
    """Broken: no registered version could be loaded, since MLflow writes its ids into MLmodel."""
    path = save_bundle(tmp_path)
    written = {"model_id": "m-1", "model_uuid": "m-1", "run_id": "r", "artifact_path": "s3://elsewhere"}
    edit_mlmodel(path, lambda m: m.update(written, utc_time_created="2030-01-01", model_size_bytes=1))
    (path / "registered_model_meta").write_text("model_name: m\nmodel_version: '3'\n")
    flavor.check_integrity(path, beside=True)
    flavor.load_model(str(path)).close()


def test_a_model_without_its_mlmodel_is_not_what_was_published(tmp_path: Path) -> None:
    """Broken: who removes `MLmodel` has `verify` say that every file is what was published, whatever was changed or
    added beside `data/` and `code/`."""
    path = save_bundle(tmp_path)
    (path / "MLmodel").unlink()
    with pytest.raises(IntegrityError, match="MLmodel is missing"):
        check_integrity(path, beside=True)
    with pytest.raises(IntegrityError, match="MLmodel is missing"):
        flavor.load_model(str(path))


def test_yaml_that_grows_ends_as_a_refusal(tmp_path: Path) -> None:
    """Broken: ten lines of aliases would take the memory of whoever loads or verifies the model."""
    path = save_bundle(tmp_path)
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (path / "MLmodel").write_text("\n".join(lines))
    with pytest.raises(IntegrityError, match="more values than any real one"):
        flavor.check_integrity(path)


def test_a_model_of_an_earlier_version_loads_and_its_loader_is_compared(tmp_path: Path) -> None:
    """Broken: what is in production today, whose manifest has no copy of MLmodel, could not be loaded; or its MLmodel
    could name another loader."""
    path = save_bundle(tmp_path)
    file = path / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["mlmodel"]
    file.write_text(json.dumps(sealed(manifest)))
    flavor.check_integrity(path, beside=True)
    with flavor.load_model(str(path)) as model:
        x = np.ones((2, 4), np.float32)
        np.testing.assert_allclose(model.run({"x": x})["y"], x @ WEIGHTS)
    edit_mlmodel(path, lambda m: m["flavors"]["python_function"].update(loader_module="os"))
    with pytest.raises(IntegrityError, match=r"flavors|loader_module"):
        flavor.load_model(str(path))


def compiled(source: Path, content: str | None = None) -> Path:
    """What Python would run in place of the source: compiled from it, or from other content with the source's
    header."""
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.mkdir(exist_ok=True)
    py_compile.compile(str(source), cfile=str(target), doraise=True)
    if content is not None:
        header = target.read_bytes()[:16]
        other = source.parent / "other.py"
        other.write_text(content)
        py_compile.compile(str(other), cfile=str(target), doraise=True)
        other.unlink()
        target.write_bytes(header + target.read_bytes()[16:])
    return target


def test_compiled_python_must_be_what_its_source_compiles_to(tmp_path: Path) -> None:
    """Broken: `__pycache__/flavor.cpython-311.pyc` with the source's time and size runs in its place, and no digest is
    of it."""
    path = save_bundle(tmp_path)
    source = path / "code" / "compile_stage" / "flavor.py"
    compiled(source)
    flavor.check_integrity(path, beside=True)  # as loading by MLflow leaves it
    compiled(source, "def _load_pyfunc(path, model_config=None):\n    raise SystemExit('other code')\n")
    for strictly in (True, False):
        with pytest.raises(IntegrityError, match=r"flavor\.cpython-\d+\.pyc is not what its source compiles to"):
            flavor.check_integrity(path, beside=strictly)


@pytest.mark.parametrize("name", ["extra.cpython-311.pyc", "flavor.so", "deeper/flavor.cpython-311.pyc"])
def test_what_no_source_compiles_to_is_refused(tmp_path: Path, name: str) -> None:
    """Broken: `__pycache__` would be a place to bring code in."""
    path = save_bundle(tmp_path)
    file = path / "code" / "compile_stage" / "__pycache__" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 32)
    with pytest.raises(IntegrityError, match="is no compiled form of a published file"):
        flavor.check_integrity(path)


def test_compiled_python_of_another_version_is_seen_where_it_is_asked(tmp_path: Path) -> None:
    """Broken: a verifier on one Python would pass what another one runs in serving; or two Pythons could not load from
    one folder."""
    path = save_bundle(tmp_path)
    cache = path / "code" / "compile_stage" / "__pycache__"
    cache.mkdir()
    (cache / "flavor.cpython-399.pyc").write_bytes(b"x" * 32)
    assert sys.implementation.cache_tag != "cpython-399"
    flavor.check_integrity(path)
    with pytest.raises(IntegrityError, match="compiled for another Python"):
        flavor.check_integrity(path, beside=True)


def test_a_file_beside_is_seen_when_it_is_loaded(tmp_path: Path) -> None:
    """Broken: files could be brought in beside a model that is loaded; or a changed requirements.txt, for which MLflow
    has a command, would keep it from being served."""
    path = save_bundle(tmp_path)
    (path / "requirements.txt").write_text("numpy\n")
    flavor.load_model(str(path)).close()
    (path / "sitecustomize.py").write_text("")
    with pytest.raises(IntegrityError, match=r"sitecustomize\.py is not among the published files"):
        flavor.load_model(str(path))


class FailingFile(io.FileIO):
    """A file on a disk that fails: the kernel's error has no name."""

    def readinto(self, _: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def readall(self) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("name", ["data/manifest.json", "MLmodel", "data/artifact/model.onnx", "requirements.txt"])
def test_a_disk_that_fails_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Broken: an input/output error while a bundle is read ends with 7, as if somebody had changed it, or says "it
    can't be read" of no file."""
    path = save_bundle(tmp_path)
    real_open, real_fdopen = builtins.open, os.fdopen
    bad = (path / name).stat().st_ino

    def opened(file: Any, *rest: Any, **options: Any) -> Any:
        is_bad = isinstance(file, str | Path) and Path(file).exists() and Path(file).stat().st_ino == bad
        return wrapped(FailingFile(file), *rest) if is_bad else real_open(file, *rest, **options)

    def wrapped(raw: io.FileIO, mode: str = "r", *_: Any) -> Any:
        return io.BufferedReader(raw) if "b" in mode else io.TextIOWrapper(io.BufferedReader(raw))

    def fdopened(number: int, *rest: Any) -> Any:
        return io.BufferedReader(FailingFile(number)) if os.fstat(number).st_ino == bad else real_fdopen(number, *rest)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "fdopen", fdopened)
    monkeypatch.setattr(codecs, "open", opened)  # as MLflow reads YAML
    with pytest.raises(OSError, match="Input/output error") as caught:
        check_integrity(path, beside=True)
    said = storage_error(caught.value)
    assert said is not None
    assert said.where == str(path / name)
