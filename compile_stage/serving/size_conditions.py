"""Conditions on sizes, such as `size("ids", 1) % 2 == 0`: what a manifest lists under `conditions`.

Vendored into every published model. They are arithmetic of whole numbers in Python's notation, with `min`, `max` and
`size(INPUT, AXIS)`. They are computed here, operator by operator, and never run as code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from compile_stage.core.errors import UsageError

_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPUTED: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CHOSEN: Mapping[str, Callable[..., int]] = {"min": min, "max": max}


class SizeCondition:
    """One condition.

    Args:
        text: As in a manifest.

    Raises:
        UsageError: It is no such condition.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sizes: set[tuple[str, int]] = set()
        """The input and axis of each size that it reads."""
        try:
            self._tree = ast.parse(text, mode="eval").body
            known = isinstance(self._tree, ast.Compare) and self._known(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            known = False
        if not known:
            raise UsageError(f"{text!r} is no condition on sizes", fix="publish the model again")

    def holds(self, sizes: Mapping[tuple[str, int], int]) -> bool:
        """Whether it holds for these sizes, by input and axis. One that divides by 0 does not. Raises KeyError where
        one of `self.sizes` is missing."""
        try:
            return bool(self._value(self._tree, sizes))
        except ZeroDivisionError:
            return False

    def _known(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return type(node.value) is int
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self._known(node.operand)
        if isinstance(node, ast.BinOp):
            return type(node.op) in _COMPUTED and self._known(node.left) and self._known(node.right)
        if isinstance(node, ast.Compare):
            return all(type(op) in _COMPARED for op in node.ops) and all(
                map(self._known, (node.left, *node.comparators))
            )
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords or not node.args:
            return False
        if node.func.id in _CHOSEN:
            return len(node.args) > 1 and all(map(self._known, node.args))
        given = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args]
        if node.func.id != "size" or [type(value) for value in given] != [str, int]:
            return False
        self.sizes.add(tuple(given))  # type: ignore[arg-type]  # a str and an int, as was just asked
        return True

    def _value(self, node: Any, sizes: Mapping[tuple[str, int], int]) -> Any:
        """The value of a tree that `_known` has accepted."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -self._value(node.operand, sizes)
        if isinstance(node, ast.BinOp):
            return _COMPUTED[type(node.op)](self._value(node.left, sizes), self._value(node.right, sizes))
        if isinstance(node, ast.Compare):
            values = [self._value(each, sizes) for each in (node.left, *node.comparators)]
            return all(
                _COMPARED[type(op)](left, right)
                for op, left, right in zip(node.ops, values[:-1], values[1:], strict=True)
            )
        if node.func.id in _CHOSEN:
            return _CHOSEN[node.func.id](*(self._value(argument, sizes) for argument in node.args))
        return sizes[node.args[0].value, node.args[1].value]
