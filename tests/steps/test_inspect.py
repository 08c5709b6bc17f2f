"""What a refusal of a model says where no policy is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import factories
import pytest

from compile_stage.core.errors import SourceError
from compile_stage.steps.export import inspect_published


class RefusingWorker:
    """Refuses every model with one reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def call(self, function: str, /, **_: Any) -> Any:
        assert function == "inspect_source"
        raise SourceError(self.reason)


@pytest.mark.parametrize(
    ("reason", "allowed", "named"),
    [
        ("it is a pickle: set compliance.allow_pickle in the policy", False, True),
        ("it is a pickle: set compliance.allow_pickle in the policy", True, False),
        ("it has no predict()", False, False),
    ],
)
def test_a_pickle_of_a_published_version_is_allowed_by_an_option(
    tmp_path: Path, reason: str, *, allowed: bool, named: bool
) -> None:
    """Broken: whoever verifies a version is sent to a policy that nothing reads."""
    worker: Any = RefusingWorker(reason)
    with pytest.raises(SourceError) as refused:
        inspect_published(factories.run_context(tmp_path), worker, factories.source(), allow_pickle=allowed)
    assert ("--allow-pickle" in refused.value.fix) is named
