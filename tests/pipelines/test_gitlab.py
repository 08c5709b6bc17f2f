"""The GitLab component: held to GitLab's published schema after interpolation, and its script run by a POSIX shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "pipelines" / "gitlab" / "templates" / "compile-stage.yml"
REQUIRED = {"model-uri": "models:/fraud@candidate", "policy": "policies/cpu-server.yaml"}


def spec_and_body() -> tuple[dict, str]:
    """The component's two documents: what it takes, and the text that the inputs are put into."""
    header, body = re.split(r"^---$", COMPONENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return yaml.safe_load(header), body


def interpolated(**inputs: object) -> dict:
    """The component's jobs with those inputs, defaults filled in; arrays become JSON, as GitLab renders them."""
    header, body = spec_and_body()
    given = REQUIRED | inputs

    def value(match: re.Match[str]) -> str:
        name = match[1]
        found = given[name] if name in given else header["spec"]["inputs"][name]["default"]
        return found if isinstance(found, str) else json.dumps(found)

    return yaml.safe_load(re.sub(r"\$\[\[ inputs\.([a-z-]+) \]\]", value, body))


def errors_against_schema(content: dict) -> list[str]:
    return [error.message for error in Draft7Validator(get_builtin_schema("vendor.gitlab-ci")).iter_errors(content)]


def run_script(tmp_path: Path, **inputs: object) -> subprocess.CompletedProcess[str]:
    """The job's script with the job's variables, as a runner would start it."""
    [job] = interpolated(**inputs).values()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-e", "-c", "\n".join(job["script"])],
        cwd=tmp_path,
        env={**os.environ, **job["variables"], "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_header_matches_gitlabs_published_schema():
    header, _ = spec_and_body()
    assert errors_against_schema(header) == []


@pytest.mark.parametrize("inputs", [{}, {"tags": ["cpu-server", "avx512"], "targets": "a, b", "job-name": "compile:a"}])
def test_the_job_matches_gitlabs_published_schema(inputs):
    assert errors_against_schema(interpolated(**inputs)) == []


def test_the_schema_really_looks():
    """Guards the test above: a misspelt keyword's value is found."""
    content = interpolated()
    content["compile-stage"]["artifacts"]["when"] = "allways"
    assert errors_against_schema(content) != []


def test_every_input_is_used_and_every_used_one_is_declared():
    header, body = spec_and_body()
    assert set(header["spec"]["inputs"]) == set(re.findall(r"\$\[\[ inputs\.([a-z-]+) \]\]", body))


def test_no_input_inside_a_script():
    """An input pasted into a script is a shell injection; inputs go through variables."""
    raw = yaml.safe_load(
        spec_and_body()[1].replace('"$[[', "$[[").replace(']]"', "]]").replace("$[[", "x").replace("]]", "x")
    )
    [job] = raw.values()
    assert not any("inputs." in line for line in job["script"] + job["before_script"])


def test_reports_are_kept_when_a_gate_failed():
    artifacts = interpolated()["compile-stage"]["artifacts"]
    assert artifacts["when"] == "always"
    assert artifacts["reports"]["junit"] == "compile-stage-out/junit.xml"


def test_the_caller_in_the_readme_gives_inputs_that_exist():
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n# \.gitlab-ci\.yml\n(.*?)```", text, flags=re.DOTALL)
    content = yaml.safe_load(example)
    assert errors_against_schema(content) == []
    given = content["include"][0]["inputs"]
    declared = spec_and_body()[0]["spec"]["inputs"]
    required = {name for name, spec in declared.items() if "default" not in (spec or {})}
    assert required <= set(given) <= set(declared)


def test_the_caller_in_the_readme_says_where_the_stage_comes_from():
    """Broken: what is copied from the page asks a package index for a name that is not there, or that another took."""
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n# \.gitlab-ci\.yml\n(.*?)```", text, flags=re.DOTALL)
    [include] = yaml.safe_load(example)["include"]
    assert re.fullmatch(r"compile-stage\[[\w,]+\] @ git\+https://\S+@\S+", include["inputs"]["package"])


def test_a_policy_that_is_not_there_ends_with_the_stages_exit_code(tmp_path):
    done = run_script(tmp_path, policy="nowhere.yaml", args="--no-publish --no-promote")
    assert done.returncode == 2, done.stderr
    assert "nowhere.yaml" in done.stderr


def test_a_models_name_can_not_run_a_command(tmp_path):
    """Substitutions, separators, globs and leading dashes in an input reach the stage as they are."""
    hostile = "--x$(touch pwned)`touch pwned`; touch pwned; *"
    done = run_script(tmp_path, **{"model-uri": hostile, "policy": hostile, "targets": hostile, "args": hostile})
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "pwned").exists()


def test_a_run_leaves_what_the_artifacts_name(tmp_path, registered):
    """A real model through the real stage: each file that the job keeps is there, under the name that it is kept by."""
    given = {"model-uri": registered.uri, "policy": str(registered.policy), "targets": "small", "args": "--no-publish"}
    done = run_script(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    artifacts = interpolated(**given)["compile-stage"]["artifacts"]
    kept = [*artifacts["paths"], artifacts["reports"]["junit"]]
    assert [name for name in kept if not (tmp_path / name).is_file()] == []
