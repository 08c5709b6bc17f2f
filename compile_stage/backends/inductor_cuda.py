"""AOTInductor's package on an NVIDIA GPU: its calls, recorded as CUDA graphs or launched kernel by kernel.

Needs nothing but torch and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.ports import Session
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support import torch_programs
from compile_stage.plugin_support.known_sizes import KNOWN_SIZES, shapes_of
from compile_stage.plugin_support.recorded_calls import OPTION, RecordedCalls
from compile_stage.plugin_support.sessions import in_place_or_copied
from compile_stage.plugin_support.torch_cuda import CUDA, exact_fp32, why_not
from compile_stage.plugin_support.torch_programs import TorchSession

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


class PackageOnCuda(RecordedCalls):
    """A loaded package.

    Args:
        package: PyTorch's `AOTIModelPackageLoader`, made to run without events of its own between streams
            (`run_single_threaded`), which can't be recorded.
        signature: Its inputs and outputs, in the program's order.
        options: Of the artifact.
    """

    def __init__(self, package: Any, signature: Signature, options: Mapping[str, Any]) -> None:
        shapes = shapes_of(signature, options.get(KNOWN_SIZES, ())) if options.get(OPTION) else []
        super().__init__([spec.name for spec in signature.inputs], shapes)
        self._package, self._outputs = package, [spec.name for spec in signature.outputs]

    def launch(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        answers = self._package.run([_tensor(feeds[name]).to(CUDA) for name in self._inputs])
        found = dict(zip(self._outputs, answers, strict=True))
        return [found[name].numpy(force=True) for name in names]  # which waits until they are computed

    def record(self, number: int, feeds: Mapping[str, Any], outputs: Mapping[str, Any]) -> _Call:
        return _Call(self._package, {name: feeds[name] for name in self._inputs}, self._outputs)


class _Call:
    """The call for one shape of each input.

    Args:
        package: As above.
        feeds: Inputs of that shape, in the program's order.
        outputs: The names of all outputs, in the program's order.
    """

    def __init__(self, package: Any, feeds: Mapping[str, Any], outputs: Sequence[str]) -> None:
        import torch

        self._inputs = {name: _tensor(array).to(CUDA) for name, array in feeds.items()}
        given, beside = list(self._inputs.values()), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            package.run(given)  # libraries get their workspaces at the first call of a stream
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=beside):
            self._outputs = dict(zip(outputs, package.run(given), strict=True))

    def answers(self, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        for name, held in self._inputs.items():
            held.copy_(_tensor(feeds[name]))
        self._graph.replay()
        return [self._outputs[name].numpy(force=True) for name in names]


class _CudaSession(TorchSession):
    """An open artifact, whose program is a `PackageOnCuda`."""

    def _answers(self, arrays: Sequence[Array]) -> Iterator[Array]:
        import torch

        feeds = dict(zip((spec.name for spec in self.signature.inputs), arrays, strict=True))
        with torch.no_grad():
            answers = self._program.run([spec.name for spec in self.signature.outputs], feeds)
        yield from answers


@contextmanager
def opened(package: Any, signature: Signature, threads: int, options: Mapping[str, Any]) -> Iterator[Session]:
    """A session of a package, for `Backend.open`; with FP32 that is exact as long as it is open."""
    with (
        opened_calls(package, signature, options) as calls,
        torch_programs.opened(_CudaSession(calls, signature, threads)) as session,
    ):
        yield session


@contextmanager
def opened_calls(package: Any, signature: Signature, options: Mapping[str, Any]) -> Iterator[PackageOnCuda]:
    """The calls of a package, with FP32 that is exact meanwhile: cuBLAS and cuDNN are asked for it when they are
    called."""
    with exact_fp32():
        yield PackageOnCuda(package, signature, options)


def demand_gpu(precision: str) -> None:
    """Raises NothingCompiledError where PyTorch has no GPU here, or one without arithmetic of a precision."""
    import torch

    if why := why_not():
        raise NothingCompiledError(
            f"Inductor can't compile for the target's device cuda: {why}",
            fix="install a build of PyTorch for the CUDA of this machine's driver",
        )
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NothingCompiledError(f"{torch.cuda.get_device_name()} has no bfloat16 arithmetic", fix="ask for fp16")


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(in_place_or_copied(array))
