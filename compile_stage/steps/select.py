"""Candidates of one target → the winner, and for each loser why it lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from compile_stage.core import plugins
from compile_stage.core.quantities import percent
from compile_stage.core.records import (
    Candidate,
    Check,
    Measurement,
    OptimizationStep,
    Outcome,
    PredictSpeedup,
    ResultState,
    Selection,
    TargetPolicy,
    TargetResult,
    Timing,
    Verdict,
    is_ratio_known,
    surely_faster,
)
from compile_stage.measure import gates, speedups, stats
from compile_stage.measure.memory import SAME_MEMORY
from compile_stage.measure.performance import ratio_text
from compile_stage.measure.restarts import beside, shared_rounds

SIMPLER_AT = 1.05
"""Times the best latency that the simpler of two may take by its figure, where noise does not tell them apart. What
noise hides on a machine that changes its speed can be more than anybody would give for a simpler artifact."""

LESS_CPU = 0.75
"""Times the CPU time of the simplest that one must take, in each start that both were part of, to win in its place. A
small model on two threads may be as fast as on one, whose second core is free for other requests."""


def select(candidates: Sequence[Candidate], policy: TargetPolicy) -> Selection:
    """The best passing candidate by the policy's preference; among those that tie with it within the noise, and are at
    most 5 % behind it by their figures, the simplest. Nobody loses to one that is neither simpler nor ahead. Of those
    as precise as the simplest and as fast, one that takes at most 3/4 of its CPU time wins in its place."""
    passing = [candidate for candidate in candidates if candidate.has_passed]
    ranking = _rank(passing, policy) if passing else None
    placed = [_placed(candidate, ranking, policy) for candidate in candidates]
    states = {candidate.job.id: candidate.result_state for candidate in placed}
    reasons = {candidate.job.id: candidate.full_reason for candidate in placed}
    winner = ranking.winner.job.id if ranking else None
    return Selection(
        target=policy.target.name,
        winner=winner,
        reason=reasons[winner] if winner else _no_winner(candidates, states),
        states=states,
        reasons=reasons,
    )


@dataclass(frozen=True)
class _Ranking:
    """Attributes:
    costs: Of each passing candidate, by its job's id; lower is better, in the unit of the policy's preference.
    leader: The candidate with the lowest cost.
    tied: It, and all that tie with it within the noise, and the winner.
    simplest: The simplest of these, or one as simple that is ahead of it.
    winner: It, or one that takes far less CPU time.
    cpu_share: Of the winner, over that of the simplest; 1 where they are the same.
    """

    costs: Mapping[str, float]
    leader: Candidate
    tied: tuple[Candidate, ...]
    simplest: Candidate
    winner: Candidate
    cpu_share: float


def _rank(passing: Sequence[Candidate], policy: TargetPolicy) -> _Ranking:
    longest = _longest(passing)
    costs = {c.job.id: _cost(c, policy, longest) for c in passing}
    leader = min(passing, key=lambda c: costs[c.job.id])
    tied = tuple(c for c in passing if c is leader or _tied(c, leader, policy, costs))
    simplest = min(tied, key=lambda c: (_complexity(c), costs[c.job.id]))
    # One that is known better than the simplest, and so no longer ties with the leader, must not lose to it by that.
    ahead = [c for c in passing if costs[c.job.id] <= costs[simplest.job.id]]
    simplest = min(ahead, key=lambda c: (_complexity(c), costs[c.job.id]))
    tied = tied if simplest in tied else (*tied, simplest)
    shares = _far_less_cpu(simplest, tied, policy, costs)
    winner = min((c for c in tied if c.job.id in shares), key=lambda c: shares[c.job.id], default=simplest)
    share = shares.get(winner.job.id, 1.0)
    return _Ranking(costs=costs, leader=leader, tied=tied, simplest=simplest, winner=winner, cpu_share=share)


def _far_less_cpu(
    simplest: Candidate, tied: Sequence[Candidate], policy: TargetPolicy, costs: Mapping[str, float]
) -> dict[str, float]:
    """By job's id, the CPU time over the simplest one's of those that are as precise, no slower by their figures, and
    take far less."""
    if policy.prefer in ("size", "memory"):
        return {}
    return {
        other.job.id: share
        for other in tied
        if _complexity(other)[:2] == _complexity(simplest)[:2]
        and costs[other.job.id] <= (1 + speedups.RESOLUTION) * costs[simplest.job.id]
        and (share := _cpu_share(other, simplest, policy)) is not None
        and share <= LESS_CPU
    }


def _cpu_share(own: Candidate, other: Candidate, policy: TargetPolicy) -> float | None:
    """CPU time of a call over that of the other, the largest of the starts that both were part of; None where these
    are too few to show how processes differ."""
    best = speedups.deciding_timing(other.measurement, policy)
    mine = own.measurement.timing(best.batch_size) if own.measurement and best else None
    if mine is None or best is None:
        return None
    own_s, other_s = speedups.cpu_by_start(mine), speedups.cpu_by_start(best)
    shares = [own_s[start] / other_s[start] for start in own_s.keys() & other_s.keys() if other_s[start] > 0]
    return max(shares) if len(shares) >= speedups.FEW_PROCESSES else None


def _longest(candidates: Sequence[Candidate]) -> dict[int, Timing]:
    """At each batch size the timing with the most rounds."""
    longest: dict[int, Timing] = {}
    for timing in (t for c in candidates if c.measurement is not None for t in c.measurement.timings):
        if timing.batch_size not in longest or timing.rounds > longest[timing.batch_size].rounds:
            longest[timing.batch_size] = timing
    return longest


def _cost(candidate: Candidate, policy: TargetPolicy, longest: Mapping[int, Timing]) -> float:
    measurement, artifact = candidate.measurement, candidate.artifact
    if policy.prefer == "size":
        return float(artifact.size_bytes) if artifact else float("inf")
    if measurement is None:
        return float("inf")
    if policy.prefer == "memory":
        return float(measurement.peak_memory_bytes)
    timing = speedups.deciding_timing(measurement, policy)
    if timing is None:
        return float("inf")
    latency_s = _latency_in_all_rounds(timing, longest[timing.batch_size])
    return latency_s / timing.batch_size if policy.prefer == "throughput" else latency_s


def _latency_in_all_rounds(timing: Timing, longest: Timing) -> float:
    """Seconds of a call, as it would be in the rounds of `longest`: by the quotient of both in the rounds that both
    ran; where there are none, by their speedups over the original, each of its own rounds.

    Who left the rounds early, or was not started again, met the machine as it was in the first of them. Were it slower
    later, they would seem to be faster than whoever stayed. The original is no measure where another can be: it may be
    a slow model with one noisy call a round, and six such rounds can make a candidate seem ten times as fast.
    """
    if timing.rounds == longest.rounds:
        return stats.median(timing.latency_s)
    if shared_rounds(longest, timing).own:
        return stats.median(longest.latency_s) * beside(longest, timing)
    if not timing.speedup or not longest.speedup:
        return stats.median(timing.latency_s)
    return stats.median(longest.latency_s) * longest.speedup / timing.speedup


def _tied(candidate: Candidate, leader: Candidate, policy: TargetPolicy, costs: Mapping[str, float]) -> bool:
    if policy.prefer in ("size", "memory"):
        slack = SAME_MEMORY if policy.prefer == "memory" else 1.0  # files do not differ at all
        return costs[candidate.job.id] <= costs[leader.job.id] * slack
    if costs[candidate.job.id] > costs[leader.job.id] * SIMPLER_AT:
        return False
    best = speedups.deciding_timing(leader.measurement, policy)
    # At the leader's batch size: only what was run in the same rounds can be told apart.
    mine = candidate.measurement.timing(best.batch_size) if candidate.measurement and best else None
    return mine is not None and best is not None and speedups.tied(mine, best)


def _complexity(candidate: Candidate) -> tuple[int, int, int, int]:
    precision = candidate.job.scheme.precision
    kept = sum(len(nodes) for nodes in candidate.portable.kept.values()) if candidate.portable else 0
    wanted = candidate.job.target.backends
    position = wanted.index(candidate.job.backend) if candidate.job.backend in wanted else len(wanted)
    return plugins.complexity(precision), kept, len(candidate.job.tuning_options), position


def _placed(candidate: Candidate, ranking: _Ranking | None, policy: TargetPolicy) -> Candidate:
    """Won or lost, and why, for what passed; all else keeps its state."""
    if not candidate.has_passed or ranking is None:
        return candidate
    if candidate is ranking.winner:
        return candidate.in_state("won", _why_won(candidate, ranking, policy))
    under = _under_waivers(candidate)
    if candidate in ranking.tied:
        behind = _why_behind(candidate, ranking)
        return candidate.in_state(
            "lost", f"ties with the winner in {policy.prefer} within the noise, and {behind}{under}"
        )
    ratio = ranking.costs[candidate.job.id] / ranking.costs[ranking.leader.job.id]
    whose = "the winner's" if ranking.leader is ranking.winner else f"that of {ranking.leader.job.label}"
    how = _compared(candidate, ranking.leader, policy, ratio)
    return candidate.in_state("lost", f"passes, but {_worse(policy)} {ratio:.2f} times {whose}{how}{under}")


def _why_behind(candidate: Candidate, ranking: _Ranking) -> str:
    """What decided against one that ties with the winner."""
    if candidate is ranking.simplest:
        return f"takes {1 / ranking.cpu_share:.2g} times its CPU time"
    if ranking.winner is not ranking.simplest:
        other = f"{ranking.simplest.job.label}, the simplest"
        return f"the winner takes {percent(ranking.cpu_share)} of the CPU time of {other}"
    if _complexity(ranking.winner) < _complexity(candidate):
        return "the winner is the simpler of the two"
    return "neither is simpler: the winner's own figure is the better"


def _compared(candidate: Candidate, leader: Candidate, policy: TargetPolicy, ratio: float) -> str:
    """How the ratio came about, where it is not that of the medians that a report shows."""
    if policy.prefer in ("size", "memory"):
        return ""
    own, best = (speedups.deciding_timing(one.measurement, policy) for one in (candidate, leader))
    if own is None or best is None or own.rounds == best.rounds:
        return ""
    by_medians = speedups.per_sample_s(own) / speedups.per_sample_s(best)
    if abs(math.log(by_medians / ratio)) <= math.log1p(speedups.RESOLUTION):
        return ""
    return f" ({by_medians:.2f} times by the medians shown, which are of different rounds)"


def _worse(policy: TargetPolicy) -> str:
    return {
        "latency": "its latency is",
        "throughput": "its time per sample is",
        "memory": "its memory is",
        "size": "its size is",
    }[policy.prefer]


def _why_won(candidate: Candidate, ranking: _Ranking, policy: TargetPolicy) -> str:
    timing = speedups.deciding_timing(candidate.measurement, policy)
    under = _under_waivers(candidate)
    passes = "passes every gate that is not waived" if under else "passes every gate"
    at = f" (at batch {timing.batch_size})" if policy.prefer == "throughput" and timing is not None else ""
    best = f"best {policy.prefer}{at}"
    if candidate is not ranking.simplest:
        other = f"{ranking.simplest.job.label} within the noise, at {percent(ranking.cpu_share)} of its CPU time"
        best = f"as good in {policy.prefer} as {other}"
    elif candidate is not ranking.leader:
        count, first = len(ranking.tied), ranking.leader.job.label
        best = f"the simplest of {count} that tie in {policy.prefer} within the noise (the best figure has {first})"
    if timing is None or timing.speedup is None:
        return f"{passes}, {best}{under}"
    return f"{passes}, {best}: {_how_fast(timing)}{_whole(candidate)}{under}"


def without_speed(target: TargetResult) -> TargetResult:
    """The target without a speedup over its baseline: for one that was found to be slowed down after the winner was
    selected (`PredictSpeedup.contradiction`).

    Reports, `result.json` and the manifest are made of this record. The winner's reason says that its speedup is not
    known. Timings keep their latencies, and no ratio. The winner's check of `min_speedup` holds the figure through
    predict(), by which it is judged instead; those of the others no figure.
    Nor has the step of option tuning that was compared with the original.
    """
    winner, found = target.winner, target.predict_speedup
    if winner is None or found is None:
        return target
    timing = speedups.deciding_timing(winner.measurement, target.policy)
    said = _how_fast(timing) if timing is not None and timing.speedup is not None else None
    unknown = "how many times as fast as the original is not known (something slowed the baseline down)"

    def without_figure(reason: str) -> str:
        return reason if said is None else reason.replace(said, unknown)

    candidates = []
    for one in target.candidates:
        is_winner = one.job.id == winner.job.id
        changed = replace(
            one,
            measurement=_without_ratios(one.measurement),
            verdict=_judged_by_predict(one.verdict, found if is_winner else None),
        )
        candidates.append(replace(changed, reason=without_figure(one.reason)) if is_winner else changed)
    selection = replace(
        target.selection,
        reason=without_figure(target.selection.reason),
        reasons={job_id: without_figure(reason) if job_id == winner.job.id else reason
                 for job_id, reason in target.selection.reasons.items()},
    )  # fmt: skip
    return replace(
        target, candidates=tuple(candidates), selection=selection, ladder=tuple(_without_the_originals(target.ladder))
    )


def _without_the_originals(ladder: Sequence[OptimizationStep]) -> Iterator[OptimizationStep]:
    """The steps of option tuning, those that were compared with the original without a figure."""
    before = ""
    for step in ladder:
        yield replace(step, speedup=None, speedup_interval=None) if before == "original" else step
        before = step.kind if step.accepted else before


def _without_ratios(measured: Measurement | None) -> Measurement | None:
    if measured is None:
        return None
    timings = (
        replace(timing, speedup=None, speedup_interval=None, mean_speedup_interval=None) for timing in measured.timings
    )
    return replace(measured, timings=tuple(timings))


def _judged_by_predict(verdict: Verdict | None, found: PredictSpeedup | None) -> Verdict | None:
    """The verdict with the figure through predict() in its checks of the speedup; None for a candidate whose predict()
    was not timed."""
    if verdict is None:
        return None
    checks = (_by_predict(check, found) if check.gate.metric == "speedup" else check for check in verdict.checks)
    return replace(verdict, checks=tuple(checks))


def _by_predict(check: Check, found: PredictSpeedup | None) -> Check:
    unknown = "something slowed the baseline down, so that the speedup over it is not known"
    if found is None or found.speedup is None or found.interval is None:
        return replace(check, measured=None, interval=None, reason=unknown)
    low, high = map(ratio_text, found.interval)
    holds = gates.holds(check.gate, found.speedup, found.interval)
    return replace(
        check,
        outcome=Outcome.PASS if holds else Outcome.FAIL,
        measured=found.speedup,
        interval=found.interval,
        samples=found.pairs,
        reason=f"through predict() of {found.rows} row{'' if found.rows == 1 else 's'} it is "
        f"{ratio_text(found.speedup)} times as fast as the original (95 % interval {low} to {high}); the limit is "
        f"{check.gate.limit:g}; {unknown}",
    )


def _under_waivers(candidate: Candidate) -> str:
    """The gates that it missed and that are waived."""
    waivers = candidate.verdict.waivers if candidate.verdict else ()
    return (
        f"; under {len(waivers)} {'waiver' if len(waivers) == 1 else 'waivers'}: {', '.join(w.gate for w in waivers)}"
        if waivers
        else ""
    )


def _whole(candidate: Candidate) -> str:
    """Of a model whose predict() was compared as a whole: how fast that is, beside the network."""
    whole = next((check for check in candidate.checks if check.gate.metric == "predict_speedup"), None)
    if whole is None or whole.measured is None:
        return ""
    low, high = whole.interval or (whole.measured, whole.measured)
    return f", its predict() as a whole {whole.measured:.2f} times ({low:.2f} to {high:.2f})"


def _how_fast(timing: Timing) -> str:
    if timing.headline_speedup is not None or timing.speedup_interval is None:
        return f"{timing.speedup:.2f} times as fast as the original"
    if (least := surely_faster(timing.speedup_interval)) is not None:
        return f"at least {ratio_text(least)} times as fast as the original (the measurement was unstable)"
    if not is_ratio_known(timing.speedup_interval):
        return "how many times as fast as the original is not known (the measurement was unstable)"
    low, high = timing.speedup_interval
    return (
        f"between {ratio_text(low)} and {ratio_text(high)} times as fast as the original (the measurement was unstable)"
    )


def _no_winner(candidates: Sequence[Candidate], states: Mapping[str, ResultState]) -> str:
    if not candidates:
        return "every job was refused before it ran"
    counts = {state: list(states.values()).count(state) for state in ("failed", "refused", "compiled_not_validated")}
    words = {"compiled_not_validated": "compiled but not validated"}
    if late := sum(c.failure is not None and c.failure.is_late for c in candidates):  # they missed no gate
        counts["failed"] -= late
        words["late"], counts["late"] = "not tried or not measured for want of time (budget.minutes)", late
    numbers = ", ".join(f"{count} {words.get(state, state)}" for state, count in counts.items() if count)
    return f"no candidate passed every gate: {numbers}"
