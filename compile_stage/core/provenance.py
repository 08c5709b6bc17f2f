"""Where a bundle comes from, as far as this machine knows: whether what stands in it may be run here.

A bundle's digests are its own, so they hold for whatever somebody put into it. What vouches for it is the registry that
this machine is set up for, or that it was packaged here.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache import cache_secret
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import UsageError
from compile_stage.core.uris import is_uri

_FOLDER = "packaged"
_CODE = "python:"  # samples and metrics that are functions


def remember_packaged(digest: str) -> None:
    """Note that a bundle whose `data/` has this digest was packaged by this user, on this machine; with a MAC where the
    cache has a secret."""
    folder = cache_root() / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest[7:]).write_text(_mac(digest), encoding="ascii")


def demand_no_code(uri: str, data: Path, manifest: Mapping[str, Any]) -> None:
    """Raise UsageError for a model that `refuse_code` refuses."""
    if (reason := refuse_code(uri, data, manifest)) is not None:
        raise UsageError(
            reason,
            fix="verify --no-revalidate compares the files only; --allow-code runs it, if you trust where it comes "
            "from",
            where=uri,
        )


def refuse_code(uri: str, data: Path, manifest: Mapping[str, Any]) -> str | None:
    """None when a published model may be run here, or the reason: it is executable, and nobody vouches for it whom this
    machine knows.

    Args:
        uri: Of the version, or the folder of a bundle.
        data: Its `data/` folder.
    """
    in_registry = is_uri(uri) and plugins.registry_for(uri).is_configured(uri)
    if in_registry or _was_packaged_here(data) or (code := _code_in(manifest)) is None:
        return None
    return f"it was not packaged on this machine, and comes from no registry that this machine is set up for; {code}"


def _was_packaged_here(data: Path) -> bool:
    digest = digest_tree(data)
    try:
        noted = (cache_root() / _FOLDER / digest[7:]).read_bytes()
    except OSError:
        return False
    return cache_secret() is None or hmac.compare_digest(noted, _mac(digest).encode())


def _mac(digest: str) -> str:
    """Empty without a secret."""
    secret = cache_secret()
    return hmac.new(secret, f"packaged {digest}".encode(), hashlib.sha256).hexdigest() if secret is not None else ""


def _code_in(manifest: Mapping[str, Any]) -> str | None:
    """What of a published model runs code that came with it, or that it names, when it is validated again; None when
    nothing does."""
    backend = str(manifest["job"]["backend"])
    if plugins.load("backends", backend).capabilities.artifact_is_code:
        return f"its artifact, of {backend}, is executable"
    if manifest.get("answer", {}).get("python_model"):
        return "it is a custom pyfunc, whose own code runs when it is loaded"
    spec = manifest["data"]["spec"]
    named = [str(spec[role]["source"]) for role in ("validation", "calibration") if role in spec]
    named += [str(gate["metric"]) for gate in manifest["job"]["gates"]]
    function = next((name for name in named if name.startswith(_CODE)), None)
    return f"its manifest names the function {function}" if function else None
