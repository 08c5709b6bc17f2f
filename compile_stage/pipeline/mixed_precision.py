"""A candidate that missed its tolerance → the same with some nodes in higher precision, or the record of what was
tried.

`measure.search` decides which sets of nodes to try. Here each set is evaluated for real, within one budget for all
candidates of a target. Each measurement is cached, so that a run that was killed goes on where it was. `run` and
`debug` search by the same function (`find_mixed`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Candidate,
    Check,
    Job,
    Outcome,
    PortableModel,
    Sensitivity,
    TargetPolicy,
    Trial,
)
from compile_stage.measure import search as searching
from compile_stage.measure.structure import BEHAVIOUR
from compile_stage.pipeline.evaluate import (
    EvaluationOptions,
    Lower,
    evaluate,
    fastest,
    quick_latency,
)
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.job_workers import TrialWorkers

_SHARE = 0.5
"""One search may use so much of what is left while others wait; the last may use all."""

_STRUCTURE = ("outputs", "shape", "samples", *BEHAVIOUR)
"""Checks of ours on what there is to compare: no precision changes them."""

_ARITHMETIC = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "Attention")


@dataclass(frozen=True)
class Passing:
    """A candidate that passes, by its job, with its quick latency in seconds."""

    job: Job
    latency_s: float


@dataclass(frozen=True)
class Method:
    """How nodes are kept in higher precision, where it is not by mixing the source's nodes into a quantised graph.

    Attributes:
        ranking: The nodes with their effects on the output.
        lower: The nodes to keep → what makes the graph.
    """

    ranking: tuple[Sensitivity, ...]
    lower: Callable[[tuple[str, ...]], Lower]


@dataclass
class SearchBudget:
    """What the searches of one target have left, together.

    Attributes:
        ends: When the last of them must be over, on `time.monotonic`'s clock.
    """

    evaluations: int
    ends: float

    @classmethod
    def of(cls, target: TargetRun) -> SearchBudget:
        """The policy's bounds, and never more than what remains of the run's own budget."""
        fallback = target.policy.fallback
        seconds = min(fallback.max_minutes * 60, target.time.for_searches_s)
        return cls(evaluations=fallback.max_evaluations, ends=time.monotonic() + seconds)

    @property
    def seconds(self) -> float:
        """Time left; negative when it is over."""
        return self.ends - time.monotonic()


def search_missed(target: TargetRun, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, and behind each that was searched with success the mixed one that passes."""
    missed = order_searches(candidates, target.policy)
    if not missed:
        return list(candidates)
    budget = SearchBudget.of(target)
    passing = _to_beat(target, [c for c in candidates if c.has_passed], budget.seconds)
    searched: dict[str, list[Candidate]] = {}
    for candidate in missed:
        share = 1.0 if candidate is missed[-1] else _SHARE
        with target.context.events.step("search", candidate.job.id):
            noted, mixed = find_mixed(target, candidate, budget, passing=passing, share=share)
        searched[candidate.job.id] = [noted] if mixed is None else [noted, mixed]
        if mixed is not None:
            faster = _to_beat(target, [mixed], budget.seconds)
            passing = min((p for p in (passing, faster) if p), key=lambda p: p.latency_s, default=None)
    return [one for candidate in candidates for one in searched.get(candidate.job.id, [candidate])]


def order_searches(candidates: Sequence[Candidate], policy: TargetPolicy) -> list[Candidate]:
    """The candidates worth a search, those first that missed by least: they need the fewest nodes."""
    if not policy.fallback.mixed_precision:
        return []
    return sorted(
        (candidate for candidate in candidates if searchable(candidate)),
        key=lambda c: -min(searching.margin(check) for check in c.verdict.checks) if c.verdict else 0.0,
    )


def searchable(candidate: Candidate) -> bool:
    """True for a lowered graph that was validated whole and missed a tolerance by its numbers, not by its structure."""
    if candidate.verdict is None or candidate.portable is None or candidate.artifact is None:
        return False
    missed = [check for check in candidate.verdict.checks if check.outcome is not Outcome.PASS]
    return (
        not candidate.verdict.passed
        and plugins.mixes(candidate.job.scheme)
        and all(check.outcome is Outcome.FAIL and check.gate.metric not in _STRUCTURE for check in missed)
    )


def find_mixed(
    target: TargetRun,
    missed: Candidate,
    budget: SearchBudget,
    *,
    passing: Passing | None = None,
    share: float = 1.0,
    method: Method | None = None,
) -> tuple[Candidate, Candidate | None]:
    """Search around one candidate that missed its tolerance.

    Args:
        passing: The fastest candidate that passes; it is what a mixed one must beat. None where speed does not count.
        share: Of the budget that is left, so much may be used; the rest is for the searches that follow.
        method: None for a quantised graph (`searchable`).

    Returns:
        The candidate with its trials and a sentence, and the mixed candidate when one passes.
    """
    if budget.evaluations < 1 or budget.seconds <= 0:
        return replace(missed, note="the search for nodes to keep in higher precision had no budget left"), None
    ends = time.monotonic() + budget.seconds * share
    with closing(TrialWorkers(target, ends)) as workers:
        if passing is not None:
            plain_s = quick_latency(target, missed, workers.opened(missed.job))
            if plain_s is not None and plain_s > passing.latency_s * (1 - searching.NOISE):
                return replace(missed, note=_no_use(plain_s, passing)), None
        try:
            ranking = method.ranking if method else _rank(target, missed, workers)
        except CompileStageError as error:
            return replace(missed, note=f"the effect of each node could not be measured: {error.problem}"), None
        ranked = _worth_keeping(ranking)
        if len(ranked) < 2:
            return replace(missed, note=_nothing_to_keep(ranking, method)), None
        limits = searching.Limits(
            evaluations=max(1, math.ceil(budget.evaluations * share)),
            seconds=ends - time.monotonic(),
            ceiling_s=passing.latency_s if passing else None,
        )
        costs = {entry.node: entry.cost for entry in ranking}
        trials = _Trials(target, missed, ends, method, workers)
        outcome = searching.search(ranked, trials, limits, float_types=missed.job.scheme.float_types, costs=costs)
    budget.evaluations -= len(outcome.trials)
    winner = trials.candidates[(outcome.best.kept, outcome.best.float_type)] if outcome.best is not None else None
    outcome, nodes = _with_tied_nodes(outcome, ranking), sum(1 + len(entry.together) for entry in ranking)
    noted = replace(missed, trials=outcome.trials, note=_summary(outcome, nodes))
    if outcome.best is None or winner is None:
        return noted, None
    return noted, replace(winner, note=_what_is_kept(outcome.best, missed, nodes))


def mixed_job(job: Job, float_type: str) -> Job:
    """The job of a mixed candidate: `...--int8-sym-mixed`, or `...--int8-sym-mixed-bf16`."""
    suffix = "-mixed" if float_type == "fp32" else f"-mixed-{float_type}"
    scheme = replace(job.scheme, name=job.scheme.name + suffix, float_type=float_type, float_types=())
    return replace(job, id=job.id + suffix, scheme=scheme)


class _Trials:
    """Evaluates sets of kept nodes for real, and holds the candidates that pass."""

    def __init__(
        self, target: TargetRun, missed: Candidate, ends: float, method: Method | None, workers: TrialWorkers
    ) -> None:
        self._target, self._missed, self._method = target, missed, method
        self._ends, self._workers = ends, workers
        self.candidates: dict[tuple[tuple[str, ...], str], Candidate] = {}
        self._number = 0

    def __call__(self, kept: tuple[str, ...], float_type: str) -> Trial:
        self._number += 1
        job = mixed_job(self._missed.job, float_type)
        progress = f"trial {self._number}: {len(kept)} nodes in {float_type}"
        self._target.context.events.progress("search", self._missed.job.id, progress)
        mixed: Lower = lambda worker: _mix(self._target, worker, job, self._missed.portable, kept)  # noqa: E731
        options = EvaluationOptions(
            lower=self._method.lower(kept) if self._method else mixed,
            seconds=max(0.0, self._ends - time.monotonic()),
            time_quickly=True,
            workers=self._workers,
        )
        evaluation = evaluate(self._target, job, options)
        candidate = evaluation.candidate
        if candidate.verdict is None:
            problem = candidate.failure.problem if candidate.failure else candidate.reason
            return Trial(kept=kept, float_type=float_type, passed=False, problem=problem)
        if candidate.has_passed:
            self.candidates[(kept, float_type)] = candidate
        return Trial(
            kept=kept,
            float_type=float_type,
            passed=candidate.has_passed,
            decisive=_decisive(candidate),
            latency_s=evaluation.quick_latency_s,
        )


def _to_beat(target: TargetRun, passed: Sequence[Candidate], seconds: float) -> Passing | None:
    """The fastest of those that pass; None when speed is not what selection looks at."""
    if target.policy.prefer not in ("latency", "throughput"):
        return None
    best = fastest(target, passed, seconds)
    return Passing(best[0].job, best[1]) if best is not None else None


def _rank(target: TargetRun, missed: Candidate, workers: TrialWorkers) -> tuple[Sensitivity, ...]:
    """The quantised nodes of a candidate with their effects on the output, measured on the calibration samples. Raises
    CompileStageError when that can't be measured."""
    context, inputs, threads = target.context, target.inputs, missed.job.target.threads
    samples = inputs.calibration or inputs.validation
    key = {
        "model": inputs.portable.digest,
        "lowered": missed.portable.digest if missed.portable else "",
        "samples": samples.digest,
        "packages": plugins.package_versions("onnx", "onnxruntime", "numpy"),
    }

    def measure(_: Path) -> list[Sensitivity]:
        with workers.opened(missed.job) as pair:
            answer = pair.lowers.call(
                "rank_nodes", model=inputs.portable, lowered=missed.portable, samples=samples, threads=threads
            )
        return list(revive(tuple[Sensitivity, ...], answer))

    ranking: tuple[Sensitivity, ...] = revive(
        tuple[Sensitivity, ...], context.cached("rank/2", missed.job.id, key, measure).value
    )
    return ranking


def _worth_keeping(ranking: Sequence[Sensitivity]) -> tuple[str, ...]:
    """The nodes in the order of the search, up to the last that does arithmetic: with none of these quantised nothing
    is left that the precision makes faster, and backends refuse to call it by its name."""
    ranked = searching.order(ranking)
    carrying = {entry.node for entry in ranking if entry.op in _ARITHMETIC}
    last = max((place for place, node in enumerate(ranked) if node in carrying), default=len(ranked) - 1)
    return ranked[: last + 1]


def _with_tied_nodes(outcome: searching.Found, ranking: Sequence[Sensitivity]) -> searching.Found:
    """With every node that a trial kept: those that can only be kept together were tried by the name of one."""
    names = {entry.node: (entry.node, *entry.together) for entry in ranking}

    def whole(trial: Trial) -> Trial:
        return replace(trial, kept=tuple(dict.fromkeys(name for node in trial.kept for name in names[node])))

    best, undecided = (whole(one) if one is not None else None for one in (outcome.best, outcome.undecided))
    trials, too_slow = (tuple(map(whole, some)) for some in (outcome.trials, outcome.too_slow))
    return replace(outcome, best=best, trials=trials, too_slow=too_slow, undecided=undecided)


def _mix(
    target: TargetRun, worker: Worker, job: Job, lowered: PortableModel | None, keep: Sequence[str]
) -> PortableModel:
    """The lowered graph with the nodes of `keep` as the source has them."""
    if lowered is None:
        raise UsageError("there is no lowered graph to keep nodes in")
    source = target.inputs.portable
    key = {
        "model": source.digest,
        "lowered": lowered.digest,
        "keep": sorted(keep),
        "packages": plugins.package_versions("onnx"),
    }

    def make(into: Path) -> PortableModel:
        answer = worker.call("mix", model=source, lowered=lowered, keep=list(keep), into=str(into))
        mixed: PortableModel = revive(PortableModel, answer)
        return replace(mixed, path=Path(mixed.path).relative_to(into).as_posix())

    cached = target.context.cached("mix/2", job.id, key, make)
    mixed: PortableModel = revive(PortableModel, cached.value)
    kept = {job.scheme.float_type: mixed.kept["fp32"]} if "fp32" in mixed.kept else mixed.kept
    path = str(Path(cached.path) / mixed.path)
    return replace(mixed, path=path, kept=kept, smallest=source.smallest, largest=source.largest)


def _decisive(candidate: Candidate) -> Check | None:
    """The check that failed by most, or passed by least; of the policy's gates where there is one."""
    checks = candidate.checks
    metrics = {gate.metric for gate in candidate.job.gates}
    failed = [check for check in checks if check.outcome is not Outcome.PASS and check.waived is None]
    return min(failed or [c for c in checks if c.gate.metric in metrics] or checks, key=searching.margin, default=None)


# ----------------------------------------------------------------------------------------------------------- sentences


def _no_use(plain_s: float, passing: Passing) -> str:
    return (
        f"no search for nodes to keep in higher precision: with none kept a call takes {plain_s * 1e3:.3g} ms, and "
        f"{passing.job.label}, which passes, {passing.latency_s * 1e3:.3g} ms"
    )


def _nothing_to_keep(ranking: Sequence[Sensitivity], method: Method | None) -> str:
    kind = "quantised " if method is None else ""
    if not ranking:
        which = "no quantised node was found" if method is None else "no node was found whose output differs"
        return f"{which}, so none can be kept in higher precision"
    nodes = sum(1 + len(entry.together) for entry in ranking)
    return f"no search among its {nodes} {kind}nodes: without the first, none is left that the precision makes faster"


def _summary(outcome: searching.Found, nodes: int) -> str:
    tried = f"{len(outcome.trials)} {'trial' if len(outcome.trials) == 1 else 'trials'}"
    ended = "".join(map(_why_given_up, outcome.too_slow))
    ended += "; the search's budget ended it" if outcome.exhausted else ""
    ended += _why_ended(outcome.undecided)
    if (best := outcome.best) is not None:
        return (
            f"keeping {len(best.kept)} of {nodes} quantised nodes in {best.float_type} passes (found in {tried}{ended})"
        )
    tally = f"no set of its {nodes} quantised nodes kept in higher precision passed in {tried}{ended}"
    if (closest := outcome.closest) is None:
        return tally
    why = closest.decisive.reason if closest.decisive else closest.problem
    return f"{tally}; the closest keeps {len(closest.kept)} in {closest.float_type}: {why}"


def _why_given_up(trial: Trial) -> str:
    call = f"with {len(trial.kept)} kept a call takes {1e3 * (trial.latency_s or 0.0):.3g} ms"
    return f"; {trial.float_type} was given up, since {call}, longer than that of a candidate that passes"


def _why_ended(undecided: Trial | None) -> str:
    """More tries on the same samples would end with one that passes by luck."""
    if undecided is None or undecided.decisive is None:
        return ""
    kept, metric = len(undecided.kept), undecided.decisive.gate.metric
    return f"; it ended with {kept} kept, which misses {metric} for its interval alone: more samples may decide it"


def _what_is_kept(best: Trial, missed: Candidate, nodes: int) -> str:
    missing = _decisive(missed)
    verb, them = ("stays", "it") if len(best.kept) == 1 else ("stay", "them")
    without = f", since without {them} {missing.reason}" if missing else ""
    return f"{len(best.kept)} of {nodes} quantised nodes {verb} in {best.float_type}{without}"
