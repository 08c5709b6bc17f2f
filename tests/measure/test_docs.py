"""docs/proof.md and docs/measurement.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_stage.core.sample_sizes import samples_for_drop
from compile_stage.measure import timing
from compile_stage.measure.classes import CLASS_METRICS
from compile_stage.measure.columns import COLUMN_METRICS
from compile_stage.measure.elementwise import DISTANCE_METRICS
from compile_stage.measure.metrics import STRUCTURE
from compile_stage.measure.proportions import samples_needed_for
from compile_stage.measure.speedups import FEW_ROUNDS
from compile_stage.measure.stats import samples_needed
from compile_stage.measure.tasks import HIGHER_IS_BETTER

DOCS = Path(__file__).parents[2] / "docs"
PROOF = (DOCS / "proof.md").read_text()
MEASUREMENT = (DOCS / "measurement.md").read_text()


@pytest.mark.parametrize(
    "metric",
    [
        *DISTANCE_METRICS,
        "allclose",
        "agreement",
        *CLASS_METRICS,
        *COLUMN_METRICS,
        *HIGHER_IS_BETTER,
        *STRUCTURE,
        "covered",
    ],
)
def test_every_metric_is_described(metric: str) -> None:
    assert f"`{metric}`" in PROOF


def test_the_table_of_percentiles_is_the_rule() -> None:
    rows = re.findall(r"\| p([\d.]+) \| (\d+) \|", MEASUREMENT)
    assert len(rows) == 5
    assert all(samples_needed(float(p) / 100) == int(needed) for p, needed in rows)


def test_the_tables_of_sample_sizes_are_what_the_code_asks_for() -> None:
    """Broken: who brings as many samples as the page says is told that they are too few."""
    rows = re.findall(r"\| ([\d.]+) % \| ([\d,]+) \|", PROOF)
    assert len(rows) == 4
    for share, needed in rows:
        changed = float(share) / 100 / 2
        assert samples_needed_for(0.01, lost=changed, gained=changed) == int(needed.replace(",", ""))
    limits = re.findall(r"\| (0\.0\d+) \| (\d+) \|", PROOF)
    assert len(limits) == 4
    assert all(samples_for_drop(float(limit), 0.95) == int(needed) for limit, needed in limits)


def test_numbers_of_the_stopwatch() -> None:
    assert f"at least {timing.MIN_ROUNDS} rounds" in MEASUREMENT
    assert f"within {timing.STEADY_WITHIN:.0%}".replace("%", " %") in MEASUREMENT
    assert f"| 2 to {FEW_ROUNDS - 1} |" in MEASUREMENT
