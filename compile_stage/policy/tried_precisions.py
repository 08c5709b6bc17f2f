"""Which precisions a target tries: a policy may hold limits for more."""

from __future__ import annotations

from compile_stage.core.capabilities import SOURCE_PRECISION
from compile_stage.policy.nodes import Node


def tried_precisions(tree: Node, target: str) -> tuple[str, ...]:
    """Those that the target names, each once, and fp32, which is tried whether or not it is named."""
    named = [str(node.value) for node in tree.elements("targets", target, "precisions")]
    return tuple(dict.fromkeys([*named, SOURCE_PRECISION]))
