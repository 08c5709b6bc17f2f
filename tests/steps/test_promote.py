"""Promotion: what must not move an alias."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_stage.core.digest import plain
from compile_stage.core.errors import GateError
from compile_stage.core.records import (
    Artifact,
    Check,
    Gate,
    Measurement,
    Outcome,
    Promotion,
    Receipt,
    Selection,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    Timing,
    Verdict,
    Waiver,
)
from compile_stage.core.tensors import Signature
from compile_stage.steps.promote import Incumbent, demand_passed, promote

SOURCE = SourceModel(uri="models:/m/1", name="m", version="1", flavor="onnx", path="/nowhere", digest="sha256:0")
ARTIFACT = Artifact(
    path="/nowhere",
    entry="model.onnx",
    digest="sha256:old",
    job_id="j",
    backend="onnxruntime",
    precision="fp32",
    toolchain={},
    hardware="here",
    signature=Signature(inputs=(), outputs=()),
    size_bytes=1,
)
TARGET = TargetResult(
    policy=TargetPolicy(
        target=Target(name="cpu", batch_sizes=(1, 8)), tolerances={}, performance=(), promote=Promotion(alias="prod")
    ),
    candidates=(),
    selection=Selection(target="cpu", winner="j", reason="", states={}, reasons={}),
    receipt=Receipt(uri="models:/m-compiled/2", name="m-compiled", version="2", digest="sha256:1", created=True),
)


def timing(batch_size: int, low: float, high: float, *, stable: bool = True) -> Timing:
    middle = (low + high) / 2
    return Timing(
        latency_s=(0.01,) * 50,
        batch_size=batch_size,
        stable=stable,
        environment="here",
        rounds=10,
        speedup=middle,
        speedup_interval=(low, high),
    )


def move(*timings: Timing) -> Any:
    """Promote against an incumbent that these were measured against. What gets through fails for want of a run to work in."""
    measured = Measurement(timings=timings, load_s=0.1, peak_memory_bytes=1) if timings else None
    context: Any = SimpleNamespace()
    return promote(context, SOURCE, TARGET, "prod", Incumbent(artifact=ARTIFACT), measured)


@pytest.mark.parametrize(
    ("timings", "says"),
    [
        ((), "could not be measured against its predecessor at batch size 1"),
        ((timing(1, 1.5, 1.6),), "could not be measured against its predecessor at batch size 8"),
        ((timing(1, 0.9, 0.95), timing(8, 2.0, 2.1)), "at batch size 1 it takes up to 1.111 times"),
        ((timing(1, 2.0, 2.1), timing(8, 0.9, 0.95)), "at batch size 8 it takes up to 1.111 times"),
        ((timing(1, 0.8, 3.0, stable=False), timing(8, 2.0, 2.1)), "after 10 rounds it is not known more narrowly"),
    ],
)
def test_slower_or_not_shown_to_be_as_fast_does_not_move_an_alias(timings: tuple[Timing, ...], says: str) -> None:
    """Broken: a batch size that was not compared, or a machine too noisy to compare on, would count as fast enough."""
    with pytest.raises(GateError, match=says):
        move(*timings)


def test_as_fast_at_every_batch_size_gets_through() -> None:
    """Broken: nothing would ever be promoted over something else."""
    with pytest.raises(AttributeError):  # of the empty context: nothing refused it
        move(timing(1, 0.99, 1.01), timing(8, 1.5, 2.5, stable=False))


def test_a_verdict_is_good_only_while_its_waivers_are(tmp_path: Path) -> None:
    """Broken: an exception with an end would have none once something was published under it."""
    gate = Gate(metric="cosine", limit=0.99, direction="at_least")
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-06-30")
    missed = Check(gate=gate, outcome=Outcome.FAIL, measured=0.9, reason="")

    def manifest(*checks: Check) -> dict[str, Any]:
        return {"verdict": plain(Verdict(checks=checks))}

    waived = Check(gate=gate, outcome=Outcome.FAIL, measured=0.9, reason="", waived=waiver)
    demand_passed(manifest(waived), tmp_path, date(2026, 6, 30), "uri")
    with pytest.raises(GateError, match="ended on 2026-06-30"):
        demand_passed(manifest(waived), tmp_path, date(2026, 7, 1), "uri")
    for checks in (
        (),
        (missed,),
        (Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason="", waived=waiver),),
    ):
        with pytest.raises(GateError, match="did not pass"):
            demand_passed(manifest(*checks), tmp_path, date(2026, 1, 1), "uri")
