"""`compile-stage validate URI --host HOST`: a published version run on a device, judged here, the result attached.

The original answers here, as its FP32 baseline always does. The device answers with tensors and latencies; the checks,
the intervals and the verdict are computed here, by the code that judges this machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree, plain, revive
from compile_stage.core.errors import CompileStageError, DeviceError, UsageError
from compile_stage.core.hosts import Host
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import (
    Artifact,
    Budget,
    Check,
    Gate,
    Job,
    Outcome,
    Scheme,
    SourceModel,
    Target,
    Verdict,
    record,
)
from compile_stage.measure.structure import SERVED
from compile_stage.revalidation import Revalidation, Validated, attachable, compare, measure, sample_notes
from compile_stage.serving.manifest import pin
from compile_stage.steps.serve import differs

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array
    from compile_stage.devices.engine import DeviceEngine
    from compile_stage.devices.link import Link
    from compile_stage.verification import Published

_FP32 = Scheme(precision="fp32", name="fp32", native=True)
_ONNXRUNTIME = "onnxruntime"


def validate_on_device(
    context: Context, published: Published, host: Host, *, allow_pickle: bool, allow_code: bool
) -> Revalidation:
    """What a validation on that device came to.

    Raises:
        DeviceError: The device can't be reached, was lost, or lacks what the artifact needs.
        UsageError: It is not hardware that the version is for.
        IntegrityError, SourceError: As `revalidation.compare`.
    """
    from compile_stage.devices.engine import DeviceEngine
    from compile_stage.devices.link import open_link
    from compile_stage.devices.validator import build_validator

    manifest = published.manifest
    original = _plugin_of(manifest["source"]["flavor"])
    modules = (original.partition(":")[0],) if original and host.baseline == "original" else ()
    validator = build_validator(modules)
    context.events.progress("device", host.name, f"reaching {host.address} over {host.transport}")
    with open_link(host, validator) as link:
        job: Job = revive(Job, manifest["job"])
        _demand_device(link, job)
        runtime = _demand_runtime(link, manifest, job)
        engine = DeviceEngine(
            link, published.folder, original=original,
            say=lambda message: context.events.progress("device", host.name, message),
        )  # fmt: skip
        local = context.with_own_cache()
        there = replace(context.with_own_cache("cache-of-device"), engine=engine, hardware=link.hardware)
        budget: Budget = revive(Budget, manifest["budget"])
        folder = published.folder
        validated = compare(local, manifest, folder, budget, there=there, allow_pickle=allow_pickle)
        notes = sample_notes(manifest, validated.samples)
        baseline = _Baseline(kind="none", said="it was not measured")
        if validated.verdict.passed:
            validated = _opened_anew(there, folder, validated, budget, link)
        if validated.verdict.passed:
            baseline = _baseline(local, engine, host, validated, allow_code=allow_code)
            validated, failures = measure(there, manifest, budget, validated, baseline.model or validated.artifact)
            validated = _with_baseline(validated, baseline)
            notes += failures
        told = _told(link, host, engine, baseline)
        notes += (f"on {host.name}: {baseline.said}", f"on {host.name}: {engine.confinement().text}")
        return attachable(link.hardware, manifest, validated, notes, {**told, "runtime": runtime})


def _told(link: Link, host: Host, engine: DeviceEngine, baseline: _Baseline) -> dict[str, Any]:
    """What the attached file says of the device beside its hardware."""
    return {
        "python": link.hello["python"],
        "baseline": {"kind": baseline.kind, "said": baseline.said},
        "device": {
            "host": host.name,
            "transport": host.transport,
            "platform": link.hello["platform"],
            "confinement": plain(engine.confinement()),
        },
    }


# ------------------------------------------------------------------------------------------------- may it run there


def _demand_device(link: Link, job: Job) -> None:
    if (reason := link.hardware.refuse(dict(job.target.hardware))) is not None:
        raise UsageError(
            f"{link.host.name} is not what the model is for: {reason}",
            fix=f"its fingerprint is {link.hardware.fingerprint}; name the host that the target means",
            where=link.host.name,
        )


def _demand_runtime(link: Link, manifest: Mapping[str, Any], job: Job) -> dict[str, str]:
    """The versions of the runtime there. Raises DeviceError with the command for what is missing."""
    backend = plugins.load("backends", job.backend)
    pinned: Mapping[str, str] = manifest.get("runtime", {})
    wanted = backend.capabilities.opens_with or backend.requires
    distributions = [*pinned, *backend.capabilities.distributions]
    found = link.request("describe", modules=["numpy", *wanted], distributions=distributions)
    absent = [*found["absent"], *(n for n in backend.capabilities.distributions if n not in found["versions"])]
    if absent:
        pins = [pin(name, version) for name, version in pinned.items()] or [job.backend]
        raise DeviceError(
            f"its Python {link.hello['python']} lacks {', '.join(absent)}",
            fix=f"there: {link.hello['executable']} -m pip install {' '.join(['numpy', *pins])}",
            where=link.host.name,
        )
    return dict(found["versions"])


# -------------------------------------------------------------------------------------------------- a new process


def _opened_anew(there: Context, folder: Path, validated: Validated, budget: Budget, link: Link) -> Validated:
    """With the check `served`: in a new process on the device the version's own loader opens it, and what that answers
    is what the artifact by itself answers, which was validated."""
    target, job_id = validated.candidate.job.target, validated.candidate.job.id
    limits = WorkerLimits.within(budget, target.threads)
    gate = Gate(metric=SERVED, limit=0, direction="at_most")
    asked = {"samples": validated.samples, "batch_size": target.batch_sizes[0]}
    with TemporaryDirectory(dir=there.scratch) as scratch:
        try:
            with there.worker(f"{job_id}--served", limits) as worker:
                worker.call("open_served", model={"path": str(folder)})
                served = worker.call("predict_batch", **asked, into=str(Path(scratch) / "served"))
            with there.worker(f"{job_id}--proven", limits) as worker:
                worker.call("open_artifact", artifact=validated.artifact, threads=target.threads)
                proven = worker.call("predict_batch", **asked, into=str(Path(scratch) / "proven"))
            reason = differs(_read(served), _read(proven))
        except DeviceError:
            raise
        except CompileStageError as error:
            reason = f"its loader can't open it there: {error.problem}"
    loaded = f"the loader that it carries opens it in a new process on {link.host.name}, and it answers there as proven"
    check = Check(
        gate=gate,
        outcome=Outcome.PASS if reason is None else Outcome.FAIL,
        measured=0.0 if reason is None else 1.0,
        reason=reason or f"{loaded}; MLflow, which calls that loader, was not asked",
    )
    verdict = Verdict(checks=(*validated.verdict.checks, check))
    return replace(validated, candidate=replace(validated.candidate, verdict=verdict))


def _read(files: Mapping[str, str]) -> dict[str, Array]:
    import numpy as np

    return {name: np.load(file, allow_pickle=False) for name, file in files.items()}


# ------------------------------------------------------------------------------------------------------- the baseline


@record
class _Baseline:
    """What a speedup on the device is over.

    Attributes:
        kind: As in the hosts file, or `none` where that could not be had.
        said: In one sentence what it is, or why there is none.
        model: None where there is none.
    """

    kind: str
    said: str
    model: SourceModel | Artifact | None = None


def _baseline(local: Context, engine: DeviceEngine, host: Host, validated: Validated, *, allow_code: bool) -> _Baseline:
    if host.baseline == "none":
        return _Baseline(kind="none", said="no speedup was measured: the hosts file says `baseline: none`")
    if host.baseline == "fp32":
        return _fp32(local, engine, validated)
    if (reason := _refuse_original(engine, validated.source, allow_code=allow_code)) is not None:
        why = f"the original was not run there, so no speedup over it is known: {reason}"
        return _Baseline(kind="none", said=why)
    return _Baseline(kind="original", said="a speedup is over the original, run there too", model=validated.source)


def _plugin_of(flavor: str) -> str:
    """`module:class` of a source of ours; empty for a third party's, and for one that runs in a toolchain."""
    if flavor not in plugins.names("sources") or plugins.third_party("sources", flavor):
        return ""
    plugin = plugins.load("sources", flavor)
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}"


def _refuse_original(engine: DeviceEngine, source: SourceModel, *, allow_code: bool) -> str | None:
    """None where the original can and may run on the device, or the reason."""
    if not engine.original:
        return f"models of flavor {source.flavor} are opened by a plug-in that is not sent to devices"
    plugin = plugins.load("sources", source.flavor)
    absent = engine.link.request("describe", modules=list(plugin.requires), distributions=[])["absent"]
    if absent:
        return (
            f"{', '.join(absent)} is not installed there (or set `baseline: fp32` for {engine.link.host.name}: "
            "its own graph in fp32 on ONNX Runtime)"
        )
    if not engine.confinement().complete and not allow_code:
        return "processes can't be confined on that system, and a model in its own framework may be code (--allow-code)"
    return None


def _fp32(local: Context, engine: DeviceEngine, validated: Validated) -> _Baseline:
    """The source's graph in fp32, as ONNX Runtime runs it there on the CPU."""
    portable, job = validated.portable, validated.candidate.job
    backend = plugins.load("backends", _ONNXRUNTIME)
    absent = engine.link.request("describe", modules=["onnxruntime"], distributions=[])["absent"]
    if portable is None or portable.form != "onnx":
        return _Baseline(kind="none", said="no speedup is known: the source has no ONNX graph to compare with")
    if absent:
        return _Baseline(kind="none", said="no speedup is known: onnxruntime is not installed there")
    target: Target = replace(job.target, device="cpu", options={})
    fp32 = replace(job, id=f"{job.id}--fp32", backend=backend.name, scheme=_FP32, target=target, form="onnx", gates=())
    into = local.scratch / "fp32"
    limits = WorkerLimits.within(Budget(), target.threads, plugins.interpreter_of(backend.name))
    with local.worker(fp32.id, limits) as worker:
        compiled, _ = local.compile_in(worker, fp32, portable, None, into)
    artifact: Artifact = replace(revive(Artifact, compiled), path=str(into), digest=digest_tree(str(into)))
    said = (
        "a speedup is over the source's graph in fp32 on ONNX Runtime there, as the hosts file says, and not over the "
        "original in its own framework"
    )
    return _Baseline(kind="fp32", said=said, model=artifact)


def _with_baseline(validated: Validated, baseline: _Baseline) -> Validated:
    """With what a speedup is over in the reasons of its checks."""
    verdict = validated.verdict
    if baseline.kind == "original":
        return validated
    checks = tuple(
        replace(check, reason=f"{check.reason} ({baseline.said})") if check.gate.metric == "speedup" else check
        for check in verdict.checks
    )
    return replace(validated, candidate=replace(validated.candidate, verdict=Verdict(checks=checks)))
