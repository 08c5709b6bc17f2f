"""Rows that a network reads alone are computed alone, with the same answers; all others are left as they are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compile_stage.graph_rewrites import early_selection
from compile_stage.precision.onnx_graph import read_shapes
from tests.graph_rewrites.running import answer, operators

TOKENS, WIDTH = 9, 6


def graph(
    nodes: Sequence[onnx.NodeProto],
    select: onnx.NodeProto,
    *,
    tokens: int | str = TOKENS,
    weights: dict[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    """`x` [n, tokens, width] times a square weight is `rows`, then these nodes up to `last`, then a selection of `last`
    into `y`."""
    random = np.random.default_rng(0)
    arrays = {
        "w": random.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "first": np.array(0), "one": np.array([1]), "zero": np.array([0]), "end": np.array([2**63 - 1]),
    } | (weights or {})  # fmt: skip
    made = [helper.make_node("MatMul", ["x", "w"], ["rows"]), *nodes, select]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", tokens, WIDTH])]
    answers = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    return helper.make_model(
        helper.make_graph(made, "rows", given, answers, tensors),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )


def gather(place: str = "first", of: str = "last", into: str = "y") -> onnx.NodeProto:
    return helper.make_node("Gather", [of, place], [into], axis=1)


def node(kind: str, *given: str, into: str = "last", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(given), [into], **attributes)


def moved(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The rewritten graph, which answers as before; None where nothing was found."""
    after = onnx.ModelProto.FromString(model.SerializeToString())
    if not early_selection.rewrite(after):
        assert after == model, "what is not rewritten is left as it was"
        return None
    given = {"x": np.random.default_rng(1).standard_normal((3, TOKENS, WIDTH)).astype(np.float32)}
    np.testing.assert_allclose(answer(after, given), answer(model, given), atol=1e-5, rtol=1e-5)
    return after


def rows_of(model: onnx.ModelProto, name: str, axis: int = 1) -> Any:
    return read_shapes(model)[name][axis]


ROWWISE = {
    "elementwise": [node("Relu", "rows")],
    "residual": [node("Add", "rows", "x")],
    "scale-of-columns": [node("Mul", "rows", "scale")],
    "scale-of-rows": [node("Mul", "rows", "of_rows")],
    "softmax": [node("Softmax", "rows", axis=-1)],
    "norm": [node("LayerNormalization", "rows", "scale", "scale", axis=-1)],
    "mean": [node("ReduceMean", "rows", "minus_one", into="mean"), node("Sub", "rows", "mean")],
    "columns": [node("Slice", "rows", "one", "end", "minus_one")],
    "heads": [
        node("Reshape", "rows", "heads", into="split"),
        node("Transpose", "split", into="heads_first", perm=[0, 2, 1, 3]),
        node("Softmax", "heads_first", into="weights"),
        node("Transpose", "weights", into="heads_last", perm=[0, 2, 1, 3]),
        node("Reshape", "heads_last", "merged"),
    ],
    "zeros-copy-the-batch": [node("Reshape", "rows", "zeros", into="split"), node("Reshape", "split", "merged")],
}
WEIGHTS = {
    "scale": np.linspace(0.5, 2, WIDTH, dtype=np.float32),
    "of_rows": np.linspace(0.5, 2, TOKENS, dtype=np.float32)[:, None],
    "minus_one": np.array([-1]),
    "heads": np.array([-1, TOKENS, 2, WIDTH // 2]),
    "merged": np.array([-1, TOKENS, WIDTH]),
    "zeros": np.array([0, 0, 2, WIDTH // 2]),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_what_handles_rows_one_by_one_lets_a_selection_through(name: str) -> None:
    """Broken: another row is read, or all rows are computed for the one that is."""
    after = moved(graph(ROWWISE[name], gather(), weights=WEIGHTS))
    assert after is not None
    assert rows_of(after, "rows") == 1
    assert operators(after)[0] == "Gather", "the first thing that is done is the selection"


OTHERWISE = {
    "over-the-rows": [node("Softmax", "rows", axis=1)],
    "norm-over-all": [node("LayerNormalization", "rows", "whole", axis=1)],
    "mean-of-the-rows": [node("ReduceMean", "rows", "one", into="mean"), node("Sub", "rows", "mean")],
    "cumulative": [node("CumSum", "rows", "first_axis")],
    "rows-become-columns": [node("Transpose", "rows", perm=[0, 2, 1])],
    "rows-are-merged": [node("Reshape", "rows", "flat", into="all"), node("Reshape", "all", "merged")],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_where_rows_need_each_other_nothing_moves(name: str) -> None:
    """Broken: an answer is made of rows that were not computed."""
    weights = WEIGHTS | {
        "whole": np.ones((TOKENS, WIDTH), np.float32), "first_axis": np.array(1), "flat": np.array([-1, WIDTH])
    }  # fmt: skip
    assert moved(graph(OTHERWISE[name], gather(), weights=weights)) is None


def test_an_operator_that_is_not_onnx_s_own_is_not_known() -> None:
    """Broken: somebody's own Relu, which looks at its neighbours, is taken for ONNX's."""
    made = graph([node("Relu", "rows")], gather())
    made.graph.node[1].domain = "com.example"
    assert early_selection.rewrite(made) == 0


SLICES = {
    "first-two": (0, 2, 2),
    "last": (-1, 2**63 - 1, 1),
    "third": (2, 3, 1),
    "before-the-last": (-2, -1, 1),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_move_as_well(name: str) -> None:
    """Broken: `x[:, -1:]` costs as much as all of x."""
    start, end, count = SLICES[name]
    weights = {"start": np.array([start]), "stop": np.array([end])}
    after = moved(
        graph([node("Relu", "rows")], node("Slice", "last", "start", "stop", "one", into="y"), weights=weights)
    )
    assert after is not None
    assert rows_of(after, "rows") == count


@pytest.mark.parametrize(("start", "end"), [(0, 8), (0, 2**63 - 1), (1, -1), (20, 22)])
def test_most_rows_or_none_are_left(start: int, end: int) -> None:
    """Broken: a graph is changed for nothing, or by a slice whose length nobody knows."""
    weights = {"start": np.array([start]), "stop": np.array([end])}
    select = node("Slice", "last", "start", "stop", "one", into="y")
    made = helper.make_node("Relu", ["rows"], ["last"])
    assert moved(graph([made], select, weights=weights)) is None


def test_the_last_place_and_several_places() -> None:
    """Broken: a place that counts from the end is another row, or a list of places loses its axis."""
    last = moved(graph([node("Relu", "rows")], gather("minus"), weights={"minus": np.array(-1)}))
    assert last is not None
    assert rows_of(last, "rows") == 1
    several = moved(graph([node("Relu", "rows")], gather("some"), weights={"some": np.array([4, 0, 4])}))
    assert several is not None
    assert rows_of(several, "rows") == 3


def test_a_length_that_is_free_is_no_obstacle() -> None:
    """Broken: a text classifier, whose texts are of any length, computes its last layer for all tokens."""
    shape = [
        node("Shape", "x", into="lengths"), node("Slice", "lengths", "zero", "two", into="outer"),
        node("Concat", "outer", "sizes", into="heads", axis=0), node("Reshape", "rows", "heads", into="split"),
        node("Relu", "split", into="active"), node("Reshape", "active", "lengths"),
    ]  # fmt: skip
    weights = {"two": np.array([2]), "sizes": np.array([2, WIDTH // 2])}
    after = moved(graph(shape, gather(), tokens="tokens", weights=weights))
    assert after is not None
    given = {"x": np.ones((2, 4, WIDTH), np.float32)}
    shown = onnx.ModelProto.FromString(after.SerializeToString())
    shown.graph.output.insert(0, helper.make_tensor_value_info("rows", TensorProto.FLOAT, None))
    assert answer(shown, given).shape == (2, 1, WIDTH)


def test_what_others_read_is_computed_in_full() -> None:
    """Broken: a network that also answers with its last hidden state has one row of it."""
    shown = graph([node("Relu", "rows")], gather(), outputs=("y", "last"))
    assert early_selection.rewrite(shown) == 0
    other = [node("Relu", "rows"), node("ReduceMax", "last", into="largest")]
    assert moved(graph(other, gather(), outputs=("y", "largest"))) is None
    two = [node("Relu", "rows"), gather("one_place", into="second")]
    assert moved(graph(two, gather(), outputs=("y", "second"), weights={"one_place": np.array(1)})) is None


def test_two_that_read_the_same_row_share_it() -> None:
    """Broken: a second head for the same token ends it."""
    two = [node("Relu", "rows"), gather(into="second")]
    after = moved(graph(two, gather(), outputs=("y", "second")))
    assert after is not None
    assert rows_of(after, "rows") == 1
    assert operators(after).count("Squeeze") == 2


def test_a_graph_with_a_cache_stays() -> None:
    """Broken: a language model loses the attention operator that writes into its cache."""
    made = graph([node("Relu", "rows")], gather())
    made.graph.input.append(helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, ["n", 2, "p", 4]))
    assert early_selection.rewrite(made) == 0


def test_without_a_product_nothing_is_gained() -> None:
    """Broken: graphs of lookups are rewritten, and people wonder why."""
    made = graph([node("Relu", "x")], gather())
    assert moved(made) is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_the_graph_is_the_answers_stay(data: st.DataObject) -> None:
    """Broken: some order of operators, broadcasts and reshapes lets a selection through that needs other rows."""
    nodes: list[onnx.NodeProto] = []
    shapes = {"rows": (TOKENS, WIDTH), "x": (TOKENS, WIDTH)}  # without the batch

    def put(kind: str, *names: str, shape: tuple[int, ...], **attributes: Any) -> None:
        into = f"t{len(nodes)}"
        nodes.append(node(kind, *names, into=into, **attributes))
        shapes[into] = shape

    for _ in range(data.draw(st.integers(1, 9))):
        kind = data.draw(st.sampled_from(["Relu", "Softmax", "ReduceMean", "MatMul", "Add", "Transpose", "Reshape"]))
        name = data.draw(st.sampled_from(sorted(shapes)))
        shape = shapes[name]
        if kind == "Relu":
            put("Relu", name, shape=shape)
        elif kind == "Softmax":
            put("Softmax", name, shape=shape, axis=data.draw(st.integers(1, len(shape))))
        elif kind == "ReduceMean":
            axis = data.draw(st.integers(1, len(shape)))
            put("ReduceMean", name, f"axis{axis}", shape=(*shape[: axis - 1], 1, *shape[axis:]))
        elif kind == "MatMul" and shape[-1] == WIDTH:
            put("MatMul", name, "w", shape=shape)
        elif kind == "Add":
            fits = [o for o, own in shapes.items() if len(own) == len(shape) and _broadcasts(own, shape)]
            put("Add", name, other := data.draw(st.sampled_from(fits)), shape=tuple(map(max, shape, shapes[other])))
        elif kind == "Transpose":
            order = data.draw(st.permutations(range(1, len(shape) + 1)))
            put("Transpose", name, shape=tuple(shape[at - 1] for at in order), perm=[0, *order])
        elif kind == "Reshape" and shape in ((TOKENS, WIDTH), (TOKENS, 2, WIDTH // 2)):
            split = len(shape) == 2
            put("Reshape", name, "heads" if split else "merged", shape=(TOKENS, 2, 3) if split else (TOKENS, WIDTH))
    last = data.draw(st.sampled_from(list(shapes)[-2:]))
    axis = data.draw(st.integers(1, len(shapes[last])))
    place = data.draw(st.integers(-shapes[last][axis - 1], shapes[last][axis - 1] - 1))
    weights = WEIGHTS | {"place": np.array(place)} | {f"axis{at}": np.array([at]) for at in (1, 2, 3)}
    select = helper.make_node("Gather", [last, "place"], ["y"], axis=axis)
    moved(graph(nodes, select, weights=weights))


def _broadcasts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(own == theirs or 1 in (own, theirs) for own, theirs in zip(one, other, strict=True))


def test_the_last_layer_of_a_transformer_as_pytorch_exports_it() -> None:
    """Broken: the exporter writes it otherwise, and each classifier computes its last layer for nothing."""
    torch = pytest.importorskip("torch", reason="PyTorch's exporter writes the graph")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (torch.nn.Linear(8, 8) for _ in range(4))
            self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            heads = [part(x).reshape(len(x), -1, 2, 4).transpose(1, 2) for part in (self.q, self.k, self.v)]
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
            x = self.norm(x + self.out(mixed))
            return self.head((x + self.down(torch.nn.functional.gelu(self.up(x))))[:, 0])

    x, network = torch.randn(2, TOKENS, 8), Network().eval()
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")},)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            network, (x,), dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=sizes
        ).model_proto
    given = {"x": x.numpy()}
    expected = answer(exported, given)
    before = _rows_of_products(exported, given)
    assert early_selection.rewrite(exported) == 1
    onnx.checker.check_model(exported, full_check=True)
    np.testing.assert_allclose(answer(exported, given), expected, atol=1e-6)
    after = _rows_of_products(exported, given)
    assert before.count(TOKENS) == 8
    assert after.count(TOKENS) == 2, "keys and values alone are needed of all tokens"
    assert after.count(1) == 6


def _rows_of_products(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[int]:
    """How many rows each MatMul answers with."""
    names = [made.output[0] for made in model.graph.node if made.op_type == "MatMul"]
    rows = []
    for name in names:
        shown = onnx.ModelProto.FromString(model.SerializeToString())
        shown.graph.output.insert(0, helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        rows.append(int(answer(shown, given).shape[-2]))
    return rows
