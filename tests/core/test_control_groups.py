"""Limits of containers, services and batch jobs, as both versions of the kernel's control groups tell them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from compile_stage.core import control_groups
from compile_stage.core.control_groups import cores_to_fill, cpu_limit, held_back_s, memory_left_bytes, oom_kills
from compile_stage.core.environment import available_cores

SECOND = {
    "cpu.max": "50000 100000\n",
    "cpu.stat": "usage_usec 7\nthrottled_usec 2500000\n",
    "memory.max": "50000000\n",
    "memory.current": "30000000\n",
    "memory.stat": "anon 9\ninactive_file 5000000\n",
    "memory.events": "oom 4\noom_kill 3\n",
}
FIRST = {
    "cpu/{}cpu.cfs_quota_us": "50000\n",
    "cpu/{}cpu.cfs_period_us": "100000\n",
    "cpu/{}cpu.stat": "nr_throttled 9\nthrottled_time 2500000000\n",
    "memory/{}memory.limit_in_bytes": "50000000\n",
    "memory/{}memory.usage_in_bytes": "30000000\n",
    "memory/{}memory.stat": "rss 9\ntotal_inactive_file 5000000\n",
    "memory/{}memory.oom_control": "under_oom 0\noom_kill 3\n",
}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup."""
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    return tmp_path


def write(root: Path, own: str, files: dict[str, str]) -> None:
    (root / "own").write_text(own, encoding="utf-8")
    for name, text in files.items():
        file = root / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", SECOND),  # a container
        ("0::/job.slice/step\n", {f"job.slice/{name}": text for name, text in SECOND.items()}),  # the limit lies around
        ("4:memory:/docker/1a\n1:cpu,cpuacct:/docker/1a\n0::/\n", {k.format(""): v for k, v in FIRST.items()}),
        ("4:memory:/batch/7\n1:cpu:/batch/7\n0::/\n", {k.format("batch/7/"): v for k, v in FIRST.items()}),
    ],
)
def test_limits_are_read_from_both_versions_in_and_outside_of_containers(
    groups: Path, own: str, files: dict[str, str]
) -> None:
    """Broken: on a node of 64 cores, a container that may use two would compile 64 candidates at once; in a batch job
    of 2 GB, jobs side by side would be killed, and the error would say that memory was not short."""
    write(groups, own, files)
    assert (cpu_limit(), cores_to_fill(), held_back_s()) == (0.5, 1, 2.5)
    assert (memory_left_bytes(), oom_kills()) == (25_000_000, 3)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("", {}),  # another system
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "7\n"}),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
        ("0::/../../elsewhere\n", {}),
    ],
)
def test_without_a_limit_nothing_is_limited(groups: Path, own: str, files: dict[str, str]) -> None:
    """Broken: a run outside of containers would end with an error, or use one core."""
    write(groups, own, files)
    assert (cpu_limit(), cores_to_fill(), held_back_s()) == (math.inf, available_cores(), 0.0)
    assert (memory_left_bytes(), oom_kills()) == (None, None)
