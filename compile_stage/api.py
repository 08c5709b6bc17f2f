"""All that the command line and `pipelines/` may call: plan, run, verify, promote, rollback, toolchains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core import plugins
from compile_stage.core.cache import Cache, cache_root
from compile_stage.core.context import Context
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.events import EventLog, Reporter
from compile_stage.core.records import Plan, Policy, Receipt, RunResult, SourceModel, Verification
from compile_stage.core.shipped import policy_file
from compile_stage.core.storage import demand_writable, storage_trouble
from compile_stage.policy.load import load_policy

if TYPE_CHECKING:
    from compile_stage.core.toolchains import Toolchain
    from compile_stage.engine.toolchains import State
    from compile_stage.graph_debug.diagnosis import Diagnosis
    from compile_stage.installation import DoctorReport
    from compile_stage.report.compare import Comparison
    from compile_stage.report.notebook import NotebookResult


def plan(
    model_uri: str, policy_path: str | os.PathLike[str], *, targets: Sequence[str] = (), sets: Sequence[str] = ()
) -> Plan:
    """What `run` would do: the jobs, what is refused and why, what the cache already holds.

    Downloads the model, opens it and reads its samples; compiles nothing. The plan's `exit_code` is how a run would end
    as far as that is known.

    Raises:
        PolicyError: The policy is wrong, is not meant for this model, or names samples that can't be read or do not fit
            it.
        SourceError: The model is refused.
        RegistryError: The registry can't be reached or does not hold the model.
    """
    from compile_stage.pipeline.cache_status import cache_status
    from compile_stage.pipeline.preflight import preflight
    from compile_stage.pipeline.run import make_plan

    policy = load_policy(policy_file(policy_path), sets=sets, targets=targets)
    with _context(None, "local") as context:
        expanded = preflight(context, make_plan(context, policy, model_uri))
        return replace(expanded, held=cache_status(context, expanded))


def run(
    model_uri: str,
    policy_path: str | os.PathLike[str],
    *,
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    publish: bool = True,
    promote: bool = True,
    engine: str = "local",
    remeasure: bool = False,
    reporter: Reporter | None = None,
    on_result: Callable[[RunResult], object] = lambda _: None,
) -> NotebookResult:
    """Take a model through a policy: compile, prove, measure, publish, promote.

    Args:
        model_uri: `models:/name/version`, `models:/name@alias`, `models:/m-...`, `runs:/...` or `folder:/...`.
        targets: Glob patterns over the policy's target names; empty for all.
        sets: `path.to.key=value`, laid over the policy.
        out: Folder for result.json, the reports and the bundles; by default `compile-stage-out/NAME-VERSION/POLICY`.
        publish: Push the winners to the registry.
        promote: Move their aliases too; nothing is promoted that is not published.
        remeasure: Measure again what the cache holds measurements of, as after a run on a busy machine.
        reporter: Hears what happens, from several threads.
        on_result: Hears the result whenever the files of it are written; the last time before an exception too, and
            then the result says what ended it.

    Returns:
        The result; its `exit_code` is the command line's; a notebook shows it as the report, and `to_pandas()` gives
        its candidates. A missed gate or a failed job is a result, not an exception.

    Raises:
        PolicyError: The policy is wrong, or is not meant for this model.
        RegistryError: The registry can't be reached, or refuses.
        StorageError: A disk is full, or `out` or the cache can't be written. Nothing is published half.
    """
    from compile_stage import report
    from compile_stage.pipeline.outcome import RunInProgress, RunOptions
    from compile_stage.pipeline.run import make_plan
    from compile_stage.pipeline.run import run as run_plan
    from compile_stage.report.notebook import NotebookResult

    def write_reports(result: RunResult, folder: Path | None) -> Mapping[str, Path]:
        on_result(result)
        return report.write(result, folder) if folder is not None else {}

    options = RunOptions(out=Path(out).absolute() if out is not None else None, publish=publish, promote=promote)
    with RunInProgress(model_uri, os.fspath(policy_path), options, write_reports) as progress:
        progress.policy = load_policy(policy_file(policy_path), sets=sets, targets=targets)
        with _context(reporter, engine, remeasure=remeasure) as context:
            progress.context = context
            expanded = make_plan(context, progress.policy, model_uri)
            context.events.planned(expanded)
            folder = options.out or default_out(expanded.source, progress.policy).absolute()
            demand_writable(folder)
            progress.plan, progress.folder = expanded, folder
            run_plan(progress, context, expanded)
    return NotebookResult.of(progress.written or progress.result())


def lint(*policies: str | os.PathLike[str]) -> list[str]:
    """Every mistake in these policy files, as `file:line:column: path: what is wrong; what is allowed`; empty when they
    are valid.

    Args:
        policies: Files, or `shipped:NAME`.
    """
    from compile_stage.policy.load import lint as lint_files

    return lint_files([policy_file(policy) for policy in policies])


def compare(a: RunResult | str | os.PathLike[str], b: RunResult | str | os.PathLike[str]) -> Comparison:
    """What changed from one run to another: the status, and for each target the winner, verdicts, and speeds that
    differ by more than their noise.

    Speeds over the original are compared by their 95 % intervals, and only where both were measured on the same
    hardware and neither is unstable; what can't be compared is a note.

    Args:
        a, b: Results of `run`, or paths of `result.json` or of the folders that hold one.

    Raises:
        UsageError: A file can't be read, or is no result.json.
    """
    from compile_stage.report.compare import compare as compare_results

    return compare_results(a, b)


def default_out(source: SourceModel, policy: Policy) -> Path:
    """`compile-stage-out/NAME-VERSION/POLICY` below the current folder: two policies on one model don't overwrite each
    other's results."""
    return Path("compile-stage-out") / _model_folder(source) / (policy.name or "no-policy")


def _model_folder(source: SourceModel) -> str:
    return f"{source.name}-{source.version}" if source.version else source.name


def verify(uri_or_bundle: str, *, revalidate: bool = True, allow_pickle: bool = False) -> Verification:
    """Is a published version, or a bundle on disk, what its manifest says, and does it still pass?

    Args:
        uri_or_bundle: A registry URI, or the folder of a bundle.
        revalidate: Run the validation again too, against the pinned source; without it only the files are checked.
        allow_pickle: The source may be a pickle, which runs code of its own. What is verified has no say in this.

    Raises:
        IntegrityError: A file, or the source, is not what was published.
        SourceError: The source is refused; a pickle is, unless allowed.
        RegistryError: The version, or its source, can't be had.
    """
    from compile_stage.revalidation import validate_again
    from compile_stage.serving.manifest import check_integrity

    with _context(None, "local") as context:
        folder = _published(uri_or_bundle, context.scratch / "published")
        manifest = check_integrity(folder, beside=True)
        notes = ["every file has the digest that the manifest gives it"]
        fingerprint = manifest["fingerprint"]
        if manifest["verdict"] is None:
            notes.append(f"it was compiled on {fingerprint} for other hardware, and not validated there")
        elif fingerprint != context.hardware.fingerprint:
            notes.append(f"it was proven on {fingerprint}; this machine is {context.hardware.fingerprint}")
        if not revalidate:
            return Verification(uri=uri_or_bundle, passed=True, checks=(), notes=tuple(notes))
        verdict, more_notes = validate_again(context, manifest, folder, allow_pickle=allow_pickle)
        return Verification(
            uri=uri_or_bundle, passed=verdict.passed, checks=verdict.checks, notes=(*notes, *more_notes)
        )


def validate(uri: str, *, allow_pickle: bool = False, reporter: Reporter | None = None) -> Verification:
    """Prove and measure a published version on this machine, by the gates of its policy, and attach what was found to
    the version.

    That is how a version that was compiled for hardware that was not there comes to be promoted, and how one that was
    proven elsewhere comes to load here without a complaint about the hardware.

    Args:
        uri: A registry URI.
        allow_pickle: The source may be a pickle, which runs code of its own. The version has no say in this.

    Raises:
        UsageError: This is not hardware that the version is for.
        IntegrityError: A file, or the source, is not what was published.
        SourceError: The source is refused, or its samples can't be had here.
        RegistryError: The registry can't be reached, or refuses.
    """
    from compile_stage.revalidation import validate_here
    from compile_stage.serving.manifest import check_integrity, write_validation

    registry = plugins.registry_for(uri)
    receipt = registry.published(uri)
    with _context(reporter, "local") as context:
        folder = registry.fetch(receipt.uri, context.scratch / "published")
        manifest = check_integrity(folder, beside=True)
        proven = validate_here(context, manifest, folder, allow_pickle=allow_pickle)
        file = write_validation(proven.document, context.scratch / "validation")
        word, fingerprint = "passed" if proven.passed else "failed", context.hardware.fingerprint
        registry.attest(receipt, file, {f"validated.{fingerprint}": f"{word} on {proven.document['at']}"})
        attached = f"attached to {receipt.uri} as the validation of {fingerprint}: {word}"
        return Verification(
            uri=uri, passed=proven.passed, checks=proven.verdict.checks, notes=(*proven.notes, attached)
        )


def promote(uri: str, alias: str) -> Receipt:
    """Move an alias to a published version by hand.

    Its files must be what was published and its verdict must have passed, or, where it was only compiled, a validation
    that was attached to it; a waiver that it passed under must still hold. It is not compared with what the alias
    points to now: that is what promotion within `run` does, and doing without it is the decision of whoever calls this.

    Raises:
        GateError: Its verdict did not pass, or passed under a waiver that has ended.
        IntegrityError: It is not one of ours, or a file of it was changed.
        RegistryError: The registry can't be reached, or refuses.
    """
    from compile_stage.serving.manifest import check_integrity
    from compile_stage.steps.promote import demand_passed

    registry = plugins.registry_for(uri)
    receipt = registry.published(uri)
    with _context(None, "local") as context:
        folder = registry.fetch(receipt.uri, context.scratch / "published")
        manifest = check_integrity(folder, beside=True)
        demand_passed(manifest, folder, context.today, uri)
    return registry.promote(receipt, alias)


def rollback(uri: str, alias: str | None = None) -> Receipt:
    """Move an alias back to the version that it pointed to before.

    Args:
        uri: `models:/NAME@ALIAS`, or with `alias` `models:/NAME` or `folder:/PATH/NAME`. A bare `NAME` is one of
            MLflow.

    Raises:
        UsageError: No alias is named, or two are, or the URI names a version.
        RegistryError: There is no such alias, or nothing came before.
    """
    uri = uri if ":" in uri else f"models:/{uri}"
    place, _, named = uri.rpartition("@")
    if not place or "/" in named:  # an @ in a folder's name
        place, named = uri, ""
    if (alias and named and alias != named) or not (alias or named):
        raise UsageError(
            f"it is not clear which alias is meant: {named!r} or {alias!r}" if named else "no alias is named",
            fix=f"name one: compile-stage rollback {place}@ALIAS",
            where=uri,
        )
    alias = alias or named
    name = place.removeprefix("models:/")
    if place.startswith("models:/") and "/" in name:
        raise UsageError(
            "a rollback moves an alias, not a version",
            fix=f"compile-stage rollback models:/{name.partition('/')[0]}@{alias}",
            where=uri,
        )
    return plugins.registry_for(place if place.startswith("folder:") else f"{place}@{alias}").rollback(name, alias)


def debug(
    subject: str,
    candidate: str | None = None,
    *,
    policy_path: str | os.PathLike[str] | None = None,
    job: str = "*",
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    backend: str | None = None,
    data: str | None = None,
    samples: int = 16,
    out: str | os.PathLike[str] | None = None,
    reporter: Reporter | None = None,
) -> Diagnosis:
    """Why a candidate's answers, or its compilation, go wrong.

    Args:
        subject: A model's URI (with `policy_path`), a `result.json`, an `.onnx` to compare `candidate` with, or an
            `.onnx` that `backend` may not take.
        candidate: A second model file, `.onnx` or `.xml`.
        job: Glob over job ids; the first that matches and does not pass is looked into.
        data: File of samples, for two model files.
        samples: How many of them are traced.
        out: Folder for `debug.html`, `debug.json` and the bundle; by default `compile-stage-debug/NAME`.

    Raises:
        PolicyError: What was given can't be looked into; the message says why.
        RegistryError: The model can't be had.
        SourceError: The model is refused or unreadable.
    """
    from compile_stage.diagnosis.files import diagnose_compilation, diagnose_files
    from compile_stage.diagnosis.job import diagnose_job
    from compile_stage.pipeline.run import make_plan
    from compile_stage.report import debug_page

    here = Path(subject)
    with _context(reporter, "local") as context:
        if candidate is not None or backend is not None:
            folder, graph = _folder(out, here.stem), _existing(here)
            if candidate is not None:
                diagnosis = diagnose_files(context, graph, _existing(Path(candidate)), data, folder, count=samples)
            else:
                diagnosis = diagnose_compilation(context, graph, backend or "", folder)
        else:
            uri, policy, pattern = subject, policy_path, job
            if here.suffix == ".json":
                uri, policy, pattern = debug_page.read_result(here, job, policy_path)
            if policy is None:
                raise UsageError(
                    f"nothing says how {subject!r} is to be looked into",
                    fix="name a policy with -p, a second model file to compare with, or a backend with --backend",
                )
            expanded = make_plan(context, load_policy(policy_file(policy), sets=sets, targets=targets), uri)
            folder = _folder(out, _model_folder(expanded.source))
            diagnosis = diagnose_job(context, expanded, pattern, folder, count=samples)
        debug_page.write(diagnosis, folder)
        return diagnosis


def doctor() -> DoctorReport:
    """What this machine has, what is missing, and the command that brings it."""
    from compile_stage.installation import examine

    return examine()


def toolchains() -> tuple[State, ...]:
    """Every backend that has an isolated environment of its own, and what there is of it."""
    from compile_stage.engine.toolchains import states

    return states()


def install_toolchain(name: str, say: Callable[[str], None] = lambda _: None) -> Toolchain:
    """Make a backend's environment, unless it is there.

    Args:
        say: Hears what is done, a line each.

    Raises:
        UsageError: There is no such backend, or it has no toolchain.
        MissingDependencyError: A package can't be had or imported.
    """
    from compile_stage.engine.toolchains import install

    return install(name, say)


def lock_toolchain(name: str, out: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """Pin the newest versions for a backend's environment; returns the lock file, by default the user's own. Raises as
    `install_toolchain`."""
    from compile_stage.engine.toolchains import lock

    return lock(name, out, say)


def remove_toolchain(name: str) -> tuple[str, ...]:
    """Delete a backend's environments; returns their folders. Raises UsageError as `install_toolchain`."""
    from compile_stage.engine.toolchains import remove

    return remove(name)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise UsageError("there is no such file", where=str(file))
    return file.absolute()


def _folder(out: str | os.PathLike[str] | None, name: str) -> Path:
    """Absolute, since a worker has a current folder of its own."""
    return (Path(out) if out is not None else Path("compile-stage-debug") / name).absolute()


def _published(uri_or_bundle: str, into: Path) -> Path:
    here = Path(uri_or_bundle)
    if here.is_dir():
        return here.absolute()  # a worker has a current folder of its own
    if ":" not in uri_or_bundle:
        raise UsageError(
            f"{uri_or_bundle!r} is neither a folder nor a registry URI",
            fix="give a bundle's folder, or a URI such as models:/NAME/VERSION",
        )
    return plugins.registry_for(uri_or_bundle).fetch(uri_or_bundle, into)


@contextmanager
def _context(reporter: Reporter | None, engine: str, *, remeasure: bool = False) -> Iterator[Context]:
    """A run's surroundings; nothing of it is left behind but the cache."""
    demand_writable(cache_root())
    runner = plugins.load("engines", engine)
    plugins.demand(runner)
    with storage_trouble(), tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        try:
            yield Context(
                cache=Cache(cache_root()),
                engine=runner,
                events=EventLog(reporter),
                hardware=hardware(),
                scratch=Path(scratch),
                today=datetime.now(UTC).date(),
                remeasure=remeasure,
            )
        finally:
            runner.close()
