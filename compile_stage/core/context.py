"""What every step is given, and what is done before and after each of them, here once so that no step forgets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from compile_stage.core import plugins, remote_plugins
from compile_stage.core.cache import Cache, Cached
from compile_stage.core.digest import digest_file, digest_of
from compile_stage.core.environment import Hardware, python_version
from compile_stage.core.errors import CompileStageError
from compile_stage.core.events import EventLog
from compile_stage.core.ports import Confinement, Engine, MeteredCall, Worker, WorkerLimits, WorkerMemory
from compile_stage.core.records import Data, DataSpec, Failure, Job, PortableModel, SampleSet, SourceModel
from compile_stage.core.storage import removed


@dataclass(frozen=True)
class Context:
    """The run that a step belongs to.

    Attributes:
        scratch: A folder that ends with the run.
        today: The day by which waivers are judged.
        remeasure: What the cache holds of measurements is measured anew.
        files: What the policy names by a path and lies elsewhere on this machine: that path → where it is here.
        failed: Jobs that failed elsewhere, and would in another attempt too, by id.
    """

    cache: Cache
    engine: Engine
    events: EventLog
    hardware: Hardware
    scratch: Path
    today: date
    remeasure: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Failure] = field(default_factory=dict)

    def with_own_cache(self, name: str = "cache") -> Context:
        """The same with a cache of its own in its scratch folder: no result of another run is believed."""
        return replace(self, cache=Cache(self.scratch / name))

    def placed(self, data: Data) -> Data:
        """The policy's samples where they are on this machine."""
        return replace(
            data, validation=self.placed_spec(data.validation), calibration=self.placed_spec(data.calibration)
        )

    def placed_spec(self, spec: DataSpec) -> DataSpec:
        """One of them."""
        kind, _, path = spec.source.partition(":")
        here = self.files.get(path) if kind == "file" else None
        return replace(spec, source=f"file:{here}") if here is not None else spec

    def cached(
        self, step: str, job_id: str, key: Mapping[str, Any], make: Callable[[Path], Any], *, anew: bool = False
    ) -> Cached:
        """The step's result, from the cache or made by `make(folder)`, with its event.

        Args:
            step: `name/version`; raise the version when the step's meaning changes.
            key: What the result depends on beside our own code and Python's version, which are always part of it.
            anew: Make it, and replace what the cache has.
        """
        with self.events.step(step.partition("/")[0], job_id) as mark:
            with self.naming_what_is_gone():
                value = self.cache.fetch(step, cache_key(key), make, anew=anew)
            mark.cached = value.hit
            return value

    @contextmanager
    def naming_what_is_gone(self) -> Iterator[None]:
        """An error in it is one that names the folder, where somebody removed what this run uses: a worker reports only
        that a file is missing, and every candidate would seem to fail on its own."""
        try:
            yield
        except Exception as error:
            if (gone := self._removed()) is not None:
                raise removed(gone) from error
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the machine alone, as `Engine.exclusive` says, for a measurement: the workers in which plug-ins answer
        the stage's questions have ended too."""
        with self.engine.exclusive(), remote_plugins.ended():
            yield

    def confinement(self) -> Confinement:
        """What keeps this run's workers from the rest of the machine; nothing that is known of an engine that does not
        say."""
        describe = getattr(self.engine, "confinement", None)
        return describe() if describe is not None else Confinement()

    def confinement_beside(self) -> None:
        """Have `confinement` found out while this thread does something else: it starts a process, for 0.08 s."""

        def ask() -> None:
            with suppress(CompileStageError, OSError):  # whoever needs it asks again, and sees why
                self.confinement()

        threading.Thread(target=ask, name="confinement", daemon=True).start()

    def free_memory_bytes(self) -> int | None:
        """What new workers can have; None of an engine that does not say."""
        known = getattr(self.engine, "free_memory_bytes", None)
        return known() if known is not None else None

    def _removed(self) -> Path | None:
        """What this run uses and somebody removed."""
        return self.cache.removed() if self.scratch.exists() else self.scratch

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[Worker]:
        """A worker that starts at its first call, so that a run which finds everything in the cache starts none."""
        with ExitStack() as stack:
            yield _LazyWorker(lambda: stack.enter_context(self.engine.worker(name, limits)))

    @contextmanager
    def source_worker(self, source: SourceModel, limits: WorkerLimits) -> Iterator[Worker]:
        """The worker that holds the original, which runs in the source's toolchain where it has one. What needs no
        framework, such as its samples, is made in this environment all the same; and what needs nothing of the source,
        in a process that has imported no third party's."""
        interpreter = plugins.interpreter_of_source(source.flavor)
        with ExitStack() as stack:
            here = there = apart = stack.enter_context(self.worker("source", limits))
            if interpreter:
                there = stack.enter_context(self.worker("source--toolchain", replace(limits, interpreter=interpreter)))
            if plugins.third_party("sources", source.flavor):
                apart = stack.enter_context(self.worker("samples", limits))
            yield here if here is there and here is apart else _SourceWorker(here, there, apart)

    def compile_in(
        self, worker: Worker, job: Job, model: PortableModel, calibration: SampleSet | None, into: Path
    ) -> tuple[Any, float]:
        """Have the job's backend compile the model, into the folder. A compiler that times kernels has the machine
        alone meanwhile.

        Returns:
            What it says of the artifact, as plain JSON, and how many seconds it took, without the wait for the machine.
        """
        capabilities = plugins.load("backends", job.backend).capabilities_for(job.target)
        with self.alone() if capabilities.times_kernels else nullcontext():
            began = time.monotonic()
            # Which limits it will be judged by is no matter of the backend's.
            asked = replace(job, gates=())
            answer = worker.call("compile_model", job=asked, model=model, calibration=calibration, into=str(into))
            return answer, time.monotonic() - began


# What is done with the framework of the original, or with the model that it has open. All else that is asked of its
# worker, such as its samples or a part of its graph, needs what is in this environment.
_OF_THE_ORIGINAL = frozenset((
    "export", "export_for", "open_source", "close_model", "predict", "predict_corners", "make_calls",
    "find_refused_missing", "find_taken_values", "predict_batch", "soak", "profile_source",
    "warm_up", "quick_turn", "prepare_turn", "call_untimed", "time_turn", "first_tokens", "end_turn", "write_tokens",
    "open_predict", "time_predict", "close_predict",
))  # fmt: skip


class _SourceWorker:
    """Workers as one: of the framework of the original, which may be in a toolchain, of this environment, and of what
    is done without the source, such as reading samples that are the network's inputs as they are."""

    def __init__(self, here: Worker, there: Worker, apart: Worker) -> None:
        self._here, self._there, self._apart = here, there, apart

    def call(self, function: str, /, **arguments: Any) -> Any:
        if "source" in arguments and arguments["source"] is None:
            return self._apart.call(function, **arguments)
        return self._worker(function).call(function, **arguments)

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        return self._worker(function).metered(function, **arguments)

    def memory(self) -> WorkerMemory:
        return self._there.memory()

    def _worker(self, function: str) -> Worker:
        return self._there if function in _OF_THE_ORIGINAL else self._here


class _LazyWorker:
    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def call(self, function: str, /, **arguments: Any) -> Any:
        return self._started().call(function, **arguments)

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        return self._started().metered(function, **arguments)

    def memory(self) -> WorkerMemory:
        return self._started().memory()

    def _started(self) -> Worker:
        with self._lock:
            if self._worker is None:
                self._worker = self._start()
            return self._worker


def cache_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key of a step's result, as it is stored."""
    return {**key, "code": code_digest(), "python": python_version()}


def made_by(job: Job, flavor: str) -> dict[str, Any]:
    """Everything that has a say in the bytes of a job's artifact beside its inputs and the machine.

    Args:
        flavor: Of the source.
    """
    lowering = {} if job.scheme.native else plugins.cache_identity("lowerings", job.scheme.precision)
    return {
        "source": dict(plugins.cache_identity("sources", flavor)),
        "lowering": dict(lowering),
        "backend": dict(plugins.cache_identity("backends", job.backend)),
        "packages": plugins.package_versions("compile-stage", "onnx", "numpy"),
        "code": code_digest(),
    }


@cache
def code_digest() -> str:
    """Of our own source files: an edit of ours must not find results of the code before it."""
    package = Path(__file__).parents[1]
    return digest_of({p.relative_to(package).as_posix(): digest_file(p) for p in sorted(package.rglob("*.py"))})
