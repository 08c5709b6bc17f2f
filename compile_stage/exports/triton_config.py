"""`config.pbtxt` of a Triton model repository: shapes, batches, threads, and which of Triton's backends runs it.

What was proven decides: the largest proven batch is the largest that is taken, and one of Triton's own backends is used
only where its configuration can say everything that the artifact was proven with. What it can't say goes to Triton's
Python backend, which runs the artifact by the loader that the bundle carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_stage.core.errors import UsageError
from compile_stage.core.records import record
from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.exports.pbtxt import Word
from compile_stage.exports.version import Version

PYTHON = "python"
_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16", "str": "STRING",
}  # fmt: skip
# Triton's numbers: 0 is all, and there is no other word for it.
_GRAPH_LEVELS = {"all": 0, "extended": 1, "basic": -1, "disabled": 2}
_ORT_OPTIONS = {
    "graph_optimization",
    "memory_arena",
    "spinning",
    "threads",
    "provider",
    "mapped_weights",
    "config",
    "fused_attention",
    "fixed_shapes",
    "known_sizes",  # for which sizes our loader opens sessions: Triton has one for all
}
_ORT_DEVICES = {"cpu": "KIND_CPU", "CPUExecutionProvider": "KIND_CPU"}


@record
class Choice:
    """Which of Triton's backends runs it.

    Attributes:
        why: Why it is not the artifact's own; empty where it is.
        kind: Of the instances.
        requests: predict() answers JSON, in place of tensors by name.
    """

    backend: str
    why: str = ""
    kind: str = "KIND_CPU"
    requests: bool = False


def choose(version: Version) -> Choice:
    """Raises UsageError for a model that none of them can run."""
    if version.answers_requests:
        return Choice(backend=PYTHON, why="predict() does more than the graph", requests=True)
    artifact = version.artifact
    if artifact.generation is not None:
        raise UsageError(
            "a language model without its tokenizer can't be exported to Triton: what Triton calls is one step of it",
            fix="compile-stage export --to kserve, or --to bentoml", where=version.uri,
        )  # fmt: skip
    judged = {"onnxruntime": _onnxruntime, "openvino": _openvino, "tensorrt": _tensorrt}.get(artifact.backend)
    if judged is None:
        return Choice(backend=PYTHON, why=f"Triton has no backend for artifacts of {artifact.backend}")
    return judged(version)


def _onnxruntime(version: Version) -> Choice:
    options = version.artifact.options
    if version.artifact.entry.endswith(".ort"):
        return Choice(backend=PYTHON, why="Triton's backend reads .onnx files, and the artifact is in ORT's own format")
    if options.get("provider", "cpu") not in _ORT_DEVICES:
        return Choice(backend=PYTHON, why=f"it was proven with the provider {options['provider']}")
    if config := options.get("config"):
        return Choice(backend=PYTHON, why=f"config.pbtxt has no place for the session's {', '.join(sorted(config))}")
    if other := sorted(set(options) - _ORT_OPTIONS):
        return Choice(backend=PYTHON, why=f"config.pbtxt has no place for its options {', '.join(other)}")
    return Choice(backend="onnxruntime")


def _openvino(version: Version) -> Choice:
    options, features = version.artifact.options, set(version.manifest.get("hardware", {}).get("features", ()))
    hint = options.get("hint", "f32")
    if hint not in ("f32", "bf16"):
        return Choice(backend=PYTHON, why=f"config.pbtxt can't ask OpenVINO for the precision {hint}")
    if hint == "f32" and features & {"avx512_bf16", "amx_bf16", "bf16", "amx_fp16"}:
        return Choice(
            backend=PYTHON,
            why="on a CPU with bfloat16 OpenVINO computes in that unless it is asked for float32, and config.pbtxt "
            "can't ask",
        )
    known = {"PERFORMANCE_HINT", "NUM_STREAMS", "INFERENCE_NUM_THREADS"}
    if other := sorted(set(options.get("config", {})) - known):
        return Choice(backend=PYTHON, why=f"config.pbtxt has no place for OpenVINO's {', '.join(other)}")
    if options.get("requests", 1) > 1:
        return Choice(backend=PYTHON, why="Triton's backend does not share the rows of a batch among requests")
    free = [spec for spec in version.signature.inputs if any(isinstance(dim, str) for dim in spec.shape[1:])]
    if free or batch_axis(version.signature) is None:
        return Choice(backend=PYTHON, why="Triton's OpenVINO backend takes fixed shapes beside the batch")
    return Choice(backend="openvino")


def _tensorrt(version: Version) -> Choice:
    return Choice(backend="tensorrt", kind="KIND_GPU")


def batch_axis(signature: Signature) -> str | None:
    """The symbol that axis 0 of every input and output has, where that is one; else None."""
    symbols: set[Dim] = {spec.shape[0] if spec.shape else 1 for spec in (*signature.inputs, *signature.outputs)}
    [first, *others] = symbols
    return first if isinstance(first, str) and not others else None


def configure(version: Version, choice: Choice, name: str) -> dict[str, Any]:
    """The configuration, as `pbtxt.write` takes it."""
    entry = "model.py" if choice.backend == PYTHON else version.artifact.entry
    whole: dict[str, Any] = {"name": name, "backend": choice.backend, "default_model_filename": entry}
    if choice.requests:
        whole["max_batch_size"] = 0
        whole["input"] = [{"name": "request", "data_type": Word("TYPE_STRING"), "dims": [1]}]
        whole["output"] = [{"name": "response", "data_type": Word("TYPE_STRING"), "dims": [1]}]
    else:
        batched = batch_axis(version.signature) is not None
        whole["max_batch_size"] = version.batches.sizes[-1] if batched else 0
        whole["input"] = [_tensor(spec, batched=batched) for spec in version.signature.inputs]
        whole["output"] = [_tensor(spec, batched=batched) for spec in version.signature.outputs]
    whole["instance_group"] = [{"count": 1, "kind": Word(choice.kind)}]
    if choice.backend != PYTHON:  # `model.py` answers each request by itself: waiting for others gains nothing
        whole |= _batching(version, whole["max_batch_size"])
    whole |= _backend_settings(version, choice)
    whole["parameters"] = [
        *({"key": key, "value": {"string_value": value}} for key, value in _parameters(version, choice).items()),
        *({"key": f"compile_stage.{key}", "value": {"string_value": value}} for key, value in version.lineage.items()),
    ]
    if warmup := _warmup(version, whole):
        whole["model_warmup"] = warmup
    return whole


def _tensor(spec: TensorSpec, *, batched: bool) -> dict[str, Any]:
    dims = [dim if isinstance(dim, int) else -1 for dim in spec.shape[1 if batched else 0 :]]
    described: dict[str, Any] = {"name": spec.name, "data_type": Word(f"TYPE_{_TYPES[spec.dtype]}")}
    if not dims:  # Triton knows no tensor without dimensions
        return {**described, "dims": [1], "reshape": {"shape": []}}
    return {**described, "dims": dims}


def pays(version: Version) -> tuple[int, ...]:
    """The proven sizes whose rows were measured to come faster than one by one; empty where none was."""
    timed = {int(size): float(one["p50_s"]) for size, one in version.manifest.get("timing", {}).items()}
    alone = timed.get(1)
    if not alone or not version.batches.splits:
        return ()
    return tuple(
        size for size in version.batches.sizes if size > 1 and size in timed and timed[size] / size < alone
    )  # fmt: skip


def _batching(version: Version, largest: int) -> dict[str, Any]:
    """Requests are put together only to sizes that were proven and measured to pay, and wait for that at most as long
    as a call of one row takes."""
    preferred = [size for size in pays(version) if size <= largest]
    if not preferred:
        return {}
    alone_us = float(version.manifest["timing"]["1"]["p50_s"]) * 1e6
    return {
        "dynamic_batching": {
            "preferred_batch_size": preferred,
            "max_queue_delay_microseconds": max(1, round(alone_us)),
        }
    }


def _backend_settings(version: Version, choice: Choice) -> dict[str, Any]:
    if choice.backend != "onnxruntime":
        return {}
    level = _GRAPH_LEVELS[str(version.artifact.options.get("graph_optimization", "all"))]
    return {"optimization": {"graph": {"level": level}}} if level else {}


def _parameters(version: Version, choice: Choice) -> Mapping[str, str]:
    threads, options = int(version.manifest.get("threads", 1)), version.artifact.options
    if choice.backend == "onnxruntime":
        return {
            "intra_op_thread_count": str(min(threads, int(options.get("threads", threads)))),
            "inter_op_thread_count": "1",
            "execution_mode": "0",
            "enable_mem_arena": "1" if options.get("memory_arena", True) else "0",
        }
    if choice.backend == "openvino":
        config = options.get("config", {})
        padded = {"ENABLE_BATCH_PADDING": "YES"} if len(version.batches.sizes) > 1 else {}
        return {
            "INFERENCE_NUM_THREADS": str(min(threads, int(config.get("INFERENCE_NUM_THREADS", threads)))),
            "NUM_STREAMS": str(config.get("NUM_STREAMS", 1)),
            "PERFORMANCE_HINT": str(config.get("PERFORMANCE_HINT", "latency")).upper(),
            **({"HINT_BF16": "YES"} if options.get("hint") == "bf16" else {}),
            **padded,
        }
    if choice.backend == PYTHON:
        mode = str(version.manifest.get("on_hardware_mismatch", "error"))
        return {"threads": str(threads), "on_hardware_mismatch": mode}
    return {}


def _warmup(version: Version, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One call of one row, and one of the largest batch, of zeros: samples are data of somebody, and do not leave with
    the model. None where a free dimension has no size that is known."""
    if config["input"][0]["name"] == "request" and config["max_batch_size"] == 0 and version.answers_requests:
        return []
    if any(-1 in tensor["dims"] or tensor["data_type"] == "TYPE_STRING" for tensor in config["input"]):
        return []
    sizes = sorted({1, config["max_batch_size"]} - {0}) or [1]
    return [
        {
            "name": f"batch-{size}",
            "batch_size": size,
            "inputs": [
                {
                    "key": tensor["name"],
                    "value": {
                        "data_type": tensor["data_type"],
                        "dims": tensor["dims"],
                        "zero_data": True,
                    },
                }
                for tensor in config["input"]
            ],
        }
        for size in sizes
    ]
