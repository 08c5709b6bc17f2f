"""The sizes for which what was made of a PyTorch program is not the original.

`torch.export` follows one way through a forward, and notes what it took for true of sizes: ranges, and guards such as
`L['ids'].size()[1] % 2 == 0`. Most matter to the trace alone. So the original and what was made of its program are
run at sizes that break each, and compared.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import tree_size
from compile_stage.core.errors import UsageError
from compile_stage.serving.size_conditions import SizeCondition

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.records import PortableModel

_Place = tuple[str, int]
"""An input and its axis."""

_Point = tuple[dict[_Place, int], frozenset[str]]
"""The size of each axis, and the conditions that these sizes break."""

_SIZE = re.compile(r"L((?:\[[^\]]+\])+)\.size\(\)\[(\d+)\]")
_LARGEST = 2**22  # elements of an input that is made to compare with
_TRIES = 4  # sizes that break a condition; and as many pairs of sizes
_PAIRED = 40  # values of a size that is moved together with another
_LONGEST_S = 60.0  # for all of them; after that no condition is found harmless
_MOST_BYTES = 500_000_000  # of a graph that is loaded beside the original; the program stands for a larger one
_TOLERANCE = 3e-4  # of the original's largest answer: another way through a forward is further off


@dataclass(frozen=True)
class Compared:
    """What was found.

    Attributes:
        needed: Conditions without which an answer is not the original's.
        harmless: Those that can be broken: all that was tried, and that what is needed leaves, was answered alike.
    """

    needed: tuple[SizeCondition, ...] = ()
    harmless: frozenset[str] = frozenset()


def guards(program: ExportedProgram, names: Sequence[str]) -> list[SizeCondition]:
    """The guards of the trace, with `names` for the program's inputs. Not those of computations with fractions."""
    own = dict(zip(map(str, program.graph_signature.user_inputs), names, strict=True))

    def named(found: re.Match[str]) -> str:
        path = [part.strip("'\"") for part in re.findall(r"\[([^\]]+)\]", found[1])]
        name = own.get("_".join(path)) or own.get("_".join(path[1:]))
        return f"size({json.dumps(name)}, {found[2]})" if name else found[0]

    conditions = []
    for guard in getattr(program, "_guards_code", ()):
        try:
            conditions.append(SizeCondition(_SIZE.sub(named, guard)))
        except UsageError:
            continue
    return conditions


def compare(
    model: PortableModel,
    program: ExportedProgram,
    original: Callable[..., Any],
    conditions: Sequence[SizeCondition],
) -> Compared:
    """Which of the conditions the model needs.

    Args:
        original: Takes the arguments of the program.
        conditions: Of two that explain the same, the first is taken.
    """
    if program.example_inputs is None:
        return Compared()
    space = _Space(model, program)
    points = _points(space, conditions)
    if not points:
        return Compared()
    run = _Runs(model, program, original)
    if not run.alike({}):  # what differs already is for validation to say
        return Compared()
    outcomes: list[tuple[bool | None, frozenset[str]]] = []
    ends = time.monotonic() + _LONGEST_S
    for sizes, broken in points:
        if time.monotonic() >= ends:
            return Compared(_needed(conditions, outcomes))
        outcomes.append((run.alike(sizes), broken))
    needed = _needed(conditions, outcomes)
    # Where the height alone is moved, one condition on the area explains all that is answered otherwise, and hides
    # that the height has one of its own. So two are moved together, to where all holds that is known to be needed.
    counted: Counter[str] = Counter()
    for sizes, broken in _pairs(space, conditions):
        if broken & {each.text for each in needed} or all(counted[text] >= _TRIES for text in broken):
            continue
        if time.monotonic() >= ends:
            return Compared(needed)
        counted.update(broken)
        outcomes.append((run.alike(sizes), broken))
        if outcomes[-1][0] is False:
            needed = _needed(conditions, outcomes)
    kept = {condition.text for condition in needed}
    right = [broken for alike, broken in outcomes if alike]
    doubtful = set(chain.from_iterable(broken for alike, broken in outcomes if not alike and not broken & kept))
    return Compared(needed, frozenset(chain.from_iterable(right)) - doubtful)


def _needed(
    conditions: Sequence[SizeCondition], outcomes: Sequence[tuple[bool | None, frozenset[str]]]
) -> tuple[SizeCondition, ...]:
    """Conditions of which one at least is broken wherever the answers differed.

    Args:
        outcomes: Whether both answered alike (None: neither answered), and what was broken there.
    """
    right = [broken for alike, broken in outcomes if alike]
    left = [broken for alike, broken in outcomes if alike is False]
    needed: list[SizeCondition] = []
    while left:
        # Of those that explain what is left, the one that refuses the least that was answered rightly.
        chosen = min(
            (condition for condition in conditions if any(condition.text in broken for broken in left)),
            key=lambda each: (
                sum(each.text in broken for broken in right),
                -sum(each.text in broken for broken in left),
            ),
        )
        needed.append(chosen)
        left = [broken for broken in left if chosen.text not in broken]
    return tuple(needed)


class _Space:
    """The sizes that a program takes.

    Attributes:
        known: The example's size of each symbol.
        symbols: Those that can be moved.
        batches: The other ones. Validation tries smaller batches.
    """

    def __init__(self, model: PortableModel, program: ExportedProgram) -> None:
        import torch

        nodes = {node.name: node for node in program.graph.nodes}
        leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
        self._expressions: dict[_Place, Any] = {}
        self.known: dict[Any, int] = {}
        first: set[Any] = set()
        for spec, name, leaf in zip(model.signature.inputs, program.graph_signature.user_inputs, leaves, strict=True):
            for axis, (size, own) in enumerate(zip(nodes[str(name)].meta["val"].shape, leaf.shape, strict=True)):
                expression = self._expressions[spec.name, axis] = size if isinstance(size, int) else size.node.expr
                if getattr(expression, "is_Symbol", False):
                    self.known[expression] = int(own)
                    if axis == 0:
                        first.add(expression)
        self.symbols, self.batches = sorted(set(self.known) - first, key=str), sorted(first, key=str)

    def at(self, moved: Mapping[Any, int]) -> dict[_Place, int] | None:
        """Each axis's size where these symbols have other values than the example's; None where one would be none, or
        an input too large to compare with."""
        values = {**self.known, **moved}
        sizes = {
            place: expression if isinstance(expression, int) else int(expression.subs(values))
            for place, expression in self._expressions.items()
        }
        elements: dict[str, int] = {}
        for (name, _), size in sizes.items():
            elements[name] = elements.get(name, 1) * size
        return sizes if min(sizes.values()) > 0 and max(elements.values()) <= _LARGEST else None


def _points(space: _Space, conditions: Sequence[SizeCondition]) -> list[_Point]:
    """Sizes to compare at, one open size being moved away from the example's at a time, and the conditions that each
    breaks: of each condition the nearest of these sizes, and the farthest. Of the batch larger ones that a condition
    names: a request may have any number of rows, and what is published answers it in parts."""
    found: dict[tuple[int, ...], _Point] = {}
    for symbol in (*space.symbols, *space.batches):
        own, named = space.known[symbol], _constants(conditions)
        if symbol in space.batches:
            tried = {value for value in named if value > own}
        else:
            tried = {*range(1, min(2 * own + 3, 66)), *_near(own), *named}
        at = [{symbol: value} for value in sorted(tried, key=lambda value: (abs(value - own), value))]
        points = _broken(space, at, conditions)
        for condition in conditions:
            breaking = [point for point in points if condition.text in point[1]]
            for sizes, broken in [*breaking[: _TRIES - 1], *breaking[-1:]]:
                found[tuple(sizes.values())] = sizes, broken
    return list(found.values())


def _pairs(space: _Space, conditions: Sequence[SizeCondition]) -> list[_Point]:
    """Sizes where two open ones are not the example's, and the conditions that each breaks; the nearest first."""
    values = {}
    for symbol, own in space.known.items():
        tried = {1, 2, *_near(own), *_constants(conditions)} - {own}
        values[symbol] = sorted(tried, key=lambda value: (abs(math.log(value / own)), value))[:_PAIRED]
    at = [
        {first: one, second: other}
        for first, second in combinations(space.symbols, 2)
        for one, other in product(values[first], values[second])
    ]
    at.sort(key=lambda moved: sum(abs(math.log(value / space.known[symbol])) for symbol, value in moved.items()))
    return _broken(space, at, conditions)


def _broken(space: _Space, at: Iterable[Mapping[Any, int]], conditions: Sequence[SizeCondition]) -> list[_Point]:
    """Of these sizes those that can be, and break a condition."""
    found = []
    for moved in at:
        sizes = space.at(moved)
        broken = frozenset(each.text for each in conditions if not each.holds(sizes)) if sizes is not None else None
        if sizes is not None and broken:
            found.append((sizes, broken))
    return found


def _near(own: int) -> set[int]:
    """Sizes beside this one, its multiples and its parts."""
    sizes = {own + step for step in (-2, -1, 0, 1, 2)} | {own * k for k in (2, 3, 4)} | {own // k for k in (2, 3, 4)}
    return {size for size in sizes if size > 0}


def _constants(conditions: Sequence[SizeCondition]) -> set[int]:
    """Numbers in the conditions, and those beside them."""
    axes = re.compile(r"size\((\"[^\"]*\"), \d+\)")
    numbers = [
        node.value
        for condition in conditions
        for node in ast.walk(ast.parse(axes.sub("size", condition.text), mode="eval"))
        if isinstance(node, ast.Constant) and type(node.value) is int
    ]
    return {
        value for number in numbers for value in (number - 1, number, number + 1, number + 2, 2 * number) if value > 0
    }


class _Runs:
    """The original beside what was made of it."""

    def __init__(self, model: PortableModel, program: ExportedProgram, original: Callable[..., Any]) -> None:
        import torch

        self._tree = torch.utils._pytree
        self._original, self._names = original, [spec.name for spec in model.signature.inputs]
        self._leaves = self._tree.tree_leaves(program.example_inputs)
        self._in_spec = program.call_spec.in_spec
        self._outputs = [spec.name for spec in model.signature.outputs]
        self._session: Any = None
        if model.form == "onnx" and tree_size(Path(model.path).parent) <= _MOST_BYTES:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4  # what it can't run is an answer here
            with suppress(Exception):  # a graph for other backends alone: the program stands for it
                self._session = onnxruntime.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        self._module: Any = program.module(check_guards=False) if self._session is None else None

    def alike(self, sizes: Mapping[_Place, int]) -> bool | None:
        """Whether both answer alike at these sizes, the example's where none is given; None where neither answers."""
        tensors = [self._resized(leaf, name, sizes) for name, leaf in zip(self._names, self._leaves, strict=True)]
        expected, given = self._of(self._call_original, tensors), self._of(self._call_made, tensors)
        if expected is None or given is None:
            return None if expected is given else False
        return len(expected) == len(given) and all(map(_close, expected, given))

    @staticmethod
    def _of(call: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any] | None:
        try:
            return call([tensor.clone() for tensor in tensors])
        except Exception:  # noqa: BLE001 - a forward, or a runtime, that refuses a size raises what it likes
            return None

    def _call_original(self, tensors: Sequence[Any]) -> list[Any]:
        return self._called(self._original, tensors)

    def _call_made(self, tensors: Sequence[Any]) -> list[Any]:
        if self._session is None:
            return self._called(self._module, tensors)
        wanted = {value.name for value in self._session.get_inputs()}
        feed = {name: each.numpy() for name, each in zip(self._names, tensors, strict=True) if name in wanted}
        answers: list[Any] = self._session.run(self._outputs, feed)
        return answers

    def _called(self, module: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
        import torch

        args, kwargs = self._tree.tree_unflatten(list(tensors), self._in_spec)
        with torch.no_grad():
            answers = self._tree.tree_leaves(module(*args, **kwargs))
        return [answer.numpy(force=True) for answer in answers]

    @staticmethod
    def _resized(tensor: Any, name: str, sizes: Mapping[_Place, int]) -> Any:
        """The example's values, repeated or cut. An example of one value throughout, which many ways through a forward
        answer alike, gets others: floats between 0 and 1, integers as they are and 0."""
        import torch

        tensor = tensor.detach()
        for axis, own in enumerate(tensor.shape):
            size = sizes.get((name, axis), own)
            if size != own:
                tensor = tensor.index_select(axis, torch.arange(size) % own)
        if tensor.ndim > 1 and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
            drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
            drawn[..., 0] = 0.1  # a mask that hides all of a row has answers of its own
            return drawn.to(tensor.dtype) if tensor.is_floating_point() else tensor * (drawn < 0.7)
        return tensor.contiguous()


def _close(expected: Any, given: Any) -> bool:
    import numpy as np

    if expected.shape != given.shape or expected.dtype.kind != given.dtype.kind:
        return False
    if expected.dtype.kind != "f":
        return bool((expected == given).all())
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(given, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))
