"""What is installed: a light base, entry points that load, a wheel with all that it needs, pinned development
environments."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from compile_stage.core import plugins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRY_POINTS = [
    EntryPoint(name=name, value=value, group=group)
    for group, entries in PROJECT["entry-points"].items()
    for name, value in entries.items()
    if group.startswith("compile_stage.")  # the others are MLflow's, which loads what it asks for
]
# What only one plug-in needs, or what brings gigabytes.
EXTRAS_ONLY = {
    "ai-edge-litert", "executorch", "iree-base-compiler", "iree-base-runtime", "kfp", "lightgbm", "mlflow", "nncf",
    "onnxmltools", "onnxscript", "openvino", "pyarrow", "ray", "skl2onnx", "skops", "tensorflow", "tensorrt", "torch",
    "transformers", "xgboost",
}  # fmt: skip


def name_of(requirement: str) -> str:
    """The distribution's name, normalised."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_base_install_is_light():
    """No framework and no compiler but ONNX Runtime."""
    assert {name_of(requirement) for requirement in PROJECT["dependencies"]} & EXTRAS_ONLY == set()


@pytest.mark.parametrize("entry", ENTRY_POINTS, ids=lambda entry: f"{entry.group}:{entry.name}")
def test_entry_points_load_and_know_their_name(entry):
    """A plug-in is found by the name that it has; `pyproject.toml` and the class can't drift apart."""
    loaded = entry.load()
    assert loaded.name == entry.name
    assert loaded.extra == "" or loaded.extra in PROJECT["optional-dependencies"]
    assert isinstance(loaded.requires, tuple)


def test_what_is_installed_is_what_is_declared():
    """Broken: an installed plug-in would be declared and never found. An environment that `make` would make again,
    since pyproject.toml is newer, can't tell."""
    stamp = Path(sys.prefix) / ".installed"
    outdated = stamp.exists() and stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime
    for group in ("backends", "sources", "lowerings", "registries", "engines"):
        declared = {entry.name for entry in ENTRY_POINTS if entry.group == f"compile_stage.{group}"}
        if outdated and (lacking := sorted(declared - set(plugins.names(group)))):
            pytest.skip(f"pyproject.toml is newer than this environment, which lacks {', '.join(lacking)}: make test")
        assert declared <= set(plugins.names(group)), group


def test_the_script_is_there():
    script = EntryPoint(name="compile-stage", value=PROJECT["scripts"]["compile-stage"], group="console_scripts")
    assert callable(script.load())


def test_extras_refer_to_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    for requirements in extras.values():
        for requirement in requirements:
            if match := re.match(r"compile-stage\[([\w,-]+)\]", requirement):
                assert set(match[1].split(",")) <= set(extras)


def brought(extra: str) -> set[str]:
    """The distributions that an extra names, with those of the extras that it names."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        match = re.match(r"compile-stage\[([\w,-]+)\]", requirement)
        found |= set.union(*map(brought, match[1].split(","))) if match else {name_of(requirement)}
    return found


def test_the_development_environment_does_not_pull_cuda():
    """Plain xgboost brings CUDA libraries, so `dev` names the CPU-only distribution instead of the extra."""
    for extra in ("dev", "demo"):
        assert brought(extra) & {"xgboost", "tensorrt", "pycuda"} == set()


PROGRAM_BACKENDS = [
    entry.name
    for entry in ENTRY_POINTS
    if entry.group == "compile_stage.backends" and "onnx" not in plugins.load("backends", entry.name).capabilities.forms
]


@pytest.mark.parametrize("backend", PROGRAM_BACKENDS)
def test_the_extra_of_a_backend_that_starts_from_a_program_reads_pytorch_models(backend):
    """Broken: `pip install "compile-stage[executorch]"` brought a backend and nothing to take a model from, and every
    run ended at its first step."""
    extra = backend if backend in PROJECT["optional-dependencies"] else plugins.load("backends", backend).extra
    assert brought("torch") <= brought(extra)


def test_every_direct_requirement_of_the_development_environments_is_pinned():
    """What our CI was green with can be had again."""
    lines = (ROOT / "requirements" / "dev-constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if "==" in line and not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    used = {
        name_of(requirement)
        for extra in ("openvino", "torch", "sklearn", "lightgbm", "transformers", "demo", "dev")
        for requirement in extras[extra]
    }
    base = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert (used | base) - pinned == {"compile-stage"}


RAISED_BY_OTHERS = {"click", "pydantic", "rich", "protobuf"}
"""Of these, MLflow 3.5 and what it brings allow no lower version."""


def test_the_lowest_versions_are_those_that_are_promised():
    """Broken: a bound is raised or lowered, and CI goes on trying the old one: nobody knows whether what `pip install`
    may choose works."""
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "lowest.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
    extras = re.search(r"^LOWEST_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    requirements = {Requirement(one) for one in PROJECT["dependencies"]}
    for extra in extras[1].split(","):
        requirements |= {Requirement(one) for one in PROJECT["optional-dependencies"][extra]}
    for requirement in requirements:
        name = name_of(requirement.name)
        if name in ("compile-stage", "torch"):
            continue
        assert Version(pinned[name]) in requirement.specifier, requirement
        for bound in requirement.specifier:
            if bound.operator == ">=" and name not in RAISED_BY_OTHERS:
                least = Version(bound.version).release[:2]
                assert Version(pinned[name]).release[: len(least)] == least, requirement


def test_the_wheel_holds_all_that_the_package_needs(tmp_path):
    """Defaults, schemas and templates travel with the code, the licence too, and nothing else does."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "compile_stage").rglob("*")
        if path.is_file() and not {"__pycache__", ".mypy_cache"} & set(path.parts)
    }
    assert data <= set(held)
    assert {
        "compile_stage/py.typed",
        "compile_stage/policy/defaults.yaml",
        "compile_stage/policy/policy.schema.json",
    } <= set(held)
    assert any(name.startswith("compile_stage/report/templates/") for name in held)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    assert {name.partition("/")[0] for name in held if ".dist-info" not in name} == {"compile_stage"}
