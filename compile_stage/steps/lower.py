"""Portable model → portable model at the scheme's precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.file_trees import read_below, written_below
from compile_stage.core.ports import Worker
from compile_stage.core.records import Job, PortableModel, SampleSet


def lower(
    context: Context,
    worker: Worker,
    job: Job,
    model: PortableModel,
    calibration: SampleSet | None,
    keep: Sequence[str] = (),
) -> PortableModel:
    """The model itself when the backend does the precision natively; else the lowered graph, shared by all backends
    that want the same scheme."""
    if job.scheme.native:
        return model
    samples = calibration if plugins.needs_calibration(job.scheme) else None
    key = {
        "model": model.digest,
        # Two backends' names for one scheme share the graph, whatever they run the rest in.
        "scheme": replace(job.scheme, name="", float_type="fp32", float_types=()),
        "calibration": samples.digest if samples else None,
        "keep": list(keep),
        "made_by": plugins.cache_identity("lowerings", job.scheme.precision),
    }

    def make(into: Path) -> PortableModel:
        answer = worker.call(
            "lower", scheme=job.scheme, model=model, calibration=samples, keep=list(keep), into=str(into)
        )
        lowered = written_below(revive(PortableModel, answer), into)
        return replace(lowered, precision=job.scheme.precision, made_from=model.digest)

    stored = context.cached("lower/5", job.id, key, make)
    lowered: PortableModel = revive(PortableModel, stored.value)
    return read_below(lowered, stored.path, of=model)
