"""The one place that knows the versions of the policy language."""

from __future__ import annotations

from compile_stage.core.error_codes import Code
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.nodes import Node, Place, Problem

API_VERSION = "compile-stage/v1"
KIND = "OptimizationPolicy"
# A later version adds itself here, with a function that turns a tree of the version before into its own.
READABLE = (API_VERSION,)


def check_version(tree: Node) -> list[Problem]:
    """What is wrong with a file's `apiVersion` and `kind`. The file is looked at all the same, as the
    current version, so that its other mistakes are reported too."""
    problems = []
    for key, readable, what in (
        ("apiVersion", READABLE, "version"),
        ("kind", (KIND,), "kind of document"),
    ):
        node = tree.get(key)
        expected = " or ".join(readable)
        if node is None:
            problems.append(
                Problem(
                    Place(tree.place.file, 1, 1),
                    key,
                    "is missing",
                    f"write `{key}: {expected}`",
                    code=Code.UNKNOWN_VERSION,
                )
            )
        elif node.value not in readable:
            message = f"{node.text or node.value!r} is not a {what} that this release reads"
            near = did_you_mean(str(node.value), readable)
            problems.append(Problem(node.place, key, message, f"it reads {expected}", near, code=Code.UNKNOWN_VERSION))
    return problems
