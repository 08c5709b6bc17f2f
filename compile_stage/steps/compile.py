"""Portable model → artifact of one backend for one target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, revive, tree_size
from compile_stage.core.errors import IntegrityError
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.generation import has_cache
from compile_stage.core.ports import Worker
from compile_stage.core.records import Artifact, Job, PortableModel, SampleSet, record


@record
class Compiled:
    """The artifact, how long the compiler took for it (then, when it comes from the cache), and whether it does."""

    artifact: Artifact
    compile_s: float
    cached: bool


def compile_job(
    context: Context, worker: Worker, job: Job, model: PortableModel, calibration: SampleSet | None
) -> Compiled:
    """Compile, or take the artifact from the cache: same model, scheme, target, toolchain and hardware only."""
    # A native scheme may calibrate inside the backend; a lowered graph has its calibration in it.
    samples = calibration if job.scheme.native and plugins.needs_calibration(job.scheme) else None
    key = {
        "model": model.digest,
        "backend": job.backend,
        "scheme": job.scheme,
        "target": replace(job.target, name="", required=True, backends=(), precisions=()),
        "calibration": samples.digest if samples else None,
        "made_by": plugins.cache_identity("backends", job.backend),
        "hardware": context.hardware,
    }

    def make(into: Path) -> dict[str, object]:
        answer, seconds = context.compile_in(worker, job, model, samples, into)
        # For which hardware it was asked for: another machine with the same chip may compile it.
        artifact = replace(_checked(answer, into, job), hardware=context.hardware.fingerprint)
        return {"artifact": artifact, "compile_s": seconds}

    stored = context.cached("compile/7", job.id, key, make)
    artifact: Artifact = revive(Artifact, stored.value["artifact"])
    generation = job.target.generation if has_cache(artifact.signature) else None
    return Compiled(
        artifact=replace(artifact, path=stored.path, job_id=job.id, generation=generation),
        compile_s=stored.value["compile_s"],
        cached=stored.hit,
    )


def _refuse_versions(artifact: Artifact) -> None:
    """The versions are published as requirements, and loading compares them with what is installed there.

    Raises:
        IntegrityError: It names a package in another version than the one that is installed where it was compiled.
    """
    backend = plugins.load("backends", artifact.backend)
    if (home := plugins.toolchain_of(backend)) is not None:
        held = {canonicalize_name(name): version for name, version in home.packages.items()}
    else:
        held = {canonicalize_name(name): one for name, one in plugins.package_versions(*artifact.toolchain).items()}
    for name, version in artifact.toolchain.items():
        installed = held.get(canonicalize_name(name), version)
        if installed != version:
            raise IntegrityError(
                f"backend {artifact.backend} says that {name} {version} made its artifact, and {installed} is there",
                fix="have the backend's toolchain() answer with the versions that are installed "
                "(compile_stage.core.plugins.package_versions)",
            )


def _checked(answer: object, into: Path, job: Job) -> Artifact:
    """What a backend says of its files is not believed: digest and size are taken here, and it is the job's own."""
    artifact: Artifact = revive(Artifact, answer)
    if artifact.backend != job.backend:  # whether opening it runs code, and whose, follows from the name
        raise IntegrityError(f"backend {job.backend} says that its artifact is one of {artifact.backend}")
    if (reason := refuse_tree(into)) is not None:
        raise IntegrityError(f"what backend {job.backend} wrote can't be used: {reason}")
    entry = Path(artifact.entry)
    if entry.is_absolute() or ".." in entry.parts or not (into / entry).exists():
        raise IntegrityError(f"backend {artifact.backend} says it wrote {artifact.entry}, and there is no such file")
    _refuse_versions(artifact)
    return replace(
        artifact, path=".", digest=digest_tree(into), size_bytes=tree_size(into), precision=job.scheme.precision
    )
