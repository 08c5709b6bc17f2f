"""The axis of an LSTM's only direction is dropped without a transposition, with the same answers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest

from compile_stage.graph_rewrites import single_direction
from tests.graph_rewrites.running import answer, operators

torch = pytest.importorskip("torch", reason="PyTorch's exporter writes the graphs")

STEPS, SIZE, HIDDEN = 6, 5, 7


class Recurrent(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = getattr(torch.nn, kind)(SIZE, HIDDEN, num_layers=2, **options)

    def forward(self, x: Any) -> Any:
        return self.layers(x)[0]


def exported(kind: str, **options: Any) -> tuple[onnx.ModelProto, np.ndarray]:
    """The graph with a free batch, and an input of another batch size than that of the export."""
    first = options.get("batch_first", False)
    shape = (3, STEPS, SIZE) if first else (STEPS, 3, SIZE)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = torch.onnx.export(
            Recurrent(kind, **options).eval(), (torch.randn(shape),), dynamo=True, verbose=False, input_names=["x"],
            dynamic_shapes=({0 if first else 1: torch.export.Dim("batch", min=1, max=64)},),
        ).model_proto  # fmt: skip
    given = np.random.default_rng(1).standard_normal((4, STEPS, SIZE) if first else (STEPS, 4, SIZE))
    return model, given.astype(np.float32)


@pytest.mark.parametrize("first", [True, False], ids=["batch-first", "steps-first"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_what_pytorch_exports_is_found(kind: str, first: bool) -> None:
    """Broken: the exporter writes it otherwise, and each layer pays for a copy; or the answers are of other steps."""
    model, x = exported(kind, batch_first=first)
    expected = answer(model, {"x": x})
    assert single_direction.rewrite(model) == 2
    onnx.checker.check_model(model, full_check=True)
    assert operators(model).count("Transpose") == (2 if first else 0)
    assert operators(model).count("Reshape") == 0, "nothing computes a shape any more"
    np.testing.assert_array_equal(answer(model, {"x": x}), expected)


def test_two_directions_are_put_side_by_side_as_before() -> None:
    """Broken: of an LSTM that reads both ways, one way is lost, or the two are mixed."""
    model, _ = exported("LSTM", batch_first=True, bidirectional=True)
    before = model.SerializeToString(deterministic=True)
    assert single_direction.rewrite(model) == 0
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("perm", "target"), [([0, 2, 1, 3], [STEPS, -1, 2 * HIDDEN]), ([2, 0, 1, 3], [-1, STEPS, HIDDEN])],
    ids=["two-rows-side-by-side", "another-order"],
)  # fmt: skip
def test_reshapes_that_do_something_else_stay(perm: list[int], target: list[int]) -> None:
    """Broken: a reshape that puts rows of two samples side by side is taken for one that drops an axis."""
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((1, 4 * HIDDEN, SIZE)), "r": random.standard_normal((1, 4 * HIDDEN, HIDDEN)),
    }  # fmt: skip
    tensors = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    tensors.append(onnx.numpy_helper.from_array(np.array(target), "target"))
    nodes = [
        node("LSTM", ["x", "w", "r"], ["h"], hidden_size=HIDDEN),
        node("Transpose", ["h"], ["t"], perm=perm),
        node("Reshape", ["t", "target"], ["y"]),
    ]
    given, made = value("x", 1, [STEPS, "batch", SIZE]), value("y", 1, [None, None, None])
    graph = onnx.helper.make_graph(nodes, "g", [given], [made], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    assert single_direction.rewrite(model) == 0
    assert operators(model) == ["LSTM", "Transpose", "Reshape"]
