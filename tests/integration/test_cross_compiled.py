"""Compiled for hardware that is not here: published, not promoted, until a machine of that kind has proven it. This
machine plays both parts: while the stage runs, another one is said to be here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compile_stage import api, flavor
from compile_stage.core import run_context
from compile_stage.core.environment import hardware
from compile_stage.core.errors import CompileStageError, GateError, IntegrityError, UsageError
from compile_stage.core.plugins import load, missing, registry_for
from compile_stage.core.records import RunResult

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

DEVICE = hardware()  # where the model will be served
BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}\n"
    'promote: {alias: "{target}-prod"}'
)
Write = Callable[..., Path]


@pytest.fixture(params=["folder", "mlflow"])
def source(request: pytest.FixtureRequest, small_model: Path) -> str:
    if request.param == "folder":
        return f"folder:{small_model}"
    import mlflow

    client = mlflow.MlflowClient()
    client.create_registered_model("net")
    version = client.create_model_version("net", str(small_model))
    return f"models:/net/{version.version}"


def policy_for(write_policy: Write, target: str, body: str = BODY) -> Path:
    return write_policy(f"{target}, precisions: [fp32], hardware: {{fingerprint: {DEVICE.fingerprint}}}", body)


def run(source: str, policy: Path) -> RunResult:
    return api.run(source, policy, out=policy.parent / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("served_here")
def test_what_was_compiled_for_another_machine_is_promoted_once_that_machine_proved_it(
    source: str, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an artifact that nobody ran would be promoted, or one that was proven on its device never could be."""
    policy = policy_for(write_policy, "backends: [fake-cross, onnxruntime]")
    with monkeypatch.context() as elsewhere:
        other = replace(DEVICE, cpu="a build machine's", cores=DEVICE.cores + 1)
        elsewhere.setattr(run_context, "hardware", lambda: other)
        result = run(source, policy)
        again = run(source, policy)
    assert result.exit_code == 3
    target = result.targets[0]
    assert target.winner is None
    assert [(c.job.backend, c.verdict) for c in target.candidates] == [("fake-cross", None)]
    assert "onnxruntime" in {refusal.backend for refusal in result.refused}
    assert "1 compiled but not validated" in result.problem
    (draft,) = target.unvalidated
    assert draft.receipt is not None
    assert draft.receipt.created
    assert draft.receipt.promoted_to is None
    assert again.targets[0].unvalidated[0].receipt == replace(draft.receipt, created=False)

    written = json.loads((policy.parent / "out" / "result.json").read_text())["targets"][0]
    assert [c["state"] for c in written["candidates"] if c["backend"] == "fake-cross"] == ["compiled_not_validated"]
    assert written["drafts"][0]["receipt"]["uri"] == draft.receipt.uri
    for report in ("report.md", "report.html"):
        assert f"compile-stage validate {draft.receipt.uri}" in (policy.parent / "out" / report).read_text()

    uri = draft.receipt.uri
    with pytest.raises(GateError, match="no validation is attached"):
        api.promote(uri, "edge")
    published = registry_for(uri).fetch(uri, policy.parent / "before")
    with pytest.raises(IntegrityError, match="not validated on this machine"):
        flavor.load_model(str(published))

    found = api.validate(uri)
    assert found.passed, found
    assert "cosine" in {check.gate.metric for check in found.checks}
    assert api.promote(uri, "edge").promoted_to == "edge"
    proven = registry_for(uri).fetch(
        f"{draft.receipt.name}@edge" if source.startswith("folder") else uri, policy.parent / "after"
    )
    with flavor.load_model(str(proven)) as model:
        assert [spec.name for spec in model.signature.outputs] == ["y", "z"]

    for file in (proven / "validations").glob("*.json"):
        said = json.loads(file.read_text())
        assert said["fingerprint"] == DEVICE.fingerprint
        file.write_text(json.dumps({**said, "runtime": {}}))
    with pytest.raises(IntegrityError, match="not validated on this machine"):
        flavor.load_model(str(proven))


@pytest.mark.slow
def test_neither_a_validation_that_failed_nor_one_of_the_build_machine_promotes(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: that a validation was made would count, whatever it found and wherever."""
    policy = policy_for(write_policy, "backends: [fake-cross]", BODY.replace("null", "1000"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(DEVICE, cpu="a build machine's"))
        (draft,) = run(f"folder:{small_model}", policy).targets[0].unvalidated
        assert draft.receipt is not None
        uri = draft.receipt.uri
        with pytest.raises(UsageError, match="not what the model is for: the target wants fingerprint"):
            api.validate(uri)
    found = api.validate(uri)
    assert not found.passed
    assert [check.gate.metric for check in found.checks if check.outcome != "pass"] == ["speedup"]
    with pytest.raises(GateError, match="no validation is attached to it that passed"):
        api.promote(uri, "edge")
    with pytest.raises(IntegrityError, match="validation on this machine failed"):
        flavor.load_model(str(registry_for(uri).fetch(uri, policy.parent / "fetched")))


@pytest.mark.compilers
@pytest.mark.skipif(missing(load("backends", "iree")) is not None, reason="iree is not installed here")
def test_iree_compiles_for_other_hardware_and_what_runs_here_can_be_proven_here(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: code for a machine that is not here would be called proven, or would be no use where that machine is."""
    triple = f"{DEVICE.machine}-unknown-linux-gnu"
    policy = write_policy(
        f"backends: [iree], precisions: [fp32], hardware: {{fingerprint: {DEVICE.fingerprint}}}, options: {{iree: "
        f"{{target_triple: {triple}}}}}",
        "  arm: {backends: [iree], precisions: [fp32], required: false, threads: 1, options: {iree: {target_triple: "
        "aarch64-linux-gnu}}}\n  gpu: {device: cuda, backends: [iree], precisions: [fp32], required: false, threads: "
        f"1, options: {{iree: {{target_device: cuda, target_chip: sm_80}}}}}}\n{BODY}",
    )
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(DEVICE, cpu="a build machine's"))
        targets = run(f"folder:{small_model}", policy).targets
    assert [target.winner for target in targets] == [None] * 3
    uris = [draft.receipt.uri for target in targets for draft in target.unvalidated if draft.receipt is not None]
    assert len(set(uris)) == 3
    reasons = [target.selection.reasons[target.unvalidated[0].job_id] for target in targets]
    for reason, says in zip(reasons, ("fingerprint", "code for aarch64", "code for cuda (sm_80)"), strict=True):
        assert says in reason
    for uri in uris:
        with pytest.raises(GateError, match="no validation is attached"):
            api.promote(uri, "edge")
    for uri in uris[1:]:
        with pytest.raises(CompileStageError, match="can't be run here"):
            api.validate(uri)
    assert api.validate(uris[0]).passed
    assert api.promote(uris[0], "edge").promoted_to == "edge"
