from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import pytest

from compile_stage.policy.load import findings
from compile_stage.policy.nodes import Place

TODAY = date(2026, 6, 1)

HEAD = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: p
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a policy file below the current folder, so that messages show short names; `head` adds what every policy
    needs."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "p.yaml", *, head: bool = True) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = text if isinstance(text, bytes) else ((HEAD if head else "") + text).encode()
        path.write_bytes(raw)
        return path

    return write


def warnings(path: Path, sets: Sequence[str] = (), *, today: date = TODAY) -> list[str]:
    """As `lint` prints them, of a policy without mistakes."""
    found = findings(path, sets, today=today)
    assert {one.level for one in found} <= {"warning"}, found
    return [f"{Place(one.file, one.line, one.column)}: {one.message}" for one in found]
