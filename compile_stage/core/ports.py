"""The plug points, on one page.

A plug-in is a class with a constructor that takes no argument and touches nothing heavy; packages are imported inside
the methods that need them. It is found by name through an entry point (`core.plugins`). `refuse*` answers a capability question with
None (can do) or with the reason, in words a user can act on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.records import (
    Artifact,
    Budget,
    Bundle,
    Compliance,
    PortableModel,
    Receipt,
    SampleSet,
    Scheme,
    ShapeRange,
    SourceModel,
    Target,
    TuningOption,
    record,
)
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch


@runtime_checkable
class Session(Protocol):
    """A model ready to run. No call outside its context."""

    @property
    def signature(self) -> Signature:
        """Names, dtypes and shapes as the runtime itself reports them."""

    def run(self, batch: Batch) -> Batch:
        """All outputs by name. The arrays belong to the caller: a later `run` does not overwrite them."""


class Plugin(Protocol):
    """What every plug-in says of itself without importing its packages."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]  # importable modules that must be there
    extra: ClassVar[str]  # the extra of compile-stage that brings them; "" when the base install does


class Exporter(Plugin, Protocol):
    """A source framework (`compile_stage.sources`), named after the MLflow flavor it reads."""

    framework: ClassVar[str]  # for the report: "PyTorch (eager)"

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        """The reason why this model can't be exported."""

    def open(self, source: SourceModel, threads: int) -> AbstractContextManager[Session]:
        """The ORIGINAL model in its own framework, in FP32: the baseline."""

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Write `into/model.onnx` (batch symbolic where the model can) and describe it. Input and output names and order
        are the same as those of `open`'s session. Raises SourceError, with the reason, when the model can't be exported, or
        when `shapes` asks for a size that the source has fixed."""

    def example(self, source: SourceModel) -> Batch | None:
        """The input example that was logged with the model, as named tensors; None when there is none."""

    def answer(self, source: SourceModel) -> Mapping[str, Any]:
        """How the source's pyfunc answers, so that the published model answers the same way; read by `compile_stage.flavor`:

        {"kind": "array" | "dict" | "dataframe",   what predict() returns for an array (or dict) input
         "outputs": ["label", ...],                which graph outputs it answers with, in order
         "columns": ["f0", ...] | None,            the data frame's columns that make up the (single) input, in order
         "frame_in_frame_out": bool}               a DataFrame is answered with a DataFrame
        """

    def packages(self) -> Mapping[str, str]:
        """Package → version of what makes the export, for cache keys."""


@runtime_checkable
class ProgramExporter(Protocol):
    """What a source may offer beside: its model as a PyTorch program, for compilers that start from one.

    Where that needs more than `requires`, the class attribute `program_requires` names the modules, and `program_extra` the extra that brings them.
    """

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Write `into/model.pt2`, as `torch.export.load` reads it, of the form `torch-export`. The signature names the tensors of the
        program's flattened inputs and outputs, in order, as `Exporter.export` does. Raises SourceError as that."""


class Lowering(Plugin, Protocol):
    """ONNX → ONNX at another precision (`compile_stage.lowerings`), named after the precision."""

    capabilities: ClassVar[LoweringCapabilities]

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None: ...

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        """Write `into/model.onnx`. Nodes named in `keep` stay in FP32. Same input, same bytes."""


class Backend(Plugin, Protocol):
    """A compiler and its runtime (`compile_stage.backends`).

    A backend's file imports nothing of ours but `core`: it is vendored into what is published.
    Where opening needs fewer modules than `requires`, a class attribute `opens_with` names them. Where several distributions bring modules of the
    same name, `requires_distributions` names the one that must be there.
    """

    forms: ClassVar[tuple[str, ...]]  # portable forms it takes, preferred first
    runtime: ClassVar[tuple[str, ...]]  # distributions that a serving environment needs

    def toolchain(self) -> Mapping[str, str]:
        """Package → version of all that has a say in an artifact."""

    def refuse_target(self, target: Target) -> str | None:
        """The reason why this backend can't serve that target at all; asked before any export."""

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        """The schemes for a precision, preferred first; empty when the backend does not have that precision there.

        A backend may also have a method `lacks(target, precision) -> str | None`: why it has none, for the refusal."""

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        """The reason why this model can't be compiled: an operator, a shape."""

    def compile(
        self,
        model: PortableModel,
        scheme: Scheme,
        target: Target,
        job_id: str,
        into: Path,
        calibration: SampleSet | None = None,
    ) -> Artifact:
        """Write the artifact's files into the folder `into` and describe them; what really runs is read back
        from the runtime into `Artifact.executed`. Raises when a provider or precision that was asked for was not taken."""

    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Session]:
        """Load and be ready to run."""


@runtime_checkable
class Climber(Protocol):
    """What a backend may offer beside."""

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        """Settings that may save memory or time, the most promising of a kind first; none that can't have an effect on that
        target. Each is tried on top of what was kept before it, and kept only when it is proven and measured to be better."""


@runtime_checkable
class CrossCompiler(Protocol):
    """What a backend may offer beside: it compiles for hardware that is not here."""

    def crosses(self, target: Target) -> bool:
        """True when what it compiles for that target is the same on every machine. What can't be run here says why in `Artifact.not_runnable_here`."""


@runtime_checkable
class Tuner(Protocol):
    """What a backend may offer beside: it measures kernels, and takes the fastest."""

    def tuning(self, budget: Budget) -> Mapping[str, Any]:
        """Options of its own that spend at most `tuning_trials` and the time of a job; a target's own options win over them. As options
        they reach `compile`, and the key under which its artifact is kept."""


@runtime_checkable
class MeasuringCompiler(Protocol):
    """What a backend may offer beside: it times kernels while it compiles, and another compilation beside it would spoil the choice."""

    def measures(self, target: Target) -> bool:
        """True when compiling for that target, on this machine, times anything: then nothing else runs meanwhile."""


@runtime_checkable
class RecordKeeper(Protocol):
    """What a backend may offer beside: what it measures while it compiles is kept in files (`core.tuning_records`), which the registry hands on to other
    machines."""

    def records_key(self, target: Target, packages: Mapping[str, str]) -> str | None:
        """The key that a compilation for that target reads and adds to; None when it would do neither. Answered without the compiler.

        Args:
            packages: Distribution → version where it compiles, which may be a toolchain.
        """

    def refuse_record(self, name: str, content: bytes) -> str | None:
        """The reason when that file, which came from a registry, is no record of this backend. Answered without the compiler, so `compile` must still take what
        it can't read as absent."""


class Registry(Plugin, Protocol):
    """Where models live (`compile_stage.registries`)."""

    def accepts(self, uri: str) -> bool:
        """True if this registry understands such a URI."""

    def resolve(self, uri: str, into: Path) -> SourceModel:
        """Pin the URI to an immutable version and copy its files to a folder below `into`, named by digest."""

    def dataset(self, source: SourceModel, name: str, into: Path) -> Path:
        """Fetch a data set by name as one file (.parquet, .csv or .npz) below `into`."""

    def publication_name(self, source: SourceModel, name: str) -> str:
        """The whole name under which `push` publishes: what `find`, `current` and `rollback` take, and a receipt holds."""

    def find(self, name: str, key: str) -> Receipt | None:
        """The published version with that idempotency key."""

    def published(self, uri: str) -> Receipt:
        """The published version that a URI means now. Raises RegistryError when it is none of ours."""

    def push(self, bundle: Bundle, source: SourceModel, files: Mapping[str, Path]) -> Receipt:
        """Publish, idempotently: same key, same version. `files` are the reports as they are before publication."""

    def attach(self, receipt: Receipt, files: Mapping[str, Path]) -> None:
        """Replace the reports that lie with a published version by the final ones (report.html, result.json, ...), which hold its receipt.

        Idempotent: a version that has its final report, for the alias that the receipt names, keeps it. Killed halfway, the next call does all of it."""

    def attest(self, receipt: Receipt, validation: Path, tags: Mapping[str, str]) -> None:
        """Add the file to a published version's own files, below `validations/`, and then the tags to the version. A file of that name is replaced."""

    def current(self, name: str, alias: str) -> Receipt | None:
        """What the alias points to now."""

    def promote(self, receipt: Receipt, alias: str) -> Receipt:
        """Move the alias to that version, recording what it pointed to before."""

    def rollback(self, name: str, alias: str) -> Receipt:
        """Move the alias back to what it pointed to before."""

    def fetch(self, uri: str, into: Path) -> Path:
        """Download a published version into the folder `into`; returns the MLflow model directory."""

    def check(self) -> str | None:
        """None when it can be reached, or the reason: for `doctor`."""


@runtime_checkable
class RecordRegistry(Protocol):
    """What a registry may offer beside: it keeps tuning records (`core.tuning_records`). Both methods raise RegistryError when it can't be reached or refuses."""

    def pull_records(self, source: SourceModel, key: str, have: Collection[str], into: Path) -> None:
        """Copy the records of a key into the folder `into`, whoever pushed them; not those whose names are in `have`. They may be damaged, or none: the
        caller looks at each."""

    def push_records(self, source: SourceModel, key: str, records: Mapping[str, Path]) -> int:
        """Add records by name, those that it has not; returns how many that were. What others push at the same time stays too.

        Args:
            source: Whose registry it is.
        """


@record
class Needs:
    """What a worker may use.

    Attributes:
        timeout_s: Per call.
        total_s: No call goes on longer than this after the worker's start; None for no such limit.
        exclusive: Nothing else may run on the machine meanwhile.
        interpreter: Python executable that runs the worker; empty means this one.
    """

    cpus: int = 1
    memory_bytes: int = 12_000_000_000
    timeout_s: float = 900.0
    exclusive: bool = False
    interpreter: str = ""
    total_s: float | None = None

    @classmethod
    def within(cls, budget: Budget, cpus: int = 2, interpreter: str = "") -> Needs:
        """What a policy grants to one worker."""
        return cls(
            cpus=cpus,
            memory_bytes=int(budget.job_memory_mb * 1e6),
            timeout_s=budget.job_minutes * 60,
            interpreter=interpreter,
        )


class Worker(Protocol):
    """One process of one interpreter, which lives as long as its job so that start-up is paid once."""

    def call(self, function: str, /, **arguments: Any) -> Any:
        """Run a function of `compile_stage.engine.calls` there; arguments and result are plain JSON (records are converted).

        Raises:
            WorkerError: it crashed, ran out of memory, took too long, or raised.
            CompileStageError: of the same class as was raised there, when it was one of ours for people.
        """


class Engine(Plugin, Protocol):
    """Where workers run (`compile_stage.engines`)."""

    def worker(self, name: str, needs: Needs) -> AbstractContextManager[Worker]:
        """Start a worker; leaving the context ends it and all that it started. `name` is for logs."""

    def room(self, memory_bytes: int) -> int:
        """How many workers that hold so much memory each can compile at once; at least 1."""

    def alone(self) -> AbstractContextManager[None]:
        """Have the machine alone over several calls, all made by this thread; calls of other threads and stages wait meanwhile."""

    def close(self) -> None:
        """End everything that is still running."""
