"""Our static int8: more accurate than ONNX Runtime's quantizer, exact where it says so, and the same model under the
same names."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.core.sample_files import read_batches
from compile_stage.graph_debug.graphs import find_tensors, open_graph
from compile_stage.precision import equalise as equalise_module
from compile_stage.precision import qdq, ranges, static
from compile_stage.precision.int8 import StaticInt8
from compile_stage.precision.mixed import find_units, load_pair, mix
from compile_stage.precision.onnx_graph import simplify
from compile_stage.testing import models

UNSIGNED = Scheme(precision="int8", name="u8", activations="uint8", weights="int8")
OPERANDS = Scheme(
    precision="int8", name="sym", activations="int8", weights="int8", symmetric=True,
    ops=("Conv", "Gemm", "MatMul"), options={"placement": "operands", "one_sided": True},
)  # fmt: skip
SCHEMES = pytest.mark.parametrize("scheme", [UNSIGNED, OPERANDS], ids=lambda scheme: scheme.name)

Made = tuple[PortableModel, SampleSet]


def depthwise(folder: Path) -> Made:
    """Depthwise-separable blocks with ReLU, whose depthwise layers have channels of very different magnitude."""
    g, x = models.Graph(11), "image"
    x = g.add("Relu", g.add("Conv", x, g.weight(16, 3, 3, 3), g.weight(16, scale=0.1), pads=[1, 1, 1, 1]))
    for _ in range(2):
        loud = np.exp(g.random.uniform(-2.5, 2.5, (16, 1, 1, 1))).astype(np.float32)
        kernel = (g.random.standard_normal((16, 1, 3, 3)) / 3 * loud).astype(np.float32)
        x = g.add("Conv", x, g.constant(kernel), g.weight(16, scale=0.1), group=16, pads=[1, 1, 1, 1])
        x = g.add("Relu", x)
        mixing = (g.random.standard_normal((16, 16, 1, 1)) / 4 / loud.reshape(1, 16, 1, 1)).astype(np.float32)
        x = g.add("Relu", g.add("Conv", x, g.constant(mixing), g.weight(16, scale=0.1)))
    pooled = g.add("Flatten", g.add("GlobalAveragePool", x))
    g.add("Gemm", pooled, g.weight(16, 10), g.weight(10, scale=0.1), name="scores")
    images = g.random.standard_normal((16, 3, 16, 16)).astype(np.float32)
    return models.write(g, folder, {"image": images}, {"scores": ("float32", ("batch", 10))})


def loud_transformer(folder: Path) -> Made:
    """A feed-forward block as trained transformers have it: after the LayerNorm three channels are 40 times as large as
    the others, and the weights that read them are small. A second reader, the residual sum, wants them as they are."""
    g, width = models.Graph(12), 32
    gamma, projection = np.ones(width, np.float32), g.random.standard_normal((width, 64)).astype(np.float32) / 6
    gamma[:3] = 40
    projection[:3] /= 40
    zeros = g.constant(np.zeros(width, np.float32))
    normal = g.add("LayerNormalization", "x", g.constant(gamma), zeros, axis=-1, name="normal")
    wide = g.add("Add", g.add("MatMul", normal, g.constant(projection), name="wide"), g.weight(64, scale=0.1))
    narrow = g.add("MatMul", g.add("Relu", wide), g.weight(64, width), name="narrow")
    g.add("Add", narrow, g.add("Mul", normal, g.constant(np.float32(0.01))), name="y")
    x = g.random.standard_normal((16, 8, width)).astype(np.float32)
    return models.write(g, folder, {"x": x}, {"y": ("float32", ("batch", 8, width))})


NETS: list[Callable[[Path], Made]] = [models.conv_net, models.transformer, depthwise, loud_transformer]
EACH_NET = pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)


def run(path: str | Path, batch: Any) -> list[Any]:
    """As the graph says; the optimised integer kernels of a CPU without VNNI saturate."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, batch))


def snr_db(made: Made, path: str | Path) -> float:
    model, samples = made
    signal = noise = 0.0
    for batch in read_batches(samples, model.signature):
        clean, dirty = (run(p, batch)[0].astype(np.float64) for p in (model.path, path))
        signal, noise = signal + float(np.sum(clean**2)), noise + float(np.sum((clean - dirty) ** 2))
    return 10 * np.log10(signal / max(noise, 1e-30))


def lower(made: Made, scheme: Scheme, into: Path, keep: tuple[str, ...] = (), **options: Any) -> PortableModel:
    changed = replace(scheme, options={**scheme.options, **options})
    return StaticInt8().lower(made[0], changed, made[1], keep, into)


def peer(made: Made, scheme: Scheme, into: Path) -> Path:
    """The same by ONNX Runtime's own quantizer, told the same types."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    model, samples = made
    batches = iter(read_batches(samples, model.signature))

    class Reader:
        def get_next(self) -> Any:
            return next(batches, None)

    path = into / "peer.onnx"
    quantize_static(
        str(simplify(Path(model.path), into)),
        str(path),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8 if scheme.symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],
        extra_options={"ActivationSymmetric": scheme.symmetric, "WeightSymmetric": True},
    )
    return path


@SCHEMES
@EACH_NET
def test_it_is_no_less_accurate_than_onnx_runtimes_quantizer(
    make: Callable[[Path], Made], scheme: Scheme, tmp_path: Path
) -> None:
    """Broken: there would be no reason for a lowering of our own."""
    made = make(tmp_path / "made")
    (tmp_path / "peer").mkdir()
    ours = snr_db(made, lower(made, scheme, tmp_path / "ours").path)
    theirs = snr_db(made, peer(made, scheme, tmp_path / "peer"))
    assert ours >= theirs, f"{ours:.1f} dB, theirs {theirs:.1f}"


@pytest.mark.parametrize("make", [depthwise, loud_transformer], ids=lambda make: make.__name__)
def test_equalisation_mends_loud_channels(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """Broken: one range for all channels would leave the quiet ones no steps."""
    made = make(tmp_path / "made")
    with_it = lower(made, OPERANDS, tmp_path / "with")
    without = lower(made, OPERANDS, tmp_path / "without", equalise=False)
    assert any("equalised" in note for note in with_it.notes)
    assert snr_db(made, with_it.path) > snr_db(made, without.path) + 2


def test_products_of_activations_stay_in_float_where_asked(tmp_path: Path) -> None:
    """Broken: on a CPU whose integers are slow there, attention would be rounded and run in them."""
    made, accuracy = models.transformer(tmp_path / "made"), {}
    for products in (True, False):
        lowered = lower(made, OPERANDS, tmp_path / str(products), products=products)
        graph = onnx.load(lowered.path).graph
        constants = {tensor.name for tensor in graph.initializer}
        back = {node.output[0]: node.input[0] in constants for node in graph.node if node.op_type == "DequantizeLinear"}
        pairs = [[back.get(name) for name in node.input] for node in graph.node if node.op_type == "MatMul"]
        layers = [pair for pair in pairs if True in pair]
        assert layers
        assert all(pair == [False, True] for pair in layers)
        of_activations = [pair for pair in pairs if True not in pair]
        assert of_activations
        assert all(pair == ([False, False] if products else [None, None]) for pair in of_activations)
        accuracy[products] = snr_db(made, lowered.path)
    assert accuracy[False] > accuracy[True]


@pytest.mark.parametrize("make", [depthwise, loud_transformer], ids=lambda make: make.__name__)
def test_equalisation_is_exact_in_float(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """Broken: the equalised graph would be another model, and no calibration could mend that."""
    model, samples = made = make(tmp_path / "made")
    simple = simplify(Path(model.path), tmp_path)
    proto = onnx.load(simple)
    view = qdq.View(proto.graph)
    plan = qdq.plan(view, qdq.KNOWN, (), chain=False)
    seen, _ = ranges.observe(
        ranges.Activations(simple, static._channel_axes(plan), lambda: read_batches(samples, model.signature), 1)
    )
    assert equalise_module.equalise(view, plan, seen, (), 127)
    onnx.save(proto, tmp_path / "equalised.onnx")
    assert snr_db(made, tmp_path / "equalised.onnx") > 100


@pytest.mark.parametrize("make", [depthwise, loud_transformer], ids=lambda make: make.__name__)
def test_a_tensor_that_has_the_sources_name_has_its_meaning(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """Broken: the mixed search, the ranking and debug compare tensors by name; a rescaled one would be accused, or
    wrong numbers given back."""
    model, samples = made = make(tmp_path / "made")
    lowered = lower(made, OPERANDS, tmp_path / "out")
    assert any(name.endswith("/rescaled") for node in onnx.load(lowered.path).graph.node for name in node.output)
    source, twin = open_graph(model.path), open_graph(lowered.path)
    shared = {own: other for own, other in find_tensors(source, twin).items() if own == other}
    batch = next(iter(read_batches(samples, model.signature)))
    with source.open(list(shared), 1) as one, twin.open(list(shared), 1) as two:
        expected, found = one(batch), two(batch)
    for name in shared:
        error = np.linalg.norm(expected[name] - found[name]) / np.linalg.norm(expected[name])
        assert error < 0.05, f"{name} is off by {error:.0%}"


@pytest.mark.parametrize(
    ("kind", "constants"), [("Clip", ["", np.float32(6)]), ("Resize", ["", np.array([1, 1, 2, 2], np.float32)])]
)
def test_an_operator_before_a_layer_may_leave_out_its_second_input(
    kind: str, constants: list[Any], tmp_path: Path
) -> None:
    """Broken: a limit from above alone (`torch.clamp(max=6)`), or an upsampling, before a convolution ended all
    quantisation of the model with a KeyError."""
    g = models.Graph(13)
    x = g.add("Conv", "image", g.weight(16, 3, 3, 3))
    x = g.add(kind, x, *(one if isinstance(one, str) else g.constant(one) for one in constants))
    g.add("Conv", x, g.weight(16, 16, 1, 1), name="y")
    images = g.random.standard_normal((16, 3, 8, 8)).astype(np.float32)
    made = models.write(g, tmp_path / "model", {"image": images}, {"y": ("float32", ("batch", 16, "height", "width"))})
    assert snr_db(made, lower(made, UNSIGNED, tmp_path / "out").path) > 25


@SCHEMES
@EACH_NET
def test_every_unit_can_be_given_back(make: Callable[[Path], Made], scheme: Scheme, tmp_path: Path) -> None:
    """Broken: a mixed graph would hold a rescaled tensor without its counterpart, or a bias corrected for an error that
    is gone."""
    made = make(tmp_path / "made")
    lowered = lower(made, scheme, tmp_path / "out")
    source, twin = load_pair(made[0], lowered)
    names = [unit.node for unit in find_units(source.graph, twin.graph)]
    assert len(names) > 1
    before = snr_db(made, lowered.path)
    for name in names:
        mixed = mix(made[0], lowered, [name], tmp_path / "mixed")
        onnx.checker.check_model(mixed.path)
        assert snr_db(made, mixed.path) > before - 3, name  # errors may cancel by chance; a wrong graph is far off
    all_but_one = mix(made[0], lowered, names[1:], tmp_path / "mixed")
    assert snr_db(made, all_but_one.path) > before


@SCHEMES
def test_dequantised_weights_are_the_sources_to_rounding(scheme: Scheme, tmp_path: Path) -> None:
    """Broken: a transposed axis or a scale of the wrong channel would go unnoticed in a small net."""
    made = models.perceptron(tmp_path / "made")
    lowered = lower(made, scheme, tmp_path / "out", equalise=False, correct_biases=False, calibration="minmax")
    source = {t.name: numpy_helper.to_array(t) for t in onnx.load(made[0].path).graph.initializer}
    graph = onnx.load(lowered.path).graph
    held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    checked = 0
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in held:
            whole, scale = held[node.input[0]].astype(np.float64), held[node.input[1]]
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            shape = [-1 if i == axis else 1 for i in range(whole.ndim)]
            original = source[node.input[0].removesuffix("_quantized")]
            assert np.all(np.abs(whole * scale.reshape(shape) - original) <= 0.51 * scale.reshape(shape))
            checked += 1
    assert checked == 4  # two weights, two biases


def test_a_bias_takes_back_the_mean_error(tmp_path: Path) -> None:
    """Broken: rounding shifts every answer of a layer whose inputs are all positive, and layers add up."""
    made = depthwise(tmp_path / "made")
    corrected = lower(made, UNSIGNED, tmp_path / "with", equalise=False)
    plain = lower(made, UNSIGNED, tmp_path / "without", equalise=False, correct_biases=False)
    assert snr_db(made, corrected.path) > snr_db(made, plain.path)


@EACH_NET
def test_biases_stay_in_float_where_asked(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """Broken: TensorRT takes no graph of ours with a convolution or a Gemm in int8: it dequantises 8 bits and less. A
    bias that two layers share would be corrected for both."""
    made = make(tmp_path / "made")
    lowered = lower(made, OPERANDS, tmp_path / "out", biases="float32")
    onnx.checker.check_model(lowered.path)
    assert not [t.name for t in onnx.load(lowered.path).graph.initializer if t.data_type == onnx.TensorProto.INT32]
    assert snr_db(made, lowered.path) > snr_db(made, lower(made, OPERANDS, tmp_path / "whole").path) - 1


def write_pair(folder: Path, consumer: str) -> Made:
    """One weight that two MatMuls read, the second of them called `second`."""
    g = models.Graph(4)
    weight = g.weight(8, 8)
    first = g.add("MatMul", "x", weight, name="a")
    g.add("MatMul", g.add(consumer, first), weight, name="y")
    x = g.random.standard_normal((16, 8)).astype(np.float32)
    return models.write(g, folder, {"x": x}, {"y": ("float32", ("batch", 8))})


def test_a_shared_weight_is_written_once_and_a_kept_reader_has_it_in_float(tmp_path: Path) -> None:
    """Broken: a kept node would read integers, or every reader would bring a copy of its own."""
    made = write_pair(tmp_path / "made", "Tanh")
    both = onnx.load(lower(made, OPERANDS, tmp_path / "both", calibration="minmax").path).graph
    assert sum(t.data_type == TensorProto.INT8 and len(t.dims) == 2 for t in both.initializer) == 1
    assert not any(t.name == "weight_0" for t in both.initializer)
    lowered = lower(made, OPERANDS, tmp_path / "one", ("node_y",))
    assert lowered.kept["fp32"] == ("node_y",)
    one = onnx.load(lowered.path).graph
    kept = next(node for node in one.node if node.name == "node_y")
    assert kept.input[1] == "weight_0"
    assert snr_db(made, lowered.path) > 30


@pytest.mark.parametrize("method", ranges.METHODS)
def test_each_way_to_choose_ranges(method: str, tmp_path: Path) -> None:
    """Broken: a method would cut what matters, or do nothing."""
    made = models.conv_net(tmp_path / "made")
    assert snr_db(made, lower(made, UNSIGNED, tmp_path / "out", calibration=method).path) > 25


def test_methods_cut_a_long_tail_and_nothing_else() -> None:
    """Broken: one wild value in a million would set the step for all, or a plain distribution would lose its ends."""
    normal = np.clip(np.random.default_rng(0).standard_normal(1_000_000), -4.5, 4.5)
    for tail, limits in ((1.0, (3.0, 4.6)), (60.0, (3.0, 170.0))):
        span = ranges.Range(-4.5 * tail, 4.5 * tail)
        width = 2.0 ** (exponent := int(np.ceil(np.log2(span.high / ranges.BINS))))
        counts, _ = np.histogram(normal, 2 * ranges.BINS, (-width * ranges.BINS, width * ranges.BINS))
        counts[ranges.BINS + int(span.high / width)] += tail > 1
        seen = ranges.Histogram(exponent, counts)
        for method in ("mse", "percentile", "entropy"):
            for symmetric in (True, False):
                found = ranges.choose(method, span, seen, symmetric, 99.999)
                assert limits[0] <= found.high <= limits[1], (method, tail, found)
        assert ranges.choose("minmax", span, seen, True, 99.999) == span


def test_a_second_count_takes_samples_from_all_over_the_set(tmp_path: Path) -> None:
    """Broken: of samples that are sorted, as by class, an equalised tensor's range would be chosen for the first
    ones."""
    model, _ = depthwise(tmp_path)
    bright = [np.full((1, 3, 16, 16), shade, np.float32) for shade in range(10)]
    images = ranges.Activations(Path(model.path), {"image": 1}, lambda: [{"image": image} for image in bright], 1)
    seen, counts = ranges.observe(images.only(["image"], 4), ["image"])
    assert float(seen["image"].high.max()) == 9
    assert counts["image"].counts.sum() == 4 * bright[0].size


@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_of_channels_are_those_of_all_samples(threads: int, tmp_path: Path) -> None:
    """Broken: samples would be forgotten or mixed up between channels when they are looked at one at a time."""
    model, samples = models.conv_net(tmp_path / "made")
    tensors = ranges.Activations(
        Path(model.path), {"image": 1}, lambda: read_batches(samples, model.signature), threads
    )
    seen, _ = ranges.observe(tensors)
    (found,) = seen.values()
    images = np.load(Path(samples.path) / "inputs" / "image.npy")
    np.testing.assert_allclose(found.high, images.max((0, 2, 3)))
    np.testing.assert_allclose(found.low, images.min((0, 2, 3)))
    np.testing.assert_allclose(found.mean, images.mean((0, 2, 3), dtype=np.float64), atol=1e-6)
    np.testing.assert_allclose(found.square, (images.astype(np.float64) ** 2).mean((0, 2, 3)), rtol=1e-6)


@given(
    parts=st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40), min_size=1, max_size=5
    )
)
@example(parts=[[0.0], [1e-42, -1e-42]])
@example(parts=[[1e-30, -1e-30], [3e38], [0.0]])
def test_histograms_of_samples_add_up_to_that_of_all(parts: list[list[float]]) -> None:
    """Broken: a range would depend on the order of the samples, or lose the values of quiet ones beside loud ones."""

    def count(values: list[float]) -> ranges.Histogram:
        array = np.asarray(values, np.float32)
        found = ranges._count(array, ranges._reduce(array, 9))
        assert found is not None
        return found

    found = functools.reduce(operator.add, map(count, parts))
    backwards = functools.reduce(operator.add, map(count, reversed(parts)))
    whole = np.asarray([value for part in parts for value in part], np.float32).astype(np.float64)
    width = 2.0**found.exponent
    assert found.exponent == backwards.exponent
    np.testing.assert_array_equal(found.counts, backwards.counts)
    assert found.counts.sum() == len(whole)
    assert np.abs(whole).max() <= width * ranges.BINS
    # Float32 sums round a value that is within a thousandth of a bin of an edge to the other side.
    for edge in (-ranges.BINS // 2, 0, ranges.BINS // 2):
        sure = (whole < (edge - 1e-3) * width).sum()
        unsure = (np.abs(whole - edge * width) <= 1e-3 * width).sum()
        assert sure <= found.counts[: ranges.BINS + edge].sum() <= sure + unsure


def test_every_value_of_a_large_tensor_is_counted_once() -> None:
    """Broken: a tensor is counted in pieces, and one would be left out or counted twice."""
    values = np.random.default_rng(0).standard_normal((3, 50_021)).astype(np.float32)
    found = ranges._count(values, ranges._reduce(values, 0))
    assert found is not None
    ends = ranges.BINS * 2.0**found.exponent
    expected, _ = np.histogram(values, 2 * ranges.BINS, (-ends, ends))
    assert np.abs(np.cumsum(found.counts) - np.cumsum(expected)).max() <= 3  # a value may lie on an edge
    assert found.counts.sum() == values.size


def test_threads_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the same model, samples and policy would give another artifact on a machine with more cores."""
    made = loud_transformer(tmp_path / "made")
    files = []
    for threads in (1, 4):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        files.append(Path(lower(made, OPERANDS, tmp_path / str(threads)).path).read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": {"calibration": "magic"}}, "mse, minmax, percentile, entropy"),
        ({"options": {"placement": "everywhere"}}, "chain, operands"),
        ({"options": {"equalize": True}}, "no option 'equalize'"),
        ({"options": {"reduce_range": 7}}, "true or false"),
        ({"options": {"percentile": 0}}, "above 0"),
        ({"activations": "int4"}, "uint8 or int8"),
        ({"symmetric": True}, "no negative half"),
    ],
)
def test_bad_options_are_refused_in_words(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Broken: a misspelt option would be ignored, and its writer would believe the result."""
    made = models.perceptron(tmp_path / "made")
    scheme = replace(UNSIGNED, **change)
    assert said in str(StaticInt8().refuse(made[0], scheme))
    with pytest.raises(UsageError, match=said.split(",")[0]):
        StaticInt8().lower(made[0], scheme, made[1], (), tmp_path / "out")


def optimised_ops(path: str, folder: Path) -> dict[str, int]:
    """What ONNX Runtime executes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: dict[str, int] = {}
    for node in onnx.load(folder / "optimised.onnx").graph.node:
        found[node.op_type] = found.get(node.op_type, 0) + 1
    return found


def test_onnx_runtime_merges_the_chain(tmp_path: Path) -> None:
    """Broken: a convolution whose surroundings it does not recognise runs in float, after its operands were rounded for
    nothing."""
    made = models.conv_net(tmp_path / "made")
    found = optimised_ops(lower(made, UNSIGNED, tmp_path / "out").path, tmp_path)
    assert (found["QLinearConv"], found["QLinearAdd"], found["QGemm"]) == (2, 1, 1)
    assert not {"Conv", "FusedConv", "Add", "Gemm", "Relu"} & found.keys()
    assert found["QuantizeLinear"] == 1  # the image; everything after is handed on in integers


def test_what_is_picked_from_integers_is_picked_in_integers(tmp_path: Path) -> None:
    """Broken: behind a convolution over time, `x[:, :, -1]` makes floats of every step and rounds one again."""
    g = models.Graph(7)
    convolved = g.add("Relu", g.add("Conv", "x", g.weight(8, 4, 3), g.weight(8), pads=[2, 0]))
    picked = g.add("Gather", convolved, g.constant(np.array(-1, np.int64)), axis=2)
    g.add("Gemm", picked, g.weight(8, 3), g.weight(3), name="y")
    x = g.random.standard_normal((16, 4, 20)).astype(np.float32)
    made = models.write(g, tmp_path / "made", {"x": x}, {"y": ("float32", ("batch", 3))})
    lowered = lower(made, UNSIGNED, tmp_path / "out")
    assert snr_db(made, lowered.path) > 25
    found = optimised_ops(lowered.path, tmp_path)
    assert (found["QLinearConv"], found["QGemm"], found["Gather"]) == (1, 1, 1)
    assert found["QuantizeLinear"] == 1  # the input
    assert "DequantizeLinear" not in found


def test_a_token_is_picked_in_float_before_it_is_rounded(tmp_path: Path) -> None:
    """Broken: the class token of a transformer is one of 197, and all of them are rounded for it."""
    g = models.Graph(8)
    summed = g.add("Add", "x", g.weight(4))
    picked = g.add("Gather", summed, g.constant(np.array(0, np.int64)), axis=1)
    g.add("Gemm", picked, g.weight(4, 3), g.weight(3), name="y")
    x = g.random.standard_normal((16, 20, 4)).astype(np.float32)
    made = models.write(g, tmp_path / "made", {"x": x}, {"y": ("float32", ("batch", 3))})
    graph = onnx.load(lower(made, UNSIGNED, tmp_path / "out").path).graph
    [rounding] = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert rounding.input[0] == picked


def test_openvino_runs_every_matrix_operator_in_integers(tmp_path: Path) -> None:
    """Broken: an attention's products or the layers before a sum would fall back to float."""
    openvino = pytest.importorskip("openvino")
    for make in (models.conv_net, models.transformer):
        made = make(tmp_path / make.__name__)
        lowered = lower(made, OPERANDS, tmp_path / "out")
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(lowered.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        taken = {
            info["runtimePrecision"].astype(str)
            for info in (op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops())
            if info["layerType"].astype(str) in ("Convolution", "FullyConnected", "MatMul")
        }
        assert taken <= {"u8", "i8"}


def test_an_output_that_is_rounded_keeps_its_name(tmp_path: Path) -> None:
    """Broken: a convolution that answers in integers at the end of the graph would lose the output's name."""
    g = models.Graph(6)
    g.add("Conv", "x", g.weight(4, 3, 3, 3), name="y", pads=[1, 1, 1, 1])
    x = g.random.standard_normal((16, 3, 8, 8)).astype(np.float32)
    made = models.write(g, tmp_path / "made", {"x": x}, {"y": ("float32", ("batch", 4, 8, 8))})
    lowered = lower(made, UNSIGNED, tmp_path / "out")
    assert snr_db(made, lowered.path) > 25
    assert optimised_ops(lowered.path, tmp_path)["QLinearConv"] == 1


def test_subgraphs_are_left_alone_and_that_is_said(tmp_path: Path) -> None:
    """Broken: a tensor that a branch takes from around it would change under its hands."""
    weights = [
        numpy_helper.from_array(np.eye(4, dtype=np.float32) * 0.7, "w"),
        numpy_helper.from_array(np.array(0), "zero"),
    ]
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["h", "w"], [out])], op, [],
            [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)]
        )
        for op, out in (("MatMul", "then"), ("Add", "else"))
    ]  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="outer"),
        helper.make_node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
        helper.make_node("Greater", ["s", "s"], ["c"], name="greater"),
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=branches[0], else_branch=branches[1]),
    ]
    made = models.perceptron(tmp_path / "any")
    x = made[1]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", s]) for n, s in (("features", 12), ("y", 4))]
    narrow = numpy_helper.from_array(np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32), "narrow")
    nodes.insert(0, helper.make_node("MatMul", ["features", "narrow"], ["x"], name="first"))
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], [*weights[:1], narrow])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx"
    )
    signature = replace(made[0].signature, outputs=(replace(made[0].signature.outputs[1], name="y"),))
    model = replace(made[0], path=str(tmp_path / "model.onnx"), signature=signature)
    lowered = StaticInt8().lower(model, OPERANDS, x, (), tmp_path / "out")
    assert any("If, Loop and Scan" in note for note in lowered.notes)
    assert snr_db((model, x), lowered.path) > 25


def small(folder: Path, weight: Any, bias: Any, rows: Any) -> Made:
    """A Gemm with these values: x [3] → y [4]."""
    g = models.Graph()
    g.add("Gemm", "x", g.constant(np.float32(weight)), g.constant(np.float32(bias)), name="y")
    return models.write(g, folder, {"x": np.float32(rows)}, {"y": ("float32", ("batch", 4))}, "batch")


def test_one_scale_for_a_weight_with_a_bias(tmp_path: Path) -> None:
    """A scheme without scales by channel ended in a shape error as soon as a layer had a bias."""
    random = np.random.default_rng(0)
    made = small(
        tmp_path / "net", random.standard_normal((3, 4)), [0.1, -0.2, 0.3, 9.0], random.standard_normal((16, 3))
    )
    lowered = lower(made, replace(OPERANDS, per_channel=False), tmp_path / "lowered")
    assert snr_db(made, lowered.path) > 30


@pytest.mark.parametrize("scale", [1e-37, 1e-40, 1e-44, 0.0])
@pytest.mark.parametrize("of", ["weights", "rows"])
@SCHEMES
def test_values_below_float32s_smallest_give_no_scale_of_zero(
    scheme: Scheme, of: str, scale: float, tmp_path: Path
) -> None:
    """A step that underflows to 0 makes NaN of what it divides; such a tensor ended the histograms in an error of
    NumPy."""
    random = np.random.default_rng(0)
    values = {"weights": random.standard_normal((3, 4)), "rows": random.standard_normal((16, 3))}
    values[of] = values[of] * scale
    made = small(tmp_path / "net", values["weights"], [0.0, 1e-42, 1.0, 2.0], values["rows"])
    lowered = lower(made, scheme, tmp_path / "lowered")
    floats = [t for t in onnx.load(lowered.path).graph.initializer if t.data_type == TensorProto.FLOAT]
    scales = [numpy_helper.to_array(t) for t in floats if t.name.endswith("scale")]
    assert scales
    assert all(np.isfinite(found).all() and (found > 0).all() for found in scales)
    assert np.isfinite(run(lowered.path, {"x": np.float32(values["rows"])})[0]).all()


def test_a_channel_without_weights_answers_its_bias(tmp_path: Path) -> None:
    """In steps of a weight's scale times a large input's, the bias of a pruned channel was rounded to 0."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 4)) / 1000
    weight[:, 2] = 0
    made = small(tmp_path / "net", weight, [0.1, 0.1, 0.005, 0.1], random.uniform(0, 2550, (16, 3)))
    lowered = lower(made, OPERANDS, tmp_path / "lowered")
    rows = np.load(Path(made[1].path) / "inputs" / "x.npy")
    np.testing.assert_allclose(run(lowered.path, {"x": rows})[0][:, 2], 0.005, rtol=1e-5)
