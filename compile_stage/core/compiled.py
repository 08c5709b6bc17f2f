"""What is alike in all backends: what they say of a folder that they compiled, and of a model that is not for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_tree, tree_size
from compile_stage.core.environment import hardware
from compile_stage.core.ports import Backend
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target
from compile_stage.core.tensors import Signature


def describe(
    backend: Backend,
    model: PortableModel,
    scheme: Scheme,
    job_id: str,
    into: Path,
    *,
    entry: str,
    executed: Mapping[str, Any],
    signature: Signature | None = None,
    options: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    elsewhere: str = "",
) -> Artifact:
    """The artifact that `into` holds: the last line of `Backend.compile`.

    Args:
        entry: The file in `into` that `Backend.open` loads.
        executed: What the runtime says that it runs (`Artifact.executed`).
        signature: As the runtime reports it; None where it is the model's.
        options: What `Backend.open` needs beside the files.
        elsewhere: Why this machine can't run it, for what was compiled for another.
    """
    return Artifact(
        path=str(into),
        entry=entry,
        digest=digest_tree(into),
        job_id=job_id,
        backend=backend.name,
        precision=scheme.precision,
        toolchain=backend.toolchain(),
        hardware=hardware().fingerprint,
        signature=signature or model.signature,
        size_bytes=tree_size(into),
        made_from=model.digest,
        options=dict(options or {}),
        executed=executed,
        notes=tuple(notes),
        elsewhere=elsewhere,
    )


def refuse_form(backend: Backend, model: PortableModel, target: Target) -> str | None:
    """The first lines of `Backend.refuse`: the reason when the model is of a form that the backend does not take, or has fixed its batch
    to another size than the target asks for."""
    if model.form not in backend.forms:
        return f"{backend.name} takes {' or '.join(backend.forms)}, not {model.form}"
    return model.signature.refuse_batch_sizes(target.batch_sizes)
