"""Where every resolved value of a policy comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date

from compile_stage.core.records import PolicyValue
from compile_stage.policy.load import Resolved, as_error, match_targets, read_policy
from compile_stage.policy.locks import locks_of
from compile_stage.policy.nodes import leaves, show_path
from compile_stage.policy.schema import OVERRIDABLE, PolicyDocument
from compile_stage.policy.tried_precisions import tried_precisions


def explain(
    path: str | os.PathLike[str],
    sets: Sequence[str] = (),
    target: str | None = None,
    *,
    today: date | None = None,
    roots: Sequence[str | os.PathLike[str]] = (),
) -> list[PolicyValue]:
    """Every resolved value with its origin. Sections that a target may override are listed as each target has them.
    Of precisions that a target does not try, only the limits that a policy file gives or locks are listed.

    Args:
        target: A name or a glob; only these targets' rows (beside the policy's own) are listed. None: all.
        roots: Folders beside the policy's own root that `extends` may name files of.

    Raises:
        PolicyError: The policy has mistakes, or no target matches.
    """
    return values_of(path, read_policy(path, sets, today=today, base=True, roots=roots), target)


def values_of(path: str | os.PathLike[str], resolved: Resolved, target: str | None = None) -> list[PolicyValue]:
    """`explain` of a policy that was read."""
    names = [name for name, _ in resolved.tree.items("targets")]
    kept, unmatched = match_targets(names, [target] if target is not None else [])
    if resolved.problems or unmatched:
        raise as_error(path, [*resolved.problems, *(unmatched if resolved.targets_known else ())])
    order = list(PolicyDocument.model_fields)
    rows, locks = [], locks_of(resolved.tree)
    tried = {name: tried_precisions(resolved.tree, name) for name in kept}
    for where, node in sorted(leaves(resolved.tree), key=lambda leaf: order.index(str(leaf[0][0]))):
        # A base for others may have no targets: its sections are shown as they are.
        if (where[0] in OVERRIDABLE and names) or (where[0] == "targets" and where[1:2] != () and where[1] not in kept):
            continue
        value = node.plain()
        value = value.isoformat() if isinstance(value, date) else value
        lock = next((lock.place.origin for lock in locks if lock.covers(where)), "")
        of_tolerance = where[0] == "targets" and where[2:3] == ("tolerances",) and len(where) > 3
        if of_tolerance and where[3] not in tried[str(where[1])] and node.place.is_shipped and not lock:
            continue
        rows.append(
            PolicyValue(
                path=show_path(where),
                value=value,
                origin=node.place.origin,
                is_default=node.place.is_shipped,
                locked_by=lock,
            )
        )
    return rows
