"""What XLA compiled, read from the optimised program that an executable carries. Needed to compile, not to open."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import Scheme

_HLO_TYPES = {"fp32": "f32", "bf16": "bf16"}
_NUMPY_TO_HLO = {"float64": "f64", "float16": "f16", "bfloat16": "bf16", "int64": "s64", "int32": "s32"}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = \(?(\w+)\[.*?[\]})] ([a-z][\w-]*)\(([^)]*)")
_LIBRARY = re.compile(r'"fusion_config":\{"kind":"_*(\w+?)(?:_fusion)?"')
_CALLED = re.compile(r"(?:calls|to_apply)=%([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_KIND = re.compile(r"kind=k(\w+)")

# Of these no code is made; a call's own computation is counted by itself.
_NO_CODE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call", "after-all")
_MATRIX_OPS = ("dot", "convolution", "ragged-dot")


def read_back(
    programs: list[str], scheme: Scheme, source_types: frozenset[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the optimised programs run, and in what types. Raises when the precision that was asked for was not
    taken."""
    providers: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    heavy: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for text in programs:
        _count(text, providers, ops, heavy, types)
    if not providers:
        raise NothingCompiledError("the optimised program computes nothing: it only hands on what it is given")
    executed = {
        "providers": dict(sorted(providers.items())),
        "ops": dict(sorted(ops.items())),
        "precision": {"matrix_and_convolution": dict(sorted(heavy.items())), "all": dict(sorted(types.items()))},
    }
    return executed, _judge(scheme, heavy, types, source_types)


def _count(text: str, providers: Counter[str], ops: Counter[str], heavy: Counter[str], types: Counter[str]) -> None:
    inside = {
        name
        for line in text.splitlines()
        for name in _CALLED.findall(line)
        if " call(" not in line  # what a call runs is kernels like any other; a fusion is one kernel
    }
    computation, known = "", dict[str, str]()
    for line in text.splitlines():
        if (begins := _COMPUTATION.match(line)) is not None:
            computation = begins.group(1)
        elif (found := _INSTRUCTION.match(line)) is not None:
            name, kind, op, operands = found.groups()
            known[name] = kind
            if op in _MATRIX_OPS:
                given = [known[word] for word in re.findall(r"%([\w.-]+)", operands) if word in known]
                heavy["/".join(sorted({*given})) or kind] += 1
            if computation not in inside and op not in _NO_CODE:
                provider, label = _kernel(op, line)
                providers[provider] += 1
                ops[label] += 1
                types[kind] += 1


def _kernel(op: str, line: str) -> tuple[str, str]:
    """Whose code an instruction runs, and what the report calls it."""
    if (library := _LIBRARY.search(line)) is not None:
        return library.group(1).upper(), f"{library.group(1)} fusion"
    if (target := _TARGET.search(line)) is not None:
        return "custom call", target.group(1)
    if op in _MATRIX_OPS:
        return "XLA's library", op
    kind = _KIND.search(line)
    return "generated kernels", f"{kind.group(1).lower()} fusion" if op == "fusion" and kind else op


def _judge(scheme: Scheme, heavy: Counter[str], types: Counter[str], source_types: frozenset[str]) -> tuple[str, ...]:
    wanted = _HLO_TYPES[scheme.precision]
    native = {_NUMPY_TO_HLO.get(name, name) for name in source_types}
    rest = {kind: count for kind, count in sorted(heavy.items()) if kind != wanted}
    listed = ", ".join(f"{count} in {kind}" for kind, count in rest.items())
    if scheme.precision == "bf16" and not heavy[wanted]:
        raise NothingCompiledError(
            f"XLA was asked for bf16 and runs no matrix product or convolution in it: {listed or 'there are none'}"
        )
    if scheme.precision == "fp32" and (foreign := [kind for kind in rest if not {*kind.split("/")} <= native]):
        raise NothingCompiledError(f"the program is fp32, and XLA multiplies in {', '.join(foreign)}")
    notes = [f"matrix products and convolutions beside those in {wanted}: {listed}"] if rest else []
    if types["f64"] and "f64" not in native:
        notes.append(f"{types['f64']} kernels compute in float64, which the source has not")
    return tuple(notes)
