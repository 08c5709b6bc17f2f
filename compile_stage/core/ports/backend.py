"""A lowering and a backend: what makes a graph at another precision, and what compiles and runs it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from compile_stage.core.capabilities import BackendCapabilities, LoweringCapabilities
from compile_stage.core.ports.plugin import Plugin, Session
from compile_stage.core.records import Artifact, Budget, PortableModel, SampleSet, Scheme, Target, TuningOption


class Lowering(Plugin, Protocol):
    """ONNX → ONNX at another precision (`compile_stage.lowerings`), named after the precision."""

    capabilities: ClassVar[LoweringCapabilities]

    @abstractmethod
    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        """The reason why this model can't be lowered so."""

    @abstractmethod
    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        """Write `into/model.onnx`. Nodes named in `keep` stay in FP32. Same input, same bytes."""


Samples: TypeAlias = SampleSet | None
"""Samples for a scheme that `calibrates`; None for the others."""


class Backend(Plugin, Protocol):
    """A compiler and its runtime (`compile_stage.backends`). Subclass it: what has a default here need not be written.

    A backend's file imports nothing of ours but `core` and `plugin_support`: it is vendored into what is published.
    """

    capabilities: ClassVar[BackendCapabilities]

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        """What it can do for one target: `capabilities`, where an option or the device does not narrow them."""
        return self.capabilities

    @abstractmethod
    def toolchain(self) -> Mapping[str, str]:
        """Package → version of all that has a say in an artifact."""

    def refuse_target(self, target: Target) -> str | None:
        """The reason why this backend can't serve that target at all; asked before any export."""
        devices = self.capabilities.devices
        if target.device in devices:
            return None
        return f"{self.name} serves targets of the device {' or '.join(devices)}, not of {target.device!r}"

    @abstractmethod
    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        """The schemes for a precision, preferred first; empty when the backend does not have that precision there."""

    @abstractmethod
    def refuse(self, model: PortableModel, target: Target) -> str | None:
        """The reason why this model can't be compiled: an operator, a shape."""

    @abstractmethod
    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        """Write the artifact's files into the folder `into` and describe them; what really runs is read back
        from the runtime into `Artifact.executed`. Raises when a provider or precision that was asked for was not taken.
        """

    @abstractmethod
    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Session]:
        """Load and be ready to run."""

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        """Of a backend that `offers_tuning_options`: settings that may save memory or time, the most promising of a
        kind first; none that can't have an effect on that target. Each is tried on top of those accepted before it, and
        accepted when it is validated and measured better. Settings that only change how an artifact is opened have
        `TuningOption.opening`, and are searched in combination."""
        return ()

    def budget_options(self, budget: Budget) -> Mapping[str, Any]:
        """Of a backend that `tunes`: options of its own that spend at most `tuning_trials` and the time of a job. A
        target's own options win over them. As options they reach `compile`, and the key under which its artifact is
        cached."""
        return {}

    def records_key(self, target: Target, packages: Mapping[str, str]) -> str | None:
        """Of a backend that `keeps_tuning_records`: the key that a compilation for that target reads and adds to; None
        when it would do neither. Answered without the compiler.

        Args:
            packages: Distribution → version where it compiles, which may be a toolchain.
        """
        return None

    def refuse_record(self, name: str, content: bytes) -> str | None:
        """The reason when that file, which came from a registry, is no tuning record of this backend. Answered without
        the compiler, so `compile` must still treat what it can't read as absent."""
        return f"{self.name} keeps no tuning records"
