"""A candidate that missed its tolerance → the same with a few nodes in higher precision, or the proof of what was tried.

How the search goes is `measure.search`; here are the measurements that it needs, each cached, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Artifact,
    Candidate,
    Check,
    Fallback,
    Job,
    Outcome,
    PortableModel,
    SampleSet,
    Sensitivity,
    TargetPolicy,
    Trial,
)
from compile_stage.measure import search as searching
from compile_stage.measure import stats

_STRUCTURE = ("outputs", "shape", "samples")
"""Checks of ours on what there is to compare: no precision mends them."""

_ARITHMETIC = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "Attention")

_WARM_UP_S, _TURN_S, _TURNS = 0.5, 0.1, 4

Lower = Callable[[Worker], PortableModel]


@dataclass(frozen=True)
class Passing:
    """A candidate that passes, by its job, with its quick latency."""

    job: Job
    latency_s: float


class Workshop(Protocol):
    """Where a search has its candidates made and measured. `seconds` is a hard limit of each call."""

    portable: PortableModel

    def attempt(self, job: Job, make: Lower, seconds: float) -> Candidate:
        """Compile and validate a job whose graph `make` gives."""

    def rank(self, missed: Candidate, seconds: float) -> Sequence[Sensitivity]:
        """The quantised nodes with their effects. Raises CompileStageError when they can't be measured."""

    def latency(self, candidate: Candidate, seconds: float) -> float | None:
        """Its quick latency; None when it can't be had."""


@dataclass
class SearchBudget:
    """What the searches of one target have left, together.

    Attributes:
        ends: When the last of them must be over, on `time.monotonic`'s clock.
    """

    evaluations: int
    ends: float

    @property
    def seconds(self) -> float:
        """Time left; negative when it is over."""
        return self.ends - time.monotonic()


def open_budget(fallback: Fallback, left_s: float) -> SearchBudget:
    """The policy's bounds, and never more than `left_s`, what remains of the run's own budget."""
    return SearchBudget(
        evaluations=fallback.max_evaluations, ends=time.monotonic() + min(fallback.max_minutes * 60, left_s)
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


def _worth_keeping(ranking: Sequence[Sensitivity]) -> tuple[str, ...]:
    """The nodes in the order of the search, up to the last that carries arithmetic: without one of these quantised nothing is left
    that the precision makes faster, and backends refuse to call it by its name."""
    ranked = searching.order(ranking)
    carrying = {entry.node for entry in ranking if entry.op in _ARITHMETIC}
    last = max((place for place, node in enumerate(ranked) if node in carrying), default=len(ranked) - 1)
    return ranked[: last + 1]


def quick_latency(context: Context, worker: Worker, job: Job, artifact: Artifact, samples: SampleSet) -> float:
    """Median seconds of a call at the target's first batch size, from a second of measuring. Not interleaved: it guides the
    search, and nothing is claimed from it."""
    batch_size = job.target.batch_sizes[0]
    key = {
        "artifact": [artifact.digest, artifact.options, artifact.toolchain],
        "backend": job.backend,
        "made_by": plugins.made_by("backends", job.backend),
        "samples": samples.digest,
        "batch_size": batch_size,
        "threads": job.target.threads,
        "hardware": context.hardware,
    }

    def make(_: Path) -> float:
        with context.engine.alone():
            worker.call("open_artifact", artifact=artifact, threads=job.target.threads)
            worker.call("warm_up", samples=samples, batch_size=batch_size, seconds=_WARM_UP_S)
            turns = [
                worker.call("time_turn", samples=samples, batch_size=batch_size, seconds=_TURN_S) for _ in range(_TURNS)
            ]
        return min(stats.median(turn) for turn in turns)  # of the least disturbed turn

    return float(context.cached("quick_latency/2", job.id, key, make).value)


def find_mixed(
    context: Context,
    missed: Candidate,
    budget: SearchBudget,
    workshop: Workshop,
    *,
    passing: Passing | None,
    share: float,
) -> tuple[Candidate, Candidate | None]:
    """Search around one candidate that missed its tolerance.

    Args:
        passing: The fastest candidate that passes; it is what a mixed one must beat.
        share: Of the budget that is left, so much may be used; the rest is for the searches that follow.

    Returns:
        The candidate with its trials and a sentence, and the mixed candidate when one passes.
    """
    if budget.evaluations < 1 or budget.seconds <= 0:
        return replace(missed, note="the search for nodes to keep in higher precision had no budget left"), None
    plain_s = workshop.latency(missed, budget.seconds)
    if passing is not None and plain_s is not None and plain_s > passing.latency_s * (1 - searching.NOISE):
        return replace(missed, note=_no_use(plain_s, passing)), None
    try:
        ranking = workshop.rank(missed, budget.seconds)
    except CompileStageError as error:
        return replace(missed, note=f"its nodes' effects could not be measured: {error.problem}"), None
    ranked = _worth_keeping(ranking)
    if len(ranked) < 2:
        return replace(missed, note="one node carries all that is quantised, so none can be given back"), None
    evaluations = max(1, math.ceil(budget.evaluations * share))
    run = _Evaluations(context, missed, workshop, ends=time.monotonic() + budget.seconds * share)
    found = searching.search(
        ranked,
        run,
        max_evaluations=evaluations,
        max_seconds=run.ends - time.monotonic(),
        float_types=missed.job.scheme.float_types,
        costs={entry.node: entry.cost for entry in ranking},
        ceiling_s=passing.latency_s if passing else None,
    )
    budget.evaluations -= len(found.trials)
    winner = run.candidates[(found.best.kept, found.best.float_type)] if found.best is not None else None
    found, nodes = _whole(found, ranking), sum(1 + len(entry.together) for entry in ranking)
    noted = replace(missed, trials=found.trials, note=_account(found, nodes))
    if found.best is None or winner is None:
        return noted, None
    return noted, replace(winner, note=_owes(found.best, missed, nodes))


def _whole(found: searching.Found, ranking: Sequence[Sensitivity]) -> searching.Found:
    """With every node that a trial kept: those that go together were tried by the name of one."""
    names = {entry.node: (entry.node, *entry.together) for entry in ranking}

    def whole(trial: Trial) -> Trial:
        return replace(trial, kept=tuple(dict.fromkeys(name for node in trial.kept for name in names[node])))

    best = whole(found.best) if found.best is not None else None
    return replace(found, best=best, trials=tuple(map(whole, found.trials)))


class _Evaluations:
    """Evaluates kept sets for real, and holds the candidates that pass."""

    def __init__(self, context: Context, missed: Candidate, workshop: Workshop, ends: float) -> None:
        self._context, self._missed, self._workshop = context, missed, workshop
        self.ends = ends
        self.candidates: dict[tuple[tuple[str, ...], str], Candidate] = {}
        self._number = 0

    def __call__(self, kept: tuple[str, ...], float_type: str) -> Trial:
        self._number += 1
        job = mixed_job(self._missed.job, float_type)
        said = f"trial {self._number}: {len(kept)} nodes in {float_type}"
        self._context.events.progress("search", self._missed.job.id, said)
        candidate = self._workshop.attempt(
            job,
            lambda worker: _mix(self._context, worker, job, self._workshop.portable, self._missed.portable, kept),
            max(0.0, self.ends - time.monotonic()),
        )
        if candidate.verdict is None:
            problem = candidate.refused or (candidate.failure.problem if candidate.failure else "it ended early")
            return Trial(kept=kept, float_type=float_type, passed=False, problem=problem)
        latency_s = self._workshop.latency(candidate, self.ends - time.monotonic())
        if candidate.verdict.passed:
            self.candidates[(kept, float_type)] = candidate
        return Trial(
            kept=kept,
            float_type=float_type,
            passed=candidate.verdict.passed,
            decisive=_decisive(candidate),
            latency_s=latency_s,
        )


def mixed_job(job: Job, float_type: str) -> Job:
    """The job of a mixed candidate: `...--int8-sym-mixed`, or `...--int8-sym-mixed-bf16`."""
    suffix = "-mixed" if float_type == "fp32" else f"-mixed-{float_type}"
    scheme = replace(job.scheme, name=job.scheme.name + suffix, float_type=float_type, float_types=())
    return replace(job, id=job.id + suffix, scheme=scheme)


def rank(
    context: Context, worker: Worker, missed: Candidate, source: PortableModel, samples: SampleSet
) -> tuple[Sensitivity, ...]:
    """The quantised nodes of a candidate with their effects on the output, measured on `samples`."""
    key = {
        "model": source.digest,
        "lowered": missed.portable.digest if missed.portable else "",
        "samples": samples.digest,
        "packages": plugins.package_versions("onnx", "onnxruntime", "numpy"),
    }

    def make(_: Path) -> list[Sensitivity]:
        answer = worker.call(
            "rank_nodes", model=source, lowered=missed.portable, samples=samples, threads=missed.job.target.threads
        )
        return list(revive(tuple[Sensitivity, ...], answer))

    found = context.cached("rank/2", missed.job.id, key, make)
    ranking: tuple[Sensitivity, ...] = revive(tuple[Sensitivity, ...], found.value)
    return ranking


def _mix(
    context: Context,
    worker: Worker,
    job: Job,
    source: PortableModel,
    lowered: PortableModel | None,
    keep: Sequence[str],
) -> PortableModel:
    if lowered is None:
        raise UsageError("there is no lowered graph to give nodes back in")
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

    found = context.cached("mix/2", job.id, key, make)
    mixed: PortableModel = revive(PortableModel, found.value)
    kept = {job.scheme.float_type: mixed.kept["fp32"]} if "fp32" in mixed.kept else mixed.kept
    return replace(mixed, path=str(Path(found.path) / mixed.path), kept=kept)


def _decisive(candidate: Candidate) -> Check | None:
    """The check that failed by most, or passed by least; of the policy's gates where one can be told."""
    checks = candidate.verdict.checks if candidate.verdict else ()
    metrics = {gate.metric for gate in candidate.job.gates}
    failed = [check for check in checks if check.outcome is not Outcome.PASS and check.waived is None]
    return min(failed or [c for c in checks if c.gate.metric in metrics] or checks, key=searching.margin, default=None)


# --------------------------------------------------------------------------------------------------------------- words


def _no_use(plain_s: float, passing: Passing) -> str:
    return (
        "no nodes were sought to keep in higher precision: with none kept a call takes "
        f"{plain_s * 1e3:.3g} ms, and {passing.job.backend} {passing.job.scheme.name}, which passes, "
        f"{passing.latency_s * 1e3:.3g} ms"
    )


def _account(found: searching.Found, nodes: int) -> str:
    tried = f"{len(found.trials)} {'trial' if len(found.trials) == 1 else 'trials'}"
    ended = "; the search's budget ended it" if found.exhausted else ""
    if found.best is not None:
        return f"keeping {_kept(found.best, nodes)} passes (found in {tried}{ended})"
    closest = found.closest
    said = f"no set of its {nodes} quantised nodes kept in higher precision passed in {tried}{ended}"
    if closest is None:
        return said
    why = closest.decisive.reason if closest.decisive else closest.problem
    return f"{said}; the closest keeps {len(closest.kept)} in {closest.float_type}: {why}"


def _owes(best: Trial, missed: Candidate, nodes: int) -> str:
    missing = _decisive(missed)
    verb, them = ("stays", "it") if len(best.kept) == 1 else ("stay", "them")
    without = f", since without {them} {missing.reason}" if missing else ""
    return f"{len(best.kept)} of {nodes} quantised nodes {verb} in {best.float_type}{without}"


def _kept(trial: Trial, nodes: int) -> str:
    return f"{len(trial.kept)} of {nodes} quantised nodes in {trial.float_type}"


def order_searches(candidates: Sequence[Candidate], policy: TargetPolicy) -> list[Candidate]:
    """The candidates worth a search, those first that missed by least: they need the fewest nodes."""
    if not policy.fallback.mixed_precision:
        return []
    found = [candidate for candidate in candidates if searchable(candidate)]
    return sorted(
        found, key=lambda c: -min(searching.margin(check) for check in c.verdict.checks) if c.verdict else 0.0
    )
