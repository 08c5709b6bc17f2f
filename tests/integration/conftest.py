"""A small real model in a folder registry, and policies for it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import policy_text
from small_net import write_small_net

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
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


@pytest.fixture(scope="session")
def small_net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `small_model` is a copy of: `small-net`, and its samples `data.npz`."""
    folder = tmp_path_factory.mktemp("small-net")
    write_small_net(folder)
    return folder


@pytest.fixture
def small_model(small_net: Path, tmp_path: Path) -> Path:
    """An MLflow model directory with a two-layer network: x [batch, 8] → y [batch, 4] and z [batch, 2]. The same bytes
    in each test."""
    return Path(shutil.copytree(small_net, tmp_path, dirs_exist_ok=True)) / "small-net"


# What is made of the model and its samples, whatever is compiled of them.
OF_THE_ORIGINAL = ("inspect", "export", "sample", "reference")
# The policy of `known_run`: a test's policy that differs has that part of its run made anew.
KNOWN_TARGET = "backends: [onnxruntime], precisions: [fp32]"
KNOWN_BODY = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}"


@pytest.fixture(scope="session")
def cache_of_the_original(small_net: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a run of `small_net` left."""
    folder = tmp_path_factory.mktemp("known")
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(small_net / "data.npz", KNOWN_TARGET, KNOWN_BODY))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(folder))
        environment.setenv("COMPILE_STAGE_CACHE", str(folder / "cache"))
        result = api.run(f"folder:{small_net / 'small-net'}", policy, out=folder / "out", publish=False)
    assert result.exit_code == 0, result.problem
    return folder / "cache"


@pytest.fixture
def known_original(cache_of_the_original: Path, isolated_home: Path) -> None:
    """The cache of the test already knows `small_model` itself, which two workers need seconds to get to know: for
    tests of what comes after that. Nothing that is compiled of it is known, and nothing that is measured."""
    for step in OF_THE_ORIGINAL:
        shutil.copytree(cache_of_the_original / step, cache_root() / step, dirs_exist_ok=True)


@pytest.fixture
def known_run(cache_of_the_original: Path, isolated_home: Path) -> None:
    """The cache of the test already knows `small_model` compiled, proven and measured by `KNOWN_TARGET` and
    `KNOWN_BODY`, which starts five workers: for tests of what a run does with that."""
    shutil.copytree(cache_of_the_original, cache_root(), dirs_exist_ok=True)


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
