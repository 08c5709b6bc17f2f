"""A recorded verdict, computed once more from what was measured.

A verdict comes back from a registry as text. Its outcomes are not believed: each is derived again from the measured
value, its interval and its limit, and the checks that such a model must have are looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from compile_stage.core.digest import revive
from compile_stage.core.performance_keys import policy_key
from compile_stage.core.quantities import told_apart
from compile_stage.core.records import Check, Gate, Job, Outcome, Verdict
from compile_stage.measure import gates as rules
from compile_stage.measure.performance import BY_INTERVAL, PERFORMANCE
from compile_stage.measure.structure import SOAK, STRUCTURE

_ROUNDING = 1e-9
"""Of a limit's size, or of 1: of tolerances. The step that judged allowed 1e-12 of the values behind a mean, which are
not recorded."""

_ONCE_BY_VALUE = ("class_recall", "p95_latency_ms")
"""Until 2026-11-23 these were judged by their value, and recorded without an interval."""


def refuse_verdict(verdict: Verdict, job: Job, performance: Sequence[Gate], today: date) -> str | None:
    """None when the recorded measurements make the verdict pass today, or the first reason why not.

    Args:
        job: Of the artifact; its gates are the tolerances.
        performance: The gates on speed, latency, size and memory.
    """
    return next(_reasons(verdict, job, performance, today), None)


def refuse_published(manifest: Mapping[str, Any], today: date) -> str | None:
    """The same of the verdict that a run published. Its policy may have asked for a soak (`budget.soak_seconds`), and
    then the check of it must be there. A validation elsewhere makes none.

    Args:
        manifest: Of one variant, with a verdict.
    """
    verdict: Verdict = revive(Verdict, manifest["verdict"])
    performance: tuple[Gate, ...] = revive(tuple[Gate, ...], manifest.get("performance", []))
    if (reason := refuse_verdict(verdict, revive(Job, manifest["job"]), performance, today)) is not None:
        return reason
    # As it is written: a budget of before the soak names no seconds, and the default of today was not asked for.
    asked = manifest.get("budget", {}).get("soak_seconds", 0) > 0
    if asked and not any(check.gate.metric == SOAK for check in verdict.checks):
        return "its policy asks for a soak (budget.soak_seconds), and nothing says that it was called for that long"
    return None


def _reasons(verdict: Verdict, job: Job, performance: Sequence[Gate], today: date) -> Iterator[str]:
    if not verdict.passed:
        yield "its verdict did not pass"
    for check in verdict.checks:
        if check.outcome is Outcome.PASS and not holds(check):
            yield f"a check says pass, and its own measurement does not: {describe(check)}"
        elif check.outcome is Outcome.FAIL and (reason := _refuse_waiver(check, job, today)) is not None:
            yield reason
    yield from _missing(verdict, job, performance)


def holds(check: Check) -> bool:
    """Whether what was measured holds the limit, by the rule of the step that judged (`gates.holds`): with the
    interval where the gate has a confidence or is on speed, latency or what is served, else by the value alone.

    Infinite is a measurement of decibels (a candidate whose answers have the same bits has no noise) and of a function
    of the policy's own; of other metrics nobody measures it.
    """
    gate, value = check.gate, check.measured
    if value is None or math.isnan(value) or (math.isinf(value) and not _has_infinity(gate.metric)):
        return False
    by_interval = gate.confidence is not None or gate.metric in BY_INTERVAL
    interval = check.interval if by_interval else None
    if interval is None and by_interval and gate.metric not in _ONCE_BY_VALUE:
        return False
    if interval is not None and any(map(math.isnan, interval)):
        return False
    slack = 0.0 if gate.metric in PERFORMANCE else _ROUNDING * max(1.0, abs(gate.limit))
    return rules.holds(gate, value, interval, slack)


def _has_infinity(metric: str) -> bool:
    return metric.endswith("_db") or metric.startswith("python:")


def describe(check: Check) -> str:
    """The check with its numbers, such as `cosine of output 'y' at batch size 1 is 0.93, the limit is at least
    0.99`."""
    place = f" of output {check.output!r}" if check.output else ""
    batch = f" at batch size {check.batch_size}" if check.batch_size else ""
    value, limit = told_apart(math.nan if check.measured is None else check.measured, check.gate.limit)
    key = policy_key(check.gate.metric)
    named = f" ({key})" if key != check.gate.metric else ""
    limit = f"the limit is {check.gate.direction.replace('_', ' ')} {limit}{named}"
    measured = "was not measured" if check.measured is None else f"is {value}"
    spread = f" ({check.interval[0]:g} to {check.interval[1]:g})" if check.interval else ""
    return f"{check.gate.metric}{place}{batch} {measured}{spread}, {limit}"


def _refuse_waiver(check: Check, job: Job, today: date) -> str | None:
    waiver = check.waived
    if waiver is None:
        return f"a check failed: {describe(check)}"
    if check.gate.metric in STRUCTURE:
        return f"{check.gate.metric} failed, which nobody can waive"
    if (waiver.gate, waiver.target) != (check.gate.metric, job.target.name):
        return f"the waiver of {waiver.gate} for {waiver.target} does not reach {describe(check)}"
    if date.fromisoformat(waiver.expires) < today:
        return f"it passed under a waiver of {waiver.gate} that ended on {waiver.expires}"
    return None


def _missing(verdict: Verdict, job: Job, performance: Sequence[Gate]) -> Iterator[str]:
    """Checks that every validation leaves: real samples and a gate of the policy at each batch size, and each gate on
    performance."""
    gates = {_unplaced(gate) for gate in job.gates}
    for batch_size in job.target.batch_sizes:
        checks = [check for check in verdict.checks if check.batch_size == batch_size]
        if not any(check.gate.metric == "samples" for check in checks):
            yield f"nothing says how many samples it was validated with at batch size {batch_size}"
        if not any(_unplaced(check.gate) in gates for check in checks):
            yield f"no tolerance of its own job was looked at, at batch size {batch_size}"
    for gate in performance:
        if not any(_unplaced(check.gate) == _unplaced(gate) for check in verdict.checks):
            yield f"its gate {policy_key(gate.metric)} was not looked at"


def _unplaced(gate: Gate) -> str:
    """Where a limit is written changes no verdict."""
    return repr(replace(gate, origin="", options=dict(sorted(gate.options.items()))))
