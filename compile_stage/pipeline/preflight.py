"""What a run would refuse or could never pass, as far as that is known without compiling.

The steps that `run` begins with are taken: the source is inspected and opened, and its samples are read. What they make
is in the cache when a run follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.baseline import reference_target
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_NOTHING_COMPILED,
    EXIT_OK,
    SourceError,
    WorkerError,
)
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import (
    Budget,
    Data,
    DataSpec,
    Job,
    Plan,
    PortableModel,
    SampleSet,
    ShapeRange,
    SourceModel,
    Target,
    TargetPolicy,
)
from compile_stage.core.sample_sizes import confidence_notes
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.measure.readers import SampleRequest, demand_importable
from compile_stage.pipeline.inputs import source_errors, source_limits
from compile_stage.pipeline.unfit_samples import refusal, unfit, unfit_limits
from compile_stage.steps.export import demand_batch_sizes, export, inspect
from compile_stage.steps.sample import sample


def preflight(context: Context, plan: Plan) -> Plan:
    """The plan, with the jobs that can't pass among the refused ones, and how a run of it would end.

    Samples that a function of the user's makes are not looked at, since it may take as long as it likes; whether its
    package is there is.

    Raises:
        SourceError: The model is refused, or no target could have it.
        PolicyError: The samples can't be read, or do not fit the model.
    """
    by_target: list[dict[str, str]] = []
    refused: list[SourceError] = []
    policy = plan.policy
    limits = source_limits(policy.budget, plan.source, policy.data, policy.files)
    with context.source_worker(plan.source, limits) as worker, source_errors(plan.source):
        inspect(context, worker, plan.source, plan.policy.compliance)
        checks = _Checks(context, worker, plan.source, policy.data, policy.budget)
        for target_policy in plan.policy.targets:
            jobs = [job for job in plan.jobs if job.target.name == target_policy.target.name]
            try:
                by_target.append(checks.reasons(jobs, target_policy) if jobs else {})
            except SourceError as error:
                refused.append(error)
                by_target.append({job.id: error.problem for job in jobs})
    if refused and len(refused) == len(plan.policy.targets):
        raise refused[0]
    reasons = {job_id: reason for target in by_target for job_id, reason in target.items()}
    exit_code, problem = _ending(plan, reasons, checks.not_taken)
    return replace(
        plan,
        jobs=tuple(job for job in plan.jobs if job.id not in reasons),
        refused=(*plan.refused, *(refusal(job, reasons[job.id]) for job in plan.jobs if job.id in reasons)),
        notes=tuple(dict.fromkeys((*plan.notes, *checks.notes))),
        exit_code=exit_code,
        problem=problem,
    )


@dataclass(frozen=True)
class _Checks:
    """Attributes:
    notes: How many samples the confidence of the limits needs, and which samples were not looked at, of the targets so
        far.
    not_taken: Ids of the jobs whose backend does not take the graph, and that nothing else speaks against.
    """

    context: Context
    worker: Worker
    source: SourceModel
    data: Data
    budget: Budget
    notes: list[str] = field(default_factory=list)
    not_taken: set[str] = field(default_factory=set)

    def reasons(self, jobs: Sequence[Job], policy: TargetPolicy) -> dict[str, str]:
        """Why jobs of one target, with the gates of its policy, can't pass, by their ids.

        Raises:
            SourceError: The source has not what the target asks for.
        """
        target = jobs[0].target
        device = reference_target(self.source.flavor, target, jobs, self.context.hardware).device
        signature = self._signature(device, target)
        demand_batch_sizes(self.source, signature, target)
        demand_shapes(signature, target.shapes, self.source)
        validation = self._sample("validation", self.data.validation, signature, target.shapes)
        self.notes.extend(_confidence_notes(jobs, validation, policy))
        reasons = unfit_limits(jobs, policy.performance, signature, self.budget)
        if validation is not None:
            reasons |= unfit(jobs, validation, self.data, signature)
        calibrated = [job for job in jobs if plugins.needs_calibration(job.scheme) and job.id not in reasons]
        if calibrated:
            try:
                self._sample("calibration", self.data.calibration, signature, target.shapes)
            except SourceError as error:  # other jobs of the target need none
                reasons |= {job.id: f"it needs calibration samples: {error.problem}" for job in calibrated}
        if plugins.load("sources", self.source.flavor).capabilities.planned_by_graph:
            of_graph = self._graph_reasons([job for job in jobs if job.id not in reasons], target)
            self.not_taken.update(of_graph)
            reasons |= of_graph
        return reasons

    def _graph_reasons(self, jobs: Sequence[Job], target: Target) -> dict[str, str]:
        """Why backends don't take the exported graph. It is the same for all precisions: each leaves the operators that
        it does not know as they are."""
        reasons: dict[str, str] = {}
        by_graph = [job for job in jobs if job.form == "onnx"]
        if not by_graph:
            return reasons
        model = export(self.context, self.worker, self.source, target, jobs)
        for name in dict.fromkeys(job.backend for job in by_graph):
            own = [job for job in by_graph if job.backend == name]
            limits = WorkerLimits.within(self.budget, target.threads, plugins.interpreter_of(name))
            key = {
                "model": model.digest,
                "target": replace(own[0].target, name="", required=True, backends=(), precisions=()),
                "backend": name,
                "made_by": plugins.cache_identity("backends", name),
                "hardware": self.context.hardware,
            }
            with suppress(WorkerError):  # a run says what is wrong with the backend
                ask = partial(self._refuse, own[0], model, limits)
                reason = self.context.cached("refuse-model/1", "", key, ask).value
                reasons |= {job.id: str(reason) for job in own if reason}
        return reasons

    def _refuse(self, job: Job, model: PortableModel, limits: WorkerLimits, _: Path) -> str:
        with self.context.worker(f"plan--{job.backend}", limits) as worker:
            return str(worker.call("refuse_model", job=job, model=model) or "")

    def _signature(self, device: str, target: Target) -> Signature:
        """From opening the original where a run would, so that a plan refuses what has no such device; for the shapes
        and the lengths that the target asks for: shapes open dimensions of some sources, and a language model's lengths
        say whether it has so many places, and how many tokens a sample has."""
        made_by = plugins.cache_identity("sources", self.source.flavor)
        asked: dict[str, Any] = {"shapes": target.shapes, "generation": target.generation}
        key = {"source": self.source.identity, "made_by": made_by, "device": device, **asked}
        where = Target(name="", device=device, **asked)

        def make(_: Path) -> Any:
            return self.worker.call("open_source", source=self.source, target=where)["signature"]

        signature: Signature = revive(Signature, self.context.cached("signature/2", "", key, make).value)
        return signature

    def _sample(
        self, role: str, spec: DataSpec, signature: Signature, shapes: Mapping[str, ShapeRange]
    ) -> SampleSet | None:
        if spec.source.startswith("python:"):
            if plugins.importable(plugins.load("sources", self.source.flavor)):  # else another interpreter reads them
                demand_importable(spec)
            self.notes.append(
                f"the {role} samples are made by {spec.source}, which a plan does not call: whether they are enough "
                "and fit the model is not known"
            )
            return None
        request = SampleRequest(spec=spec, signature=signature, seed=self.data.seed, shapes=shapes)
        return sample(self.context, self.worker, self.source, role, request)


def _confidence_notes(jobs: Sequence[Job], validation: SampleSet | None, policy: TargetPolicy) -> tuple[str, ...]:
    of_winner = policy.confidence_of == "winner"
    if validation is None:
        return confidence_notes(jobs, None, of_winner=of_winner)
    return confidence_notes(jobs, validation.independent, validation.unit, of_winner=of_winner)


def _ending(plan: Plan, reasons: Mapping[str, str], not_taken: Collection[str]) -> tuple[int, str]:
    """The exit code of a run and its first cause: as far as planned, since a candidate may still fail."""
    if not plan.jobs:
        return EXIT_NOTHING_COMPILED, "nothing could be compiled: every job is refused"
    nothing_left = all(job.id in reasons for job in plan.jobs)  # then the run fails, whichever targets are required
    lost = list(_without_candidates(plan, reasons, required_only=not nothing_left))
    if all(job.id in not_taken for job in plan.jobs):
        return EXIT_NOTHING_COMPILED, "\n".join(["nothing could be compiled", *lost])
    return (EXIT_GATE, "\n".join(lost)) if lost else (EXIT_OK, "")


def _without_candidates(plan: Plan, reasons: Mapping[str, str], *, required_only: bool) -> Iterator[str]:
    for target_policy in plan.policy.targets:
        target = target_policy.target
        if required_only and not target.required:
            continue
        jobs = [job for job in plan.jobs if job.target.name == target.name]
        if not any(job.id not in reasons and not job.not_runnable_here for job in jobs):
            why = [reasons.get(job.id) or job.not_runnable_here for job in jobs]
            why = why or [refusal.reason for refusal in plan.refused if refusal.target == target.name]
            kind = "required target" if target.required else "target"
            yield f"{kind} {target.name!r} can have no winner: {'; '.join(dict.fromkeys(why))}"
