"""An alias that waits for somebody's approval."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.core.errors import GateError, IntegrityError

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

BODY = """\
performance: {min_speedup: null}
budget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}
promote: {alias: prod, approval: release.by, approvers: [ann, bo]}
"""


def tag(uri: str, **tags: str) -> None:
    """Set tags of a version in a folder registry, as people do there: in its file."""
    file = Path(uri.removeprefix("folder:")) / "version.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps({**described, "tags": {**described["tags"], **tags}}))


@pytest.mark.slow
@pytest.mark.usefixtures("known_original")
def test_an_alias_waits_for_a_name_from_the_list(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: what nobody approved would be promoted, by the run or by hand; or what was approved never would be."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    held = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    receipt = held.targets[0].receipt
    assert receipt is not None
    assert (held.exit_code, receipt.promoted_to) == (0, None)
    assert f"waiting for approval: set the tag release.by=ann or bo on {receipt.uri}" in receipt.note
    assert receipt.note in (tmp_path / "out" / "report.md").read_text().replace("`", "")

    with pytest.raises(GateError, match="waiting for approval, so it can't be promoted") as error:
        api.promote(receipt.uri, "prod", serve_check=False)
    assert error.value.fix == f"set the tag release.by=ann or bo on {receipt.uri}"
    tag(receipt.uri, **{"release.by": "carol"})
    with pytest.raises(GateError, match=r"its tag release\.by is 'carol'"):
        api.promote(receipt.uri, "prod", serve_check=False)
    tag(receipt.uri, **{"release.by": "bo", "compile_stage.approval": "some.other"})
    with pytest.raises(IntegrityError, match=r"compile_stage\.approval says 'some\.other'"):
        api.promote(receipt.uri, "prod", serve_check=False)
    tag(receipt.uri, **{"compile_stage.approval": "release.by"})
    assert api.promote(receipt.uri, "prod", serve_check=False).promoted_to == "prod"


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{approvers: [ann]}", "promote.approval names no tag, so nobody is asked"),
        ("{alias: prod, approval: compile_stage.ok}", "'compile_stage.ok' is compile-stage's own"),
    ],
)
def test_approvals_that_nobody_could_give_are_refused(
    small_model: Path, write_policy: Callable[..., Path], section: str, says: str
) -> None:
    """Broken: a policy whose author thinks that somebody is asked would promote without; or wait for ever."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", f"promote: {section}")
    assert any(says in problem for problem in api.lint(policy))


def test_a_policy_without_approval_has_the_digest_that_it_had(write_policy: Callable[..., Path]) -> None:
    """Broken: each policy would get another digest, and each model a second published version."""
    from compile_stage.core.digest import plain
    from compile_stage.policy.convert import _without_origins
    from compile_stage.policy.load import load_policy

    (write_policy("backends: [onnxruntime], precisions: [fp32]").parent / "data.npz").touch()
    policy = load_policy(write_policy("backends: [onnxruntime], precisions: [fp32]", "promote: {alias: prod}"))
    assert _without_origins(plain(policy.targets[0].promote)) == {"alias": "prod", "max_slowdown": 1.02}
