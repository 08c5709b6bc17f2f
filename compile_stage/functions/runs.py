"""`plan` and `run`: a model through a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.errors import CompileStageError
from compile_stage.core.events import Reporter
from compile_stage.core.records import Plan, Policy, RunResult, SourceModel
from compile_stage.core.run_context import open_context
from compile_stage.core.shipped import policy_file
from compile_stage.policy.load import load_policy, policy_of, read_policy
from compile_stage.shared_caching import open_shared

if TYPE_CHECKING:
    from compile_stage.report.notebook import NotebookResult

PathLike = str | os.PathLike[str]


def plan(
    model_uri: str,
    policy_path: PathLike,
    *,
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    policy_roots: Sequence[PathLike] = (),
    shared_cache: str | None = None,
) -> Plan:
    """What `run` would do: the jobs, what is refused and why, what the cache already holds.

    Downloads the model, opens it and reads its samples; compiles nothing. The plan's `exit_code` is how a run would end
    as far as that is known. Where the policy requires signatures and `COMPILE_STAGE_SIGNING_KEY` names no key that
    would do, a note says so.

    Args:
        policy_roots: Folders beside the policy's repository, or its own folder, that `extends` may name files of.
        shared_cache: As for `run`.

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
    shared = open_shared(shared_cache, compliance=policy.compliance)
    with open_context(None, "local", shared=shared, compliance=policy.compliance) as context:
        expanded = preflight(context, make_plan(context, policy, model_uri))
        notes = (*expanded.notes, *_signing_notes(policy))
        return replace(expanded, notes=notes, cached_steps=cache_status(context, expanded))


def _signing_notes(policy: Policy) -> tuple[str, ...]:
    """What a run needs to sign, where the policy requires signatures and the environment names no key that would do.
    It is no failure: a run takes a key as an option too, and who plans may have none."""
    from compile_stage.serving.trust import merged_trust, trust_of_environment
    from compile_stage.signing.signers import signer_of
    from compile_stage.steps.sign import refuse_signing

    if not policy.compliance.require_signature:
        return ()
    try:
        trust = merged_trust(policy.compliance.trusted_keys, trust_of_environment())
        refuse_signing(policy, signer_of(None, None), trust)
    except CompileStageError as error:
        return (f"as things are, a run ends before it compiles anything: {error.problem} (fix: {error.fix})",)
    return ()


def run(
    model_uri: str,
    policy_path: PathLike,
    *,
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    out: PathLike | None = None,
    publish: bool = True,
    promote: bool = True,
    engine: str = "local",
    remeasure: bool = False,
    shared_cache: str | None = None,
    policy_roots: Sequence[PathLike] = (),
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
        shared_cache: `s3://`, `gs://`, `az://` or `file://`: what this machine's cache lacks is looked for there, and
            what is made is put there; by default `$COMPILE_STAGE_SHARED_CACHE`, and with "" none.
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
    from compile_stage.policy.explain import values_of
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
        file = policy_file(policy_path)
        read = read_policy(file, sets, roots=policy_roots)
        progress.policy = policy_of(file, read, targets)
        progress.forget_reports()
        progress.policy_values = tuple(values_of(file, read))
        compliance = progress.policy.compliance
        shared = open_shared(shared_cache, options.signer, compliance)
        with open_context(reporter, engine, remeasure=remeasure, shared=shared, compliance=compliance) as context:
            progress.context = context
            if (run_elsewhere := getattr(context.engine, "run_elsewhere", None)) is not None:
                run_elsewhere(progress, context, model_uri, partial(default_out, policy=progress.policy), shared_cache)
            else:
                context.confinement_beside()  # the registry takes longer
                expanded = make_plan(context, progress.policy, model_uri)
                context.events.planned(expanded)
                progress.begin(expanded, options.out or default_out(expanded.source, progress.policy).absolute())
                run_plan(progress, context, expanded)
    return NotebookResult.of(progress.written or progress.result())


def default_out(source: SourceModel, policy: Policy) -> Path:
    """`compile-stage-out/NAME-VERSION/POLICY` below the current folder: two policies on one model don't overwrite each
    other's results."""
    return Path("compile-stage-out") / model_folder(source) / (policy.name or "no-policy")


def model_folder(source: SourceModel) -> str:
    """`NAME-VERSION`, or `NAME` where there is no version: the name of a folder for what is made of the model."""
    return f"{source.name}-{source.version}" if source.version else source.name
