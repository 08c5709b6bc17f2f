"""Embedding tables in 8 bits: small, close, under the same names, given back like any quantised node, and no reason to
call a graph int8."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target
from compile_stage.graph_debug.graphs import find_tensors, open_graph
from compile_stage.precision import onnx_graph, tables
from compile_stage.precision.int4 import Int4
from compile_stage.precision.int8 import DynamicInt8, StaticInt8
from compile_stage.precision.mixed import find_units, load_pair, mix
from compile_stage.precision.sensitivity import rank_nodes
from compile_stage.testing import models

STATIC = Scheme(precision="int8", name="u8", activations="uint8", weights="int8", options={"reduce_range": True})
SYMMETRIC = Scheme(
    precision="int8", name="sym", activations="int8", weights="int8", symmetric=True, ops=("Gemm", "MatMul"),
    options={"placement": "operands", "one_sided": True, "reduce_range": True},
)  # fmt: skip
DYNAMIC = Scheme(precision="int8-dynamic", name="int8-dynamic", options={"reduce_range": True})
BLOCKS = Scheme(precision="int4", name="int4", weights="uint4", options={"block": 16})
LOWERINGS = {"int8": StaticInt8(), "int8-dynamic": DynamicInt8(), "int4": Int4()}
EACH_SCHEME = pytest.mark.parametrize("scheme", [STATIC, SYMMETRIC, DYNAMIC, BLOCKS], ids=lambda scheme: scheme.name)
WORDS, WIDTH, LENGTH = 500, 48, 8

Made = tuple[PortableModel, SampleSet]


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a size that tests can afford."""
    monkeypatch.setattr(tables, "_LEAST_BYTES", 4 * 1000)


def language_model(folder: Path, *, tied: bool = False, width: int = WIDTH, reader: str = "") -> Made:
    """Words and kinds, their sum normalised, two linear layers: ids and kinds [batch, time] → scores of 32, or of the
    words.

    Args:
        tied: The last layer is the table of words, read by a Gemm with `transB`.
        reader: `If`: a branch reads the table of words too; `Mul`: so does another node.
    """
    g = models.Graph(3)
    words = g.weight(WORDS, width, scale=0.5)
    x = g.add("Gather", words, "ids", name="words")
    x = g.add("Add", x, g.add("Gather", g.weight(2, width, scale=0.5), "kinds", name="kinds_"), name="sum")
    x = g.add("LayerNormalization", x, g.weight(width, scale=0.1, offset=1), g.weight(width, scale=0.1), axis=-1)
    x = g.add("Relu", g.add("MatMul", x, g.weight(width, width)))
    outputs = 32
    if tied:
        outputs = WORDS
        flat = g.add("Reshape", x, g.constant(np.array([-1, width], np.int64)))
        flat = g.add("Gemm", flat, words, g.weight(WORDS, scale=0.1), transB=1, name="head")
        x = g.add("Reshape", flat, g.constant(np.array([-1, LENGTH, WORDS], np.int64)))
    else:
        x = g.add("MatMul", x, g.weight(width, outputs), name="head")
    if reader == "If":
        out = [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None)]
        read = helper.make_node("Gather", [words, "ids"], ["read"])
        then = helper.make_graph(
            [read, helper.make_node("ReduceMean", ["read"], ["chosen"], keepdims=0)], "then", [], out
        )
        other = helper.make_graph(
            [read, helper.make_node("ReduceMax", ["read"], ["chosen"], keepdims=0)], "else", [], out
        )
        zero = g.constant(np.int64(0))
        large = g.add("Greater", g.add("ReduceMax", "kinds", keepdims=0), zero)
        x = g.add("Add", x, g.add("If", large, then_branch=then, else_branch=other))
    elif reader:
        sums = g.add("ReduceSum", g.add(reader, words, g.add("ReduceMax", x, keepdims=0)), keepdims=0)
        x = g.add("Add", x, sums)
    g.add("Identity", x, name="y")
    batch = {"ids": g.random.integers(0, WORDS, (16, LENGTH)), "kinds": g.random.integers(0, 2, (16, LENGTH))}
    return models.write(g, folder, batch, {"y": ("float32", ("batch", LENGTH, outputs))})


def lower(made: Made, scheme: Scheme, into: Path, keep: tuple[str, ...] = (), **options: Any) -> PortableModel:
    asked = replace(scheme, options={**scheme.options, **options})
    return LOWERINGS[scheme.precision].lower(made[0], asked, made[1], keep, into)


def run(path: str, batch: Any) -> Any:
    """As the graph says."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, batch)[0]


def gather(values: Any, dims: list[str] | None) -> Any:
    """A graph of one Gather: ids of these dimensions → y."""
    return helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"], name="g")], "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(values, "table")],
    )  # fmt: skip


def batch_of(rows: int, seed: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"ids": random.integers(-WORDS, WORDS, (rows, LENGTH)), "kinds": random.integers(0, 2, (rows, LENGTH))}


def snr_db(made: Made, path: str) -> float:
    clean, dirty = (run(p, batch_of(32)).astype(np.float64) for p in (made[0].path, path))
    return float(10 * np.log10(np.sum(clean**2) / np.sum((clean - dirty) ** 2)))


def tables_of(path: str, like: tuple[int, ...]) -> list[Any]:
    """The graph's matrices of this shape, whatever their blocks, by their types."""
    found = [t for t in onnx.load(path).graph.initializer if t.dims and np.prod(t.dims) == np.prod(like)]
    return [helper.tensor_dtype_to_np_dtype(t.data_type) for t in found if t.dims[0] == like[0]]


# ----------------------------------------------------------------------------------------------------------- rounding


@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 9),
    width=st.sampled_from([8, 24, 37, 48]),
    loudness=st.lists(st.floats(-30, 30), min_size=1, max_size=9),
)
@example(seed=0, rows=3, width=48, loudness=[0.0, -30.0, 30.0])
def test_no_value_is_off_by_more_than_half_its_step(seed: int, rows: int, width: int, loudness: list[float]) -> None:
    """Broken: a loud row or an outlier would be clipped, a quiet block take a neighbour's steps, or an empty one divide
    by zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, width)) * 10.0 ** np.resize(loudness, rows)[:, None]
    values[random.random((rows, width)) < 0.2] = 0
    values[0, 0] = 1e30  # else all may be 0, and such a table is left alone
    if rows > 1:
        values[1] = 0
    values = values.astype(np.float32)
    table = tables.round_table(values, tables._block(width))
    steps = table.scale * table.ratios.astype(np.float32)
    found = (table.integers * table.scale) * table.ratios.astype(np.float32)  # as the graph multiplies
    assert np.isfinite(steps).all()
    assert (steps > 0).all()
    assert (np.abs(found - values.reshape(found.shape)) <= 0.50001 * steps).all()
    least = np.abs(values.reshape(found.shape)).max(2, keepdims=True) / 127
    smallest = table.scale * np.float32(2.0**-24)  # of float16 above 0
    full = (least > 0) & (least > 2.0**-14 * table.scale)
    assert (steps[full] <= 1.09 * least[full] + smallest).all(), "steps are no larger than they need be"
    if rows > 1:
        assert not found[1].any(), "an empty row stays empty"


def test_blocks_keep_a_quiet_column_from_a_loud_one() -> None:
    """Broken: trained tables have columns ten times as loud as the others; one scale for a row gives these a tenth of
    its steps."""
    random = np.random.default_rng(0)
    values = random.standard_normal((100, 384)).astype(np.float32)
    values[:, 308] = 30
    error = {}
    for block in (16, 384):
        table = tables.round_table(values, block)
        error[block] = float(
            np.abs((table.integers * table.scale * table.ratios).reshape(values.shape) - values).mean()
        )
    assert error[16] < error[384] / 4


@pytest.mark.parametrize(("width", "block"), [(384, 16), (300, 15), (100, 20), (37, 37), (31, 31), (8, 8), (26, 13)])
def test_the_block_divides_the_row(width: int, block: int) -> None:
    """Broken: a table whose width is no multiple of 16 could not be read."""
    assert tables._block(width) == block


# ---------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize(
    ("scheme", "width"),
    [*itertools.product((STATIC, SYMMETRIC, DYNAMIC), (48, 37)), (BLOCKS, 48)],  # 37 rows have no blocks of 4 bits
    ids=lambda value: getattr(value, "name", None),
)
def test_a_table_is_stored_as_integers_and_answers_as_before(scheme: Scheme, width: int, tmp_path: Path) -> None:
    """Broken: most of a small language model would stay in float32; or rows, blocks or negative ids would be mixed
    up."""
    made = language_model(tmp_path / "made", width=width)
    plain = lower(made, scheme, tmp_path / "plain", tables=False)
    lowered = lower(made, scheme, tmp_path / "out")
    onnx.checker.check_model(lowered.path, full_check=True)
    assert tables_of(plain.path, (WORDS, width)) == [np.float32]
    assert tables_of(lowered.path, (WORDS, width)) == [np.int8]
    assert tables_of(lowered.path, (2, width)) == [np.float32], "a table that saves nothing stays exact"
    assert "1 embedding table is stored in 8 bits" in lowered.notes
    saved = Path(plain.path).stat().st_size - Path(lowered.path).stat().st_size
    assert saved > WORDS * width * 2.7
    assert snr_db(made, lowered.path) > min(snr_db(made, plain.path) - 1.5, 40)
    assert run(lowered.path, batch_of(0)).shape[0] == 0, "the batch stays open"


@EACH_SCHEME
def test_the_same_input_gives_the_same_bytes_and_no_second_round(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: the cache and every digest after it; or a table would be rounded twice."""
    made = language_model(tmp_path / "made")
    one, two = lower(made, scheme, tmp_path / "one"), lower(made, scheme, tmp_path / "two")
    assert one.digest == two.digest == digest_tree(tmp_path / "two")
    again = replace(one, precision="fp32")
    assert "quantised already" in str(StaticInt8().refuse(again, scheme))
    graph = onnx.load(one.path).graph
    assert tables.round_tables(graph, ()) == 0


@pytest.mark.parametrize("scheme", [STATIC, SYMMETRIC], ids=lambda scheme: scheme.name)
def test_a_tied_table_is_in_integers_for_both(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: the output layer would keep the whole table in float32 for the Gather, or read the Gather's blocks as its
    own channels."""
    made = language_model(tmp_path / "made", tied=True)
    lowered = lower(made, scheme, tmp_path / "out")
    assert tables_of(lowered.path, (WORDS, WIDTH)) == [np.int8, np.int8]
    plain = lower(made, scheme, tmp_path / "plain", tables=False)
    assert snr_db(made, lowered.path) > snr_db(made, plain.path) - 1.5


@EACH_SCHEME
@pytest.mark.parametrize("reader", ["If", "Mul"])
def test_a_table_that_others_read_in_float_stays(reader: str, scheme: Scheme, tmp_path: Path) -> None:
    """Broken: it would be stored twice, or vanish from under a subgraph."""
    made = language_model(tmp_path / "made", reader=reader)
    lowered = lower(made, scheme, tmp_path / "out")
    assert tables_of(lowered.path, (WORDS, WIDTH)) == [np.float32]
    assert snr_db(made, lowered.path) > 20


@EACH_SCHEME
def test_a_kept_gather_reads_its_table_in_float(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: `keep` would be believed and not obeyed."""
    made = language_model(tmp_path / "made")
    lowered = lower(made, scheme, tmp_path / "out", ("node_words",))
    assert lowered.kept["fp32"] == ("node_words",)
    assert tables_of(lowered.path, (WORDS, WIDTH)) == [np.float32]


@pytest.mark.parametrize(("rows", "stored"), [(1 << 17, 1), ((1 << 17) - 1, 0)])
def test_only_tables_of_8_mib_are_stored(rows: int, stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: networks of 50 µs a call would take 60 for a megabyte."""
    monkeypatch.undo()
    assert tables.round_tables(gather(np.ones((rows, 16), np.float32), ["n"]), ()) == stored


def test_two_gathers_share_one_table(tmp_path: Path) -> None:
    """Broken: each reader would bring a copy."""
    g = models.Graph(4)
    table = g.weight(WORDS, 32, scale=0.5)
    both = g.add("Add", g.add("Gather", table, "a", axis=0), g.add("Gather", table, "b", axis=-2), name="both")
    g.add("MatMul", both, g.weight(32, 4), name="y")
    g.random = np.random.default_rng(1)
    batch = {"a": g.random.integers(0, WORDS, (16,)), "b": g.random.integers(0, WORDS, (16,))}
    made = models.write(g, tmp_path / "made", batch, {"y": ("float32", ("batch", 4))})
    lowered = lower(made, SYMMETRIC, tmp_path / "out")
    assert tables_of(lowered.path, (WORDS, 32)) == [np.int8]
    clean, dirty = (run(path, batch) for path in (made[0].path, lowered.path))
    assert np.abs(clean - dirty).max() < 0.05 * np.abs(clean).max()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda values: values * np.float32(0), "all zero: no scale"),
        (lambda values: values * np.float32(1e-40), "below what float32 has digits for"),
        (lambda values: np.where(values > 2, np.float32(3.4e38), values), "its products would overflow"),
        (lambda values: np.where(values > 2, np.float32(np.inf), values), "not finite"),
        (lambda values: np.where(values > 2, np.float32(np.nan), values), "not finite"),
        (lambda values: np.repeat(values, 10, axis=0)[:, :4], "too narrow to gain"),
    ],
)
def test_a_table_that_integers_can_not_hold_stays(change: Any, why: str) -> None:
    """Broken: NaN where the source has a number."""
    values = change(np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)).astype(np.float32)
    graph = gather(values, ["n"])
    assert tables.round_tables(graph, ()) == 0, why
    assert [node.op_type for node in graph.node] == ["Gather"]


@pytest.mark.parametrize("rank", [0, 1, 3, None])
def test_places_of_any_rank(rank: int | None) -> None:
    """Broken: the axis of blocks would be folded into the wrong place. Of a rank that nobody knows a row is one
    block."""
    values = np.random.default_rng(0).standard_normal((100, 32)).astype(np.float32)
    graph = gather(values, None if rank is None else [f"d{axis}" for axis in range(rank)])
    assert tables.round_tables(graph, ()) == 1
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    ids = np.random.default_rng(1).integers(0, 100, (2, 0, 3)[:rank] if rank else () if rank == 0 else (5, 2))
    session = _session(model)
    found = session.run(None, {"ids": ids})[0]
    assert found.shape == (*ids.shape, 32)
    assert np.allclose(found, values[ids], atol=0.02)
    assert any(node.op_type == "Reshape" for node in graph.node) == (rank is not None)


def _session(model: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_tables_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a model beyond protobuf's 2 GiB, which is mostly its table, would lose it or end in an error."""
    made = language_model(tmp_path / "made")
    monkeypatch.setattr(onnx_graph, "INLINE_LIMIT_BYTES", 4096)
    lowered = lower(made, STATIC, tmp_path / "out")
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size > WORDS * WIDTH
    assert tables_of(lowered.path, (WORDS, WIDTH)) == [np.int8]
    assert snr_db(made, lowered.path) > 30


# -------------------------------------------------------------------------------------------- names, search, backends


@EACH_SCHEME
def test_the_gathers_answer_keeps_its_name_and_its_meaning(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: debug and the search would compare floats with integers, and accuse the Gather."""
    model, _ = made = language_model(tmp_path / "made")
    lowered = lower(made, scheme, tmp_path / "out")
    source, twin = open_graph(model.path), open_graph(lowered.path)
    assert find_tensors(source, twin)["words"] == "words"
    batch = batch_of(3)
    with source.open(["words"], 1) as one, twin.open(["words"], 1) as two:
        expected, found = one(batch)["words"], two(batch)["words"]
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@EACH_SCHEME
def test_a_table_is_ranked_and_given_back_like_any_node(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: a tolerance that only the table misses could never be met."""
    model, samples = made = language_model(tmp_path / "made")
    lowered = lower(made, scheme, tmp_path / "out")
    ranking = {entry.node: entry for entry in rank_nodes(model, lowered, samples, 1)}
    assert ranking["node_words"].op == "Gather"
    assert 0 < ranking["node_words"].effect < 0.01
    mixed = mix(model, lowered, ["node_words"], tmp_path / "mixed")
    onnx.checker.check_model(mixed.path, full_check=True)
    assert mixed.kept["fp32"] == ("node_words",)
    assert tables_of(mixed.path, (WORDS, WIDTH)) == [np.float32], "the integers would be carried along"
    batch = batch_of(3)
    with open_graph(model.path).open(["words"], 1) as one, open_graph(mixed.path).open(["words"], 1) as two:
        np.testing.assert_array_equal(one(batch)["words"], two(batch)["words"])
    assert snr_db(made, mixed.path) > snr_db(made, lowered.path) - 0.5


def compile_with(backend: str, model: PortableModel, scheme: Scheme, folder: Path) -> Artifact:
    from compile_stage.core import plugins

    plugin: Any = plugins.load("backends", backend)
    folder.mkdir()
    compiled: Artifact = plugin.compile(model, scheme, Target(name="here"), "job", folder)
    return compiled


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_runtime_reads_the_integers_and_a_table_alone_is_no_int8(backend: str, tmp_path: Path) -> None:
    """Broken: a runtime would expand the table again, or a graph whose every product is in float would be sold as
    int8."""
    pytest.importorskip(backend)
    model, _ = made = language_model(tmp_path / "made")
    lowered = lower(made, SYMMETRIC, tmp_path / "out")
    whole = compile_with(backend, lowered, SYMMETRIC, tmp_path / "whole")
    sizes = [file.stat().st_size for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    assert max(sizes) < WORDS * WIDTH * 2, "the table would be stored in float"
    assert whole.executed["ops"]["Gather"] == 3
    source, twin = load_pair(model, lowered)
    products = [unit.node for unit in find_units(source.graph, twin.graph) if unit.op != "Gather"]
    only = mix(model, lowered, products, tmp_path / "only")
    assert tables_of(only.path, (WORDS, WIDTH)) == [np.int8]
    with pytest.raises(NothingCompiledError, match="int8"):
        compile_with(backend, only, SYMMETRIC, tmp_path / "none")
