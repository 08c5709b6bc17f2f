"""Fleets, as the command line and programs call them: what one would run, running it, and proving anew what serves."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import digest_of
from compile_stage.core.ending import ending_signals
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import JsonMap, Policy
from compile_stage.fleet.document import fleet_document
from compile_stage.fleet.driving import Drive, Ended, Executor, Progress
from compile_stage.fleet.journal import JobRow, Journal, PlannedJob
from compile_stage.fleet.local import LocalExecutor
from compile_stage.fleet.outcomes import JobOutcome, outcome_of_run
from compile_stage.fleet.regressions import note_regressions
from compile_stage.fleet.requalification import due, outcome_of_validation
from compile_stage.fleet.scheduler import Lease, Scheduler
from compile_stage.fleet.selection import Skipped, read_policies, select, split_pattern
from compile_stage.policy.folder import PolicyFile

PathLike = str | os.PathLike[str]
STATE = Path("compile-stage-fleet")
_REGISTRY = "mlflow"
_COMMAND = (sys.executable, "-m", "compile_stage")


@dataclass(frozen=True)
class Settings:
    """How a fleet is run.

    Attributes:
        state: Folder of the journal, the jobs' logs and results, and the reports.
        engine: `local` or `ray`.
        jobs: So many at once; None: one on this machine, one for every two cores of a cluster.
        budget_minutes: No job begins once jobs have taken so many minutes in all; None: no limit.
        publish, promote: As of `run`.
        fresh: Leave an unfinished fleet of the same kind behind, and begin anew.
        address: Of the Ray cluster; empty for the one that Ray finds on this machine.
    """

    state: Path = STATE
    engine: str = "local"
    jobs: int | None = None
    budget_minutes: float | None = None
    publish: bool = True
    promote: bool = True
    fresh: bool = False
    address: str = ""

    def attempt(self, lease: Lease) -> Path:
        """The folder of one attempt at a job: its log, how it ended, and what it left."""
        return self.state.absolute() / "jobs" / str(lease.job) / str(lease.attempt)


def fleet_plan(pattern: str, policies: PathLike) -> JsonMap:
    """What `fleet_run` would run: the versions, by policy, target and owner. No model is opened.

    Args:
        pattern: Glob over registered names, `@`, glob over aliases; without an alias the newest version of each.
        policies: A folder of policies, or one policy.

    Returns:
        `jobs` (each with uri, policy, owner and targets), `counts` (jobs, models, targets, and what is left out), and
        `policies` and `owners` with their number of jobs.

    Raises:
        UsageError: The pattern is none, no policy is there, two would move the same alias, or no model is to be run.
        PolicyError: A policy is broken.
        RegistryError: The registry can't be searched.
    """
    with temporary_folder("fleet") as folder, _journal(Path(folder)) as journal:
        fleet, skipped = journal.begin("plan", "", {}), Skipped()
        journal.plan(
            fleet, select(plugins.load("registries", _REGISTRY), pattern, read_policies(Path(policies)), skipped)
        )
        rows = list(
            journal.select(
                "SELECT uri, name, policy, owner, targets, location FROM jobs WHERE fleet=? ORDER BY id", fleet
            )
        )
    if not rows:
        raise _nothing_to_run(pattern, policies, skipped)
    jobs = [
        {"uri": uri, "policy": policy, "owner": owner, "targets": [name for name, _ in json.loads(targets)]}
        for uri, _, policy, owner, targets, _ in rows
    ]
    return {
        "pattern": pattern,
        "jobs": jobs,
        "counts": {
            "jobs": len(jobs),
            "models": len({name for _, name, *_ in rows}),
            "targets": sum(len(job["targets"]) for job in jobs),
            "same_location": len(rows) - len({(row[5] or row[0], row[2]) for row in rows}),
            "without_policy": skipped.without_policy,
            "published_by_us": skipped.published,
        },
        "policies": _tally(job["policy"] for job in jobs),
        "owners": _tally(job["owner"] for job in jobs),
    }


def fleet_run(
    pattern: str,
    policies: PathLike,
    settings: Settings | None = None,
    say: Callable[[Progress], object] = lambda _: None,
) -> JsonMap:
    """Take every model that the policies are meant for through the stage.

    A fleet of the same pattern and policies that has not ended is taken up where it was. What one model does ends no
    other. The reports are `fleet.json`, `fleet.html` and `fleet.junit.xml` in `STATE/N`.

    Args:
        pattern, policies: As for `fleet_plan`.
        say: Hears of each job that ends.

    Returns:
        The content of `fleet.json`; its `exit_code` is the command line's. Ctrl-C and SIGTERM end it in order, with
        the exit code 130.

    Raises:
        UsageError: As `fleet_plan`; nothing matches; or another process works on that state folder.
        PolicyError, RegistryError: As `fleet_plan`. Registry trouble of a single model is that job's end.
    """
    settings = settings or Settings()
    split_pattern(pattern)
    held = read_policies(Path(policies))
    registry, skipped = plugins.load("registries", _REGISTRY), Skipped()
    given = {
        "pattern": pattern,
        "policies": os.fspath(policies),
        "publish": settings.publish,
        "promote": settings.publish and settings.promote,
    }
    digests = sorted((file.policy.name, file.policy.digest) for file in held if file.policy is not None)
    spec = digest_of({**given, "policies": digests})
    work = _Runs(settings, held)
    with _opened(settings) as journal:
        fleet = _begin(journal, "run", spec, given, settings)
        # Of one that goes on too: since it was interrupted, aliases may have moved.
        _plan(journal, fleet, select(registry, pattern, held, skipped), settings)
        journal.note_skipped(fleet, skipped.published + skipped.without_policy)
        if not journal.count(fleet):
            journal.abandon(fleet)
            raise _nothing_to_run(pattern, policies, skipped)
        return _drive(journal, fleet, settings, work, say)


def _nothing_to_run(pattern: str, policies: PathLike, skipped: Skipped) -> UsageError:
    everything = f"look at all of them: compile-stage fleet plan '*' -p {shlex.quote(os.fspath(policies))}; "
    return UsageError(
        f"no registered model matches {pattern!r} and a policy ({skipped.without_policy} without a policy, "
        f"{skipped.published} published by compile-stage)",
        fix=f"{'' if pattern == '*' else everything}check the alias, applies_to and MLFLOW_TRACKING_URI",
    )


def fleet_requalify(
    pattern: str = "*",
    aliases: Iterable[str] = (),
    settings: Settings | None = None,
    say: Callable[[Progress], object] = lambda _: None,
    *,
    policies: PathLike | None = None,
) -> JsonMap:
    """Validate anew, on this machine, the published versions that aliases point to and that were validated with another
    runtime, driver or machine than this: the one with the least room to its limits first. No alias is moved.

    Args:
        pattern: Glob over the names of published models.
        aliases: Globs; a version that such an alias points to is looked at.
        settings, say: As for `fleet_run`; `publish` and `promote` have no say.
        policies: A folder of policies, or one policy: the aliases that they promote to, beside `aliases`. Without
            either, all aliases.

    Returns:
        As `fleet_run`. A version that nothing has changed for is no job of the fleet; `counts.skipped` says how many.

    Raises:
        PolicyError, RegistryError: As `fleet_run`.
        UsageError: As `fleet_run`; nothing has a name and an alias that `pattern` and `aliases` mean, where either is
            given; or none of the policies promotes to an alias.
    """
    settings = settings or Settings()
    globs = set(aliases)
    named = set(globs)
    if policies is not None:
        held = [file.policy for file in read_policies(Path(policies)) if file.policy is not None]
        named |= {target.alias for policy in held for target in policy.targets if target.alias}
        if not named:
            raise UsageError("none of the policies promotes to an alias", where=str(policies), fix="name one: --alias")
    given = {"pattern": pattern, "aliases": sorted(named or {"*"})}
    registry, skipped = plugins.load("registries", _REGISTRY), Skipped()
    with _opened(settings) as journal:
        fleet = _begin(journal, "requalify", digest_of(given), given, settings)
        is_new = not journal.is_planned(fleet)
        # Since it was interrupted an alias may have moved, or this machine may have changed.
        _plan(journal, fleet, due(registry, pattern, given["aliases"], skipped), settings, passed_too=True)
        if is_new:
            journal.note_skipped(fleet, skipped.published)
            if (pattern != "*" or globs) and not (journal.count(fleet) or skipped.published):
                journal.abandon(fleet)
                among = ", ".join(given["aliases"])
                raise UsageError(
                    f"no published version matches {pattern!r} and has an alias that matches {among}",
                    fix="check the name, --alias and MLFLOW_TRACKING_URI",
                )
        return _drive(journal, fleet, settings, _Validations(settings), say)


def _plan(
    journal: Journal, fleet: int, jobs: Iterable[PlannedJob], settings: Settings, *, passed_too: bool = False
) -> None:
    """As `Journal.plan`, or, of a fleet that goes on, as `Journal.plan_again`. Removed is what attempts at a job left
    that is taken out: its number is given anew."""
    if not journal.count(fleet):
        journal.plan(fleet, jobs)
        return
    for job in journal.plan_again(fleet, jobs, passed_too=passed_too):
        shutil.rmtree(settings.state / "jobs" / str(job), ignore_errors=True)


class _Runs:
    """Jobs that are runs of the stage.

    Args:
        policies: Those of the fleet.
    """

    def __init__(self, settings: Settings, policies: Iterable[PolicyFile] = ()) -> None:
        self._settings = settings
        valid = [file.policy for file in policies if file.policy is not None]
        self._hardware = {policy.digest: _common_hardware(policy) for policy in valid}
        self._several = {
            policy.digest: (policy.name, kinds) for policy in valid if len(kinds := _kinds_of_hardware(policy)) > 1
        }
        # Of these, two versions with the same files are not equal work: each is validated on its own run's samples.
        self._of_the_run = {policy.digest for policy in valid if _takes_samples_of_the_run(policy)}

    def content(self, row: JobRow) -> str:
        """What a job computes: the model's files as the registry gives them out now, the policy, and the run that the
        model came from, where the policy takes samples of it."""
        try:
            source = plugins.registry_for(row.planned.uri).resolve(row.planned.uri, cache_root() / "sources")
        except CompileStageError:  # the run says why
            return digest_of([row.planned.uri, row.planned.policy_digest])
        run = [source.run_id or row.planned.uri] if row.planned.policy_digest in self._of_the_run else []
        return digest_of([source.identity, row.planned.policy_digest, *run])

    def hardware(self, row: JobRow) -> Mapping[str, str]:
        """What the policy's targets name, where they agree."""
        return self._hardware.get(row.planned.policy_digest, {})

    def several(self, digest: str) -> tuple[str, Sequence[Mapping[str, str]]]:
        """Of a policy whose targets name several kinds of `hardware`: its name, and these; else none."""
        return self._several.get(digest, ("", ()))

    def command(self, row: JobRow, out: Path) -> list[str]:
        """What runs it."""
        options = ["--out", str(out), "-q"]
        if not self._settings.publish:
            options.append("--no-publish")
        elif not self._settings.promote:
            options.append("--no-promote")
        return [*_COMMAND, "run", row.planned.uri, "-p", row.planned.policy_path, *options]

    def outcome(self, row: JobRow, ended: Ended) -> JobOutcome:
        """By its result.json."""
        folder, code = self._settings.attempt(ended.lease) / "result", ended.exit_code or 0
        found = outcome_of_run(folder / "result.json", row.planned.targets, code, ended.problem, ended.seconds)
        if found.passed and self._settings.publish:
            # The registry has them; of thousands of models they would fill the disk.
            shutil.rmtree(folder / "bundles", ignore_errors=True)
        return found


def _common_hardware(policy: Policy) -> Mapping[str, str]:
    """The `hardware` that the targets name together; empty where no one node can be that."""
    return _together(_kinds_of_hardware(policy))


def _together(kinds: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """One `hardware` of several; empty where they ask for different values of one key."""
    joined: dict[str, str] = {}
    for kind in kinds:
        if any(joined.setdefault(key, value) != value for key, value in kind.items()):
            return {}
    return joined


def _kinds_of_hardware(policy: Policy) -> Sequence[Mapping[str, str]]:
    """What its targets name, each once."""
    named = (tuple(sorted(dict(one.target.hardware).items())) for one in policy.targets if one.target.hardware)
    return [dict(kind) for kind in dict.fromkeys(named)]


def _takes_samples_of_the_run(policy: Policy) -> bool:
    return any(spec.source.startswith("mlflow-dataset:") for spec in (policy.data.validation, policy.data.calibration))


class _Validations(_Runs):
    """Jobs that validate a published version anew."""

    def content(self, row: JobRow) -> str:
        return row.planned.uri  # each is a version of its own

    def hardware(self, row: JobRow) -> Mapping[str, str]:
        return {}  # of this machine, whatever they are for

    def command(self, row: JobRow, out: Path) -> list[str]:
        return [*_COMMAND, "validate", row.planned.uri]

    def outcome(self, row: JobRow, ended: Ended) -> JobOutcome:
        return outcome_of_validation(row.planned.targets, ended, self._settings.attempt(ended.lease))


def _drive(journal: Journal, fleet: int, settings: Settings, work: _Runs, say: Callable[[Progress], object]) -> JsonMap:
    from compile_stage.report import fleet_page

    budget_s = None if settings.budget_minutes is None else settings.budget_minutes * 60
    with ExitStack() as stack:
        digests = journal.select("SELECT DISTINCT policy_digest FROM jobs WHERE fleet=?", fleet)
        executor = _executor(settings, work, stack, [digest for (digest,) in digests])
        drive = Drive(journal, fleet, Scheduler(budget_s=budget_s), executor, work)
        drive.say = say
        with _stopping(drive.stop):
            drive.run()
    interrupted = drive.stop.is_set() and bool(journal.count(fleet) - journal.count(fleet, "done"))
    if not interrupted:
        note_regressions(journal, fleet, plugins.load("registries", _REGISTRY))
        if journal.count(fleet) == journal.count(fleet, "done"):
            journal.finish(fleet)
    document = fleet_document(journal, fleet, interrupted=interrupted)
    fleet_page.write(document, settings.state / str(fleet))
    return document


def _executor(settings: Settings, work: _Runs, stack: ExitStack, policies: Sequence[str]) -> Executor:
    """What runs jobs of the policies with these digests."""
    if settings.engine == "local":
        return LocalExecutor(settings.jobs or 1, settings.attempt, work)
    if settings.engine == "ray":
        from compile_stage.fleet.on_ray import RayExecutor

        executor = RayExecutor(
            settings.jobs, settings.attempt, work, settings.address, like_here=isinstance(work, _Validations)
        )
        stack.callback(executor.close)
        for digest in policies:
            name, kinds = work.several(digest)
            together = _together(kinds)
            if not (together and executor.has(together)):
                _refuse_some(name, [kind for kind in kinds if executor.has(kind)])
        return executor
    raise UsageError(f"no engine of fleets is called {settings.engine!r}", fix="--engine local or --engine ray")


def _refuse_some(policy: str, here: Sequence[Mapping[str, str]]) -> None:
    """Raise UsageError where the cluster has hardware that targets of a policy name, and no node has that of all: a job
    runs on one node, and what is for another would be published as compiled and not validated."""
    if here:
        has = ", ".join("{" + ", ".join(f"{key}: {value}" for key, value in kind.items()) + "}" for kind in here)
        raise UsageError(
            f"the targets of the policy {policy!r} are for different hardware, of which the cluster has {has}; a job "
            "of a fleet runs on one node, and could not prove the others",
            fix="write a policy for each kind of hardware, or have each model's targets placed one by one: "
            "compile-stage run MODEL -p POLICY --engine ray",
        )


def _begin(journal: Journal, kind: str, spec: str, given: dict[str, Any], settings: Settings) -> int:
    unfinished = journal.unfinished(kind, spec)
    if unfinished is not None and not settings.fresh:
        return unfinished
    if unfinished is not None:
        journal.abandon(unfinished)
    return journal.begin(kind, spec, given)


@contextmanager
def _opened(settings: Settings) -> Iterator[Journal]:
    """The journal of a state folder, for this process alone."""
    from filelock import FileLock, Timeout

    settings.state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(settings.state / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            "another process works on this fleet", where=str(settings.state), fix="wait for it, or name another --state"
        ) from None
    try:
        with _journal(settings.state) as journal:
            yield journal
    finally:
        lock.release()


@contextmanager
def _journal(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder)
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP set the event; what is begun is interrupted in order. Elsewhere than in the main
    thread, they are somebody else's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ending_signals()}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tally(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
