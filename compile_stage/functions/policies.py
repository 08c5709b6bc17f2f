"""What can be said of policy files without a model: their mistakes, and how two differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_stage.core.remote_plugins import release
from compile_stage.core.shipped import policy_file
from compile_stage.policy.load import load_policy

if TYPE_CHECKING:
    from compile_stage.report.compare import Difference

PathLike = str | os.PathLike[str]


def lint(*policies: PathLike) -> list[str]:
    """Every mistake in these policy files, as `file:line:column: path: what is wrong; what is allowed`; empty when they
    are valid.

    Args:
        policies: Files, or `shipped:NAME`.
    """
    from compile_stage.policy.load import lint as lint_files

    try:
        return lint_files([policy_file(policy) for policy in policies])
    finally:
        release()


def compare_policies(
    before: PathLike, after: PathLike, *, policy_roots: Sequence[PathLike] = ()
) -> tuple[Difference, ...]:
    """Which resolved values differ, and which jobs come and go (`job`), between two policy files; nothing is opened or
    compiled.

    Raises:
        PolicyError: One of them has mistakes.
    """
    from compile_stage.policy.explain import explain
    from compile_stage.report.compare import differences

    files = [policy_file(path) for path in (before, after)]
    values = [{row.path: row.value for row in explain(file, roots=policy_roots)} for file in files]
    jobs = []
    for file in files:
        targets = [one.target for one in load_policy(file, roots=policy_roots).targets]
        pairs = [(t.name, backend, kind) for t in targets for backend in t.backends for kind in t.precisions]
        jobs.append({" ".join(pair): "asked for" for pair in pairs})
    return (*differences("policy", *values), *differences("job", *jobs))
