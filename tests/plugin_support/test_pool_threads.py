"""A pool's threads have a core each, and whoever calls leaves it to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(_CORES) < 2, reason="needs Linux, and two cores to pin threads to")

# In a process of its own, which may use two cores: a runtime's pool is played by threads that sleep.
_PROGRAM = """
import json, os, threading
cores = {cores}
os.sched_setaffinity(0, cores)
from compile_stage.plugin_support.pool_threads import PoolCores
pool, end = PoolCores(), threading.Event()
threads = [threading.Thread(target=end.wait, daemon=True) for _ in range({started})]
with pool.pinned({threads}, wanted={wanted}):
    for thread in threads:
        thread.start()
core_of = lambda: int(open("/proc/thread-self/stat").read().rpartition(")")[2].split()[36])
os.sched_setaffinity(0, {{cores[1]}})  # where the pool's thread is
before = core_of()
os.sched_setaffinity(0, cores)
pool.leave()
after = core_of()
print(json.dumps({{
    "pool": [sorted(os.sched_getaffinity(thread.native_id)) for thread in threads],
    "caller": sorted(os.sched_getaffinity(0)), "before": before, "after": after,
}}))
end.set()
"""


def _seen(started: int = 1, threads: int = 2, *, wanted: bool = True) -> dict[str, list[list[int]]]:
    program = _PROGRAM.format(cores=_CORES[:2], started=started, threads=threads, wanted=wanted)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


def test_a_pool_has_its_own_core_and_the_caller_leaves_it() -> None:
    """Broken: the kernel would have both share a core for as long as calls follow each other, and a small network would
    take twice as long; or a server's own thread would stay pinned where a model was called once."""
    first, second = _CORES[:2]
    seen = _seen()
    assert seen["pool"] == [[second]]
    assert seen["before"] == second
    assert seen["after"] == first
    assert seen["caller"] == [first, second]


@pytest.mark.parametrize(
    ("started", "threads", "wanted"),
    [(1, 2, False), (1, 1, True), (2, 3, True), (2, 2, True), (0, 2, True)],
    ids=["not-wanted", "one-thread", "fewer-cores", "somebody-elses-thread", "no-thread"],
)
def test_nothing_else_is_pinned(started: int, threads: int, wanted: bool) -> None:
    """Broken: threads of others would be kept on one core, or two processes on a large machine would share the few
    cores that both chose."""
    seen = _seen(started, threads, wanted=wanted)
    assert seen["pool"] == [_CORES[:2]] * started
    assert seen["caller"] == _CORES[:2]
