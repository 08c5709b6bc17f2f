"""What is asked of a published model before it is believed: that its files are what was published, who signed them,
that what was measured makes its verdict pass, by the rules that it was published under or by those of a policy.

`verify`, `validate`, `promote` (`promotability`) and `rollback` all begin with `open_published`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from compile_stage.core import alias_history, plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import plain, revive
from compile_stage.core.environment import Hardware
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import FilesGoneError, IntegrityError, RegistryError, UsageError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.language_models import LANGUAGE_MODELS_ONLY, fitting_gates, has_language_gates
from compile_stage.core.ports import Registry
from compile_stage.core.provenance import demand_no_code
from compile_stage.core.records import (
    Check,
    Gate,
    Job,
    Outcome,
    Policy,
    SourceModel,
    TargetPolicy,
    Verdict,
    Verification,
    record,
)
from compile_stage.core.uris import is_uri
from compile_stage.measure.gates import in_force
from compile_stage.measure.label_needs import CLASSES_ONLY
from compile_stage.measure.metrics import apply_waivers
from compile_stage.measure.recompute import describe, holds, refuse_published
from compile_stage.rebuilding import rebuild as make_again
from compile_stage.revalidation import validate_again
from compile_stage.serving.manifest import (
    check_integrity,
    data_folder,
    read_manifest,
)
from compile_stage.serving.signatures import (
    SIGNATURE_FOLDER,
    TEST_PREDICATE,
    VERDICT,
    SignedBy,
    is_signed,
    read_statement,
    verify_model,
)
from compile_stage.serving.trust import TRUST_VARIABLE, Trust, merged_trust, trust_of_environment
from compile_stage.serving.variants import every_variant, for_machine
from compile_stage.serving.version_tags import TAG, check_tags
from compile_stage.steps.resolve import refuse_policy, resolve_made_from

_LAXITY = ("error", "warn", "ignore")


@record
class Published:
    """A published model whose files, tags and signature hold.

    Attributes:
        folder: The MLflow model directory.
        manifest: Of a version that holds several artifacts, that of the one which this machine loads.
        whole: As it was published.
        signed_by: None where nobody signed, or nothing says whose signatures are trusted.
        trust: Whose signatures count for it; None where none is asked for.
        tags: Of its version; empty of a bundle on disk.
        caution: What its registry says of its version: that its files are about to be removed. Else empty.
    """

    uri: str
    folder: Path
    manifest: Mapping[str, Any]
    signed_by: SignedBy | None
    trust: Trust | None
    tags: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    caution: str = ""

    @property
    def signature_note(self) -> str:
        """One sentence on its signature."""
        if self.signed_by is not None:
            return f"signed by {self.signed_by.name}"
        return "its signature was not verified: no keys are trusted" if is_signed(self.folder) else "it is not signed"


@record
class Allowed:
    """What of a published model may run here. The model itself has no say in it.

    Attributes:
        pickle: Its source may be a pickle, which runs code of its own.
        code: It may be run though nothing that this machine knows vouches for it.
    """

    pickle: bool = False
    code: bool = False


def named_trust(trusted_keys: Iterable[str | os.PathLike[str]]) -> Trust | None:
    """What options and `$COMPILE_STAGE_TRUST` name; None where nothing is named, so that no signature is asked for."""
    return merged_trust(trusted_keys, trust_of_environment())


def policy_trust(policy: Policy, named: Trust | None) -> Trust | None:
    """That, and what a policy names."""
    return merged_trust(policy.compliance.trusted_keys, named)


def open_published(
    context: Context, uri_or_bundle: str, named: Trust | None, policy: Policy | None = None
) -> Published:
    """Fetch a published model, and compare its signature, its files and its tags.

    Args:
        uri_or_bundle: A registry URI, or the folder of a bundle.
        named: Whose signatures are trusted; when given, one is demanded.
        policy: Demands one too where it says so, and names trusted keys.

    Raises:
        IntegrityError: A file or a tag is not what was published, or a signature that is demanded is not there.
        RegistryError: The version can't be had.
    """
    folder, tags, caution = _fetch(uri_or_bundle, context.scratch / "published")
    trust = policy_trust(policy, named) if policy is not None else named
    demanded = named is not None or (policy is not None and policy.compliance.require_signature)
    demanded = demanded or bool(read_manifest(folder).get("signature_required"))
    if demanded and trust is None:
        raise IntegrityError(
            "a signature is required, and nothing says whose is trusted",
            fix=f"--trusted-key FILE, {TRUST_VARIABLE}, or compliance.trusted_keys of the policy given with -p",
            where=uri_or_bundle,
        )
    signed_by = None
    if trust is not None and (demanded or is_signed(folder)):
        try:
            signed_by = verify_model(folder, trust)
        except IntegrityError as error:  # which names the folder that it was fetched into
            raise IntegrityError(error.problem, fix=error.fix, where=uri_or_bundle) from error
    try:
        manifest = check_integrity(folder, beside=True)
    except IntegrityError as error:  # as above: that folder is gone when somebody reads it
        where = error.where.replace(str(folder), uri_or_bundle)
        raise IntegrityError(error.problem, fix=error.fix, where=where, code=error.code) from error
    check_tags(manifest, tags, uri_or_bundle)
    published = Published(
        uri=uri_or_bundle,
        folder=folder,
        manifest=_with_logged_source(
            for_machine(manifest, folder, context.hardware, trust if demanded else None), tags
        ),
        whole=manifest,
        signed_by=signed_by,
        trust=trust if demanded else None,
        tags=tags,
        caution=caution,
    )
    if signed_by is not None and trust is not None:
        _compare_verdict(published, trust)
    return published


def verify(
    context: Context,
    published: Published,
    policy: Policy | None,
    allowed: Allowed,
    *,
    revalidate: bool,
    rebuild: bool = False,
) -> Verification:
    """Is it what its manifest says, and does it pass: by what was measured when it was published, and, with
    `revalidate`, by running the validation again. With `rebuild` it is made again from its source, and the bytes are
    compared.

    Raises:
        UsageError: The policy has no such target, or is not meant for the model that it was made from.
        IntegrityError, SourceError, RegistryError: As `revalidation.validate_again` and `rebuilding.rebuild`.
    """
    manifest = published.manifest
    notes = ["every file has the digest that the manifest gives it", published.signature_note]
    notes += filter(None, [published.caution])
    notes += _machine_note(context, manifest)
    variants = list(every_variant(published.whole))
    problems = [_of(one, problem) for one in variants for problem in _recorded(context, one)]
    if policy is not None:
        rules = _target_of(policy, manifest)
        _demand_meant(context, policy, manifest, resolved=revalidate)
        for one in variants:
            judged = not revalidate or one.get("variant") != manifest.get("variant")
            against = _against_policy(context, one, policy, _target_of(policy, one), tolerances=judged)
            problems += [_of(one, problem) for problem in against]
        notes.append(_policy_note(manifest, policy))
        manifest = _under(manifest, policy, rules)
        allowed = replace(allowed, pickle=allowed.pickle or policy.compliance.allow_pickle)
    checks: tuple[Check, ...] = ()
    if revalidate or rebuild:
        demand_vouched(published, allow_code=allowed.code)
    if rebuild:
        checks, more_notes = make_again(context, published.manifest, published.folder, allow_pickle=allowed.pickle)
        notes += more_notes
        problems += [check.reason for check in checks if check.outcome is Outcome.FAIL]  # same bytes need no graph
    if revalidate:
        verdict, more_notes = validate_again(context, manifest, published.folder, allow_pickle=allowed.pickle)
        checks, notes = (*checks, *verdict.checks), [*notes, *more_notes]
        problems += [] if verdict.passed else ["the validation that was run again did not pass"]
    return Verification(uri=published.uri, passed=not problems, checks=checks, notes=(*problems, *notes))


def _with_logged_source(manifest: Mapping[str, Any], tags: Mapping[str, str]) -> dict[str, Any]:
    """With the logged model that its source was registered from, which stays when the registered version is deleted.
    Its files must have the digest that the manifest names."""
    model_id = tags.get(f"{TAG}source_model_id", "")
    return {**manifest, "source": {**manifest["source"], "model_id": model_id}} if model_id else dict(manifest)


def named_alias(uri: str, alias: str | None) -> tuple[str, str, str]:
    """The registered name and the alias that a rollback is of, and a URI by which its registry is found. Raises
    UsageError where one is not clear."""
    uri = uri if ":" in uri else f"models:/{uri}"
    place, _, named = uri.rpartition("@")
    if not place or "/" in named:  # an @ in a folder's name
        place, named = uri, ""
    name = place.removeprefix("models:/")
    of_version = place.startswith("models:/") and "/" in name
    if of_version:
        name = name.partition("/")[0]
        place = f"models:/{name}"
    if (alias and named and alias != named) or not (alias or named):
        raise UsageError(
            f"it is not clear which alias is meant: {named!r} or {alias!r}" if named else "no alias is named",
            fix=f"name one: compile-stage rollback {place}@ALIAS",
            where=uri,
        )
    alias = alias or named
    if of_version:
        raise UsageError(
            "a rollback moves an alias, not a version",
            fix=f"compile-stage rollback {place}@{alias}",
            where=uri,
        )
    return name, alias, place if place.startswith("folder:") else f"{place}@{alias}"


def check_previous(context: Context, registry: Registry, name: str, alias: str, trust: Trust | None) -> tuple[str, str]:
    """Look at the version that a rollback of an alias leads to.

    Args:
        trust: With it, that version must be signed by somebody whom it names: a writer of the registry can write the
            tag that leads there.

    Returns:
        Its version, and what a reader should know of it; both are empty where there is none, which the registry says
        when it is asked to move the alias.

    Raises:
        IntegrityError: A file or a tag of it is not what was published, or its signature is not trusted.
        RegistryError: The registry can't be reached, or what it records is no version, or one that is no longer there.
    """
    now = registry.current(name, alias)
    if now is None:
        return "", ""
    tag = alias_history.previous_tag(alias)
    if not (previous := alias_history.parse(now.tags.get(tag)).previous):
        return "", ""
    home = now.uri.rpartition("/")[0]
    uri = f"{home}/{previous}"
    fix = f"name another version: compile-stage promote {home}/VERSION --alias {alias}"
    # Whoever may write to the registry can write anything here, such as `latest` or a path.
    if not alias_history.is_version(previous) or previous == now.version:
        raise RegistryError(
            f"the tag {tag} says {previous!r}, which is no version before {now.version}",
            fix=f"{fix}; find out who changed the tag",
            where=now.uri,
        )
    try:
        registry.published(uri)
    except RegistryError as error:
        if error.code is Code.NOT_IN_REGISTRY:
            raise RegistryError(
                f"version {previous}, which {alias!r} pointed to before, is no longer there",
                fix=fix,
                where=now.uri,
                code=error.code,
            ) from error
        if error.code is not Code.REGISTRY:
            raise
        if trust is None:  # an original, to which somebody had moved the alias by hand
            return previous, "compile-stage did not publish it, so nothing says whether its files are whole"
    try:
        return previous, open_published(context, uri, trust).caution
    except (IntegrityError, RegistryError) as error:
        in_trouble = isinstance(error, RegistryError) and error.code is not Code.REGISTRY
        if in_trouble and not isinstance(error, FilesGoneError):
            raise
        raise IntegrityError(
            f"{alias!r} stays at {now.uri}: what it pointed to before, {uri}, is not what was published "
            f"({error.problem})",
            fix=f"{fix}; or run the stage again, which publishes it anew",
            where=uri,
        ) from error


# ------------------------------------------------------------------------------------------------------------ the parts


def _fetch(uri_or_bundle: str, into: Path) -> tuple[Path, Mapping[str, str], str]:
    """The files of a bundle or a version, the version's tags, and what the registry says of it."""
    here = Path(uri_or_bundle)
    if not is_uri(uri_or_bundle):
        if not here.is_dir():
            raise UsageError(
                f"{str(uri_or_bundle)!r} is neither a folder nor a registry URI",
                fix="give a bundle's folder, or a URI such as models:/NAME/VERSION",
            )
        if (reason := refuse_tree(here)) is not None:
            raise IntegrityError(f"it is no bundle that compile-stage wrote: {reason}", where=uri_or_bundle)
        return here.absolute(), {}, ""  # a worker has a current folder of its own
    registry = plugins.registry_for(uri_or_bundle)
    tags: Mapping[str, str] = {}
    caution = ""
    with suppress(RegistryError):  # a logged model has files and no version; what can't be reached can't be fetched
        held = registry.published(uri_or_bundle)
        tags, caution = held.tags, held.note
    return registry.fetch(uri_or_bundle, into), tags, caution


def demand_vouched(published: Published, *, allow_code: bool) -> None:
    """Raise UsageError where it would run code that nobody vouches for; the signature of somebody trusted does."""
    if not allow_code and published.signed_by is None:
        demand_no_code(published.uri, data_folder(published.folder), published.manifest)


def _compare_verdict(published: Published, trust: Trust) -> None:
    file = published.folder / SIGNATURE_FOLDER / VERDICT
    statement = read_statement(file, trust, TEST_PREDICATE)
    if statement["predicate"].get("verdict") != published.whole["verdict"]:
        raise IntegrityError("the signed verdict is not the manifest's", fix="fetch the model again", where=str(file))


def _of(manifest: Mapping[str, Any], problem: str) -> str:
    """A problem of a variant, with its id."""
    return f"{manifest['variant']}: {problem}" if "variant" in manifest else problem


def _machine_note(context: Context, manifest: Mapping[str, Any]) -> list[str]:
    fingerprint = manifest["fingerprint"]
    if manifest["verdict"] is None:
        return [f"it was compiled on {fingerprint} for other hardware, and not validated there"]
    if fingerprint != context.hardware.fingerprint:
        return [f"it was validated on {fingerprint}; this machine is {context.hardware.fingerprint}"]
    return []


def _recorded(context: Context, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Why what was measured does not make the recorded verdict pass."""
    if manifest["verdict"] is None:
        return
    if (reason := refuse_published(manifest, context.today)) is not None:
        yield f"by its own measurements: {reason}"


def _target_of(policy: Policy, manifest: Mapping[str, Any]) -> TargetPolicy:
    name = manifest["target"]["name"]
    for rules in policy.targets:
        if rules.target.name == name:
            return rules
    held = ", ".join(rules.target.name for rules in policy.targets)
    raise UsageError(
        f"the model is for the target {name!r}, and the policy has {held}", fix="name the policy of its target"
    )


def _demand_meant(context: Context, policy: Policy, manifest: Mapping[str, Any], *, resolved: bool) -> None:
    """Raise UsageError where the policy's `applies_to` leaves the source out, as `run` does.

    Args:
        resolved: The registry is asked for the source's name as well as for its tags; else the manifest's name counts.
    """
    applies_to, made_from = policy.applies_to, manifest["source"]
    if not (applies_to.names or applies_to.tags or applies_to.flavors):
        return
    if applies_to.tags or resolved:
        source = resolve_made_from(context, made_from)
    else:
        named = {field: made_from[field] for field in ("uri", "name", "version", "flavor", "digest")}
        source = SourceModel(path="", **named)
    if (reason := refuse_policy(source, applies_to)) is not None:
        raise UsageError(reason, where=source.uri, fix="name the policy of that model, or widen applies_to")


def _policy_note(manifest: Mapping[str, Any], policy: Policy) -> str:
    published = manifest["policy"]
    if published["digest"] == policy.digest:
        return f"it was published under this very policy ({policy.name})"
    return (
        f"it was published under the policy {published['name']} ({published['digest'][:19]}), not under {policy.name} "
        "as it is now"
    )


def _against_policy(
    context: Context, manifest: Mapping[str, Any], policy: Policy, rules: TargetPolicy, *, tolerances: bool
) -> Iterator[str]:
    """What a policy has against a published model. `tolerances`: judge by the recorded measurements too."""
    compliance, backend = policy.compliance, manifest["artifact"]["backend"]
    precision = manifest["scheme"]["precision"]
    if compliance.allowed_backends is not None and backend not in compliance.allowed_backends:
        yield f"{backend} is forbidden by compliance.allowed_backends"
    if precision not in (*rules.target.precisions, "fp32"):
        yield f"its precision {precision} is not among the policy's: {', '.join(rules.target.precisions)}"
    published = manifest.get("on_hardware_mismatch", "error")
    if _LAXITY.index(published) > _LAXITY.index(compliance.on_hardware_mismatch):
        yield f"on other hardware it does {published!r}, and the policy asks for {compliance.on_hardware_mismatch!r}"
    if manifest["verdict"] is None:
        return
    machine: Hardware = revive(Hardware, manifest["hardware"])
    if (reason := machine.refuse(dict(rules.target.hardware))) is not None:
        yield f"it was validated on a machine that the policy does not mean: {reason}"
    if precision not in rules.tolerances:
        yield f"the policy has no tolerances for {precision}"
    gates = (*(_tolerances(manifest, rules) if tolerances else ()), *rules.performance)
    checks = (*(_proven_on(manifest, policy, rules) if tolerances else ()), *_judged(gates, manifest))
    for check in apply_waivers(checks, policy.waivers, rules.target.name, context.today):
        if check.outcome is not Outcome.PASS and check.waived is None:
            yield f"by the policy: {check.reason}"


def _proven_on(manifest: Mapping[str, Any], policy: Policy, rules: TargetPolicy) -> Iterator[Check]:
    """What a policy asks of the samples and the batch sizes of a proof, beside its gates: where the proof has less."""
    verdict: Verdict = revive(Verdict, manifest["verdict"])
    job: Job = revive(Job, manifest["job"])
    data, asked = policy.data, rules.target.batch_sizes
    counted = [check for check in verdict.checks if check.gate.metric == "samples" and check.measured is not None]
    fewest = min(counted, key=lambda check: check.measured or 0, default=None)
    if fewest is not None and (fewest.measured or 0) < data.min_samples:
        reason = f"it was proven on {fewest.measured:g} samples, fewer than {data.min_samples} (data.min_samples)"
        yield replace(fewest, outcome=Outcome.NOT_RUN, reason=reason)
    if absent := [str(size) for size in asked if size not in job.target.batch_sizes]:
        reason = f"it was not validated at the policy's batch size {' and '.join(absent)} (targets.*.batch_sizes)"
        gate = Gate(metric="other_batch_sizes", limit=0, direction="at_most")
        yield Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=reason)
    for check in verdict.checks if data.robustness is not None else ():
        if data.robustness is not None and check.gate.metric == "robustness" and check.measured is not None:
            again = replace(check, gate=replace(check.gate, limit=data.robustness.factor), waived=None)
            if not holds(again):
                yield replace(again, outcome=Outcome.FAIL, reason=describe(again))


def _judged(gates: tuple[Gate, ...], manifest: Mapping[str, Any]) -> Iterator[Check]:
    """A policy's gates, looked at with what was measured when the model was published."""
    verdict: Verdict = revive(Verdict, manifest["verdict"])
    job: Job = revive(Job, manifest["job"])
    looked_at = {_bare(gate) for gate in (*job.gates, *revive(tuple[Gate, ...], manifest.get("performance", [])))}
    for gate in gates:
        of_metric = [check for check in verdict.checks if check.gate.metric == gate.metric]
        judged = [check for check in of_metric if gate in in_force(gates, check.output)]
        if of_metric and not judged and gate.output is None:  # gates that name their output stand in its place
            continue
        same = [check for check in judged if _measures(check, gate)]
        for check in same:
            again = replace(check, gate=gate, waived=None)
            outcome = Outcome.PASS if holds(again) else Outcome.FAIL
            yield replace(again, outcome=outcome, reason=describe(again))
        # The very gate that it was published with had nothing to look at: labels that are no classes, or no floats.
        if not same and _bare(gate) not in looked_at and not any(gate.options.get(option) for option in _ONLY):
            reason = f"{gate.metric} was not measured as the policy asks for it when the model was published"
            yield Check(gate=gate, outcome=Outcome.NOT_RUN, measured=None, reason=reason)


_ONLY = (CLASSES_ONLY, LANGUAGE_MODELS_ONLY)


def _tolerances(manifest: Mapping[str, Any], rules: TargetPolicy) -> tuple[Gate, ...]:
    """The policy's gates for the published precision that are meant for such a model."""
    job: Job = revive(Job, manifest["job"])
    gates = rules.tolerances.get(manifest["scheme"]["precision"], ())
    return fitting_gates(gates, language_model=has_language_gates(job.gates))


def _measures(check: Check, gate: Gate) -> bool:
    there, here = check.gate, gate
    same = (there.metric, there.direction, there.confidence) == (here.metric, here.direction, here.confidence)
    return same and _options(there) == _options(here)


def _options(gate: Gate) -> dict[str, Any]:
    return {name: value for name, value in gate.options.items() if name not in _ONLY}


def _bare(gate: Gate) -> str:
    return repr((gate.metric, gate.limit, gate.output, gate.confidence, sorted(_options(gate).items())))


def _under(manifest: Mapping[str, Any], policy: Policy, rules: TargetPolicy) -> dict[str, Any]:
    """The manifest with a policy's gates, target, data and waivers in place of those that it was published with."""
    gates = _tolerances(manifest, rules)
    job = {**manifest["job"], "gates": plain(gates), "target": plain(rules.target)}
    waivers = [plain(waiver) for waiver in policy.waivers if waiver.target == rules.target.name]
    data = {**manifest["data"], "spec": plain(policy.data)}
    return {**manifest, "job": job, "data": data, "verdict": None, "waivers": waivers}
