"""The Azure Pipelines template: held to Microsoft's published schema, and its script run by bash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

from pipelines import shells

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "pipelines" / "azure" / "compile-stage.yml"
TEXT = TEMPLATE.read_text(encoding="utf-8")


def is_valid(content: dict) -> bool:
    return Draft7Validator(get_builtin_schema("vendor.azure-pipelines")).is_valid(content)


def run_script(tmp_path: Path, **parameters: str) -> subprocess.CompletedProcess[str]:
    """The step that compiles, with its variables filled in as the template's expressions say."""
    content = yaml.safe_load(TEXT)
    values = {one["name"]: one.get("default", "") for one in content["parameters"]} | parameters
    [step] = [step for step in content["steps"] if step.get("displayName") == "Compile the model"]
    expressions = {
        name: re.fullmatch(r"\$\{\{ parameters\.(\w+) \}\}", str(text)) for name, text in step["env"].items()
    }
    variables = {name: values[match[1]] for name, match in expressions.items() if match}
    return shells.run(["bash", "-e", "-o", "pipefail", "-c", step["bash"]], tmp_path, variables)


def test_the_template_matches_the_published_schema():
    """Broken: Azure refuses the pipeline when it is queued."""
    assert is_valid(yaml.safe_load(TEXT))
    content = yaml.safe_load(TEXT)
    content["steps"][4]["inputs"]["testResultsFormat"] = "JUnt"
    assert not is_valid(content)  # the schema really looks


def test_no_expression_inside_a_script():
    """Broken: a parameter that is pasted into a script is a shell injection."""
    scripts = [step["bash"] for step in yaml.safe_load(TEXT)["steps"] if "bash" in step]
    assert len(scripts) == 3
    assert [script for script in scripts if "${{" in script or "$(System" in script or "$(Build" in script] == []


def test_every_parameter_is_used_and_every_used_one_is_declared():
    declared = {one["name"] for one in yaml.safe_load(TEXT)["parameters"]}
    assert declared == set(re.findall(r"parameters\.(\w+)", TEXT))


def test_the_caller_in_the_readme_gives_parameters_that_exist():
    """Broken: what is copied from the page is refused."""
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n# azure-pipelines\.yml\n(.*?)```", text, flags=re.DOTALL)
    content = yaml.safe_load(example)
    assert is_valid(content)
    [given] = [step["parameters"] for step in content["steps"] if "template" in step]
    declared = {one["name"]: one for one in yaml.safe_load(TEXT)["parameters"]}
    assert {name for name, one in declared.items() if "default" not in one} <= set(given) <= set(declared)


def test_the_caller_in_the_readme_says_where_the_stage_comes_from():
    """Broken: what is copied from the page asks a package index for a name that is not there, or that another took."""
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n# azure-pipelines\.yml\n(.*?)```", text, flags=re.DOTALL)
    [given] = [step["parameters"] for step in yaml.safe_load(example)["steps"] if "template" in step]
    assert re.fullmatch(r"compile-stage\[[\w,]+\] @ git\+https://\S+@\S+", given["package"])


def test_a_models_name_can_not_run_a_command(tmp_path, hostile):
    """Broken: a name from the registry would run a command on the agent."""
    given = {"modelUri": hostile, "policy": hostile, "targets": hostile, "arguments": f"--set\n{hostile}"}
    done = run_script(tmp_path, **given)
    assert done.returncode == 2, done.stderr
    assert hostile in done.stderr
    assert not (tmp_path / "pwned").exists()


def test_a_failed_gate_leaves_the_files_that_are_kept(tmp_path, registered):
    """Broken: the build shows no report, or a failed gate as a success."""
    given = {"modelUri": registered.uri, "policy": str(registered.unreachable), "targets": "small"}
    done = run_script(tmp_path, **given, arguments="--no-publish\n--quiet")
    assert done.returncode == 3, done.stderr
    [copied] = [step["inputs"] for step in yaml.safe_load(TEXT)["steps"] if step.get("task") == "CopyFiles@2"]
    out = tmp_path / "compile-stage-out"
    assert [name for name in copied["Contents"].split() if not (out / name).is_file()] == []
