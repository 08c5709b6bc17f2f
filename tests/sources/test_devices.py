"""The original on the device of a target. That of this machine is the CPU; what a GPU must show is marked `gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.baseline import baseline_target, reference_target, refuse_baseline
from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Job, Scheme, SourceModel, Target
from compile_stage.engine.calls import open_source
from compile_stage.sources.onnx import OnnxSource
from compile_stage.sources.torch import TorchSource
from compile_stage.sources.torch_device import Place, place

from . import test_onnx, test_torch

torch = pytest.importorskip("torch", reason="the PyTorch source needs torch")

CPU, GPU = Target(name="cpu"), Target(name="gpu", device="cuda")
HERE = replace(hardware(), accelerators=())
WITH_GPU = replace(HERE, accelerators=("NVIDIA H100 (driver 570.1)",))


@pytest.mark.parametrize("flavor", ["sklearn", "lightgbm", "xgboost"])
def test_a_model_that_runs_on_the_cpu_only_is_no_baseline_of_a_gpu(flavor: str) -> None:
    """Broken: a forest on TensorRT would be called 100 times as fast as scikit-learn, on other hardware."""
    reason = refuse_baseline(flavor, GPU)
    assert reason is not None
    assert f"models of flavor {flavor} run on the CPU only; set the target's device to cpu" in reason
    assert refuse_baseline(flavor, CPU) is None
    source = SourceModel(uri="u", name="n", version="1", flavor=flavor, path="/nowhere", digest="sha256:0")
    with pytest.raises(SourceError, match="would be no comparison"):
        open_source(plain(source), plain(GPU))  # no step gets around the plan


@pytest.mark.parametrize("device", ["apple", "android", "browser"])
def test_a_device_that_is_a_whole_machine_has_its_cpu_as_baseline(device: str) -> None:
    """Broken: targets that are cross-compiled for a phone would all be refused, or opened on a device that no framework
    has."""
    target = replace(CPU, device=device)
    assert baseline_target(target).device == "cpu"
    assert refuse_baseline("sklearn", target) is None


def test_reference_outputs_come_from_the_cpu_only_where_nothing_runs_on_the_device_here() -> None:
    """Broken: code that is cross-compiled for a GPU could not be made on a machine without one."""
    options = {"iree": {"target_device": "cuda", "target_chip": "sm_80"}}
    crossed = Job(
        id="j", source="u", target=replace(GPU, options=options), backend="iree",
        scheme=Scheme(precision="fp32", name="fp32"), gates=(),
    )  # fmt: skip
    native = replace(crossed, backend="tensorrt", target=GPU)
    away = replace(native, not_runnable_here="the target wants accelerators 'nvidia'")

    def device(*jobs: Job, machine: Any = HERE, flavor: str = "onnx") -> str:
        return reference_target(flavor, jobs[0].target, jobs, machine).device

    assert device(crossed) == "cpu"
    assert device(crossed, machine=WITH_GPU) == "cuda"
    assert device(crossed, machine=WITH_GPU, flavor="sklearn") == "cpu"
    assert device(away) == "cpu"
    assert device(away, crossed, native) == "cuda"


@pytest.mark.parametrize(("flavor", "threads"), [("sklearn", 1), ("xgboost", 1), ("pytorch", 8)])
def test_trees_are_asked_on_one_thread_and_networks_on_the_targets(flavor: str, threads: int) -> None:
    """Broken: on a busy machine gradient boosting took four minutes for answers that one thread gives in seconds."""
    target = Target(name="cpu", threads=8)
    assert reference_target(flavor, target, (), HERE).threads == threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that PyTorch can use")
def test_a_device_that_is_not_here_is_refused_and_never_replaced(tmp_path: Path) -> None:
    """Broken: the baseline of a GPU would be the CPU without a word."""
    with pytest.raises(SourceError, match="can't be run on the target's device cuda: PyTorch"):
        TorchSource().open(test_torch.saved_net(tmp_path / "net"), GPU).__enter__()
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        source = test_onnx.save(tmp_path / "linear", test_onnx.linear())
        with pytest.raises(SourceError, match="ONNX Runtime has no working CUDAExecutionProvider here"):
            OnnxSource().open(source, GPU).__enter__()


def test_a_program_is_moved_with_the_devices_in_its_graph() -> None:
    """Broken: a program that makes a tensor of its own would add one on the CPU to one on the GPU, which PyTorch
    refuses. PyTorch's device without memory, `meta`, stands for the GPU."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(4, 4)

        def forward(self, rows: Any) -> Any:
            return self.out(rows) + torch.arange(4)

    program = torch.export.export(Positions().eval(), (torch.zeros(2, 4),))
    elsewhere = Place("meta")
    with torch.no_grad():
        assert elsewhere.program(program)(elsewhere.tensor(torch.zeros(2, 4))).device.type == "meta"
    assert next(elsewhere.module(Positions()).parameters()).device.type == "meta"


def test_products_are_fp32_on_an_accelerator_and_the_settings_are_given_back() -> None:
    """Broken: convolutions of the baseline would run in TF32, and every exact artifact would seem to differ from it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with place("meta"):
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU here")
@pytest.mark.parametrize("pickled", [False, True], ids=["program", "pickle"])
def test_pytorch_on_a_gpu_predicts_what_it_does_on_the_cpu(pickled: bool, tmp_path: Path) -> None:
    """Broken: the baseline of every GPU target."""
    options = {"serialization_format": "pickle"} if pickled else {}
    source = test_torch.saved_net(tmp_path / "net", **options)
    batch = {"image": test_torch.IMAGES}
    with TorchSource().open(source, CPU) as session:
        expected = session.run(batch)["output"]
    torch.cuda.reset_peak_memory_stats()
    with TorchSource().open(source, GPU) as session:
        np.testing.assert_allclose(session.run(batch)["output"], expected, rtol=1e-4, atol=1e-5)
    assert torch.cuda.max_memory_allocated() > 0  # it was there


@pytest.mark.gpu
def test_onnx_runtime_on_a_gpu_predicts_what_it_does_on_the_cpu(tmp_path: Path) -> None:
    """Broken: as above, for models that were logged as ONNX."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers() or not hardware().accelerators:
        pytest.skip("no GPU, or no onnxruntime-gpu, here")
    source, batch = test_onnx.save(tmp_path / "linear", test_onnx.linear()), {"x": test_onnx.X}
    with OnnxSource().open(source, CPU) as on_cpu, OnnxSource().open(source, GPU) as on_gpu:
        np.testing.assert_allclose(on_gpu.run(batch)["y"], on_cpu.run(batch)["y"], rtol=1e-5)


def test_every_source_declares_the_cpu() -> None:
    """Broken: a source without it could be the baseline of nothing."""
    for name in plugins.names("sources"):
        assert "cpu" in plugins.load("sources", name).capabilities.devices
