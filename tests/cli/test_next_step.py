"""The last line of a run: a command that works, or nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compile_stage.cli.next_step import Asked, next_step
from compile_stage.core.performance_keys import PERFORMANCE_KEYS
from compile_stage.core.records import Gate, Outcome, Promotion, Replacement, RunResult, TargetResult, Verdict

ASKED = Asked(Path("my policy.yaml"), (Path("base"),), ("owner=me",))


def after(result: RunResult, asked: Asked = ASKED, folder: str = "out") -> str:
    return next_step(result, Path(folder), asked)


def with_first(result: RunResult, **fields: Any) -> RunResult:
    return dataclasses.replace(result, targets=(dataclasses.replace(result.targets[0], **fields),))


def test_what_was_published_is_served(result: RunResult) -> None:
    """Broken: `models serve` of a version that nothing was published as, or that MLflow can't find."""
    assert after(result) == (
        "mlflow models serve -m 'models:/digits-cnn-compiled@cpu-server-prod' --env-manager local --port 5000"
    )
    receipt = result.targets[0].receipt
    assert receipt is not None
    filed = dataclasses.replace(receipt, uri="folder:/srv/x/3", promoted_to=None)
    assert after(with_first(result, receipt=filed)) == "compile-stage verify folder:/srv/x/3"
    kept = with_first(result, receipt=None)
    assert after(kept) == ""
    assert after(kept, dataclasses.replace(ASKED, publish=False)).startswith("the same command without --no-publish ")


def test_what_is_loaded_with_a_trusted_key_alone_is_served_with_it(result: RunResult) -> None:
    """Broken: where the policy demands signatures, `models serve` ended with "nothing here says whose is trusted"."""
    compliance = dataclasses.replace(
        result.policy.compliance, require_signature=True, trusted_keys=("/keys/ci 1.pub", "/keys/b.pub")
    )
    signed = dataclasses.replace(result, policy=dataclasses.replace(result.policy, compliance=compliance))
    trust = "COMPILE_STAGE_TRUST='/keys/ci 1.pub:/keys/b.pub' "
    assert after(signed) == trust + after(result)
    first = signed.targets[0]
    assert first.receipt is not None
    filed = dataclasses.replace(first.receipt, uri="folder:/srv/x/3", promoted_to=None)
    assert after(with_first(signed, receipt=filed)) == trust + "compile-stage verify folder:/srv/x/3"
    policy = dataclasses.replace(first.policy, promote=Promotion(alias="p", approval="ok"))
    note = "waiting for approval: set the tag ok=ann on models:/x/3; then: compile-stage promote models:/x/3 --alias p"
    waits = with_first(signed, policy=policy, receipt=dataclasses.replace(first.receipt, promoted_to=None, note=note))
    assert after(waits).endswith(f"; then: {trust}compile-stage promote models:/x/3 --alias p")


def test_an_approval_is_asked_for_as_the_receipt_says(result: RunResult) -> None:
    """Broken: "serve it" of a version that waits for a person."""
    first = result.targets[0]
    note = "waiting for approval: set the tag ok=ann on models:/x/3; then: compile-stage promote models:/x/3 --alias p"
    policy = dataclasses.replace(first.policy, promote=Promotion(alias="p", approval="ok"))
    waits = dataclasses.replace(first.receipt, promoted_to=None, note=note)
    assert after(with_first(result, policy=policy, receipt=waits)) == note.removeprefix("waiting for approval: ")


def test_a_slower_version_is_compared_with_the_promoted_one(result: RunResult, factory: ModuleType) -> None:
    """Broken: a run that failed by its promotion ended with advice on how to serve."""
    first = result.targets[0]
    note = "not promoted to 'p': at batch size 1 its p50 is 1.120 times that of models:/x/2, at most 1.02 allowed"
    stays = with_first(
        result,
        policy=dataclasses.replace(first.policy, promote=Promotion(alias="p")),
        receipt=dataclasses.replace(first.receipt, uri="models:/x/3", promoted_to=None, note=note),
        replaced=Replacement(alias="p", uri="models:/x/2", measurement=factory.measurement(0.001, 0.89)),
    )
    failed = dataclasses.replace(stays, status="failed", exit_code=3, problem=f"models:/x/3: {note}")
    assert after(failed) == "compile-stage compare models:/x/2 models:/x/3"


def failed_with(factory: ModuleType, *, metric: str = "cosine", form: str = "onnx") -> RunResult:
    target: TargetResult = factory.no_winner()
    candidate = target.candidates[0]
    gate = Gate(metric=metric, limit=1.0, direction="at_least")
    check = factory.check(gate, Outcome.FAIL, 0.4, "0.4 < 1")
    assert candidate.portable is not None
    portable = dataclasses.replace(candidate.portable, form=form)
    missed = dataclasses.replace(candidate, verdict=Verdict(checks=(check,)), portable=portable)
    made: RunResult = factory.make_result(
        dataclasses.replace(target, candidates=(missed,)), status="failed", exit_code=3
    )
    return made


def test_a_missed_tolerance_is_debugged_with_the_runs_own_arguments(factory: ModuleType) -> None:
    """Broken: a command that needs the policy's --set again, or quotes, would look into another run."""
    result = failed_with(factory)
    job_id = result.targets[0].candidates[0].job.id
    assert after(result) == (
        f"open out/report.html; compile-stage debug models:/digits-cnn/1 -p 'my policy.yaml' --job {job_id} "
        "--policy-root base --set owner=me"
    )
    assert after(result, folder="my out").startswith("open 'my out/report.html'; ")


@pytest.mark.parametrize(
    "made", [*({"metric": metric} for metric in (*PERFORMANCE_KEYS.values(), "samples")), {"form": "stablehlo"}]
)
def test_debug_is_named_only_where_it_finds_something(factory: ModuleType, made: dict[str, str]) -> None:
    """Broken: `debug` of a candidate that is only too slow or too costly, or of a graph whose nodes it can't compare,
    finds nothing or is an error."""
    assert after(failed_with(factory, **made)) == "open out/report.html"


def test_an_error_says_itself_what_to_do(result: RunResult) -> None:
    """Broken: advice on a model that was refused."""
    assert after(dataclasses.replace(result, status="refused", exit_code=5, targets=())) == ""
