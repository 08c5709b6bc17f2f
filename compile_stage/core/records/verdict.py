"""Gates looked at: checks, verdicts, and the trials of a search."""

from __future__ import annotations

from enum import StrEnum

from compile_stage.core.records.base import record
from compile_stage.core.records.policy import Gate, Waiver


class Outcome(StrEnum):
    """NOT_RUN never passes."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_RUN = "not_run"


@record
class Check:
    """One gate, looked at once.

    Attributes:
        measured: None when it could not be measured.
        interval: (low, high) where the gate asked for confidence.
        samples: How many samples it saw.
        reason: One sentence, for a pass too (`0.9981 >= 0.99 over 256 samples`).
        worst: Indices of the worst samples, worst first (at most 5).
        waived: The waiver under which a failure was let through; the outcome stays FAIL.
        batch_sizes: Of a check that looks at several: those in which the answers were right.
    """

    gate: Gate
    outcome: Outcome
    measured: float | None
    reason: str
    output: str | None = None
    batch_size: int | None = None
    interval: tuple[float, float] | None = None
    samples: int = 0
    worst: tuple[int, ...] = ()
    waived: Waiver | None = None
    batch_sizes: tuple[int, ...] = ()


@record
class Verdict:
    """All checks of one artifact."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True only if there are checks, and every one passed or is waived by name (a NOT_RUN can't be waived)."""
        return bool(self.checks) and all(
            check.outcome is Outcome.PASS or (check.outcome is Outcome.FAIL and check.waived is not None)
            for check in self.checks
        )

    @property
    def waivers(self) -> tuple[Waiver, ...]:
        """The waivers that were needed."""
        by_gate = {
            (w.gate, w.target): w
            for check in self.checks
            if (w := check.waived) is not None and check.outcome is Outcome.FAIL
        }
        return tuple(by_gate.values())


@record
class WorstAnswer:
    """One of the samples on which an output is furthest from the original's.

    Attributes:
        sample: Index within the validation samples.
        error: As in `OutputErrors`.
        original, candidate: The two answers, shortened for people (`class 3 (0.98)`); empty unless the policy's
            `report.samples` is true.
    """

    sample: int
    error: float
    original: str = ""
    candidate: str = ""


@record
class OutputErrors:
    """How far one output is from the original's, sample by sample, at the target's first batch size.

    Attributes:
        errors: One for each sample, in their order: |candidate - original| / |original|, with Euclidean norms; of
            whole numbers and texts the share of elements that differ. Infinite where one side alone is not finite.
        worst: At most three samples, worst first; none that are exact.
    """

    output: str
    errors: tuple[float, ...]
    worst: tuple[WorstAnswer, ...] = ()


@record
class Sensitivity:
    """What one quantised node does to the output.

    Attributes:
        node: Name in the source graph.
        effect: Noise power over signal power at the outputs, when this node alone is quantised.
        cost: Multiplications of one run; what keeping the node in higher precision forgoes grows with it.
        together: Matrix nodes that can only be kept or quantised with it, itself not among them.
    """

    node: str
    op: str
    effect: float
    cost: float
    together: tuple[str, ...] = ()


@record
class Trial:
    """One evaluation of a search for mixed precision.

    Attributes:
        kept: Nodes of the source that stay in `float_type`.
        passed: The verdict's word.
        decisive: The check that failed by most, or passed by least.
        latency_s: Median call, measured quickly and alone; None when it was not measured.
        problem: Why there is no verdict; empty when there is one.
    """

    kept: tuple[str, ...]
    float_type: str
    passed: bool
    decisive: Check | None = None
    latency_s: float | None = None
    problem: str = ""
