"""Jobs that their limits and validation samples keep from passing, whatever is compiled: `plan` and `run` refuse them
alike.

What is asked here ends as NOT_RUN where a candidate is validated, which no waiver lets through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_stage.core.language_models import LANGUAGE_METRICS
from compile_stage.core.records import Budget, Data, Gate, Job, Refusal, SampleSet
from compile_stage.core.spelling import did_you_mean
from compile_stage.core.tensors import Signature
from compile_stage.measure import own_metric
from compile_stage.measure.gate_needs import declared_outputs, task_problem, unseen_outputs
from compile_stage.measure.gates import in_force
from compile_stage.measure.label_needs import labels_problem
from compile_stage.measure.performance import TOKEN_SPEEDS

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


_SYNTHETIC = "its validation samples are synthetic (data.validation.source), which prove nothing, so it could not pass"


def unfit(jobs: Sequence[Job], validation: SampleSet, data: Data, signature: Signature) -> dict[str, str]:
    """Why jobs of one target can't pass with these samples, by their ids. What is not validated on this machine is not
    asked."""
    validated = [job for job in jobs if not job.not_runnable_here]
    if too_few := _too_few(validation, data):
        return {job.id: too_few for job in validated}
    return _unfit_labels(validated, validation, signature)


def unfit_source(jobs: Sequence[Job], data: Data) -> dict[str, str]:
    """As `unfit`, as far as the policy alone says it, before anything is exported."""
    if data.validation.source != "synthetic":
        return {}
    return {job.id: _SYNTHETIC for job in jobs if not job.not_runnable_here}


def unfit_limits(
    jobs: Sequence[Job], performance: Sequence[Gate], signature: Signature, budget: Budget
) -> dict[str, str]:
    """Jobs with a limit on what the model does not have, by their ids: an output of that name, tokens that it writes,
    or more classes than are compared; with a metric of the user's own that can't be imported; or with no limit on one
    of the outputs. What is not validated on this machine is not asked.

    Args:
        performance: The gates on performance of their target.
        budget: Says how long the import of an own metric may take.
    """
    here = [job for job in jobs if not job.not_runnable_here]
    return (
        _unseen_outputs(here, signature, None)
        | _tokens_of_no_language_model(jobs, performance, signature)
        | _too_few_classes(jobs, signature)
        | _unusable_metrics(here, budget)
        | _unknown_outputs(jobs, signature)
    )


def _unusable_metrics(jobs: Sequence[Job], budget: Budget) -> dict[str, str]:
    own = [(job.id, gate.metric) for job in jobs for gate in job.gates if gate.metric.startswith("python:")]
    with own_metric.allowed(budget.job_minutes * 60):
        problems = {metric: own_metric.unusable(metric) for metric in dict.fromkeys(metric for _, metric in own)}
    return {job_id: f"{problem}, so it could not pass" for job_id, metric in own if (problem := problems[metric])}


def _unseen_outputs(jobs: Sequence[Job], signature: Signature, labels: Array | None) -> dict[str, str]:
    """A verdict needs a check of each output: one that nothing looks at could hold anything."""
    outputs, _ = declared_outputs(signature, 1 if labels is None else len(labels))
    found: dict[str, str] = {}
    for job in jobs:
        if unseen := list(unseen_outputs(job.gates, outputs, labels)):
            kind = outputs[unseen[0]].dtype
            metric = "max_abs" if kind.kind == "f" else "agreement"
            found[job.id] = (
                f"no limit of {job.scheme.precision} looks at output {unseen[0]!r} (give tolerances."
                f"{job.scheme.precision} one for {kind.name} outputs, such as {metric}), so it could not pass"
            )
    return found


def _tokens_of_no_language_model(
    jobs: Sequence[Job], performance: Sequence[Gate], signature: Signature
) -> dict[str, str]:
    """Logits of tokens are [prompts, new tokens, vocabulary]: a model without an output of three axes gives none."""
    if any(len(output.shape) == 3 for output in signature.outputs):
        return {}
    return {
        job.id: f"{gate.metric} is asked of a language model, and no output of this model is logits of tokens "
        "[prompts, new tokens, vocabulary], so it could not pass"
        for job in jobs
        if not job.not_runnable_here
        for gate in (*job.gates, *performance)
        if gate.metric in (*LANGUAGE_METRICS, *TOKEN_SPEEDS)
    }


def _too_few_classes(jobs: Sequence[Job], signature: Signature) -> dict[str, str]:
    """The k best of k classes are always the same ones."""
    found: dict[str, str] = {}
    for job in jobs:
        for output in signature.outputs if not job.not_runnable_here else ():
            classes = output.shape[-1] if len(output.shape) > 1 and "float" in output.dtype else None
            for gate in in_force(job.gates, output.name):
                k = gate.options.get("k", 0) if gate.metric == "topk_agreement" else 0
                if isinstance(classes, int) and k >= classes > 1:
                    found[job.id] = (
                        f"topk_agreement compares the {k} best classes (k), and output {output.name!r} has {classes}, "
                        "so it could not pass"
                    )
    return found


def _unknown_outputs(jobs: Sequence[Job], signature: Signature) -> dict[str, str]:
    outputs = [output.name for output in signature.outputs]
    return {
        job.id: f"{gate.metric} is asked of output {gate.output!r}, and the model has {', '.join(map(repr, outputs))}, "
        f"so it could not pass{_meant(gate.output, outputs)}"
        for job in jobs
        if not job.not_runnable_here
        for gate in job.gates
        if gate.output is not None and gate.output not in outputs
    }


def _meant(name: str, known: Sequence[str]) -> str:
    near = did_you_mean(name, known)
    return f"; did you mean {near!r}?" if near else ""


def refusal(job: Job, reason: str) -> Refusal:
    """A job of the plan, refused."""
    return Refusal(
        job_id=job.id, target=job.target.name, backend=job.backend, precision=job.scheme.precision, reason=reason
    )


def _too_few(samples: SampleSet, data: Data) -> str:
    if not samples.real:
        return _SYNTHETIC
    if samples.independent < data.min_samples:
        one = samples.independent == 1
        ending = "" if one else "s"
        unit = f"group{ending} of validation samples" if samples.groups else f"validation sample{ending}"
        counted, verb = f"{samples.independent} {unit}", "is" if one else "are"
        return (
            f"there {verb} {counted}, fewer than the {data.min_samples} that the policy asks for "
            "(data.min_samples), so it could not pass"
        )
    return ""


def _unfit_labels(jobs: Sequence[Job], validation: SampleSet, signature: Signature) -> dict[str, str]:
    """Jobs with a gate whose metric can't read the labels, alone or with the outputs, by their ids; and those without
    a gate on an output."""
    from compile_stage.measure.samples import open_samples

    labels = open_samples(validation).labels if validation.has_labels else None
    if labels is None:
        return {}
    outputs, sizes_known = declared_outputs(signature, len(labels))
    found = _unseen_outputs(jobs, signature, labels)
    for job in jobs:
        problems = (
            labels_problem(gate.metric, labels, gate.options, queries=validation.groups > 0) for gate in job.gates
        )
        problem = next(filter(None, problems), None)
        if problem is None and sizes_known:
            problem = task_problem(job.gates, outputs, labels)
        if problem is not None:
            found[job.id] = f"{problem}, so it could not pass"
    return found
