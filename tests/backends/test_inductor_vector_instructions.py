"""Which vector instructions Inductor's code has, where the process that tries them gets no CPU time."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from compile_stage.backends import inductor
from compile_stage.core.errors import NothingCompiledError

pytest.importorskip("torch", reason="the backend inductor needs torch")

pytestmark = pytest.mark.skipif(not inductor._compiler_version(), reason="there is no C++ compiler here")


@pytest.fixture
def cpu_vec_isa() -> Iterator[Any]:
    """Inductor's module, imported by whoever runs these tests and not by every process that collects them: 1.7 CPU
    seconds. It knows the two narrowest sets that this machine has: one can be missed for the other, and each costs a
    library that a C++ compiler makes, 4 CPU seconds."""
    module = importlib.import_module("torch._inductor.cpu_vec_isa")
    here = module.x86_isa_checker()
    sets = [one for one in module.supported_vec_isa_list if all(flag in here for flag in str(one).split())]
    with pytest.MonkeyPatch.context() as narrowed:  # of its own: a test undoes its own changes before its end
        if len(sets) > 2:
            narrowed.setattr(module, "supported_vec_isa_list", sets[-2:])
        yield module


def forget(cpu_vec_isa: Any) -> None:
    kinds = {cls for one in cpu_vec_isa.supported_vec_isa_list for cls in type(one).__mro__}
    for kept in (cpu_vec_isa.valid_vec_isa_list, *(one for cls in kinds for one in vars(cls).values())):
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


@pytest.fixture
def widest(cpu_vec_isa: Any) -> Iterator[str]:
    """What is found on this machine when there is time for it."""
    forget(cpu_vec_isa)
    yield str(cpu_vec_isa.pick_vec_isa())
    forget(cpu_vec_isa)


def late_for(cpu_vec_isa: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The first processes that load a library, so many of them, take too long."""
    left = [times]

    def run(command: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.run(command, **options)

    stand_in = SimpleNamespace(**{name: getattr(subprocess, name) for name in subprocess.__all__} | {"run": run})
    monkeypatch.setattr(cpu_vec_isa, "subprocess", stand_in)
    forget(cpu_vec_isa)
    return left


def test_a_set_that_could_not_be_tried_in_time_is_tried_once_more(
    cpu_vec_isa: Any, widest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: Inductor's process got no CPU time for 60 s, AVX-512 was taken for missing, and the artifact was slower
    than on the same machine a minute later; the worker kept that for the next job too."""
    left = late_for(cpu_vec_isa, monkeypatch, 1)
    inductor._try_vector_instructions()
    assert left == [0]
    assert str(cpu_vec_isa.pick_vec_isa()) == widest


def test_what_can_not_be_tried_at_all_fails_with_its_name(
    cpu_vec_isa: Any, widest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an artifact without the machine's vector instructions, and no word of it."""
    late_for(cpu_vec_isa, monkeypatch, 1000)
    with pytest.raises(NothingCompiledError, match=f"could not tell whether this machine has .*{widest.split()[0]}"):
        inductor._try_vector_instructions()
    monkeypatch.undo()
    assert str(cpu_vec_isa.pick_vec_isa()) == widest, "what is not known is not kept"
