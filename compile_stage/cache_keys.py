"""Keys under which a CI system keeps the step cache and the toolchains between jobs.

A key says all that decides what is in the folder; its beginnings are what a CI system may restore instead, since the
step cache looks at every entry's own key, and a toolchain at its lock's digest: what does not fit is not used.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.context import code_digest
from compile_stage.core.digest import digest_file, digest_of
from compile_stage.core.environment import hardware, python_version
from compile_stage.core.records import Policy, record
from compile_stage.core.toolchains import toolchains_root

_SHORT = 16  # hexadecimal digits: 64 bits, of the few keys that a repository's CI has


@record
class CacheKey:
    """What a CI system needs to keep one folder.

    Attributes:
        key: Letters, digits, `.`, `_` and `-`; parts are separated by `-`, the one that changes most often is last.
        restore_keys: Beginnings of keys whose content is of use too, the nearest first; each ends with `-`.
        path: The folder to keep.
        parts: What the key was made from, by name.
    """

    key: str
    restore_keys: tuple[str, ...]
    path: str
    parts: dict[str, str]


def cache_key(policy: Policy) -> CacheKey:
    """The key of the step cache: this machine's hardware, all packages and locks with our own code, and the policy.

    Nothing is restored from other hardware: measurements and most artifacts hold for the machine that made them.
    """
    installed = {str(one.metadata["Name"]): one.version for one in distributions()}
    packages = digest_of(
        {"packages": installed, "code": code_digest(), "python": python_version(), "locks": _locks(policy)}
    )
    parts = {"hardware": hardware().fingerprint, "packages": _short(packages), "policy": _short(policy.digest)}
    beginnings = [f"compile-stage-{parts['hardware']}-", f"compile-stage-{parts['hardware']}-{parts['packages']}-"]
    key = f"{beginnings[-1]}{parts['policy']}"
    return CacheKey(key=key, restore_keys=tuple(reversed(beginnings)), path=str(cache_root()), parts=parts)


def toolchains_key(policy: Policy) -> CacheKey:
    """The key of the toolchains' folder: the system, the Python that makes them and where it is, and the digests of the
    locks of every source's toolchain and of the backends that the policy names.

    An environment can't be moved, and needs the very Python that made it, so neither folder nor Python may change.
    """
    machine = hardware()
    root = toolchains_root()
    locks = _locks(policy)
    place = digest_of({"python": python_version(), "at": sys.base_prefix, "root": str(root)})
    parts = {
        "system": f"{machine.system}-{machine.machine}",
        "python": _short(place),
        "locks": _short(digest_of(locks)),
    }
    beginning = f"compile-stage-toolchains-{parts['system']}-{parts['python']}-"
    return CacheKey(
        key=f"{beginning}{parts['locks']}", restore_keys=(beginning,), path=str(root), parts={**parts, **locks}
    )


def _locks(policy: Policy) -> dict[str, str]:
    """`lock of NAME` → digest of the lock file in force, of the toolchains that the policy can make use of."""
    named = {backend for one in policy.targets for backend in one.target.backends}
    wanted = {}
    for name, users in plugins.users_of_toolchains().items():
        of_sources = any(user.name in plugins.names("sources") for user in users)
        lock = plugins.lock_of(name)
        if lock is not None and (of_sources or "auto" in named or named & {user.name for user in users}):
            wanted[f"lock of {name}"] = digest_file(lock)
    return wanted


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:_SHORT]
