"""The story: a model goes from the registry through the policy and back, once.

What a step does stands in its own file in `compile_stage.steps`; here is only the order, and how a run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import plain
from compile_stage.core.environment import Hardware, hardware, python_version
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_COMPILED,
    EXIT_OK,
    GateError,
    NothingCompiledError,
    PolicyError,
    SourceError,
    UsageError,
    WorkerError,
)
from compile_stage.core.ports import Needs, Worker
from compile_stage.core.records import (
    Candidate,
    Data,
    DataSpec,
    JsonMap,
    Plan,
    Policy,
    RunOutcome,
    RunResult,
    RunStatus,
    SourceModel,
    TargetPolicy,
    TargetResult,
)
from compile_stage.core.storage import explained
from compile_stage.pipeline.evaluate import Material, attempt_all
from compile_stage.pipeline.mixed_precision import mix_missed
from compile_stage.pipeline.option_tuning import climb
from compile_stage.steps.benchmark import benchmark_candidates, benchmark_successor
from compile_stage.steps.export import export, inspect, other_forms
from compile_stage.steps.ladder import announce, lay_out
from compile_stage.steps.look import hasty
from compile_stage.steps.package import package
from compile_stage.steps.plan import plan
from compile_stage.steps.promote import Incumbent, alias_of, incumbent, promote, shipped
from compile_stage.steps.publish import attach_reports, publish
from compile_stage.steps.resolve import refuse_policy, resolve
from compile_stage.steps.sample import compare_samples, samples_for
from compile_stage.steps.select import judge_performance, select, waive
from compile_stage.steps.tuning import pull_records, push_records
from compile_stage.steps.validate import reference

Render = Callable[[RunResult], Mapping[str, Path]]
"""Writes the reports of a result and says where they are: file name → path."""


@dataclass(frozen=True)
class Order:
    """What the caller wants done with the winners."""

    out: Path
    render: Render
    publish: bool = True
    promote: bool = True


def make_plan(context: Context, policy: Policy, uri: str) -> Plan:
    """Resolve the source and expand the policy into jobs and refusals."""
    source = resolve(context, uri)
    if (reason := refuse_policy(source, policy.applies_to)) is not None:
        raise UsageError(reason, where=source.uri, fix="choose another policy, or widen applies_to")
    made = plan(source, policy, context.hardware)
    return replace(made, notes=(*made.notes, *announce(policy, made.jobs)))


def run(context: Context, made: Plan, order: Order) -> RunResult:
    """Everything after the plan. Never raises for a job that fails or a gate that is missed: the result says so.

    Whatever ends it, the reports say so: an exception is raised after they were written.

    Raises:
        RegistryError: Publication could not be finished; running again finishes it.
    """
    framework = ""
    targets: tuple[TargetResult, ...] = ()
    try:
        try:
            with context.worker("source", Needs.within(made.policy.budget)) as home:
                with _source_trouble(made.source):
                    origin = inspect(context, home, made.source, made.policy.compliance)
                framework = origin.framework
                targets = _prove_all(context, home, made)
        except SourceError as error:
            ending = RunOutcome(status="refused", exit_code=error.exit_code, problem=str(error))
            return _rendered(_result(context, made, framework, (), ending), order)
        with _alone_in(order.out):
            targets = tuple(package(context, made, target, origin.answer, order.out) for target in targets)
            ending = _ending(targets)
            if order.publish:
                targets = tuple(push_records(context, made.source, target) for target in targets)
                files = order.render(_result(context, made, framework, targets, ending))
                for n, target in enumerate(targets):
                    targets = (*targets[:n], publish(context, made.source, target, files), *targets[n + 1 :])
                if order.promote and ending.exit_code == EXIT_OK:
                    targets, ending = _promote_all(context, made, targets)
            result = _result(context, made, framework, targets, ending)
            attach_reports(context, made.source, targets, order.render(result))
            return result
    except (Exception, KeyboardInterrupt) as error:
        with suppress(OSError):  # a full disk may be what ended it
            order.render(_result(context, made, framework, targets, ended_by(error, "failed")))
        raise


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two runs may name one folder: the second waits, or one would replace the bundle that the other is publishing."""
    from filelock import FileLock

    with FileLock(out / ".lock"):
        yield


def not_begun(
    uri: str, policy_path: str, policy: Policy | None, made: Plan | None, error: BaseException, duration_s: float
) -> RunResult:
    """What there is to say of a run that an error ended before anything was tried.

    Args:
        policy: None when that is what is wrong.
        made: None when the model could not be had, or is not one that the policy is for.
    """
    source = (
        made.source if made else SourceModel(uri=uri, name=uri, version="", flavor="", path="", digest="", registry="")
    )
    if policy is None:
        none = DataSpec(source="")
        policy = Policy(
            name="", owner="", digest="", files=(policy_path,), data=Data(validation=none, calibration=none), targets=()
        )
    ending = ended_by(error, "refused")
    return RunResult(
        status=ending.status,
        exit_code=ending.exit_code,
        problem=ending.problem,
        source=source,
        policy=policy,
        environment=_environment(hardware()),
        targets=(),
        refused=(),
        baseline_framework="",
        baseline={},
        samples={},
        duration_s=duration_s,
        events=(),
    )


def _prove_all(context: Context, home: Worker, made: Plan) -> tuple[TargetResult, ...]:
    """Every target. What the source can't do for one of them, such as a batch size, is that target's reason to have no winner.

    Raises:
        SourceError: No target could have the source.
    """
    proven: list[TargetResult] = []
    refused: list[SourceError] = []
    for target in made.policy.targets:
        try:
            with _source_trouble(made.source):
                proven.append(_prove(context, home, made, target))
        except SourceError as error:
            refused.append(error)
            selection = replace(select((), target), reason=error.problem)
            proven.append(TargetResult(policy=target, candidates=(), selection=selection))
    if refused and len(refused) == len(proven):
        raise refused[0]
    return tuple(proven)


@contextmanager
def _source_trouble(source: SourceModel) -> Iterator[None]:
    """A crash, a time-out or an error of the worker that holds the original is no job's failure: without the original nothing is proven."""
    try:
        yield
    except WorkerError as error:
        last = error.detail.strip().splitlines()[-1:] if error.kind == "crash" else []
        raise SourceError(
            ": ".join(["the original model could not be exported, run or measured", error.problem, *last]),
            fix="load and run it in its own framework first; budget.job_minutes and job_memory_mb bound it here",
            where=source.uri,
        ) from error


def _prove(context: Context, home: Worker, made: Plan, target_policy: TargetPolicy) -> TargetResult:
    """One target, from the export to the selection. `home` is the worker that holds the source."""
    source, policy, target = made.source, made.policy, target_policy.target
    jobs = [job for job in made.jobs if job.target.name == target.name]
    if not jobs:
        selection = select((), target_policy)
        why = "; ".join(dict.fromkeys(refusal.reason for refusal in made.refused if refusal.target == target.name))
        selection = replace(selection, reason=f"{selection.reason}: {why}" if why else selection.reason)
        return TargetResult(policy=target_policy, candidates=(), selection=selection)
    portable = export(context, home, source, target)
    samples = samples_for(context, home, source, policy.data, portable.signature, jobs)
    notes = compare_samples(context, Needs.within(policy.budget), portable, samples)
    expected = reference(context, home, source, samples["validation"], target)
    others = other_forms(context, home, source, jobs)
    material = Material(source=source, portable=portable, samples=samples, expected=expected, others=others)
    notes += pull_records(context, source, jobs)
    candidates = attempt_all(context, policy, jobs, material, prune_slow=target_policy.prunes_slow)
    candidates, said = _prove_hasty(context, policy, target_policy, candidates, material)
    result = _compete(context, made, target_policy, candidates, material)
    while hasty(result.candidates, target_policy, policy.waivers, result.winner):
        candidates, more = _prove_hasty(context, policy, target_policy, candidates, material, result)
        said += more
        result = _compete(context, made, target_policy, candidates, material)
    return replace(result, samples=samples, notes=(*notes, *said))


def _prove_hasty(
    context: Context,
    policy: Policy,
    target_policy: TargetPolicy,
    candidates: Sequence[Candidate],
    material: Material,
    result: TargetResult | None = None,
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The candidates as they were attempted, those proven after all that were dropped too soon, and a sentence for each of these.

    Args:
        result: Of their competition; None before it, where any that passes its tolerances will do.
    """
    winner = result.winner if result is not None else None
    if result is None:
        waived = [waive(c, target_policy, policy.waivers, context.today) for c in candidates]
        if any(c.verdict is not None and c.verdict.passed for c in waived):
            return list(candidates), ()
    again = hasty(candidates, target_policy, policy.waivers, winner)
    proven = {c.job.id: c for c in attempt_all(context, policy, [c.job for c in again], material)} if again else {}
    beside = f"{winner.job.id} is not far ahead of it" if winner is not None else "no other candidate passed"
    notes = (f"{c.job.id} was proven after all, since {beside}; the first look: {c.pruned}" for c in again)
    return [proven.get(c.job.id, c) for c in candidates], tuple(notes)


def _compete(
    context: Context, made: Plan, target_policy: TargetPolicy, candidates: Sequence[Candidate], material: Material
) -> TargetResult:
    """From the candidates as they were attempted to the selection."""
    policy = made.policy
    candidates = [waive(c, target_policy, policy.waivers, context.today) for c in candidates]
    candidates = mix_missed(context, policy, target_policy, candidates, material)
    candidates, climbed = climb(context, policy, target_policy, candidates, material)
    measured, baseline = benchmark_candidates(context, made, target_policy, candidates, material.samples["validation"])
    judged = tuple(judge_performance(c, target_policy, policy.waivers, context.today) for c in measured)
    selection = select(judged, target_policy)
    return TargetResult(
        policy=target_policy,
        candidates=judged,
        selection=selection,
        baseline=baseline,
        ladder=lay_out(climbed, judged, selection, baseline, target_policy) if climbed is not None else (),
    )


def _promote_all(
    context: Context, made: Plan, targets: Sequence[TargetResult]
) -> tuple[tuple[TargetResult, ...], RunOutcome]:
    """Move each target's alias, or say why it stays; one that stays keeps no other from moving, and a required one fails the run."""
    moved, problems = [], []
    for target in targets:
        try:
            moved.append(_promote(context, made, target))
        except GateError as error:
            if target.policy.target.required:
                problems.append(str(error))
            moved.append(_noted(target, error.problem))
    problem = "\n".join(problems)
    return tuple(moved), RunOutcome(status="failed", exit_code=EXIT_GATE, problem=problem) if problem else RunOutcome()


def _promote(context: Context, made: Plan, target: TargetResult) -> TargetResult:
    alias = alias_of(target)
    if alias is None or target.receipt is None:
        return target
    artifact = shipped(context, made.source, target)
    before, successor = incumbent(context, made.source, target.receipt, alias, artifact), None
    try:
        successor = benchmark_successor(context, made.policy, target, artifact, before.artifact)
    except (WorkerError, SourceError, UsageError, NothingCompiledError) as error:
        before = Incumbent(
            obstacle=f"what the alias points to now does not run on this run's samples ({error.problem})"
        )
    return replace(target, receipt=promote(context, made.source, target, alias, before, successor))


# ------------------------------------------------------------------------------------------------------- how it ends


def _ending(targets: Sequence[TargetResult]) -> RunOutcome:
    """How the run stands before anything is published."""
    lost = [t for t in targets if t.selection.winner is None]
    required = [t for t in lost if t.policy.target.required]
    # Also where no target was required: a run that made nothing is not green.
    if not any(c.artifact for t in targets for c in t.candidates):
        problem = "nothing could be compiled\n" + "\n".join(map(_without_winner, lost))
        return RunOutcome(status="failed", exit_code=EXIT_NOTHING_COMPILED, problem=problem)
    if required:
        return RunOutcome(status="failed", exit_code=EXIT_GATE, problem="\n".join(map(_without_winner, required)))
    return RunOutcome()


def ended_by(error: BaseException, status: RunStatus) -> RunOutcome:
    """How a run ends that an exception ends: with the exit code that the program will leave with."""
    if isinstance(error, KeyboardInterrupt):
        return RunOutcome(status=status, exit_code=EXIT_INTERRUPTED, problem="interrupted; run again to resume")
    known = explained(error)
    problem = "\n".join(known.problems) if isinstance(known, PolicyError) and known.problems else str(known)
    return RunOutcome(status=status, exit_code=known.exit_code, problem=problem)


def _without_winner(target: TargetResult) -> str:
    kind = "required target" if target.policy.target.required else "target"
    hint = "; compile-stage validate, where such hardware is, can prove what was compiled" if target.unvalidated else ""
    return f"{kind} {target.policy.target.name!r} has no winner: {target.selection.reason}{hint}"


def _noted(target: TargetResult, note: str) -> TargetResult:
    return replace(target, receipt=replace(target.receipt, note=note)) if target.receipt else target


def _result(
    context: Context, made: Plan, framework: str, targets: tuple[TargetResult, ...], ending: RunOutcome
) -> RunResult:
    """The whole truth so far."""
    return RunResult(
        status=ending.status,
        exit_code=ending.exit_code,
        problem=ending.problem,
        source=made.source,
        policy=made.policy,
        environment=_environment(context.hardware),
        targets=targets,
        refused=made.refused,
        baseline_framework=framework,
        baseline={t.policy.target.name: t.baseline for t in targets if t.baseline is not None},
        samples={role: found for t in targets for role, found in t.samples.items()},
        duration_s=context.events.elapsed_s,
        events=context.events.events,
        notes=tuple(dict.fromkeys([*made.notes, *(note for t in targets for note in t.notes)])),
    )


def _environment(machine: Hardware) -> JsonMap:
    packages = ("compile-stage", "mlflow", "mlflow-skinny", "numpy", "onnx", "onnxruntime")
    return {
        "hardware": plain(machine),
        "hardware_fingerprint": machine.fingerprint,
        "python": python_version(),
        "packages": plugins.package_versions(*packages),
    }


def _rendered(result: RunResult, order: Order) -> RunResult:
    order.render(result)
    return result
