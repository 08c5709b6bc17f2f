"""How a death is named, for those that a test can't bring about: the kernel's own out-of-memory kill."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from compile_stage.core import control_groups
from compile_stage.engine.watch import MemoryWatch, free_memory_bytes, gigabytes, kernel_oom_kills, name_death

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("returncode", "held", "oom_kills", "log", "kind"),
    [
        (-signal.SIGKILL, GB // 10, 0, "", "crash"),
        (-signal.SIGKILL, GB // 10, 1, "", "out_of_memory"),  # the kernel counts one more
        (-signal.SIGKILL, 9 * GB // 10, 0, "", "out_of_memory"),  # nearly at its limit, and the kernel does not say
        (-signal.SIGKILL, GB // 10, 0, "std::bad_alloc", "crash"),  # words in a log explain no kill
        (-signal.SIGABRT, 0, 0, "what():  std::bad_alloc", "out_of_memory"),
        (-signal.SIGABRT, 0, 0, "assertion failed", "crash"),
        (-signal.SIGSEGV, 9 * GB // 10, 1, "out of memory", "crash"),
        (-signal.SIGILL, 0, 0, "", "crash"),
        (-63, 0, 0, "", "crash"),  # a signal without a name
        (1, 0, 1, "", "crash"),
    ],
)
def test_name_death(returncode: int, held: int, oom_kills: int, log: str, kind: str) -> None:
    found, words = name_death(returncode, held_bytes=held, limit_bytes=GB, oom_kills=oom_kills, log=log)
    assert found == kind
    assert ("signal" if returncode < 0 else "exit code") in words


def test_machine_smaller_than_the_limit() -> None:
    """A limit that the machine can't even hold must not hide that memory ran out."""
    total = psutil.virtual_memory().total
    kind, _ = name_death(-9, held_bytes=int(total * 0.9), limit_bytes=100 * total, oom_kills=0, log="")
    assert kind == "out_of_memory"


def test_own_process_has_a_size() -> None:
    """A watch that sees nothing would never end anybody."""
    watch = MemoryWatch(psutil.Process().pid, limit_bytes=1_000_000)
    held = watch.excess()
    assert held is not None
    assert 5_000_000 < held < psutil.virtual_memory().total
    assert MemoryWatch(psutil.Process().pid, limit_bytes=psutil.virtual_memory().total).excess() is None


def test_process_that_is_gone_has_none() -> None:
    watch = MemoryWatch(2**22 - 1, limit_bytes=1)
    assert watch.excess() is None
    watch.kill()


def test_figures() -> None:
    assert (gigabytes(12_340_000_000), gigabytes(300_000_000)) == ("12.3 GB", "300 MB")
    assert kernel_oom_kills() >= 0


def test_a_containers_limit_counts_and_the_files_it_read_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: in a container of 2 GB on a machine of 64, jobs side by side would be killed; or one that read a large
    file would run alone."""
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    outside = free_memory_bytes()
    (tmp_path / "memory.max").write_text("50000000")
    (tmp_path / "memory.current").write_text("30000000")
    (tmp_path / "memory.stat").write_text("anon 9\ninactive_file 5000000\n")
    assert free_memory_bytes() == 25_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() == pytest.approx(outside, rel=0.5)
