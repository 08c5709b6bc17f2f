"""A case: one backend, one real model, one scheme; compiled once and shared by its checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json, load_record
from compile_stage.core.ports import Backend, Lowering, Session
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target
from compile_stage.testing import programs

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

SIZES = (1, 3)
"""Batch sizes of the target, where the model's batch is free."""
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4", "fp8")


@dataclass
class Case:
    """One backend, one real model, one scheme.

    Attributes:
        model: In float32, as an exporter wrote it.
        samples: At least 8 of them; also the calibration, where a scheme wants one.
        folder: For artifacts; must be the case's own.
        common: What was found of the backend itself, by the first case that looked; the cases of one target share it.
    """

    backend: Backend
    model: PortableModel
    samples: SampleSet
    scheme: Scheme
    folder: Path
    target: Target = field(default_factory=lambda: Target(name="conformance", batch_sizes=SIZES, threads=1))
    common: dict[str, Any] = field(default_factory=dict)

    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False, repr=False)
    _open: Session | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.workplace.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return f"{self.backend.name}/{self.scheme.name}"

    @cached_property
    def portable(self) -> PortableModel:
        """The model in the form that the backend takes: lowered, unless the scheme is native."""
        if "onnx" not in self.backend.capabilities.forms:
            return programs.to_program(self.model, self.folder / "program")
        if self.scheme.native:
            return self.model
        lowering: Lowering = plugins.load_here("lowerings", self.scheme.precision)
        return lowering.lower(self.model, self.scheme, self.samples, (), self.folder / "lowered")

    @property
    def workplace(self) -> Path:
        """The working folder in which the backend compiles; nothing may be left in it."""
        return self.folder / "workplace"

    @cached_property
    def artifact(self) -> Artifact:
        """Compiled once for all checks, and sent through JSON as between processes."""
        return load_record(Artifact, canonical_json(self.compile_into(self.folder / "artifact")))

    def compile_into(self, folder: Path) -> Artifact:
        """Compile it."""
        portable = self.portable
        with contextlib.chdir(self.workplace):
            return self.backend.compile(
                portable, self.scheme, self.target, f"model--{self}", folder, calibration=self.samples
            )

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """The open artifact, one for all checks that only run it: opening takes some runtimes as long as compiling."""
        if self._open is None:
            self._open = self._stack.enter_context(self.backend.open(self.artifact, 1))
        yield self._open

    def close(self) -> None:
        """End that session."""
        self._open = None
        self._stack.close()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that the model takes and the target names."""
        return self.target.batch_sizes

    def batch(self, size: int, start: int = 0) -> Batch:
        """Samples from `start` on, wrapping around at the end."""
        rows = (np.arange(size) + start) % self.samples.count
        inputs = Path(self.samples.path) / "inputs"
        return {
            spec.name: np.ascontiguousarray(np.load(inputs / f"{spec.name}.npy")[rows])
            for spec in self.model.signature.inputs
        }

    def expected(self, batch: Batch) -> Batch:
        """What ONNX's own reference implementation answers: no runtime is both judge and party."""
        names = [spec.name for spec in self.model.signature.outputs]
        return dict(zip(names, self._reference.run(names, dict(batch)), strict=True))

    @cached_property
    def _reference(self) -> Any:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(self.model.path)


def target_for(backend: Backend, options: Mapping[str, Any] | None = None, device: str | None = None) -> Target:
    """A target that the backend compiles for.

    Args:
        options: The backend's own options there.
        device: The CPU where the backend has it, else the first device that it declares.
    """
    devices = backend.capabilities.devices
    chosen = device or ("cpu" if "cpu" in devices or not devices else devices[0])
    given = {backend.name: dict(options)} if options else {}
    return Target(name="conformance", device=chosen, batch_sizes=SIZES, threads=1, options=given)


def cases(
    backend: Backend,
    model: PortableModel,
    samples: SampleSet,
    folder: Path,
    precisions: tuple[str, ...] = PRECISIONS,
    target: Target | None = None,
) -> Iterator[Case]:
    """A case for every scheme that the backend declares and the lowering takes for this model.

    Args:
        target: What to compile for; `target_for(backend)` where none is given. Its batch size is the model's where that
            is fixed.
    """
    fixed = model.signature.fixed_batch
    target = target or target_for(backend)
    if fixed:
        target = replace(target, batch_sizes=(fixed,))
    common: dict[str, Any] = {}
    for precision in precisions:
        for scheme in backend.schemes(target, precision):
            if scheme.native or plugins.load_here("lowerings", precision).refuse(model, scheme) is None:
                yield Case(backend, model, samples, scheme, folder / backend.name / scheme.name, target, common)
