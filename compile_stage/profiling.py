"""What `profile` does: where a model's time goes, by the profilers of the runtimes that run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.errors import UsageError
from compile_stage.core.events import Reporter
from compile_stage.core.run_context import open_context
from compile_stage.core.shipped import policy_file

if TYPE_CHECKING:
    from compile_stage.pipeline.profiles import Profiles

PathLike = str | os.PathLike[str]


def profile(
    uri: str,
    policy_path: PathLike | None = None,
    *,
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    policy_roots: Sequence[PathLike] = (),
    backends: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32",),
    out: PathLike | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
    reporter: Reporter | None = None,
) -> Profiles:
    """Where a model spends its time: the original, and what the policy's jobs compile it to; or, without a policy, a
    published version or a bundle, and its original. Nothing is validated, measured or published.

    Args:
        uri: Of a source model where `policy_path` is given, else of a published version, or the folder of a bundle.
        targets: Glob patterns over the policy's target names; empty for all.
        backends: Only jobs of these; empty for all.
        precisions: Only jobs of these.
        out: Folder for the traces, `profiles/JOB.trace.json` in it; None: they are not kept.
        allow_pickle: As for `verify`; of a source model the policy says it.
        allow_code, trusted_keys: As for `verify`.

    Raises:
        PolicyError: The policy is wrong, is not meant for this model, or has no such job.
        SourceError: The model is refused or unreadable.
        IntegrityError: A published version is not what was published.
        RegistryError: The registry can't be reached or does not hold the model.
    """
    from compile_stage.report.profiles import copy_traces

    with open_context(reporter, "local") as context:
        if policy_path is not None:
            from compile_stage.pipeline.profiles import profile_plan
            from compile_stage.pipeline.run import make_plan
            from compile_stage.policy.load import load_policy

            policy = load_policy(policy_file(policy_path), sets=sets, targets=targets, roots=policy_roots)
            found = profile_plan(context, make_plan(context, policy, uri), backends, precisions)
        else:
            if targets or sets or backends:
                raise UsageError(
                    "a published version has one target and one backend",
                    fix="name a policy with -p to profile what it compiles, or leave the other options out",
                )
            from compile_stage import verification
            from compile_stage.pipeline.profiles import profile_published

            published = verification.open_published(context, uri, verification.named_trust(trusted_keys))
            verification.demand_vouched(published, allow_code=allow_code)
            found = profile_published(
                context, published.uri, published.manifest, published.folder, allow_pickle=allow_pickle
            )
        for target in found.targets if out is not None else ():
            copy_traces(target.target, target.profiles, Path(out or "").absolute())
    return found
