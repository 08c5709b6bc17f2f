"""What nodes do for a run: plan it for their hardware, compile a job, and take the run through its measurement,
publication and promotion. Each is called by name (`pool.Pool.submit`), with plain JSON, and may be called again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from compile_stage.cluster import files
from compile_stage.cluster.remote import NodeSide, demand_fingerprint
from compile_stage.core import plugins
from compile_stage.core.baseline import crosses
from compile_stage.core.context import Context
from compile_stage.core.digest import plain, revive
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import CompileStageError, SourceError, UsageError, WorkerError
from compile_stage.core.events import EventLog
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Worker
from compile_stage.core.records import Failure, Job, Plan, Policy, RunResult, SourceModel, record
from compile_stage.core.run_context import open_context
from compile_stage.engine.protocol import describe_error
from compile_stage.pipeline.evaluate import compile_candidate
from compile_stage.pipeline.inputs import TargetInputs, TargetRun, source_limits
from compile_stage.pipeline.outcome import RunOptions, RunState
from compile_stage.pipeline.run import demand_confinement, plan_for
from compile_stage.pipeline.run import run as run_plan
from compile_stage.shared_caching import open_shared

ANYWHERE, SAME_CHIP, MEASURED = "anywhere", "same chip", "measured"
"""Where a job may be compiled: by a compiler that makes the same on every machine; where a compiler sees the target's
chip; or, since the compiler times kernels, only where the target is measured."""


@record
class Given:
    """What every task of a run is given.

    Attributes:
        files: The policy's samples, and the source: path on the driver → digest (`cluster.files`).
        started: When the run began, in seconds since 1970.
        hardware: Of the target.
        toolchains: That the driver has, and the node installs where it lacks them.
        shared: Address of the shared cache; empty where all have one folder.
    """

    source: SourceModel
    policy: Policy
    files: Mapping[str, str]
    started: float
    hardware: Hardware
    toolchains: tuple[str, ...] = ()
    shared: str = ""
    remeasure: bool = False


@record
class Asked:
    """How the run was called.

    Attributes:
        signs, trusts: The driver has a key, and trusted keys: the node must have them too.
        failures: Jobs whose compilation failed, and would in another attempt too.
    """

    uri: str
    publish: bool = True
    promote: bool = True
    signs: bool = False
    trusts: bool = False
    failures: Mapping[str, Failure] = field(default_factory=dict)


def plan(node: NodeSide, given: Any) -> dict[str, Any]:
    """The plan for this node's hardware, and where each job may be compiled. What all jobs start from, the export and
    the samples, is made on the way."""
    order: Given = revive(Given, given)
    demand_fingerprint(order.hardware.fingerprint)
    with _surroundings(node, order) as (context, source, policy):
        made = plan_for(context, policy, source)
        with _source_worker(context, made) as worker, suppress(SourceError, WorkerError):  # the run says so
            for target in policy.targets:
                jobs = [job for job in made.jobs if job.target.name == target.target.name]
                if jobs:
                    inputs = TargetInputs(context, worker, source, policy.data, target.target, jobs)
                    _ = inputs.portable, inputs.samples
        # Where the files lie on the driver: this plan goes there.
        there = replace(made, source=order.source, policy=order.policy)
        places = {job.id: _place(job) for job in made.jobs}
        return {"plan": plain(there), "places": places, "events": plain(context.events.events)}


def sees(_: NodeSide, token: str) -> bool:
    """Whether this node has the driver's step cache."""
    return files.sees(token)


def compile_job(node: NodeSide, given: Any, plan: Any, job_id: str) -> dict[str, Any]:
    """Export, lower and compile one job, as far as the cache lacks it, for the target's hardware."""
    order: Given = revive(Given, given)
    with _surroundings(node, order) as (context, source, policy):
        made: Plan = replace(revive(Plan, plan), source=source, policy=policy)
        job = next(job for job in made.jobs if job.id == job_id)
        jobs = [other for other in made.jobs if other.target.name == job.target.name]
        target = next(one for one in policy.targets if one.target.name == job.target.name)
        with _source_worker(context, made) as worker:
            inputs = TargetInputs(context, worker, source, policy.data, target.target, jobs)
            try:
                compile_candidate(TargetRun(context, made, target, inputs), job)
            except WorkerError as error:
                # Too little memory or time may be this node's trouble; a crash is the compiler's.
                if error.kind in ("crash", "exception") and not error.killed:
                    failure = Failure(kind=error.kind, step="compile", problem=error.problem, detail=error.detail)
                    return {"failure": plain(failure), "events": plain(context.events.events)}
            except CompileStageError:
                pass  # the run meets it again, and says it in its own words
        return {"failure": None, "events": plain(context.events.events)}


def run(node: NodeSide, given: Any, plan: Any, asked: Any) -> dict[str, Any]:
    """The run itself, by this machine's own workers; what was compiled elsewhere is in the cache.

    Returns:
        `result`, a RunResult; `error`, what ended it, where something did; `bundles`: path in the result → digest.
    """
    order, call = revive(Given, given), revive(Asked, asked)
    demand_fingerprint(order.hardware.fingerprint)
    with temporary_folder("run") as scratch, _surroundings(node, order) as (context, source, policy):
        context = replace(context, failed=call.failures)
        state = RunState(call.uri, "", _options(call, scratch), _write)
        state.policy, state.context, state.folder = policy, context, scratch
        state.plan = replace(revive(Plan, plan), source=source, policy=policy)
        error: dict[str, Any] | None = None
        try:
            with state:
                run_plan(state, context, state.plan)
        except CompileStageError as ended:
            error = describe_error(ended)
        result = state.written or state.result()
        bundles = {path: files.send(Path(path), order.shared) for path in bundle_paths(result)}
        return {"result": plain(result), "error": error, "bundles": bundles}


def bundle_paths(result: RunResult) -> Iterator[str]:
    """Of everything that was packaged."""
    for target in result.targets:
        if target.bundle is not None:
            yield target.bundle.path
        yield from (one.bundle.path for one in target.unvalidated)


@contextmanager
def _surroundings(node: NodeSide, order: Given) -> Iterator[tuple[Context, SourceModel, Policy]]:
    """The run's surroundings on this node, for the target's hardware, with source and samples on this disk."""
    _install(order.toolchains)
    compliance = order.policy.compliance
    shared = open_shared(order.shared, None, compliance)
    with open_context(
        node.reporter, "local", remeasure=order.remeasure, shared=shared, compliance=compliance
    ) as opened:
        places = {path: str(files.fetch(digest, path, order.shared)) for path, digest in order.files.items()}
        events = EventLog(node.reporter, elapsed_s=max(0.0, time.time() - order.started))
        context = replace(opened, events=events, hardware=order.hardware, files=places)
        if compliance.sandbox == "required":
            demand_confinement(context)
        source = replace(order.source, path=places[order.source.path])
        context.cache.use(Path(source.path))
        yield context, source, order.policy


@contextmanager
def _source_worker(context: Context, plan: Plan) -> Iterator[Worker]:
    policy = plan.policy
    limits = source_limits(policy.budget, plan.source, context.placed(policy.data), policy.files)
    with context.source_worker(plan.source, limits) as worker:
        yield worker


def _install(toolchains: Sequence[str]) -> None:
    """Those that are not here, once for each node."""
    from compile_stage.engine.toolchains import install, states

    here = {state.name for state in states() if state.toolchain is not None or state.here}
    for name in [name for name in toolchains if name not in here]:
        install(name)
        plugins.refresh()


def _options(call: Asked, folder: Path) -> RunOptions:
    """Keys are this machine's own: none travels."""
    from compile_stage.serving.trust import trust_of_environment
    from compile_stage.signing.signers import signer_of

    signer, trust = signer_of(None, None), trust_of_environment()
    if call.signs and signer is None:
        raise UsageError(
            "the driver has a key to sign with, and the node that publishes has none",
            fix="set COMPILE_STAGE_SIGNING_KEY on the nodes that measure: keys are not sent",
        )
    if call.trusts and trust is None:
        raise UsageError(
            "the driver names trusted keys, and the node that publishes names none",
            fix="set COMPILE_STAGE_TRUST on the nodes that measure",
        )
    return RunOptions(out=folder, publish=call.publish, promote=call.promote, signer=signer, trust=trust)


def _write(result: RunResult, folder: Path | None) -> Mapping[str, Path]:
    from compile_stage import report

    return report.write(result, folder) if folder is not None else {}


def _place(job: Job) -> str:
    if crosses(job.backend, job.target):
        return ANYWHERE
    return MEASURED if plugins.load("backends", job.backend).capabilities_for(job.target).times_kernels else SAME_CHIP
