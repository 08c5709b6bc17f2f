"""Below which folders `extends` may name files.

Whoever opens a pull request writes the policy that a pipeline then reads, with the pipeline's rights. So a policy's
layers come from the repository that it lies in; without one from its own folder; and from folders that the command line
names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from compile_stage.core import shipped
from compile_stage.core.errors import UsageError


class Roots:
    """The folders below which the layers of one policy may lie.

    Args:
        policy: The policy that the command line names.
        named: What `--policy-root` names.

    Raises:
        UsageError: A named one is no folder.
    """

    def __init__(self, policy: str | os.PathLike[str], named: Sequence[str | os.PathLike[str]] = ()) -> None:
        for folder in named:
            if not Path(folder).is_dir():
                raise UsageError("--policy-root names no folder", fix="name one that is there", where=os.fspath(folder))
        self.own = _root_of(policy)
        self._folders = tuple(Path(os.path.realpath(folder)) for folder in (self.own, *named, *_shipped()))

    def hold(self, file: str | os.PathLike[str]) -> bool:
        """True for a file below one of the folders, wherever links lead. Whether it is there is not looked at."""
        real = Path(os.path.realpath(file))
        return any(real.is_relative_to(folder) for folder in self._folders)


def _root_of(policy: str | os.PathLike[str]) -> Path:
    """The nearest folder above that is a Git checkout's, or the policy's own."""
    own = Path(os.path.abspath(policy)).parent  # noqa: PTH100 - a link is followed when folders are compared
    return next((folder for folder in (own, *own.parents) if (folder / ".git").exists()), own)


def _shipped() -> tuple[Path, ...]:
    try:
        return (shipped.folder("policies"),)
    except UsageError:
        return ()
