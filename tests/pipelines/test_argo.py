"""The Argo WorkflowTemplate: its container's command run with the parameters put in as Argo puts them; each of its
fields known to the models that hera generates from Argo's published API."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipelines import shells

MANIFEST = Path(__file__).parents[2] / "pipelines" / "argo" / "compile-stage.yaml"
CONTENT = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))

CHECK = """\
import json, sys
from hera.workflows.models import WorkflowTemplate
given = json.load(sys.stdin)
read = WorkflowTemplate.model_validate(given).model_dump(by_alias=True, exclude_none=True, mode="json")
def lost(a, b, where=""):
    if isinstance(a, dict):
        for key in a:
            yield from lost(a[key], b[key], f"{where}/{key}") if key in b else [f"{where}/{key}"]
    elif isinstance(a, list):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from lost(x, y, f"{where}/{at}")
    elif a != b:
        yield where
print(json.dumps(list(lost(given, read))))
"""


def filled_in(**given: str) -> dict:
    """The template `compile` with the workflow's parameters: Argo puts each, escaped, into the template's JSON."""
    values = {one["name"]: one.get("value", "") for one in CONTENT["spec"]["arguments"]["parameters"]} | given
    [template] = CONTENT["spec"]["templates"]
    text = json.dumps(template)
    for scope in ("workflow", "inputs"):
        pattern = rf"\{{\{{{scope}\.parameters\.([\w-]+)\}}\}}"
        text = re.sub(pattern, lambda match: json.dumps(values[match[1]])[1:-1], text)
    return json.loads(text)


def run_container(tmp_path: Path, policy: str, **given: str) -> subprocess.CompletedProcess[str]:
    """The container's process, in a folder that stands for its own."""
    template = filled_in(policy=policy, package="", **given)
    [artifact] = template["inputs"]["artifacts"]
    container = template["container"]
    assert Path(artifact["path"]).parent == Path(container["workingDir"])
    (tmp_path / Path(artifact["path"]).name).write_text(artifact["raw"]["data"], encoding="utf-8")
    variables = {one["name"]: one["value"] for one in container["env"] if one.get("value")}
    return shells.run([*container["command"], *container["args"]], tmp_path, variables)


def test_every_parameter_is_used_and_every_used_one_is_declared():
    declared = {one["name"] for one in CONTENT["spec"]["arguments"]["parameters"]}
    text = MANIFEST.read_text(encoding="utf-8")
    assert declared == set(re.findall(r"\{\{workflow\.parameters\.([\w-]+)\}\}", text))
    inputs = {one["name"] for one in CONTENT["spec"]["templates"][0]["inputs"]["parameters"]}
    assert inputs == set(re.findall(r"\{\{inputs\.parameters\.([\w-]+)\}\}", text))


def test_no_parameter_inside_the_script():
    """Broken: a parameter that is pasted into a script is a shell injection."""
    assert "{{" not in "".join(CONTENT["spec"]["templates"][0]["container"]["command"])


def test_a_models_name_can_not_run_a_command(tmp_path, registered, hostile):
    """Broken: a name from the registry would run a command in the pod."""
    given = {"model-uri": hostile, "target": hostile}
    done = run_container(tmp_path, registered.policy.read_text(encoding="utf-8"), **given)
    assert done.returncode == 2, done.stderr
    assert hostile in done.stderr
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_a_failed_gate_leaves_the_artifacts(tmp_path, registered):
    """Broken: Argo keeps no report, or shows a failed gate as a success."""
    text = registered.unreachable.read_text(encoding="utf-8")
    done = run_container(tmp_path, text, **{"model-uri": registered.uri, "target": "sm*", "publish": "--no-publish"})
    assert done.returncode == 3, done.stderr
    kept = [one["path"] for one in filled_in()["outputs"]["artifacts"]]
    assert len(kept) == 3
    assert [path for path in kept if not (tmp_path / Path(path).relative_to("/compile-stage")).is_file()] == []


@pytest.mark.orchestrators
def test_argos_models_know_every_field(orchestrator: Callable[[str], Path]):
    """Broken: Argo refuses the manifest, or ignores a part of it."""

    def lost(text: str) -> list[str]:
        command = [str(orchestrator("hera") / "python"), "-c", CHECK]
        return json.loads(subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout)

    text = json.dumps(CONTENT)
    assert lost(text) == []
    assert lost(text.replace('"optional": true, "archive"', '"optionl": true, "archive"')) != []
