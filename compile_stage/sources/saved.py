"""Estimators in files that may run code when they are loaded: skops archives and pickles."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, SourceModel

KNOWN_PACKAGES = frozenset({"sklearn", "numpy", "scipy", "_loss", "collections"})
"""Packages of which a skops file may hold declared types: scikit-learn, and what it is built on."""


def refuse(
    path: Path,
    serialization_format: str,
    trusted: Collection[str],
    compliance: Compliance,
    packages: Collection[str] = KNOWN_PACKAGES,
) -> str | None:
    """The reason why a file must not be loaded under this policy.

    Args:
        trusted: Types that the model's author declared. The list comes with the model, so it can't vouch for code
            outside of `packages`.
    """
    if compliance.allow_pickle:
        return None
    if serialization_format != "skops":
        return (
            "it is a pickle, and pickled models execute code when loaded: log it with serialization_format='skops', "
            "or set compliance.allow_pickle in the policy"
        )
    import skops.io

    try:
        unknown = set(skops.io.get_untrusted_types(file=path))
    except Exception as error:  # noqa: BLE001 - a broken archive may raise anything
        return f"its skops file can't be read: {error}"
    undeclared = sorted(unknown - set(trusted))
    if undeclared:
        return (
            f"its skops file holds types that nobody declared as trusted ({', '.join(undeclared[:5])}): "
            "log it with skops_trusted_types=[...], or set compliance.allow_pickle in the policy"
        )
    foreign = sorted(name for name in unknown if name.partition(".")[0] not in packages)
    if foreign:
        return (
            f"its skops file holds types of other packages ({', '.join(foreign[:5])}), whose code runs when they are loaded: "
            "set compliance.allow_pickle in the policy if you trust where it comes from"
        )
    return None


def load(path: Path, serialization_format: str, source: SourceModel, logged_with: str) -> Any:
    """The estimator. The caller has asked `refuse`, so a file that could run code is one that the policy allows.

    Args:
        logged_with: Package and version that wrote it, for the message when it can't be read.
    """
    try:
        with warnings.catch_warnings():
            # Of other versions: an incompatible one raises, or differs from what validation expects.
            warnings.simplefilter("ignore")
            if serialization_format == "skops":
                import skops.io

                return skops.io.load(path, trusted=skops.io.get_untrusted_types(file=path))
            import cloudpickle  # type: ignore[import-untyped]

            with path.open("rb") as stream:
                return cloudpickle.load(stream)
    except Exception as error:
        raise SourceError(
            f"it can't be loaded: {type(error).__name__}: {error}",
            fix=f"it was logged with {logged_with}: install that version, or log it again",
            where=source.uri,
        ) from error
