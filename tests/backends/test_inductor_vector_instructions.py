"""Which vector instructions Inductor's code has, where the process that tries them gets no CPU time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from compile_stage.backends import inductor
from compile_stage.core.errors import NothingCompiledError

pytest.importorskip("torch", reason="the backend inductor needs torch")
cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")

pytestmark = pytest.mark.skipif(not inductor._compiler_version(), reason="there is no C++ compiler here")


def forget() -> None:
    kinds = {cls for one in cpu_vec_isa.supported_vec_isa_list for cls in type(one).__mro__}
    for kept in (cpu_vec_isa.valid_vec_isa_list, *(one for cls in kinds for one in vars(cls).values())):
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


@pytest.fixture
def widest() -> Iterator[str]:
    """What is found on this machine when there is time for it."""
    forget()
    yield str(cpu_vec_isa.pick_vec_isa())
    forget()


def late_for(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The first processes that load a library, so many of them, take too long."""
    left = [times]

    def run(command: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.run(command, **options)

    stand_in = SimpleNamespace(**{name: getattr(subprocess, name) for name in subprocess.__all__} | {"run": run})
    monkeypatch.setattr(cpu_vec_isa, "subprocess", stand_in)
    forget()
    return left


def test_a_set_that_could_not_be_tried_in_time_is_tried_once_more(widest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: Inductor's process got no CPU time for 60 s, AVX-512 was taken for missing, and the artifact was slower
    than on the same machine a minute later; the worker kept that for the next job too."""
    left = late_for(monkeypatch, 1)
    inductor._try_vector_instructions()
    assert left == [0]
    assert str(cpu_vec_isa.pick_vec_isa()) == widest


def test_what_can_not_be_tried_at_all_fails_with_its_name(widest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an artifact without the machine's vector instructions, and no word of it."""
    late_for(monkeypatch, 1000)
    with pytest.raises(NothingCompiledError, match=f"could not tell whether this machine has .*{widest.split()[0]}"):
        inductor._try_vector_instructions()
    monkeypatch.undo()
    assert str(cpu_vec_isa.pick_vec_isa()) == widest, "what is not known is not kept"
