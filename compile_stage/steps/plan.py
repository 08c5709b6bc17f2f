"""Policy + source → jobs, one per (target, backend, scheme); what can't work is refused early, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compile_stage.core import plugins
from compile_stage.core.baseline import crosses, refuse_baseline
from compile_stage.core.capabilities import SOURCE_PRECISION
from compile_stage.core.control_groups import cpu_limit
from compile_stage.core.environment import Hardware
from compile_stage.core.language_models import fitting_gates
from compile_stage.core.metric_packages import missing_package
from compile_stage.core.ports import Backend, Exporter
from compile_stage.core.records import (
    Budget,
    Gate,
    Job,
    Plan,
    Policy,
    Refusal,
    Scheme,
    SourceModel,
    Target,
    TargetPolicy,
)


def plan(source: SourceModel, policy: Policy, hardware: Hardware) -> Plan:
    """Expand the policy. Needs no model files, imports no compiler: plug-ins answer from what they declare."""
    policy, not_required = _required_here(policy, hardware)
    jobs: dict[str, Job] = {}
    refused: list[Refusal] = []
    for target_policy in policy.targets:
        for outcome in _expand(source, policy, target_policy, hardware):
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            elif jobs.setdefault(outcome.id, outcome) != outcome:  # results are told apart by their job's id
                reason = (
                    f"{outcome.backend} calls two of its schemes {outcome.scheme.name!r}, so their results could be "
                    "mixed up"
                )
                refused.append(_refusal(source, outcome.target.name, outcome.backend, outcome.scheme.precision, reason))
    made = tuple(jobs.values())
    notes = (*not_required, *_notes(policy, made), *_thread_notes(policy, made, hardware), *_batch_notes(made))
    return Plan(source=source, policy=policy, jobs=made, refused=tuple(refused), notes=notes)


def _required_here(policy: Policy, hardware: Hardware) -> tuple[Policy, tuple[str, ...]]:
    """The policy as it holds on this machine, and notes: of a family that has a variant for it, those for other
    hardware need no winner here."""
    elsewhere = {rules.target.name: hardware.refuse(dict(rules.target.hardware)) for rules in policy.targets}
    served = {rules.family for rules in policy.targets if rules.family and elsewhere[rules.target.name] is None}
    targets, notes = [], []
    for rules in policy.targets:
        target, reason = rules.target, elsewhere[rules.target.name]
        if rules.family in served and reason is not None and target.required:
            notes.append(f"{target.name} is a variant for other hardware ({reason}), so it is not required here")
            rules = replace(rules, target=replace(target, required=False))
        targets.append(rules)
    return replace(policy, targets=tuple(targets)), tuple(notes)


def job_id(source: SourceModel, target: str, backend: str, scheme: str) -> str:
    """Readable and stable: `fraud-7--cpu-server--openvino--int8-sym`."""
    model = f"{source.name}-{source.version}" if source.version else source.name
    return f"{model}--{target}--{backend}--{scheme}"


def _expand(
    source: SourceModel, policy: Policy, target_policy: TargetPolicy, hardware: Hardware
) -> Iterator[Job | Refusal]:
    target = target_policy.target
    auto = target.backends == ("auto",)
    absent = hardware.refuse(dict(target.hardware)) or ""
    precisions = target.precisions if SOURCE_PRECISION in target.precisions else (*target.precisions, SOURCE_PRECISION)
    for name in plugins.names("backends") if auto else target.backends:
        backend = plugins.load("backends", name)
        granted = replace(target_policy, target=_with_tuning(target, backend, policy.budget))
        form = _form_for(source, backend)
        lacking = plugins.missing_for_form(backend, form) if form is not None else None
        reason = _refuse_backend(backend, policy, granted, absent) or _refuse_source(source, backend, form, granted)
        if form is not None and reason is None:
            for precision in precisions:
                yield from _expand_precision(source, granted, backend, form, precision, absent)
        # `auto` means what is installed: a backend that is not is no refusal, `doctor` lists it.
        elif reason and not (auto and (plugins.missing(backend) or reason == lacking)):
            yield _refusal(source, target.name, name, "*", reason)


def _with_tuning(target: Target, backend: Backend, budget: Budget) -> Target:
    """The target, with what the policy grants to a backend that tunes among its options."""
    if not budget.tuning_trials or not backend.capabilities.tunes:
        return target
    options = {**backend.budget_options(budget), **target.options.get(backend.name, {})}
    return replace(target, options={**target.options, backend.name: options})


def _expand_precision(
    source: SourceModel,
    target_policy: TargetPolicy,
    backend: Backend,
    form: str,
    precision: str,
    not_runnable_here: str,
) -> Iterator[Job | Refusal]:
    target = target_policy.target
    schemes = backend.schemes(target, precision) or _schemes_of_any_graph(backend, target, precision)
    if not schemes:
        yield _refusal(source, target.name, backend.name, precision, _why_lacking(backend, target, precision))
    for scheme in schemes:
        if (reason_or_none := _refuse_scheme(target_policy, scheme, form, precision)) is not None:
            yield _refusal(source, target.name, backend.name, scheme.name, reason_or_none)
            continue
        yield Job(
            id=job_id(source, target.name, backend.name, scheme.name),
            source=source.uri,
            target=target,
            backend=backend.name,
            scheme=scheme,
            gates=_gates(source, target_policy.tolerances[precision]),
            form=form,
            not_runnable_here=not_runnable_here,
        )


def _gates(source: SourceModel, asked: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """The policy's, and those that the source's own models are for; the policy's limit on a metric wins."""
    asked = fitting_gates(asked, language_model=_keeps_cache(source))
    plugin, named = _plugin(source), {gate.metric for gate in asked}
    own = plugin.capabilities.gates if plugin is not None else ()
    return (*asked, *(gate for gate in own if gate.metric not in named))


def _schemes_of_any_graph(backend: Backend, target: Target, precision: str) -> tuple[Scheme, ...]:
    """One scheme, the lowering's own, where a backend compiles any graph and does not say that it lacks the
    precision."""
    capabilities = backend.capabilities_for(target)
    if not capabilities.compiles_any_graph or capabilities.why_lacking(precision):
        return ()
    return (Scheme(precision=precision, name=precision),) if precision in plugins.names("lowerings") else ()


def _why_lacking(backend: Backend, target: Target, precision: str) -> str:
    why = backend.capabilities_for(target).why_lacking(precision)
    reason = f"{backend.name} has no {precision} on {target.device} here"
    return f"{reason}: {why}" if why else reason


def _refuse_backend(backend: Backend, policy: Policy, target_policy: TargetPolicy, absent: str) -> str | None:
    """`absent`: what of the target's hardware this machine lacks; only a backend that cross-compiles serves that target
    here."""
    allowed = policy.compliance.allowed_backends
    if allowed is not None and backend.name not in allowed:
        return f"compliance.allowed_backends does not list {backend.name} (it lists {', '.join(allowed) or 'none'})"
    here = None if crosses(backend.name, target_policy.target) else absent or None
    return plugins.missing(backend) or here or backend.refuse_target(target_policy.target)


def _form_for(source: SourceModel, backend: Backend) -> str | None:
    """The form in which the backend is given the source; None where the source has none that it takes."""
    given, taken = _forms(source), backend.capabilities.forms
    # Of a model that starts as StableHLO, ONNX is what may not be there.
    order = given if given[0] == "stablehlo" else taken
    return next((form for form in order if form in given and form in taken), None)


def _refuse_source(source: SourceModel, backend: Backend, form: str | None, target_policy: TargetPolicy) -> str | None:
    """Why the backend can't be given the source, in that form."""
    plugin, name = _plugin(source), backend.name
    if plugin is not None and (reason := plugins.missing(plugin)) is not None:
        return reason  # no job can do without the source
    if _keeps_cache(source) and not backend.capabilities.caches:
        return f"the model hands on a cache of keys and values from token to token, which {name} can't here"
    if form is None:
        taken, given = " or ".join(backend.capabilities.forms), " or ".join(_forms(source))
        return f"{name} takes {taken}, and a model of flavor {source.flavor} is given as {given}"
    if (reason := plugins.missing_for_form(backend, form)) is not None:
        return reason
    if form == "torch-export" and plugin is not None and (reason := plugins.missing_for_programs(plugin)):
        return f"{name} takes {form}: {reason}"
    return None if crosses(name, target_policy.target) else refuse_baseline(source.flavor, target_policy.target)


def _plugin(source: SourceModel) -> Exporter | None:
    """None for a flavor that no source takes: `inspect` says so later."""
    return plugins.load("sources", source.flavor) if source.flavor in plugins.names("sources") else None


def _forms(source: SourceModel) -> tuple[str, ...]:
    plugin = _plugin(source)
    return plugin.capabilities.forms if plugin is not None else ("onnx",)


def _keeps_cache(source: SourceModel) -> bool:
    plugin = _plugin(source)
    return plugin is not None and plugin.keeps_cache(source)


def _refuse_scheme(target_policy: TargetPolicy, scheme: Scheme, form: str, precision: str) -> str | None:
    if scheme.precision != precision:
        return (
            f"asked for {precision}, the backend offers {scheme.precision}: that would be judged by another "
            "precision's tolerances"
        )
    if not target_policy.tolerances.get(scheme.precision):
        return f"the policy sets no tolerance for {scheme.precision}, so nothing could be validated"
    if reason := missing_package(target_policy.tolerances[scheme.precision]):
        return reason
    if scheme.native:
        return None
    if form != "onnx":
        return (
            f"lowerings work on ONNX graphs, and the backend is given {form}: it would have to do the precision itself"
        )
    if scheme.precision not in plugins.names("lowerings"):
        return f"no lowering to {scheme.precision} is installed"
    return plugins.missing(plugins.load("lowerings", scheme.precision))


def _refusal(source: SourceModel, target: str, backend: str, precision: str, reason: str) -> Refusal:
    return Refusal(
        job_id=job_id(source, target, backend, precision),
        target=target,
        backend=backend,
        precision=precision,
        reason=reason,
    )


def _thread_notes(policy: Policy, jobs: Sequence[Job], hardware: Hardware) -> Iterator[str]:
    """Of targets that are measured on this machine with more threads than can compute here at once."""
    limit, planned = cpu_limit(), {job.target.name for job in jobs}
    for target in (rules.target for rules in policy.targets):
        if target.name not in planned or hardware.refuse(dict(target.hardware)) is not None:
            continue
        if target.threads > min(hardware.cores, limit):
            has = f"{hardware.cores} cores" if hardware.cores <= limit else f"a CPU limit of {limit:.3g} cores"
            yield (
                f"target {target.name} has threads: {target.threads}, and this machine has {has}: threads wait for "
                "each other, so times say nothing of a machine that has enough"
            )


_LARGE_BATCH = 65_536
"""From here on what is said before a run: the proof takes minutes of a small model."""

_ROWS_PROVEN = 5
"""So many times the largest batch is answered to prove it: in another order, in sizes below it (powers of two), and in
one call that is larger (`measure.behaviour.calls_to_compare`)."""


def _batch_notes(jobs: Sequence[Job]) -> Iterator[str]:
    """Of targets whose largest batch takes long to prove, before anything is timed."""
    for target in {job.target.name: job.target for job in jobs if not job.not_runnable_here}.values():
        if (largest := max(target.batch_sizes)) >= _LARGE_BATCH:
            yield (
                f"target {target.name} has a batch size of {largest:,}: the original and each candidate answer about "
                f"{_ROWS_PROVEN * largest:,} rows to prove it, before anything is timed; name what users send "
                "(batch_sizes), more rows are served in parts of it"
            )


def _notes(policy: Policy, jobs: Sequence[Job]) -> Iterator[str]:
    movers: dict[str, list[str]] = {}
    for target_policy in policy.targets:
        if (alias := target_policy.alias) and target_policy.published_as not in movers.get(alias, []):
            movers.setdefault(alias, []).append(target_policy.published_as)
    for alias, names in movers.items():
        if len(names) > 1:
            yield (
                f"targets {' and '.join(names)} move the same alias {alias!r}: the last one that wins has it; say "
                f"{{target}} in promote.alias"
            )
    calibrates = any(plugins.needs_calibration(job.scheme) for job in jobs)
    if calibrates and policy.data.validation.source == policy.data.calibration.source != "synthetic":
        yield (
            "validation and calibration samples come from the same place: what is calibrated on the samples that it is "
            "judged by looks better than it is"
        )
    tunes = any(plugins.load("backends", name).capabilities.tunes for name in {job.backend for job in jobs})
    if policy.budget.tuning_trials and not tunes:
        yield "budget.tuning_trials has no effect: none of the backends of this plan tunes"
