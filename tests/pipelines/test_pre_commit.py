"""The hooks for pre-commit: their definitions, and pre-commit itself running one in a repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipelines import shells

ROOT = Path(__file__).parents[2]
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}


def git(folder: Path, *arguments: str) -> None:
    options = ["-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_hooks_differ_only_in_who_installs_the_stage():
    """Broken: the same policy passes by one hook and fails by the other."""
    [installed, own] = HOOKS["compile-stage-lint"], HOOKS["compile-stage-lint-system"]
    assert (installed["language"], own["language"]) == ("python", "system")
    told = {"id", "name", "description", "language"}
    assert {k: v for k, v in installed.items() if k not in told} == {k: v for k, v in own.items() if k not in told}


def test_the_example_in_the_readme_names_a_hook():
    """Broken: what is copied from the page is refused."""
    text = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n# \.pre-commit-config\.yaml\n(.*?)```", text, flags=re.DOTALL)
    assert {hook["id"] for repo in yaml.safe_load(example)["repos"] for hook in repo["hooks"]} <= set(HOOKS)


def test_the_entry_checks_the_files_that_it_is_given(tmp_path, registered):
    """Broken: a wrong policy is committed."""
    wrong = tmp_path / "wrong $(touch pwned).yaml"
    wrong.write_text(registered.policy.read_text(encoding="utf-8").replace("owner: tests", "ownr: tests"))
    entry = shlex.split(HOOKS["compile-stage-lint"]["entry"])
    assert shells.run([*entry, str(registered.policy)], tmp_path, {}).returncode == 0
    done = shells.run([*entry, str(registered.policy), str(wrong)], tmp_path, {})
    assert done.returncode == 2
    assert f"{wrong.name}:4:1" in done.stderr
    assert not (tmp_path / "pwned").exists()


@pytest.mark.orchestrators
def test_pre_commit_refuses_a_commit_with_a_wrong_policy(orchestrator: Callable[[str], Path], tmp_path, registered):
    """Broken: pre-commit can't read the hooks, or finds no policy among the files."""
    hooks, mine = tmp_path / "hooks", tmp_path / "mine"
    for folder in (hooks, mine / "policies"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    shutil.copy(registered.policy, mine / "policies" / "small one.yaml")
    (mine / "other.yaml").write_text("no: policy\n", encoding="utf-8")
    for folder in (hooks, mine):
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "first")

    def try_repo() -> subprocess.CompletedProcess[str]:
        program = str(orchestrator("pre-commit") / "pre-commit")
        command = [program, "try-repo", str(hooks), "compile-stage-lint-system", "--all-files", "--verbose"]
        return shells.run(command, mine, {"PRE_COMMIT_HOME": str(tmp_path / "home"), "HOME": os.environ["HOME"]})

    done = try_repo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small one.yaml: ok" in done.stdout
    assert "other.yaml" not in done.stdout
    (mine / "policies" / "small one.yaml").write_text("kind: Nonsense\n", encoding="utf-8")
    git(mine, "add", "-A")
    done = try_repo()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "small one.yaml:1:7" in done.stdout
