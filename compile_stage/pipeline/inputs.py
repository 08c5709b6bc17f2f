"""What the candidates of one target are made of and judged by (`TargetInputs`), and what its functions are given
(`TargetRun`).

The only place that exports, takes samples and runs the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from compile_stage.core import plugins
from compile_stage.core.baseline import reference_target
from compile_stage.core.context import Context
from compile_stage.core.errors import KilledError, SourceError, UsageError, WorkerError
from compile_stage.core.generation import session_signature
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import (
    Budget,
    Data,
    Job,
    Plan,
    Policy,
    PortableModel,
    SampleSet,
    SourceModel,
    Target,
    TargetPolicy,
    Waiver,
)
from compile_stage.measure.metrics import held_waivers
from compile_stage.measure.readers import SampleRequest
from compile_stage.measure.reference import Reference
from compile_stage.pipeline.time_left import TimeLeft
from compile_stage.steps.export import export, other_forms
from compile_stage.steps.reference import reference
from compile_stage.steps.rewrite import rewrite
from compile_stage.steps.sample import sample
from compile_stage.steps.validate import ValidationSet


def source_limits(budget: Budget, source: SourceModel, data: Data, policy_files: Sequence[str] = ()) -> WorkerLimits:
    """What the worker that holds the original may use: of files the model's, the samples', and, where a function makes
    the samples, what lies beside the policy."""
    return replace(WorkerLimits.within(budget), reads=tuple(_files_of(source, data, policy_files)))


def _files_of(source: SourceModel, data: Data, policy_files: Sequence[str]) -> Iterator[str]:
    yield source.path
    for spec in (data.validation, data.calibration):
        kind, _, name = spec.source.partition(":")
        if kind == "file":
            yield name
        elif kind == "python":
            yield from (str(Path(file).absolute().parent) for file in policy_files)


class TargetInputs:
    """The source as ONNX, the samples, what the original predicts for them, and the source in other forms.

    Each is made, or taken from the cache, when it is first asked for; `make` asks for all of them.
    """

    def __init__(
        self,
        context: Context,
        source_worker: Worker,
        source: SourceModel,
        data: Data,
        target: Target,
        jobs: Sequence[Job],
    ) -> None:
        """Args:
        source_worker: The worker that holds the original.
        jobs: All of this target; they say which forms and which samples are needed.
        """
        self.source, self.data, self.target = source, data, target
        self._context, self._worker, self._jobs = context, source_worker, jobs

    @cached_property
    def exported(self) -> PortableModel:
        """The source as ONNX; where it has none as StableHLO or as a PyTorch program, and no job that needs ONNX goes
        further."""
        return export(self._context, self._worker, self.source, self.target, self._jobs)

    @cached_property
    def portable(self) -> PortableModel:
        """What was exported, rewritten where that costs less: what lowerings, the searches and the debugger work on."""
        return rewrite(self._context, self._worker, self.exported, self.validation)

    @cached_property
    def samples(self) -> Mapping[str, SampleSet]:
        """By role: `validation`, and `calibration` where a job needs it and there is any."""
        samples = {"validation": self.validation}
        if any(plugins.needs_calibration(job.scheme) for job in self._jobs):
            # A model without samples to calibrate on has no int8, and its jobs say so; fp32 needs none.
            with contextlib.suppress(SourceError):
                samples["calibration"] = self._sample("calibration")
        return samples

    @cached_property
    def validation(self) -> SampleSet:
        """The samples that artifacts are judged by."""
        return self._sample("validation")

    @property
    def calibration(self) -> SampleSet | None:
        """The samples that ranges are taken from; None where no job calibrates, or there are none."""
        return self.samples.get("calibration")

    @cached_property
    def reference(self) -> Reference:
        """What the original predicts for the validation samples, on the device that the artifacts run on."""
        where = reference_target(self.source.flavor, self.target, self._jobs, self._context.hardware)
        return reference(self._context, self._worker, self.source, self.exported, self.validation, self.data, where)

    def validation_set(self, waivers: Sequence[Waiver]) -> ValidationSet:
        """What artifacts are compared with, and what failures of theirs the waivers may let through."""
        raw = plugins.load("sources", self.source.flavor).capabilities.reads_raw_samples
        return ValidationSet(
            samples=self.validation,
            reference=self.reference,
            data=self.data,
            original=self.source if raw and self.validation.real else None,
            waived=frozenset(held_waivers(waivers, self.target.name, self._context.today)),
        )

    @cached_property
    def forms(self) -> Mapping[str, PortableModel | str]:
        """The source in the other forms that jobs ask for, or why it has no such form."""
        return other_forms(self._context, self._worker, self.source, self._jobs, self.portable.form)

    def model_for(self, job: Job) -> PortableModel:
        """What the job's backend starts from. Raises UsageError, with the reason, when the source has no such form."""
        model = self.portable if job.form == self.portable.form else self.forms[job.form]
        if isinstance(model, str):
            raise UsageError(model)
        return model

    def make(self) -> None:
        """Make all inputs now, so that what the source can't do is the target's trouble and no job's.

        Raises:
            SourceError: The source can't be exported, sampled or run as the target asks.
        """
        _ = self.portable, self.samples, self.reference, self.forms

    def _sample(self, role: Literal["validation", "calibration"]) -> SampleSet:
        spec = self.data.validation if role == "validation" else self.data.calibration
        signature = session_signature(self.exported.signature, self.target.generation)
        request = SampleRequest(spec=spec, signature=signature, seed=self.data.seed, shapes=self.target.shapes)
        return sample(self._context, self._worker, self.source, role, request)


@contextlib.contextmanager
def source_errors(source: SourceModel) -> Iterator[None]:
    """A crash, a time-out or an error of the worker that holds the original is no job's failure: without the original
    nothing is validated. That somebody killed it, or the kernel for want of memory, is not the source's fault."""
    try:
        yield
    except WorkerError as error:
        if error.killed:
            raise KilledError(
                f"the process that held the original model was killed: {error.problem}",
                fix="run again; a time limit of the machine's, or somebody with kill -9, ended it, and memory was not "
                "short",
                where=source.uri,
            ) from error
        if error.starved:
            raise KilledError(
                f"the process that held the original model was killed: {error.problem}",
                fix="free memory, or give this machine or container more, then run again; what is finished is kept",
                where=source.uri,
            ) from error
        last = _last_words(error.detail) if error.kind == "crash" else []
        raise SourceError(
            ": ".join(["the original model could not be exported, run or measured", error.problem, *last]),
            fix="load and run it in its own framework first; budget.job_minutes and job_memory_mb bound it here",
            where=source.uri,
        ) from error


def _last_words(printed: str) -> list[str]:
    """What a process that crashed printed last, if anything. Of a crash in native code Python prints its kind, where
    every thread was, and a line of all extension modules: the kind, and the innermost place."""
    lines = printed.strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Fatal Python error: "):
            inner = next((each.strip() for each in lines[at:] if each.startswith("  File ")), "")
            return [f"{line}, in {inner}" if inner else line]
    return lines[-1:]


@dataclass(frozen=True)
class TargetRun:
    """One target of a run: all that its functions are given."""

    context: Context
    plan: Plan
    policy: TargetPolicy
    inputs: TargetInputs

    @property
    def target(self) -> Target:
        """Where the artifacts must run."""
        return self.policy.target

    @property
    def run_policy(self) -> Policy:
        """What holds for all targets: budget, waivers, data, compliance."""
        return self.plan.policy

    @cached_property
    def time(self) -> TimeLeft:
        """Of the run's budget, for this target."""
        names = [policy.target.name for policy in self.run_policy.targets]
        later = len(names) - 1 - names.index(self.target.name) if self.target.name in names else 0
        return TimeLeft(self.context.events, self.run_policy.budget, len(self.target.batch_sizes), later)
