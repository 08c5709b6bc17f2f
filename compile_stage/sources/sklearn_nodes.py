"""What our converters for skl2onnx write into its graph."""

from __future__ import annotations

from typing import Any


def add_node(scope: Any, container: Any, kind: str, *taken: str, made: str = "", **attributes: Any) -> str:
    """Write a node, and give the name of its output.

    Args:
        scope, container: As skl2onnx hands them to a converter.
        kind: The operator.
        taken: Names of its inputs.
        made: Name of its output; a new one when it is empty.
        attributes: The operator's.
    """
    made = made or str(scope.get_unique_variable_name(kind.lower()))
    container.add_node(kind, list(taken), made, name=scope.get_unique_operator_name(kind), **attributes)
    return made
