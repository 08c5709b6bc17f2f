"""docs/proof.md and docs/measurement.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_stage.measure import timing
from compile_stage.measure.classes import CLASS_METRICS
from compile_stage.measure.elementwise import DISTANCE_METRICS
from compile_stage.measure.metrics import STRUCTURE
from compile_stage.measure.stats import FEW_ROUNDS, samples_needed
from compile_stage.measure.tasks import HIGHER_IS_BETTER

DOCS = Path(__file__).parents[2] / "docs"
PROOF = (DOCS / "proof.md").read_text()
MEASUREMENT = (DOCS / "measurement.md").read_text()


@pytest.mark.parametrize(
    "metric", [*DISTANCE_METRICS, "allclose", "agreement", *CLASS_METRICS, *HIGHER_IS_BETTER, *STRUCTURE, "covered"]
)
def test_every_metric_is_described(metric: str) -> None:
    assert f"`{metric}`" in PROOF


def test_the_table_of_percentiles_is_the_rule() -> None:
    rows = re.findall(r"\| p([\d.]+) \| (\d+) \|", MEASUREMENT)
    assert len(rows) == 5
    assert all(samples_needed(float(p) / 100) == int(needed) for p, needed in rows)


def test_the_table_of_sample_sizes_is_its_formula() -> None:
    rows = re.findall(r"\| ([\d.]+) % \| ([\d,]+) \|", PROOF)
    assert len(rows) == 4
    for share, needed in rows:
        assert 1.96**2 * float(share) / 100 / 0.01**2 == pytest.approx(int(needed.replace(",", "")), abs=1)


def test_numbers_of_the_stopwatch() -> None:
    assert f"at least {timing.MIN_ROUNDS} rounds" in MEASUREMENT
    assert f"within {timing.STEADY_WITHIN:.0%}".replace("%", " %") in MEASUREMENT
    assert f"| 2 to {FEW_ROUNDS - 1} |" in MEASUREMENT
