"""The plug-in door."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from compile_stage.core import plugins
from compile_stage.core.capabilities import Capabilities
from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.records import Scheme


class Old:
    name, requires, extra = "openvino", (), ""
    forms, runtime = ("onnx",), ()


class Absent:
    name, requires, extra = "openvino", ("surely_not_installed",), "openvino"
    capabilities = Capabilities()


def test_a_typo_gets_the_nearest_name() -> None:
    """Broken: a typo in a policy would leave its author guessing."""
    with pytest.raises(UsageError) as caught:
        plugins.load("backends", "onnxruntme")
    assert "did you mean 'onnxruntime'?" in caught.value.fix


def test_a_copy_that_is_not_installed_says_so() -> None:
    """Broken: "unknown precision 'fp16'; did you mean fp16?", where the package lies on Python's path only."""
    program = (
        "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints(());"
        "from compile_stage.cli.main import main; main(['lint', 'policies/cpu-server.yaml'])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "compile-stage is on Python's path and is not installed" in done.stderr
    assert "did you mean" not in done.stderr


def test_a_missing_package_names_the_pip_line() -> None:
    """Broken: the user would not know what to install."""
    assert plugins.missing(Absent()) == (
        'openvino needs surely_not_installed, which is not installed: pip install "compile-stage[openvino]"'
    )
    with pytest.raises(MissingDependencyError) as caught:
        plugins.demand(Absent())
    assert caught.value.fix == 'pip install "compile-stage[openvino]"'


@pytest.mark.parametrize("group", ["backends", "sources", "lowerings", "registries", "engines"])
def test_every_built_in_loads_through_its_entry_point(group: plugins.Group) -> None:
    """Broken: a name that `doctor` lists could not be used."""
    assert plugins.names(group)
    for name in plugins.names(group):
        assert plugins.load(group, name).name == name


def test_a_uri_that_nobody_understands_is_explained() -> None:
    """Broken: a mistyped model URI would end in a traceback."""
    with pytest.raises(UsageError, match="no registry understands"):
        plugins.registry_for("s3//nonsense")


def test_a_folder_in_place_of_a_uri_is_told_how_to_be_named(tmp_path: Path) -> None:
    """Broken: the advice would not work for a model's folder, which needs `folder:` before it."""
    with pytest.raises(UsageError, match="is a path") as caught:
        plugins.registry_for(str(tmp_path))
    assert caught.value.fix == f"write folder:{tmp_path}"
    assert plugins.registry_for(f"folder:{tmp_path}").name == "folder"


def test_lowerings_declare_what_holds_for_their_precision() -> None:
    """Broken: a third party's precision would be judged by lists of ours: never mixed, always asked for samples, last
    in every tie."""
    order = sorted(plugins.precisions(), key=plugins.complexity)
    assert order == ["fp32", "bf16", "fp16", "int8-dynamic", "int8", "fp8", "int4"]
    schemes = [Scheme(precision=name, name=name) for name in order]
    assert [scheme.precision for scheme in schemes if plugins.needs_calibration(scheme)] == ["fp16", "int8", "fp8"]
    assert [scheme.precision for scheme in schemes if plugins.mixes(scheme)] == ["int8-dynamic", "int8", "int4"]


def test_a_native_scheme_says_itself_whether_it_calibrates() -> None:
    """Broken: a backend's own 8-bit weights would ask for samples that nobody looks at, or its own int8 would get
    none."""
    scheme = Scheme(precision="int8", name="int8-own", native=True)
    assert not plugins.needs_calibration(scheme)
    assert plugins.needs_calibration(replace(scheme, calibrates=True))
    assert not plugins.mixes(scheme)
    assert plugins.complexity("of-nobody") > plugins.complexity("int4")


def test_a_plug_in_without_capabilities_is_refused_by_the_attribute_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: a backend written for an older version would end a plan with an AttributeError, or never be asked for
    what it can do."""
    entry = EntryPoint("openvino", f"{__name__}:Old", "compile_stage.backends")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Old)
    monkeypatch.setattr(plugins, "_entries", lambda group: {"openvino": entry})
    with pytest.raises(
        UsageError, match="'openvino' has no class attribute `capabilities` that is a BackendCapab"
    ) as caught:
        plugins.load("backends", "openvino")
    assert "capabilities = compile_stage.core.capabilities.BackendCapabilities(...)" in caught.value.fix
