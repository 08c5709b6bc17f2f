"""What plug-ins declare of themselves: one frozen record each, in the class attribute `capabilities`.

It is read when a policy is checked and when a run is planned, so it holds plain values and needs none of the plug-in's
packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from compile_stage.core.records import Gate, record

SOURCE_PRECISION = "fp32"
"""The precision of every source model: the baseline's, and the one that needs no lowering."""


@record
class Capabilities:
    """What any plug-in may declare.

    Attributes:
        distributions: That must be installed, where several bring modules of the same name: that these can be imported
            is then not enough.
        toolchain: The isolated environment in which a backend or a source may run (`core.toolchains`), where it has not
            the backend's own name. A source that names one does `open` and `export` there; what else it is asked, it
            answers in the stage's environment, without the packages that it `requires`.
        profiler: Of a backend or a source: the function, as `package.module:function`, that reads the profiler of its
            runtime; empty where it has none. Called in a worker: of a backend as `(backend, artifact, request)`, of a
            source as `(source plug-in, source model, target, request)`; it answers with a `core.records.Profile`. It
            opens a session of its own, and stands in a file of its own, since a backend's is published with its
            artifacts. `request` is a `plugin_support.profiling.ProfileRequest`.
    """

    distributions: tuple[str, ...] = ()
    toolchain: str = ""
    profiler: str = ""


@record
class LoweringCapabilities(Capabilities):
    """What holds for a precision when the lowering of that name makes it.

    Attributes:
        needs_calibration: `lower` looks at calibration samples.
        mixes: Some nodes can stay in higher precision while the others are lowered (`precision.mixed`), so a candidate
            that misses its tolerance is worth a search for them.
        complexity: Of two candidates that are equal within the noise, the one of lower complexity wins. FP32 is 0, bf16
            10, int4 60; a number between them puts a precision between.
    """

    needs_calibration: bool
    mixes: bool = False
    complexity: int = 100


@record
class BackendCapabilities(Capabilities):
    """What a backend can do. Where an option or the device of a target narrows it, `Backend.capabilities_for` answers.

    Attributes:
        forms: Portable forms that it takes, preferred first: `onnx`, `torch-export`, `stablehlo`, `tflite`.
        form_requires: Form → modules that it needs for models in that form, beside those that the plug-in `requires`.
            No toolchain holds them: such models are for the current environment.
        devices: Of targets that it serves.
        precisions: That it has somewhere, by itself or by a lowering; for a target, `Backend.schemes` says which.
        runtime: Distributions that a serving environment needs.
        opens_with: Modules that opening an artifact needs; empty: all that the plug-in `requires`.
        lacks: Precision → why it has none, for the refusal; `*` for every other one.
        compiles_any_graph: It compiles whatever ONNX graph it can read. So a precision that it neither has schemes for
            nor lacks, a third party's, is compiled as that precision's lowering wrote it.
        times_kernels: It times kernels while it compiles, so nothing else may run on the machine meanwhile.
        cross_compiles: What it compiles is the same on every machine, also where it can't run
            (`Artifact.not_runnable_here`).
        tunes: It searches for the fastest kernels, within the budget's `tuning_trials` (`Backend.budget_options`).
        keeps_tuning_records: What it measures while it compiles is kept in files (`core.tuning_records`), which the
            registry hands on to other machines.
        offers_tuning_options: It has settings that are worth a try (`Backend.tuning_options`).
        caches: Its sessions run graphs that hand on a cache of keys and values (`core.generation`), as language models
            have.
        artifact_is_code: Opening an artifact runs machine code or a program that stands in it, as a shared library
            does. False for a graph that the runtime's own kernels compute. One of a stranger's is not opened without
            `--allow-code`.
        follows_others: Its jobs may follow each other in one process: what it compiles does not depend on what it
            compiled there before, to the byte, so that it can be made again alone.
        runs_anywhere: An fp32 artifact is the graph as it was exported, which the runtime fits to the machine that
            opens it: what `publish.elsewhere: portable-fp32` loads where no variant is proven.
        reopens_after_fork: A process that was forked from one with an open session can open its own and run it. False
            for a runtime whose threads sessions share: it would wait for ever for those that stayed in the parent.
    """

    forms: tuple[str, ...]
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    runtime: tuple[str, ...]
    form_requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    opens_with: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    compiles_any_graph: bool = False
    times_kernels: bool = False
    cross_compiles: bool = False
    tunes: bool = False
    keeps_tuning_records: bool = False
    offers_tuning_options: bool = False
    caches: bool = False
    artifact_is_code: bool = True
    follows_others: bool = False
    runs_anywhere: bool = False
    reopens_after_fork: bool = False

    def why_lacking(self, precision: str) -> str:
        """Why it has no scheme for a precision; empty when it does not say."""
        return self.lacks.get(precision, self.lacks.get("*", ""))


@record
class SourceCapabilities(Capabilities):
    """What a source can give.

    Attributes:
        forms: Portable forms, preferred first: `onnx`, `torch-export` where `Exporter.export_program` is there, and
            `stablehlo` and `tflite` where `Exporter.export_for` is. One that prefers `stablehlo` may have no ONNX of a
            model.
        devices: On which `Exporter.open` runs the original. A target of another device is refused, since a speedup over
            a baseline on another device is no comparison (`core.baseline`).
        program_requires: Modules that a PyTorch program needs beside those that the plug-in `requires`.
        program_extra: The extra of compile-stage that brings them.
        reads_raw_samples: Samples are what people give to the model's predict(), and the network's inputs are seen
            while that answers them (`Exporter.network_inputs`). Then predict() is compared as a whole too.
        computes_wider: Its models compute in a wider type than their networks' inputs have, float64, so the original is
            asked with the samples as they are, and not rounded (`Exporter.open_as_given`).
        gates: Demanded of every candidate, beside those of the policy, which win where they name the same metric. What
            its models are for, and closeness of numbers alone does not show.
        asked_on_one_thread: What its models answer is asked for on one thread, since threads of their libraries meet
            after each tree: on a busy machine a row takes 3 to 25 times as long on two. They are measured on the
            target's threads all the same.
        planned_by_graph: Its models are ONNX, or are exported to it within seconds, and may hold operators that few
            runtimes have (ai.onnx.ml), so that a plan exports them, and asks each backend whether it takes the graph.
    """

    forms: tuple[str, ...] = ("onnx",)
    devices: tuple[str, ...] = ("cpu",)
    program_requires: tuple[str, ...] = ()
    program_extra: str = ""
    reads_raw_samples: bool = False
    computes_wider: bool = False
    gates: tuple[Gate, ...] = ()
    asked_on_one_thread: bool = False
    planned_by_graph: bool = False


@record
class RegistryCapabilities(Capabilities):
    """What a registry can do beside keeping models.

    Attributes:
        keeps_tuning_records: It has `pull_records` and `push_records`.
        has_place: It has `place`, which `doctor` shows.
        can_be_watched: It has `versions`, `version` and `register_webhook`, which `watch` uses.
    """

    keeps_tuning_records: bool = False
    has_place: bool = False
    can_be_watched: bool = False
