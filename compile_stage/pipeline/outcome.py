"""How a run ends: its status, exit code and problem; and the one place that writes its reports, whatever ends it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware, python_version
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_COMPILED,
    PolicyError,
    RegistryError,
    SourceError,
    StorageError,
)
from compile_stage.core.ports import Confinement
from compile_stage.core.records import (
    Data,
    DataSpec,
    JsonMap,
    Plan,
    Policy,
    PolicyValue,
    RunOutcome,
    RunResult,
    RunStatus,
    SourceModel,
    TargetResult,
)
from compile_stage.core.storage import demand_writable, explained, storage_error
from compile_stage.report.files import FILES, remove

if TYPE_CHECKING:
    from compile_stage.serving.trust import Trust
    from compile_stage.signing.signers import Signer

_UNFINISHED = (
    "this report was written during publication, before anything was promoted; where it was not replaced, the run was "
    "stopped before its end: run it again to finish it"
)

WriteReports = Callable[[RunResult, Path | None], Mapping[str, Path]]
"""Writes the reports of a result into a folder, and says where they are: file name → path. Without a folder it only
hears the result."""


@dataclass(frozen=True)
class RunOptions:
    """What the caller wants done with the winners.

    Attributes:
        out: Folder of reports and bundles, absolute; None for one that is named after the source.
        publish: Push the winners to the registry.
        promote: Move their aliases too.
        signer: Signs what is packaged; None where nothing is signed.
        trust: Whose signatures are trusted, by the options and the environment; the policy's keys come on top.
    """

    out: Path | None
    publish: bool = True
    promote: bool = True
    signer: Signer | None = None
    trust: Trust | None = None

    @property
    def signed_by(self) -> str:
        """The signer's key, or its name; empty where nothing is signed."""
        return (self.signer.signed_by.keyid or self.signer.signed_by.name) if self.signer is not None else ""


class RunState:
    """What is known of a run so far. As a context it sees to the reports of a run that an exception ends.

    Attributes:
        folder: Where reports and bundles go; None until the source is known, where the caller names none.
        policy: None until it is loaded.
        policy_values: Each value of it with its origin.
        plan: None until the source is resolved and the policy expanded. Errors before that, and a source that is
            refused, end a run as `refused`, all others as `failed`.
        framework: Of the original, for people.
        notes: What people should know of the source.
        targets: What became of each target so far.
        confinement: Of its workers; None before any was started.
        outcome: How the run ends if nothing else happens.
        environment: Of the machine that measured; None where that is this one.
        written: What the reports say; None before any was written.
    """

    def __init__(self, uri: str, policy_path: str, options: RunOptions, write: WriteReports) -> None:
        self._uri, self._policy_path, self._write, self._started = uri, policy_path, write, time.monotonic()
        self.options, self.folder = options, options.out
        self.context: Context | None = None
        self.policy: Policy | None = None
        self.plan: Plan | None = None
        self.framework = ""
        self.notes: tuple[str, ...] = ()
        self.targets: tuple[TargetResult, ...] = ()
        self.outcome = RunOutcome()
        self.confinement: Confinement | None = None
        self.environment: JsonMap | None = None
        self.policy_values: tuple[PolicyValue, ...] = ()
        self._started_at, self._load_before = datetime.now(UTC), load_average()
        self.written: RunResult | None = None

    @property
    def trust(self) -> Trust | None:
        """Whose signatures are trusted: by the options, the environment and the policy."""
        from compile_stage.serving.trust import merged_trust

        keys = self.policy.compliance.trusted_keys if self.policy is not None else ()
        return merged_trust(keys, self.options.trust)

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception | KeyboardInterrupt):
            self.outcome = ended_by(error, "refused" if self.plan is None or self._is_refusal(error) else "failed")
            self.targets = self.targets if self.plan is not None else ()
            try:
                self.write_reports()
            except OSError as unwritten:  # a full disk, or this very folder, may be what ended it
                with suppress(OSError):
                    self._remove_reports()  # what was written before, such as for the registry, said how it stood then
                if isinstance(error, Exception) and (trouble := self._unreported(error, unwritten)) is not None:
                    raise trouble from error

    def _unreported(self, error: Exception, unwritten: OSError) -> StorageError | None:
        """The trouble with a disk that ended the run, with the folder that could not be written, and the versions that
        were published before: no report names them. None for any other end."""
        trouble = error if isinstance(error, StorageError) else storage_error(error)
        if trouble is None or storage_error(unwritten) is None:
            return None
        problem, fix = trouble.problem, trouble.fix
        held = [target.receipt for target in self.targets if target.receipt is not None]
        if held:
            versions = ", ".join(f"{one.uri} (now {one.promoted_to})" if one.promoted_to else one.uri for one in held)
            problem += f"; published before that, and in no report: {versions}"
            fix += "; the same command then writes the reports, and publishes nothing twice"
        return StorageError(problem, fix=fix, where=trouble.where or str(self.folder or ""))

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether the policy, the model or the registry does not allow it, and no job was tried."""
        jobs = {job.id for job in self.plan.jobs} if self.plan is not None else set()
        tried = self.context is not None and any(event.job_id in jobs for event in self.context.events.events)
        return isinstance(error, PolicyError | SourceError | RegistryError) and not tried

    def forget_reports(self) -> None:
        """Delete an earlier run's reports, where the caller named the folder: if this run is killed, none are better
        than those. Raises OSError where they can't be deleted."""
        if self._holds_results():
            with self.folder_lock():  # another run may be publishing them
                self._remove_reports()

    def begin(self, plan: Plan, folder: Path) -> None:
        """This is what will be done, and where its results go. What an earlier run left there of the plan's targets is
        deleted: only what this run proves shall be found.

        Raises:
            StorageError, OSError: The folder can't be written.
        """
        from compile_stage.steps.package import remove_bundles

        demand_writable(folder)
        self.folder = folder
        if self._holds_results():
            with self.folder_lock():
                self._remove_reports()
                remove_bundles(folder, plan.policy.targets)
        self.plan = plan

    def _holds_results(self) -> bool:
        folder = self.folder
        return folder is not None and any((folder / name).exists() for name in (*FILES, "bundles", "profiles"))

    def _remove_reports(self) -> None:
        if self.folder is not None:
            remove(self.folder)

    @contextmanager
    def folder_lock(self) -> Iterator[None]:
        """Keep other runs that name this folder from packaging and publishing meanwhile, or one would replace the
        bundle that another publishes."""
        from filelock import FileLock

        if self.folder is None:
            yield
            return
        with FileLock(self.folder / ".lock"):
            yield

    def write_reports(self) -> Mapping[str, Path]:
        """Write the reports of what is known so far."""
        self.written = self.result()
        return self._write(self.written, self.folder)

    def reports_when_asked(self) -> Mapping[str, Path]:
        """The reports of what is known when they are first asked for: a registry that holds the version asks for
        none, and they take a third of a second to write. They say that the run had not ended; those of its end replace
        them."""
        return _WhenAsked(self._write_unfinished)

    def _write_unfinished(self) -> Mapping[str, Path]:
        result = self.result()
        self.written = replace(result, notes=(*result.notes, _UNFINISHED))
        return self._write(self.written, self.folder)

    def result(self) -> RunResult:
        """Everything that is known so far, as one record."""
        context, targets, plan = self.context, self.targets, self.plan
        policy = self.policy or _no_policy(self._policy_path)
        notes = [*(plan.notes if plan else ()), *self.notes]
        for target in targets:
            portable = target.winner.portable if target.winner is not None else None
            notes += [*(portable.notes if portable is not None else ()), *target.notes]
        notes += context.cache.notes() if context else ()
        return RunResult(
            status=self.outcome.status,
            exit_code=self.outcome.exit_code,
            problem=self.outcome.problem,
            source=plan.source if plan else _unresolved(self._uri),
            policy=policy,
            environment=self.environment
            or {
                **_environment(context, self.confinement, plan.source.flavor if plan else ""),
                **_load(self._load_before),
            },
            started_at=self._started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            policy_values=self.policy_values,
            targets=targets,
            refused=(*(plan.refused if plan else ()), *(one for target in targets for one in target.refused)),
            baseline_framework=self.framework,
            baseline={t.policy.target.name: t.baseline for t in targets if t.baseline is not None},
            samples={role: samples for t in reversed(targets) for role, samples in t.samples.items()},
            duration_s=context.events.elapsed_s if context else time.monotonic() - self._started,
            events=context.events.events if context else (),
            notes=tuple(dict.fromkeys(notes)),
        )


class _WhenAsked(Mapping[str, Path]):
    """A mapping that is made when it is first looked at."""

    def __init__(self, make: Callable[[], Mapping[str, Path]]) -> None:
        self._made = cache(make)

    def __getitem__(self, name: str) -> Path:
        return self._made()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())


def outcome_of(targets: Sequence[TargetResult]) -> RunOutcome:
    """How the run stands before anything is published."""
    without_winner = [t for t in targets if t.selection.winner is None]
    required = [t for t in without_winner if t.policy.target.required]
    # Also where no target was required: a run that made nothing is not green.
    if not any(t.refused or any(c.artifact for c in t.candidates) for t in targets):
        what = "nothing could be compiled"
        if _none_was_tried(targets):
            what = "the budget ended before anything was tried; raise budget.minutes"
        problem = "\n".join([what, *map(_no_winner, without_winner)])
        return RunOutcome(status="failed", exit_code=EXIT_NOTHING_COMPILED, problem=problem)
    if required:
        return RunOutcome(status="failed", exit_code=EXIT_GATE, problem="\n".join(map(_no_winner, required)))
    # What was compiled for hardware that is not here is published, to be validated there: that is what the run is for.
    if len(without_winner) == len(targets) and not any(_waits_for_hardware(target) for target in targets):
        return RunOutcome(status="failed", exit_code=EXIT_GATE, problem="\n".join(map(_no_winner, without_winner)))
    return RunOutcome()


def _none_was_tried(targets: Sequence[TargetResult]) -> bool:
    failures = [candidate.failure for target in targets for candidate in target.candidates]
    return bool(failures) and all(f is not None and f.is_late for f in failures)


def ended_by(error: BaseException, status: RunStatus) -> RunOutcome:
    """The outcome of a run that an exception ends: with the exit code that the program will leave with."""
    if isinstance(error, KeyboardInterrupt):
        return RunOutcome(status=status, exit_code=EXIT_INTERRUPTED, problem="interrupted; run again to resume")
    known = explained(error)
    problem = "\n".join(known.problems) if isinstance(known, PolicyError) and known.problems else str(known)
    return RunOutcome(status=status, exit_code=known.exit_code, problem=problem)


def _no_winner(target: TargetResult) -> str:
    kind = "required target" if target.policy.target.required else "target"
    hint = (
        "; what was compiled can be validated on a machine with the target's hardware: compile-stage validate URI"
        if target.unvalidated
        else ""
    )
    return f"{kind} {target.policy.target.name!r} has no winner: {target.selection.reason}{hint}"


def _waits_for_hardware(target: TargetResult) -> bool:
    return any(c.not_runnable_here for c in target.candidates)


def _unresolved(uri: str) -> SourceModel:
    return SourceModel(uri=uri, name=uri, version="", flavor="", path="", digest="", registry="")


def _no_policy(path: str) -> Policy:
    none = DataSpec(source="")
    data = Data(validation=none, calibration=none)
    return Policy(name="", owner="", digest="", files=(path,), data=data, targets=())


def load_average() -> float | None:
    """How many processes ran or waited for a core in the last minute, on average; None where the system does not
    say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _load(before: float | None) -> JsonMap:
    after = load_average()
    return {"load": {"start": before, "end": after}} if before is not None and after is not None else {}


def _environment(context: Context | None, confinement: Confinement | None, flavor: str) -> JsonMap:
    machine = context.hardware if context else hardware()
    packages = ("compile-stage", "mlflow", "mlflow-skinny", "numpy", "onnx", "onnxruntime")
    return {
        "hardware": plain(machine),
        "hardware_fingerprint": machine.fingerprint,
        "python": python_version(),
        "packages": plugins.package_versions(*packages),
        **({"confinement": plain(confinement)} if confinement is not None else {}),
        **({"source_toolchain": home} if (home := plugins.source_toolchain(flavor)) else {}),
    }
