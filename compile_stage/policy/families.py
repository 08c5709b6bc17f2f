"""Targets that are published together, as variants in one version: what they must have in common."""

from __future__ import annotations

from collections.abc import Iterator

from compile_stage.core.error_codes import Code
from compile_stage.policy.nodes import Node, Path, Problem, show_path

# One alias, one comparison with the incumbent; and latencies that can be compared: of the same batches and shapes.
_IN_COMMON = ("promote", "batch_sizes", "shapes")


def published_as(tree: Node, target: str) -> str:
    """The name of a target's family, or its own where it has none."""
    node = tree.get("targets", target, "family")
    return node.value if node is not None and isinstance(node.value, str) else target


def family_problems(tree: Node) -> Iterator[Problem]:
    """A family that is called like a target, and variants that differ in what one version can have only once."""
    first: dict[str, str] = {}
    names = [name for name, _ in tree.items("targets")]
    for name in names:
        node = tree.get("targets", name, "family")
        family = published_as(tree, name)
        if node is None or node.value is None:
            continue
        path: Path = ("targets", name, "family")
        if family in names:
            wrong = f"{family!r} is a target already"
            yield Problem(node.place, show_path(path), wrong, "a name that no target has", code=Code.WRONG_NAME)
        other = first.setdefault(family, name)
        for key in _IN_COMMON if other != name else ():
            mine, theirs = tree.get("targets", name, key), tree.get("targets", other, key)
            if mine is not None and theirs is not None and mine.plain() != theirs.plain():
                here = show_path(("targets", name, key))
                wrong = f"differs from that of {other}, which is published in the same version (family {family})"
                allowed = f"the same {key} for all variants of a family"
                yield Problem(mine.place, here, wrong, allowed, code=Code.WRONG_VALUE)
