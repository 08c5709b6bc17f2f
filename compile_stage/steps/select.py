"""Candidates of one target → the winner, and for each loser why it lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date

from compile_stage.core import plugins
from compile_stage.core.records import (
    Candidate,
    CandidateState,
    Check,
    Measurement,
    Outcome,
    Selection,
    TargetPolicy,
    Timing,
    Verdict,
    Waiver,
)
from compile_stage.measure import stats
from compile_stage.measure.memory import SAME_MEMORY
from compile_stage.measure.metrics import apply_waivers
from compile_stage.measure.performance import check_performance


def waive(candidate: Candidate, policy: TargetPolicy, waivers: tuple[Waiver, ...], today: date) -> Candidate:
    """The candidate with the policy's waivers applied to what was validated, so that one that needs them is measured like any other."""
    if candidate.verdict is None:
        return candidate
    waived = apply_waivers(candidate.verdict.checks, waivers, policy.target.name, today)
    return replace(candidate, verdict=Verdict(checks=waived))


def judge_performance(
    candidate: Candidate, policy: TargetPolicy, waivers: tuple[Waiver, ...], today: date
) -> Candidate:
    """The candidate with the performance gates added to its verdict, and waivers applied to all of it."""
    candidate = waive(candidate, policy, waivers, today)
    if candidate.verdict is None or candidate.artifact is None:
        return candidate
    checks: tuple[Check, ...] = candidate.verdict.checks
    if candidate.verdict.passed or candidate.measurement is not None:
        checks += check_performance(policy.performance, candidate.measurement, candidate.artifact.size_bytes)
    waived = apply_waivers(checks, waivers, policy.target.name, today)
    return replace(candidate, verdict=Verdict(checks=waived))


def select(candidates: Sequence[Candidate], policy: TargetPolicy) -> Selection:
    """The best passing candidate by the policy's preference; among those that tie within the noise, the simplest.

    One that died, or was not measured, does not pass, whatever its verdict says: a policy without performance gates still ships
    only what was seen to run.
    """
    passing = [
        c
        for c in candidates
        if c.verdict is not None and c.verdict.passed and c.failure is None
        if c.measurement is not None and not c.measurement.stopped_early
    ]
    winner = _best(passing, policy) if passing else None
    states: dict[str, CandidateState] = {}
    reasons: dict[str, str] = {}
    for candidate in candidates:
        states[candidate.job.id], reason = _account(candidate, winner, policy)
        reasons[candidate.job.id] = f"{reason}; {candidate.note}" if candidate.note else reason
    return Selection(
        target=policy.target.name,
        winner=winner.job.id if winner else None,
        reason=reasons[winner.job.id] if winner else _no_winner(candidates, states),
        states=states,
        reasons=reasons,
    )


def _best(passing: list[Candidate], policy: TargetPolicy) -> Candidate:
    leader = min(passing, key=lambda c: _cost(c, policy))
    group = [c for c in passing if c is leader or _tied(c, leader, policy)]
    return min(group, key=lambda c: (_complexity(c), _cost(c, policy)))


def _cost(candidate: Candidate, policy: TargetPolicy) -> float:
    """Lower is better, in the unit of the policy's preference."""
    measurement, artifact = candidate.measurement, candidate.artifact
    if policy.prefer == "size":
        return float(artifact.size_bytes) if artifact else float("inf")
    if measurement is None:
        return float("inf")
    if policy.prefer == "memory":
        return float(measurement.peak_memory_bytes)
    sizes = policy.target.batch_sizes
    if policy.prefer == "throughput":
        return min(_per_sample(timing) for timing in measurement.timings)
    first = measurement.timing(sizes[0])
    return stats.median(first.latency_s) if first else float("inf")


def _tied(candidate: Candidate, leader: Candidate, policy: TargetPolicy) -> bool:
    if policy.prefer in ("size", "memory"):
        slack = SAME_MEMORY if policy.prefer == "memory" else 1.0  # files do not differ at all
        return _cost(candidate, policy) <= _cost(leader, policy) * slack
    best = _deciding_timing(leader.measurement, policy)
    # At the leader's batch size: only what was run in the same rounds can be told apart, or not.
    mine = candidate.measurement.timing(best.batch_size) if candidate.measurement and best else None
    return mine is not None and best is not None and stats.tied(mine, best)


def _deciding_timing(measurement: Measurement | None, policy: TargetPolicy) -> Timing | None:
    if measurement is None:
        return None
    if policy.prefer == "throughput":
        return min(measurement.timings, key=_per_sample)
    return measurement.timing(policy.target.batch_sizes[0])


def _per_sample(timing: Timing) -> float:
    return stats.median(timing.latency_s) / timing.batch_size


def _complexity(candidate: Candidate) -> tuple[int, int, int, int]:
    precision = candidate.job.scheme.precision
    kept = sum(len(nodes) for nodes in candidate.portable.kept.values()) if candidate.portable else 0
    wanted = candidate.job.target.backends
    position = wanted.index(candidate.job.backend) if candidate.job.backend in wanted else len(wanted)
    return plugins.complexity(precision), kept, len(candidate.job.tuning_options), position


def _account(candidate: Candidate, winner: Candidate | None, policy: TargetPolicy) -> tuple[CandidateState, str]:
    """One state and one sentence for every candidate."""
    if candidate.refused is not None:
        return "refused", candidate.refused
    if candidate.failure is not None:
        return (
            "failed",
            f"{candidate.failure.step} ended in {_KINDS[candidate.failure.kind]}: {candidate.failure.problem}",
        )
    if candidate.pruned:
        return "compiled_not_validated", candidate.pruned
    if candidate.verdict is None or candidate.artifact is None:
        why = (
            f"it can't be run on this machine: {candidate.not_runnable_here}"
            if candidate.not_runnable_here
            else "nothing was proven"
        )
        return "compiled_not_validated", f"compiled, not validated: {why}"
    if candidate.measurement is not None and candidate.measurement.stopped_early:
        return "lost", candidate.measurement.stopped_early
    if not candidate.verdict.passed:
        return "failed", _first_failure(candidate.verdict)
    if candidate.measurement is None:
        return "failed", "it passes every gate, and was not measured, so nobody has seen it serve"
    if winner is not None and candidate.job.id == winner.job.id:
        return "won", _why_won(candidate, policy)
    if winner is not None and _tied(candidate, winner, policy):
        why = (
            "the winner is the simpler of the two"
            if _complexity(winner) < _complexity(candidate)
            else "neither is simpler: the winner's own figure is the better"
        )
        return "lost", f"ties with the winner in {policy.prefer} within the noise, and {why}"
    ratio = _cost(candidate, policy) / _cost(winner, policy) if winner else float("nan")
    return "lost", f"passes, but {_worse(policy)} {ratio:.2f} times the winner's"


_KINDS = {
    "crash": "a crash",
    "out_of_memory": "running out of memory",
    "timeout": "a time-out",
    "exception": "an error",
}


def _worse(policy: TargetPolicy) -> str:
    return {
        "latency": "its latency is",
        "throughput": "its time per sample is",
        "memory": "its memory is",
        "size": "its size is",
    }[policy.prefer]


def _first_failure(verdict: Verdict) -> str:
    bad = [c for c in verdict.checks if c.outcome is not Outcome.PASS and c.waived is None]
    if not bad:
        return "nothing was checked"
    worst = next((c for c in bad if c.outcome is Outcome.FAIL), bad[0])
    place = f" (output {worst.output})" if worst.output else ""
    batch = f" at batch size {worst.batch_size}" if worst.batch_size else ""
    others = len(bad) - 1
    more = f"; {others} more check{'s' if others > 1 else ''} did not pass" if others else ""
    return f"{worst.gate.metric}{place}{batch}: {worst.reason}{more}"


def _why_won(candidate: Candidate, policy: TargetPolicy) -> str:
    timing = _deciding_timing(candidate.measurement, policy)
    waivers = candidate.verdict.waivers if candidate.verdict else ()
    under = f"; under {len(waivers)} waiver(s): {', '.join(w.gate for w in waivers)}" if waivers else ""
    if timing is None or timing.speedup is None:
        return f"passes every gate, best {policy.prefer}{under}"
    return f"passes every gate, best {policy.prefer}: {timing.speedup:.2f} times as fast as the original{under}"


def _no_winner(candidates: Sequence[Candidate], states: Mapping[str, CandidateState]) -> str:
    if not candidates:
        return "every job was refused before it ran"
    counts = {state: list(states.values()).count(state) for state in ("failed", "refused", "compiled_not_validated")}
    words = {"compiled_not_validated": "compiled, not validated"}
    said = ", ".join(f"{count} {words.get(state, state)}" for state, count in counts.items() if count)
    return f"no candidate passed every gate: {said}"
