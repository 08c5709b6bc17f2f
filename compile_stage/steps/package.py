"""Winner → bundle: files, manifest and digests, in the form that the MLflow flavor loads."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context, made_by
from compile_stage.core.digest import digest_of, digest_tree, plain
from compile_stage.core.environment import python_version
from compile_stage.core.errors import InternalError
from compile_stage.core.provenance import remember_packaged
from compile_stage.core.records import (
    Artifact,
    Bundle,
    Candidate,
    Measurement,
    Origin,
    Plan,
    Policy,
    SourceModel,
    Target,
    TargetPolicy,
    TargetResult,
    Timing,
    UnvalidatedBundle,
)
from compile_stage.core.storage import demand_present
from compile_stage.flavor import save_model
from compile_stage.measure import stats
from compile_stage.measure.search import margin
from compile_stage.serving.batches import proven_batches
from compile_stage.serving.manifest import read_manifest
from compile_stage.serving.text import TOKENIZER_FOLDER
from compile_stage.serving.version_tags import TAG
from compile_stage.signing.mlbom import MLBOM, mlbom


def publication_key(plan: Plan, target: TargetResult, chosen: Candidate, fingerprint: str, signed_by: str = "") -> str:
    """Same source, policy, data, target, artifact, plug-in, toolchain, hardware and signer: same key, so the same
    published version. A target has one winner, and as many unvalidated bundles as candidates were compiled.

    The artifact's own digest is part of it: a compiler that was fixed makes another one, which must not be taken for
    the one that the registry holds.
    """
    artifact = _artifact(chosen)
    unvalidated = {} if _is_validated(chosen) else {"draft": [chosen.job.backend, chosen.job.scheme.name]}
    return digest_of(
        {
            **unvalidated,
            **({"signed_by": signed_by} if signed_by else {}),
            "source": plan.source.digest,
            "uri": plan.source.uri,
            "policy": plan.policy.digest,
            "samples": {role: samples.digest for role, samples in target.samples.items()},
            "target": target.policy.target,
            "artifact": artifact.digest,
            "made_by": plugins.cache_identity("backends", artifact.backend),
            "toolchain": artifact.toolchain,
            **({"source_toolchain": home["lock"]} if (home := plugins.source_toolchain(plan.source.flavor)) else {}),
            "hardware": fingerprint,
        }
    )


def package(
    context: Context,
    plan: Plan,
    target_result: TargetResult,
    origin: Origin,
    out: Path,
    signed_by: str = "",
) -> TargetResult:
    """Write the bundle of a target's winner to `out/bundles/TARGET`, replacing what is there; where there is none,
    those of the candidates that were compiled and could not be validated here, to `out/bundles/JOB`.

    Args:
        origin: How the source's pyfunc answers, and what a published predict() needs to answer so too.
        signed_by: Who will sign it; empty for nobody.
    """
    packaging = _Packaging(context, plan, target_result, origin, signed_by)
    winner, bundles = target_result.winner, out / "bundles"
    if winner is not None:
        if not _is_validated(winner):
            raise InternalError(f"{winner.job.id} was selected, and its verdict did not pass")
        into = bundles / target_result.policy.target.name
        return replace(target_result, bundle=packaging.bundle(winner, into))
    unrunnable = [
        c for c in target_result.candidates if c.artifact is not None and c.verdict is None and c.not_runnable_here
    ]
    unvalidated = (
        UnvalidatedBundle(job_id=c.job.id, bundle=packaging.bundle(c, bundles / c.job.id))
        for c in unrunnable
        if c.failure is None
    )
    return replace(target_result, unvalidated=tuple(unvalidated))


@dataclass(frozen=True)
class _Packaging:
    """The packaging of one target."""

    context: Context
    plan: Plan
    target_result: TargetResult
    origin: Origin
    signed_by: str

    def bundle(self, chosen: Candidate, into: Path) -> Bundle:
        context, source, policy = self.context, self.plan.source, self.plan.policy
        target, artifact = self.target_result.policy.target, _artifact(chosen)
        key = publication_key(self.plan, self.target_result, chosen, context.hardware.fingerprint, self.signed_by)
        name = plugins.load("registries", source.registry).publication_name(
            source, policy.publish_name.replace("{model}", source.name)
        )
        processor = self.origin.processor
        with context.events.step("package", chosen.job.id):
            for path in (artifact.path, source.path):
                demand_present(path)
            manifest = self._manifest(chosen, key)
            with tempfile.TemporaryDirectory(dir=context.scratch) as staged:
                (Path(staged) / "artifact").symlink_to(artifact.path)  # copied once, by save_model
                if processor.text:
                    demand_present(processor.path)
                    (Path(staged) / TOKENIZER_FOLDER).symlink_to(processor.path)
                shutil.rmtree(into, ignore_errors=True)
                save_model(
                    staged,
                    into,
                    manifest=manifest,
                    signature=artifact.signature,
                    source_model=source.path,
                    metadata={"compile_stage": {"key": key, "source": source.uri, "policy": policy.digest}},
                    documents={MLBOM: mlbom(manifest, name.rpartition("/")[2], Path(staged))},
                )
            manifest = read_manifest(into)
            digest = digest_tree(into / "data")
            remember_packaged(digest)
        return Bundle(
            path=str(into),
            digest=digest,
            key=key,
            target=target.name,
            name=name,
            manifest=manifest,
            tags=_tags(context, source, policy, chosen, key),
            metrics=_metrics(chosen),
            summary=_summary(source, self.target_result.policy, chosen),
            params={
                "precision": chosen.job.scheme.precision,
                "scheme": chosen.job.scheme.name,
                "backend": chosen.job.backend,
                "target": target.name,
                "threads": str(target.threads),
            },
        )

    def _manifest(self, winner: Candidate, key: str) -> dict[str, Any]:
        context, source, policy = self.context, self.plan.source, self.plan.policy
        target, samples, artifact = self.target_result.policy.target, self.target_result.samples, _artifact(winner)
        manifest: dict[str, Any] = plain(
            {
                "key": key,
                "artifact": replace(artifact, path="artifact"),
                "source": {
                    "uri": source.uri,
                    "name": source.name,
                    "version": source.version,
                    "flavor": source.flavor,
                    "digest": source.digest,
                    "registry": source.registry,
                    **({"toolchain": home} if (home := plugins.source_toolchain(source.flavor)) else {}),
                },
                "policy": {"name": policy.name, "digest": policy.digest, "owner": policy.owner},
                "job": winner.job,
                "data": {"spec": policy.data, "samples": {role: replace(s, path="") for role, s in samples.items()}},
                "target": target,
                "scheme": winner.job.scheme,
                "kept": winner.portable.kept if winner.portable else {},
                "hardware": context.hardware,
                "fingerprint": context.hardware.fingerprint,
                "toolchain": artifact.toolchain,
                "runtime": self._runtime(artifact),
                "python": python_version(),
                "made_by": made_by(winner.job, source.flavor),
                "verdict": winner.verdict,
                "performance": self.target_result.policy.performance,
                "waivers": [waiver for waiver in policy.waivers if waiver.target == target.name],
                "budget": policy.budget,
                "timing": timings(winner.measurement),
                "answer": _answer(self.origin, target),
                "threads": target.threads,
                "batches": proven_batches(winner.verdict, target),
                "signature": artifact.signature,
                "confinement": context.confinement(),
                "on_hardware_mismatch": policy.compliance.on_hardware_mismatch,
                "signature_required": policy.compliance.require_signature,
            }
        )
        return manifest

    def _runtime(self, artifact: Artifact) -> dict[str, str]:
        """Distribution → version of what loads it. What made the artifact counts, since the runtime may lie in a
        toolchain of its own."""
        wanted = plugins.load("backends", artifact.backend).capabilities.runtime
        return {
            **plugins.third_party("backends", artifact.backend),
            **plugins.package_versions(*wanted),
            **{name: artifact.toolchain[name] for name in wanted if name in artifact.toolchain},
            **self.origin.processor.runtime,
        }


def _is_validated(candidate: Candidate) -> bool:
    return candidate.artifact is not None and candidate.verdict is not None and candidate.verdict.passed


def _artifact(candidate: Candidate) -> Artifact:
    if candidate.artifact is None:
        raise InternalError(f"{candidate.job.id} is to be packaged, and was not compiled")
    return candidate.artifact


def _answer(origin: Origin, target: Target) -> dict[str, Any]:
    """How predict() takes and gives: as the source's pyfunc, in batches of at most the largest size that was
    validated."""
    text = origin.processor.text
    if media := origin.processor.media:
        return {**origin.prediction_format, "media": {**media, "batch_size": max(target.batch_sizes)}}
    if not text:
        return dict(origin.prediction_format)
    bounds = [shape.max[1] for shape in target.shapes.values() if len(shape.max) > 1]
    limits = [limit for limit in (text.get("longest"), *bounds) if limit is not None]
    bounded = {**text, "longest": min(limits, default=None), "batch_size": max(target.batch_sizes)}
    return {**origin.prediction_format, "text": bounded}


def timings(measured: Measurement | None) -> dict[str, Any]:
    """Batch size → the median in seconds, and the speed-up over the original."""
    return {
        str(timing.batch_size): {
            "p50_s": stats.median(timing.latency_s),
            "speedup": timing.speedup,
            "speedup_interval": timing.speedup_interval,
            "stable": timing.stable,
        }
        for timing in (measured.timings if measured is not None else ())
    }


def _tags(context: Context, source: SourceModel, policy: Policy, winner: Candidate, key: str) -> dict[str, str]:
    verdict = winner.verdict
    tags = {
        "key": key,
        "source": source.uri,
        "source_digest": source.digest,
        "policy": policy.name,
        "policy_digest": policy.digest,
        "target": winner.job.target.name,
        "backend": winner.job.backend,
        "precision": winner.job.scheme.precision,
        "scheme": winner.job.scheme.name,
        "verdict": "passed" if _is_validated(winner) else "not validated",
        "hardware" if _is_validated(winner) else "compiled_on": context.hardware.fingerprint,
    }
    if verdict is not None and verdict.waivers:
        tags["verdict"] = "passed under waivers"
        tags["waivers"] = "; ".join(f"{w.gate}: {w.reason} ({w.owner}, until {w.expires})" for w in verdict.waivers)
    if winner.measurement is not None and not all(timing.stable for timing in winner.measurement.timings):
        tags["measurement"] = (
            "unstable"  # the limits held at the worse end of a wide interval; the figures themselves are rough
        )
    return {TAG + name: value for name, value in tags.items()}


def _summary(source: SourceModel, target: TargetPolicy, chosen: Candidate) -> str:
    """What it is, how fast and how exact, in one line."""
    job, artifact = chosen.job, _artifact(chosen)
    what = f"{source.name} {source.version}".strip()
    parts = [f"{what} compiled by {job.backend} to {job.scheme.precision} for {target.target.name}"]
    timing = stats.deciding_timing(chosen.measurement, target)
    if timing is not None:
        parts.append(f"median {stats.median(timing.latency_s) * 1e3:.3g} ms at batch {timing.batch_size}")
        parts += _speedup_words(timing)
    parts.append(_accuracy_words(chosen))
    return "; ".join([*parts, f"{artifact.size_bytes / 1e6:.3g} MB"]) + "."


def _speedup_words(timing: Timing) -> list[str]:
    """An unstable ratio is a range without a figure of its own."""
    if timing.speedup is None:
        return []
    low, high = timing.speedup_interval or (timing.speedup, timing.speedup)
    if not timing.stable:
        return [f"{low:.2f} to {high:.2f} times the original's speed (unstable measurement)"]
    return [f"{timing.speedup:.2f} times the original's speed (95 % interval {low:.2f} to {high:.2f})"]


def _accuracy_words(chosen: Candidate) -> str:
    if chosen.verdict is None:
        return "not validated, since it can't run where it was compiled"
    metrics = {gate.metric for gate in chosen.job.gates}
    checks = [check for check in chosen.verdict.checks if check.gate.metric in metrics]
    closest = min(checks, key=margin, default=None)
    under = " under waivers" if chosen.verdict.waivers else ""
    passed = f"all {len(checks)} accuracy checks passed{under}"
    if closest is None:
        return passed
    return f"{passed}, closest to its limit: {closest.reason}"


def _metrics(winner: Candidate) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for check in winner.verdict.checks if winner.verdict else ():
        if check.measured is not None and check.batch_size is not None:
            name = ".".join(filter(None, (check.gate.metric, check.output, f"batch_{check.batch_size}")))
            metrics[name.replace(":", "_")] = check.measured
    for timing in winner.measurement.timings if winner.measurement else ():
        median_s, p95_s = stats.median(timing.latency_s), stats.percentile(timing.latency_s, 0.95)
        metrics[f"latency_p50_ms.batch_{timing.batch_size}"] = median_s * 1e3
        if p95_s is not None:  # fewer than 59 calls can't carry it
            metrics[f"latency_p95_ms.batch_{timing.batch_size}"] = p95_s * 1e3
        if median_s > 0:
            metrics[f"throughput_per_s.batch_{timing.batch_size}"] = timing.batch_size / median_s
        if timing.speedup is not None:
            metrics[f"speedup.batch_{timing.batch_size}"] = timing.speedup
    if winner.measurement:
        metrics["peak_memory_mb"] = winner.measurement.peak_memory_bytes / 1e6
        metrics["load_s"] = winner.measurement.load_s
    if winner.artifact:
        metrics["size_mb"] = winner.artifact.size_bytes / 1e6
    return metrics
