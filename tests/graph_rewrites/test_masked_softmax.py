"""Guards of attention's softmax: gone where no row can be empty, and cheaper where one can, with the same answers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compile_stage.core.digest import digest_tree
from compile_stage.core.records import PortableModel, SampleSet
from compile_stage.core.sample_files import digest_of_samples, write_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.graph_rewrites import apply, masked_softmax
from tests.graph_rewrites.running import answer, operators

HEADS, PLACES, SIZE = 2, 5, 4
LOWEST = float(np.finfo(np.float32).min)


def attention(hidden: float | None, *, always: bool = False, opset: int = 18, layers: int = 2) -> onnx.ModelProto:
    """Layers of attention over `x` [n, heads, places, size] as PyTorch exports them, with the mask `seen` [n, 1, 1,
    places].

    Args:
        hidden: The score of a hidden key; None for attention without a mask.
        always: The mask is a constant that hides nothing, expanded to the shape of the scores.
    """
    nodes, weights = [], [helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])]
    condition = "seen"
    if always:
        weights.append(helper.make_tensor("true", TensorProto.BOOL, [1, 1], [True]))
        weights.append(helper.make_tensor("shape", TensorProto.INT64, [4], [1, 1, PLACES, PLACES]))
        nodes.append(helper.make_node("Expand", ["true", "shape"], ["all"]))
        condition = "all"
    if hidden is not None:
        weights.append(helper.make_tensor("score", TensorProto.FLOAT, [], [hidden]))
        nodes.append(helper.make_node("Where", [condition, "zero", "score"], ["mask"]))
    values = "x"
    for layer in range(layers):

        def name(what: str, layer: int = layer) -> str:
            return f"{what}{layer}"

        nodes.append(helper.make_node("Transpose", [values], [name("keys")], perm=[0, 1, 3, 2]))
        nodes.append(helper.make_node("MatMul", [values, name("keys")], [name("scores")]))
        scores = name("scores")
        if hidden is not None:
            nodes.append(helper.make_node("Add", [scores, "mask"], [name("masked")]))
            scores = name("masked")
        nodes += [
            helper.make_node("Softmax", [scores], [name("softmax")], axis=-1),
            helper.make_node("IsNaN", [name("softmax")], [name("nan")]),
            helper.make_node("Where", [name("nan"), "zero", name("softmax")], [name("guarded")]),
            helper.make_node("MatMul", [name("guarded"), values], [name("answer")]),
        ]
        values = name("answer")
    nodes.append(helper.make_node("Identity", [values], ["y"]))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", HEADS, PLACES, SIZE])]
    if hidden is not None and not always:
        given.append(helper.make_tensor_value_info("seen", TensorProto.BOOL, ["n", 1, 1, PLACES]))
    answers = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", HEADS, PLACES, SIZE])]
    graph = helper.make_graph(nodes, "attention", given, answers, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def inputs(model: onnx.ModelProto, rows: int = 3) -> dict[str, np.ndarray]:
    """The second row hides two keys, the last one all."""
    random = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {"x": random.standard_normal((rows, HEADS, PLACES, SIZE)).astype(np.float32)}
    if any(value.name == "seen" for value in model.graph.input):
        made["seen"] = np.ones((rows, 1, 1, PLACES), bool)
        made["seen"][1, ..., :2] = False
        made["seen"][-1] = False
    return made


@pytest.mark.parametrize(
    ("hidden", "always", "left"),
    [(None, False, 0), (float("-inf"), True, 0), (LOWEST, False, 1), (float("-inf"), False, 1)],
    ids=["without-a-mask", "hides-nothing", "finite", "minus-infinity"],
)
@pytest.mark.parametrize("opset", [17, 18])
def test_the_answers_are_those_of_before(hidden: float | None, always: bool, left: int, opset: int) -> None:
    """Broken: a query that may look at no key has NaN, or a hidden key is looked at; or the guard is still paid for."""
    before = attention(hidden, always=always, opset=opset)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert masked_softmax.rewrite(after) == 2
    onnx.checker.check_model(after, full_check=True)
    assert "IsNaN" not in operators(after)
    assert operators(after).count("Where") == left, "the mask stays where it hides something"
    given = inputs(before)
    expected = answer(before, given)
    np.testing.assert_allclose(answer(after, given), expected, atol=1e-6, rtol=1e-6)
    if hidden == float("-inf") and not always:
        assert not expected[-1].any(), "what PyTorch answers to a query without keys"
        assert operators(after).count("ReduceMax") == 1, "the factor is computed once for all layers"


def test_what_else_reads_the_guarded_weights_keeps_them(tmp_path: Path) -> None:
    """Broken: attention weights that are an output, or that another node reads, lose their guard."""
    shown = attention(float("-inf"), layers=1)
    shown.graph.output.append(helper.make_tensor_value_info("guarded0", TensorProto.FLOAT, None))
    assert masked_softmax.rewrite(shown) == 0
    read = attention(float("-inf"), layers=1)
    read.graph.node.insert(len(read.graph.node) - 1, helper.make_node("Abs", ["softmax0"], ["other"]))
    assert masked_softmax.rewrite(read) == 0
    unknown = attention(float("-inf"), layers=1)
    next(node for node in unknown.graph.node if node.output[0] == "mask").op_type = "Max"
    assert masked_softmax.rewrite(unknown) == 0, "a mask that is not understood may be -inf anywhere"


@pytest.mark.parametrize("by", ["seen", "scale"])
@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_scores_that_may_hold_nothing_but_minus_infinity_keep_their_guard(operator: str, by: str) -> None:
    """Broken: a row of 0 / 0, or one that is masked before it is scaled, is NaN in what ships and 0 in the original. No
    sample need have such a row, so the comparison of both graphs on samples does not see it."""
    model = attention(float("-inf"), layers=1)
    nodes = {node.output[0]: node for node in model.graph.node}
    nodes["softmax0"].input[0] = "changed"
    if by == "scale":  # of what is masked already
        scaled, masked = helper.make_node(operator, ["masked0", "scale"], ["changed"]), nodes["masked0"]
    else:
        scaled, masked = helper.make_node(operator, ["scores0", "given"], ["changed"]), nodes["scores0"]
        model.graph.input.append(helper.make_tensor_value_info("given", TensorProto.FLOAT, ["n", 1, 1, PLACES]))
    model.graph.initializer.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [2.0]))
    model.graph.node.insert([node.output[0] for node in model.graph.node].index(masked.output[0]) + 1, scaled)
    onnx.checker.check_model(model, full_check=True)
    assert masked_softmax.rewrite(model) == 0
    if by == "seen":  # a constant in its place hides nothing, however it is written
        scaled.input[1] = "scale"
        model.graph.node[[node.output[0] for node in model.graph.node].index("changed")].input[1] = "scale"
        assert masked_softmax.rewrite(model) == 1


def test_what_pytorch_exports_is_found() -> None:
    """Broken: the exporter writes it otherwise, and every transformer pays for guards again."""
    torch = pytest.importorskip("torch", reason="PyTorch's exporter writes the graph")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, seen: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen)

    x, seen = torch.randn(2, HEADS, PLACES, SIZE), torch.ones(2, 1, PLACES, PLACES, dtype=torch.bool)
    seen[0, :, 1:3] = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = torch.onnx.export(
            Network(), (x, seen), dynamo=True, verbose=False, input_names=["x", "seen"]
        ).model_proto
        expected = Network()(x, seen).numpy()
    given = {"x": x.numpy(), "seen": seen.numpy()}
    exported = answer(model, given)
    assert masked_softmax.rewrite(model) == 1
    assert "IsNaN" not in operators(model)
    np.testing.assert_allclose(answer(model, given), exported, atol=1e-6)
    # The exporter gives hidden keys the lowest float32: a query without any has the mean of all values, not zeros.
    some = seen.any(-1).expand(2, HEADS, PLACES).numpy()
    np.testing.assert_allclose(exported[some], expected[some], atol=1e-6)


# ------------------------------------------------------------------------------------------------ applied, with a proof


@pytest.fixture
def portable(tmp_path: Path) -> PortableModel:
    (tmp_path / "graph").mkdir()
    onnx.save(attention(LOWEST), tmp_path / "graph" / "model.onnx")
    specs = (
        TensorSpec(name="x", dtype="float32", shape=("n", HEADS, PLACES, SIZE)),
        TensorSpec(name="seen", dtype="bool", shape=("n", 1, 1, PLACES)),
    )
    return PortableModel(
        path=str(tmp_path / "graph" / "model.onnx"), digest=digest_tree(tmp_path / "graph"), form="onnx", opset=18,
        precision="fp32", signature=Signature(inputs=specs, outputs=(replace(specs[0], name="y"),)),
    )  # fmt: skip


@pytest.fixture
def samples(tmp_path: Path) -> SampleSet:
    folder = tmp_path / "samples"
    folder.mkdir()
    for name, values in inputs(attention(LOWEST)).items():
        np.save(folder / f"{name}.npy", values)
    write_index(folder, {"x": "x.npy", "seen": "seen.npy"}, labels=False, count=3)
    made = SampleSet(path=str(folder), digest="", count=3, real=True, source="input_example")
    return replace(made, digest=digest_of_samples(made))


def test_the_model_says_what_was_rewritten(portable: PortableModel, samples: SampleSet, tmp_path: Path) -> None:
    """Broken: nobody could know from a report that the graph is not the exporter's."""
    made = apply.rewrite_graph(portable, samples, tmp_path / "into")
    assert made.notes == ("graph rewrite masked-softmax: 2 places, 16 nodes become 12",)
    assert made.digest == digest_tree(tmp_path / "into") != portable.digest
    assert made.made_from == portable.digest
    again = apply.rewrite_graph(made, samples, tmp_path / "again")
    assert again == made, "there is nothing left to rewrite, and nothing is written"


def _halved(model: onnx.ModelProto) -> int:
    """A rule that is wrong: it hides nothing."""
    for node in model.graph.node:
        if node.op_type == "Where":
            node.input[2] = "zero"
    return 1


def _misspelled(model: onnx.ModelProto) -> int:
    model.graph.node[0].op_type = "NoSuchOperator"
    return 1


@pytest.mark.parametrize(("wrong", "says"), [(_halved, "differs by"), (_misspelled, "can't run the graph")])
def test_a_wrong_rule_is_named_and_not_taken(
    wrong: Any, says: str, portable: PortableModel, samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a rule that changes answers makes every candidate fail, and no one learns which rule it was."""
    rules = {"first": wrong, masked_softmax.NAME: masked_softmax.rewrite}
    monkeypatch.setattr(apply, "REWRITES", rules)
    made = apply.rewrite_graph(portable, samples, tmp_path / "into")
    assert made.notes[0].startswith("the graph rewrite first was not taken: ")
    assert says in made.notes[0]
    assert made.notes[1] == "graph rewrite masked-softmax: 2 places, 16 nodes become 12"
    assert "IsNaN" not in operators(onnx.load(made.path))
