"""What is alike in all backends: what they say of a folder that they compiled, and of a model that is not for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_tree, tree_size
from compile_stage.core.environment import hardware
from compile_stage.core.ports import Backend
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target, record
from compile_stage.core.tensors import Signature, TensorSpec

_ARRAYS = (
    "bool", "str", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64",
)  # fmt: skip


@record
class Compiled:
    """What a backend says of the folder that it compiled a model into.

    Attributes:
        entry: The file that `Backend.open` loads.
        executed: What the runtime says that it runs (`Artifact.executed`).
        signature: As the runtime reports it; None where it is the model's.
        options: What `Backend.open` needs beside the files.
        notes: What a reader should know.
        not_runnable_here: Why this machine can't run it, for what was compiled for another.
    """

    entry: str
    executed: Mapping[str, Any]
    signature: Signature | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    not_runnable_here: str = ""


def describe(
    backend: Backend, model: PortableModel, scheme: Scheme, job_id: str, into: Path, compiled: Compiled
) -> Artifact:
    """The artifact that `into` holds: the last line of `Backend.compile`."""
    return Artifact(
        path=str(into),
        entry=compiled.entry,
        digest=digest_tree(into),
        job_id=job_id,
        backend=backend.name,
        precision=scheme.precision,
        toolchain=backend.toolchain(),
        hardware=hardware().fingerprint,
        signature=compiled.signature or model.signature,
        size_bytes=tree_size(into),
        made_from=model.digest,
        options=dict(compiled.options),
        executed=compiled.executed,
        notes=tuple(compiled.notes),
        not_runnable_here=compiled.not_runnable_here,
    )


def refuse_form(backend: Backend, model: PortableModel, target: Target) -> str | None:
    """The first lines of `Backend.refuse`: the reason when the model is of a form that the backend does not take, or
    has fixed its batch to another size than the target asks for."""
    if model.form not in backend.capabilities.forms:
        return f"{backend.name} takes {' or '.join(backend.capabilities.forms)}, not {model.form}"
    return model.signature.refuse_batch_sizes(target.batch_sizes)


def refuse_types(signature: Signature) -> str | None:
    """The reason when an input or output is of a type that NumPy has no array of (bfloat16, 8-bit floats, 4-bit
    integers): runtimes take and hand out such data as that of another type of the same width, so that every value would
    be another; or of complex numbers, which they don't take. Inside of the graph they may be."""
    for word, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.dtype not in _ARRAYS:
                lacking = "no runtime takes" if spec.dtype.startswith("complex") else "NumPy has no arrays of"
                return (
                    f"{word} {spec.name!r} is {spec.dtype}, which {lacking}; cast it within the model, to float32 or "
                    "an integer type"
                )
    return None


def trial_filler(model: PortableModel) -> Callable[[TensorSpec, Sequence[int]], Any]:
    """What fills an input, of a shape, for a first call of what was compiled of an ONNX model: whether it runs at all.
    Zeros are indices that every table has; but an integer divided by 0 ends the process, so where operators divide
    (Range and Slice do by their step) integers are 1."""
    import numpy as np
    import onnx

    def divide(nodes: Any) -> bool:
        return any(
            node.op_type in ("Div", "Mod", "Range", "Slice")
            or any(divide(one.g.node) for one in node.attribute if one.HasField("g"))
            for node in nodes
        )

    loaded = onnx.load(model.path, load_external_data=False)
    dividing = divide(loaded.graph.node) or any(divide(function.node) for function in loaded.functions)

    def fill(spec: TensorSpec, shape: Sequence[int]) -> Any:
        return (np.ones if dividing and np.dtype(spec.dtype).kind in "iu" else np.zeros)(shape, spec.dtype)

    return fill


def without_folders(said: str) -> str:
    """What a compiler says, with its files by their names only: folders of this machine tell a reader nothing."""
    return re.sub(r"(?<!\w)/(?:[\w.-]+/)+", "", said)
