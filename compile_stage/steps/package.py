"""Winner → bundle: files, manifest and digests, in the form that the MLflow flavor loads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context, made_by
from compile_stage.core.digest import digest_of, digest_tree, plain
from compile_stage.core.environment import python_version
from compile_stage.core.errors import CompileStageError, InternalError
from compile_stage.core.generation import call_signature
from compile_stage.core.provenance import remember_packaged
from compile_stage.core.records import (
    Artifact,
    Bundle,
    Candidate,
    Measurement,
    Origin,
    Plan,
    Policy,
    SampleSet,
    SourceModel,
    TakenOver,
    Target,
    TargetPolicy,
    TargetResult,
    UnvalidatedBundle,
    Variant,
    Verdict,
)
from compile_stage.core.storage import demand_present
from compile_stage.flavor import save_model
from compile_stage.measure import speedups, stats
from compile_stage.measure.published_figures import metrics_of, summary_of
from compile_stage.serving import approval
from compile_stage.serving.batches import proven_batches
from compile_stage.serving.manifest import VALIDATIONS, read_manifest
from compile_stage.serving.missing_numbers import proven_missing
from compile_stage.serving.shape_limits import shape_limits
from compile_stage.serving.taken_values import TAKEN, proven_taken
from compile_stage.serving.text import TOKENIZER_FOLDER
from compile_stage.serving.variant_writing import NO_PORTABLE, FamilyVersion, variant_note, with_variants
from compile_stage.serving.variants import PORTABLE, PORTABLE_FP32, every_variant
from compile_stage.serving.version_tags import TAG, variant_tags, waivers_of
from compile_stage.signing.mlbom import MLBOM, mlbom


def family_key(plan: Plan, members: Sequence[TargetResult]) -> str:
    """What versions have in common whose variants may be published together: source, policy, family, and the
    validation samples."""
    return digest_of(
        {
            "family": members[0].policy.family,
            "source": plan.source.digest,
            "uri": plan.source.uri,
            "policy": plan.policy.digest,
            "samples": sorted({member.samples["validation"].digest for member in members if member.samples}),
        }
    )


def publication_key(plan: Plan, target: TargetResult, chosen: Candidate, fingerprint: str, signed_by: str = "") -> str:
    """Same source, policy, data, target, artifact, plug-in, toolchain, hardware and signer: same key, so the same
    published version. A target has one winner, and as many unvalidated bundles as candidates were compiled.

    The artifact's own digest is part of it: a compiler that was fixed makes another one, which must not be taken for
    the one that the registry holds. So are its options: the same file is opened on one thread, or on two.
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
            "options": artifact.options,
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
    unvalidated = (
        UnvalidatedBundle(job_id=c.job.id, bundle=packaging.bundle(c, bundles / c.job.id))
        for c in _unrunnable(target_result)
    )
    return replace(target_result, unvalidated=tuple(unvalidated))


def package_family(
    context: Context,
    plan: Plan,
    members: Sequence[TargetResult],
    origin: Origin,
    given: tuple[Path, str, TakenOver],
) -> tuple[TargetResult, ...]:
    """Write one bundle of a family's winners to `OUT/bundles/FAMILY`: it belongs to the lead, the fastest of them,
    which this machine loads. Where no member has a winner, each is packaged by itself.

    Args:
        members: The results of the family's targets that this run looked at.
        given: The folder OUT, who will sign, and what is taken over of earlier versions.
    """
    out, signed_by, earlier = given
    winners = [member for member in members if member.winner is not None]
    if not winners:
        return tuple(package(context, plan, member, origin, out, signed_by) for member in members)
    lead = min(winners, key=_lead_order)
    in_order = (lead, *(member for member in members if member is not lead))
    packagings = [_Packaging(context, plan, member, origin, signed_by) for member in in_order]
    made = {variant.id: variant for packaging in packagings for variant in packaging.variants()}
    notes: tuple[str, ...] = ()
    if plan.policy.elsewhere == PORTABLE_FP32:
        portable = next(filter(None, (packaging.portable() for packaging in packagings)), None)
        made |= {PORTABLE: portable} if portable is not None else {}
        notes = () if portable is not None else (NO_PORTABLE.format(lead.policy.family),)
    # What this run made counts before what an earlier one made of the same.
    variants = {**{variant.id: variant for variant in earlier.variants}, **made}
    family = lead.policy.family
    version = FamilyVersion(
        family=family,
        key=family_key(plan, members),
        variants=tuple(sorted(variants.values(), key=lambda one: one.id)),
        elsewhere=plan.policy.elsewhere,
        after=earlier.versions,
    )
    winner = lead.winner
    assert winner is not None
    bundle = packagings[0].bundle(winner, out / "bundles" / family, version)
    notes = (*lead.notes, *notes, *(variant_note(family, variant) for variant in version.variants))
    return tuple(
        replace(member, bundle=bundle, notes=tuple(dict.fromkeys(notes))) if member is lead else member
        for member in members
    )


def remove_bundles(out: Path, targets: Sequence[TargetPolicy]) -> None:
    """Delete the bundles of these targets that an earlier run packaged in `out`, and those of their families: what one
    of them proves is not known any more. Bundles of other targets stay. Raises OSError where they can't be deleted."""
    names = {one.target.name for one in targets}
    places = names | {one.published_as for one in targets}
    bundles = out / "bundles"
    for bundle in sorted(bundles.iterdir()) if bundles.is_dir() else ():
        if bundle.name not in places and names.isdisjoint(_targets_of(bundle)):
            continue
        if bundle.is_dir() and not bundle.is_symlink():
            shutil.rmtree(bundle)
        else:
            bundle.unlink()
    with suppress(OSError):  # there is none, or it holds others
        bundles.rmdir()


def _targets_of(bundle: Path) -> set[str]:
    """The targets that a bundle has something for; none where it is no bundle."""
    try:
        return {str(one["target"]["name"]) for one in every_variant(read_manifest(bundle))}
    except (CompileStageError, LookupError, TypeError, AttributeError):
        return set()


def _lead_order(member: TargetResult) -> float:
    """The median of a call of its winner, in seconds."""
    winner = member.winner
    timing = speedups.deciding_timing(winner.measurement, member.policy) if winner is not None else None
    return stats.median(timing.latency_s) if timing is not None else float("inf")


@dataclass(frozen=True)
class _Packaging:
    """The packaging of one target."""

    context: Context
    plan: Plan
    target_result: TargetResult
    origin: Origin
    signed_by: str

    def variants(self) -> list[Variant]:
        """What this run has of its target, for a version that holds the family: the winner, or what was compiled for
        other hardware."""
        winner = self.target_result.winner
        if winner is not None:
            return [self._variant(winner, f"{winner.job.target.name}--{self.context.hardware.fingerprint}")]
        return [
            self._variant(c, f"{c.job.target.name}--{c.job.backend}--{c.job.scheme.name}")
            for c in _unrunnable(self.target_result)
        ]

    def portable(self) -> Variant | None:
        """An fp32 artifact that runs anywhere and held its tolerances, as slow as it may be."""
        speed = {gate.metric for gate in self.target_result.policy.performance}
        for candidate in self.target_result.candidates:
            job, verdict, artifact = candidate.job, candidate.verdict, candidate.artifact
            if job.scheme.precision != "fp32" or verdict is None or artifact is None:
                continue
            proven = Verdict(checks=tuple(check for check in verdict.checks if check.gate.metric not in speed))
            if proven.passed and plugins.load("backends", job.backend).capabilities_for(job.target).runs_anywhere:
                made = self._variant(replace(candidate, verdict=proven), PORTABLE)
                # Whoever made it: the same bytes are the same, so that each machine of a family makes the same version.
                return replace(made, manifest={**made.manifest, "performance": [], "key": artifact.digest})
        return None

    def _variant(self, chosen: Candidate, name: str) -> Variant:
        return Variant(id=name, manifest=self._manifest(chosen, self._key(chosen)), path=_artifact(chosen).path)

    def _key(self, chosen: Candidate) -> str:
        return publication_key(self.plan, self.target_result, chosen, self.context.hardware.fingerprint, self.signed_by)

    def bundle(self, chosen: Candidate, into: Path, version: FamilyVersion | None = None) -> Bundle:
        """The bundle of a candidate; with `version`, that of a family whose lead it is."""
        context, source, policy, target = self.context, self.plan.source, self.plan.policy, self.target_result.policy
        name = plugins.load("registries", source.registry).publication_name(
            source, policy.publish_name.replace("{model}", source.name)
        )
        with context.events.step("package", chosen.job.id):
            try:
                self._write(chosen, name, into, version)
            except BaseException:  # half a bundle is none, and on a full disk the reports need its room
                shutil.rmtree(into, ignore_errors=True)
                raise
            manifest = read_manifest(into)
            digest = digest_tree(into / "data")
            remember_packaged(digest)
        return Bundle(
            path=str(into),
            digest=digest,
            key=manifest["key"],
            target=target.target.name,
            name=name,
            manifest=manifest,
            tags=_tags(context, source, policy, chosen, manifest)
            | (_family_tags(version) if version is not None else {}),
            metrics=metrics_of(chosen),
            summary=summary_of(source, target, chosen, speed_known=not self.target_result.contradiction),
            params={
                "precision": chosen.job.scheme.precision,
                "scheme": chosen.job.scheme.name,
                "backend": chosen.job.backend,
                "target": target.target.name,
                "threads": str(target.target.threads),
            },
        )

    def _write(self, chosen: Candidate, name: str, into: Path, version: FamilyVersion | None) -> None:
        """The files of a bundle, in place of what `into` held."""
        source, policy, processor = self.plan.source, self.plan.policy, self.origin.processor
        artifact = _artifact(chosen)
        for path in (artifact.path, source.path):
            demand_present(path)
        manifest = self._manifest(chosen, self._key(chosen))
        with tempfile.TemporaryDirectory(dir=self.context.scratch) as staged:
            (Path(staged) / "artifact").symlink_to(artifact.path)  # copied once, by save_model
            if version is not None:
                lead = f"{self.target_result.policy.target.name}--{self.context.hardware.fingerprint}"
                manifest = with_variants(manifest, version, lead, Path(staged))
            if processor.text:
                demand_present(processor.path)
                (Path(staged) / TOKENIZER_FOLDER).symlink_to(processor.path)
            shutil.rmtree(into, ignore_errors=True)
            save_model(
                staged,
                into,
                manifest=manifest,
                signature=call_signature(artifact),
                source_model=source.path,
                metadata={"compile_stage": {"key": manifest["key"], "source": source.uri, "policy": policy.digest}},
                documents={MLBOM: mlbom(manifest, name.rpartition("/")[2], Path(staged))},
            )
            for validation in (file for one in (version.variants if version else ()) for file in one.validations):
                (into / VALIDATIONS).mkdir(exist_ok=True)
                shutil.copyfile(validation, into / VALIDATIONS / Path(validation).name)

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
                "missing": proven_missing(winner.verdict),
                TAKEN: proven_taken(winner.verdict),
                **shape_limits(target, _sample_shapes(samples), winner.portable),
                "signature": artifact.signature,
                "confinement": context.confinement(),
                "on_hardware_mismatch": policy.compliance.on_hardware_mismatch,
                "signature_required": policy.compliance.require_signature,
                **approval.manifest_entry(self.target_result.policy),
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


def _sample_shapes(samples: Mapping[str, SampleSet]) -> dict[str, tuple[int, ...]]:
    """Of each input of the validation samples; empty where they are not here."""
    from compile_stage.measure.samples import open_samples

    validation = samples.get("validation")
    if validation is None or not Path(validation.path).is_dir():
        return {}
    return {name: array.shape for name, array in open_samples(validation).inputs.items()}


def _unrunnable(target_result: TargetResult) -> list[Candidate]:
    """What was compiled, and can't be run here."""
    return [
        c
        for c in target_result.candidates
        if c.artifact is not None and c.verdict is None and c.not_runnable_here and c.failure is None
    ]


def _family_tags(version: FamilyVersion) -> dict[str, str]:
    after = {TAG + "family_after": ", ".join(version.after)} if version.after else {}
    return {TAG + "family_key": version.key, **after}


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


def _tags(
    context: Context, source: SourceModel, policy: Policy, winner: Candidate, manifest: Mapping[str, Any]
) -> dict[str, str]:
    tags = {
        "key": manifest["key"],
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
        **approval.version_tags(manifest),
        **variant_tags(manifest),
    }
    if waivers := waivers_of(manifest):
        tags["verdict"] = "passed under waivers"
        tags["waivers"] = "; ".join(f"{w.gate}: {w.reason} ({w.owner}, until {w.expires})" for w in waivers)
    if winner.measurement is not None and not all(timing.stable for timing in winner.measurement.timings):
        tags["measurement"] = (
            "unstable"  # the limits held at the worse end of a wide interval; the figures themselves are rough
        )
    return {TAG + name: value for name, value in tags.items()}
