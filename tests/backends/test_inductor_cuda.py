"""PyTorch's ahead-of-time compiler on an NVIDIA GPU: what is refused without one, how a program is moved there, and, on
a GPU, the kit and recorded calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends import inductor
from compile_stage.backends.inductor import Inductor
from compile_stage.core.environment import hardware
from compile_stage.core.records import Target
from compile_stage.testing import check_backend, models, target_for

torch = pytest.importorskip("torch", reason="the backend inductor needs torch")

from compile_stage.plugin_support.torch_cuda import moved  # noqa: E402

GPU = Target(name="gpu", device="cuda", batch_sizes=(1, 3), threads=1)
HERE = replace(hardware(), accelerators=())
WITH_GPU = replace(HERE, accelerators=("NVIDIA H100 (driver 570.1)",))


@pytest.mark.parametrize(
    ("machine", "version", "word"),
    [
        (HERE, "2.13.0", "this machine has no NVIDIA GPU"),
        (WITH_GPU, "2.13.0+cpu", "PyTorch 2.13.0+cpu is built without CUDA"),
        (WITH_GPU, "2.13.0+rocm7", "PyTorch 2.13.0+rocm7 is built without CUDA"),
        (WITH_GPU, "2.13.0+cu130", ""),
        (WITH_GPU, "2.13.0", ""),
    ],
)
def test_what_a_gpu_needs_is_asked_for_in_the_plan(
    machine: Any, version: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the job would fail after a minute of compiling, or be refused where it can run."""
    monkeypatch.setattr(inductor, "hardware", lambda: machine)
    monkeypatch.setattr(inductor, "package_versions", lambda *_: {"torch": version})
    monkeypatch.setattr(inductor, "_compiler_version", lambda: {"g++": "12"})
    assert word in (Inductor().refuse_target(GPU) or "")
    assert bool(word) == bool(Inductor().refuse_target(GPU))


def test_calls_are_recorded_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a policy asks for recorded calls on a CPU, and nothing records them."""
    monkeypatch.setattr(inductor, "_compiler_version", lambda: {"g++": "12"})
    on_cpu = replace(GPU, device="cpu", options={"inductor": {"cuda_graphs": True}})
    assert Inductor().refuse_target(on_cpu) == (
        "inductor's option cuda_graphs needs a target with device: cuda, and it is cpu"
    )


def test_precisions_are_those_of_the_device() -> None:
    """Broken: float16 is left out on a GPU, or offered on a CPU that computes it by way of float32."""
    offered = {
        device: {p for p in ("fp32", "fp16", "bf16", "int8", "fp8") if Inductor().schemes(target, p)}
        for device, target in (("cuda", GPU), ("cpu", replace(GPU, device="cpu")))
    }
    assert offered["cuda"] == {"fp32", "fp16", "bf16"}
    assert "fp16" not in offered["cpu"]
    assert "not driven" in Inductor().capabilities_for(GPU).why_lacking("fp8")


def test_a_program_is_moved_although_attention_answers_in_other_strides_there() -> None:
    """Broken: a transformer that was exported on a CPU can't be run or compiled on a GPU: "Cannot view a tensor".
    Strides of another order stand for the GPU's attention."""

    class Heads(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            heads = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
            return heads.permute(0, 2, 1, 3).contiguous().view(rows.shape[0], -1)

    program = torch.export.export(Heads().eval(), (torch.rand(1, 2, 3, 4),))
    assert "aten.view" in str(program.graph)
    there = moved(program, "cpu")
    assert "aten.view.default" not in str(there.graph)
    rows = torch.rand(1, 2, 3, 4)
    assert torch.equal(there.module()(rows), Heads()(rows))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")
@pytest.mark.parametrize("asked", [{}, {"cuda_graphs": False}], ids=["recorded", "launched"])
@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_on_a_gpu_it_conforms(make: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """Broken: anything that the kit asks of a backend, on a GPU."""
    from compile_stage.testing import programs

    backend = Inductor()
    target = target_for(backend, asked, device="cuda")
    if (reason := backend.refuse_target(target)) is not None:
        pytest.skip(reason)
    model, samples = make(tmp_path / "model")
    program = programs.to_program(model, tmp_path / "program")
    findings = check_backend(backend, program, samples, tmp_path / "work", target=target)
    assert {finding.case for finding in findings} == {"inductor/fp32", "inductor/fp16", "inductor/bf16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")
def test_answers_of_recorded_calls_are_the_callers(tmp_path: Path) -> None:
    """Broken: an answer changes while its caller reads it, since the next call is answered in the same memory; or one
    call is answered with what another was asked."""
    from compile_stage.testing import programs

    backend = Inductor()
    if (reason := backend.refuse_target(GPU)) is not None:
        pytest.skip(reason)
    program = programs.to_program(models.conv_net(tmp_path / "model")[0], tmp_path / "program")
    (scheme,) = backend.schemes(GPU, "fp32")
    artifact = backend.compile(program, scheme, GPU, "job", tmp_path / "artifact")
    assert "calls are recorded as CUDA graphs" in artifact.notes
    launched = replace(artifact, options={**artifact.options, "cuda_graphs": False})
    (spec,), random = program.signature.inputs, np.random.default_rng(0)
    with backend.open(artifact, 1) as session, backend.open(launched, 1) as plain:
        kept = []
        for rows in (1, 3, 1, 1, 3, 2, 2):
            batch = {spec.name: random.standard_normal((rows, *spec.shape[1:]), dtype=np.float32)[:, :, ::-1]}
            kept.append((session.run(batch), plain.run(batch)))
    for got, expected in kept:
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)
