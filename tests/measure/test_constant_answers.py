"""Limits that one and the same answer to all samples would hold are noted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core.records import Gate
from compile_stage.measure.constant_answers import constant_notes
from compile_stage.policy.load import load_policy
from tests.factories import job

OUTPUTS = {"y": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}
LOOSE = Gate(metric="max_abs", limit=1000.0, direction="at_most")
COSINE = Gate(metric="cosine", limit=0.9, direction="at_least")


def notes(*gates: Gate, outputs: dict[str, np.ndarray] = OUTPUTS) -> tuple[str, ...]:
    return constant_notes([replace(job(), gates=gates)], outputs)


def test_a_limit_far_above_what_the_original_answers_is_noted() -> None:
    """Broken: whatever an artifact answers passes, and the report says that it holds every gate."""
    (note,) = notes(LOOSE)
    assert "the limits on output 'y' (max_abs 1000) hold too where every sample gets one and the same answer" in note
    assert not notes(replace(LOOSE, limit=1.0)), "no constant is as near to all of them"
    assert not notes(LOOSE, COSINE), "one that can fail is enough"
    assert notes(replace(LOOSE, output="y"), COSINE, outputs={"y": np.linspace(9, 10, 64, dtype=np.float32)})


@pytest.mark.parametrize(
    ("gate", "output"),
    [
        (Gate(metric="agreement", limit=0.9, direction="at_least"), np.zeros(64, np.int64)),
        (Gate(metric="accuracy", limit=0.1, direction="at_most", options={"drop": "max_drop"}), OUTPUTS["y"]),
        (Gate(metric="python:a.b:c", limit=0.1, direction="at_most"), OUTPUTS["y"]),
    ],
)
def test_what_labels_or_an_own_metric_judge_is_left_to_them(gate: Gate, output: np.ndarray) -> None:
    """Broken: each model of a rare event, and each policy that cares for labels alone, is called weak."""
    assert not notes(gate, outputs={"y": output})


def test_the_shipped_limits_of_every_precision_can_fail(tmp_path: Path) -> None:
    """Broken: every report has a note that nobody can mend."""
    path = tmp_path / "p.yaml"
    path.write_text("apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {t: {}}\n")
    (target,) = load_policy(path).targets
    far_from_zero = {"y": OUTPUTS["y"] + 100}
    for gates in target.tolerances.values():
        general = [gate for gate in gates if "drop" not in gate.options and not gate.metric.startswith("token_")]
        assert not notes(*general)
        assert not notes(*general, outputs=far_from_zero)
