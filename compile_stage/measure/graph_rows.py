"""Which rows of a batch each element of a graph's outputs can depend on: whether an answer depends on its own row
alone, so that a request may be answered in parts (`serving.batches`).

What a few calls show is not enough: a branch that is taken where the largest value of a batch passes a limit, or a
scale that has its effect there, is seen in no call whose samples stay below it. So the graph itself is read. Every
element of every tensor gets the set of rows that it may depend on, as bits: bit i is row i of the batch. Layouts need
no rule that way: a batch that is folded into another axis and unfolded again has its bits where its elements are.

The sets are never too small. Where an operator's result can't be followed (its shape depends on values, or it is not
among those of `measure.operator_rows`), nothing is shown of the graph. What an operator does for the size of the batch
alone, such as the number of each row in it, is no dependence on another row: the calls of `measure.behaviour` see that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.measure.known_tensors import Known, NotFollowedError, reduced
from compile_stage.measure.operator_rows import named, partly_known, rows_of, run_node, size_of
from compile_stage.measure.word_rows import follow_words, is_of_words
from compile_stage.plugin_support import onnx_weights

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TypeProto

    from compile_stage.core.tensors import Array

ROWS = 8
"""Rows of the batch that is followed, at most: as many as an element has bits."""

_MOST_NODES = 50_000
"""Nodes that are followed, each turn of a loop counted anew: some tens of seconds at most."""

_MOST_VALUES = 1 << 16
"""Elements of what is computed from constants, since a shape or an index may come of it."""

_LOOP_SEEN = "its {} node {!r} goes on or ends by values of the batch"


def find_mixed_rows(path: str, rows: int, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why an answer of this ONNX graph is not shown to depend on its own row alone; empty where it is shown.

    Args:
        rows: Of the batch that is followed; at most `ROWS` are.
        shapes: Input name → shape of one row's value, for inputs whose axes behind the batch are open.
    """
    from onnx.inliner import inline_local_functions

    model = onnx_weights.load(path)
    if model.functions:
        model = inline_local_functions(model)
    try:
        return _Graph(model).look(min(rows, ROWS), shapes)
    except NotFollowedError as error:
        return str(error)


class _Graph:
    def __init__(self, model: ModelProto) -> None:
        self._model = model
        self._imports = list(model.opset_import)
        self._versions: dict[str, int] = {one.domain: one.version for one in model.opset_import}
        self._left = _MOST_NODES

    def look(self, rows: int, shapes: Mapping[str, Sequence[int]]) -> str:
        graph = self._model.graph
        constants = {tensor.name for tensor in graph.initializer}
        known: dict[str, Known] = {}
        for value in graph.input:
            if value.name in constants:
                continue
            kind = value.type.tensor_type
            size = [axis.dim_value for axis in kind.shape.dim]
            if not size:
                raise NotFollowedError(f"its input {value.name!r} has no axis of rows")
            if size[0]:  # a batch of a fixed size
                rows = size[0]
            given = shapes.get(value.name, ())
            behind = [n or (given[i] if i < len(given) else 0) for i, n in enumerate(size[1:])]
            if not all(behind):
                raise NotFollowedError(f"the size of its input {value.name!r} is not known")
            if rows > ROWS:
                raise NotFollowedError(f"its batch of {rows} rows is fixed, and larger than what is followed")
            bits = (1 << np.arange(rows)).astype(np.uint8).reshape(rows, *[1] * len(behind))
            known[value.name] = Known((rows, *behind), kind.elem_type, bits)
        if rows == 1:
            return ""
        self._follow(graph, known)
        return next(filter(None, (_refuse_output(value.name, known[value.name], rows) for value in graph.output)), "")

    def _follow(self, graph: GraphProto, known: dict[str, Known]) -> None:
        """With everything that the graph computes in `known`."""
        for tensor in graph.initializer:
            known[tensor.name] = Known.weight(tensor)
        for node in graph.node:
            self._count()
            made = zip(node.output, self._outputs(node, known), strict=False)
            known.update({name: value for name, value in made if name})

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise NotFollowedError("it has more nodes, or turns of loops, than are followed")

    def _outputs(self, node: NodeProto, known: dict[str, Known]) -> Sequence[Known]:
        if node.domain in ("", "ai.onnx") and node.op_type in ("If", "Loop", "Scan"):
            return {"If": self._if, "Loop": self._loop, "Scan": self._scan}[node.op_type](node, known)
        inputs = [known[name] if name else None for name in node.input]
        if is_of_words(node, inputs):
            return [follow_words(node, inputs)]
        shapes = self._shapes(node, inputs)
        made = self._computed(node, inputs, shapes)
        if made is not None:
            return made
        try:
            bits = rows_of(node, inputs, [shape for shape, _ in shapes], self._version(node))
        except (IndexError, KeyError, ValueError) as error:  # of a graph that can't run at this size
            raise NotFollowedError(f"what its {named(node)} does with a batch of this size can't be said") from error
        why = next((one.why for one in inputs if one is not None and one.why), "")
        found = []
        for (shape, kind), rows in zip(shapes, bits, strict=False):
            mixes = bool(np.any(rows & (rows - (rows > 0))))
            partly = partly_known(node, inputs, self._version(node)) if rows.any() else None
            found.append(Known(shape, kind, rows, why=(why or named(node)) if mixes else "", partly=partly))
        return found

    # --------------------------------------------------------------------------------------- shapes and constants

    def _shapes(self, node: NodeProto, inputs: Sequence[Known | None]) -> list[tuple[tuple[int, ...], int]]:
        """Shape and element type of each output, of ONNX's own inference.

        Raises:
            NotFollowedError: It can't be said before values are known.
        """
        from onnx import defs, shape_inference

        types = {n: one.declared() for n, one in zip(node.input, inputs, strict=True) if one is not None}
        data = {n: one.tensor() for n, one in zip(node.input, inputs, strict=True) if one is not None and one.is_small}
        try:
            schema = defs.get_schema(node.op_type, self._version(node), "" if node.domain == "ai.onnx" else node.domain)
            found: Mapping[str, TypeProto] = shape_inference.infer_node_outputs(
                schema, node, types, {n: t for n, t in data.items() if t is not None}, opset_imports=self._imports
            )
        except Exception as error:
            raise NotFollowedError(f"its {named(node)} is not known to ONNX here") from error
        made: list[tuple[tuple[int, ...], int]] = []
        for name in node.output:
            kind = found[name].tensor_type if name in found and found[name].HasField("tensor_type") else None
            shape = None
            if kind is not None and kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
                shape = tuple(d.dim_value for d in kind.shape.dim)
            shape = size_of(node, inputs, made[0][0] if made else None) or shape
            if name and (kind is None or shape is None):
                raise NotFollowedError(f"the size of what its {named(node)} makes is known only when it runs")
            made.append((shape or (), kind.elem_type if kind is not None else 0))
        return made

    def _computed(
        self, node: NodeProto, inputs: Sequence[Known | None], shapes: Sequence[tuple[tuple[int, ...], int]]
    ) -> list[Known] | None:
        """The outputs of a node that depends on no row, with their values where these are few; None of any other."""
        if node.op_type in ("Shape", "Size") and inputs[0] is not None:  # of rows too, and without their values
            shape = inputs[0].shape
            ends = {one.name: one.i for one in node.attribute}
            size = shape[ends.get("start", 0) : ends.get("end", len(shape))]
            return [Known.of(np.asarray(size if node.op_type == "Shape" else np.prod(shape), np.int64))]
        if any(one is not None and one.rows.any() for one in inputs):
            return None
        values = [one.values() if one is not None else None for one in inputs]
        unknown = any(one is not None and v is None for one, v in zip(inputs, values, strict=True))
        if unknown or any(int(np.prod(shape)) > _MOST_VALUES for shape, _ in shapes):
            return None
        answers = self._evaluated(node, values)
        if answers is None:
            return None
        left = iter(answers)
        return [
            Known.of(np.asarray(next(left) if name else 0), kind)
            for name, (_, kind) in zip(node.output, shapes, strict=True)
        ]

    def _evaluated(self, node: NodeProto, values: Sequence[Array | None]) -> list[Any] | None:
        if node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial"):
            return None
        try:
            return run_node(node, values, self._version(node))
        except Exception:  # noqa: BLE001 - whatever it raises for what it does not know: then the values stay unknown
            return None

    def _version(self, node: NodeProto) -> int:
        return self._versions.get("" if node.domain == "ai.onnx" else node.domain, 1)

    # ------------------------------------------------------------------------------------------- control flow

    def _if(self, node: NodeProto, known: dict[str, Known]) -> list[Known]:
        condition = known[node.input[0]]
        if condition.rows.any():
            raise NotFollowedError(f"its {named(node)} decides for all rows at once by values of the batch")
        chosen = condition.values()
        if chosen is None:
            raise NotFollowedError(f"which branch its {named(node)} takes is known only when it runs")
        branch = _graph_of(node, "then_branch" if bool(np.ravel(chosen)[0]) else "else_branch")
        return self._inner(branch, {}, known)

    def _inner(self, graph: GraphProto, given: Mapping[str, Known], known: Mapping[str, Known]) -> list[Known]:
        inside = {**known, **given}
        self._follow(graph, inside)
        return [inside[value.name] for value in graph.output]

    def _loop(self, node: NodeProto, known: dict[str, Known]) -> list[Known]:
        """Turn by turn, as often as it goes round."""
        body = _graph_of(node, "body")
        most, condition = (known[name] if name else None for name in node.input[:2])
        state = [known[name] for name in node.input[2:]]
        for one in (most, condition):
            if one is not None and one.rows.any():
                raise NotFollowedError(_LOOP_SEEN.format(node.op_type, node.name))
        turns = None if most is None else most.values()
        if most is not None and turns is None:
            raise NotFollowedError(f"how often its {named(node)} goes round is known only when it runs")
        stacked: list[list[Known]] = []
        turn, goes_on = 0, condition is None or _is_true(condition, node)
        while goes_on and (turns is None or turn < int(np.ravel(turns)[0])):
            self._count()
            counted = Known.of(np.asarray(turn, np.int64))
            going = Known.of(np.ones((), np.bool_))
            names = [value.name for value in body.input]
            made = self._inner(body, dict(zip(names, [counted, going, *state], strict=True)), known)
            if made[0].rows.any():
                raise NotFollowedError(_LOOP_SEEN.format(node.op_type, node.name))
            goes_on, turn = _is_true(made[0], node), turn + 1
            stacked.append(made[1 + len(state) :])
            state = made[1 : 1 + len(state)]
        return [*state, *_stacked(node, stacked, [0] * (len(node.output) - len(state)))]

    def _scan(self, node: NodeProto, known: dict[str, Known]) -> list[Known]:
        body = _graph_of(node, "body")
        attributes = {one.name: one for one in node.attribute}
        count = attributes["num_scan_inputs"].i

        def listed(name: str, length: int) -> list[int]:
            return list(attributes[name].ints) if name in attributes else [0] * length

        state = [known[name] for name in node.input[: len(node.input) - count]]
        scanned = [known[name] for name in node.input[len(node.input) - count :]]
        axes, backwards = listed("scan_input_axes", count), listed("scan_input_directions", count)
        outputs = len(node.output) - len(state)
        stacked: list[list[Known]] = []
        turns = scanned[0].shape[axes[0]]
        for turn in range(turns):
            places = [turns - 1 - turn if back else turn for back in backwards]
            taken = [one.at(axis, place) for one, axis, place in zip(scanned, axes, places, strict=True)]
            names = [value.name for value in body.input]
            made = self._inner(body, dict(zip(names, [*state, *taken], strict=True)), known)
            stacked.append(made[len(state) :])
            state = made[: len(state)]
        found = _stacked(node, stacked, listed("scan_output_axes", outputs))
        for number, back in enumerate(listed("scan_output_directions", outputs)):
            if back:
                axis = listed("scan_output_axes", outputs)[number]
                found[number] = found[number].flipped(axis)
        return [*state, *found]


def _is_true(condition: Known, node: NodeProto) -> bool:
    value = condition.values()
    if value is None:
        raise NotFollowedError(f"how often its {named(node)} goes round is known only when it runs")
    return bool(np.ravel(value)[0])


def _stacked(node: NodeProto, turns: Sequence[Sequence[Known]], axes: Sequence[int]) -> list[Known]:
    """The outputs of a loop that have one part of each turn."""
    if axes and not turns:
        raise NotFollowedError(f"its {named(node)} goes round no time")
    return [Known.stacked([made[number] for made in turns], axis) for number, axis in enumerate(axes)]


def _graph_of(node: NodeProto, name: str) -> GraphProto:
    graph: GraphProto = next(one.g for one in node.attribute if one.name == name)
    return graph


def _refuse_output(name: str, value: Known, rows: int) -> str:
    if not value.shape or value.shape[0] != rows:
        return f"its output {name!r} has not one row for each of the batch"
    bits = reduced(value.full_along(0), range(1, len(value.shape))).ravel()
    if value.why:
        return f"its {value.why} takes several rows together, and output {name!r} depends on that"
    if np.any(bits & ~(1 << np.arange(rows)).astype(np.uint8)):
        return f"output {name!r} has in the place of a row what comes from another row"
    return ""
