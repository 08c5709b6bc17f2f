"""The source model, the jobs that a policy makes of it, and what was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Literal

from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.policy import Gate, Policy, Target
from compile_stage.core.tensors import Signature


@record
class SourceModel:
    """A model in a registry, pinned and downloaded.

    Attributes:
        uri: Immutable: `models:/fraud/7`, `models:/m-0123...`, `folder:/path#sha256:...`.
        name: Registered name, or a name made from the URI.
        version: As a string; empty when the source has none.
        flavor: `pytorch`, `sklearn`, `onnx`, ...: the source plug-in that reads it.
        path: The downloaded MLflow model directory (holds `MLmodel`), inside our cache.
        digest: `sha256:...` of the payload, without `MLmodel` and `registered_model_meta`, which carry ids and times.
        described: `sha256:...` of what `MLmodel` says of how the payload is read (flavors, signature, input example):
            the same weights logged with another signature are another model to whoever reads them.
        signature: The MLflow signature as tensor specs where it has one; None when it does not describe the graph.
        registry: Plug-in name of the registry it came from.
        logged_model_id: MLflow's `m-...`, for lineage; empty elsewhere.
        run_id: The run that made it; empty when unknown.
        tags: Of the version, for `applies_to`.
        mlmodel: The parts of `MLmodel` that say how the payload is read, as its registry parsed them. Empty: whoever
            wants them reads the file, with MLflow, whose import takes seconds and a hundred megabytes.
    """

    uri: str
    name: str
    version: str
    flavor: str
    path: str
    digest: str
    signature: Signature | None = None
    registry: str = "mlflow"
    logged_model_id: str = ""
    run_id: str = ""
    experiment_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    described: str = ""
    mlmodel: JsonMap = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str, str]:
        """What everything that is made from the model depends on."""
        return self.digest, self.flavor, self.described


@record
class Scheme:
    """How a backend wants a precision expressed.

    Attributes:
        precision: The policy's word: `fp32`, `fp16`, `bf16`, `int8`, `int8-dynamic`, ...
        name: Readable and unique within backend and precision: `fp32`, `int8-u8s8`, `int8-sym`.
        native: True when the backend does it itself and the graph is not rewritten.
        activations: `uint8`, `int8`, or empty.
        weights: `int8`, `uint4`, `int4`, `float16`, or empty.
        symmetric: Symmetric activations.
        per_channel: Weights have one scale per output channel.
        ops: Op types to quantise; empty means all that the lowering knows.
        options: What only this lowering or backend understands.
        float_type: Precision in which the backend runs what a lowering left in float32.
        float_types: Those that it offers for that, besides fp32: a search for mixed precision tries them.
        calibrates: Of a native scheme: `Backend.compile` looks at calibration samples.
    """

    precision: str
    name: str
    native: bool = False
    activations: str = ""
    weights: str = ""
    symmetric: bool = False
    per_channel: bool = True
    ops: tuple[str, ...] = ()
    options: JsonMap = field(default_factory=dict)
    float_type: str = "fp32"
    float_types: tuple[str, ...] = ()
    calibrates: bool = False


@record
class TuningOption:
    """A setting that a backend offers to try on top of what passes.

    Attributes:
        kind: `memory` is tried before `tuning`.
        name: Readable, a part of a job's id, unique within the backend: `no-arena`.
        options: Options of that backend, laid over those of the target.
        opening: Of a setting that changes nothing but how the same files are opened: what it lays over the artifact's
            own options. Such settings are searched in combination, without a compilation of each. Empty for what must
            be compiled.
        worth_a_try: Where it is tried on the fastest candidates although no option tuning is asked for: with
            `short-calls`, where a call takes less than two milliseconds; with `batches`, where several rows are
            measured at a time; with `layout`, always. Empty for a setting that is tried by option tuning alone.
    """

    kind: Literal["memory", "tuning"]
    name: str
    options: JsonMap
    opening: JsonMap = field(default_factory=dict)
    worth_a_try: Literal["", "short-calls", "batches", "layout"] = ""


@record
class Job:
    """One attempt: a target, a backend, a precision in its scheme.

    Attributes:
        id: Readable and stable: `fraud-7--cpu-server--openvino--int8-sym`.
        form: The portable form that the backend is given: `onnx`, `torch-export`, `stablehlo` or `tflite`.
        tuning_options: Names of the settings that were laid over the target's options, in order.
        not_runnable_here: Why what it compiles is not for this machine, and so is not validated here; empty when it is.
    """

    FORMER_NAMES: ClassVar = {"rungs": "tuning_options", "elsewhere": "not_runnable_here"}

    id: str
    source: str
    target: Target
    backend: str
    scheme: Scheme
    gates: tuple[Gate, ...]
    form: str = "onnx"
    tuning_options: tuple[str, ...] = ()
    not_runnable_here: str = ""

    @property
    def label(self) -> str:
        """As tables and sentences name it within a target: `openvino int8-u8`."""
        return f"{self.backend} {self.scheme.name}"


@record
class Refusal:
    """A job that was not tried, and why, in words a user can act on."""

    job_id: str
    target: str
    backend: str
    precision: str
    reason: str


@record
class Plan:
    """What will run, what is refused and why.

    Attributes:
        cached_steps: Job id → the steps whose results the cache has already; empty where nobody looked.
        exit_code: How a run would end, as far as that is known without compiling; 0 where nothing speaks against it.
        problem: Why, a line for each target that can have no winner; empty beside 0.
    """

    source: SourceModel
    policy: Policy
    jobs: tuple[Job, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    cached_steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exit_code: int = 0
    problem: str = ""
