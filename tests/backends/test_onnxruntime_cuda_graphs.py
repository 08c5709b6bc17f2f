"""Recorded calls: buffers and shapes with a real session on the CPU, which takes the same calls and records nothing;
all of it on a GPU, where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from compile_stage.backends import onnxruntime_cuda_graphs as cuda_graphs
from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.environment import hardware
from compile_stage.core.records import Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.known_sizes import shapes_of
from compile_stage.plugin_support.recorded_calls import refuse
from compile_stage.testing import models


def asking(**asked: Any) -> Target:
    return replace(Target(name="gpu", threads=1), device="cuda", options={"onnxruntime": asked})


def test_each_shape_has_buffers_of_its_own(tmp_path: Path) -> None:
    """Broken: a call answers what the one before was asked, or one of another shape."""
    model = models.conv_net(tmp_path / "model")[0]
    plain = onnxruntime.InferenceSession(model.path)
    shapes = shapes_of(model.signature, [{"batch": 1}, {"batch": 4}])
    session = cuda_graphs.CudaGraphs(plain, ("cpu", 0), shapes)
    _answers_as(plain, session)
    assert [call is not None for call in session._calls.values()] == [True, True]


def test_what_is_answered_otherwise_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a graph that asks the CPU for something is replayed with the answer of the call that was recorded."""
    model = models.conv_net(tmp_path / "model")[0]
    shapes = shapes_of(model.signature, [{"batch": 2}])

    def reason() -> str | None:
        session = cuda_graphs.CudaGraphs(onnxruntime.InferenceSession(model.path), ("cpu", 0), shapes)
        return refuse(session, model.signature, shapes)

    assert reason() is None
    replay = cuda_graphs._Call.answers
    stale = lambda self, feeds, names: replay(self, {n: a + 1 for n, a in feeds.items()}, names)  # noqa: E731
    monkeypatch.setattr(cuda_graphs._Call, "answers", stale)
    assert reason() == "they are answered otherwise than kernel by kernel"


def test_only_sizes_that_are_known_are_recorded() -> None:
    """Broken: each length of a text is recorded, and the GPU's memory is full of buffers."""
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", "length"))
    signature = Signature(inputs=(spec,), outputs=(spec,))
    assert shapes_of(signature, [{"batch": 1}, {"batch": 1, "length": 8}]) == [((1, 8),)]
    whole = replace(spec, shape=(2, 3))
    assert shapes_of(replace(signature, inputs=(whole,)), ()) == [((2, 3),)]


def _answers_as(plain: Any, session: cuda_graphs.CudaGraphs) -> list[Any]:
    """Calls of three shapes, of which the third is not recorded. What was answered, with what `plain` answers."""
    (given,), outputs = session.get_inputs(), [value.name for value in session.get_outputs()]
    random, answers = np.random.default_rng(0), []
    for rows in (1, 4, 1, 1, 4, 2, 2):
        array = random.standard_normal((rows, *given.shape[1:]), dtype=np.float32)[:, :, ::-1]  # not contiguous
        (expected,), (got,) = plain.run(outputs, {given.name: array}), session.run(outputs, {given.name: array})
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        answers.append((got, expected))
    return answers


@pytest.mark.parametrize("provider", ["cpu", "tensorrt"])
def test_only_cuda_records(provider: str) -> None:
    """Broken: a policy asks for recorded calls, and nothing records them."""
    reason = providers.refuse({"provider": provider, "cuda_graphs": True}, "onnxruntime", "cpu")
    assert reason == f"onnxruntime's option cuda_graphs needs provider: cuda, and it is {provider}"


def test_the_session_is_asked_to_record() -> None:
    """Broken: the calls go through buffers of ours, and are launched kernel by kernel all the same."""
    cuda = providers.find("cuda")
    assert cuda is not None
    ((_, options),) = providers.arguments(cuda, {"cuda_graphs": True}, 4)
    assert options["enable_cuda_graph"] == "1"
    ((_, options),) = providers.arguments(cuda, {}, 4)
    assert "enable_cuda_graph" not in options


def test_pixels_with_all_channels_are_tried_in_half_precision() -> None:
    """Broken: ResNet-50 in float16 takes 1.3 times as long as it could on a GPU with tensor cores."""
    target = asking(provider="cuda")
    (option,) = OnnxRuntime().tuning_options(target, Scheme(precision="fp16", name="fp16"))
    assert (option.name, option.worth_a_try) == ("nhwc", "layout")
    assert OnnxRuntime().tuning_options(target, Scheme(precision="fp32", name="fp32")) == ()
    assert OnnxRuntime().tuning_options(asking(provider="tensorrt"), Scheme(precision="fp16", name="fp16")) == ()


@pytest.mark.gpu
def test_on_a_gpu_answers_are_the_callers(tmp_path: Path) -> None:
    """Broken: an answer changes while its caller reads it, since the next call is answered in the same memory."""
    target = asking(provider="cuda")
    if (reason := OnnxRuntime().refuse_target(target)) is not None or not hardware().accelerators:
        pytest.skip(reason or "there is no GPU here")
    model, exact = models.conv_net(tmp_path / "model")[0], {"use_tf32": "0"}
    plain = onnxruntime.InferenceSession(model.path, providers=[("CUDAExecutionProvider", exact)])
    recording = {**exact, "enable_cuda_graph": "1"}
    session = onnxruntime.InferenceSession(model.path, providers=[("CUDAExecutionProvider", recording)])
    shapes = shapes_of(model.signature, [{"batch": 1}, {"batch": 4}])
    for got, expected in _answers_as(plain, cuda_graphs.CudaGraphs(session, ("cuda", 0), shapes)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
