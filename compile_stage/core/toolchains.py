"""Where the isolated environment of a backend or source is, if it has one.

Compilers and frameworks pin packages that exclude each other. So a backend or source may bring a lock file, and run in
an environment that holds exactly that: its toolchain, made by `compile-stage toolchain install NAME`
(`engine.toolchains`). Here it is only found.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from compile_stage.core.digest import digest_file
from compile_stage.core.records import record

READY = "toolchain.json"
"""Written last: an environment without it is one whose making was interrupted."""


@record
class Toolchain:
    """An environment that is there.

    Attributes:
        digest: Of the lock file that it was made from.
        folder: The environment.
        interpreter: Its Python executable.
        packages: Distribution → version of what it holds.
    """

    name: str
    digest: str
    folder: str
    interpreter: str
    packages: dict[str, str]


def toolchains_root() -> Path:
    """`$COMPILE_STAGE_TOOLCHAINS`, or a folder in the user's data."""
    if named := os.environ.get("COMPILE_STAGE_TOOLCHAINS"):
        return Path(named).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("compile-stage") / "toolchains"


def lock_in_force(name: str, shipped: Path) -> Path | None:
    """The lock file that counts: the user's own (`toolchain lock`), or the one that comes with the plug-in. None when
    there is neither."""
    return next((file for file in (users_lock(name), shipped) if file.is_file()), None)


def users_lock(name: str) -> Path:
    """Where the user's own lock of a toolchain lies."""
    return toolchains_root() / "locks" / f"{name}.txt"


def is_toolchain_name(name: str) -> bool:
    """True for what can be a part of a folder's name, and of no path that leads elsewhere."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def place(name: str, lock: Path) -> Path:
    """The folder of the environment that a lock makes: another lock, another folder."""
    return toolchains_root() / f"{name}-{digest_file(lock)[7:19]}"


def interpreter_in(folder: Path) -> Path:
    """The Python executable of a virtual environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def find(name: str, lock: Path | None) -> Toolchain | None:
    """The environment that was made from the lock; None when it was not made, or not to its end."""
    if lock is None:
        return None
    folder = place(name, lock)
    try:
        packages = json.loads((folder / READY).read_text(encoding="utf-8"))["packages"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    interpreter = interpreter_in(folder)
    if not interpreter.exists():
        return None
    return Toolchain(
        name=name, digest=digest_file(lock), folder=str(folder), interpreter=str(interpreter), packages=packages
    )
