"""Policy files → `core.records.Policy`, or every mistake in them at once."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import PolicyError
from compile_stage.core.findings import Finding
from compile_stage.core.records import Policy
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.checks import check_whole
from compile_stage.policy.convert import to_policy
from compile_stage.policy.data_files import data_warnings
from compile_stage.policy.layers import read_layers, resolve, restored_values
from compile_stage.policy.messages import check_schema
from compile_stage.policy.nodes import Node, Problem
from compile_stage.policy.schema import PolicyDocument
from compile_stage.policy.weak_limits import weak_limits

_INHERITED = re.compile(r'targets\.("[^"]*"|[^.\[]+)\.')
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Resolved:
    """A policy read and checked.

    Attributes:
        tree: Every option with its value and place, the targets' sections resolved.
        document: The same, typed; None when there are problems.
        files: Every file that had a say, in layer order.
        problems: In the order of the files and of their lines.
        targets_known: All targets could be read, so that a name that is none of them is a mistake.
    """

    tree: Node
    document: PolicyDocument | None
    files: tuple[str, ...]
    problems: tuple[Problem, ...]
    targets_known: bool = True


def _today() -> date:
    """The day by which waivers are judged: in UTC, as a run judges them, so that a policy says the same on every
    machine."""
    return datetime.now(UTC).date()


def load_policy(
    path: PathLike,
    sets: Sequence[str] = (),
    targets: Sequence[str] = (),
    *,
    today: date | None = None,
    base: bool = False,
    roots: Sequence[PathLike] = (),
) -> Policy:
    """Read a policy with all its layers.

    Args:
        path: The policy file.
        sets: `key=value` each, laid over everything: `targets.edge.threads=4`, `tolerances.int8.cosine=0.98`.
        targets: Glob patterns; only targets that match one are kept. The policy's digest does not depend on them.
        today: The day by which waivers are judged; the current day in UTC when None.
        base: The file may be one that others extend, and name no target.
        roots: Folders beside the policy's own root that `extends` may name files of.

    Raises:
        PolicyError: With one located line in `problems` for each mistake.
    """
    return policy_of(path, read_policy(path, sets, today=today, base=base, roots=roots), targets, today=today)


def policy_of(path: PathLike, resolved: Resolved, targets: Sequence[str] = (), *, today: date | None = None) -> Policy:
    """`load_policy` of a policy that was read."""
    names = [name for name, _ in resolved.tree.items("targets")]
    kept, unmatched = match_targets(names, targets)
    problems: list[Problem | str] = [*resolved.problems, *(unmatched if resolved.targets_known else ())]
    if problems or resolved.document is None:
        raise as_error(path, problems)
    policy = to_policy(resolved.document, resolved.tree, resolved.files)
    weak = _in_order(list(weak_limits(resolved.tree, today or _today())), resolved.files)
    return replace(
        policy,
        targets=tuple(t for t in policy.targets if t.target.name in kept),
        warnings=tuple(map(str, weak)),
    )


def lint(paths: Iterable[PathLike], *, today: date | None = None, roots: Sequence[PathLike] = ()) -> list[str]:
    """Every problem of these policies as `file:line:column: path: what is wrong; what is allowed; did you mean ...`;
    empty when all is well."""
    messages: dict[str, None] = {}  # a base that several extend is reported once
    for path in paths:
        resolved = read_policy(path, today=today, base=True, roots=roots)
        messages |= {str(problem): None for problem in resolved.problems}
    return list(messages)


def findings(
    path: PathLike, sets: Sequence[str] = (), roots: Sequence[PathLike] = (), *, today: date | None = None
) -> list[Finding]:
    """Every mistake of a policy, or, where it has none, its warnings: data files of this machine that hold too few
    samples, or no labels, and limits that can't fail. In the order of the files and of their lines."""
    day = today or _today()
    mistakes = read_policy(path, sets, today=day, base=True, roots=roots).problems
    if mistakes:
        return [problem.as_finding("error") for problem in mistakes]
    layers = read_layers(path, sets, roots)
    tree = resolve(layers)
    weak = _in_order([*weak_limits(tree, day), *restored_values(layers)], layers.names)
    return [problem.as_finding("warning") for problem in (*data_warnings(tree), *weak)]


def read_policy(
    path: PathLike,
    sets: Sequence[str] = (),
    *,
    today: date | None = None,
    base: bool = False,
    roots: Sequence[PathLike] = (),
) -> Resolved:
    """Read, resolve and check; problems are collected, not raised."""
    layers = read_layers(path, sets, roots)
    tree = resolve(layers)
    problems = list(layers.problems)
    document = None
    # What an unreadable file would have said is not missing.
    if not layers.incomplete:
        # What was cut out of a section is missing from what its targets inherit, too.
        forgiven = {
            *layers.cut,
            *(("targets", name, *cut) for name, _ in tree.items("targets") for cut in layers.cut),
        }
        schema_problems, _, document = check_schema(tree, whole=True, forgiven=forgiven)
        problems += schema_problems
        problems += check_whole(tree, today or _today(), forgiven)
        if not base and not tree.items("targets") and not any(path[0] == "targets" for path in layers.cut):
            place = tree.place_of(("targets",)) if layers.files.get("targets") else tree.place
            wrong_and_allowed = (
                "the policy names no target",
                "say where it must run, such as targets: {cpu-server: {device: cpu}}",
            )
            problems.append(Problem(place, "targets", *wrong_and_allowed, code=Code.NO_TARGET))
    ordered = _in_order(problems, layers.names)
    return Resolved(
        tree=tree,
        document=None if ordered else document,
        files=layers.names,
        problems=ordered,
        targets_known=not layers.incomplete and not any(path[0] == "targets" and len(path) < 3 for path in layers.cut),
    )


def match_targets(names: Sequence[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the names that match a pattern, in order; a problem for each pattern that matches none). No patterns match
    all."""
    if not patterns:
        return list(names), []
    problems = []
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = "" if set(pattern) & set("*?[") else did_you_mean(pattern, list(names))
            meant = f"; did you mean {near}?" if near else ""
            problems.append(
                f"--target {pattern}: matches no target of the policy; one of: {', '.join(names) or 'none'}{meant}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)], problems


def as_error(path: PathLike, problems: Sequence[Problem | str]) -> PolicyError:
    """One error that carries every problem. A text is one about the command line."""
    count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    listed = "\n".join(f"  {problem}" for problem in problems)
    return PolicyError(
        f"the policy {os.fspath(path)} has {count}:\n{listed}",
        problems=tuple(map(str, problems)),
        codes=tuple(problem.code if isinstance(problem, Problem) else Code.UNKNOWN_NAME for problem in problems),
    )


def _in_order(problems: Sequence[Problem], files: Sequence[str]) -> tuple[Problem, ...]:
    """By file in layer order, then by line; the same mistake is said once, though every target inherits it."""
    shortest_last = sorted(problems, key=lambda p: -len(p.path))
    once = {(p.place, _INHERITED.sub("", p.path), p.wrong): p for p in shortest_last}
    rank = {file: index for index, file in enumerate(files)}
    return tuple(sorted(once.values(), key=lambda p: (rank.get(p.place.file, len(rank)), p.place, p.path)))
