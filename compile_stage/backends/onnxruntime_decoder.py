"""Decoders in the operators that ONNX Runtime has for them: attention that knows its cache, and what stands around it.

An exporter writes the attention of a layer as some sixty standard operators, most of which compute shapes. At each
token they cost more than the products. Here each attention becomes one `com.microsoft.GroupQueryAttention`, which also
appends to the cache, in place where past and present are the same memory; rotary positions become
`com.microsoft.RotaryEmbedding`; and a reciprocal root becomes a division, so that the runtime's own fusion knows an RMS
norm. Where it is known how many places a text has, the cosines and sines of all of them become a table, and attention
turns queries and keys by it; and products of one input become one (`onnxruntime_products`).

GroupQueryAttention looks at all tokens before, or at the last ones in a window, and at no padding. Whether a graph does
so is asked twice. The mask's part of the graph may hold one number that could be a window's length, and none where it
looks at all; and both graphs have to answer alike, at random, with and without a cache, and where tokens leave the
window. What neither tells is how rows that begin with padding are answered: no session of ours sends any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.backends.onnxruntime_attention import Attention, DecoderGraph, swaps_heads
from compile_stage.backends.onnxruntime_products import merge
from compile_stage.core.generation import INPUT_IDS, LOGITS, MASK, POSITIONS, cache_specs, present_of, token_inputs
from compile_stage.core.tensors import Signature
from compile_stage.precision.wiring import (
    copy_message,
    drop_unused_weights,
    reads,
    replace_nodes,
)

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from compile_stage.core.tensors import Array

TOLERANCE = 1e-4
"""Largest deviation, of an output's largest magnitude; that of graph rewrites. Other orders of the same sums differ by
1e-6 to 1e-5."""

COMPARED = ((2, 0, 9), (1, 7, 3), (2, 9, 1))
"""Rows, tokens in the cache and new tokens of the calls that are compared: prompts, a prompt's second part, one token.
The operator takes a second part of one row only."""

LARGEST_TABLE_BYTES = 2**26
"""Of cosines and sines: those of 131,072 places and heads of 64 take half of it."""

LARGEST_CACHE_BYTES = 2**30
"""Of a call that is compared: one in which tokens leave a window has a cache as long as the window."""


class Decoder:
    """A graph with a cache, whose attentions are found when it is made.

    Args:
        model: Is rewritten by `fuse`. Weights outside of its file need not be read.
        signature: Of the graph.
    """

    def __init__(self, model: ModelProto, signature: Signature) -> None:
        self._model, self._graph, self._signature = model, model.graph, signature
        self._found = DecoderGraph(model, signature)
        self.attentions = self._found.attentions
        self._names = self._found.names
        self._new: list[NodeProto] = []
        self._halves: dict[str, str] = {}  # cosines or sines → the half that RotaryEmbedding takes
        self._tables: dict[str, str] = {}  # cosines or sines → those of all places
        self._constants: dict[tuple[int, ...], str] = {}

    @property
    def queries(self) -> tuple[str, ...]:
        """Tensors [batch, heads, tokens, size], whose shapes say how many heads there are."""
        return tuple(found.query for found in self.attentions)

    @property
    def compared(self) -> tuple[tuple[int, int, int], ...]:
        """Calls by which both graphs are compared, as `COMPARED`: also tokens of which one is the first to leave each
        window, and one behind a cache that is longer than it."""
        windows = sorted({found.window for found in self.attentions if found.window})
        around = (((1, max(0, window - 2), 5), (1, window + 5, 1)) for window in windows)
        return (*COMPARED, *itertools.chain.from_iterable(around))

    @property
    def angles(self) -> list[tuple[str, str]]:
        """Tensors [batch, tokens, size] of cosines and sines by which both queries and keys of an attention turn."""
        pairs = [self._angles(found) for found in self.attentions]
        return list(dict.fromkeys(one for one in pairs if one is not None))

    def _angles(self, found: Attention) -> tuple[str, str] | None:
        query, key = self._found.turned(found.query), self._found.turned(found.key)
        return query[1:] if query is not None and key is not None and query[1:] == key[1:] else None

    def fuse(self, heads: Sequence[int], tables: Mapping[tuple[str, str], tuple[Array, Array]]) -> None:
        """Rewrite the graph in place.

        Args:
            heads: Of the queries, one number for each of `attentions`.
            tables: Of `angles`: cosines and sines [places, size / 2], which attention itself turns by. Those that are
                not there are computed at each call.
        """
        from onnx import helper

        replaced = {name for found in self.attentions for name in (found.answer, *map(present_of, found.past))}
        self._divide_by_roots()
        lengths = self._lengths()
        sizes = {spec.name: spec.shape for spec in cache_specs(self._signature)}
        for found, count in zip(self.attentions, heads, strict=True):
            _, key_heads, _, size = sizes[found.past[0]]
            settings = {"num_heads": count, "kv_num_heads": int(key_heads), "scale": found.scale}
            queries, turned = [found.query, found.key], list[str]()
            if (angles := self._angles(found)) in tables and angles is not None:
                queries = [one[0] for name in queries if (one := self._found.turned(name)) is not None]
                turned = [self._table(name, of) for name, of in zip(angles, tables[angles], strict=True)]
                settings["do_rotary"] = 1
            inputs = [self._flat(name, int(size)) for name in (*queries, found.value)]
            outputs = [found.answer, *map(present_of, found.past)]
            if found.cap:
                settings["softcap"] = found.cap
            if found.window:
                settings["local_window_size"] = found.window
            self._add("GroupQueryAttention", [*inputs, *found.past, *lengths, *turned], outputs, **settings)
        kept = [node for node in self._found.nodes if not replaced.intersection(node.output)]
        replace_nodes(self._graph, _in_order([*kept, *self._new], self._found.kept))
        drop_unused_weights(self._graph)
        del self._graph.value_info[:]
        if not any(opset.domain == "com.microsoft" for opset in self._model.opset_import):
            self._model.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    def _divide_by_roots(self) -> None:
        """x · Reciprocal(Sqrt(y)) as x / Sqrt(y)."""
        for node in self._found.nodes:
            if not self._found.is_op(node, "Mul"):
                continue
            for at in (0, 1):
                inverse = self._found.made_by.get(node.input[at])
                if inverse is None or not self._found.is_op(inverse, "Reciprocal"):
                    continue
                if self._found.is_op(self._found.made_by.get(inverse.input[0]), "Sqrt"):
                    x = node.input[1 - at]
                    node.op_type = "Div"
                    node.input[0], node.input[1] = x, inverse.input[0]
                    break

    def _lengths(self) -> tuple[str, str]:
        """Of each row its last place, int32 [batch], and the number of all tokens, int32 []."""
        from onnx import TensorProto

        one = self._integers(1)
        last = self._add("Sub", [*self._add("ReduceSum", [MASK, one], ["tokens_of_row"], keepdims=0), one], ["last"])
        (count,) = self._add("Shape", [MASK], ["all_tokens"], start=1, end=2)
        (count,) = self._add("Squeeze", [count], ["all_tokens_number"])
        (rows,) = self._add("Cast", last, ["last_int32"], to=TensorProto.INT32)
        (total,) = self._add("Cast", [count], ["all_tokens_int32"], to=TensorProto.INT32)
        return rows, total

    def _flat(self, name: str, size: int) -> str:
        """[batch, heads, tokens, size] as [batch, tokens, heads · size], turned by positions where it was."""
        rotated = self._found.rotated(name)
        if rotated is not None:
            before, cosines, sines = rotated
            inputs = [self._flat(before, size), self._places(), *(self._half(one, size) for one in (cosines, sines))]
            return self._add("RotaryEmbedding", inputs, [f"{name}_turned"])[0]
        made = self._found.made_by.get(name)
        if made is not None and swaps_heads(made):
            split = self._found.made_by.get(made.input[0])
            if split is not None and self._found.is_op(split, "Reshape"):
                return str(split.input[0])
            (turned,) = (made.input[0],)
        else:
            (turned,) = self._add("Transpose", [name], [f"{name}_by_token"], perm=[0, 2, 1, 3])
        return self._add("Reshape", [turned, self._integers(0, 0, -1)], [f"{name}_flat"])[0]

    def _half(self, name: str, size: int) -> str:
        """[batch, tokens, size], whose halves are alike, as [batch · tokens, size / 2]."""
        if name not in self._halves:
            ends = [self._integers(0), self._integers(size // 2), self._integers(-1)]
            (half,) = self._add("Slice", [name, *ends], [f"{name}_half"])
            (flat,) = self._add("Reshape", [half, self._integers(-1, size // 2)], [f"{name}_rows"])
            self._halves[name] = flat
        return self._halves[name]

    def _table(self, name: str, values: Array) -> str:
        """A constant [places, size / 2], once in the graph."""
        from onnx import numpy_helper

        if name not in self._tables:
            self._tables[name] = self._names.fresh(f"{name}_of_places")
            self._graph.initializer.append(numpy_helper.from_array(values, self._tables[name]))
        return self._tables[name]

    def _places(self) -> str:
        """Which row of the halves belongs to which token, int64 [batch, tokens]."""
        if INPUT_IDS not in self._halves:
            from onnx import helper

            ends = []
            for number in (0, 1):
                ends.append(self._names.fresh(f"number_{number}"))
                self._graph.initializer.append(helper.make_tensor(ends[-1], 7, [], [number]))
            (count,) = self._add("Size", [INPUT_IDS], ["new_tokens"])
            (row,) = self._add("Range", [ends[0], count, ends[1]], ["places_in_a_row"])
            (shape,) = self._add("Shape", [INPUT_IDS], ["shape_of_tokens"])
            (self._halves[INPUT_IDS],) = self._add("Reshape", [row, shape], ["places"])
        return self._halves[INPUT_IDS]

    # --------------------------------------------------------------------------------------------------------- helpers

    def _add(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **settings: Any) -> list[str]:
        """A new node; names of tensors that a graph's output or a node has already are those that it replaces."""
        from onnx import helper

        own = op_type in ("GroupQueryAttention", "RotaryEmbedding")
        names = list(outputs) if op_type == "GroupQueryAttention" else [self._names.fresh(name) for name in outputs]
        node = helper.make_node(op_type, list(inputs), names, domain="com.microsoft" if own else "", **settings)
        node.name = self._names.fresh(f"fused_{names[0]}")
        self._new.append(node)
        return names

    def _integers(self, *numbers: int) -> str:
        """A constant of integers, int64 [n]."""
        from onnx import TensorProto, helper

        if numbers not in self._constants:
            name = self._names.fresh("integers_" + "_".join(map(str, numbers)).replace("-", "minus_"))
            self._graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers))
            self._constants[numbers] = name
        return self._constants[numbers]


def fuse(path: Path, signature: Signature, places: int | None, run: Any) -> tuple[str | None, tuple[str, ...]]:
    """Rewrite a graph's file in place, if it is a decoder whose attentions are all known.

    Args:
        path: The graph; weights outside of its file stay as they are.
        places: Tokens that a text has at most; None where nobody knows.
        run: (file, names of outputs, inputs by name) → arrays; float products must be computed in float.

    Returns:
        Why the graph is as it was, None where it was rewritten; and what else was done to it, in words.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    decoder = Decoder(model, signature)
    if not decoder.attentions:
        return "not every layer's attention is one that ONNX Runtime's operator computes", ()
    compared = decoder.compared
    if max(_cache_bytes(signature, call) for call in compared) > LARGEST_CACHE_BYTES:
        return "its window is too long to look at what happens beyond it", ()
    asked, now = path.with_name("asked.onnx"), path.with_name("fused.onnx")
    names, calls = [spec.name for spec in signature.outputs], list(_calls(signature, compared))

    def take(tables: Tables, *, merges: bool) -> tuple[str | None, tuple[str, ...]]:
        """Rewrite a copy, and put it in the graph's place where it answers alike; or why not."""
        copy = copy_message(model)
        Decoder(copy, signature).fuse(heads, tables)
        merged = merge(copy) if merges else (0, 0)
        onnx.save_model(copy, now)
        reason = _differs(compared, names, before, run(now, names, calls))
        if reason is None:
            now.replace(path)
        return reason, _said(merged, places if tables else None)

    try:
        onnx.save_model(_probed(model, decoder.queries), asked)
        before = run(asked, [*names, *decoder.queries], calls)
        heads = [answer.shape[1] for answer in before[0][len(names) :]]
        tables: Tables = {}
        with suppress(Exception):
            tables = _tables(model, decoder.angles, places, asked, run)
        for more in (tables, {}) if tables else ({},):
            with suppress(Exception):  # the operator takes no table for heads of this size, or this runtime none at all
                reason, said = take(more, merges=True)
                if reason is None:
                    return None, said
        return take({}, merges=False)[0], ()
    except Exception as error:  # noqa: BLE001 - a graph that this runtime can't run so stays as it is
        return f"ONNX Runtime can't run it with its own attention: {' '.join(str(error).split())[:200]}", ()
    finally:
        asked.unlink(missing_ok=True)
        now.unlink(missing_ok=True)


def _probed(model: ModelProto, queries: Sequence[str]) -> ModelProto:
    """The graph with queries among its outputs, whose shapes say how many heads there are."""
    from onnx import TensorProto, helper

    probed = copy_message(model)
    known = {value.name for value in probed.graph.output}
    for name in dict.fromkeys(queries):
        if name not in known:
            probed.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return probed


def _said(merged: tuple[int, int], places: int | None) -> tuple[str, ...]:
    products, into = merged
    said = [f"{products} products are computed as {into}: those of one input have their weights side by side"]
    table = [f"rotary positions come from a table of {places} places"]
    return (*(said if into else ()), *(table if places else ()))


Tables = Mapping[tuple[str, str], tuple["Array", "Array"]]
"""Names of cosines and sines → [places, size / 2] of each."""


def _tables(model: ModelProto, pairs: Sequence[tuple[str, str]], places: int | None, file: Path, run: Any) -> Tables:
    """Cosines and sines of all places, as the graph computes them of positions alone; none where it needs more than
    these, or where those of a place depend on how long the text is."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    if not names or places is None:
        return {}
    part = copy_message(model)
    replace_nodes(part.graph, _in_order(model.graph.node, set(names)))
    drop_unused_weights(part.graph)
    known = {one.name for one in part.graph.initializer} | {name for node in part.graph.node for name in node.output}
    if {name for node in part.graph.node for name in reads(node)} - known != {POSITIONS}:
        return {}
    del part.graph.output[:], part.graph.value_info[:]
    part.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    for value in [value for value in part.graph.input if value.name != POSITIONS]:
        part.graph.input.remove(value)
    onnx.save_model(part, file)
    alone = sorted({min(1, places - 1), places // 2, places - 1})
    single = run(file, names, [{POSITIONS: np.array([[place]], np.int64)} for place in alone])
    if sum(places * of.nbytes // 2 for of in single[0]) > LARGEST_TABLE_BYTES:
        return {}
    (every,) = run(file, names, [{POSITIONS: np.arange(places, dtype=np.int64)[None]}])
    for place, one in zip(alone, single, strict=True):
        if not all(np.allclose(of[:, place : place + 1], at, 0, 1e-5) for of, at in zip(every, one, strict=True)):
            return {}
    halves = [np.ascontiguousarray(of[0, :, : of.shape[2] // 2], np.float32) for of in every]
    by_name = dict(zip(names, halves, strict=True))
    return {(cosines, sines): (by_name[cosines], by_name[sines]) for cosines, sines in pairs}


def _cache_bytes(signature: Signature, call: tuple[int, int, int]) -> int:
    rows, past, _ = call
    return sum(4 * rows * int(spec.shape[1]) * past * int(spec.shape[3]) for spec in cache_specs(signature))


def _calls(signature: Signature, compared: Sequence[tuple[int, int, int]]) -> Iterator[dict[str, Array]]:
    """Inputs at random: the tokens, and a cache with so many before."""
    import numpy as np

    random = np.random.default_rng(0)
    vocabulary = next(int(spec.shape[-1]) for spec in signature.outputs if spec.name == LOGITS)
    for rows, past, tokens in compared:
        ids = random.integers(0, vocabulary, (rows, tokens))
        cache = {
            spec.name: random.standard_normal((rows, int(spec.shape[1]), past, int(spec.shape[3])), np.float32)
            for spec in cache_specs(signature)
        }
        yield {**token_inputs(signature, ids, past), **cache}


def _differs(
    compared: Sequence[tuple[int, int, int]],
    names: Sequence[str],
    before: Sequence[Sequence[Array]],
    after: Sequence[Sequence[Array]],
) -> str | None:
    """The first answer that is another, in words; None where there is none."""
    for (_, past, tokens), was_all, now_all in zip(compared, before, after, strict=True):
        for name, was, now in zip(names, was_all, now_all, strict=False):
            place = f"of {tokens} tokens behind {past}, the output {name!r}"
            if was.shape != now.shape:
                return f"{place} has the shape {now.shape}, not {was.shape}"
            largest, away = float(abs(was).max(initial=0)), float(abs(was.astype("float64") - now).max(initial=0))
            if not away <= TOLERANCE * max(largest, 1e-6):
                return f"{place} differs by {away:.3g}, of at most {largest:.3g}"
    return None


def _in_order(nodes: Sequence[NodeProto], wanted: set[str]) -> list[NodeProto]:
    """The nodes that something wanted depends on, each behind those that it reads."""
    made_by = {name: node for node in nodes for name in node.output}
    placed: dict[int, NodeProto] = {}
    for target in sorted(wanted):
        left = [made_by[target]] if target in made_by else []
        while left:
            node = left[-1]
            missing = [made_by[name] for name in sorted(reads(node)) if name in made_by]
            missing = [one for one in missing if id(one) not in placed]
            if missing and id(node) not in placed:
                left += missing
            else:
                placed.setdefault(id(left.pop()), node)
    return list(placed.values())


def is_offered(signature: Signature, precision: str, asked: Mapping[str, Any]) -> bool:
    """Graphs with a cache whose products are comparable: where activations are rounded to integers, the least
    difference moves a whole step."""
    known = any(spec.name == MASK for spec in signature.inputs) and bool(cache_specs(signature))
    return known and precision in ("fp32", "int8-dynamic", "int4") and bool(asked.get("fused_attention", True))
