"""The validator: small, the same bytes each time, and at work where Unix's own modules, MLflow and psutil are not."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loopback_device import stand_in_for_adb
from tiny_bundle import WEIGHTS, save_bundle

from compile_stage.core.errors import DeviceError
from compile_stage.core.hosts import Host
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import SampleSet
from compile_stage.core.sample_files import digest_of_samples, write_index
from compile_stage.devices.engine import DeviceEngine
from compile_stage.devices.link import Link, open_link
from compile_stage.devices.validation import _demand_runtime
from compile_stage.devices.validator import build_validator
from compile_stage.serving.manifest import artifact_of, data_folder, read_manifest

BLOCKER = """
import os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"there is no {name} here", name=name)

sys.meta_path.insert(0, Blocked())
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules.pop(name, None)
for name in ("fork", "getpgid", "setsid", "killpg", "sysconf_names"):
    if hasattr(os, name):
        delattr(os, name)
"""


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_python: Path) -> Host:
    return stand_in_for_adb(tmp_path, monkeypatch, device_python)


@pytest.fixture
def bare(device_python: Path) -> Iterator[None]:
    """The device's Python without the modules that other systems lack."""
    site = next(device_python.parents[1].glob("lib/python*/site-packages"))
    (site / "blocker.py").write_text(BLOCKER)
    (site / "blocker.pth").write_text("import blocker\n")
    yield
    (site / "blocker.pth").unlink()
    (site / "blocker.py").unlink()


def test_it_is_small_and_the_same_each_time_and_holds_no_judge() -> None:
    """Broken: its digest would say nothing, or a board on a slow line would wait for what it never runs."""
    archive = build_validator()
    build_validator.cache_clear()
    assert build_validator() == archive
    assert len(archive) < 2_000_000
    names = set(zipfile.ZipFile(io.BytesIO(archive)).namelist())
    assert {"__main__.py", "compile_stage/devices/worker.py", "compile_stage/engine/open_model.py"} <= names
    beside = ("compile_stage/cli/", "compile_stage/registry/", "compile_stage/policy/", "compile_stage/steps/")
    assert not [name for name in names if name.startswith(beside)]


@pytest.mark.usefixtures("bare")
@pytest.mark.filterwarnings("ignore")  # MLflow's own, where it is imported for the first time
def test_a_model_answers_where_unix_and_mlflow_are_not(phone: Host, tmp_path: Path) -> None:
    """Broken: nothing could be proven on Windows, or on a board without our packages; or labels would leave here."""
    model = save_bundle(tmp_path)
    samples = _samples(tmp_path / "samples")
    with open_link(phone, build_validator()) as link:
        assert link.hello["locks"] is False
        engine = DeviceEngine(link, model, original="", say=print)
        with engine.exclusive(), engine.worker("w", WorkerLimits()) as worker:
            artifact = artifact_of(read_manifest(model), data_folder(model))
            worker.call("open_artifact", artifact=artifact, threads=1)
            files = worker.call("predict", samples=samples, batch_size=2, into=str(tmp_path / "answers"))
            expected = np.load(tmp_path / "samples" / "inputs" / "x.npy") @ WEIGHTS
            assert np.allclose(np.load(files["y"]), expected)
            worker.call("open_served", model={"path": str(model)})
            turn = worker.metered("quick_turn", samples=samples, batch_size=1, seconds=0.0)
            assert 0 < sum(turn.value) < turn.wall_s
            assert worker.memory().peak_bytes > 1_000_000
        (there,) = Path(phone.folder).glob("session-*/in/*/samples.json")
        assert not (there.parent / "labels.npy").exists()
    assert not any(Path(phone.folder).glob("session-*"))


def test_a_package_that_is_missing_comes_with_the_command_that_brings_it(
    phone: Host, tmp_path: Path, device_python: Path
) -> None:
    """Broken: a board without the runtime would be a failed candidate, and not a thing to install."""
    import factories

    empty = tmp_path / "empty"
    (empty / "bin").mkdir(parents=True)
    shutil.copy(device_python.parents[1] / "pyvenv.cfg", empty)
    (empty / "bin" / "python").symlink_to(os.path.realpath(device_python))
    with open_link(replace(phone, python=str(empty / "bin" / "python")), build_validator()) as link:
        with pytest.raises(DeviceError, match="lacks numpy, onnxruntime") as raised:
            _demand_runtime(link, {"runtime": {"onnxruntime": "1.99.0"}}, factories.job())
        assert raised.value.fix.endswith("-m pip install numpy onnxruntime==1.99.0")
        assert _crashes(link, tmp_path)


def _crashes(link: Link, tmp_path: Path) -> bool:
    """A worker that dies on the device is told with what it said last."""
    link.request("start", worker="w", threads=1)
    found = link.request("call", worker="w", function="no_such", arguments={}, timeout_s=60.0)
    return "KeyError" in found["error"]["problem"] or "numpy" in found["error"]["problem"]


def _samples(folder: Path) -> SampleSet:
    (folder / "inputs").mkdir(parents=True)
    np.save(folder / "inputs" / "x.npy", np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32))
    np.save(folder / "labels.npy", np.arange(8))
    write_index(folder, {"x": "inputs/x.npy"}, labels=True, count=8)
    made = SampleSet(path=str(folder), digest="", count=8, real=True, source="file:x", has_labels=True)
    return replace(made, digest=digest_of_samples(made))
