"""What a store of local files is taken to hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage.core.errors import RegistryError
from compile_stage.registry.mlflow_held import _demand_there


def test_a_disk_that_is_not_mounted_has_lost_no_version(tmp_path: Path) -> None:
    """Broken: a run on a machine without the store's disk would mark every version that it finds as damaged, and
    publish it anew beside it."""
    artifacts = tmp_path / "store" / "1" / "models" / "m-1" / "artifacts"
    with pytest.raises(RegistryError, match="models is not there"):
        _demand_there(artifacts, "models:/a/1")
    artifacts.parents[1].mkdir(parents=True)
    _demand_there(artifacts, "models:/a/1")  # other models are there, this one is gone
