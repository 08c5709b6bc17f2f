"""Which versions make a fleet, its report, and a fleet of real models that is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from command_line import command_line
from factories import POLICY_TEXT

from compile_stage import api
from compile_stage.cli.fleet import _line
from compile_stage.cli.main import main
from compile_stage.core import plugins
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.fleet import fleets
from compile_stage.fleet.document import fleet_document, fleet_json_schema
from compile_stage.fleet.driving import Progress
from compile_stage.fleet.fleets import Settings, _Runs
from compile_stage.fleet.journal import JobRow, Journal, PlannedJob
from compile_stage.fleet.outcomes import JobOutcome, TargetOutcome, outcome_of_run
from compile_stage.fleet.regressions import note_regressions
from compile_stage.fleet.requalification import room
from compile_stage.fleet.selection import read_policies, split_pattern
from compile_stage.registry import mlflow_watch
from compile_stage.report import fleet_page

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here
PATIENCE_S = 400  # of whatever a process does; the machine is shared
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: fleet
owner: tests
report: {{profile: false}}
data:
  validation: {{source: "file:{data}", max_samples: 32}}
  calibration: {{source: "file:{data}", max_samples: 16}}
  min_samples: 32
targets:
  cpu: {{device: cpu, backends: [onnxruntime], precisions: [fp32], batch_sizes: [1], threads: 1}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.2, soak_seconds: 0.1, predict_seconds: 0}}
promote: {{alias: "{{target}}-prod"}}
"""


def register(client: Any, name: str, versions: int = 1, owner: str = "", **tags: str) -> None:
    client.create_registered_model(name, tags={"owner": owner} if owner else None)
    for _ in range(versions):
        client.create_model_version(name, "/none", tags=tags, await_creation_for=0)


def write(folder: Path, name: str, **sections: str) -> None:
    text = POLICY_TEXT.replace("name: cpu-server", f"name: {name}")
    (folder / f"{name}.yaml").write_text(text + "".join(f"{key}: {value}\n" for key, value in sections.items()))


def test_a_fleet_is_what_the_policies_are_meant_for(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a fleet would compile models that nobody asked for, or leave some out at the end of a page; or what to do
    about a pattern that matches none does not work."""
    from mlflow import MlflowClient

    monkeypatch.setattr(mlflow_watch, "_PAGE", 2)
    client, policies = MlflowClient(), tmp_path / "policies"
    policies.mkdir()
    for number in range(5):
        register(client, f"vision-{number}", 2, owner=f"team-{number % 2}", task="classify" if number != 3 else "x")
        client.set_registered_model_alias(f"vision-{number}", "candidate", "1")
    client.delete_registered_model_alias("vision-2", "candidate")
    register(client, "vision-compiled", **{"compile_stage.key": "k"})
    client.set_registered_model_alias("vision-compiled", "candidate", "1")
    register(client, "fraud", 1, task="classify")
    register(client, "vision-0-empty", 0)
    register(client, "vision-1-empty", 0)
    write(policies, "a", applies_to="{names: ['vision-*'], tags: {task: classify}}")
    write(policies, "b", applies_to="{names: ['vision-4'], tags: {task: classify}}")

    found = api.fleet_plan("vision-*@cand*", policies)
    assert [(job["uri"], job["policy"], job["owner"]) for job in found["jobs"]] == [
        ("models:/vision-0/1", "a", "team-0"),
        ("models:/vision-1/1", "a", "team-1"),
        ("models:/vision-4/1", "a", "team-0"),
        ("models:/vision-4/1", "b", "team-0"),
    ]
    assert found["counts"]["models"] == 3
    newest = api.fleet_plan("*", policies / "a.yaml")
    assert [job["uri"] for job in newest["jobs"]] == [f"models:/vision-{number}/2" for number in (0, 1, 2, 4)]
    registry = plugins.load("registries", "mlflow")
    everything = [version.uri for version in registry.search("vision-[04]", "candidate")]
    assert everything == ["models:/vision-0/1", "models:/vision-4/1"]
    write(policies, "b", applies_to="{names: ['vision-4']}", promote='{alias: "prod"}')
    write(policies, "a", applies_to="{names: ['vision-*']}", promote='{alias: "prod"}')
    with pytest.raises(UsageError, match=r"'a' \(a.yaml\) and 'b' \(b.yaml\) both move the alias 'prod'"):
        api.fleet_plan("vision-*@candidate", policies)
    with pytest.raises(UsageError, match="no registered model matches") as refused:
        api.fleet_run("speech-*@candidate", policies / "a.yaml", Settings(state=tmp_path / "state"))
    advised = str(refused.value.fix).partition(";")[0].removeprefix("look at all of them: compile-stage ")
    assert command_line(*shlex.split(advised)).returncode == 0
    with pytest.raises(UsageError, match="no registered model matches") as planned_refused:
        api.fleet_plan("speech-*@candidate", policies / "a.yaml")
    assert str(planned_refused.value) == str(refused.value), "a plan ends as its run would"
    write(policies, "c", applies_to="{names: ['speech-*']}")
    with pytest.raises(UsageError, match="6 without a policy") as of_all:
        api.fleet_plan("*", policies / "c.yaml")
    assert "fleet plan" not in str(of_all.value.fix), "which is the command that has just been given"


def test_a_model_whose_flavor_cannot_be_read_ends_no_fleet(embedded: str, tmp_path: Path) -> None:
    """Broken: one model whose files are gone would end a fleet of thousands before it began."""
    from mlflow import MlflowClient

    policies = tmp_path / "policies"
    policies.mkdir()
    for name in ("gone", "there"):
        register(MlflowClient(), name)  # which registers no files
    write(policies, "a", applies_to="{names: ['gone'], flavors: [onnx]}", promote='{alias: "prod"}')
    write(policies, "b", applies_to="{names: ['gone'], flavors: [sklearn]}", promote='{alias: "prod"}')
    write(policies, "c", applies_to="{names: ['there']}")
    found = api.fleet_plan("*", policies)
    assert [(job["uri"], job["policy"]) for job in found["jobs"]] == [
        ("models:/gone/1", "a"),
        ("models:/gone/1", "b"),
        ("models:/there/1", "c"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_the_same_files_on_samples_of_two_runs_are_two_pieces_of_work(embedded: str, tmp_path: Path) -> None:
    """Broken: a model would be failed for the samples of another model's run, with the reason that those gave."""
    log({"net-a": 1, "net-same": 1})  # of one run
    log({"net-other": 1})
    write(tmp_path, "of-example")
    write(tmp_path, "of-run")
    file = tmp_path / "of-run.yaml"
    file.write_text(file.read_text().replace("input_example", "mlflow-dataset:validation", 1))
    held = read_policies(tmp_path)

    def contents(policy: str) -> list[str]:
        digest = next(file.policy.digest for file in held if file.policy is not None and file.policy.name == policy)
        jobs = [
            replace(planned(name), policy=policy, policy_digest=digest) for name in ("net-a", "net-same", "net-other")
        ]
        work = _Runs(Settings(), held)
        return [work.content(JobRow(1, job, "queued", 0, 0, "")) for job in jobs]

    assert len(set(contents("of-example"))) == 1
    first, same, other = contents("of-run")
    assert first == same != other


@pytest.mark.parametrize("pattern", ["", "@x", "a@", "models:/a/1"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """Broken: a typing mistake would select nothing, or everything."""
    with pytest.raises(UsageError, match="is no pattern"):
        split_pattern(pattern)


def planned(name: str) -> PlannedJob:
    return PlannedJob(
        uri=f"models:/{name}/1", name=name, version="1", policy="p", policy_path="", policy_digest="d",
        targets=(("cpu", True), ("edge", False)), owner="o",
    )  # fmt: skip


def outcome(cpu: str, code: int, **fields: Any) -> JobOutcome:
    reason = "" if cpu == "passed" else "cosine 0.98 < 0.99 <script>alert(1)</script>"
    targets = (
        TargetOutcome(target="cpu", required=True, outcome=cpu, reason=reason, speedup=2.0),
        TargetOutcome(target="edge", required=False, outcome="failed", reason="slow"),
    )
    steps = {"compile": (1.5, 2, 1)}
    return JobOutcome(
        passed=code == 0, conclusive=False, exit_code=code, problem=reason, seconds=2.0, targets=targets, steps=steps,
        **fields,
    )  # fmt: skip


def test_the_report_says_what_passed_failed_and_regressed(tmp_path: Path) -> None:
    """Broken: the one report of a fleet would miss a regression, or run what a model's name holds."""
    journal = Journal(tmp_path)
    first = journal.begin("run", "s", {"pattern": "*"})
    journal.plan(first, [planned("a"), planned("b")])
    for job in (1, 2):
        journal.begun(job, 1, "n", 0.0)
        journal.ended(job, outcome("passed", 0), 5.0)
    journal.finish(first)
    assert fleet_document(journal, first)["exit_code"] == 0
    second = journal.begin("run", "s", {"pattern": "*"})
    journal.plan(second, [planned("a"), planned("<b>c</b>"), planned("same"), planned("late")])
    for job, code in ((3, 3), (4, 5)):
        journal.begun(job, 1, "n", 0.0)
        journal.ended(job, outcome("failed", code), 5.0)
    journal.copied(5, 4, 6.0)
    note_regressions(journal, second, plugins.load("registries", "mlflow"))
    document = fleet_document(journal, second)
    journal.close()
    jsonschema.validate(json.loads(json.dumps(document)), fleet_json_schema())
    assert (document["status"], document["exit_code"]) == ("failed", 3)
    assert document["counts"] == {
        "jobs": 4, "failed": 3, "refused": 0, "not begun": 1, "passed": 0, "same": 1, "regressed": 1, "skipped": 0,
    }  # fmt: skip
    assert fleet_page.headline(document) == "0 of 4 jobs passed, 3 failed, 1 not begun; 1 target regressed"
    jobs = {job["name"]: job for job in document["jobs"]}
    assert jobs["a"]["targets"][0]["regressed"] == "models:/a/1 passed in the last fleet"
    assert jobs["same"]["same_as"] == 4
    files = fleet_page.write(document, tmp_path / "report")
    page = files["fleet.html"].read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert "<script" not in page
    assert "<b>c</b>" not in page
    assert "passed in the last fleet" in page
    cases = ElementTree.parse(files["fleet.junit.xml"]).getroot()
    assert (cases.get("tests"), cases.get("failures"), cases.get("errors"), cases.get("skipped")) == (
        "8",
        "3",
        "2",
        "3",
    )


def test_a_run_without_a_result_is_unknown_and_one_that_failed_by_its_content_is_told(tmp_path: Path) -> None:
    """Broken: a job that crashed would look like one that failed its gates, and others would end as it did."""
    targets = (("cpu", True),)
    missing = outcome_of_run(tmp_path / "result.json", targets, 70, "a bug", 1.0)
    assert (missing.conclusive, missing.targets[0].outcome, missing.problem) == (False, "unknown", "a bug")
    document = {"status": "failed", "problem": "no winner", "events": [], "targets": [
        {"name": "cpu", "winner": None, "reason": "cosine 0.9 < 0.99", "candidates": [], "drafts": []}]}  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(document))
    failed = outcome_of_run(tmp_path / "result.json", targets, 3, "", 1.0)
    assert (failed.conclusive, failed.targets[0].outcome) == (True, "failed")
    assert failed.targets[0].reason == "cosine 0.9 < 0.99"
    assert not outcome_of_run(tmp_path / "result.json", targets, 4, "", 1.0).conclusive


FAILS, CAN_NOT_RUN = {"outcome": "fail"}, {"outcome": "not_run"}


@pytest.mark.parametrize(
    ("code", "status", "error", "checks", "conclusive"),
    [
        (6, "failed", "exception", [], True),
        (6, "failed", "timeout", [], False),  # as where budget.minutes is spent
        (3, "failed", "out_of_memory", [], False),
        (3, "failed", "crash", [], False),
        (3, "failed", None, [FAILS, CAN_NOT_RUN], True),
        (3, "failed", None, [CAN_NOT_RUN], False),
        (5, "refused", None, [], True),
        (5, "failed", None, [], False),  # the worker that held the source may have been lost
    ],
)
def test_what_time_or_a_lost_worker_decided_holds_for_no_other_job(
    tmp_path: Path, code: int, status: str, error: str | None, checks: list[dict[str, str]], conclusive: bool
) -> None:
    """Broken: a model is said to have failed that was never tried, since one with the same files had no time left."""
    candidate = {
        "job_id": "a", "error": error and {"kind": error}, "verdict": {"checks": checks} if checks else None,
    }  # fmt: skip
    target = {"name": "cpu", "winner": None, "reason": "none passed", "candidates": [candidate], "drafts": []}
    document = {"status": status, "problem": "no winner", "events": [], "targets": [target]}
    (tmp_path / "result.json").write_text(json.dumps(document))
    found = outcome_of_run(tmp_path / "result.json", (("cpu", True),), code, "", 1.0)
    assert found.conclusive == conclusive


@pytest.mark.parametrize(
    ("steps", "outcome"), [(["plan", "plan"], "not begun"), (["plan", "validate"], "failed"), ([], "failed")]
)
def test_what_the_budget_left_untried_has_not_failed(tmp_path: Path, steps: list[str], outcome: str) -> None:
    """Broken: a model that no candidate was tried of is reported as failed, and as worse than in the last fleet."""
    candidates: list[dict[str, Any]] = [
        {"job_id": step, "state": "failed", "error": {"kind": "timeout", "step": step}} for step in steps
    ]
    refused = {"job_id": "r", "state": "refused", "error": None}
    target = {"name": "cpu", "winner": None, "reason": "no time left", "candidates": [*candidates, refused]}
    document = {"status": "failed", "problem": "no winner", "events": [], "targets": [{**target, "drafts": []}]}
    (tmp_path / "result.json").write_text(json.dumps(document))
    found = outcome_of_run(tmp_path / "result.json", (("cpu", True),), 6, "", 1.0)
    assert (found.targets[0].outcome, found.targets[0].reason) == (outcome, "no time left")
    journal = Journal(tmp_path / "journal")
    fleets = [journal.begin("run", "s", {}) for _ in range(2)]
    passed = replace(found, passed=True, targets=(replace(found.targets[0], outcome="passed"),))
    for fleet, ended in zip(fleets, (passed, found), strict=True):
        journal.plan(fleet, [planned("fraud")])
        ((job,),) = journal.select("SELECT id FROM jobs WHERE fleet=?", fleet)
        journal.ended(job, ended, 1.0)
    note_regressions(journal, fleets[1], None)
    counts = fleet_document(journal, fleets[1])["counts"]
    assert counts[outcome] == 1
    assert counts["regressed"] == (outcome == "failed")


@pytest.mark.parametrize(
    ("stable", "waived", "speedup", "note"),
    [
        (True, [], 2.0, "the alias waits"),
        (True, ["max_rel"], 2.0, "passed under a waiver of max_rel; the alias waits"),
        (True, ["max_rel", "cosine"], 2.0, "passed under waivers of max_rel, cosine; the alias waits"),
        (False, [], None, "unstable speedup, 0.85 to 2.70; the alias waits"),
    ],
)
def test_a_fleet_says_what_a_run_says_of_its_winner(
    tmp_path: Path, stable: bool, waived: list[str], speedup: float | None, note: str
) -> None:
    """Broken: in a fleet's report a target that missed a gate under a waiver looks as one that held all, and an
    unstable speedup has a figure with three digits."""
    timing = {"by_batch": {"8": {"speedup": 2.0, "speedup_interval": [0.85, 2.7], "stable": stable}}}
    verdict = {"waivers": [{"gate": gate} for gate in waived]}
    document = {"status": "passed", "problem": None, "events": [], "targets": [
        {"name": "cpu", "winner": "w", "reason": None, "receipt": {"uri": "models:/m/1", "note": "the alias waits"},
         "candidates": [{"job_id": "l"}, {"job_id": "w", "timing": timing, "verdict": verdict}]}]}  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(document))
    (target,) = outcome_of_run(tmp_path / "result.json", (("cpu", True),), 0, "", 1.0).targets
    assert (target.outcome, target.speedup, target.note) == ("passed", speedup, note)


def test_a_line_of_progress_fits_80_columns(tmp_path: Path) -> None:
    """Broken: a long name would break the terminal's lines, one for each of thousands of jobs."""
    journal = Journal(tmp_path)
    fleet = journal.begin("run", "s", {})
    journal.plan(fleet, [planned("a-name-" + "x" * 120)])
    row = journal.job(1)
    journal.close()
    for line in _line(Progress(row, outcome("failed", 3), 1, 1000)).splitlines():
        assert len(line) <= 80
    assert len(_line(Progress(row, None, 1, 1000, same_as=7))) <= 80
    silent = replace(outcome("failed", 3), problem=" \n ")
    assert len(_line(Progress(row, silent, 1, 1000)).splitlines()) == 1, "a job that says nothing ended the fleet"


def check(metric: str, limit: float, direction: str, measured: float) -> dict[str, Any]:
    return {"gate": {"metric": metric, "limit": limit, "direction": direction}, "measured": measured}


def test_room_is_a_share_of_what_may_be_lost() -> None:
    """Broken: requalification would begin with a latency far from its limit, and not with a cosine at its own."""
    cosine = check("cosine", 0.99, "at_least", 0.991)
    latency = check("p95_latency_ms", 10.0, "at_most", 5.0)
    assert room({"verdict": {"checks": [cosine, latency]}}) == pytest.approx(0.1)
    assert room({"verdict": {"checks": [latency]}}) == pytest.approx(0.5)
    assert room({"verdict": None}) < 0


def test_room_is_none_of_what_only_holds_or_does_not() -> None:
    """Broken: every version is at the limit of a check such as `finite`, so that requalification goes by age alone."""
    finite, missed = check("finite", 0.0, "at_most", 0.0), check("finite", 0.0, "at_most", 1.0)
    samples, cosine = check("samples", 32.0, "at_least", 32.0), check("cosine", 0.99, "at_least", 0.995)
    assert room({"verdict": {"checks": [finite, samples, cosine]}}) == pytest.approx(0.5)
    assert room({"verdict": {"checks": [missed, cosine]}}) == -1


# ------------------------------------------------------------------------------------------------- the real thing


def network(seed: int) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def log(names: dict[str, int]) -> None:
    """Models by name and seed."""
    import mlflow
    from mlflow.models import infer_signature

    zeros = np.zeros((2, 8), np.float32)
    signature = infer_signature({"x": zeros}, {"y": np.zeros((2, 4), np.float32)})
    with warnings.catch_warnings(), mlflow.start_run(experiment_id="0"):
        warnings.simplefilter("ignore")
        for name, seed in names.items():
            mlflow.onnx.log_model(
                network(seed),
                name="net",
                signature=signature,
                registered_model_name=name,
                pip_requirements=["onnx"],
                save_as_external_data=False,  # whose file has another name each time
            )
            mlflow.MlflowClient().set_registered_model_alias(name, "candidate", "1")


def rows(state: Path, query: str) -> list[tuple[Any, ...]]:
    if not (state / "fleet.db").exists():
        return []
    try:
        db = sqlite3.connect(f"file:{state / 'fleet.db'}?mode=ro", uri=True)
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()
    except sqlite3.OperationalError:  # it is being made
        return []


@pytest.mark.slow
@pytest.mark.timeout(880)  # seven processes, of which five are runs of the stage
def test_a_fleet_that_is_killed_publishes_each_version_once(embedded: str, tmp_path: Path) -> None:
    """Broken: a fleet of a thousand models would begin again after a crash, or publish some of them twice."""
    from mlflow import MlflowClient

    log({"net-a": 1, "net-b": 2, "net-same": 1})
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    policies, state = tmp_path / "policies", tmp_path / "state"
    policies.mkdir()
    (policies / "fleet.yaml").write_text(
        POLICY.format(data=tmp_path / "data.npz") + "applies_to: {names: ['net-*'], flavors: [onnx]}\n"
    )
    command = [
        sys.executable, "-m", "compile_stage", "fleet", "run", "net-*@candidate", "-p", str(policies), "--state",
        str(state),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while not rows(state, "SELECT 1 FROM jobs WHERE state='running'"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed: 3 of 3 jobs passed" in done.stdout
    document = json.loads((state / "1" / "fleet.json").read_text())
    jsonschema.validate(document, fleet_json_schema())
    assert [job["attempts"] for job in document["jobs"]] == [1, 1, 1], "what had begun was begun again"
    cached = {name: (ran, hits) for name, ran, hits in rows(
        state, "SELECT j.name, s.ran, s.cached FROM steps s JOIN jobs j ON j.id=s.job WHERE s.step='compile'"
    )}  # fmt: skip
    assert cached["net-same"] == (0, cached["net-a"][0])
    client = MlflowClient()
    for name in ("net-a", "net-b", "net-same"):
        versions = client.search_model_versions(f"name = '{name}-compiled'")
        assert len(versions) == 1
    requalified = requalify(tmp_path / "again", "net-b-compiled", {0})
    assert [(job["status"], job["uri"]) for job in requalified["jobs"]] == [("passed", "models:/net-b-compiled/1")]
    assert "cpu-prod: " in requalified["jobs"][0]["why"]
    assert requalify(tmp_path / "here", "net-b-compiled", None)["counts"]["skipped"] == 1


def requalify(state: Path, name: str, cores: set[int] | None) -> dict[str, Any]:
    """What `fleet requalify` finds on a machine that has fewer cores."""
    if cores is not None:
        if len(os.sched_getaffinity(0)) < 2:
            pytest.skip("a machine with one core can't pass for another with fewer")
        cores = {sorted(os.sched_getaffinity(0))[0]}
    command = [sys.executable, "-m", "compile_stage", "fleet", "requalify", name, "--state", str(state), "--json"]
    if cores is not None:
        pinned = f"import os, sys; os.sched_setaffinity(0, {cores}); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", pinned, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_requalification_looks_at_what_the_policies_promote_to(embedded: str, tmp_path: Path) -> None:
    """Broken: an alias of somebody's experiment would be validated for hours, or production's would be left out."""
    policies, state = tmp_path / "policies", Settings(state=tmp_path / "state")
    policies.mkdir()
    write(policies, "a", promote='{alias: "{target}-prod"}')
    found = api.fleet_requalify("*", settings=state, policies=policies)
    assert (found["given"]["aliases"], found["counts"]["jobs"], found["exit_code"]) == (["cpu-server-prod"], 0, 0)
    assert found["given"]["machine"] == hardware().fingerprint, "of reports from many machines, none says whose it is"
    assert api.fleet_requalify("*", settings=state)["given"]["aliases"] == ["*"]
    write(policies, "a", promote="{alias: null}")
    with pytest.raises(UsageError, match="none of the policies promotes"):
        api.fleet_requalify("*", settings=state, policies=policies)


@pytest.mark.parametrize(("pattern", "aliases"), [("no-such-model", []), ("*", ["prdo"])])
def test_a_requalification_of_nothing_that_was_named_is_an_error(
    embedded: str, tmp_path: Path, pattern: str, aliases: list[str]
) -> None:
    """Broken: a mistyped name or alias says "passed", and nothing is proven anew for as long as nobody looks."""
    settings = Settings(state=tmp_path / "state")
    for _ in range(2):  # nor does the refused fleet lie there, to be gone on with
        with pytest.raises(UsageError, match="no published version matches"):
            api.fleet_requalify(pattern, aliases, settings=settings)


def test_a_requalification_that_goes_on_looks_again_at_what_is_due(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a requalification says "passed" though what an alias points to now was never looked at, or was, before
    the packages changed once more."""
    settings, due_now, ran = Settings(state=tmp_path / "state"), ["stays", "passed", "rolled-back"], list[str]()
    monkeypatch.setattr(fleets, "due", lambda *_: iter([replace(planned(name), why="changed") for name in due_now]))

    def drive(journal: Journal, fleet: int, *_: Any) -> dict[str, Any]:
        for row in journal.jobs(fleet, "queued"):
            ran.append(row.planned.name)
            journal.begun(row.id, row.attempt + 1, "n", 0.0)
            (settings.state / "jobs" / str(row.id) / "1").mkdir(parents=True, exist_ok=True)
            if row.planned.name == "passed":
                journal.ended(row.id, outcome("passed", 0), 1.0)
            else:
                journal.queued(row.id, lost=False, at=1.0)
        return fleet_document(journal, fleet, interrupted=True)

    monkeypatch.setattr(fleets, "_drive", drive)
    api.fleet_requalify(settings=settings)
    due_now[:] = ["stays"]
    ran.clear()
    api.fleet_requalify(settings=settings)
    assert ran == ["stays"], "what passed and is not due is done, and what waited and is not due is out"
    assert len(list((settings.state / "jobs").iterdir())) == 2, "its number may be given anew, its outcome must not"
    due_now[:] = ["stays", "passed", "promoted"]
    ran.clear()
    found = api.fleet_requalify(settings=settings)
    assert sorted(ran) == ["passed", "promoted", "stays"]
    assert {job["why"] for job in found["jobs"]} == {"changed"}


def test_a_fleet_that_goes_on_looks_again_at_what_its_pattern_means(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a fleet that was interrupted, or had no budget left, publishes and promotes what was the candidate then,
    and what is now is never looked at."""
    from mlflow import MlflowClient

    client, settings, ran = MlflowClient(), Settings(state=tmp_path / "state"), list[str]()
    for name in ("moved", "kept", "dropped"):
        register(client, name, versions=2)
        client.set_registered_model_alias(name, "candidate", "1")
    register(client, "added")
    write(tmp_path, "p")

    def drive(journal: Journal, fleet: int, *_: Any) -> dict[str, Any]:
        ran[:] = sorted(row.planned.uri for row in journal.jobs(fleet, "queued"))
        for row in journal.jobs(fleet, "queued"):
            if row.planned.name == "kept":
                journal.begun(row.id, 1, "n", 0.0)
                journal.ended(row.id, outcome("passed", 0), 1.0)
        return fleet_document(journal, fleet, interrupted=True)

    monkeypatch.setattr(fleets, "_drive", drive)
    api.fleet_run("*@candidate", tmp_path, settings)
    assert ran == ["models:/dropped/1", "models:/kept/1", "models:/moved/1"]
    client.set_registered_model_alias("moved", "candidate", "2")
    client.set_registered_model_alias("added", "candidate", "1")
    client.delete_registered_model_alias("dropped", "candidate")
    found = api.fleet_run("*@candidate", tmp_path, settings)
    assert ran == ["models:/added/1", "models:/moved/2"], "and what has ended is not begun again"
    assert found["counts"]["jobs"] == 3


def test_the_command_refuses_a_broken_policy_before_anything_runs(
    embedded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the models of a policy with a typing mistake would be left out, and the fleet would pass; or the
    mistakes of two files run into one line."""
    (tmp_path / "policies").mkdir()
    write(tmp_path / "policies", "good")
    (tmp_path / "policies" / "bad.yaml").write_text("name: [")
    write(tmp_path / "policies", "typo")
    with (tmp_path / "policies" / "typo.yaml").open("a") as file:
        file.write("\nonwer: me\n")
    with pytest.raises(SystemExit) as ended:
        main(["fleet", "plan", "*@candidate", "-p", str(tmp_path / "policies")])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert any("bad.yaml" in line and "onwer" not in line for line in errors)
    assert any("typo.yaml" in line and "onwer: unknown key" in line for line in errors)
    assert "fix: compile-stage lint" in shown
