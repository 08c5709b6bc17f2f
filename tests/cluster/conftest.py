"""A Ray cluster of three nodes on this machine: raylets that may use different cores, and so differ in their
fingerprints."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before Ray is imported. 30 seconds are too few for its daemons beside much else.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "150")
_STORE_BYTES = 80 * 2**20
_PATIENCE_S = 60.0
_ATTEMPTS = 2
# A node that is gone is noticed after two seconds, not half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 2,
}


class ThreeNodes:
    """The head may use all cores of this process; the others the first of them alone.

    Attributes:
        folder: Holds a step cache for each.
    """

    def __init__(self, folder: Path, cluster: Any) -> None:
        self.folder, self._cluster = folder, cluster
        self._nodes: dict[str, Any] = {}

    @property
    def key(self) -> Path:
        """The file with the cache's secret."""
        return self.folder / "key"

    @property
    def shared(self) -> str:
        """Address of the cache that they share."""
        return f"file://{self.folder / 'shared'}"

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, cores: set[int], **settings: Any) -> None:
        """Start a node; what it starts may use these cores."""
        before = os.sched_getaffinity(0)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("COMPILE_STAGE_TEST_NODE", name)
            environment.setenv("COMPILE_STAGE_CACHE", str(self.folder / name))
            environment.setenv("COMPILE_STAGE_CACHE_KEY", str(self.key))
            environment.setenv("PYTHONPATH", str(Path(__file__).parent))
            environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
            os.sched_setaffinity(0, cores)
            try:
                node = self._cluster.add_node(
                    num_cpus=1, node_name=name, object_store_memory=_STORE_BYTES, include_dashboard=False, **settings
                )
            finally:
                os.sched_setaffinity(0, before)
        self._nodes[name] = node

    def mend(self) -> None:
        """Start again what was killed."""
        for name in {"small-1", "small-2"} - set(self._nodes):
            self.add(name, {min(os.sched_getaffinity(0))})

    def kill_busy(self) -> str:
        """Kill the first of the small nodes that has something to do; its name."""
        ends = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            for name in ("small-1", "small-2"):
                if self._is_busy(name):
                    self.kill(name)
                    return name
            time.sleep(0.05)
        return ""

    def _is_busy(self, name: str) -> bool:
        for process in psutil.Process(self._raylet(name)).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "compile_stage.engine.worker" in process.cmdline():
                    return True
        return False

    def _raylet(self, name: str) -> int:
        return int(self._nodes[name].all_processes["raylet"][0].process.pid)

    def kill(self, name: str) -> None:
        """End a node as a power cut does: the raylet and all that it started, with SIGKILL."""
        raylet = psutil.Process(self._raylet(name))
        self._nodes.pop(name)
        for process in [raylet, *raylet.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="package")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeNodes]:
    pytest.importorskip("ray", reason="Ray is not installed")
    cores = os.sched_getaffinity(0)
    if len(cores) < 2 or sys.platform != "linux":
        pytest.skip("nodes of one machine have different fingerprints only where it has two cores")
    from ray.cluster_utils import Cluster

    for attempt in range(_ATTEMPTS):
        cluster = Cluster(initialize_head=False)
        nodes = ThreeNodes(tmp_path_factory.mktemp("cluster"), cluster)
        nodes.key.write_bytes(bytes(range(32)))
        try:
            nodes.add("head", cores, _system_config=_HEALTH)
            nodes.mend()
        except Exception as error:  # noqa: BLE001 - Ray raises no class of its own there
            cluster.shutdown()
            if attempt == _ATTEMPTS - 1:
                pytest.skip(f"Ray's daemons do not come up on this machine: {error}")
            continue
        try:
            yield nodes
        finally:
            cluster.shutdown()
        return


@pytest.fixture
def at_the_cluster(three_nodes: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> ThreeNodes:
    """All three, with this process as the driver."""
    three_nodes.mend()
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(three_nodes.key))
    monkeypatch.setenv("RAY_ADDRESS", three_nodes.address)
    return three_nodes
