"""Shell completion, asked by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(_COMPILE_STAGE_COMPLETE=bash_source compile-stage)"
COMP_WORDS=({words}) COMP_CWORD={at} COMPREPLY=()
_compile_stage_completion compile-stage
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

ZSH = """
autoload -U compinit; compinit -u -D
eval "$(_COMPILE_STAGE_COMPLETE=zsh_source compile-stage)"
print -r -- $_comps[compile-stage]
env COMP_WORDS="compile-stage ro" COMP_CWORD=1 _COMPILE_STAGE_COMPLETE=zsh_complete compile-stage
"""


@pytest.fixture
def path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `compile-stage` is this one."""
    script = tmp_path / "compile-stage"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m compile_stage "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def ask(shell: str, script: str, path: dict[str, str]) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-c", script], env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("compile-stage ro", ["rollback"]),
        ("compile-stage run --no-p", ["--no-publish", "--no-promote"]),
        ("compile-stage schema re", ["result"]),
        ("compile-stage rnu --", ["--version", "--help"]),
    ],
)
def test_bash_completes_commands_and_options(words: str, completed: list[str], path: dict[str, str]) -> None:
    """Broken: completion ended with 2 and `fix: compile-stage --help`, in every shell."""
    assert ask("bash", BASH.format(words=words, at=len(words.split()) - 1), path) == completed


def test_zsh_completes(path: dict[str, str]) -> None:
    function, *words = ask("zsh", ZSH, path)
    assert function == "_compile_stage_completion"
    assert words[:2] == ["plain", "rollback"]


def test_a_shell_that_is_not_known_is_wrong_usage(path: dict[str, str]) -> None:
    done = subprocess.run(
        ["compile-stage"],
        env=path | {"_COMPILE_STAGE_COMPLETE": "csh_source"},
        capture_output=True,
        text=True,
        check=False,
        executable=f"{path['HOME']}/compile-stage",
    )
    assert done.returncode == 2
    assert "fix: use bash_source, zsh_source or fish_source" in done.stderr
