"""Profiles as runtimes give them: ONNX Runtime's fusions by its own optimised graph, PyTorch's operators, the trace."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core.records import Profile
from compile_stage.core.records.profile import MOST_LISTED, MOST_OPERATORS
from compile_stage.plugin_support.onnxruntime_profiler import profile_session
from compile_stage.plugin_support.profiling import (
    Kernel,
    ProfileRequest,
    profile_of,
    rank,
    trace_events,
    write_trace,
)


def request(into: Path, **batch: np.ndarray[Any, Any]) -> ProfileRequest:
    return ProfileRequest(threads=1, device="cpu", batches=[batch], batch_size=1, into=into)


def graph_of(nodes: Sequence[tuple[Any, ...]], x: list[Any], y: list[Any], **weights: Any) -> Any:
    """An ONNX model x → y of (operator, inputs, output, attributes), each node named after its output."""
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [helper.make_node(op, ins, [out], name=f"{out}_node", **more) for op, ins, out, more in nodes],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def profiled(model: Any, folder: Path, x: np.ndarray[Any, Any]) -> Profile:
    import onnx
    import onnxruntime

    path = folder / "model.onnx"
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3

    def start(given: Any) -> Any:
        return onnxruntime.InferenceSession(str(path), given, providers=["CPUExecutionProvider"])

    return profile_session(start, options, path, request(folder, x=x))


def fused(profile: Profile) -> dict[str, list[str]]:
    """Kind of a kernel → names of the nodes that it was fused of; of the same kind, the last."""
    return {fusion.kind: [node.name for node in fusion.sources] for fusion in profile.fusions or ()}


def test_a_kernel_that_was_held_up_once_is_not_the_slowest() -> None:
    """Broken: on a busy machine the report names a softmax of 5 µs as 88 % of the network, since another process had
    the core in one of its 50 runs."""

    def runs(name: str, *seconds: float) -> list[Kernel]:
        return [Kernel(name=name, kind=name, start_s=0.0, seconds=one) for one in seconds]

    kernels = [*runs("softmax", *[5e-6] * 49, 22e-3), *runs("product", *[50e-6] * 50)]
    first, second = rank(kernels)
    assert (first.name, second.name) == ("product", "softmax")
    assert second.mean_s == pytest.approx(5e-6)
    assert first.share == pytest.approx(10 / 11)
    # One that takes so long by itself, now and then, is as slow as it is.
    slow, _ = rank([*runs("loop", *[3e-3] * 25, *[20e-3] * 25), *runs("product", *[50e-6] * 50)])
    assert slow.total_s == pytest.approx(25 * 23e-3)
    small, _ = rank([*runs("tiny", *[0.0] * 40, *[1e-6] * 10), *runs("none", 0.0)])
    assert small.total_s == pytest.approx(10e-6), "whole microseconds, most of them 0"


def test_a_gelu_that_is_written_out_is_shown_as_what_it_became(tmp_path: Path) -> None:
    """Broken: who exported an activation as five nodes could not see that the runtime runs it as one, or would be told
    of nodes that it does not compute."""
    nodes = [
        ("Transpose", ["turned"], "w", {"perm": [1, 0]}),  # of a weight: computed once
        ("MatMul", ["x", "w"], "h", {}),
        ("Add", ["h", "bias"], "a", {}),
        ("Div", ["a", "root"], "d", {}),
        ("Erf", ["d"], "e", {}),
        ("Add", ["e", "one"], "f", {}),
        ("Mul", ["a", "f"], "g", {}),
        ("Mul", ["g", "half"], "y", {}),
    ]
    weights = {
        "turned": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32),
        "bias": np.linspace(-1, 1, 16, dtype=np.float32),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    profile = profiled(graph_of(nodes, ["n", 8], ["n", 16], **weights), tmp_path, np.ones((1, 8), np.float32))
    assert fused(profile) == {"Gemm": ["h_node", "a_node"], "Gelu": ["d_node", "e_node", "f_node", "g_node", "y_node"]}
    assert {operator.kind for operator in profile.operators} == {"Gemm", "Gelu"}
    assert [node.name for node in profile.folded or ()] == ["w_node"]
    assert profile.conversions == ()
    assert profile.calls >= 2
    assert all(operator.calls == profile.calls for operator in profile.operators)


def test_each_convolution_in_blocks_has_its_own_nodes(tmp_path: Path) -> None:
    """Broken: between kernels whose tensors were renamed, a convolution would be said to compute those before it, or
    the sum that it takes in would belong to none."""
    if platform.machine() != "x86_64":
        pytest.skip("ONNX Runtime computes in blocks of channels on x86")
    rng = np.random.default_rng(0)
    kernels = {f"k{i}": rng.standard_normal((16, 16, 3, 3)).astype(np.float32) for i in range(3)}
    pads: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    nodes = [
        ("Conv", ["x", "k0"], "c0", pads),
        ("Relu", ["c0"], "r0", {}),
        ("Conv", ["r0", "k1"], "c1", pads),
        ("Add", ["c1", "r0"], "s", {}),
        ("Relu", ["s"], "r1", {}),
        ("Conv", ["r1", "k2"], "c2", pads),
        ("Relu", ["c2"], "y", {}),
    ]
    shape = ["n", 16, 8, 8]
    profile = profiled(graph_of(nodes, shape, shape, **kernels), tmp_path, np.ones((1, 16, 8, 8), np.float32))
    found = [[node.name for node in fusion.sources] for fusion in profile.fusions or ()]
    assert found == [["c0_node", "r0_node"], ["c1_node", "s_node", "r1_node"], ["c2_node", "y_node"]]
    assert {operator.kind for operator in profile.conversions or ()} == {"ReorderInput", "ReorderOutput"}


def test_pytorch_names_the_planted_product_first(tmp_path: Path) -> None:
    """Broken: of the original nobody would learn which operator is slow, or the time of an operator would hold that of
    those which it calls, so that wrappers came first."""
    torch = pytest.importorskip("torch")
    from compile_stage.plugin_support import torch_profiler

    useless = torch.ones(700, 700)

    class Session:
        def run(self, batch: Any) -> Any:
            with torch.no_grad():
                x = torch.relu(torch.from_numpy(batch["x"]))
                return {"y": (x.expand(128, 700) @ useless).sum().numpy()}

    profile = torch_profiler._profile(Session(), request(tmp_path, x=np.ones((1, 700), np.float32)))
    assert profile.operators[0].kind == "aten::mm"
    assert profile.operators[0].name == "aten::mm [128,700] [700,700]"
    assert profile.operators[0].share > 0.5
    assert profile.fusions is None  # eager PyTorch fuses nothing, and does not say so
    assert profile.memory["allocated_bytes"] >= 128 * 700 * 4
    events = json.loads((tmp_path / profile.trace).read_text())["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == profile.calls


def test_a_model_of_many_operators_is_profiled_in_few_calls(tmp_path: Path) -> None:
    """Broken: a recurrent network in eager PyTorch, of thousands of small operators, is called 50 times, and to read
    the record of these takes longer than to measure all candidates."""
    torch = pytest.importorskip("torch")
    from compile_stage.plugin_support import torch_profiler

    class Session:
        def run(self, batch: Any) -> Any:
            x = torch.from_numpy(batch["x"])
            for _ in range(4000):
                x = x + 1
            return {"y": x.numpy()}

    profile = torch_profiler._profile(Session(), request(tmp_path, x=np.ones((1, 2), np.float32)))
    assert profile.calls <= 5
    assert profile.operators[0].calls == 4000 * profile.calls


def test_a_trace_and_a_profile_have_an_end(tmp_path: Path) -> None:
    """Broken: a model of many nodes would fill the disk beside each report, or result.json."""
    kernels = [Kernel(name=f"node {i}" + "x" * 100, kind="Conv", start_s=i, seconds=0.5) for i in range(15_000)]
    name, notes = write_trace(trace_events(kernels), tmp_path)
    text = (tmp_path / name).read_text()
    assert len(text) < 2_100_000
    left = len(json.loads(text)["traceEvents"])
    assert notes == (f"the trace holds the first {left} of 15000 events",)

    operators = rank(kernels)
    profile = profile_of("P", request(tmp_path), [1.0], operators, conversions=operators)
    assert (profile.kernels, len(profile.operators)) == (15_000, MOST_OPERATORS)
    assert profile.kernels_s == pytest.approx(7_500)
    assert profile.conversions is not None
    assert len(profile.conversions) == MOST_LISTED
    assert profile.notes == ("the first 100 of 15000 inserted conversions are listed",)


def test_the_time_of_a_call_is_as_its_kernels_are(tmp_path: Path) -> None:
    """Broken: of OpenVINO's kernels a run that was held up can't be taken out, and of its calls it was: the kernels of
    a profile took longer than its calls."""
    measured = [0.0001] * 9 + [0.02]
    operators = rank([Kernel("conv", "Conv", 0.0, sum(measured) / len(measured)) for _ in measured])
    profile = profile_of("OpenVINO", request(tmp_path), measured, operators)
    assert profile.kernels_s == pytest.approx(profile.calls * profile.call_s)
