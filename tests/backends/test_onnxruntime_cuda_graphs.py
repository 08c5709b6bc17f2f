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
from compile_stage.testing import check_backend, models


def asking(**asked: Any) -> Target:
    return replace(Target(name="gpu", threads=1), device="cuda", options={"onnxruntime": asked})


def test_each_shape_has_buffers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a call answers what the one before was asked, or one of another shape."""
    monkeypatch.setattr(cuda_graphs, "MOST_SHAPES", 2)
    plain = onnxruntime.InferenceSession(models.conv_net(tmp_path / "model")[0].path)
    session = cuda_graphs.CudaGraphs(plain, ("cpu", 0))
    _answers_as(plain, session)
    assert len(session._calls) == 2


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


@pytest.mark.parametrize(
    ("precision", "names"), [("fp32", ["cuda-graphs"]), ("fp16", ["cuda-graphs", "cuda-graphs-nhwc"])]
)
def test_recording_is_tried_unasked_on_a_gpu(precision: str, names: list[str]) -> None:
    """Broken: BERT at batch 1 takes three times as long as it could."""
    target = asking(provider="cuda")
    options = OnnxRuntime().tuning_options(target, Scheme(precision=precision, name=precision))
    assert [option.name for option in options] == names
    assert {option.worth_a_try for option in options} == {"launches"}
    assert OnnxRuntime().tuning_options(asking(provider="tensorrt"), Scheme(precision="fp32", name="fp32")) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"provider_options": {"prefer_nhwc": True}}], ids=["plain", "nhwc"])
@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_recorded_calls_conform(make: Any, more: dict[str, Any], tmp_path: Path) -> None:
    """Broken: anything that the kit asks of a backend, where calls are recorded."""
    target = asking(provider="cuda", cuda_graphs=True, **more)
    if (reason := OnnxRuntime().refuse_target(target)) is not None or not hardware().accelerators:
        pytest.skip(reason or "there is no GPU here")
    model, samples = make(tmp_path / "model")
    findings = check_backend(OnnxRuntime(), model, samples, tmp_path / "work", target=target)
    assert {finding.case for finding in findings} == {"onnxruntime/fp32", "onnxruntime/fp16"}
    assert [f"{f.case} {f.check}: {f.reason}" for f in findings if not f.passed] == []


@pytest.mark.gpu
def test_on_a_gpu_answers_are_the_callers(tmp_path: Path) -> None:
    """Broken: an answer changes while its caller reads it, since the next call is answered in the same memory."""
    target = asking(provider="cuda")
    if (reason := OnnxRuntime().refuse_target(target)) is not None or not hardware().accelerators:
        pytest.skip(reason or "there is no GPU here")
    path, exact = models.conv_net(tmp_path / "model")[0].path, {"use_tf32": "0"}
    plain = onnxruntime.InferenceSession(path, providers=[("CUDAExecutionProvider", exact)])
    recording = {**exact, "enable_cuda_graph": "1"}
    session = onnxruntime.InferenceSession(path, providers=[("CUDAExecutionProvider", recording)])
    for got, expected in _answers_as(plain, cuda_graphs.CudaGraphs(session, ("cuda", 0))):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
