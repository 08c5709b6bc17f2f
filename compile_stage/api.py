"""All that the command line and `pipelines/` may call: plan, run, verify, promote, rollback, toolchains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core import plugins
from compile_stage.core.cache import Cache, cache_root, cache_secret
from compile_stage.core.cache_eviction import evict, limit_bytes
from compile_stage.core.context import Context
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.events import EventLog, Reporter
from compile_stage.core.leftovers import remove_leftovers, temporary_folder
from compile_stage.core.records import Plan, Policy, Receipt, RunResult, SourceModel, Verification
from compile_stage.core.remote_plugins import release
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

PathLike = str | os.PathLike[str]


def plan(
    model_uri: str,
    policy_path: str | os.PathLike[str],
    *,
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    policy_roots: Sequence[str | os.PathLike[str]] = (),
) -> Plan:
    """What `run` would do: the jobs, what is refused and why, what the cache already holds.

    Downloads the model, opens it and reads its samples; compiles nothing. The plan's `exit_code` is how a run would end
    as far as that is known.

    Args:
        policy_roots: Folders beside the policy's repository, or its own folder, that `extends` may name files of.

    Raises:
        PolicyError: The policy is wrong, is not meant for this model, or names samples that can't be read or do not fit
            it.
        SourceError: The model is refused.
        RegistryError: The registry can't be reached or does not hold the model.
    """
    from compile_stage.pipeline.cache_status import cache_status
    from compile_stage.pipeline.preflight import preflight
    from compile_stage.pipeline.run import make_plan

    policy = load_policy(policy_file(policy_path), sets=sets, targets=targets, roots=policy_roots)
    with _context(None, "local") as context:
        expanded = preflight(context, make_plan(context, policy, model_uri))
        return replace(expanded, cached_steps=cache_status(context, expanded))


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
    policy_roots: Sequence[str | os.PathLike[str]] = (),
    signing_key: PathLike | None = None,
    signing_certificate: PathLike | None = None,
    reporter: Reporter | None = None,
    on_result: Callable[[RunResult], object] = lambda _: None,
) -> NotebookResult:
    """Take a model through a policy: compile, validate, measure, publish, promote.

    Args:
        model_uri: `models:/name/version`, `models:/name@alias`, `models:/m-...`, `runs:/...` or `folder:/...`.
        targets: Glob patterns over the policy's target names; empty for all.
        sets: `path.to.key=value`, laid over the policy.
        out: Folder for result.json, the reports and the bundles; by default `compile-stage-out/NAME-VERSION/POLICY`.
        publish: Push the winners to the registry.
        promote: Move their aliases too; nothing is promoted that is not published.
        remeasure: Measure again what the cache holds measurements of, as after a run on a busy machine.
        policy_roots: Folders beside the policy's repository, or its own folder, that `extends` may name files of.
        signing_key: PEM file of the private key that signs what is published, or `sigstore`; by default
            `$COMPILE_STAGE_SIGNING_KEY`.
        signing_certificate: PEM file of its certificate and those up to an authority's, where one vouches for the key;
            by default `$COMPILE_STAGE_SIGNING_CERTIFICATE`.
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
    from compile_stage.pipeline.outcome import RunOptions, RunState
    from compile_stage.pipeline.run import make_plan
    from compile_stage.pipeline.run import run as run_plan
    from compile_stage.report.notebook import NotebookResult
    from compile_stage.serving.trust import trust_of_environment
    from compile_stage.signing.signers import signer_of

    def write_reports(result: RunResult, folder: Path | None) -> Mapping[str, Path]:
        on_result(result)
        return report.write(result, folder) if folder is not None else {}

    options = RunOptions(
        out=Path(out).absolute() if out is not None else None,
        publish=publish,
        promote=promote,
        signer=signer_of(signing_key, signing_certificate),
        trust=trust_of_environment(),
    )
    with RunState(model_uri, os.fspath(policy_path), options, write_reports) as progress:
        progress.policy = load_policy(policy_file(policy_path), sets=sets, targets=targets, roots=policy_roots)
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

    try:
        return lint_files([policy_file(policy) for policy in policies])
    finally:
        release()


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


def verify(
    uri_or_bundle: str,
    *,
    policy_path: PathLike | None = None,
    policy_roots: Sequence[PathLike] = (),
    sets: Sequence[str] = (),
    revalidate: bool = True,
    rebuild: bool = False,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
) -> Verification:
    """Is a published version, or a bundle on disk, what its manifest says, and does it still pass?

    The recorded verdict is computed again from what was measured, whatever it says.

    Args:
        uri_or_bundle: A registry URI, or the folder of a bundle.
        policy_path: Judge by this policy, not by the gates in the manifest: its gates, its data, its waivers, and what
            it allows. Its target of the same name counts.
        policy_roots: As for `run`.
        sets: `path.to.key=value`, laid over that policy.
        revalidate: Run the validation again too, against the pinned source; without it only what was measured when it
            was published is judged.
        rebuild: Make it again from the pinned source too, as its manifest says, and compare the bytes of the graph and
            of the artifact.
        allow_pickle: The source may be a pickle, which runs code of its own. What is verified has no say in this.
        allow_code: What is verified may be run though nothing that this machine knows vouches for it: a bundle that was
            not packaged here, or a version of a registry that this machine is not set up for, whose artifact is
            executable, or that names functions.
        trusted_keys: Files that name who may sign (docs/signing.md), beside `$COMPILE_STAGE_TRUST` and the policy's.
            Where any are named, a signature is demanded.

    Raises:
        UsageError: It would run code, and `allow_code` is false; other versions than those that made it, or another
            machine, write other bytes; or the policy has no target like its, or is not meant
            for the model that it was made from.
        IntegrityError: A file, a tag, the signature or the source is not what was published.
        SourceError: The source is refused; a pickle is, unless allowed.
        RegistryError: The version, or its source, can't be had.
    """
    from compile_stage import verification

    policy = None
    if policy_path is not None:
        policy = load_policy(policy_file(policy_path), sets=sets, roots=policy_roots)
    trust = verification.named_trust(trusted_keys)
    with _context(None, "local") as context:
        published = verification.open_published(context, uri_or_bundle, trust, policy)
        return verification.verify(
            context,
            published,
            policy,
            verification.Allowed(pickle=allow_pickle, code=allow_code),
            revalidate=revalidate,
            rebuild=rebuild,
        )


def validate(
    uri: str,
    *,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
    signing_key: PathLike | None = None,
    signing_certificate: PathLike | None = None,
    reporter: Reporter | None = None,
) -> Verification:
    """Validate and measure a published version on this machine, by the gates of its policy, and attach what was found
    to the version.

    That is how a version that was compiled for hardware that was not there comes to be promoted, and how one that was
    validated elsewhere comes to load here without a complaint about the hardware.

    Args:
        uri: A registry URI.
        allow_pickle: The source may be a pickle, which runs code of its own. The version has no say in this.
        allow_code: As `verify`.
        trusted_keys: As for `verify`.
        signing_key, signing_certificate: As for `run`: the validation is signed by them.

    Raises:
        UsageError: This is not hardware that the version is for; the validation must be signed and can't be; or it
            would run code, and `allow_code` is false.
        IntegrityError: A file, the signature or the source is not what was published.
        SourceError: The source is refused, or its samples can't be had here.
        RegistryError: The registry can't be reached, or refuses.
    """
    from compile_stage import verification
    from compile_stage.signing.signers import signer_of

    receipt, trust = plugins.registry_for(uri).published(uri), verification.named_trust(trusted_keys)
    signer = signer_of(signing_key, signing_certificate)
    with _context(reporter, "local") as context:
        published = verification.open_published(context, receipt.uri, trust)
        return verification.validate(
            context, receipt, published, signer, verification.Allowed(pickle=allow_pickle, code=allow_code)
        )


def promote(
    uri: str,
    alias: str,
    *,
    trusted_keys: Sequence[PathLike] = (),
    allow_code: bool = False,
    serve_check: bool = True,
) -> Receipt:
    """Move an alias to a published version by hand.

    Its files must be what was published and what was measured must make its verdict pass, or, where it was only
    compiled, a validation that was attached to it; a waiver that it passed under must still hold. MLflow must load it
    in a new, confined process and answer there as the artifact that was proven: looked at here where it can run here,
    else where a validation was made that is attached to it. It is not compared with what the alias points to now: that
    is what promotion within `run` does, and doing without it is the decision of whoever calls this.

    Args:
        trusted_keys: As for `verify`.
        allow_code: As for `verify`; it is loaded.
        serve_check: False promotes what nobody loaded.

    Returns:
        Its `note` says how it is known that serving loads it.

    Raises:
        GateError: Its verdict did not pass, or passed under a waiver that has ended; it can't be loaded, answers
            otherwise there, or nobody can tell.
        IntegrityError: It is not one of ours, a file of it was changed, or its signature is not trusted.
        RegistryError: The registry can't be reached, or refuses.
    """
    from compile_stage import promotability, verification

    registry, trust = plugins.registry_for(uri), verification.named_trust(trusted_keys)
    receipt = registry.published(uri)
    with _context(None, "local") as context:
        published = verification.open_published(context, receipt.uri, trust)
        note = promotability.demand_promotable(context, published, allow_code=allow_code, serve_check=serve_check)
    return replace(registry.promote(receipt, alias), note=note)


def rollback(uri: str, alias: str | None = None) -> Receipt:
    """Move an alias back to the version that it pointed to before. Where `$COMPILE_STAGE_TRUST` is set, that one must
    be signed by somebody it names.

    Args:
        uri: `models:/NAME@ALIAS`, or with `alias` `models:/NAME` or `folder:/PATH/NAME`. A bare `NAME` is one of
            MLflow.

    Raises:
        UsageError: No alias is named, or two are, or the URI names a version.
        RegistryError: There is no such alias, or nothing came before.
        IntegrityError: What came before is not signed by somebody trusted.
    """
    from compile_stage import verification

    name, alias, place = verification.named_alias(uri, alias)
    registry = plugins.registry_for(place)
    if (trust := verification.named_trust(())) is not None and (now := registry.current(name, alias)) is not None:
        with _context(None, "local") as context:
            verification.demand_previous(context, now, alias, trust)
    return registry.rollback(name, alias)


def debug(
    subject: str,
    candidate: str | None = None,
    *,
    policy_path: str | os.PathLike[str] | None = None,
    policy_roots: Sequence[str | os.PathLike[str]] = (),
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
            loaded = load_policy(policy_file(policy), sets=sets, targets=targets, roots=policy_roots)
            expanded = make_plan(context, loaded, uri)
            folder = _folder(out, _model_folder(expanded.source))
            diagnosis = diagnose_job(context, expanded, pattern, folder, count=samples)
        debug_page.write(diagnosis, folder)
        return diagnosis


def doctor() -> DoctorReport:
    """What this machine has, what is missing, and the command that brings it."""
    from compile_stage.installation import examine

    try:
        return examine()
    finally:
        release()


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
    """Delete a toolchain's environments; returns their folders. Raises UsageError as `install_toolchain`."""
    from compile_stage.engine.toolchains import remove

    return remove(name)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise UsageError("there is no such file", where=str(file))
    return file.absolute()


def _folder(out: str | os.PathLike[str] | None, name: str) -> Path:
    """Absolute, since a worker has a current folder of its own."""
    return (Path(out) if out is not None else Path("compile-stage-debug") / name).absolute()


@contextmanager
def _context(reporter: Reporter | None, engine: str, *, remeasure: bool = False) -> Iterator[Context]:
    """A run's surroundings; nothing of it is left behind but the cache."""
    demand_writable(cache_root())
    cache_limit = limit_bytes()
    runner = plugins.load("engines", engine)
    plugins.demand(runner)
    remove_leftovers()
    with storage_trouble(), temporary_folder() as scratch:
        try:
            yield Context(
                cache=Cache(cache_root(), cache_secret()),
                engine=runner,
                events=EventLog(reporter),
                hardware=hardware(),
                scratch=scratch,
                today=datetime.now(UTC).date(),
                remeasure=remeasure,
            )
        finally:
            runner.close()
            evict(cache_root(), cache_limit)
            release()
