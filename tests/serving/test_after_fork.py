"""A model that is loaded before its process forks, as gunicorn --preload, Celery and multiprocessing do it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_bundle import describe, save_bundle, write_onnx

from compile_stage import flavor
from compile_stage.core.digest import digest_tree

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),  # importing mlflow.pyfunc
]

# The model is locked by another thread at the moment of the fork. What hangs is ended by its alarm.
SCRIPT = """
import os, signal, sys, threading, traceback
import numpy as np
from compile_stage import flavor
model = flavor.load_model({model!r}, threads=2)
x = np.ones((8, 4), np.float32)
expected = model.run({{"x": x}})["y"]
closed = flavor.load_model({model!r})
closed.close()
{before}
held, done = threading.Event(), threading.Event()
def hold():
    with model._lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold, daemon=True)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    code = 1
    try:
        {child}
        code = 0
    except BaseException:
        traceback.print_exc()
    {end}(code)
done.set()
_, status = os.waitpid(child, 0)
{after}
np.testing.assert_array_equal(model.run({{"x": x}})["y"], expected)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def openvino_bundle(folder: Path) -> Path:
    import openvino

    write_onnx(folder / "graph")
    data = folder / "model-data"
    (data / "artifact").mkdir(parents=True)
    graph = openvino.convert_model(folder / "graph" / "model.onnx")
    openvino.save_model(graph, data / "artifact" / "model.xml", compress_to_fp16=False)
    artifact = replace(
        describe(folder / "graph")["artifact"],
        entry="model.xml",
        digest=digest_tree(data / "artifact"),
        backend="openvino",
        toolchain={"openvino": version("openvino")},
        options={"config": {}, "hint": "f32", "shapes": []},
    )
    manifest = describe(folder / "graph", runtime={"openvino": version("openvino")})
    flavor.save_model(data, folder / "model", manifest={**manifest, "artifact": artifact})
    return folder / "model"


def run(model: Path, child: str, before: str = "", after: str = "", end: str = "os._exit") -> None:
    """`end`: a process that is forked from one that imported ONNX Runtime hangs in the exit functions of that library,
    whatever it did with it, so those end as multiprocessing's do."""
    child = child.replace("\n", "\n        ")
    script = SCRIPT.format(model=str(model), child=child, before=before, after=after, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_forked_process_answers(tmp_path: Path) -> None:
    """Broken: a fork while a request runs hangs at the first request, since nobody gives the lock back."""
    run(save_bundle(tmp_path), 'np.testing.assert_allclose(model.run({"x": x})["y"], expected, rtol=1e-5)')


def test_a_forked_process_that_asks_nothing_ends(tmp_path: Path) -> None:
    """Broken: any child of a process that holds an OpenVINO model hangs when it ends."""
    run(openvino_bundle(tmp_path), "pass", end="sys.exit")


def test_what_was_downloaded_stays_when_a_forked_process_ends(tmp_path: Path) -> None:
    """Broken: the first worker that gunicorn replaces deletes the files of all others."""
    deleted = str(tmp_path / "deleted")
    # OpenVINO's, since it is the one that a forked process can end with.
    before = f"model._downloaded.callback(lambda: open({deleted!r}, 'w').close())"
    after = f"assert not os.path.exists({deleted!r})"
    run(openvino_bundle(tmp_path), "pass", before, after, end="sys.exit")
    assert Path(deleted).exists()  # as the parent ended


@pytest.mark.parametrize(
    ("backend", "child", "message"),
    [
        ("openvino", "pass", "after the fork"),
        ("onnxruntime", "os.remove(weights)", "model.onnx"),
        ("onnxruntime", "model.close()", "closed"),
    ],
)
def test_what_a_forked_process_can_not_open_is_an_error(backend: str, child: str, message: str, tmp_path: Path) -> None:
    """Broken: behind gunicorn --preload every request to an OpenVINO model hangs for ever, since its threads stayed in
    the parent; files that were changed after they were loaded are run; what was closed comes back."""
    model = save_bundle(tmp_path) if backend == "onnxruntime" else openvino_bundle(tmp_path)
    before = (
        "from compile_stage.core.errors import CompileStageError\n"
        f"weights = {str(model / 'data' / 'artifact' / 'model.onnx')!r}"
    )
    lines = [child, "try:", "    model.run({'x': x})", "except CompileStageError as error:"]
    lines += [f"    assert {message!r} in str(error), error", "else:", "    raise AssertionError('it answered')"]
    run(model, "\n".join(lines), before)
