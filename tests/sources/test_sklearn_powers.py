"""PowerTransformer: missing numbers, and powers of columns that vary little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer

from compile_stage.core.records import Compliance

from .conftest import Proof, save_pickled

WINE, KINDS = load_wine(return_X_y=True)
TARGET = KINDS + WINE[:, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", [RandomForestRegressor(5, random_state=0), HistGradientBoostingRegressor(max_iter=5)])
@pytest.mark.parametrize("step", [PowerTransformer(), PowerTransformer(method="box-cox", standardize=False)])
def test_trees_behind_it_see_missing_numbers(tmp_path: Path, prove: Proof, step: Any, model: Any, dtype: Any) -> None:
    """Broken: trees were given 0 in the place of a NaN: 110 of 177 rows with NaN answered otherwise, by up to 60 %."""
    rows = WINE.astype(dtype)
    fitted = make_pipeline(step, model).fit(rows, TARGET)
    rows[::2, ::3] = np.nan
    source = save_pickled(tmp_path / "model", fitted, rows)
    prove(source, {"X": rows}, sizes=(1, 178), compliance=Compliance(allow_pickle=True))


def test_powers_of_numbers_of_both_signs_keep_their_digits(tmp_path: Path, prove: Proof) -> None:
    """Broken: of a column that varies by a hundredth, float32's powers have four digits less. Powers 0 and 2 have a
    logarithm in their place."""
    near = np.random.default_rng(0).normal(size=(200, 4)) * [0.01, 0.01, 1, 2] + [9, -9, 0, 0]
    step = PowerTransformer().fit(near)
    step.lambdas_[2:] = 0.0, 2.0
    model = make_pipeline(step, Ridge()).fit(near, near.sum(axis=1))
    model[0].lambdas_[2:] = 0.0, 2.0
    source = save_pickled(tmp_path / "model", model, near.astype(np.float32))
    prove(source, {"X": near.astype(np.float32)}, sizes=(200,), compliance=Compliance(allow_pickle=True), rtol=1e-4)
