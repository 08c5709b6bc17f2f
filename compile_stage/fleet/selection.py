"""Which versions a fleet is made of, and under which policies: the server's search, read page by page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import CompileStageError, PolicyError, UsageError
from compile_stage.core.records import Policy, RegisteredVersion
from compile_stage.core.shipped import policy_file
from compile_stage.fleet.journal import PlannedJob
from compile_stage.policy.folder import PolicyFile, PolicyFolder, applies
from compile_stage.policy.load import load_policy


@dataclass
class Skipped:
    """What the search found and the fleet leaves out.

    Attributes:
        published: Versions that compile-stage published itself.
        without_policy: Versions that no policy is meant for.
    """

    published: int = 0
    without_policy: int = 0


def split_pattern(pattern: str) -> tuple[str, str]:
    """`vision-*@candidate` → glob of names, glob of aliases; without an alias the newest version of each is meant.

    Raises:
        UsageError: It is no such pattern.
    """
    name, at, alias = pattern.removeprefix("models:/").partition("@")
    if not name or "/" in name or (at and not alias):
        raise UsageError(
            f"{pattern!r} is no pattern of registered models",
            fix="write NAME-GLOB@ALIAS, as in 'vision-*@candidate', or NAME-GLOB for the newest version of each",
        )
    return name, alias


def read_policies(path: Path) -> list[PolicyFile]:
    """The policies of a folder, or the one of a file.

    Raises:
        PolicyError: One of them is broken: a fleet without it would leave models out that nobody misses.
        UsageError: There is none.
    """
    if not path.is_dir():
        file = policy_file(path)
        return [PolicyFile(Path(file), load_policy(file))]
    files = PolicyFolder(path).files()
    if broken := [file for file in files if file.problem]:
        raise PolicyError(
            f"{len(broken)} of {len(files)} policies {'is' if len(broken) == 1 else 'are'} broken",
            fix=f"compile-stage lint {shlex.join(str(file.path) for file in broken)}",
            where=str(path),
            code=Code.USAGE,  # of each file, `lint` says its own
            problems=tuple(line for file in broken for line in file.mistakes or (f"{file.path}: {file.problem}",)),
        )
    held = [file for file in files if file.policy is not None]
    if not held:
        raise UsageError("the folder holds no policy with targets", where=str(path), fix="name another with -p")
    return held


def select(registry: Any, pattern: str, policies: list[PolicyFile], skipped: Skipped) -> Iterator[PlannedJob]:
    """The jobs of a fleet, as the registry gives out its versions: each version under each policy that is meant for it.

    Args:
        skipped: Counts what is left out.

    Raises:
        UsageError: Two policies would move one alias to what they make of one model.
        RegistryError: The registry can't be searched.
    """
    name, alias = split_pattern(pattern)
    tags = _common_tags([file.policy for file in policies if file.policy is not None])
    for version in registry.search(name, alias, tags):
        if version.published:
            skipped.published += 1
            continue
        meant = _meant_for(registry, policies, version)
        if not meant:
            skipped.without_policy += 1
        for file in meant:
            if file.policy is not None:
                yield _job(version, file.policy, file.path)


def _meant_for(registry: Any, policies: list[PolicyFile], version: RegisteredVersion) -> list[PolicyFile]:
    """The policies that are meant for a version. Where its flavor can't be read (its files are gone, say), those too
    that name flavors and take in all else of it: the job's run says what is wrong, and no other job hears of it."""
    meant, known = list[PolicyFile](), list[PolicyFile]()
    for file in policies:
        if file.policy is None:
            continue
        try:
            if not applies(file.policy, version, lambda: str(registry.flavor(version.uri))):
                continue
            known.append(file)
        except CompileStageError:  # the flavor is asked for last, so the rest takes the version in
            pass
        meant.append(file)
    _demand_apart(version, known)
    return meant


def _job(version: RegisteredVersion, policy: Policy, path: Path) -> PlannedJob:
    return PlannedJob(
        uri=version.uri,
        name=version.name,
        version=version.version,
        policy=policy.name,
        policy_path=str(path.absolute()),
        policy_digest=policy.digest,
        targets=tuple((one.target.name, one.target.required) for one in policy.targets),
        owner=version.owner or policy.owner,
        location=version.location,
    )


def _common_tags(policies: list[Policy]) -> dict[str, str]:
    """The tags that all of them demand, which the server can look for."""
    first, *others = (set(policy.applies_to.tags.items()) for policy in policies)
    return dict(first.intersection(*others))


def _demand_apart(version: RegisteredVersion, meant: list[PolicyFile]) -> None:
    seen: dict[tuple[str, str], PolicyFile] = {}
    for file in meant:
        policy = file.policy
        if policy is None:
            continue
        for target in policy.targets:
            if not target.alias:
                continue
            other = seen.setdefault((policy.publish_name, target.alias), file)
            if other is not file and other.policy is not None:
                raise UsageError(
                    f"{version.uri}: the policies {other.policy.name!r} ({other.path.name}) and {policy.name!r} "
                    f"({file.path.name}) both move the alias {target.alias!r} of "
                    f"{policy.publish_name.replace('{model}', version.name)!r}",
                    fix="narrow the applies_to of one, or give it another publish.name or promote.alias",
                )
