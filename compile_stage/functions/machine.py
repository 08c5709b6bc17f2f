"""What a user sets up on a machine, and sees of it: a first policy, `doctor`, toolchains."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.errors import UsageError
from compile_stage.core.remote_plugins import release
from compile_stage.core.run_context import open_context

if TYPE_CHECKING:
    from compile_stage.cluster.survey import Survey
    from compile_stage.core.toolchains import Toolchain
    from compile_stage.engine.toolchains import State
    from compile_stage.installation import DoctorReport

PathLike = str | os.PathLike[str]


def init(
    model_uri: str,
    *,
    name: str = "cpu",
    data: PathLike | None = None,
    labels: str | None = None,
    folder: PathLike = ".",
    allow_pickle: bool = False,
) -> str:
    """The text of a first policy for a model: its inputs, the samples of its run or of a file, and what this machine
    has, written down with comments that say where each value is from.

    Args:
        name: Of the policy, and of its one target.
        data: A file of samples (.npz, .parquet, .csv); by default the data sets of the model's run.
        labels: The array or column of `data` that holds labels; by default the one that is no input.
        folder: Where the policy will lie: the path of `data` is written relative to it.
        allow_pickle: The model may be a pickle, which runs code of its own; the policy says so too.

    Raises:
        RegistryError: The model can't be had.
        SourceError: The model is refused.
        UsageError: `data` can't be read or has no such labels, or no backend that is installed takes the model.
    """
    from compile_stage.first_policy import Given, first_policy

    given = Given(Path(data), os.path.relpath(data, folder), labels) if data is not None else None
    with open_context(None, "local") as context:
        return first_policy(context, model_uri, name, given, allow_pickle=allow_pickle)


def doctor() -> DoctorReport:
    """What this machine has, what is missing, and the command that brings it."""
    from compile_stage.installation import examine

    try:
        return examine()
    finally:
        release()


def survey(engine: str, policy_path: PathLike | None = None) -> Survey:
    """What the nodes of an engine's cluster have, and which of them each target of a policy would be measured on.

    Args:
        engine: `ray`.

    Raises:
        UsageError: There is no such cluster, or the engine has none.
        PolicyError: The policy is wrong.
    """
    from compile_stage.core import plugins
    from compile_stage.core.shipped import policy_file
    from compile_stage.policy.load import load_policy

    policy = load_policy(policy_file(policy_path)) if policy_path is not None else None
    with closing(plugins.load("engines", engine)) as runner:
        plugins.demand(runner)
        ask = getattr(runner, "survey", None)
        if ask is None:
            raise UsageError(f"the engine {engine!r} has no other machines", fix="compile-stage doctor, for this one")
        found: Survey = ask(policy)
        return found


def toolchains() -> tuple[State, ...]:
    """Every backend that has an isolated environment of its own, and what there is of it."""
    from compile_stage.engine.toolchains import states

    return states()


def install_toolchain(name: str, say: Callable[[str], None] = lambda _: None) -> Toolchain:
    """Make a backend's environment, unless it is there.

    Args:
        say: Hears what is done, a line each.

    Raises:
        UsageError: There is no such backend, or it has no toolchain.
        MissingDependencyError: A package can't be had or imported.
    """
    from compile_stage.engine.toolchains import install

    return install(name, say)


def lock_toolchain(name: str, out: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """Pin the newest versions for a backend's environment; returns the lock file, by default the user's own. Raises as
    `install_toolchain`."""
    from compile_stage.engine.toolchains import lock

    return lock(name, out, say)


def remove_toolchain(name: str) -> tuple[str, ...]:
    """Delete a toolchain's environments; returns their folders. Raises UsageError as `install_toolchain`."""
    from compile_stage.engine.toolchains import remove

    return remove(name)
