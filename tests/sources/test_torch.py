from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import onnx
import onnxruntime
import pytest
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import Schema
from mlflow.types import TensorSpec as SpecOfTensor

from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, ShapeRange, Target
from compile_stage.plugin_support.torch_programs import changed_tensors
from compile_stage.serving.size_conditions import SizeCondition
from compile_stage.sources import pt2, torch_sizes
from compile_stage.sources.torch import TorchSource
from compile_stage.sources.torch_operators import optimiser_corrected
from compile_stage.sources.torch_portable import save_program
from compile_stage.sources.torch_signature import signature_of
from compile_stage.sources.torch_size_limits import _limits
from compile_stage.steps.export import demand_batch_sizes

from .conftest import Proof, run_onnx, source_of

torch = pytest.importorskip("torch", reason="the PyTorch source needs torch")

IMAGES = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
PICKLES = Compliance(allow_pickle=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)
        self.drop, self.out = torch.nn.Dropout(0.5), torch.nn.Linear(144, 10)

    def forward(self, image: Any) -> Any:
        return self.out(self.drop(torch.relu(self.norm(self.conv(image)))).flatten(1))


class Two(torch.nn.Module):
    def forward(self, left: Any, right: Any) -> Any:
        return {"sum": left + right, "dot": (left * right).sum(-1)}


def save(path: Path, model: Any, example: Any = IMAGES, **options: Any) -> Any:
    mlflow.pytorch.save_model(model, path, input_example=example, pip_requirements=["torch"], **options)
    return source_of(path, "pytorch")


def saved_net(path: Path, example: Any = IMAGES, **options: Any) -> Any:
    torch.manual_seed(0)
    signature = infer_signature(example, np.zeros((len(example), 10), np.float32))
    return save(path, Net().eval(), example, signature=signature, **options)


def test_an_exported_program_keeps_its_open_batch_and_its_argument_names(tmp_path: Path, prove: Proof) -> None:
    model = prove(saved_net(tmp_path / "net"), {"image": IMAGES})
    assert str(model.signature.inputs[0]) == "image: float32[batch, 1, 8, 8]"
    assert str(model.signature.outputs[0]) == "output: float32[batch, 10]"
    assert str(tmp_path).encode() not in Path(model.path).read_bytes()


def test_an_onnxscript_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after `pip install --upgrade torch` alone, every PyTorch model was refused as one that PyTorch's exporter
    can't write, for a module `onnxscript._framework_apis.torch_2_11`, with the advice to look at the program."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    monkeypatch.setattr(onnxscript_apis, "_module", None)
    monkeypatch.setitem(sys.modules, onnxscript_apis._name, None)
    source = saved_net(tmp_path / "net")
    with pytest.raises(SourceError, match=r"needs a newer onnxscript than \d") as caught:
        TorchSource().export(source, {}, tmp_path / "out")
    assert caught.value.fix == "pip install --upgrade onnxscript"


def test_several_inputs_and_outputs_keep_the_signatures_names(tmp_path: Path, prove: Proof) -> None:
    rows = IMAGES[:, 0]
    signature = infer_signature({"a": rows, "b": rows}, {"sum": rows, "dot": rows[..., 0]})
    source = save(tmp_path / "two", Two(), [rows, rows], signature=signature)
    model = prove(source, {"a": rows, "b": rows * 2})
    assert [spec.name for spec in model.signature.outputs] == ["sum", "dot"]
    example = TorchSource().example(source)
    assert example is not None
    assert list(example) == ["a", "b"]
    assert TorchSource().prediction_format(source)["kind"] == "dict"


class Ordered(torch.nn.Module):
    """Names that sort otherwise than they stand."""

    def forward(self, zb: Any, ya: Any) -> Any:
        return {"zeta": zb * 2, "alpha": ya + 1}


@pytest.mark.parametrize("form", ["pt2", "pickle"])
def test_names_in_another_order_than_the_programs_are_those_of_the_same_tensors(
    tmp_path: Path, prove: Proof, form: str
) -> None:
    """Broken: `alpha` would be answered under the name of `zeta`, or an argument be given what another's name has."""
    rows = IMAGES[:, 0]
    signature = infer_signature({"ya": rows, "zb": rows}, {"alpha": rows, "zeta": rows})
    example = [rows, rows] if form == "pt2" else {"ya": rows, "zb": rows}
    source = save(tmp_path / "two", Ordered(), example, signature=signature, serialization_format=form)
    model = prove(source, {"zb": rows, "ya": rows + 5}, compliance=PICKLES)
    answer = run_onnx(model, {"zb": rows, "ya": rows + 5})
    np.testing.assert_allclose(answer["zeta"], rows * 2, rtol=1e-6)
    np.testing.assert_allclose(answer["alpha"], rows + 6, rtol=1e-6)


def test_a_batch_that_the_export_fixed_is_refused_when_the_policy_asks_for_another(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "one", IMAGES[:1])
    wanted = {"image": ShapeRange(min=(1, 1, 8, 8), typical=(8, 1, 8, 8), max=(8, 1, 8, 8))}
    with pytest.raises(SourceError, match="fixed batch 1, the policy asks for batch 8") as caught:
        TorchSource().export(source, wanted, tmp_path / "out")
    assert "batch >= 2" in caught.value.fix
    assert TorchSource().export(source, {}, tmp_path / "out").signature.fixed_batch == 1


def test_an_einsum_of_three_tensors_leaves_the_batch_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: with the package opt_einsum (JAX and TensorFlow bring it), which looks at sizes, a mixture of experts
    takes its example's batch alone, and is refused for every other."""

    class BySize:
        @staticmethod
        def contract_path(_equation: str, *tensors: Any, **_options: Any) -> Any:
            assert all(int(size) for tensor in tensors for size in tensor.shape)
            return [(0, 1)] * (len(tensors) - 1), ""

    inside = torch.backends.opt_einsum.get_opt_einsum.__globals__  # as if it were installed
    monkeypatch.setitem(inside, "_opt_einsum", BySize)
    monkeypatch.setitem(inside, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", True)

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.rand(4, 6, 3))

        def forward(self, rows: Any, share: Any) -> Any:
            return torch.einsum("bi,eij,be->bj", rows, self.up, share)

    example = {"rows": np.ones((5, 6), np.float32), "share": np.ones((5, 4), np.float32)}
    source = save(tmp_path / "net", Experts().eval(), example, serialization_format="pickle")
    with TorchSource().open(source, Target(name="cpu")) as session:
        assert session.signature.fixed_batch is None
    assert TorchSource().export(source, {}, tmp_path / "out").signature.fixed_batch is None
    assert torch.backends.opt_einsum.enabled, "the setting is the process's own"


def test_a_long_graph_is_not_searched_from_each_operator_for_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the optimiser goes through the whole graph at each of its operators, so that a network of twice the
    layers takes four times as long to export; or the two Slices of a tensor are no Split any more."""
    import onnx_ir
    from onnxscript import optimizer
    from onnxscript.rewriter import pattern

    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[4, 6] x) => (float[4, 3] y)
    <int64[1] zero = {0}, int64[1] three = {3}, int64[1] six = {6}, int64[1] last = {1}> {
    b = Slice(x, three, six, last)
    a = Slice(x, zero, three, last)
    c = Mul(a, b)
    d = Sin(c)
    y = Cos(d)
    }"""
    searched, search = [], pattern.SimplePatternMatcher.match

    def counted(self: Any, model: Any, graph: Any, node: Any, **settings: Any) -> Any:
        if len(self.pattern.output_nodes) > 1:
            searched.append(node.op_type)
        return search(self, model, graph, node, **settings)

    monkeypatch.setattr(pattern.SimplePatternMatcher, "match", counted)
    graphs = []
    for corrected in (True, False):
        searched.clear()
        model = onnx_ir.from_onnx_text(text)
        with optimiser_corrected() if corrected else nullcontext():
            optimizer.optimize_ir(model)
        assert set(searched) == ({"Slice"} if corrected else {"Slice", "Split", "Mul", "Sin", "Cos"})
        graphs.append(Counter(node.op_type for node in model.graph))
    assert graphs[0] == graphs[1]
    assert graphs[0]["Split"] == 1


@pytest.mark.parametrize("least", [1e-12, 1e-9, 2e-8])
def test_a_small_number_that_keeps_a_logarithm_finite_is_kept(least: float, tmp_path: Path) -> None:
    """Broken: PyTorch's exporter takes 1e-9 for 0, and every runtime answers silence, or a row of zeros, with -inf and
    NaN, which no sample need show."""

    class Shares(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return {"log": (rows + least).log(), "share": rows / (rows.sum(1, keepdim=True) + least)}

    rows = np.zeros((3, 4), np.float32)
    signature = infer_signature(rows, {"log": rows, "share": rows})
    source = save(tmp_path / "net", Shares().eval(), rows + 1, serialization_format="pickle", signature=signature)
    answer = run_onnx(TorchSource().export(source, {}, tmp_path / "out"), {"rows": rows})
    np.testing.assert_allclose(answer["log"], np.log(np.float32(least)), rtol=1e-5)
    np.testing.assert_array_equal(answer["share"], 0)


def test_logarithms_of_sums_are_finite_where_pytorchs_are(tmp_path: Path) -> None:
    """Broken: logsigmoid is -inf from -30 down and logaddexp inf from 89 up in every runtime: the score of a classifier
    that is sure, which no validation sample need show."""

    class Scores(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            target = torch.ones_like(a)
            return {
                "sigmoid": torch.nn.functional.logsigmoid(a),
                "sum": torch.logaddexp(a, b),
                "sum2": torch.logaddexp2(a, b),
                "loss": torch.nn.functional.binary_cross_entropy_with_logits(a, target, reduction="none"),
            }

    a = np.array([[-300, -88, -16, 0], [88, 300, -np.inf, np.inf]], np.float32)
    b = np.array([[-290, -88, 16, 1], [300, 300, -np.inf, 2]], np.float32)
    expected = {name: value.numpy() for name, value in Scores()(torch.from_numpy(a), torch.from_numpy(b)).items()}
    signature = infer_signature({"a": a, "b": b}, expected)
    example = {"a": np.abs(a[:1]) / 100, "b": b[:1] / 100}
    source = save(tmp_path / "net", Scores().eval(), example, serialization_format="pickle", signature=signature)
    answer = run_onnx(TorchSource().export(source, {}, tmp_path / "out"), {"a": a, "b": b})
    for name, wanted in expected.items():
        np.testing.assert_allclose(answer[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_angle_of_a_negative_number_is_pytorchs(tmp_path: Path) -> None:
    """Broken: the phase of a spectrum's first number, which has no imaginary part, is -pi where PyTorch's is pi; and
    not a number, or infinity beside infinity, answers 0."""

    class Angle(torch.nn.Module):
        def forward(self, y: Any, x: Any) -> Any:
            return torch.atan2(y, x)

    y = np.array([[0, 0, 0, 1, -1, 2, -2, 3, np.nan, 1e-20]], np.float32).repeat(2, axis=0)
    x = np.array([[-1, 1, 0, -1, -1, 0, 0, 4, 1, -1e20]], np.float32).repeat(2, axis=0)
    signature = infer_signature({"y": y, "x": x}, y)
    example = {"y": np.ones_like(y), "x": x}
    source = save(tmp_path / "net", Angle().eval(), example, signature=signature, serialization_format="pickle")
    (found,) = run_onnx(TorchSource().export(source, {}, tmp_path / "out"), {"y": y, "x": x}).values()
    np.testing.assert_allclose(found, np.arctan2(y, x), rtol=1e-6)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_scattered_mean_is_one(dtype: Any, include_self: bool, tmp_path: Path, prove: Proof) -> None:
    """Broken: PyTorch's exporter writes the last value of each place, and every network on graphs that takes the mean
    of its neighbours is refused."""

    class Neighbours(torch.nn.Module):
        def forward(self, rows: Any, place: Any) -> Any:
            held = torch.full_like(rows[:, :3], 5)
            return held.scatter_reduce(1, place, rows, "mean", include_self=include_self)

    rows = np.arange(-20, 20, 2).reshape(4, 5).astype(dtype)
    example = {"rows": rows, "place": np.array([[0, 0, 0, 2, 2]]).repeat(4, axis=0)}
    signature = infer_signature(example, rows[:, :3])
    source = save(tmp_path / "net", Neighbours().eval(), example, signature=signature, serialization_format="pickle")
    prove(source, example, compliance=PICKLES)


class Hidden(torch.nn.Module):
    def forward(self, scores: Any, mask: Any) -> Any:
        return scores + (1.0 - mask) * -1e4


def test_a_mask_of_whole_numbers_is_subtracted_from_one(tmp_path: Path, prove: Proof) -> None:
    """Broken: PyTorch's exporter refuses `1.0 - mask`, as XLNet, BigBird and many networks of one's own write it."""
    scores, mask = np.ones((4, 3), np.float32), np.arange(12).reshape(4, 3) % 2
    signature = infer_signature({"scores": scores, "mask": mask}, scores)
    source = save(tmp_path / "hidden", Hidden(), [scores, mask], signature=signature)
    prove(source, {"scores": scores, "mask": mask})


def test_a_hamming_window_has_pytorchs_numbers(tmp_path: Path, prove: Proof) -> None:
    """Broken: ONNX's window is 9 % off at its ends, and one that is not periodic is not exported at all."""

    class Windowed(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return rows * torch.hamming_window(8), rows * torch.hamming_window(8, periodic=False)

    rows = IMAGES[:, 0, 0]
    signature = infer_signature(rows, {"a": rows, "b": rows})
    source = save(tmp_path / "net", Windowed().eval(), rows, signature=signature, serialization_format="pickle")
    prove(source, {"rows": rows}, compliance=PICKLES)


@pytest.mark.parametrize(
    ("p", "features", "mode"),
    [(0.0, 3, None), (1.0, 3, None), (2.0, 3, None), (3.0, 3, None), (np.inf, 3, None), (2.0, 40, None), (2.0, 40, 2)],
)
def test_distances_of_all_pairs_are_exported(p: float, features: int, mode: int | None, tmp_path: Path) -> None:
    """Broken: PyTorch's exporter refuses `cdist`, so every network on points, atoms or a codebook."""

    class Distances(torch.nn.Module):
        def forward(self, points: Any, others: Any) -> Any:
            modes = {None: "use_mm_for_euclid_dist_if_necessary", 2: "donot_use_mm_for_euclid_dist"}
            return torch.cdist(points, others, p, compute_mode=modes[mode])

    draw = np.random.default_rng(0)
    points = draw.normal(size=(4, 30, features)).astype(np.float32)
    others = draw.normal(size=(4, 7, features)).astype(np.float32)
    points[0] *= 1e9
    if features == 3 or mode == 2:  # else PyTorch's own product rounds a distance of 0
        others[1] = points[1, :7]
    signature = infer_signature({"points": points, "others": others}, points[:, :, :1])
    example = {"points": points[:2], "others": others[:2]}
    source = save(tmp_path / "net", Distances().eval(), example, signature=signature, serialization_format="pickle")
    exported = TorchSource().export(source, {}, tmp_path / "out")
    for size in (1, 4):
        given = {"points": points[:size], "others": others[:size]}
        (found,) = run_onnx(exported, given).values()
        wanted = Distances()(*map(torch.from_numpy, given.values())).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_lengths_and_signs_are_exported(tmp_path: Path) -> None:
    """Broken: PyTorch's exporter refuses `hypot`, `signbit` and `copysign`; a plain root of squares is inf from
    2e19 up, and a plain comparison takes -0.0 for positive."""

    class Both(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return {
                "length": torch.hypot(a, b),
                "sign": torch.signbit(a),
                "whole": torch.signbit(b.to(torch.int64)),
                "copied": torch.copysign(b, a),
            }

    a = np.array([[-0.0, 0, 3, -1e30, np.inf, np.inf, 1e-30, -np.inf]], np.float32).repeat(2, axis=0)
    b = np.array([[0, 0, -4, 1e30, 1, -np.inf, 1e-30, 0]], np.float32).repeat(2, axis=0)
    expected = {name: value.numpy() for name, value in Both()(torch.from_numpy(a), torch.from_numpy(b)).items()}
    signature = infer_signature({"a": a, "b": b}, expected)
    example = {"a": np.ones_like(a), "b": np.ones_like(b)}
    source = save(tmp_path / "net", Both().eval(), example, signature=signature, serialization_format="pickle")
    answer = run_onnx(TorchSource().export(source, {}, tmp_path / "out"), {"a": a, "b": b})
    np.testing.assert_allclose(answer["length"], expected["length"], rtol=1e-6)
    np.testing.assert_array_equal(answer["sign"], expected["sign"])
    np.testing.assert_array_equal(answer["copied"], expected["copied"])
    np.testing.assert_array_equal(answer["whole"][:, :5], expected["whole"][:, :5])


def test_an_adaptive_max_pool_has_windows_of_different_sizes(tmp_path: Path, prove: Proof) -> None:
    """Broken: PyTorch's exporter refuses adaptive max pools."""

    class Pools(torch.nn.Module):
        def forward(self, image: Any) -> Any:
            pool = torch.nn.functional
            return (
                pool.adaptive_max_pool2d(image, (3, 5)),
                pool.adaptive_max_pool2d(image, (None, 1)),
                pool.adaptive_max_pool1d(image[:, 0], 11),
                pool.adaptive_max_pool3d(image[:, None], (1, 3, 2)),
            )

    signature = infer_signature(IMAGES, dict.fromkeys("abcd", IMAGES))
    source = save(tmp_path / "net", Pools().eval(), IMAGES - 2, signature=signature, serialization_format="pickle")
    prove(source, {"image": IMAGES - 2}, compliance=PICKLES)


def test_an_average_pool_divides_by_its_own_number(tmp_path: Path, prove: Proof) -> None:
    """Broken: PyTorch's exporter leaves divisor_override out, and the model is refused with no word of the cause."""
    pool = torch.nn.AvgPool2d((3, 2), 2, 1, divisor_override=5)
    signature = infer_signature(IMAGES, pool(torch.from_numpy(IMAGES)).numpy())
    source = save(tmp_path / "net", pool.eval(), IMAGES, serialization_format="pickle", signature=signature)
    prove(source, {"input": IMAGES}, compliance=PICKLES)


class Standardised(torch.nn.Module):
    """A convolution whose weights are standardised as BiT's are, and a norm of each row's own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))
        self.scale = torch.nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, image: Any) -> Any:
        weight = torch.nn.functional.batch_norm(self.weight.reshape(1, 4, -1), None, None, training=True, eps=1e-6)
        found = torch.nn.functional.conv2d(image, weight.reshape_as(self.weight))
        rows = found.reshape(1, -1, *found.shape[2:])
        scale = self.scale.repeat(image.shape[0])
        normal = torch.nn.functional.batch_norm(rows, None, None, scale, scale - 1, training=True)
        return normal.reshape(found.shape)


def test_standardised_weights_are_no_training_mode(tmp_path: Path, prove: Proof) -> None:
    """Broken: BiT of transformers and timm's StdConv2d, which normalise their weights by a batch_norm without running
    statistics, are refused as models in training mode, and told to call eval()."""
    net = Standardised().eval()
    images = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    signature = infer_signature(images, net(torch.from_numpy(images)).detach().numpy())
    source = save(tmp_path / "net", net, images, serialization_format="pickle", signature=signature)
    prove(source, {"image": images}, compliance=PICKLES)


def test_a_norm_of_the_whole_batch_is_refused_with_what_helps(tmp_path: Path) -> None:
    """Broken: a network in eval() with `BatchNorm2d(track_running_stats=False)` is told to call eval()."""
    net = torch.nn.BatchNorm2d(IMAGES.shape[1], track_running_stats=False).eval()
    source = save(tmp_path / "net", net, signature=infer_signature(IMAGES, IMAGES))
    reason = TorchSource().refuse(source, Compliance())
    assert reason is not None
    assert "depends on the other rows" in reason
    assert "track_running_stats=True" in reason
    assert "call model.eval()" not in reason


class Recurrent(torch.nn.Module):
    """Of a sequence the last step's answer, and all states."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = getattr(torch.nn, kind)(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, steps: Any) -> Any:
        answers, states = self.recurrent(steps)
        return {
            "last": answers.contiguous().view(-1, answers.shape[1], 8)[:, -1],
            "states": torch.stack(states if isinstance(states, tuple) else (states,)).flatten(1, 2),
        }


def saved_recurrent(path: Path, kind: str) -> Any:
    """Of steps of any number, logged with seven."""
    torch.manual_seed(0)
    steps = np.zeros((4, 7, 3), np.float32)
    signature = ModelSignature(
        Schema([SpecOfTensor(np.dtype(np.float32), (-1, -1, 3), "steps")]),
        Schema(
            [
                SpecOfTensor(np.dtype(np.float32), (-1, 8), "last"),
                SpecOfTensor(np.dtype(np.float32), (-1, -1, 4), "states"),
            ]
        ),
    )
    return save(path, Recurrent(kind).eval(), steps, serialization_format="pickle", signature=signature)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_network_keeps_its_open_length(tmp_path: Path, kind: str) -> None:
    """Broken: an LSTM of sequences of any length is published as one of the example's length, and refuses all
    others."""
    source = saved_recurrent(tmp_path / "net", kind)
    model = TorchSource().export(source, {}, tmp_path / "out")
    assert [len(spec.shape) - sum(isinstance(size, int) for size in spec.shape) for spec in model.signature.inputs] == [
        2
    ]
    assert model.notes == ()
    torch.manual_seed(0)
    network = Recurrent(kind).eval()
    for batch, length in ((1, 1), (4, 7), (3, 19)):
        steps = np.random.default_rng(length).normal(size=(batch, length, 3)).astype(np.float32)
        answer = run_onnx(model, {"steps": steps})
        for name, wanted in network(torch.from_numpy(steps)).items():
            np.testing.assert_allclose(answer[name], wanted.detach().numpy(), atol=1e-5, err_msg=name)


def test_a_length_that_the_trace_fixes_is_said(tmp_path: Path) -> None:
    """Broken: a network whose steps PyTorch's trace unrolls is published as one of the example's length, and nobody is
    told."""
    source = saved_recurrent(tmp_path / "net", "RNN")
    [note] = TorchSource().export(source, {}, tmp_path / "out").notes
    assert note == (
        "the logged signature leaves axis 1 of 'steps' open, and its program takes 7 alone: so does what is made of it"
    )


def test_an_output_that_is_no_tensor_is_refused_with_its_place(tmp_path: Path) -> None:
    """Broken: whoever returns None beside a tensor, as many layers do, is told that output '' is not a tensor."""

    class WithNothing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2, None

    source = save(tmp_path / "net", WithNothing().eval(), ROWS, signature=infer_signature(ROWS, ROWS))
    reason = TorchSource().refuse(source, Compliance())
    assert reason == "its output 2 of 2 is no tensor but None: log a model whose outputs are all tensors"


@pytest.mark.parametrize("kept", ["pickle", "pt2"])
def test_attention_with_a_trained_bias_is_exported(tmp_path: Path, kept: str) -> None:
    """Broken: Swin, BEiT and whoever else adds a computed bias to attention are refused: "Cannot view a tensor"."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.Linear(8, 24)
            self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2 * 3 * 3).reshape(2, 3, 3))

        def forward(self, x: Any) -> Any:
            q, k, v = self.heads(x).view(x.shape[0], 3, 3, 2, 4).permute(2, 0, 3, 1, 4)
            together = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
            return together.transpose(1, 2).reshape(x.shape[0], 3, 8)

    network = Attention().eval()
    rows = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    signature = infer_signature(rows, rows)
    source = save(tmp_path / "net", network, rows, signature=signature, serialization_format=kept)
    answer = run_onnx(TorchSource().export(source, {}, tmp_path / "out"), {"x": rows})
    np.testing.assert_allclose(answer["output"], network(torch.from_numpy(rows)).detach().numpy(), atol=1e-5)


def test_an_archive_that_pytorch_cant_read_back_is_refused_with_what_to_change(tmp_path: Path) -> None:
    """Broken: whoever logged some of their pictures, channels moved forward, as the example is told to use the version
    of PyTorch that they have."""
    example = np.moveaxis(np.zeros((8, 8, 8, 3), np.float32), -1, 1)[::2]
    signature = infer_signature(example, np.zeros((4, 4, 6, 6), np.float32))
    source = save(tmp_path / "net", torch.nn.Conv2d(3, 4, 3).eval(), example, signature=signature)
    try:
        torch.export.load(str(tmp_path / "net" / "data" / "model.pt2"))
        pytest.skip(f"PyTorch {torch.__version__} reads it: 2.15 and newer do")
    except AssertionError as error:
        if not str(error):
            pytest.skip(f"PyTorch {torch.__version__} does not say why it can't: 2.13 and newer do")
    with (
        pytest.raises(SourceError, match=r"torch.export.load can't read it") as caught,
        TorchSource().open(source, Target(name="cpu")),
    ):
        pass
    assert "np.ascontiguousarray" in caught.value.fix


@pytest.mark.parametrize("model", [torch.nn.Dropout(0.5), torch.nn.BatchNorm2d(1)], ids=["dropout", "batch_norm"])
def test_a_model_frozen_in_training_mode_is_refused(tmp_path: Path, model: Any) -> None:
    source = save(tmp_path / "live", model.train(), signature=infer_signature(IMAGES, IMAGES))
    reason = TorchSource().refuse(source, Compliance())
    assert reason is not None
    assert "training mode" in reason
    assert "model.eval()" in reason
    assert "training=self.training" in reason  # of what eval() does not turn off


def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + torch.rand_like(x)

    source = save(tmp_path / "noisy", Noisy(), signature=infer_signature(IMAGES, IMAGES))
    assert "random" in (TorchSource().refuse(source, Compliance()) or "")


class Named(torch.nn.Module):
    """One weight, in a submodule or the model's own parameter of that name."""

    def __init__(self, name: str, *, own: bool) -> None:
        super().__init__()
        self.weight_name = name if own else f"{name}.weight"
        if own:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(3, 8)))
        else:
            self.add_module(name, torch.nn.Linear(8, 3, bias=False))

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.get_parameter(self.weight_name))


ROWS = np.random.default_rng(0).random((4, 8), dtype=np.float32)


def saved_named(path: Path, name: str, *, own: bool) -> Any:
    return save(path, Named(name, own=own).eval(), ROWS, signature=infer_signature({"x": ROWS}, {"y": ROWS}))


@pytest.mark.parametrize("own", [False, True], ids=["submodule", "parameter"])
@pytest.mark.parametrize("name", ["meta", "graph", "code"])
def test_a_name_that_pytorchs_programs_take_is_refused_with_what_to_rename(
    tmp_path: Path, name: str, own: bool
) -> None:
    """Broken: the owner of a model with a submodule called `meta` is told to replace an operation, and there is
    none."""
    reason = TorchSource().refuse(saved_named(tmp_path / "taken", name, own=own), Compliance())
    assert reason is not None
    assert f"its {'parameter or buffer' if own else 'submodule'} {name!r} is called like" in reason
    assert f"rename it (self.{name} to self.{name}_, for example)" in reason


@pytest.mark.parametrize(("name", "own"), [("meta_", False), ("graph_", True)])
def test_a_name_that_was_renamed_as_the_refusal_says_is_exported(
    tmp_path: Path, prove: Proof, name: str, own: bool
) -> None:
    """Broken: who follows the refusal's advice is refused again."""
    prove(saved_named(tmp_path / "renamed", name, own=own), {"x": ROWS})


def test_a_pickle_is_refused_unless_the_policy_allows_it(tmp_path: Path, prove: Proof) -> None:
    source = saved_net(tmp_path / "pickled", IMAGES[:1], serialization_format="pickle")
    reason = TorchSource().refuse(source, Compliance())
    assert reason is not None
    assert "compliance.allow_pickle" in reason
    # The original is there, so its batch opens even though the example has one row only.
    prove(source, {"image": IMAGES}, compliance=PICKLES)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 2)

    def forward(self, rows: Any) -> Any:
        logits = self.out(rows)
        return {"logits": logits, "scores": logits.softmax(-1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_a_signature_the_example_has_the_parameters_type(tmp_path: Path, prove: Proof, dtype: Any) -> None:
    """Broken: MLflow makes no signature for a module that answers a dict, and reads the floats of its example as
    float64. A module of float32 was refused with PyTorch's "Double and Float"."""
    rows = np.random.default_rng(0).random((4, 3)).astype(str(dtype).removeprefix("torch."))
    source = save(tmp_path / "heads", TwoHeads().to(dtype).eval(), rows, serialization_format="pickle")
    model = prove(source, {"rows": rows}, compliance=PICKLES)
    assert model.signature.inputs[0].dtype == str(rows.dtype)
    assert [spec.name for spec in model.signature.outputs] == ["logits", "scores"]


def test_torchscript_is_refused_with_its_reason(tmp_path: Path) -> None:
    source = save(tmp_path / "script", torch.jit.script(torch.nn.Linear(8, 2)), serialization_format="pickle")
    assert "TorchScript" in (TorchSource().refuse(source, PICKLES) or "")


def test_the_answer_is_what_mlflows_own_pyfunc_does(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    how = TorchSource().prediction_format(source)
    loaded = mlflow.pyfunc.load_model(source.path)
    assert how == {"kind": "array", "outputs": ["output"], "columns": None, "frame_in_frame_out": False}
    answer = loaded.predict(IMAGES)
    with TorchSource().open(source, Target(name="cpu")) as session:
        np.testing.assert_array_equal(answer, session.run({"image": IMAGES})["output"])


def test_a_data_frame_is_answered_with_a_data_frame(tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(np.random.default_rng(0).random((4, 3), dtype=np.float32), columns=["a", "b", "c"])
    linear = torch.nn.Linear(3, 2).eval()
    source = save(
        tmp_path / "frame", linear, frame, serialization_format="pickle", signature=infer_signature(frame, frame[["a"]])
    )
    how = TorchSource().prediction_format(source)
    assert isinstance(mlflow.pyfunc.load_model(source.path).predict(frame), pd.DataFrame)
    assert how["frame_in_frame_out"]
    assert how["columns"] == ["a", "b", "c"]


def test_params_of_the_signature_are_those_that_are_compiled(tmp_path: Path) -> None:
    """Broken: the original passes `scale=2.0` of its signature on to forward, and the published model takes 1."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return x * scale

    rows = np.ones((4, 3), np.float32)
    reasons = []
    for name, params in (("own", {"scale": 1.0}), ("other", {"scale": 2.0}), ("unknown", {"factor": 1.0})):
        signature = infer_signature(rows, rows, params=params)
        source = save(tmp_path / name, Scaled(), rows, serialization_format="pickle", signature=signature)
        reasons.append(TorchSource().refuse(source, PICKLES) or "")
        if name == "own":
            assert TorchSource().prediction_format(source)["params"] == {"scale": 1.0}
    assert reasons[0] == ""
    assert "compiled is scale=1.0" in reasons[1]
    assert "param factor, which forward does not take with a default" in reasons[2]


def test_integer_inputs_and_a_scalar_for_each_row(tmp_path: Path, prove: Proof) -> None:
    class Count(torch.nn.Module):
        def forward(self, tokens: Any) -> Any:
            return (tokens > 2).sum(-1)

    tokens = np.arange(12).reshape(4, 3)
    source = save(tmp_path / "count", Count(), tokens, signature=infer_signature(tokens, tokens[:, 0]))
    model = prove(source, {"tokens": tokens})
    assert str(model.signature.outputs[0]) == "output: int64[batch]"


class InPlace(torch.nn.Module):
    """Changes its input, by itself and by a view of it, and answers with it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 2)

    def forward(self, rows: Any) -> Any:
        rows.relu_()
        rows[:, 0].mul_(3)
        return self.out(rows), rows


@pytest.mark.parametrize("form", ["pt2", "pickle"])
def test_a_model_that_works_in_place_leaves_the_samples_as_they_are(tmp_path: Path, prove: Proof, form: str) -> None:
    """Broken: the original would change the samples that it is compared on, and each call would answer to the last."""
    rows = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    signature = infer_signature(rows, {"scores": rows[:, :2], "positive": rows})
    source = save(tmp_path / "in-place", InPlace(), rows.copy(), signature=signature, serialization_format=form)
    positive = np.maximum(rows, 0) * np.array([3, 1, 1, 1], np.float32)
    kept = rows.copy()
    with TorchSource().open(source, Target(name="cpu")) as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run({"rows": rows})["positive"], positive)
            np.testing.assert_array_equal(rows, kept)
    prove(source, {"rows": rows}, compliance=PICKLES)
    saved = TorchSource().export_program(source, {}, tmp_path / "program")
    given = torch.from_numpy(rows)
    _, answered = torch.export.load(saved.path).module()(given)
    np.testing.assert_array_equal(answered.numpy(), positive)
    np.testing.assert_array_equal(given.numpy(), kept)


class Counting(torch.nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, rows: Any) -> Any:
        self.calls += 1
        return rows * self.calls if self.reads else rows * 2


def test_a_model_whose_answer_depends_on_the_calls_before_is_refused(tmp_path: Path, prove: Proof) -> None:
    """Broken: what is compiled would keep the state that the model was logged with. A counter that nothing reads is
    none."""
    rows = np.ones((4, 3), np.float32)
    stateful = save(tmp_path / "stateful", Counting(reads=True), rows, signature=infer_signature(rows, rows))
    assert "changes its own state (calls)" in (TorchSource().refuse(stateful, Compliance()) or "")
    counted = save(tmp_path / "counted", Counting(reads=False), rows, signature=infer_signature(rows, rows))
    prove(counted, {"rows": rows})


class Attribute(torch.nn.Module):
    """Counts its calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)

    def forward(self, rows: Any) -> Any:
        self.calls.add_(1)
        return rows * self.calls


class Places(torch.nn.Module):
    """Keeps a number for each place, for as many as the longest input had."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(0), persistent=False)

    def forward(self, rows: Any) -> Any:
        if self.places.shape[0] < rows.shape[1]:
            self.places = torch.arange(rows.shape[1]).float()
        return rows + self.places


def test_tensors_of_its_own_that_a_model_changes_are_named_with_what_helps(tmp_path: Path, prove: Proof) -> None:
    """Broken: the refusal is PyTorch's traceback, and the advice on it helps nobody."""
    rows = np.ones((4, 3), np.float32)
    options = {"signature": infer_signature(rows, rows), "serialization_format": "pickle"}
    attribute = save(tmp_path / "attribute", Attribute(), rows, **options)
    assert "changes its own state (calls)" in (TorchSource().refuse(attribute, PICKLES) or "")
    places = Places()
    assert "call the model on its longest input before" in (
        TorchSource().refuse(save(tmp_path / "empty", places, rows, **options), PICKLES) or ""
    )
    places(torch.from_numpy(rows))
    prove(save(tmp_path / "filled", places, rows, **options), {"rows": rows}, compliance=PICKLES)


class Chosen(torch.nn.Module):
    """Computes with the rows that are chosen alone, as mixtures of experts do."""

    def forward(self, rows: Any) -> Any:
        answer, chosen = torch.zeros_like(rows), rows[:, 0] > 0
        answer[chosen] = rows[chosen] * 2
        return answer


def test_sizes_that_depend_on_data_are_exported(tmp_path: Path, prove: Proof) -> None:
    """Broken: looking for what the program changes leaves symbols behind, and the exporter refuses the network
    (DeBERTa, a mixture of experts)."""
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    source = save(tmp_path / "chosen", Chosen(), rows, signature=infer_signature(rows, rows))
    prove(source, {"rows": rows})


def test_looking_for_what_changes_leaves_the_programs_sizes_as_they_were() -> None:
    """Broken: the example's batch becomes the only one (Swin V2, DETR), or the exporter's trace fails."""
    program = torch.export.export(Chosen(), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    sizes = next(node.meta["val"].fake_mode for node in program.graph.nodes if node.op == "placeholder").shape_env
    before = dict(sizes.var_to_range)
    assert changed_tensors(program) == ()
    assert dict(sizes.var_to_range) == before


def test_complex_numbers_are_refused_with_what_to_log(tmp_path: Path) -> None:
    """Broken: the graph gives pairs of numbers, and every candidate fails on its shape."""
    rows = np.ones((4, 3), np.float32)

    class Spectrum(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return torch.fft.fft(rows)

    source = save(tmp_path / "spectrum", Spectrum(), rows, serialization_format="pickle")
    assert "are complex" in (TorchSource().refuse(source, PICKLES) or "")


def test_a_parameter_as_an_output_is_answered(tmp_path: Path, prove: Proof) -> None:
    """Broken: the original could not answer, since PyTorch gives no array of a tensor that has a gradient."""

    class Token(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = torch.nn.Parameter(torch.arange(3.0))

        def forward(self, rows: Any) -> Any:
            return {"sum": rows + self.token, "token": self.token.expand(rows.shape[0], -1)}

    rows = np.ones((4, 3), np.float32)
    source = save(tmp_path / "token", Token(), rows, signature=infer_signature(rows, {"sum": rows, "token": rows}))
    prove(source, {"rows": rows})


class Masked(torch.nn.Module):
    """Attention with a mask of what is padding: as floats within PyTorch's encoder, as truths, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 6, padding_idx=0)
        self.encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1)
        self.register_buffer("causal", torch.ones(4, 4).tril().bool())

    def forward(self, ids: Any) -> Any:
        found = self.embed(ids)
        heads = found.unflatten(2, (2, 3)).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return {
            "encoded": self.encoder(found, src_key_padding_mask=ids == 0),
            "attended": attend(heads, heads, heads, attn_mask=(ids != 0)[:, None, None]),
            "causal": attend(heads, heads, heads, attn_mask=self.causal),
        }


@pytest.mark.slow
def test_a_sample_of_padding_alone_is_answered_as_by_the_original(tmp_path: Path, prove: Proof) -> None:
    """Broken: where a mask hides everything the graph would answer NaN, or as if nothing were hidden, and no sample
    that has something to look at shows it."""
    torch.manual_seed(0)
    ids = np.array([[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 0, 0], [7, 0, 0, 0]])
    network = Masked().eval()
    answers = {name: value.detach().numpy() for name, value in network(torch.from_numpy(ids)).items()}
    source = save(tmp_path / "masked", network, ids, signature=infer_signature(ids, answers))
    model = prove(source, {"ids": ids})
    answer = run_onnx(model, {"ids": ids})
    for name, wanted in answers.items():
        np.testing.assert_allclose(answer[name], wanted, rtol=1e-4, atol=1e-5)
    kinds = [node.op_type for node in onnx.load(model.path).graph.node]
    assert kinds.count("ReduceMin") == 2  # a mask that does not depend on the inputs hides nothing more in any sample


class Namesakes(torch.nn.Module):
    """Parameters that are called like an input and like an output, and an output like an operator before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.total = torch.nn.Parameter(torch.full((1,), 5.0)), torch.nn.Parameter(torch.full((3,), 7.0))

    def forward(self, scale: Any) -> Any:
        return {"total": scale * self.scale + self.total, "relu": torch.relu(scale) + 1}


def test_what_is_called_like_an_input_or_an_output_keeps_its_place(tmp_path: Path, prove: Proof) -> None:
    """Broken: the input would stand where the weight belongs, or the export be no valid ONNX."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    signature = infer_signature({"scale": rows}, {"total": rows, "relu": rows})
    source = save(tmp_path / "namesakes", Namesakes(), rows, signature=signature)
    answer = run_onnx(prove(source, {"scale": rows}), {"scale": rows})
    np.testing.assert_allclose(answer["total"], rows * 5 + 7)
    np.testing.assert_allclose(answer["relu"], rows + 1)


def test_outputs_are_the_callers(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    with TorchSource().open(source, Target(name="cpu")) as session:
        first = session.run({"image": IMAGES})["output"]
        kept = first.copy()
        session.run({"image": IMAGES * 2})
        np.testing.assert_array_equal(first, kept)


def test_threads_are_set_while_the_model_is_open_and_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with TorchSource().open(saved_net(tmp_path / "net"), Target(name="cpu", threads=before + 1)):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# ------------------------------------------------------------------------------------------------ hostile archives


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("echo hostile > /dev/null",)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def tamper(source: Any, name: str, content: bytes) -> Path:
    path = Path(source.path) / "data" / "model.pt2"
    with zipfile.ZipFile(path) as archive:
        records = {entry: archive.read(entry) for entry in archive.namelist()}
    records[next((entry for entry in records if entry.endswith(name)), f"model/{name}")] = content
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in records.items():
            archive.writestr(entry, data)
    return path


def test_an_ordinary_archive_is_data_only(tmp_path: Path) -> None:
    assert pt2.refuse(Path(saved_net(tmp_path / "net").path) / "data" / "model.pt2") is None


def test_pickled_sample_inputs_that_run_code_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    stream = io.BytesIO()
    torch.save(Payload(), stream)
    tamper(source, "sample_inputs/model.pt", stream.getvalue())
    reason = TorchSource().refuse(source, Compliance())
    assert reason is not None
    assert "not plain tensors" in reason


def test_a_record_that_no_loader_of_ours_knows_is_refused(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    assert pt2.refuse(tamper(source, "data/aotinductor/model/x.so", b"\x7fELF" + pickle.dumps(1))) is not None


def test_a_shape_expression_that_is_code_is_refused(tmp_path: Path) -> None:
    source = saved_net(tmp_path / "net")
    path = Path(source.path) / "data" / "model.pt2"
    with zipfile.ZipFile(path) as archive:
        text = archive.read("model/models/model.json").decode()
    hostile = text.replace('"expr_str": "Symbol(', "\"expr_str\": \"__import__('os').system('true') + Symbol(")
    assert hostile != text
    assert "could run code" in (pt2.refuse(tamper(source, "models/model.json", hostile.encode())) or "")


def with_two_directories(harmless: Path, hostile: Path, into: Path) -> Path:
    """A zip whose end record names the hostile archive's directory, as torch reads it, while Python's reader takes the
    directory that stands right before that record, which is the harmless archive's."""
    first, second = hostile.read_bytes(), harmless.read_bytes()
    first_start, second_start = zipfile.ZipFile(hostile).start_dir, zipfile.ZipFile(harmless).start_dir
    padding = bytes(max(0, second_start - first_start))  # so that no offset below is negative
    moved = first_start + len(padding)
    end = second.rindex(b"PK\x05\x06")
    directory, record = bytearray(second[second_start:end]), bytearray(second[end:])
    assert len(directory) == len(first) - first_start - 22  # the same names, so that one size fits both
    position = 0
    while position < len(directory):
        offset = struct.unpack_from("<I", directory, position + 42)[0] + moved - second_start
        struct.pack_into("<I", directory, position + 42, offset)
        position += 46 + sum(struct.unpack_from("<HHH", directory, position + 28))
    struct.pack_into("<I", record, 16, moved)
    theirs = first[:first_start] + padding + first[first_start : first_start + len(directory)]
    into.write_bytes(theirs + second[:second_start] + directory + record)
    return into


def test_of_an_archive_that_two_readers_read_differently_only_what_was_checked_is_loaded(tmp_path: Path) -> None:
    """Broken: an archive with two directories would show us its harmless records, and torch those that run code."""
    source = saved_net(tmp_path / "net")
    path = Path(source.path) / "data" / "model.pt2"
    with zipfile.ZipFile(path) as archive:  # both by one writer, so that their directories are of one form
        inputs = archive.read(next(name for name in archive.namelist() if name.endswith("sample_inputs/model.pt")))
    harmless = Path(shutil.copy(tamper(source, "sample_inputs/model.pt", inputs), tmp_path / "harmless.pt2"))
    marker, stream = tmp_path / "it-ran", io.BytesIO()
    torch.save(Touch(str(marker)), stream)
    hostile = Path(shutil.copy(tamper(source, "sample_inputs/model.pt", stream.getvalue()), tmp_path / "hostile.pt2"))
    with_two_directories(harmless, hostile, path)
    torchs = torch._C.PyTorchFileReader(str(path)).get_record("data/sample_inputs/model.pt")
    assert torchs == stream.getvalue(), "torch must see the hostile record, or this test shows nothing"
    assert TorchSource().refuse(source, Compliance()) is None
    with TorchSource().open(source, Target(name="cpu")) as session:
        assert session.run({"image": IMAGES})["output"].shape == (4, 10)
    TorchSource().export(source, {}, tmp_path / "out")
    assert not marker.exists()


def test_an_archive_that_unpacks_to_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    """Broken: a small file would fill the memory of the worker that looks at it."""
    source = saved_net(tmp_path / "net")
    path = Path(source.path) / "data" / "model.pt2"
    with zipfile.ZipFile(path) as archive:
        records = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in records.items():
            archive.writestr(entry, data)
        archive.writestr("model/extra/zeros", bytes(10**7))
    assert "compressed" in (pt2.refuse(path) or "")


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"nothing")
    assert "not a readable" in (pt2.refuse(tmp_path / "model.pt2") or "")


def test_the_program_form_has_the_same_names_order_and_open_batch_as_the_graph(tmp_path: Path) -> None:
    """Broken: a compiler that starts from the program would be fed its inputs in another order than one that starts
    from the graph."""
    rows = IMAGES[:, 0]
    signature = infer_signature({"a": rows, "b": rows}, {"sum": rows, "dot": rows[..., 0]})
    source = save(tmp_path / "two", Two(), [rows, rows], signature=signature)
    made = TorchSource().export_program(source, {}, tmp_path / "program")
    assert (made.form, made.made_from) == ("torch-export", source.digest)
    assert made.signature == TorchSource().export(source, {}, tmp_path / "graph").signature
    assert made.signature.fixed_batch is None
    program = torch.export.load(made.path)
    for count in (1, 3):
        left, right = torch.rand(count, 8, 8), torch.rand(count, 8, 8)
        args, kwargs = torch.utils._pytree.tree_unflatten([left, right], program.call_spec.in_spec)
        total, dot = torch.utils._pytree.tree_leaves(program.module()(*args, **kwargs))
        torch.testing.assert_close(total, left + right)
        torch.testing.assert_close(dot, (left * right).sum(-1))


def test_the_program_form_is_refused_a_shape_that_the_source_has_fixed(tmp_path: Path) -> None:
    """Broken: a program of batch 1 would be compiled for a target that serves batches of 8."""
    source = saved_net(tmp_path / "one", IMAGES[:1])
    wanted = {"image": ShapeRange(min=(1, 1, 8, 8), typical=(8, 1, 8, 8), max=(8, 1, 8, 8))}
    with pytest.raises(SourceError, match="fixed batch 1, the policy asks for batch 8"):
        TorchSource().export_program(source, wanted, tmp_path / "out")
    assert TorchSource().export_program(source, {}, tmp_path / "out").signature.fixed_batch == 1


class Texts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(50, 4), torch.nn.Linear(7, 3)

    def forward(self, ids: Any, feats: Any) -> Any:
        return self.out(torch.cat([self.embed(ids).mean(1), feats], dim=1))


class Fixed(Texts):
    """Its forward computes with seven ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(7, 1))

    def forward(self, ids: Any, feats: Any) -> Any:
        return self.out(torch.cat([(self.embed(ids) * self.weights).mean(1), feats], dim=1))


def saved_sequence(path: Path, model: Any, *, length: int = 7, opened: bool) -> Any:
    """A pickled module of two inputs, whose example has so many ids."""
    ids, feats = np.ones((4, length), np.int64), np.ones((4, 3), np.float32)
    signature = ModelSignature(
        Schema(
            [
                SpecOfTensor(np.dtype(np.int64), (-1, -1 if opened else length), "ids"),
                SpecOfTensor(np.dtype(np.float32), (-1, 3), "feats"),
            ]
        )
    )
    mlflow.pytorch.save_model(
        model.eval(), path, input_example={"ids": ids, "feats": feats}, pip_requirements=["torch"],
        signature=signature, serialization_format="pickle",
    )  # fmt: skip
    return source_of(path, "pytorch")


LONGER = {"ids": ShapeRange(min=(1, 1), typical=(4, 7), max=(8, 40))}


@pytest.mark.parametrize(
    ("opened", "length", "shapes"), [(True, 7, LONGER), (True, 1, {}), (False, 7, LONGER)],
    ids=["signature and shapes", "signature alone", "shapes alone"],
)  # fmt: skip
def test_a_dimension_is_open_that_the_signature_or_the_policy_leaves_open(
    tmp_path: Path, prove: Proof, opened: bool, length: int, shapes: Any
) -> None:
    """Broken: a pickled module of texts or sequences could be compiled for the length of its example alone, and what
    the error advises would change nothing."""
    source = saved_sequence(tmp_path / "model", Texts(), length=length, opened=opened)
    assert TorchSource().refuse(source, PICKLES) is None
    model = TorchSource().export(source, shapes, tmp_path / "out")
    assert str(model.signature.inputs[0]) == "ids: int64[batch, ids_1]"
    assert str(model.signature.inputs[1]) == "feats: float32[batch, 3]"
    given = {"ids": np.arange(80).reshape(2, 40) % 50, "feats": np.ones((2, 3), np.float32)}
    with TorchSource().open(source, Target(name="cpu", shapes=shapes)) as session:
        (expected,) = session.run(given).values()
        assert session.signature == model.signature
    session = onnxruntime.InferenceSession(model.path)
    np.testing.assert_allclose(session.run(None, given)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_signature_without_names_leaves_its_axes_open_too(tmp_path: Path, prove: Proof) -> None:
    """Broken: a network logged with `TensorSpec(type, (-1, -1, 4))`, as MLflow's documentation writes it, would be
    compiled for its example's length alone, and nothing would say so."""
    rows = np.random.default_rng(0).random((4, 9, 4), dtype=np.float32)
    signature = ModelSignature(Schema([SpecOfTensor(np.dtype(np.float32), (-1, -1, 4))]))
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
    source = save(tmp_path / "m", net, rows, signature=signature, serialization_format="pickle")
    model = prove(source, {"input": rows[:, :5]}, compliance=PICKLES)
    assert str(model.signature.inputs[0]) == "input: float32[batch, input_1, 4]"


class Branching(Texts):
    """Of more than ten ids it takes the first ten, plus one."""

    def forward(self, ids: Any, feats: Any) -> Any:
        return super().forward(ids if ids.shape[1] <= 10 else ids[:, :10] + 1, feats)


def test_sizes_for_which_the_forward_goes_another_way_are_known(tmp_path: Path) -> None:
    """Broken: the published model answers longer texts without a word, and otherwise than the original."""
    source = saved_sequence(tmp_path / "model", Branching(), opened=True)
    model = TorchSource().export(source, {}, tmp_path / "out")
    assert (model.smallest, model.largest) == ({}, {"ids": (None, 10)})
    with pytest.raises(SourceError, match="may go another way above 10 in dimension 1 of input 'ids', and the policy"):
        TorchSource().export(source, LONGER, tmp_path / "out2")
    longer = saved_sequence(tmp_path / "longer", Branching(), length=12, opened=True)
    model = TorchSource().export_program(longer, {}, tmp_path / "out3")
    assert (model.smallest, model.largest) == ({"ids": (None, 11)}, {})
    with pytest.raises(
        SourceError, match="another way below 11 in dimension 1 of input 'ids', and the policy"
    ) as error:
        TorchSource().export(longer, LONGER, tmp_path / "out4")
    assert error.value.fix.startswith("set min in the target's shapes to 11. For sizes below 11 alone, log it with an")


class Sized(torch.nn.Module):
    """Goes the way that `asked` names for these sizes."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, ids: Any, feats: Any) -> Any:
        if self.asked == "tail":
            return ids[:, -4:].float().mean(1, keepdim=True) + feats
        if self.asked == "padded":  # refuses three and less
            return torch.nn.functional.pad(ids, (0, 4)).unfold(1, 8, 4).float().mean((1, 2)).unsqueeze(1) + feats
        if self.asked == "refuses" and ids.shape[1] % 3:
            raise ValueError("thirds alone")
        ways = {"even": ids.shape[1] % 2 == 0, "seven": ids.shape[1] != 7, "one": ids.shape[1] > 1}
        return ids.float().mean(1, keepdim=True) + feats * (2 if ways.get(self.asked, True) else 3)


@pytest.mark.parametrize(
    ("asked", "smallest", "conditions"),
    [
        ("even", {}, ('(size("ids", 1) % 2) == 0',)),
        ("seven", {}, ('size("ids", 1) != 7',)),
        ("refuses", {}, ('(size("ids", 1) % 3) == 0',)),
        ("one", {"ids": (None, 2)}, ()),
        ("tail", {}, ()),
        ("padded", {"ids": (None, 4)}, ()),
    ],
)
def test_what_a_forward_asks_of_a_size_is_a_condition_only_where_it_changes_answers(
    tmp_path: Path, asked: str, smallest: Any, conditions: tuple[str, ...]
) -> None:
    """Broken: a forward that goes another way for odd lengths is answered wrongly there without a word; or what only
    the trace asked, as for `ids[:, -4:]`, has short texts refused that the original takes."""
    source = saved_sequence(tmp_path / "model", Sized(asked), length=12, opened=True)
    model = TorchSource().export(source, {}, tmp_path / "out")
    assert (model.smallest, model.largest, model.conditions) == (smallest, {}, conditions)


class Crowded(torch.nn.Module):
    """Of more than eight rows it answers otherwise."""

    def forward(self, rows: Any) -> Any:
        return rows * 2 if rows.shape[0] <= 8 else rows.cumsum(1)


def test_a_batch_that_the_forward_answers_otherwise_is_no_part_of_what_is_taken(tmp_path: Path) -> None:
    """Broken: a request of nine rows is answered in parts of the proven batches, and the original answers another
    thing."""
    rows = np.random.default_rng(0).random((4, 3), dtype=np.float32)
    signature = infer_signature(rows, rows)
    source = save(tmp_path / "m", Crowded(), rows, signature=signature, serialization_format="pickle")
    model = TorchSource().export(source, {}, tmp_path / "out")
    (condition,) = map(SizeCondition, model.conditions)
    name = model.signature.inputs[0].name
    assert [condition.holds({(name, 0): count}) for count in (1, 8, 9, 150)] == [True, True, False, False]


class Positions(torch.nn.Module):
    """A vision transformer's patches, with trained positions for 4 by 4 of them, resized for other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.arange(16.0).reshape(1, 1, 4, 4))

    def forward(self, image: Any) -> Any:
        patches, places = torch.nn.functional.avg_pool2d(image, 4), self.places
        if patches.shape[-2:] != (4, 4):
            places = torch.nn.functional.interpolate(places, size=patches.shape[-2:], mode="bilinear")
        return patches.flatten(2).transpose(1, 2) + places.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("side", [16, 18])
def test_a_condition_on_a_product_does_not_hide_those_on_its_factors(tmp_path: Path, side: int) -> None:
    """Broken: a picture of 2 by 8 patches, which are 16 too, is answered with the positions of 4 by 4 patches without
    a word."""
    images = np.random.default_rng(0).random((2, 1, side, side), dtype=np.float32)
    signature = ModelSignature(Schema([SpecOfTensor(np.dtype(np.float32), (-1, 1, -1, -1), "image")]))
    source = save(tmp_path / "m", Positions(), images, signature=signature, serialization_format="pickle")
    model = TorchSource().export(source, {}, tmp_path / "out")
    conditions = [SizeCondition(text) for text in model.conditions]

    def taken(height: int, width: int) -> bool:
        return all(each.holds({("image", 2): height, ("image", 3): width}) for each in conditions)

    assert taken(16, 16)
    assert taken(19, 17)
    for height, width in ((8, 32), (32, 8), (4, 64), (32, 16), (20, 20)):
        assert not taken(height, width), (height, width)


def test_a_policy_that_asks_for_sizes_that_break_a_condition_is_refused(tmp_path: Path) -> None:
    """Broken: what the policy promises is published, and answered by the way of other sizes."""
    source = saved_sequence(tmp_path / "model", Sized("even"), length=12, opened=True)
    shapes = {"ids": ShapeRange(min=(1, 4), typical=(4, 8), max=(8, 15))}
    with pytest.raises(SourceError, match=r"where \(size\(\"ids\", 1\) % 2\) == 0 does not hold, and max in .* 15 for"):
        TorchSource().export(source, shapes, tmp_path / "out")


def test_an_archive_whose_module_refuses_a_size_keeps_that_condition(tmp_path: Path) -> None:
    """Broken: the original, as MLflow loads it, refuses odd lengths, and the published model answers them."""
    axes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    given = torch.ones(2, 12, dtype=torch.int64), torch.ones(2, 3)
    program = torch.export.export(Sized("even"), given, dynamic_shapes=(axes, {0: torch.export.Dim.AUTO}))
    names = ["ids", "feats"]
    (condition,) = [each for each in torch_sizes.guards(program, names) if "%" in each.text]
    source = source_of(tmp_path, "pytorch")
    model = save_program(program, signature_of(program, names, ["output"]), source, {}, tmp_path / "out")
    found = torch_sizes.compare(model, program, program.module(), [condition])
    assert found.needed == (condition,)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_inputs_that_are_made_to_compare_mask_no_whole_row(length: int) -> None:
    """Broken: a row that is masked throughout is answered otherwise, and a BERT would refuse texts of one token."""
    made = torch_sizes._Runs._resized(
        torch.ones(64, 7, dtype=torch.int64), "mask", {("mask", 0): 64, ("mask", 1): length}
    )
    assert made.shape == (64, length)
    assert made.any(1).all()


class Following(torch.nn.Module):
    """Its second input is one longer than its first."""

    def forward(self, ids: Any, feats: Any) -> Any:
        return ids + feats[:, 1:] - feats[:, :-1]


class FollowingLong(Following):
    """From eight ids on."""

    def forward(self, ids: Any, feats: Any) -> Any:
        return super().forward(ids, feats) if ids.shape[1] >= 8 else ids


@pytest.mark.parametrize(("model", "smallest"), [(Following, [None, None]), (FollowingLong, [8, 9])])
def test_a_size_that_follows_another_has_no_limit_of_its_own(model: Any, smallest: list[int | None]) -> None:
    """Broken: the second input of the smallest size that the first may have is refused, though nothing excludes it."""
    given = tuple(torch.ones(2, size) for size in (12, 13))
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) * 2
    program = torch.export.export(model(), given, dynamic_shapes=sizes)
    open_sizes = [node.meta["val"].shape[1] for node in program.graph.nodes if node.op == "placeholder"]
    assert [_limits(program, size)[0] for size in open_sizes] == smallest


def test_short_sizes_that_no_forward_excludes_are_no_limit(tmp_path: Path) -> None:
    """Broken: the tracer lets each open size begin at 2, and the published model would refuse texts of one token."""
    source = saved_sequence(tmp_path / "model", Texts(), length=12, opened=True)
    model = TorchSource().export(source, {}, tmp_path / "out")
    assert (model.smallest, model.largest) == ({}, {})


def test_a_dimension_that_the_forward_has_fixed_stays_so_and_the_message_says_it(tmp_path: Path) -> None:
    """Broken: a module that takes one length alone could not be compiled at all, or the advice would send its owner
    round in circles."""
    source = saved_sequence(tmp_path / "model", Fixed(), opened=True)
    assert TorchSource().export(source, {}, tmp_path / "out").signature.inputs[0].shape == ("batch", 7)
    with pytest.raises(SourceError, match="fixed dimension 1 of input 'ids' to 7, the policy asks for 40") as refused:
        TorchSource().export(source, LONGER, tmp_path / "out2")
    assert "computes with this size alone" in refused.value.fix


class Stateful(torch.nn.Module):
    """A GRU whose state lies as PyTorch has it, [layers, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(4, 3, 2, batch_first=True)

    def forward(self, rows: Any, state: Any) -> Any:
        return self.gru(rows, state)


def test_a_state_whose_axis_0_is_no_batch_is_refused_with_how_to_log_it(tmp_path: Path) -> None:
    """Broken: the message says to log an example of two rows or more, which it has."""
    example = {"rows": np.ones((4, 5, 4), np.float32), "state": np.ones((2, 4, 3), np.float32)}
    source = save(tmp_path / "m", Stateful().eval(), example, serialization_format="pickle")
    signature = TorchSource().export(source, {}, tmp_path / "out").signature
    with pytest.raises(SourceError, match="takes batches of 2 only") as refused:
        demand_batch_sizes(source, signature, Target(name="cpu", batch_sizes=(1, 8)))
    assert "must be the batch, and is 4 in 'rows', 2 in 'state'" in refused.value.fix
    assert "two rows or more" not in refused.value.fix


class ByRow(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        return torch.stack([row / row.sum() for row in rows])


def test_a_forward_with_a_loop_over_the_rows_is_refused_with_what_to_change(tmp_path: Path) -> None:
    """Broken: the message says to log an example of two rows or more, which it has."""
    source = save(tmp_path / "m", ByRow().eval(), ROWS, serialization_format="pickle")
    signature = TorchSource().export(source, {}, tmp_path / "out").signature
    with pytest.raises(SourceError, match=f"takes batches of {len(ROWS)} only") as refused:
        demand_batch_sizes(source, signature, Target(name="cpu", batch_sizes=(1, 8)))
    assert "no loop over the rows" in refused.value.fix


class Stacked(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        return torch.movedim(rows[:, :2].T, 1, 0)


class ResultOfEachRow(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        return [{"score": row[:2], "twice": row[:2] * 2} for row in rows.unbind(0)]


def test_a_forward_with_a_dict_for_each_row_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """Broken: where the policy asks for batches of 2 alone, the two numbers of a row are taken for two rows, and the
    model is published with the answers to row 0 as those of both."""
    source = save(tmp_path / "m", ResultOfEachRow().eval(), ROWS[:2], serialization_format="pickle")
    reason = TorchSource().refuse(source, Compliance(allow_pickle=True))
    assert reason is not None
    assert "answers 2 rows with 4 tensors, and 4 with 8" in reason
    assert "torch.stack" in reason


@pytest.mark.parametrize("form", ["pickle", "pt2"])
def test_an_output_whose_rows_are_on_another_axis_is_refused(tmp_path: Path, form: str) -> None:
    """Broken: [2, batch] is taken for two rows where the policy asks for batches of 2 alone, and is published."""

    class Across(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return rows[:, :2].T

    source = save(tmp_path / "m", Across().eval(), ROWS, serialization_format=form)
    reason = TorchSource().refuse(source, Compliance(allow_pickle=True))
    assert reason is not None
    assert "has the shape [2, batch], and axis 0 must be the batch" in reason


@pytest.mark.parametrize("network", [ByRow, Stacked], ids=["fixed", "open"])
def test_a_forward_that_stacks_what_it_answers_to_each_row_is_taken(tmp_path: Path, network: Any) -> None:
    """Broken: following the advice is refused too."""
    source = save(tmp_path / "m", network().eval(), ROWS, serialization_format="pickle")
    assert TorchSource().refuse(source, Compliance(allow_pickle=True)) is None


class Repeated(torch.nn.Module):
    """A parameter for each row, whose number comes from len(), as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(1, ROWS.shape[1]))

    def forward(self, rows: Any) -> Any:
        return torch.cat([self.first.expand(len(rows), -1), rows], 1)


def test_a_batch_that_len_fixed_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """Broken: its owner reads to take sizes from x.shape[0], and does not see that len(x) is none."""
    source = save(tmp_path / "m", Repeated().eval(), ROWS, serialization_format="pickle")
    signature = TorchSource().export(source, {}, tmp_path / "out").signature
    with pytest.raises(SourceError, match=f"takes batches of {len(ROWS)} only") as refused:
        demand_batch_sizes(source, signature, Target(name="cpu", batch_sizes=(1, 8)))
    assert "not len(x), which fixes them" in refused.value.fix


class Scores(NamedTuple):
    logits: Any
    shifted: Any


@dataclass
class Prediction:
    logits: Any
    loss: Any = None
    layers: Any = ()


class Answering(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: Any) -> Any:
        logits = rows * 2
        if self.kind == "named tuple":
            return Scores(logits, rows + 1)
        if self.kind == "dataclass":
            return Prediction(logits, layers=(rows + 1, None))
        if self.kind == "nested":
            return {"heads": {"label": logits, "boxes": [rows - 1]}, "shifted": rows + 1}
        if self.kind == "one name twice":
            return {"a": {"b": logits}, "a.b": rows + 1}
        return {"dict": {"logits": logits, "loss": None}, "tuple": (logits, None)}.get(self.kind, Unknown(logits))


class Unknown:
    def __init__(self, logits: Any) -> None:
        self.logits = logits


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dataclass", ["logits", "layers.0"]),
        ("nested", ["heads.label", "heads.boxes.0", "shifted"]),
        ("one name twice", ["output_0", "output_1"]),
        ("dict", ["logits"]),
        ("tuple", ["output"]),
        ("named tuple", ["logits", "shifted"]),
    ],
)
def test_a_dataclass_is_answered_by_its_tensors_and_none_left_out(
    tmp_path: Path, prove: Proof, kind: str, names: list[str]
) -> None:
    """Broken: what most networks of transformers answer (a ModelOutput, with None for a loss) is refused; the fields of
    a NamedTuple have no names, and it is no program that can be written to a file; or tensors of a dict within a dict
    are called output_0 and output_1."""
    signature = infer_signature(ROWS)
    source = save(tmp_path / "m", Answering(kind).eval(), ROWS, signature=signature, serialization_format="pickle")
    model = prove(source, {"rows": ROWS}, compliance=PICKLES)
    assert [spec.name for spec in model.signature.outputs] == names
    program = TorchSource().export_program(source, {}, tmp_path / "program")
    assert program.signature.outputs == model.signature.outputs


def test_where_a_trace_ends_is_named_with_what_to_answer(tmp_path: Path) -> None:
    """Broken: a message of the tracer's without a line of the model's code, and no advice that helps."""
    source = save(tmp_path / "m", Answering("other").eval(), ROWS, serialization_format="pickle")
    with pytest.raises(SourceError, match=r"can't trace it: .*Unknown") as refused:
        TorchSource().export(source, {}, tmp_path / "out")
    assert "a tensor, or a tuple or dict of tensors" in refused.value.fix
    source = save(tmp_path / "d", ByData().eval(), ROWS, serialization_format="pickle")
    line = ByData.forward.__code__.co_firstlineno + 1
    with pytest.raises(SourceError, match=rf"trace it \(in forward, line {line} of test_torch.py\)"):
        TorchSource().export(source, {}, tmp_path / "out")


class OfLengths(torch.nn.Module):
    """Rows of several lengths, as PyTorch's own examples take them, and as the stage's advice says."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.packed, self.steps = packed, torch.nn.GRU(3, 4, batch_first=True)

    def forward(self, rows: Any, lengths: Any) -> Any:
        if not self.packed:
            out, _ = self.steps(rows)
            return out[torch.arange(out.shape[0]), lengths - 1]
        together = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return self.steps(together)[1][0]


def test_rows_of_several_lengths_are_refused_with_what_answers_alike(tmp_path: Path, prove: Proof) -> None:
    """Broken: the owner of a recurrent network is told to make it traceable, and not how; or by the advice it answers
    otherwise."""
    random = np.random.default_rng(0)
    given = {"rows": random.normal(size=(6, 5, 3)).astype(np.float32), "lengths": random.integers(1, 6, 6)}
    packed, padded = OfLengths(packed=True).eval(), OfLengths(packed=False).eval()
    padded.load_state_dict(packed.state_dict())
    tensors = {name: torch.from_numpy(value) for name, value in given.items()}
    with torch.no_grad():
        torch.testing.assert_close(padded(**tensors), packed(**tensors))
    saved = {}
    for name, net in (("packed", packed), ("padded", padded)):
        signature = infer_signature(given, np.zeros((6, 4), np.float32))
        saved[name] = save(tmp_path / name, net, given, signature=signature, serialization_format="pickle")
    with pytest.raises(SourceError, match="can't trace it") as refused:
        TorchSource().export(saved["packed"], {}, tmp_path / "out")
    assert "out[torch.arange(out.shape[0]), lengths - 1]" in refused.value.fix
    prove(saved["padded"], given, compliance=PICKLES)


class ByData(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        return rows + 1 if rows.sum() > 0 else rows


class Density(torch.nn.Module):
    """The density of a normal distribution, as flows and forecasts compute it."""

    def forward(self, mean: Any, value: Any) -> Any:
        return torch.distributions.Normal(mean, torch.ones_like(mean)).log_prob(value)


def test_a_distribution_in_a_forward_is_traced(tmp_path: Path, prove: Proof) -> None:
    """Broken: it looks whether its arguments are numbers, at which the trace ends."""
    validated = torch.distributions.Distribution._validate_args
    example = {"mean": ROWS, "value": ROWS + 1}
    signature = infer_signature(example)
    source = save(tmp_path / "m", Density(), example, signature=signature, serialization_format="pickle")
    prove(source, {"mean": ROWS, "value": ROWS + 2}, compliance=PICKLES)
    assert torch.distributions.Distribution._validate_args is validated


class Translating(torch.nn.Module):
    """`torch.nn.Transformer` with the causal mask of its decoder, and attention without heads behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, given: Any, wanted: Any) -> Any:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(wanted.shape[1])
        rows = self.both(given, wanted, tgt_mask=mask)
        shown = (given.abs().sum(-1) > 0)[:, None].expand(-1, wanted.shape[1], -1)
        return torch.nn.functional.scaled_dot_product_attention(rows, given, given, attn_mask=shown)


def test_a_transformer_of_pytorchs_own_is_exported(tmp_path: Path, prove: Proof) -> None:
    """Broken: its look at the values of its mask ends the trace, and attention of three axes the export; or what a mask
    hides is looked at."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    example = {name: random.random((3, 5, 8), dtype=np.float32) for name in ("given", "wanted")}
    example["given"][0, 3:] = 0
    example["given"][1] = 0
    signature = infer_signature(example, example["wanted"])
    source = save(tmp_path / "m", Translating().eval(), example, signature=signature, serialization_format="pickle")
    prove(source, example, compliance=PICKLES)


def test_a_recurrent_network_without_dropout_draws_nothing_in_training(tmp_path: Path, prove: Proof) -> None:
    """Broken: it is refused because two calls of it would differ, and they don't."""
    torch.manual_seed(0)
    rows = np.random.default_rng(0).random((4, 5, 3), dtype=np.float32)
    net = torch.nn.Sequential(torch.nn.GRU(3, 2, batch_first=True), First(), torch.nn.Dropout(0.0))
    prove(save(tmp_path / "m", net.train(), rows, signature=infer_signature(rows, rows[..., :2])), {"input": rows})


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(9, 4, max_norm=1.0)

    def forward(self, ids: Any) -> Any:
        return self.words(ids).mean(1)


@pytest.mark.parametrize("form", ["pt2", "pickle"])
def test_an_embedding_that_scales_its_table_is_refused_with_what_answers_the_same(
    tmp_path: Path, prove: Proof, form: str
) -> None:
    """Broken: the message says to log a model that takes its table as an input, which nobody can use."""
    torch.manual_seed(0)
    net, ids = Table().eval(), np.arange(27).reshape(3, 9) % 9
    signature = infer_signature(ids, np.ones((3, 4), np.float32))
    how: Any = {"signature": signature, "serialization_format": form}
    reason = TorchSource().refuse(save(tmp_path / "m", copy.deepcopy(net), ids, **how), PICKLES)
    assert reason is not None
    advice = reason.partition("(")[2].removesuffix(")")
    assert advice == "net.words.weight.data.renorm_(2, 0, 1); net.words.max_norm = None"
    expected = copy.deepcopy(net)(torch.from_numpy(ids)).detach().numpy()
    exec(advice, {"net": net})  # it is the message's advice that is tested
    model = prove(save(tmp_path / "n", net, ids, **how), {"ids": ids}, compliance=PICKLES)
    name = model.signature.inputs[0].name
    np.testing.assert_allclose(run_onnx(model, {name: ids})["output"], expected, rtol=1e-5)


def test_a_quantised_network_is_refused_with_what_to_log(tmp_path: Path) -> None:
    """Broken: the message is about a field of a class of PyTorch's, and says to make forward traceable."""
    net = torch.nn.Sequential(torch.nn.Linear(ROWS.shape[-1], 3))
    net = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)
    source = save(tmp_path / "m", net, ROWS, serialization_format="pickle")
    with pytest.raises(SourceError) as refused:
        TorchSource().export(source, {}, tmp_path / "out")
    assert "before it was quantised" in refused.value.fix


class First(torch.nn.Module):
    def forward(self, given: Any) -> Any:
        return given[0]


class Bundled(torch.nn.Module):
    def forward(self, tensors: Any) -> Any:
        return tensors["left"] + tensors["right"]


def test_a_forward_that_takes_a_dict_is_refused_with_what_to_change(tmp_path: Path) -> None:
    """Broken: "too many positional arguments", with the advice to make forward traceable, which it is."""
    example = {"left": ROWS, "right": ROWS}
    signature = infer_signature(example, ROWS)
    source = save(tmp_path / "m", Bundled().eval(), example, signature=signature, serialization_format="pickle")
    with pytest.raises(SourceError, match="can't be called with the 2 tensors of its input example") as refused:
        TorchSource().export(source, {}, tmp_path / "out")
    assert "an argument for each tensor" in refused.value.fix


class CalledLikeItsInput(torch.nn.Module):
    def forward(self, rows: Any) -> Any:
        return {"rows": rows + 1, "rows_out": rows * 2}


def test_an_output_called_like_an_input_gets_a_name_that_no_other_has(tmp_path: Path, prove: Proof) -> None:
    """Broken: it is called `rows_out` beside another output of that name, and the exporter refuses duplicates."""
    signature = infer_signature(ROWS)
    source = save(tmp_path / "m", CalledLikeItsInput().eval(), ROWS, signature=signature, serialization_format="pickle")
    model = prove(source, {"rows": ROWS}, compliance=PICKLES)
    assert [spec.name for spec in model.signature.outputs] == ["rows_out_", "rows_out"]


class Lacking(torch.nn.Module):
    """An operator that PyTorch's ONNX exporter lacks, as it is called and as the stage advises to write it."""

    def __init__(self, operator: str, *, advised: bool) -> None:
        super().__init__()
        self.operator, self.advised = operator, advised
        self.register_buffer("edges", torch.tensor([0.0, 0.3, 0.6]))

    def forward(self, rows: Any) -> Any:
        edges, x, k = self.edges, rows, 2
        if self.operator == "median":
            return x.sort(1).values[:, (x.shape[1] - 1) // 2] if self.advised else x.median(1).values
        if self.operator == "kthvalue":
            return x.sort(1).values[:, k - 1] if self.advised else x.kthvalue(k, 1).values
        if self.operator == "cumprod":
            products = [x[:, :i].prod(1) for i in range(1, x.shape[1] + 1)] if self.advised else []
            return torch.stack(products, 1) if self.advised else x.cumprod(1)
        return torch.bucketize(x, edges) if self.advised else torch.searchsorted(edges, x)


@pytest.mark.parametrize(
    ("operator", "advice"),
    [
        ("median", "x.sort(1).values[:, (x.shape[1] - 1) // 2]"),
        ("kthvalue", "x.sort(1).values[:, k - 1]"),
        ("cumprod", "torch.stack([x[:, :i].prod(1) for i in range(1, x.shape[1] + 1)], 1)"),
        ("searchsorted", "torch.bucketize(x, edges)"),
    ],
)
def test_an_operator_that_the_exporter_lacks_is_refused_with_others_that_answer_the_same(
    tmp_path: Path, prove: Proof, operator: str, advice: str
) -> None:
    """Broken: "replace the operation it names", and of cumprod it names prims.prod, which no forward has."""
    rows = torch.from_numpy(ROWS)
    as_called, as_advised = Lacking(operator, advised=False), Lacking(operator, advised=True)
    assert torch.allclose(as_called(rows), as_advised(rows))
    options = {"signature": infer_signature(ROWS), "serialization_format": "pickle"}
    source = save(tmp_path / "called", as_called.eval(), ROWS, **options)
    with pytest.raises(SourceError, match="exporter refuses it") as refused:
        TorchSource().export(source, {}, tmp_path / "out")
    assert f"by {advice}" in refused.value.fix
    prove(save(tmp_path / "advised", as_advised.eval(), ROWS, **options), {"rows": ROWS}, compliance=PICKLES)
