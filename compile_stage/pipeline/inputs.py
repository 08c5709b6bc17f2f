"""What the candidates of one target are made of and judged by (`TargetInputs`), and what its functions are given
(`TargetRun`).

The only place that exports, takes samples and runs the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from compile_stage.core import plugins
from compile_stage.core.baseline import reference_target
from compile_stage.core.context import Context
from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import (
    Data,
    Job,
    Plan,
    Policy,
    PortableModel,
    SampleSet,
    SourceModel,
    Target,
    TargetPolicy,
)
from compile_stage.steps.export import export, other_forms
from compile_stage.steps.sample import sample
from compile_stage.steps.validate import Reference, ValidationSet, reference


class TargetInputs:
    """The source as ONNX, the samples, what the original predicts for them, and the source in other forms.

    Each is made, or taken from the cache, when it is first asked for; `prepare` asks for all of them.
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
    def portable(self) -> PortableModel:
        """The source as ONNX, which lowerings, the searches and the debugger work on."""
        return export(self._context, self._worker, self.source, self.target)

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
        return reference(self._context, self._worker, self.source, self.validation, where)

    @property
    def validation_set(self) -> ValidationSet:
        """What artifacts are compared with."""
        return ValidationSet(samples=self.validation, reference=self.reference, data=self.data)

    @cached_property
    def forms(self) -> Mapping[str, PortableModel | str]:
        """The source in the other forms that jobs ask for, or why it has no such form."""
        return other_forms(self._context, self._worker, self.source, self._jobs)

    def model_for(self, job: Job) -> PortableModel:
        """What the job's backend starts from. Raises UsageError, with the reason, when the source has no such form."""
        model = self.portable if job.form == self.portable.form else self.forms[job.form]
        if isinstance(model, str):
            raise UsageError(model)
        return model

    def _sample(self, role: Literal["validation", "calibration"]) -> SampleSet:
        signature = self.portable.signature
        return sample(self._context, self._worker, self.source, role, self.data, signature, self.target.shapes)


def prepare(
    context: Context, source_worker: Worker, source: SourceModel, data: Data, target: Target, jobs: Sequence[Job]
) -> TargetInputs:
    """All inputs of a target, made now, so that what the source can't do is the target's trouble and no job's.

    Raises:
        SourceError: The source can't be exported, sampled or run as the target asks.
    """
    inputs = TargetInputs(context, source_worker, source, data, target, jobs)
    _ = inputs.portable, inputs.samples, inputs.reference, inputs.forms
    return inputs


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

    @property
    def seconds_left(self) -> float:
        """Of the run's budget; negative when it is used up."""
        return self.run_policy.budget.minutes * 60 - self.context.events.elapsed_s
