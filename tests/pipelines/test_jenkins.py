"""The Jenkinsfile: its shell steps run by a POSIX shell with the build's parameters as variables. Its Groovy is parsed
where a parser is there; see pipelines/README.md for the linter that it was run through."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from pipelines import shells

TEXT = (Path(__file__).parents[2] / "pipelines" / "jenkins" / "Jenkinsfile").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"\bsh '''\n(.*?)'''", TEXT, flags=re.DOTALL)
DEFAULTS = dict(re.findall(r"name: '(\w+)', defaultValue: '([^']*)'", TEXT))


def run_script(tmp_path: Path, **parameters: str) -> subprocess.CompletedProcess[str]:
    """The script that compiles; Jenkins' `sh` starts it with -xe."""
    [script] = [script for script in SCRIPTS if "MODEL_URI" in script]
    return shells.run(["sh", "-xe", "-c", script], tmp_path, DEFAULTS | parameters)


def test_every_script_stands_in_single_quotes():
    """Broken: in double quotes Groovy puts parameters into the script, where a shell runs them."""
    code = re.sub(r"'''.*?'''|'[^'\n]*'|//[^\n]*", "", TEXT, flags=re.DOTALL)
    assert len(SCRIPTS) == len(re.findall(r"\bsh\b", code)) == 2
    assert '"' not in code
    assert "params." not in code


def test_every_parameter_reaches_a_script():
    """Broken: what a person fills in changes nothing."""
    declared = re.findall(r"(?:string|text)\(name: '(\w+)'", TEXT)
    assert len(declared) == 5
    assert [name for name in declared if f"${name}" not in "".join(SCRIPTS)] == []


def test_a_candidate_that_lost_does_not_mark_the_build():
    """Broken: a build whose run passed is unstable, since int8 missed a gate and fp32 won; what depends on it stays."""
    [publishing] = re.findall(r"\bjunit\((.*)\)", TEXT)
    assert "skipMarkingBuildUnstable: true" in publishing


def test_a_models_name_can_not_run_a_command(tmp_path, hostile):
    """Broken: a name from the registry would run a command on the agent."""
    given = {"MODEL_URI": hostile, "POLICY": hostile, "TARGETS": hostile, "ARGUMENTS": f"--set\n{hostile}"}
    done = run_script(tmp_path, **given)
    assert done.returncode == 2, done.stderr
    assert f"error: {hostile}" in done.stderr
    assert not (tmp_path / "pwned").exists()


def test_a_failed_gate_leaves_the_files_that_are_kept(tmp_path, registered):
    """Broken: the build keeps no report, or a failed gate is a success."""
    given = {"MODEL_URI": registered.uri, "POLICY": str(registered.unreachable), "TARGETS": "small"}
    done = run_script(tmp_path, **given, ARGUMENTS="--no-publish\n--quiet")
    assert done.returncode == 3, done.stderr
    kept = re.findall(r"compile-stage-out/[\w.]+", TEXT.partition("post {")[2])
    assert len(kept) == 4
    assert [name for name in kept if not (tmp_path / name).is_file()] == []
