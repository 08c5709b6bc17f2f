"""An ONNX graph as a PyTorch program: the same answers as the graph's at every size, or a refusal that names the
operator."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core import plugins
from compile_stage.core.errors import SourceError
from compile_stage.core.records import PortableModel, ShapeRange
from compile_stage.sources.onnx import OnnxSource
from compile_stage.testing import models

from .conftest import run_onnx, source_of

if (reason := plugins.missing_for_programs(OnnxSource())) is not None:
    pytest.skip(reason, allow_module_level=True)

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def value(name: str, *shape: Any, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def graph_of(nodes: list[Any], inputs: list[Any], outputs: list[Any], opset: int = 17, **constants: Any) -> Any:
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, held)
    sets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(body, opset_imports=sets, ir_version=8)


def program_of(model: Any, folder: Path, shapes: Mapping[str, ShapeRange] | None = None) -> PortableModel:
    path = folder / "logged"
    mlflow.onnx.save_model(model, str(path), pip_requirements=["onnx"])
    return OnnxSource().export_program(source_of(path, "onnx"), shapes or {}, folder / "program")


def answers(program: PortableModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    loaded = torch.export.load(program.path).module()
    leaves = torch.utils._pytree.tree_leaves(
        loaded(*(torch.from_numpy(batch[spec.name]) for spec in program.signature.inputs))
    )
    return {spec.name: leaf.numpy() for spec, leaf in zip(program.signature.outputs, leaves, strict=True)}


def prove(model: Any, folder: Path, *batches: Mapping[str, Any], **options: Any) -> PortableModel:
    """The program answers each batch as the graph does, under the graph's names."""
    program = program_of(model, folder, **options)
    graph = OnnxSource().export(source_of(folder / "logged", "onnx"), {}, folder / "graph")
    assert program.form == "torch-export"
    assert program.signature == graph.signature
    for batch in batches:
        wanted, found = run_onnx(graph, batch), answers(program, batch)
        assert list(found) == list(wanted)
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5)
    return program


@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_a_network_answers_as_its_graph_at_every_batch_size(make: Any, tmp_path: Path) -> None:
    """Broken: compilers of programs would be given another model, another order of outputs, or a batch that is
    fixed."""
    model, samples = make(tmp_path / "kit")
    inputs = {spec.name: np.load(Path(samples.path) / "inputs" / f"{spec.name}.npy") for spec in model.signature.inputs}
    prove(
        onnx.load(model.path), tmp_path, *({name: array[:size] for name, array in inputs.items()} for size in (1, 2, 5))
    )


def test_sizes_that_the_graph_computes_stay_open(tmp_path: Path) -> None:
    """Broken: heads of a transformer, split by sizes that the graph reads from its input, would be fixed to the trace's
    or refused."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "second"], ["l"], axis=0),
        helper.make_node("Unsqueeze", ["b", "zero"], ["b1"]),
        helper.make_node("Unsqueeze", ["l", "zero"], ["l1"]),
        helper.make_node("Constant", [], ["heads"], value=numpy_helper.from_array(np.array([2, 4], np.int64))),
        helper.make_node("Concat", ["b1", "l1", "heads"], ["split"], axis=0),
        helper.make_node("Reshape", ["x", "split"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Mul", ["l1", "two"], ["l2"]),
        helper.make_node("Concat", ["b1", "l2", "four"], ["joined"], axis=0),
        helper.make_node("Reshape", ["t", "joined"], ["y"], allowzero=1),
        helper.make_node("Slice", ["x", "zero", "l1", "one"], ["x1"]),
        helper.make_node("Concat", ["b1", "l1", "eight"], ["whole"], axis=0),
        helper.make_node("Expand", ["bias", "whole"], ["spread"]),
        helper.make_node("Add", ["x1", "spread"], ["z"]),
    ]
    model = graph_of(
        nodes, [value("x", "batch", "length", 8)], [value("y", "batch", None, 4), value("z", "batch", "length", 8)],
        first=np.int64(0), second=np.int64(1), zero=np.array([0], np.int64), one=np.array([1], np.int64),
        two=np.array([2], np.int64), four=np.array([4], np.int64), eight=np.array([8], np.int64),
        bias=np.arange(8, dtype=np.float32).reshape(1, 1, 8),
    )  # fmt: skip
    model.graph.node[11].attribute[0].i = 0  # as it is: its shape is no constant
    draw = np.random.default_rng(0).standard_normal
    sizes = {"x": ShapeRange(min=(1, 2, 8), typical=(1, 6, 8), max=(4, 12, 8))}
    batches = [{"x": draw(shape).astype(np.float32)} for shape in ((1, 2, 8), (3, 6, 8), (4, 12, 8))]
    program = prove(model, tmp_path, *batches, shapes=sizes)
    assert program.signature.inputs[0].shape == ("batch", "length", 8)
    with pytest.raises(SourceError, match="the size 'length' of its input 'x' is free"):
        program_of(model, tmp_path / "again")


def test_outputs_are_the_graphs_own(tmp_path: Path) -> None:
    """Broken: onnx2torch answers once for each node, so outputs would be lost, in another order, or one that nobody
    asked for."""
    nodes = [
        helper.make_node("Split", ["x"], ["left", "right"], axis=1),
        helper.make_node("Relu", ["right"], ["active"]),
    ]
    outputs = [value("active", "batch", 2), value("right", "batch", 2), value("x", "batch", 4)]
    model = graph_of(nodes, [value("x", "batch", 4)], outputs)
    batch = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    found = answers(program_of(model, tmp_path), batch)
    np.testing.assert_array_equal(found["right"], batch["x"][:, 2:])
    np.testing.assert_array_equal(found["active"], np.maximum(batch["x"][:, 2:], 0))
    np.testing.assert_array_equal(found["x"], batch["x"])


def test_a_newer_operator_set_is_converted_down(tmp_path: Path) -> None:
    """Broken: what PyTorch's own exporter writes, at operator set 18, would be refused for its means."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["d"]),
        helper.make_node("Reshape", ["d", "flat"], ["y"], allowzero=1),
    ]
    model = graph_of(
        nodes, [value("x", "batch", 2, 3)], [value("y", "batch", 6)], opset=18,
        axes=np.array([2], np.int64), flat=np.array([-1, 6], np.int64),
    )  # fmt: skip
    prove(model, tmp_path, {"x": np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)})


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (helper.make_node("Hardmax", ["x"], ["y"]), r"onnx2torch has no ai\.onnx\.Hardmax \(17\)"),
        (helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L2"),
         r"has no ai\.onnx\.ml\.Normalizer \(3\)"),
    ],
    ids=["standard", "ai.onnx.ml"],
)  # fmt: skip
def test_an_operator_that_it_lacks_is_named(node: Any, said: str, tmp_path: Path) -> None:
    """Broken: scikit-learn's operators, and others, would end in a trace instead of a reason."""
    with pytest.raises(SourceError, match=said):
        program_of(graph_of([node], [value("x", "batch", 4)], [value("y", "batch", 4)]), tmp_path)


def test_a_shape_that_depends_on_the_data_is_refused_with_its_operator(tmp_path: Path) -> None:
    """Broken: the size of the trace would become the size of the model."""
    nodes = [
        helper.make_node("Reshape", ["x", "wanted"], ["y"]),
    ]
    inputs = [value("x", "batch", 4), value("wanted", 2, kind=INT64)]
    with pytest.raises(SourceError, match=r"torch\.export can.t trace it at Reshape"):
        program_of(graph_of(nodes, inputs, [value("y", None, None)]), tmp_path)


def test_gathering_by_rows_keeps_the_batch_open(tmp_path: Path) -> None:
    """Broken: onnx2torch's GatherND fixes the batch to the trace's, so what PyTorch writes of a BERT would be
    refused."""
    nodes = [
        helper.make_node("Cast", ["which"], ["w"], to=INT64),
        helper.make_node("GatherND", ["x", "w"], ["y"]),
    ]
    inputs = [value("x", "batch", 4), value("which", "batch", 3, 1, kind=INT64)]
    batches = [
        {"x": np.arange(4.0 * size, dtype=np.float32).reshape(size, 4), "which": np.full((size, 3, 1), size - 1)}
        for size in (1, 3)
    ]
    prove(graph_of(nodes, inputs, [value("y", "batch", 3, 4)]), tmp_path, *batches)


def test_a_size_that_the_trace_fixes_is_an_error(tmp_path: Path) -> None:
    """Broken: the program would be published as one of any batch, and fail at every batch but the trace's."""
    node = helper.make_node("Add", ["x", "rows"], ["y"])  # of two rows: it says any batch, and means two
    rows = np.ones((2, 4), np.float32)
    model = graph_of([node], [value("x", "batch", 4)], [value("y", "batch", 4)], rows=rows)
    with pytest.raises(SourceError, match=r"without fixing dimension 0 of x: float32\[batch, 4\] to 2"):
        program_of(model, tmp_path)


def test_ranges_and_fillings_of_open_sizes_stay_open(tmp_path: Path) -> None:
    """Broken: position ids and masks that a graph makes of its input's length would be refused."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "second"], ["l"], axis=0),
        helper.make_node("Range", ["zero", "l", "one"], ["positions"]),
        helper.make_node("Cast", ["positions"], ["p"], to=FLOAT),
        helper.make_node("ConstantOfShape", ["s"], ["ones"], value=numpy_helper.from_array(np.array([1], np.float32))),
        helper.make_node("Add", ["ones", "p"], ["shifted"]),
        helper.make_node("Mul", ["shifted", "x"], ["y"]),
    ]
    model = graph_of(
        nodes, [value("x", "batch", "length")], [value("y", "batch", "length")],
        second=np.int64(1), zero=np.int64(0), one=np.int64(1),
    )  # fmt: skip
    sizes = {"x": ShapeRange(min=(1, 2), typical=(1, 6), max=(4, 12))}
    batches = [{"x": np.ones(shape, np.float32)} for shape in ((1, 2), (3, 12))]
    prove(model, tmp_path, *batches, shapes=sizes)


def test_it_needs_no_torchvision(tmp_path: Path) -> None:
    """Broken: onnx2torch would not import beside a PyTorch without torchvision, or an empty one would be left behind
    for others to find."""
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed here")
    code = (
        "import sys\n"
        "from compile_stage.sources import onnx_program\n"
        "print(onnx_program._onnx2torch().__name__, [name for name in sys.modules if 'torchvision' in "
        "name.split('.')[0]])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "onnx2torch []"
    boxes = [value("boxes", "batch", 4, 4), value("scores", "batch", 1, 4)]
    model = graph_of(
        [helper.make_node("NonMaxSuppression", ["boxes", "scores"], ["y"])], boxes, [value("y", None, 3, kind=INT64)]
    )
    with pytest.raises(SourceError, match=r"has no ai\.onnx\.NonMaxSuppression"):
        program_of(model, tmp_path)


def test_a_place_that_is_known_is_no_number_taken_out_of_data(tmp_path: Path) -> None:
    """What a BERT's pooler does: `hidden[:, 0]`. Broken: the program would ask a tensor for the place, at which
    ExecuTorch, Inductor and LiteRT end."""
    import torch

    nodes = [
        helper.make_node("Gather", ["x", "first"], ["a"], axis=1),
        helper.make_node("Gather", ["x", "last"], ["b"], axis=1),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    given = graph_of(nodes, [value("x", "batch", 4, 3)], [value("y", "batch", 3)], first=np.array(0), last=np.array(-1))
    batches = [{"x": np.random.default_rng(size).standard_normal((size, 4, 3)).astype(np.float32)} for size in (1, 5)]
    program = prove(given, tmp_path, *batches)
    called = {str(node.target) for node in torch.export.load(program.path).graph.nodes}
    assert "aten.select.int" in called
    assert not {name for name in called if "item" in name or "_local_scalar" in name}
