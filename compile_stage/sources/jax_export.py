"""What a `jax.export` artifact and the JSON beside it say, without JAX, and what in them is refused.

The artifact is a FlatBuffer that holds a StableHLO module as MLIR bytecode. A module may call functions that are
registered in the process by name (`custom_call`); some of these take an address in memory and call what is there. Which
calls it makes is known only to a parser of MLIR, so that is asked in the confined worker, by a list of those that
compute (`refuse_calls`). Before that, the strings of the bytecode show whether it could call back into Python.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import refuse_types

EXPORTED, SETTINGS = "model.jaxexport", "model.json"
_MAX_SETTINGS_BYTES = 2**20
_MAX_TENSORS = 1000

_MODULE_SLOT = 30  # of the table Exported, in the schema of jax.export since its first version
_MAGIC = b"ML\xefR"
_STRINGS = 0  # the section of MLIR bytecode that holds every name
_LOG = "log it again with compile_stage.jax.log_model"

_CALLBACKS = re.compile(r"xla_\w*python\w*callback\w*|tf\.call_tf_function")

# What a call may be: it computes on the tensors that it is given, and looks at their sizes itself. All of jaxlib's that
# JAX guarantees to keep on CPUs; `shape_assertion` compares sizes and is gone once they are known.
_COMPUTING = re.compile(
    r"""lapack_[sdcz](potrf|geqrf|orgqr|ungqr|syevd|heevd|geev|gesdd|getrf|sytrd|hetrd|gehrd|gees|trsm|gtsv)_ffi
    |   shape_assertion | Sharding | AllocateBuffer | mhlo\.(topk|erf) | chlo\.(top_k|erf)
    |   stablehlo\.dynamic_(reduce_window|rng_bit_generator|top_k|approx_top_k)""",
    re.VERBOSE,
)


class RefusedError(Exception):
    """The files are not what they say, or hold what is not taken; the reason is its text."""


class Settings(NamedTuple):
    """What `model.json` says.

    Attributes:
        answers_a_dict: The original's pyfunc answers with a dict.
        graph: Name of the ONNX file beside it; empty where there is none.
        no_graph: Why there is none.
    """

    signature: Signature
    answers_a_dict: bool
    graph: str
    no_graph: str


def settings(folder: Path) -> Settings:
    """Read `model.json`. Raises RefusedError when it is no description of tensors."""
    file = folder / SETTINGS
    try:
        if file.stat().st_size > _MAX_SETTINGS_BYTES:
            raise RefusedError(f"its {SETTINGS} has more than {_MAX_SETTINGS_BYTES} bytes")
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(f"its {SETTINGS} can't be read ({type(error).__name__}): {_LOG}") from error
    if not isinstance(read, Mapping) or read.get("format") != 1:
        raise RefusedError(f"its {SETTINGS} is not of format 1: {_LOG}")
    signature = Signature(inputs=_tensors(read, "inputs"), outputs=_tensors(read, "outputs"))
    if not signature.inputs or not signature.outputs:
        raise RefusedError(f"its {SETTINGS} names no inputs or no outputs: {_LOG}")
    if (reason := refuse_types(signature)) is not None:
        raise RefusedError(reason)
    graph = read.get("onnx") or ""
    if not isinstance(graph, str) or (graph and Path(graph).name != graph):
        raise RefusedError(f"its {SETTINGS} names an ONNX file that is not beside it")
    return Settings(signature, read.get("answer") == "dict", graph, str(read.get("no_onnx", "")))


def refuse(folder: Path) -> str | None:
    """The reason why the artifact is not opened, from its bytes."""
    try:
        settings(folder)
        names = strings(module_of((folder / EXPORTED).read_bytes()))
    except RefusedError as error:
        return str(error)
    except OSError as error:
        return f"its {EXPORTED} can't be read: {error.strerror}"
    return _refuse_callbacks(names)


def refuse_calls(targets: Iterable[str]) -> str | None:
    """The reason when a module calls what is not known to compute only.

    Args:
        targets: Of all its custom calls.
    """
    foreign = sorted({name for name in targets if _COMPUTING.fullmatch(name) is None})
    if not foreign:
        return None
    return (
        f"its program calls {', '.join(foreign)}, which is not known to compute on tensors only: export a function "
        "without callbacks and kernels of your own"
    )


def _refuse_callbacks(names: Iterable[str]) -> str | None:
    found = sorted({name for name in names if _CALLBACKS.fullmatch(name)})
    if not found:
        return None
    return (
        f"its program calls back into Python ({', '.join(found[:3])}): the function is not in the file, and an address "
        "that the file names would be called. Export a function without jax.pure_callback and io_callback"
    )


def _tensors(read: Mapping[str, Any], key: str) -> tuple[TensorSpec, ...]:
    listed = read.get(key)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) > _MAX_TENSORS:
        raise RefusedError(f"its {SETTINGS} has no list of {key}: {_LOG}")
    specs = tuple(_tensor(one, key) for one in listed)
    if len({spec.name for spec in specs}) != len(specs):
        raise RefusedError(f"its {SETTINGS} names two {key} alike: {_LOG}")
    return specs


def _tensor(one: Any, key: str) -> TensorSpec:
    try:
        name, dtype, shape = one["name"], one["dtype"], one["shape"]
    except (TypeError, KeyError) as error:
        raise RefusedError(f"its {SETTINGS} describes one of the {key} without name, dtype and shape") from error
    if not isinstance(name, str) or not re.fullmatch(r"[\w./:-]{1,200}", name):
        raise RefusedError(f"its {SETTINGS} has one of the {key} with no name that a tensor can have")
    if not isinstance(dtype, str) or dtype == "str" or not re.fullmatch(r"\w{1,40}", dtype):  # JAX has no texts
        raise RefusedError(f"its {key[:-1]} {name} has a dtype that names no type of JAX: {_LOG}")
    sizes = isinstance(shape, Sequence) and not isinstance(shape, str) and all(map(_is_size, shape))
    if not sizes or not shape:
        raise RefusedError(f"its {key[:-1]} {name} has no shape with a batch dimension: {_LOG}")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape))


def _is_size(size: Any) -> bool:
    if isinstance(size, str):
        return bool(re.fullmatch(r"[\w +*()-]{1,100}", size))
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**31


# --------------------------------------------------------------------------------------------------------- the bytes


def module_of(raw: bytes) -> bytes:
    """The StableHLO module within the artifact. Raises RefusedError when the bytes hold none."""
    try:
        table = _at("<I", raw, 0)
        vtable = table - _at("<i", raw, table)
        size = _at("<H", raw, vtable)
        slot = _at("<H", raw, vtable + _MODULE_SLOT) if size > _MODULE_SLOT else 0
        if not slot:
            raise RefusedError(f"its {EXPORTED} holds no StableHLO module: {_LOG}")
        vector = table + slot
        vector += _at("<I", raw, vector)
        count = _at("<I", raw, vector)
    except struct.error as error:
        raise RefusedError(f"its {EXPORTED} was not written by jax.export: {_LOG}") from error
    module = raw[vector + 4 : vector + 4 + count]
    if len(module) != count or not module.startswith(_MAGIC):
        raise RefusedError(f"its {EXPORTED} holds no StableHLO module that is whole: {_LOG}")
    return module


def _at(form: str, raw: bytes, place: int) -> int:
    if place < 0:
        raise struct.error
    return int(struct.unpack_from(form, raw, place)[0])


def strings(module: bytes) -> list[str]:
    """Every name in MLIR bytecode: operators, attributes, what is called. Raises RefusedError when it can't be
    read."""
    try:
        place = module.index(b"\0", len(_MAGIC)) + 1  # behind the version, one byte here, and the producer's name
        while place < len(module):
            kind, place = module[place], place + 1
            size, place = _varint(module, place)
            if kind & 0x80:
                alignment, place = _varint(module, place)
                while module[place] == 0xCB and place % max(alignment, 1):
                    place += 1
            if kind & 0x7F == _STRINGS:
                return _split(module[place : place + size])
            place += size
    except (ValueError, IndexError) as error:
        raise RefusedError(f"its {EXPORTED} holds a module that is no MLIR bytecode: {_LOG}") from error
    raise RefusedError(f"its {EXPORTED} holds a module without names: {_LOG}")


def _split(section: bytes) -> list[str]:
    count, place = _varint(section, 0)
    if count > len(section):
        raise ValueError
    sizes = []
    for _ in range(count):
        size, place = _varint(section, place)
        sizes.append(size)
    found = []
    for size in reversed(sizes):  # the lengths are written from the last to the first
        if not size or place + size > len(section):
            raise ValueError
        found.append(section[place : place + size - 1].decode(errors="replace"))
        place += size
    return found


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """MLIR's: the number of zeros at the low end of the first byte says how many bytes follow."""
    first = content[place]
    if first == 0:
        return int.from_bytes(content[place + 1 : place + 9], "little"), place + 9
    more = (first & -first).bit_length() - 1
    return int.from_bytes(content[place : place + more + 1], "little") >> (more + 1), place + more + 1
