"""Policies that somebody else wrote: which files they may name, and what of these a message may show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_stage.core.errors import PolicyError, UsageError
from compile_stage.policy.explain import explain
from compile_stage.policy.load import lint, load_policy

from .conftest import HEAD, Write

TARGET = "targets: {t: {}}\n"
SECRET = "root:$6$s3cret:19000:0:99999:7:::\n"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the one that `write` writes to, with a file that is no policy, and one that is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "shadow").write_text(SECRET)
    (folder / "base.yaml").write_text(HEAD + "owner: s3cret-team\n")
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    return folder


def in_repository(text: str, name: str = "p.yaml") -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(HEAD + text)
    return Path(name)


@pytest.mark.parametrize(
    "name", ["../outside/shadow", "{outside}/shadow", "sub/../../outside/shadow", "link.yaml", "/etc/shadow"]
)
def test_a_file_outside_of_the_root_is_neither_read_nor_quoted(outside: Path, name: str) -> None:
    """Broken: a pull request could read any file of the machine that lints it, one line at a time."""
    Path("link.yaml").symlink_to(outside / "shadow")
    path = in_repository(f'extends: ["{name.format(outside=outside)}"]\n{TARGET}')
    [problem] = lint([path])
    assert "s3cret" not in problem
    assert "lies outside of" in problem
    assert "--policy-root" in problem


def test_whether_a_file_outside_is_there_is_not_said(outside: Path) -> None:
    """Broken: a pull request could ask which files the machine has."""
    there, absent = (lint([in_repository(f"extends: [../outside/{name}]\n{TARGET}")]) for name in ("shadow", "sh4dow"))
    assert [text.replace("sh4dow", "shadow") for text in absent] == there


def test_a_policy_that_is_a_link_to_what_is_no_policy_is_not_quoted(outside: Path) -> None:
    """Broken: the one file that the pipeline names could be made a link to any other."""
    Path("p.yaml").symlink_to(outside / "shadow")
    [problem] = lint(["p.yaml"])
    assert problem == "p.yaml:1:1: the file is not a policy; a policy starts with apiVersion: compile-stage/v1"


def test_layers_of_the_same_checkout_are_read(outside: Path) -> None:
    """Broken: repositories that keep their policies and the base of them in two folders would stop working."""
    subprocess.run(["git", "init", "-q"], check=True)
    in_repository("owner: base\n", "org/base.yaml")
    path = in_repository(f"extends: [../../org/base.yaml]\n{TARGET}", "team/policies/p.yaml")
    assert load_policy(path).owner == "base"


def test_a_named_root_is_one_too(outside: Path) -> None:
    """Broken: an organisation could not keep its base in a folder of its own."""
    path = in_repository(f"extends: [../outside/base.yaml]\n{TARGET}")
    with pytest.raises(PolicyError, match="lies outside of"):
        load_policy(path)
    assert load_policy(path, roots=[outside]).owner == "s3cret-team"
    assert any(row.value == "s3cret-team" for row in explain(path, roots=[outside]))
    with pytest.raises(UsageError, match="names no folder"):
        load_policy(path, roots=[outside / "nothing"])


def test_shipped_policies_are_layers_wherever_the_policy_lies(outside: Path) -> None:
    """Broken: a policy of one's own could not start from one that comes with compile-stage."""
    assert load_policy(in_repository("extends: ['shipped:cpu-server']\n")).targets


def test_the_command_line_takes_roots_and_so_does_the_environment(outside: Path) -> None:
    """Broken: a pipeline could not say where its base lies."""
    path = in_repository(f"extends: [../outside/base.yaml]\n{TARGET}")

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "compile_stage", "lint", str(path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})

    assert (refused := run()).returncode == 2
    assert "s3cret" not in refused.stdout + refused.stderr
    assert run("--policy-root", str(outside)).returncode == 0
    assert run(COMPILE_STAGE_POLICY_ROOT=str(outside)).returncode == 0


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("data.validation.source", "data: {validation: {source: 'python:os:getcwd'}}\n"),
        (
            'tolerances.int8."python:os:getcwd"',
            "tolerances: {int8: {'python:os:getcwd': {limit: 1, direction: at_most}}}\n",
        ),
    ],
)
def test_functions_can_be_forbidden_to_the_policies_of_others(write: Write, where: str, text: str) -> None:
    """Broken: whoever writes a policy could run code, and the platform team could not keep them from it."""
    write("compliance: {allow_python: false}\nlocked: [compliance.allow_python]\n", "base.yaml")
    assert lint([write(TARGET + text, "free.yaml")]) == []
    [problem] = lint([write("extends: [base.yaml]\n" + TARGET + text)])
    assert f"{where}: a policy may name no Python function: compliance.allow_python is false (base.yaml:4)" in problem
    own = write("extends: [base.yaml]\ncompliance: {allow_python: true}\n" + TARGET + text)
    assert any("locked" in problem for problem in lint([own]))
