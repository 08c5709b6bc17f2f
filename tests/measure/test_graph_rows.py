"""Which graphs are shown to answer each row by itself: a request to any other must not be answered in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from compile_stage.core.records import Gate
from compile_stage.measure.behaviour import LARGER, calls_to_compare, judge_calls, make_calls, parts_of
from compile_stage.measure.graph_rows import find_mixed_rows
from compile_stage.measure.samples import Samples
from compile_stage.serving.batches import ProvenBatches
from compile_stage.sources.session import SourceSession

LIMIT = "t = Constant<value_float=50.0>()"
IF = """
    c = Greater(m, t)
    y = If(c) <then_branch = over () => (float[N,4] a) { a = Mul(x, t) },
               else_branch = below () => (float[N,4] b) { b = Identity(x) }>
"""

MIXED = {
    "an If by the largest value of the batch": f"{LIMIT} m = ReduceMax<keepdims=0>(x) {IF}",
    "an If by the first row": f"{LIMIT} i = Constant<value_int=3>() f = Flatten<axis=0>(x) "
    f"m = Gather<axis=1>(f, i) m0 = Squeeze(m) {IF.replace('(m,', '(m0,')}",
    "a scale where any value passes a limit": f"{LIMIT} c = Greater(x, t) f = Cast<to=1>(c) "
    "m = ReduceMax<keepdims=0>(f) e = Exp(m) y = Mul(x, e)",
    "a loop that ends by the batch": f"""{LIMIT} n = Constant<value_int=10>() going = Constant<value = bool {{1}}>()
        y = Loop(n, going, x) <body = b (int64 i, bool c, float[N,4] v) => (bool c2, float[N,4] w) {{
            m = ReduceMax<keepdims=0>(v) c2 = Greater(m, t) w = Mul(v, m) }}>""",
    "columns that a shape of the batch is folded into": "s = Constant<value_ints=[4,-1]>() r = Reshape(x, s) "
    "q = Softmax<axis=1>(r) s4 = Constant<value_ints=[-1,4]>() y = Reshape(q, s4)",
    "products of each row with each other": "t = Transpose<perm=[1,0]>(x) s = MatMul(x, t) p = Relu(s) "
    "y = MatMul(p, x)",
    "a sum up to each row": "a = Constant<value_int=0>() y = CumSum(x, a)",
    "rows by their size": "n = Shape<start=0,end=1>(x) y, i = TopK<axis=0>(x, n)",
    "rows backwards": """s = Constant<value_ints=[-1]>() e = Constant<value_ints=[-99]>() a = Constant<value_ints=[0]>()
        y = Slice(x, s, e, a, s)""",
    "a shape that depends on values": f"{LIMIT} c = Greater(x, t) z = NonZero(c) n = Shape<start=1,end=2>(z) "
    "f = Cast<to=1>(n) y = Add(x, f)",
}
APART = {
    "a limit of each row": f"{LIMIT} a = Constant<value_ints=[1]>() m = ReduceMax<keepdims=1>(x, a) r = Max(m, t) "
    "y = Div(x, r)",
    "rows folded and unfolded": "s = Constant<value_ints=[-1,2]>() r = Reshape(x, s) q = Softmax<axis=1>(r) "
    "s4 = Constant<value_ints=[-1,4]>() y = Reshape(q, s4)",
    "an If by a constant": f"{LIMIT} m = Constant<value_float=60.0>() {IF}",
    "a loop over columns": """n = Constant<value_int=4>() one = Constant<value_ints=[1]>()
        s = ReduceSum<keepdims=1>(x, one)
        w, parts = Loop(n, , s) <body = b (int64 i, bool c, float[N,1] v) => (bool c2, float[N,1] w, float[N] p) {
            c2 = Identity(c) k = Gather<axis=1>(x, i) p = Identity(k) u = Unsqueeze(k, one) w = Add(v, u) }>
        y = Transpose<perm=[1,0]>(parts)""",
    "a scan over columns": """columns = Transpose<perm=[1,0]>(x) i = Constant<value_int=0>() z = Gather<axis=1>(x, i)
        last, all = Scan<num_scan_inputs=1, body = b (float[N] s, float[N] v) => (float[N] w, float[N] o) {
            w = Add(s, v) o = Tanh(w) }>(z, columns)
        y = Transpose<perm=[1,0]>(all)""",
    "the last value of each row, by its number": """n = Shape<start=0,end=1>(x) n0 = Squeeze(n)
        zero = Constant<value_int=0>() step = Constant<value_int=1>() r = Range(zero, n0, step)
        c = ArgMax<axis=1,keepdims=0>(x)
        last = Constant<value_ints=[-1]>() a = Unsqueeze(r, last) b = Unsqueeze(c, last) at = Concat<axis=1>(a, b)
        v = GatherND(x, at) u = Unsqueeze(v, last) y = Mul(x, u)""",
    "an einsum of each row": 'y = Einsum<equation="nc,nc->nc">(x, x)',
}


def written(body: str, folder: Path) -> str:
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> m (float[N,4] x) => (float[N,4] y) {{ {body} }}'
    )
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return str(folder / "model.onnx")


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_a_graph_that_takes_rows_together_is_not_shown_to_keep_them_apart(body: str, tmp_path: Path) -> None:
    """Broken: a large request is cut, and answered wrongly where values pass a limit that no sample passes."""
    assert find_mixed_rows(written(body, tmp_path), 10, {}) != ""


@pytest.mark.parametrize("body", APART.values(), ids=APART)
def test_a_graph_that_keeps_rows_apart_is_shown_to(body: str, tmp_path: Path) -> None:
    """Broken: a model that answers each row by itself refuses requests of sizes that were not proven."""
    assert find_mixed_rows(written(body, tmp_path), 10, {}) == ""


def test_the_rows_that_are_found_are_those_that_change_an_answer(tmp_path: Path) -> None:
    """Broken: the rule of an operator leaves out a row, and another's value changes an answer that was said to be
    apart."""
    import onnxruntime

    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) + 60
    for name, body in {**MIXED, **APART}.items():
        path = written(body, tmp_path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (before,) = session.run(None, {"x": rows})
        other = rows.copy()
        other[5] *= -30
        (after,) = session.run(None, {"x": other})
        others = [row for row in range(8) if row != 5]
        changed = before.shape != after.shape or not np.allclose(before[others], after[others])
        assert not changed or find_mixed_rows(path, 10, {}), name


def test_why_names_the_node_and_the_published_model_refuses_parts(tmp_path: Path) -> None:
    """Broken: a reader is not told what in the model keeps requests from being cut."""
    import onnxruntime

    path = written(MIXED["a scale where any value passes a limit"], tmp_path)
    why = find_mixed_rows(path, 10, {})
    assert why == "its ReduceMax that makes 'm' takes several rows together, and output 'y' depends on that"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    from compile_stage.sources.graph import signature_of

    opened = SourceSession(signature_of(onnx.load(path)), lambda arrays: session.run(None, {"x": arrays[0]}))
    samples = Samples(20, {"x": np.random.default_rng(2).normal(size=(20, 4)).astype(np.float32)}, None)
    calls = calls_to_compare(20, (1, 8), 0)
    original = make_calls(opened, samples, calls, tmp_path / "original")
    own = make_calls(opened, samples, parts_of(calls, (1, 8)), tmp_path / "own")
    gates = (Gate(metric="max_rel", limit=0.01, direction="at_most"),)

    def larger(mixed: str) -> tuple[tuple[int, ...], str]:
        check = next(c for c in judge_calls(gates, calls, own, original, 0, mixed) if c.gate.metric == LARGER)
        return tuple(check.batch_sizes), check.reason

    assert larger("") == ((10,), "a batch of 10, run in parts, is right")
    sizes, reason = larger(why)
    assert sizes == ()
    assert "refuses batch sizes that were not proven" in reason
    assert why in reason
    assert not ProvenBatches((1, 8), splits=bool(sizes)).splits


def test_a_batch_that_is_not_the_first_axis_or_fixed_at_one(tmp_path: Path) -> None:
    """Broken: rows of time would be cut as rows of a batch; a model of one row would refuse two."""
    text = '<ir_version: 9, opset_import: ["" : 18]> m (float[{}] x) => (float[{}] y) {{ y = Softmax<axis=0>(x) }}'
    for shape, mixed in (("1, 4", False), ("N, 4", True), ("3, 4", True)):
        onnx.save(parser.parse_model(text.format(shape, shape)), tmp_path / "model.onnx")
        assert bool(find_mixed_rows(str(tmp_path / "model.onnx"), 10, {})) is mixed


@pytest.mark.filterwarnings("ignore")  # of PyTorch's exporter
@pytest.mark.parametrize("kind", ["LSTM", "Transformer", "Convolution"])
def test_networks_of_pytorch_are_shown_to_keep_rows_apart(kind: str, tmp_path: Path) -> None:
    """Broken: every network with one of these layers would refuse requests of other sizes."""
    torch = pytest.importorskip("torch")

    class Recurrent(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True), torch.nn.Linear(16, 2)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.head(self.inner(x)[0][:, -1])

    made = {
        "LSTM": Recurrent,
        "Transformer": lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "Convolution": lambda: torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 5)), torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2),
        ),
    }[kind]().eval()  # fmt: skip
    open_batch = {0: torch.export.Dim("batch", min=2, max=64)}
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(made, (torch.zeros(3, 5, 8),), path, dynamo=True, dynamic_shapes=(open_batch,), verbose=False)
    assert find_mixed_rows(path, 10, {"x": (5, 8), "src": (5, 8)}) == ""


WORDS = """first = Constant<value_ints=[0]>() own = Gather<axis=1>(x, first) t = Reshape(own, flat)
    s = StringNormalizer<case_change_action="NONE", is_case_sensitive=1>(t)
    w = com.microsoft.Tokenizer<mark=0, mincharnum=1, pad_value="~", separators=[" "]>(s) f = Flatten(w)
    y = TfIdfVectorizer<mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=0, ngram_counts=[0, 3],
        ngram_indexes=[0, 1, 2, 3], pool_strings=["good", "bad", "film", "good", "film"]>(f)"""
LONGEST = {
    "is counted as a word": WORDS.replace('"bad"', '"~"'),
    "its StringNormalizer that makes 's' makes is known only when it": WORDS.replace(
        '"NONE"', '"NONE", stopwords=["the"]'
    ),
    "its Shape does with the words": WORDS.replace("y =", "n = Shape(w) r = Cast<to=1>(n) m = ReduceMax(r) z =")
    + " y = Mul(z, m)",
    "reads several texts of each row": "t = Reshape(x, two) w" + WORDS.partition(" w")[2].replace("(s) f", "(t) f"),
}
"""What the reason says, and a graph."""


def of_texts(body: str, folder: Path) -> str:
    text = (
        '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]> m (string[N,2] x) => (float[N,4] y)'
        f" <int64[1] flat = {{-1}}, int64[2] two = {{-1, 2}}> {{ {body} }}"
    )
    onnx.save(parser.parse_model(text), folder / "model.onnx")
    return str(folder / "model.onnx")


def test_counts_of_words_are_shown_to_be_of_their_own_text(tmp_path: Path) -> None:
    """Broken: a model of texts refuses a request of three, since a tokenizer fills up to the batch's longest text."""
    import onnxruntime

    path = of_texts(WORDS, tmp_path)
    assert find_mixed_rows(path, 10, {}) == ""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    texts = np.array([["good film", ""], ["bad", ""], ["a good good film of its time", ""]], object)
    (together,) = session.run(None, {"x": texts})
    assert together.tolist() == [[1, 0, 1, 1], [0, 1, 0, 0], [2, 0, 1, 1]]
    assert together[1].tolist() == session.run(None, {"x": texts[1:2]})[0][0].tolist()


@pytest.mark.parametrize("said", LONGEST)
def test_what_depends_on_the_longest_text_is_not_shown_to_be_apart(said: str, tmp_path: Path) -> None:
    """Broken: a large request is cut, and a text's answer depends on which others are in its part."""
    assert said in find_mixed_rows(of_texts(LONGEST[said], tmp_path), 10, {})
