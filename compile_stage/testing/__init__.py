"""The conformance kit: what the author of a backend runs against it.

    from compile_stage.testing import check_backend, models

    @pytest.mark.parametrize("make", models.ALL)
    def test_my_backend(make, tmp_path):
        model, samples = make(tmp_path / "model")
        failed = [finding for finding in check_backend(MyBackend(), model, samples, tmp_path) if not finding.passed]
        assert not failed, failed

For a line of test output a check, parametrise over `CHECKS` with a `Case` of one scheme (`cases` lists them).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from compile_stage.core.ports import Backend
from compile_stage.core.records import PortableModel, SampleSet, Target, record
from compile_stage.testing import models
from compile_stage.testing.case import PRECISIONS, Case, cases, target_for
from compile_stage.testing.checks import CHECKS

__all__ = ["CHECKS", "PRECISIONS", "Case", "Finding", "cases", "check_backend", "check_case", "models", "target_for"]


@record
class Finding:
    """One check of one case. `reason` is empty when it passed."""

    check: str
    case: str
    passed: bool
    reason: str = ""


def check_backend(
    backend: Backend,
    model: PortableModel,
    samples: SampleSet,
    folder: Path,
    precisions: tuple[str, ...] = PRECISIONS,
    target: Target | None = None,
) -> tuple[Finding, ...]:
    """Every check on every scheme that suits the model; `folder` is for artifacts.

    A check that raises has failed, with what it raised as the reason.

    Args:
        target: What to compile for: a device, options. The CPU where the backend has it, else the first device that it
            declares (`target_for`).
    """
    found = tuple(
        finding for case in cases(backend, model, samples, folder, precisions, target) for finding in check_case(case)
    )
    # Nothing looked at is not a pass.
    nothing = Finding(
        check="schemes", case=backend.name, passed=False, reason="the backend declares no scheme for the model"
    )
    return found or (nothing,)


def check_case(case: Case) -> tuple[Finding, ...]:
    """Every check on one case."""
    found = []
    with contextlib.closing(case):
        for name, check in CHECKS.items():
            try:
                reason = check(case)
            except Exception as error:  # noqa: BLE001 - whatever a plug-in throws is the finding
                reason = f"{type(error).__name__}: {error}"
            found.append(Finding(check=name, case=str(case), passed=reason is None, reason=reason or ""))
    return tuple(found)
