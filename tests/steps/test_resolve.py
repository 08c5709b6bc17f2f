"""URI → source model."""

from __future__ import annotations

from pathlib import Path

import factories
import pytest

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError
from compile_stage.steps.resolve import resolve_made_from


def test_an_original_that_is_gone_is_said_to_be_what_is_missing(tmp_path: Path) -> None:
    """Broken: `verify` of a version that is there says "there is no version 7", and nobody sees that it means the
    original, without which its files can still be checked."""
    made_from = {"uri": f"folder:{tmp_path}/fraud/7", "digest": "sha256:d"}
    with pytest.raises(RegistryError, match="the source that it was made from can't be had any more") as caught:
        resolve_made_from(factories.run_context(tmp_path), made_from)
    assert caught.value.code is Code.NOT_IN_REGISTRY
    assert "--no-revalidate" in str(caught.value.fix)
