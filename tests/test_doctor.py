"""`doctor` tells what is there, what is missing and how to get it, whatever a plug-in does."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from compile_stage.core import plugins
from compile_stage.core.capabilities import BackendCapabilities, RegistryCapabilities
from compile_stage.core.digest import canonical_json
from compile_stage.installation import DoctorEntry, examine


class Absent:
    """A plug-in whose package is not installed."""

    name = "absent"
    requires = ("no_such_package_anywhere",)
    extra = "absent"
    capabilities = BackendCapabilities(forms=("onnx",), devices=("cpu",), precisions=("fp32",), runtime=())


class Unreachable:
    """A registry that can't be reached."""

    name = "unreachable"
    requires = ()
    extra = ""
    capabilities = RegistryCapabilities()

    def check(self) -> str | None:
        raise ConnectionError("connection refused")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, DoctorEntry]:
    """Findings by name, with three plug-ins that are broken in different ways."""
    broken = {
        "absent": ("backends", f"{__name__}:Absent"),
        "gone": ("backends", "no_such_module_anywhere:Gone"),
        "unreachable": ("registries", f"{__name__}:Unreachable"),
    }
    load = EntryPoint.load
    classes = {"absent": Absent, "unreachable": Unreachable}
    monkeypatch.setattr(EntryPoint, "load", lambda self: classes.get(self.name) or load(self))
    found = {
        group: {
            name: EntryPoint(name=name, value=value, group=f"compile_stage.{group}")
            for name, (owner, value) in broken.items()
            if owner == group
        }
        for group in ("backends", "registries", "sources", "lowerings", "engines")
    }
    found["backends"]["onnxruntime"] = plugins._entries("backends")["onnxruntime"]
    monkeypatch.setattr(plugins, "_entries", lambda group: found[group])
    return {entry.name: entry for entry in examine().entries}


def test_a_missing_package_comes_with_its_pip_line(entries: dict[str, DoctorEntry]) -> None:
    assert not entries["absent"].ready
    assert entries["absent"].reason == "absent needs no_such_package_anywhere, which is not installed"
    assert entries["absent"].fix == 'pip install "compile-stage[absent]"'


def test_a_plugin_that_cannot_be_imported_is_a_finding(entries: dict[str, DoctorEntry]) -> None:
    assert not entries["gone"].ready
    assert "no_such_module_anywhere" in entries["gone"].reason


def test_a_registry_that_raises_is_a_finding(entries: dict[str, DoctorEntry]) -> None:
    assert entries["unreachable"].reason == "ConnectionError: connection refused"


def test_what_is_installed_is_ready_with_its_version(entries: dict[str, DoctorEntry]) -> None:
    assert entries["onnxruntime"].ready
    assert entries["onnxruntime"].version.startswith("onnxruntime ")


def test_the_report_travels_as_json(entries: dict[str, DoctorEntry]) -> None:
    assert json.loads(canonical_json(examine()))["machine"]["fingerprint"]


def test_a_cache_that_can_not_be_written_is_said(
    entries: dict[str, DoctorEntry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "cache"))
    assert examine().cache == str(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    assert "can't be written" in examine().cache


def test_a_registry_says_where_it_is(embedded: str) -> None:
    """Broken: the advice of every registry error, to look at what doctor shows, would lead nowhere."""
    (entry,) = (entry for entry in examine().entries if entry.name == "mlflow")
    assert entry.version.startswith("mlflow ")
    assert entry.version.endswith(f"at {embedded}")
