"""A small real model in a folder registry, and policies for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import policy_text
from small_net import write_small_net

from compile_stage.core import plugins
from compile_stage.core.errors import MissingDependencyError
from compile_stage.core.toolchains import Toolchain
from compile_stage.engine import toolchains

FAKES = Path(__file__).parents[1] / "fake_backends"


@pytest.fixture
def served_here() -> None:
    """For a test that loads a third party's artifact itself, as whoever serves it does: that imports the backend."""


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The misbehaving backends, installed as a distribution of their own: on the path of this process and of its
    workers."""
    monkeypatch.syspath_prepend(str(FAKES))
    plugins.refresh()
    yield
    plugins.refresh()
    imported = {"fake_backends", "fake_lowering", "fake_source"} & set(sys.modules)
    for name in imported:  # another test's process must not have it
        del sys.modules[name]
    assert not imported or "served_here" in request.fixturenames, "a plug-in is imported in workers only"


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """An MLflow model directory with a two-layer network: x [batch, 8] → y [batch, 4] and z [batch, 2]."""
    return write_small_net(tmp_path)


@pytest.fixture
def toolchain() -> Callable[[str, Any], Toolchain]:
    """Makes a plug-in's toolchain, once, in the folder that COMPILE_STAGE_TOOLCHAINS names."""

    def installed(name: str, plugin: Any) -> Toolchain:
        if plugins.importable(plugin):
            pytest.skip(f"{name} is installed in this environment, where it then runs")
        if "COMPILE_STAGE_TOOLCHAINS" not in os.environ:
            pytest.skip(
                "making a toolchain takes a minute and the network: name a folder for it in COMPILE_STAGE_TOOLCHAINS"
            )
        try:
            return toolchains.install(name)
        except MissingDependencyError as error:
            pytest.skip(f"its packages can't be had: {str(error).splitlines()[-1]}")

    return installed


@pytest.fixture
def write_policy(tmp_path: Path) -> Callable[..., Path]:
    """A policy for `small_model`; `body` is added to it, `target` holds the keys of its one target."""

    def write(target: str, body: str = "") -> Path:
        path = tmp_path / "policy.yaml"
        path.write_text(policy_text(tmp_path / "data.npz", target, body))
        return path

    return write
