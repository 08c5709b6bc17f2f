"""What is done with a published version: `verify`, `validate`, `promote`, `rollback`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from compile_stage.core import plugins
from compile_stage.core.errors import UsageError
from compile_stage.core.events import Reporter
from compile_stage.core.records import Receipt, Verification
from compile_stage.core.run_context import open_context
from compile_stage.core.shipped import policy_file
from compile_stage.policy.load import load_policy

PathLike = str | os.PathLike[str]


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
        UsageError: `sets` or `policy_roots` without a policy; it would run code, and `allow_code` is false; other
            versions than those that made it, or another machine, write other bytes; or the policy has no target like
            its, or is not meant for the model that it was made from.
        IntegrityError: A file, a tag, the signature or the source is not what was published.
        SourceError: The source is refused; a pickle is, unless allowed.
        RegistryError: The version, or its source, can't be had.
    """
    from compile_stage import verification

    policy = None
    if policy_path is not None:
        policy = load_policy(policy_file(policy_path), sets=sets, roots=policy_roots)
    elif sets or policy_roots:
        raise UsageError("--set and --policy-root are about a policy, and none is named", fix="name it with -p POLICY")
    trust = verification.named_trust(trusted_keys)
    with open_context(None, "local") as context:
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
    from compile_stage import attached_validation, verification
    from compile_stage.signing.signers import signer_of

    receipt, trust = plugins.registry_for(uri).published(uri), verification.named_trust(trusted_keys)
    signer = signer_of(signing_key, signing_certificate)
    with open_context(reporter, "local") as context:
        published = verification.open_published(context, receipt.uri, trust)
        return attached_validation.validate(
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
        Its `note` says how it is known that serving loads it, and what is to be known of the move: waivers, and which
        version it was not compared with.

    Raises:
        GateError: Its verdict did not pass, or passed under a waiver that has ended; its policy asks for an approval
            that is not there; it can't be loaded, answers otherwise there, or nobody can tell.
        IntegrityError: It is not one of ours, a file of it was changed, or its signature is not trusted.
        RegistryError: The registry can't be reached, or refuses.
    """
    from compile_stage import promotability, verification

    registry, trust = plugins.registry_for(uri), verification.named_trust(trusted_keys)
    receipt = registry.published(uri)
    with open_context(None, "local") as context:
        published = verification.open_published(context, receipt.uri, trust)
        note = promotability.demand_promotable(context, published, allow_code=allow_code, serve_check=serve_check)
    moved = registry.promote(receipt, alias)
    cautions = [*filter(None, [receipt.note]), *promotability.cautions(published.manifest, moved)]
    return replace(moved, note="; ".join([note, *cautions]))


def rollback(uri: str, alias: str | None = None) -> Receipt:
    """Move an alias back to the version that it pointed to before, if its files are what was published. Where
    `$COMPILE_STAGE_TRUST` is set, it must be signed by somebody it names. It is not loaded, and its verdict is not
    judged again: going back is for when time is short.

    Args:
        uri: `models:/NAME@ALIAS`, or with `alias` `models:/NAME` or `folder:/PATH/NAME`. A bare `NAME` is one of
            MLflow.

    Raises:
        UsageError: No alias is named, or two are, or the URI names a version.
        RegistryError: There is no such alias, or nothing came before.
        AliasMovedError: Somebody moved the alias meanwhile, so that another version came before; the alias stays.
        IntegrityError: What came before is damaged, or not signed by somebody trusted; the alias stays.
    """
    from compile_stage import verification

    name, alias, place = verification.named_alias(uri, alias)
    registry = plugins.registry_for(place)
    with open_context(None, "local") as context:
        previous, note = verification.check_previous(context, registry, name, alias, verification.named_trust(()))
    # Another version than the one that was looked at may be damaged, or signed by a stranger.
    receipt = registry.rollback(name, alias, expected=previous)
    return replace(receipt, note=note) if note else receipt
