"""Small models and bundles for a registry that is a folder: as much of them as it looks at."""

from __future__ import annotations

from pathlib import Path

from compile_stage.core.digest import digest_tree
from compile_stage.core.records import Bundle


def write_model(folder: Path, content: str, flavor: str) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "model.bin").write_text(content)
    (folder / "data" / "manifest.json").write_text("{}")
    (folder / "MLmodel").write_text(f"flavors:\n  {flavor}:\n    data: data\n")
    return folder


def bundle_of(tmp_path: Path, content: str, key: str = "k") -> Bundle:
    """A bundle of a model `net-compiled`, with that content."""
    path = write_model(tmp_path / "bundles" / f"{key}-{content}", content, "compile_stage")
    return Bundle(
        path=str(path), digest=digest_tree(path / "data"), key=key, target="cpu", name="net-compiled", manifest={},
        tags={}, metrics={}, params={}, summary="",
    )  # fmt: skip
