"""Where a published model refuses missing numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from tiny_bundle import save_bundle

from compile_stage.core.environment import hardware
from compile_stage.serving.manifest import VALIDATIONS, read_manifest, refused_values_of, write_validation

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, where it is imported for the first time

SECOND = {"refused": [{"input": "x", "columns": [1], "reason": "the original refuses it"}]}
WHOLE = {"refused": [{"input": "x", "columns": None, "reason": "the original refuses it"}]}


def rows(count: int) -> Any:
    return np.random.default_rng(count).random((count, 4), dtype=np.float32)


def with_nan(column: int) -> Any:
    given = rows(2).copy()
    given[1, column] = np.nan
    return given


def refused(path: Path, given: Any) -> str:
    with pytest.raises(MlflowException) as caught:
        mlflow.pyfunc.load_model(str(path)).predict(given)
    assert caught.value.get_http_status_code() == 400
    return str(caught.value)


def test_a_nan_is_refused_where_the_manifest_says_so(tmp_path: Path) -> None:
    """Broken: a row that the original refuses would be answered; or one that it takes would not."""
    path = save_bundle(tmp_path / "second", missing=SECOND)
    assert "column 1 of input 'x' holds a missing number (NaN), which is refused" in refused(path, with_nan(1))
    assert len(mlflow.pyfunc.load_model(str(path)).predict(with_nan(2))) == 2
    whole = save_bundle(tmp_path / "whole", missing=WHOLE)
    assert "input 'x' holds a missing number (NaN)" in refused(whole, with_nan(2))
    assert len(mlflow.pyfunc.load_model(str(whole)).predict(rows(2))) == 2


@pytest.mark.parametrize("said", [{}, {"missing": None}, {"missing": {"refused": []}}], ids=["old", "unknown", "none"])
def test_elsewhere_a_nan_is_taken(tmp_path: Path, said: dict[str, Any]) -> None:
    """Broken: models that are served today, or whose original takes a NaN, would refuse one."""
    path = save_bundle(tmp_path, **said)
    assert len(mlflow.pyfunc.load_model(str(path)).predict(with_nan(0))) == 2


def test_what_is_infinite_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """Broken: the message would leave whoever needs infinite values without one."""
    path = save_bundle(tmp_path)
    given = rows(2).copy()
    given[0, 0] = np.inf
    assert "send numbers from -3.4e+38 to 3.4e+38, or call compile_stage.flavor.load_model(URI).run" in refused(
        path, given
    )
    assert len(mlflow.pyfunc.load_model(str(path)).get_raw_model().run({"x": given})["y"]) == 2


def test_what_a_validation_on_this_machine_found_counts(tmp_path: Path) -> None:
    """Broken: what was compiled for other hardware would take a NaN that its original refuses."""
    path = save_bundle(tmp_path, missing=None, verdict=None)
    manifest, here = read_manifest(path), hardware()
    found = {
        "artifact": manifest["artifact"]["digest"], "hardware": here, "fingerprint": here.fingerprint, "passed": True,
        "missing": WHOLE, "runtime": {}, "at": "2026-11-23",
    }  # fmt: skip
    assert refused_values_of(manifest, path).missing is None
    write_validation(found, path / VALIDATIONS)
    rule = refused_values_of(manifest, path).missing
    assert rule is not None
    assert rule.refuse({"x": with_nan(3)}) is not None
