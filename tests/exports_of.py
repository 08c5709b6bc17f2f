"""Exports for tests: one call, and a bundle whose manifest says something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compile_stage import api
from compile_stage.serving.manifest import sealed


def exported(uri: str, form: str, out: Path, **named: Any) -> Any:
    """`api.export_version`, whose defaults are those of the command line."""
    return api.export_version(uri, form, out, **named)


def with_manifest(bundle: Path, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Write a manifest anew, sealed, as a writer of the registry can."""
    file = bundle / "data" / "manifest.json"
    text = json.dumps(sealed(change(json.loads(file.read_text()))), indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n")
