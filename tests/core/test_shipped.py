"""The policies that come with compile-stage, for those who have no checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage.core import shipped
from compile_stage.core.errors import UsageError
from compile_stage.policy.load import lint, load_policy


@pytest.mark.parametrize("name", shipped.policy_names())
def test_a_shipped_policy_works_by_name_and_as_a_copy(name: str, tmp_path: Path) -> None:
    """Broken: the README's `policies/cpu-server.yaml` isn't there for who installed a wheel, and a copy of it misses
    what it extends."""
    copy = tmp_path / "policy.yaml"
    copy.write_text(shipped.policy_text(name))
    assert lint([copy]) == []
    assert load_policy(copy, base=True).digest == load_policy(shipped.policy_file(f"shipped:{name}"), base=True).digest
    assert 10 < len(shipped.policy_summary(name)) < 130


def test_a_name_that_is_not_shipped_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        shipped.policy_file("shipped:cpu-sever")
    assert error.value.fix == "did you mean shipped:cpu-server?"
    policy = tmp_path / "policy.yaml"
    policy.write_text('apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: x\nextends: ["shipped:nothing"]\n')
    assert any("compile-stage ships no policy 'nothing'" in problem for problem in lint([policy]))
