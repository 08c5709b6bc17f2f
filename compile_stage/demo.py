"""The whole stage on small real models, with nothing to set up: an embedded MLflow in a folder of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compile_stage.api import run
from compile_stage.core import plugins
from compile_stage.core.errors import MissingDependencyError, RegistryError
from compile_stage.core.events import Reporter, Silent
from compile_stage.core.records import RunResult
from compile_stage.core.shipped import folder, policy_file

MODELS = {"digits-cnn": "digits_cnn.py", "digits-boosting": "digits_boosting.py"}
"""Registered name → the example that trains it."""

POLICY = "shipped:cpu-server"

NEEDS = ("mlflow", "torch", "onnxscript", "sklearn", "skl2onnx", "skops", "openvino", "nncf")
"""Modules that training, exporting or compiling these models imports. Looked up before anything is trained, which takes
minutes."""

MEASURE_SECONDS = 12
"""The policy measures for up to a minute a target; a demo need not."""


def demo(out: Path, reporter: Reporter | None = None) -> list[RunResult]:
    """Train the models, register them, and take each through the shipped policy `cpu-server`.

    Args:
        out: Holds everything: the registry (unless MLFLOW_TRACKING_URI names another one), a folder of reports and
            bundles for each model.

    Returns:
        One result a model.

    Raises:
        MissingDependencyError: A package that the demo needs is not installed; said before anything is trained.
        UsageError: The examples are not part of this installation.
    """
    if missing := missing_packages():
        raise MissingDependencyError(
            f"the demo needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            fix='pip install "compile-stage[demo]"',
        )
    listener, out = reporter or Silent(), out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    examples, policy = folder("examples"), policy_file(POLICY)
    with _embedded_registry(out):
        _train_all(examples, listener)
        return [
            run(
                f"models:/{name}@candidate",
                policy,
                out=out / name,
                sets=[f"budget.measure_seconds={MEASURE_SECONDS}", "report.samples=true"],
                reporter=listener,
            )
            for name in MODELS
        ]


def missing_packages() -> tuple[str, ...]:
    """The modules that the demo needs and that can't be found here."""
    return tuple(module for module in NEEDS if importlib.util.find_spec(module) is None)


@contextlib.contextmanager
def _embedded_registry(out: Path) -> Iterator[None]:
    """MLflow on sqlite below `out`. It puts artifacts below the current folder, so that is where we go meanwhile."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        yield
        return
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{out}/mlflow.db"
    try:
        with contextlib.chdir(out):
            yield
    finally:
        del os.environ["MLFLOW_TRACKING_URI"]


def _train_all(examples: Path, reporter: Reporter) -> None:
    """Side by side: each is mostly one thread that imports. The registry is made first, since two processes that made
    its tables at once would get in each other's way."""
    if (trouble := plugins.load("registries", "mlflow").check()) is not None:
        raise RegistryError(f"the registry can't be used: {trouble}", where=os.environ["MLFLOW_TRACKING_URI"])
    with ThreadPoolExecutor(len(MODELS)) as pool:
        for done in [pool.submit(_train, name, examples / script, reporter) for name, script in MODELS.items()]:
            done.result()


def _train(name: str, script: Path, reporter: Reporter) -> None:
    """Run an example as its reader would; it registers the model itself."""
    reporter.began("train", name)
    began = time.monotonic()
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, str(script)], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        reporter.ended("train", name, time.monotonic() - began, last)
        raise RegistryError(
            f"training {name} failed: {last}",
            fix='install what the demo needs: pip install "compile-stage[demo]"',
            where=str(script),
        )
    reporter.ended("train", name, time.monotonic() - began, "done")
