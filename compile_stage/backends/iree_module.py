"""What an IREE module holds: for which machine it is, and each dispatch function with the types that it computes in."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import PortableModel, Scheme
from compile_stage.plugin_support import fixed_shapes

_FORMATS = {"local": "llvm-cpu", "cuda": "cuda-", "vulkan": "vulkan-", "hip": "rocm-", "metal": "metal-"}

# The compiler's word for an instruction set, and the operating system's, where code that has it crashes on machines
# without.
_FEATURES = {
    "sse4.2": "sse4_2", "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avxvnni": "avx_vnni",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512vl": "avx512vl", "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "amx-tile": "amx_tile", "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16", "neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "i8mm": "i8mm",
    "bf16": "bf16", "sve": "sve", "sve2": "sve2",
}  # fmt: skip

# main$async_dispatch_7_matmul_like_Dx16x32_f32: its number, what it does, its sizes, its types. Some names go on after
# these.
_DISPATCH = re.compile(rb"main(?:\$async)?_dispatch_(\d+)_(\w+)")
_DOES = re.compile(r"[A-Za-z]\w*?(?=_(?:\d|D|$))")
_TYPES = re.compile(r"(?<![A-Za-z0-9])(?:(?:\d+|D)x)*((?:(?:bf|f|u?i)\d+x)*(?:bf|f|u?i)\d+)(?![A-Za-z0-9])")
_TARGET = re.compile(rb'#hal\.executable\.target<"([^"]+)", "([^"]+)", \{(.*?)\}>\]', re.DOTALL)
_ELEMENT_TYPES = {
    "FLOAT16": "f16", "BFLOAT16": "bf16", "DOUBLE": "f64", "INT8": "i8", "UINT8": "i8", "INT16": "i16", "UINT16": "i16",
    "INT32": "i32", "UINT32": "i32", "INT64": "i64", "UINT64": "i64",
}  # fmt: skip
"""ONNX's types and the compiler's."""
_NUMPY_TYPE = re.compile(r"(bfloat|float|uint|int)(\d+)")
_LETTERS = {"bfloat": "bf", "float": "f", "uint": "i", "int": "i"}
_MATRIX_KINDS = ("matmul", "conv", "contract", "mmt4d", "batch_matmul", "matvec", "vecmat", "dot", "attention")


def source_types(model: PortableModel) -> tuple[str, ...]:
    """In what the source itself holds its inputs and weights, as the compiler calls the types; of StableHLO, all of its
    tensors."""
    if model.form == "stablehlo":
        found = filter(None, map(_NUMPY_TYPE.fullmatch, fixed_shapes.types(model)))
        return tuple(sorted({f"{_LETTERS[kind]}{bits}" for kind, bits in (one.groups() for one in found)}))
    import onnx

    graph = onnx.load(model.path, load_external_data=False).graph
    held = {tensor.data_type for tensor in graph.initializer} | {
        value.type.tensor_type.elem_type for value in graph.input
    }
    return tuple(
        sorted({_ELEMENT_TYPES[kind] for kind in map(onnx.TensorProto.DataType.Name, held) if kind in _ELEMENT_TYPES})
    )


def read_back(
    path: Path, asked: Mapping[str, Any], scheme: Scheme, own: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What the module holds, what a machine needs to run it, and what a reader should know. Raises when it is not what
    was asked for.

    Args:
        own: Types of the source itself.
    """
    raw = path.read_bytes()
    found = _TARGET.search(raw)
    if found is None:
        raise NothingCompiledError("the compiled module does not say what it was compiled for")
    kind, form, described = (part.decode(errors="replace") for part in found.groups())
    fields = dict(re.findall(r'(\w+) = "([^"]*)"', described))
    device = asked.get("target_device", "local")
    if not kind.startswith(_FORMATS[device]) and not form.startswith(_FORMATS[device]):
        raise NothingCompiledError(f"IREE was asked to compile for {device} and compiled {kind}, {form}")
    triple = fields.get("target_triple", "")
    machine = triple.partition("-")[0]
    wanted = str(asked.get("target_triple", "")).partition("-")[0] or platform.machine()
    if device == "local" and machine != {"arm64": "aarch64", "AMD64": "x86_64"}.get(wanted, wanted):
        raise NothingCompiledError(f"IREE was asked to compile for {wanted} and compiled for {machine}")
    dispatches = read_dispatches(raw)
    if not dispatches:
        raise NothingCompiledError("the compiled module holds no dispatch function: it computes nothing")
    features = _switched_on(fields.get("cpu_features", ""))
    precisions: Counter[str] = Counter(types for _, types in dispatches)
    heavy = Counter(types for name, types in dispatches if name.startswith(_MATRIX_KINDS))
    executed = {
        "providers": {f"{kind} ({form})": len(dispatches)},
        "ops": dict(sorted(Counter(name for name, _ in dispatches).items())),
        "precision": {"matrix_and_convolution": dict(sorted(heavy.items())), "all": dict(sorted(precisions.items()))},
        "target": {"device": device, "triple": triple, "cpu": fields.get("cpu", ""), "features": features},
    }
    needs = {"device": device, "chip": str(asked.get("target_chip", "")), "machine": machine, "features": features}
    return executed, needs, check_precision(scheme, heavy, own)


def read_back_all(
    paths: Sequence[Path], asked: Mapping[str, Any], scheme: Scheme, own: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """As `read_back`, of the modules of one artifact together."""
    every = [read_back(path, asked, scheme, own) for path in paths]
    executed = dict(every[0][0])
    for key in ("providers", "ops"):
        executed[key] = dict(sorted(sum((Counter(one[0][key]) for one in every), Counter[str]()).items()))
    kinds = ("matrix_and_convolution", "all")
    executed["precision"] = {
        kind: dict(sorted(sum((Counter(one[0]["precision"][kind]) for one in every), Counter[str]()).items()))
        for kind in kinds
    }
    features = sorted({name for _, needs, _ in every for name in needs["features"]})
    return (
        executed,
        {**every[0][1], "features": features},
        list(dict.fromkeys(said for *_, notes in every for said in notes)),
    )


def check_precision(scheme: Scheme, heavy: Counter[str], own: Sequence[str] = ()) -> list[str]:
    """What to say of the precision. Raises when it was not taken: the types of a dispatch are those of its inputs, then
    that of its sums.

    A source that is not in float32 itself stays as it is where fp32 is asked for, which is no lowering.
    """
    wanted = {"fp32": "f32", "fp16": "f16"}[scheme.precision]
    others = {types: count for types, count in sorted(heavy.items()) if not types.startswith(wanted)}
    listed = ", ".join(f"{count} in {types}" for types, count in others.items())
    if scheme.precision == "fp32" and others and all(types.startswith(tuple(own)) for types in others):
        return [f"the source's own graph has matrix products that are not in float32: {listed}"]
    if heavy and len(others) == len(heavy):
        raise NothingCompiledError(
            f"the graph is {scheme.precision}, and IREE compiled none of its matrix products in it: {listed}"
        )
    return [f"some matrix products are not in {scheme.precision}: {listed}"] if others else []


def read_dispatches(raw: bytes) -> list[tuple[str, str]]:
    """What every dispatch function does, and the types that it computes in, from its name."""
    names: dict[int, str] = {}
    for digits, rest in _DISPATCH.findall(raw):
        number, name = int(digits), rest.decode()
        # What follows a name in the file may run into it, so of several places the shortest is the name.
        if number not in names or len(name) < len(names[number]):
            names[number] = name
    found = []
    for _, name in sorted(names.items()):
        does, types = _DOES.match(name), _TYPES.findall(name.replace("_", " "))
        found.append((does[0] if does else name, types[-1] if types else "other"))
    return found


def _switched_on(features: str) -> list[str]:
    """The instruction sets that the code may use, by the operating system's names; a later word of the list wins."""
    state = {word[1:]: word[0] == "+" for word in features.split(",") if word}
    return [ours for theirs, ours in _FEATURES.items() if state.get(theirs)]
