"""A plug-in is its whole distribution: what an edit of any module of it changes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

import pytest

from compile_stage.core.distributions import distribution_digest

MODULES = {"kernels/__init__.py": "", "kernels/backend.py": "import kernels.fast\n", "kernels/fast.py": "SPEED = 1\n"}


def _hash(content: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()


def write(folder: Path, modules: dict[str, str]) -> None:
    for name, content in modules.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def entry_of(folder: Path) -> EntryPoint:
    (distribution,) = [d for d in distributions(path=[str(folder)]) if d.name == "kernels"]
    (entry,) = distribution.entry_points
    return entry


def installed(folder: Path) -> Path:
    """As from a wheel: RECORD lists the files. Returns the folder of the modules."""
    write(folder, MODULES)
    record = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in MODULES.items()]
    note = folder / "kernels-1.0.dist-info"
    write(note, {"METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n", "INSTALLER": "pip"})
    write(note, {"entry_points.txt": "[compile_stage.backends]\nkernels = kernels.backend:Kernels\n"})
    write(note, {"RECORD": "\n".join([*record, "kernels-1.0.dist-info/RECORD,,", "kernels-1.0.dist-info/INSTALLER,,"])})
    return folder


def developed(folder: Path) -> Path:
    """As by `pip install -e`: RECORD lists no modules, and the project lies elsewhere."""
    project = folder / "project"
    write(project, MODULES | {".venv/lib.py": "", "tests/test_it.py": ""})
    note = folder / "kernels-1.0.dist-info"
    write(note, {"METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n", "RECORD": "_kernels.pth,,\n"})
    write(note, {"entry_points.txt": "[compile_stage.backends]\nkernels = kernels.backend:Kernels\n"})
    write(note, {"direct_url.json": json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})})
    return project


@pytest.mark.parametrize("install", [installed, developed])
def test_an_edit_of_any_module_is_another_digest(install: Callable[[Path], Path], tmp_path: Path) -> None:
    """Broken: a compiler fixed in its second module would be shown its old results, from the cache and the registry."""
    modules = install(tmp_path)
    before = distribution_digest(entry_of(tmp_path))
    assert before.startswith("sha256:")
    assert distribution_digest(entry_of(tmp_path)) == before
    (modules / "kernels" / "__pycache__").mkdir()
    (modules / "kernels" / "__pycache__" / "fast.cpython-311.pyc").write_bytes(b"compiled")
    (tmp_path / "kernels-1.0.dist-info" / "INSTALLER").write_text("uv")
    assert distribution_digest(entry_of(tmp_path)) == before  # what Python and the installer leave is not the plug-in
    (modules / "kernels" / "fast.py").write_text("SPEED = 2\n")
    assert distribution_digest(entry_of(tmp_path)) != before


def test_the_same_distribution_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    """Broken: two machines would publish one model twice, since each keeps its packages in a folder of its own."""
    digests = {distribution_digest(entry_of(Path(installed(tmp_path / name)))) for name in ("a", "b")}
    assert len(digests) == 1


def test_a_plug_in_that_was_never_installed_counts_by_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a plug-in on PYTHONPATH could be edited, and its old results would be taken for new ones."""
    write(tmp_path, {"loose_backend.py": "import loose_kernels\n", "loose_kernels.py": "SPEED = 1\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint(name="loose", value="loose_backend:Loose", group="compile_stage.backends")
    assert not isinstance(entry.dist, Distribution)
    before = distribution_digest(entry)
    (tmp_path / "loose_kernels.py").write_text("SPEED = 2\n")
    assert distribution_digest(entry) != before != ""
