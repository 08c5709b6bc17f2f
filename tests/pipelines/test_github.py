"""The GitHub action and workflows: linted by actionlint, held to the published schema, and their scripts really run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "pipelines" / "github"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def actionlint(repository: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("actionlint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if binary is None:
        pytest.skip("actionlint has no package for this platform; install the binary to run this")
    # actionlint looks for the repository that holds the working directory, so that it reads its local actions.
    (repository / ".git").mkdir(exist_ok=True)
    return subprocess.run([binary, "-no-color"], cwd=repository, capture_output=True, text=True, check=False)


def steps_of(path: Path) -> list[dict]:
    content = load(path)
    jobs = content.get("jobs", {"action": content.get("runs", {})})
    return [step for job in jobs.values() for step in job.get("steps", [])]


def scratch(tmp_path: Path, workflows: dict[str, str]) -> Path:
    """A repository that has our action and those workflows."""
    repository = tmp_path / "repository"
    shutil.copytree(ACTION, repository / "pipelines" / "github")
    (repository / ".github" / "workflows").mkdir(parents=True)
    for name, text in workflows.items():
        (repository / ".github" / "workflows" / name).write_text(text, encoding="utf-8")
    labels = "self-hosted-runner: {labels: [gpu-l4]}\n"  # of the README's matrix
    (repository / ".github" / "actionlint.yaml").write_text(labels, encoding="utf-8")
    return repository


def readme_examples() -> dict[str, str]:
    """The callers shown in pipelines/README.md, by file name, calling what lies in the same repository."""
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"```yaml\n# \.github/workflows/(\S+)\n(.*?)```", text, flags=re.DOTALL))
    return {name: body.replace("OWNER/compile-stage/", "./").replace("@COMMIT", "") for name, body in found.items()}


def test_the_workflows_pass_actionlint(tmp_path):
    linted = actionlint(scratch(tmp_path, {path.name: path.read_text(encoding="utf-8") for path in WORKFLOWS}))
    assert linted.returncode == 0, linted.stdout


def test_the_callers_in_the_readme_use_inputs_and_outputs_that_exist(tmp_path):
    """actionlint reads the action's and the reusable workflow's own metadata, so a renamed input breaks this."""
    examples = readme_examples()
    assert set(examples) == {"compile.yml", "release.yml", "matrix.yml"}
    reusable = {"compile-model.yml": (ROOT / ".github/workflows/compile-model.yml").read_text(encoding="utf-8")}
    linted = actionlint(scratch(tmp_path, {**examples, **reusable}))
    assert linted.returncode == 0, linted.stdout


def test_actionlint_really_reads_the_action(tmp_path):
    """Guards the test above: a caller with an input that does not exist is found."""
    workflow = readme_examples()["compile.yml"].replace("model-uri:", "model-url:")
    linted = actionlint(scratch(tmp_path, {"compile.yml": workflow}))
    assert "model-url" in linted.stdout
    assert linted.returncode == 1


@pytest.mark.parametrize("path", [ACTION / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_files_match_githubs_published_schema(path):
    schema = get_builtin_schema("vendor.github-actions" if path.name == "action.yml" else "vendor.github-workflows")
    content = load(path)
    if True in content:  # YAML 1.1 reads the key `on` as true; GitHub does not
        content["on"] = content.pop(True)
    assert [error.message for error in Draft7Validator(schema).iter_errors(content)] == []


@pytest.mark.parametrize("path", [ACTION / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_no_expression_inside_a_script(path):
    """An input pasted into a script is a shell injection; inputs go through `env`."""
    assert [step["run"] for step in steps_of(path) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("path", [ACTION / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path):
    """A tag can be moved to other code; a commit can't."""
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for reference, comment in used:
        assert reference.startswith("./") or (
            re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", reference) and re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
        ), reference


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_only_read(path):
    content = load(path)
    assert content["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in content["jobs"].values())


def test_the_action_hands_every_input_to_its_scripts():
    """An input that is declared and read by no step would be silently ignored."""
    text = (ACTION / "action.yml").read_text(encoding="utf-8")
    declared = set(load(ACTION / "action.yml")["inputs"])
    assert declared == set(re.findall(r"inputs\.([a-z-]+)", text.partition("\nruns:")[2]))


def run_script(
    tmp_path: Path, name: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run a script of the action as the runner would; returns the process and the step's outputs."""
    output, summary = tmp_path / "github-output", tmp_path / "github-summary"
    output.touch()
    summary.touch()
    variables = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(output),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_ACTION_PATH": str(ACTION),
        "RUNNER_TEMP": str(tmp_path),
        "TARGETS": "",
        "ARGS": "",
        "OUT": "out",
        **environment,
    }
    done = subprocess.run(
        ["bash", str(ACTION / name)], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    lines = [line.partition("=") for line in output.read_text(encoding="utf-8").splitlines()]
    return done, {key: value for key, _, value in lines}


@pytest.mark.parametrize(
    ("extras", "version"), [("openvino] ; touch pwned #", ""), ("openvino", "1.0; touch pwned"), ("-r,x$(id)", "")]
)
def test_install_refuses_what_is_no_extra_or_version(tmp_path, extras, version):
    done, _ = run_script(tmp_path, "install.sh", EXTRAS=extras, VERSION=version)
    assert done.returncode == 2
    assert "::error::" in done.stdout
    assert not (tmp_path / "compile-stage").exists()


def test_a_policy_that_is_not_there_ends_with_the_stages_exit_code(tmp_path):
    """The step's outputs exist even when nothing was tried, and an earlier run's result is not taken for this one's."""
    stale = tmp_path / "out" / "result.json"
    stale.parent.mkdir()
    stale.write_text(json.dumps({"status": "passed", "targets": []}), encoding="utf-8")
    done, outputs = run_script(tmp_path, "run.sh", MODEL_URI="models:/fraud/1", POLICY="nowhere.yaml")
    assert done.returncode == 2, done.stderr
    assert "nowhere.yaml" in done.stderr
    assert outputs == {
        "exit-code": "2",
        "status": "refused",
        "winners": "{}",
        "published": "{}",
        "result": "out/result.json",
    }


def test_a_models_name_can_not_run_a_command(tmp_path):
    """Inputs are data: substitutions, quotes, separators and leading dashes in them reach the stage as they are."""
    hostile = "--x$(touch pwned)`touch pwned`; touch pwned; '\""
    done, outputs = run_script(
        tmp_path, "run.sh", MODEL_URI=hostile, POLICY=hostile, TARGETS=hostile, ARGS="--set\na=$(touch pwned)"
    )
    assert done.returncode == int(outputs["exit-code"]) == 2, done.stderr
    assert not (tmp_path / "pwned").exists()


def test_the_keys_of_the_caches_are_what_the_command_prints(tmp_path, registered):
    """Broken: every job begins with an empty cache, or GitHub refuses the key for a comma in it."""
    done, outputs = run_script(
        tmp_path, "cache-keys.sh", POLICY=str(registered.policy), TOOLCHAINS="litert, tensorflow"
    )
    assert done.returncode == 0, done.stderr
    command = [str(BIN / "compile-stage"), "cache", "key", "--policy", str(registered.policy)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert outputs["key"] == printed
    assert outputs["path"] == os.environ["COMPILE_STAGE_CACHE"]
    assert re.fullmatch(r"compile-stage-toolchains-[\w.-]+-litert-tensorflow", outputs["toolchains-key"])
    text = (tmp_path / "github-output").read_text(encoding="utf-8")
    beginnings = re.search(r"^restore-keys<<END_OF_KEYS\n(.*?)\nEND_OF_KEYS$", text, flags=re.DOTALL | re.MULTILINE)
    assert beginnings is not None
    assert all(printed.startswith(one) and one.endswith("-") for one in beginnings[1].splitlines())


def test_arguments_that_change_the_policy_change_the_key(tmp_path, registered):
    """Broken: a policy that extends a file of `--policy-root` has no key, and its job begins with an empty cache; or
    two jobs that `--set` makes different keep theirs under one key."""
    roof = tmp_path / "roof"
    roof.mkdir()
    shutil.copy(registered.policy, roof / "base.yaml")
    policy = tmp_path / "apart" / "policy.yaml"
    policy.parent.mkdir()
    head = "\n".join(
        line for line in registered.policy.read_text().splitlines() if re.match(r"(apiVersion|kind):", line)
    )
    policy.write_text(f"{head}\nname: apart\nowner: tests\nextends: ['{roof / 'base.yaml'}']\n", encoding="utf-8")
    keys = set()
    for more in ([], ["--set", "budget.minutes=7"], ["--set=budget.minutes=8"]):
        given = ["--no-promote", f"--policy-root={roof}", "--target", "small", *more]
        output = tmp_path / "github-output"
        output.unlink(missing_ok=True)
        done, outputs = run_script(
            tmp_path, "cache-keys.sh", POLICY=str(policy), TOOLCHAINS="", ARGS="\n".join([*given, ""])
        )
        assert done.returncode == 0, done.stderr
        keys.add(outputs["key"])
    assert len(keys) == 3


def test_a_wrong_policy_has_no_key_and_ends_no_job(tmp_path):
    """Broken: the job would end before the stage has said what is wrong with the policy."""
    done, outputs = run_script(tmp_path, "cache-keys.sh", POLICY="$(touch pwned).yaml", TOOLCHAINS="")
    assert (done.returncode, outputs) == (0, {})
    assert not (tmp_path / "pwned").exists()


def test_the_reusable_workflow_takes_what_two_calls_must_not_share():
    """Broken: of two calls in one workflow run, the second fails, since GitHub keeps one artifact of a name."""
    workflow = load(ROOT / ".github/workflows/compile-model.yml")
    assert "artifact-name" in workflow[True]["workflow_call"]["inputs"]
    [action] = [step for step in workflow["jobs"]["compile"]["steps"] if step.get("id") == "stage"]
    assert action["with"]["artifact-name"] == "${{ inputs.artifact-name }}"


def test_a_toolchain_that_there_is_not_fails_the_step(tmp_path):
    """Broken: the stage would go on without the compiler that the caller asked for."""
    done, _ = run_script(tmp_path, "toolchains.sh", TOOLCHAINS="--help,$(touch pwned)")
    assert done.returncode == 2
    assert "--help" in done.stderr
    assert not (tmp_path / "pwned").exists()


def test_the_caches_are_restored_and_kept_under_the_same_key():
    """Broken: what a job kept would never be found, or would be given to jobs on other hardware."""
    steps = {step.get("name"): step for step in load(ACTION / "action.yml")["runs"]["steps"]}
    for restore, keep in (
        ("Restore the toolchains", "Keep the toolchains"),
        ("Restore the step cache", "Keep the step cache"),
    ):
        for name in ("key", "path"):
            assert steps[restore]["with"][name] == steps[keep]["with"][name]
    assert "!cancelled()" in steps["Keep the step cache"]["if"]  # also after a failed gate


def test_a_run_hands_on_what_came_out(tmp_path, registered):
    """A real model through the real stage: outputs for later steps, and the report as the job's summary."""
    done, outputs = run_script(
        tmp_path,
        "run.sh",
        MODEL_URI=registered.uri,
        POLICY=str(registered.policy),
        TARGETS="small",
        ARGS="--no-publish",
    )
    assert done.returncode == 0, done.stderr
    assert (outputs["status"], outputs["exit-code"]) == ("passed", "0")
    result = json.loads((tmp_path / outputs["result"]).read_text(encoding="utf-8"))
    assert json.loads(outputs["winners"]) == {"small": result["targets"][0]["winner"]}
    assert json.loads(outputs["published"]) == {"small": None}
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "github-summary").read_text(encoding="utf-8") == report


def test_a_failed_gate_fails_the_step_and_still_hands_on_the_result(tmp_path, registered):
    done, outputs = run_script(
        tmp_path, "run.sh", MODEL_URI=registered.uri, POLICY=str(registered.unreachable), ARGS="--no-publish"
    )
    assert done.returncode == 3, done.stderr
    assert (outputs["status"], outputs["exit-code"]) == ("failed", "3")
    assert json.loads(outputs["winners"]) == {"small": None}
