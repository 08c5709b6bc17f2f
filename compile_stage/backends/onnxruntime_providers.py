"""ONNX Runtime's execution providers: which there are, what each needs, and where a session's nodes really lie.

The runtime gives what a provider does not take to its CPU, and says nothing: also when the provider is not in the
package, when its device is not there, and when an option is wrong (seen with 1.24 and 1.31). So a provider is asked for
alone, and every node's place is read back from the session.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.spelling import did_you_mean

CPU = "CPUExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
TRUTH, COUNT, TEXT = ("true or false",), ("a whole number",), ("a word",)


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One execution provider.

    Attributes:
        name: As the runtime calls it.
        short: As a policy may.
        package: What pip installs it with; empty when no package on PyPI has it, and `how` says what does.
        devices: Of a target, where it runs.
        platforms: Where its package exists.
        precisions: That a graph may have. No int8: what was computed in integers can't be read back from it.
        options: That a policy may give, and what each may be: words, or one of `TRUTH`, `COUNT` and `TEXT`. What would
            change the precision is none of them: that is the graph's.
        truth: How it reads true and false. OpenVINO's and DirectML's refuse 1 and 0.
        fixed: Options that are always given, so that float32 is computed as float32.
        behind: Providers that take what it leaves, before the CPU; their nodes are not its own.
        ran: Whether we ever ran it.
    """

    name: str
    short: str
    package: str = ""
    how: str = ""
    devices: tuple[str, ...]
    platforms: str
    precisions: tuple[str, ...] = ("fp32",)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    truth: tuple[str, str] = ("1", "0")
    fixed: Mapping[str, str] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
    ran: bool = False


PROVIDERS = (
    Provider(
        name=CPU,
        short="cpu",
        package="onnxruntime",
        devices=("cpu", "android", "apple"),
        platforms="Linux, Windows, macOS, Android, iOS",
        ran=True,
    ),
    Provider(
        name="XnnpackExecutionProvider",
        short="xnnpack",
        how="no package on PyPI has it: build ONNX Runtime with --use_xnnpack",
        devices=("cpu", "android", "apple"),
        platforms="Android, iOS, own builds",
        options={"intra_op_num_threads": COUNT},
    ),
    Provider(
        name="CUDAExecutionProvider",
        short="cuda",
        package="onnxruntime-gpu",
        devices=("cuda",),
        platforms="Linux, Windows",
        ran=True,
        precisions=("fp32", "fp16"),
        options={
            "device_id": COUNT, "gpu_mem_limit": COUNT,
            "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
            "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), "do_copy_in_default_stream": TRUTH,
            "cudnn_conv_use_max_workspace": TRUTH, "cudnn_conv1d_pad_to_nc1d": TRUTH, "prefer_nhwc": TRUTH,
            "enable_skip_layer_norm_strict_mode": TRUTH,
        },
        fixed={"use_tf32": "0"},  # its default rounds what goes into float32 products to 10 bits
    ),
    Provider(
        name="TensorrtExecutionProvider",
        short="tensorrt",
        package="onnxruntime-gpu",
        devices=("cuda",),
        platforms="Linux, Windows",
        precisions=("fp32", "fp16"),
        options={
            "device_id": COUNT, "trt_max_workspace_size": COUNT, "trt_max_partition_iterations": COUNT,
            "trt_min_subgraph_size": COUNT, "trt_builder_optimization_level": ("0", "1", "2", "3", "4", "5"),
            "trt_auxiliary_streams": COUNT, "trt_force_sequential_engine_build": TRUTH,
            "trt_context_memory_sharing_enable": TRUTH, "trt_profile_min_shapes": TEXT, "trt_profile_opt_shapes": TEXT,
            "trt_profile_max_shapes": TEXT,
        },
        behind=("CUDAExecutionProvider",),
    ),
    Provider(
        name=OPENVINO,
        short="openvino",
        package="onnxruntime-openvino",
        devices=("cpu",),
        platforms="Linux, Windows",
        options={
            "disable_dynamic_shapes": TRUTH, "enable_qdq_optimizer": TRUTH,
            "model_priority": ("LOW", "MEDIUM", "HIGH", "DEFAULT"), "num_streams": COUNT,
        },
        truth=("true", "false"),
        fixed={"device_type": "CPU"},  # AUTO and HETERO would choose in silence
        ran=True,
    ),
    Provider(
        name="DmlExecutionProvider",
        short="directml",
        package="onnxruntime-directml",
        devices=("cuda", "rocm"),
        platforms="Windows",
        precisions=("fp32", "fp16"),
        options={
            "device_id": COUNT, "device_filter": ("gpu", "npu", "any"),
            "performance_preference": ("default", "high_performance", "minimum_power"), "disable_metacommands": TRUTH,
        },
        truth=("true", "false"),
    ),
    Provider(
        name="CoreMLExecutionProvider",
        short="coreml",
        package="onnxruntime",
        how="it is in onnxruntime's own package for macOS",
        devices=("apple",),
        platforms="macOS, iOS",
        precisions=("fp32", "fp16"),
        options={
            "MLComputeUnits": ("ALL", "CPUOnly", "CPUAndGPU", "CPUAndNeuralEngine"), "RequireStaticInputShapes": TRUTH,
            "EnableOnSubgraphs": TRUTH, "SpecializationStrategy": ("Default", "FastPrediction"),
        },
        # NeuralNetwork, the default, computes in 16 bits where it likes; an MLProgram keeps its types.
        fixed={"ModelFormat": "MLProgram", "AllowLowPrecisionAccumulationOnGPU": "0"},
    ),
    Provider(
        name="NnapiExecutionProvider",
        short="nnapi",
        how="no package on PyPI has it: it is in ONNX Runtime's Android archive (onnxruntime-android)",
        devices=("android",),
        platforms="Android",
    ),
    Provider(
        name="QNNExecutionProvider",
        short="qnn",
        package="onnxruntime-qnn<2",
        devices=("android",),
        platforms="Windows on ARM, Android",
        precisions=("fp32", "fp16"),
        options={
            "backend_type": ("cpu", "gpu", "htp"), "backend_path": TEXT,
            "htp_performance_mode": (
                "default", "burst", "balanced", "high_performance", "high_power_saver", "low_balanced",
                "low_power_saver", "power_saver", "extreme_power_saver", "sustained_high_performance",
            ),
            "htp_graph_finalization_optimization_mode": ("0", "1", "2", "3"), "soc_model": COUNT,
            "htp_arch": ("0", "68", "69", "73", "75", "79", "81"), "device_id": COUNT, "vtcm_mb": COUNT,
            "qnn_context_priority": ("low", "normal", "normal_high", "high"),
        },
        fixed={"enable_htp_fp16_precision": "0"},  # its default runs a float32 graph in float16
    ),
    Provider(
        name="WebGpuExecutionProvider",
        short="webgpu",
        package="onnxruntime-webgpu",
        devices=("vulkan", "apple"),
        platforms="Linux, Windows, macOS",
        precisions=("fp32", "fp16"),
        options={
            "deviceId": COUNT, "preferredLayout": ("NHWC", "NCHW"),
            "storageBufferCacheMode": ("disabled", "lazyRelease", "simple", "bucket"),
            "validationMode": ("disabled", "wgpuOnly", "basic", "full"),
        },
    ),
)  # fmt: skip
PACKAGES = tuple(dict.fromkeys(one.package.partition("<")[0] for one in PROVIDERS if one.package))
"""Distributions of the runtime; each of them installs the same folder."""


def find(word: str) -> Provider | None:
    """The provider of that name or short name, in any case of letters."""
    known = {name.lower(): one for one in PROVIDERS for name in (one.name, one.short)}
    return known.get(word.lower())


def refuse(given: Mapping[str, Any], backend: str, default: str) -> str | None:
    """The reason why `provider`, `provider_options` or `min_nodes_share` of a target is invalid everywhere."""
    word = given.get("provider", default)
    provider = find(word) if isinstance(word, str) else None
    if provider is None:
        shorts = tuple(one.short for one in PROVIDERS)
        near = did_you_mean(str(word), (*shorts, *(one.name for one in PROVIDERS)))
        hint = f"did you mean {near!r}? " if near else ""
        return f"{backend} knows no provider {word!r}; {hint}it knows {', '.join(shorts)}"
    if given.get("cuda_graphs") and provider.short != "cuda":
        return f"{backend}'s option cuda_graphs needs provider: cuda, and it is {provider.short}"
    options = given.get("provider_options", {})
    if not isinstance(options, Mapping):
        return f"{backend}'s option provider_options must be a mapping, not {options!r}"
    for key, value in options.items():
        if key in provider.fixed:
            return (
                f"{provider.name}'s option {key} is always {provider.fixed[key]!r} here, so that what is asked for is "
                "what runs"
            )
        if key not in provider.options:
            listed = ", ".join(provider.options) or "none"
            near = did_you_mean(str(key), tuple(provider.options))
            hint = f"did you mean {near!r}? " if near else ""
            return f"{provider.name} has no option {key!r} that can be given here; {hint}it has {listed}"
        if (reason := _refuse_value(provider.options[key], value)) is not None:
            return f"{provider.name}'s option {key} must be {reason}, not {value!r}"
    share = given.get("min_nodes_share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        return f"{backend}'s option min_nodes_share must be a number above 0 and at most 1, not {share!r}"
    return None


def _refuse_value(allowed: tuple[str, ...], value: Any) -> str | None:
    """What the option may be, when it can't be `value`. Several providers take a wrong word for their default and say
    so in a log alone."""
    if allowed is TRUTH:
        right = str(value).lower() in ("true", "false", "1", "0")
    elif allowed is COUNT:
        right = not isinstance(value, bool) and str(value).isdecimal()
    elif allowed is TEXT:
        right = isinstance(value, str) and bool(value)
    else:
        right = not isinstance(value, bool) and str(value) in allowed
    return None if right else " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))


def refuse_absent(provider: Provider) -> str | None:
    """The reason when the ONNX Runtime that is installed here does not have it, with what brings it."""
    version, there = _installed()
    if provider.name in there:
        return None
    bring = provider.how or (
        f"pip install {_quoted(provider.package)}, in an environment without onnxruntime, whose folder it replaces"
    )
    if provider.name == OPENVINO:
        bring += "; or take the backend onnxruntime-openvino, which has an environment of its own"
    return f"the installed onnxruntime {version} has no {provider.name}, only {', '.join(there)}: {bring}"


def _installed() -> tuple[str, tuple[str, ...]]:
    """Version and providers of the ONNX Runtime here. Planning imports no runtime: then another process is asked."""
    if "onnxruntime" not in sys.modules:
        return _asked()
    import onnxruntime

    return onnxruntime.__version__, tuple(onnxruntime.get_available_providers())


@cache
def _asked() -> tuple[str, tuple[str, ...]]:
    code = (
        "import onnxruntime, json; print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers()]))"
    )
    ended = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
        raise NothingCompiledError(f"onnxruntime can't be imported: {said[0]}")
    version, there = json.loads(ended.stdout.splitlines()[-1])
    return str(version), tuple(map(str, there))


def arguments(provider: Provider, given: Mapping[str, Any], threads: int) -> list[tuple[str, dict[str, str]]]:
    """What a session is opened with: the provider, those behind it, and their options as the runtime wants them, in
    words."""
    asked = {key: _word(provider, key, value) for key, value in given.get("provider_options", {}).items()}
    if provider.name == OPENVINO:
        # Its CPU plug-in takes bfloat16 by itself where the machine has it, and all cores.
        config = {"CPU": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}}
        asked["load_config"] = json.dumps(config)
    if given.get("cuda_graphs"):
        asked["enable_cuda_graph"] = "1"
    if provider.name == "XnnpackExecutionProvider":
        asked.setdefault("intra_op_num_threads", str(threads))
    behind = [(one.name, dict(one.fixed)) for one in PROVIDERS if one.name in provider.behind]
    return [(provider.name, {**asked, **provider.fixed}), *behind]


def placement(session: Any) -> tuple[Counter[str], Counter[str]] | None:
    """Provider → nodes, and operator → count, as the session assigned them; None before ONNX Runtime 1.24, which can't
    say."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    places: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        places[part.ep_name] += len(nodes)
        ops.update(map(_op, nodes))
    return places, ops


def left_over(session: Any, provider: Provider) -> str:
    """The operators that the provider did not take, with how many; empty when that can't be known."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return ""
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != provider.name]
    left = Counter(_op(node) for part in parts for node in part.get_nodes())
    return ", ".join(f"{count} {op}" for op, count in sorted(left.items()))


def _op(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def demand(provider: Provider, places: Mapping[str, int] | None, bound: float) -> float:
    """The share of nodes that the provider took. Raises NothingCompiledError when that is below the bound, or can't be
    known."""
    if places is None:
        raise NothingCompiledError(
            f"this ONNX Runtime can't say which nodes {provider.name} took, so it is not known what would run",
            fix="install onnxruntime 1.24 or newer",
        )
    total, taken = sum(places.values()), places.get(provider.name, 0)
    listed = ", ".join(f"{count} to {name}" for name, count in sorted(places.items()) if name != provider.name)
    if not total:
        raise NothingCompiledError(
            f"no node is left for {provider.name}: the runtime folds all of the graph into constants"
        )
    if not taken:
        raise NothingCompiledError(
            f"{provider.name} was asked for and took none of the {total} nodes; they went {listed}"
        )
    if foreign := set(places) - {provider.name, CPU, *provider.behind}:
        raise NothingCompiledError(f"nodes were given to {', '.join(sorted(foreign))}, which nobody asked for")
    if taken < bound * total:
        raise NothingCompiledError(
            f"{provider.name} took {taken} of {total} nodes ({100 * taken / total:.0f} %), and min_nodes_share asks "
            f"for {100 * bound:.0f} %; {listed}"
        )
    return taken / total


def _word(provider: Provider, key: str, value: Any) -> str:
    if provider.options[key] is TRUTH:
        return provider.truth[0 if str(value).lower() in ("true", "1") else 1]
    return str(value)


def _quoted(package: str) -> str:
    return f'"{package}"' if "<" in package else package
