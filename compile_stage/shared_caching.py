"""The shared cache of a run: at which address, and who vouches for its entries."""

from __future__ import annotations

from compile_stage.core.records import Compliance
from compile_stage.core.shared_cache import SharedCache, is_named, shared_cache
from compile_stage.serving.trust import merged_trust, trust_of_environment
from compile_stage.signing.cache_seal import seal_of
from compile_stage.signing.signers import Signer, signer_of


def open_shared(
    url: str | None = None, signer: Signer | None = None, compliance: Compliance | None = None
) -> SharedCache | None:
    """The shared cache at `url`, or at `$COMPILE_STAGE_SHARED_CACHE`; None where there is none.

    Args:
        signer: Of the run; None for the one that `$COMPILE_STAGE_SIGNING_KEY` names.
        compliance: Of the policy, whose trusted keys count beside `$COMPILE_STAGE_TRUST`.

    Raises:
        UsageError: It is no address of a shared cache, or a key can't be read.
        MissingDependencyError: A package for the address or for the key is not installed.
    """
    if not is_named(url):
        return None
    trust = merged_trust(compliance.trusted_keys if compliance is not None else (), trust_of_environment())
    return shared_cache(seal_of(signer or signer_of(), trust), url)
