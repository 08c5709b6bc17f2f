"""Isolated environments of backends, made from a lock that pins one small wheel of this test's own: no network."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from compile_stage.cli.main import main
from compile_stage.core import plugins, toolchains
from compile_stage.core.errors import MissingDependencyError, StorageError, UsageError
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine import toolchains as engine
from compile_stage.engine.local import LocalEngine
from compile_stage.installation import examine

BACKEND = """
from compile_stage.core.capabilities import BackendCapabilities
class Tiny:
    name, requires, extra = "tiny", ("only_there",), ""
    capabilities = BackendCapabilities(forms=("onnx",), devices=("cpu",), precisions=("fp32",), runtime=("only-there",))
    def toolchain(self):
        from compile_stage.core.plugins import package_versions
        return package_versions("only-there")
"""
SOURCE = """
from compile_stage.core.capabilities import SourceCapabilities
class TinySource:
    name, requires, extra, framework = "tiny-source", ("only_there",), "", "Tiny"
    capabilities = SourceCapabilities(toolchain="tiny")
    def packages(self):
        return {}
"""
DEEDS = """
def where():
    import only_there, sys
    from compile_stage.core import plugins
    packages = dict(plugins.load("backends", "tiny").toolchain())
    return {"answer": only_there.ANSWER, "python": sys.executable, "packages": packages}
CALLS = {"where": where}
"""


def wheel(folder: Path, version: str) -> Path:
    """A wheel of one module, `only_there`."""
    info = f"only_there-{version}.dist-info"
    files = {
        "only_there.py": f"ANSWER = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: only-there\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    path = folder / f"only_there-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A backend `tiny` of another distribution, whose package is only in its toolchain; the folder that it lies in."""
    place = tmp_path / "site"
    (place / "tiny_backend" / "locks").mkdir(parents=True)
    (place / "tiny_backend" / "__init__.py").write_text(BACKEND)
    (place / "tiny_backend" / "source.py").write_text(SOURCE)
    (place / "tiny_backend" / "deeds.py").write_text(DEEDS)
    info = place / "tiny_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[compile_stage.backends]\ntiny = tiny_backend:Tiny\n"
        "[compile_stage.sources]\ntiny-source = tiny_backend.source:TinySource\n"
    )
    write_lock(place, "1.0")
    monkeypatch.setenv("COMPILE_STAGE_TOOLCHAINS", str(tmp_path / "toolchains"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.syspath_prepend(str(place))
    plugins.refresh()
    yield place
    plugins.refresh()


def shipped(place: Path) -> Path:
    return place / "tiny_backend" / "locks" / "tiny.txt"


def write_lock(place: Path, version: str) -> None:
    shipped(place).write_text(f"only-there @ {wheel(place, version).as_uri()}\n")


def state() -> engine.State:
    return next(state for state in engine.states() if state.name == "tiny")


def test_looking_for_pip_leaves_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: beside setuptools, a process that had imported distutils was warned ("Setuptools is replacing distutils
    ... In the future, this condition will fail"), and lost it."""
    there = types.ModuleType("distutils")
    monkeypatch.setitem(sys.modules, "distutils", there)
    engine._with_pip(tmp_path / "lock.txt", tmp_path / "toolchain")
    assert sys.modules["distutils"] is there


def test_life_of_a_toolchain(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing → made → listed → left as it is → another lock makes another → all removed. What each command says is
    what there is."""
    backend = plugins.load("backends", "tiny")
    assert plugins.missing(backend) is not None
    assert plugins.pip_line(backend) == "compile-stage toolchain install tiny"
    assert (state().here, state().toolchain, state().size_bytes) == (False, None, 0)

    made = engine.install("tiny")
    assert plugins.missing(backend) is None
    assert made.packages == {"only-there": "1.0"}, "it holds more than the lock pins"
    assert state().toolchain == made
    assert state().size_bytes > 0
    assert plugins.cache_identity("backends", "tiny")["toolchain"] == made.digest
    (entry,) = (entry for entry in examine().entries if entry.name == "tiny")
    assert (entry.ready, entry.version) == (True, f"only-there 1.0, in {made.folder}")
    with pytest.raises(SystemExit) as ended:
        main(["toolchain", "list"])
    assert ended.value.code == 0
    assert made.folder in capsys.readouterr().out

    ready = Path(made.folder) / toolchains.READY
    before = ready.stat().st_mtime_ns
    said: list[str] = []
    assert engine.install("tiny", said.append) == made
    assert ready.stat().st_mtime_ns == before
    assert said == [f"tiny is there: {made.folder}"]

    write_lock(tiny, "2.0")
    assert plugins.toolchain_of(backend) is None, "the environment of another lock was taken"
    second = engine.install("tiny")
    assert second.packages == {"only-there": "2.0"}
    assert second.folder != made.folder
    neighbour = Path(made.folder).parent / "tiny-er-0123456789ab"
    neighbour.mkdir()
    assert engine.remove("tiny") == tuple(sorted([made.folder, second.folder]))
    assert [path.name for path in Path(made.folder).parent.iterdir()] == [neighbour.name]
    assert engine.remove("tiny") == ()
    assert plugins.missing(backend) is not None


def test_a_source_runs_in_the_toolchain_that_it_names(tiny: Path) -> None:
    """Broken: a framework that does not live beside the compilers could not be read at all; or its exports would be
    cached under packages of another environment."""
    source = plugins.load("sources", "tiny-source")
    assert plugins.missing(source) == (
        "tiny-source needs only_there, which is not installed: compile-stage toolchain install tiny"
    )
    assert plugins.interpreter_of_source("tiny-source") == ""
    assert [user.name for user in plugins.users_of_toolchains()["tiny"]] == ["tiny", "tiny-source"]
    made = engine.install("tiny-source")  # the flavor stands for its toolchain
    assert Path(made.folder).name.startswith("tiny-")
    assert plugins.missing(source) is None
    assert plugins.interpreter_of_source("tiny-source") == made.interpreter
    assert plugins.cache_identity("sources", "tiny-source")["toolchain"] == made.digest
    (entry,) = (entry for entry in examine().entries if entry.name == "tiny-source")
    assert (entry.ready, entry.version) == (True, f"in {made.folder}")
    assert plugins.interpreter_of_source("onnx") == ""
    assert plugins.interpreter_of_source("no-such-flavor") == ""


def test_an_interrupted_install_is_no_toolchain(tiny: Path) -> None:
    """Broken: a process that was killed half-way would leave an environment in which jobs fail, or which can't be made
    any more."""
    lock = plugins.lock_of("tiny")
    assert lock is not None
    half = toolchains.place("tiny", lock)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(half)], check=True)
    (half / "stale").write_text("of the first try")
    assert toolchains.find("tiny", lock) is None
    (half / toolchains.READY).write_text("[]")  # of no known form
    assert toolchains.find("tiny", lock) is None
    made = engine.install("tiny")
    assert made.folder == str(half)
    assert not (half / "stale").exists()
    Path(made.interpreter).unlink()  # the Python that it was made with is gone
    assert toolchains.find("tiny", lock) is None


def test_two_installs_at_once_make_one(tiny: Path) -> None:
    """Broken: two stages that begin together would write into one environment."""
    said: list[str] = []
    threads = [threading.Thread(target=engine.install, args=("tiny", said.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("making ") for line in said) == 1
    assert sum(line.startswith("tiny is there") for line in said) == 2


def test_what_can_not_be_had_leaves_nothing_and_says_why(tiny: Path) -> None:
    """Broken: a failed install would look like a made one, or hide what pip said."""
    shipped(tiny).write_text("surely-not-a-package==1.0\n")
    with pytest.raises(MissingDependencyError, match="the toolchain tiny can't be made") as caught:
        engine.install("tiny")
    assert "surely-not-a-package" in caught.value.problem
    assert not [path for path in toolchains.toolchains_root().iterdir() if path.is_dir()]


def test_a_toolchain_that_lacks_what_the_backend_imports_is_not_made(tiny: Path) -> None:
    """A lock that pins nothing makes an environment that is found wanting at once, and not by the first job."""
    shipped(tiny).write_text("# nothing\n")
    with pytest.raises(MissingDependencyError, match="only_there"):
        engine.install("tiny")
    assert state().toolchain is None


def test_words_for_a_backend_without_a_toolchain(tiny: Path) -> None:
    """Broken: a backend that runs here, or does not exist, would be told of as a failed install."""
    with pytest.raises(UsageError, match="the backend onnxruntime has no toolchain of its own") as caught:
        engine.install("onnxruntime")
    assert "tiny" in caught.value.fix
    with pytest.raises(UsageError, match="no backend or source called 'tinny' has a toolchain") as caught:
        engine.install("tinny")
    assert caught.value.fix == "did you mean tiny?"


def test_a_users_own_lock_comes_first(tiny: Path) -> None:
    """`lock` pins from the requirements, also before there is any lock; what it writes is in force from then on."""
    with pytest.raises(UsageError, match=r"ships no tiny\.in"):
        engine.lock("tiny")
    shipped(tiny).unlink()
    assert plugins.lock_of("tiny") is None
    shipped(tiny).with_suffix(".in").write_text(f"only-there @ {wheel(tiny, '3.0').as_uri()}\n")
    first = engine.lock("tiny", shipped(tiny))
    assert "only-there==3.0" in first.read_text().splitlines()
    assert plugins.lock_of("tiny") == first
    own = engine.lock("tiny")
    assert own == toolchains.users_lock("tiny") == plugins.lock_of("tiny")


def test_a_worker_of_a_toolchain_runs_our_code_with_its_packages(tiny: Path, tmp_path: Path) -> None:
    """Broken: its worker would see this environment's packages, or none of our code and plug-ins."""
    made = engine.install("tiny")
    # What a worker of ours imports comes from a real lock; here from this environment, by a path file.
    (site,) = Path(made.folder).glob("lib/python*/site-packages")
    spec = importlib.util.find_spec("psutil")
    assert spec is not None
    assert spec.origin is not None
    (site / "more.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    local = LocalEngine(calls="tiny_backend.deeds", logs=tmp_path)
    try:
        with local.worker("job", WorkerLimits(interpreter=plugins.interpreter_of("tiny"))) as worker:
            said = worker.call("where")
    finally:
        local.close()
    assert said == {"answer": "1.0", "python": made.interpreter, "packages": {"only-there": "1.0"}}
    assert json.loads((Path(made.folder) / toolchains.READY).read_text())["lock"] == made.digest


def test_an_installer_that_outlives_its_stage_is_waited_for(tmp_path: Path) -> None:
    """What `kill -9` leaves: pip, at work in the folder. Broken: the next install would delete and fill that folder
    while pip still writes into it."""
    from filelock import FileLock, Timeout

    folder = tmp_path / "tiny-000000000000"
    code = (
        "import os, signal, subprocess, sys\n"
        "from pathlib import Path\n"
        "from compile_stage.engine import toolchains as engine\n"
        "with engine._alone(Path(sys.argv[1]), 'tiny', print) as held:\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, pass_fds=(held,))\n"
        "    print(child.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    stage = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert stage.stdout is not None
    assert stage.stdin is not None
    installer = int(stage.stdout.readline())
    os.kill(installer, signal.SIGSTOP)  # it would end with its input
    stage.kill()
    stage.wait()
    stage.stdout.close()
    stage.stdin.close()
    with pytest.raises(Timeout):
        FileLock(f"{folder}.lock").acquire(timeout=0.2)
    os.kill(installer, signal.SIGKILL)
    with FileLock(f"{folder}.lock", timeout=60):
        pass


def test_an_interrupted_installation_leaves_nothing_that_goes_on(tmp_path: Path) -> None:
    """What SIGTERM leaves: pip installs in a process of its own. Broken: it went on, unseen, and wrote into the folder
    while the next installation filled it."""
    pid = tmp_path / "pid"
    grandchild = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    code = (
        "import signal, sys\n"
        "from compile_stage.engine import toolchains as engine\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"engine._run([sys.executable, '-c', {child!r}], 'tiny')\n"
    )
    stage = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not pid.exists() or not pid.read_text():
        assert stage.poll() is None
    stage.terminate()
    assert stage.wait(60) != 0
    until = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):  # a zombie that init has not fetched yet has ended
        while psutil.Process(int(pid.read_text())).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_folder_that_can_not_be_written_is_no_bug_of_ours(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the command would end with 70, and ask for a report."""
    monkeypatch.setenv("COMPILE_STAGE_TOOLCHAINS", str(tiny / "tiny_backend" / "deeds.py" / "below"))
    with pytest.raises(StorageError, match="can't be made in") as caught:
        engine.install("tiny")
    assert "COMPILE_STAGE_TOOLCHAINS" in caught.value.fix
