"""`backends: auto`: whatever is installed and suits the device, and a short look at what is hopeless."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage import api

pytestmark = [
    pytest.mark.usefixtures("fake_backends"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = """\
performance: {min_speedup: null}
budget: {measure_seconds: 6}
compliance: {allowed_backends: [onnxruntime, fake-slow]}
"""


def test_what_is_hopeless_is_dropped_early_and_said(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: a backend that is many times slower would cost each round of a run that only asked for whatever is good, or would vanish from the report."""
    policy = write_policy("backends: auto, precisions: [fp32], batch_sizes: [1, 4]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=False)
    target = result.targets[0]
    found = {candidate.job.backend: candidate for candidate in target.candidates}
    assert set(found) == {"onnxruntime", "fake-slow"}
    assert target.selection.winner == found["onnxruntime"].job.id
    slow = found["fake-slow"]
    assert target.selection.states[slow.job.id] == "lost"
    assert re.match(r"dropped after [26] rounds: its latency was at least", target.selection.reasons[slow.job.id])
    assert [timing.rounds for timing in slow.measurement.timings] in ([2], [6])
    assert len(found["onnxruntime"].measurement.timings) == 2
    assert "its latency was at least" in (policy.parent / "out" / "report.md").read_text()

    named = api.run(
        f"folder:{small_model}", policy, sets=["targets.cpu.backends=[onnxruntime, fake-slow]"],
        out=policy.parent / "named", publish=False,
    )  # fmt: skip
    (slow,) = [c for c in named.targets[0].candidates if c.job.backend == "fake-slow"]
    assert [timing.batch_size for timing in slow.measurement.timings] == [1, 4]
