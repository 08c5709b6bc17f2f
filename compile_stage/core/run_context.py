"""The surroundings that a run, and every command that starts workers, is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from compile_stage.core import address_space, plugins
from compile_stage.core.cache import Cache, SharedEntries, cache_secret
from compile_stage.core.cache_eviction import evict, limit_bytes
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.context import Context
from compile_stage.core.environment import hardware
from compile_stage.core.events import EventLog, Reporter
from compile_stage.core.leftovers import remove_leftovers, temporary_folder
from compile_stage.core.records import Compliance
from compile_stage.core.remote_plugins import release
from compile_stage.core.reuse import Reuse
from compile_stage.core.storage import demand_writable, storage_trouble


@contextmanager
def open_context(
    reporter: Reporter | None,
    engine: str,
    *,
    remeasure: bool = False,
    shared: SharedEntries | None = None,
    compliance: Compliance | None = None,
) -> Iterator[Context]:
    """A run's surroundings; nothing of it is left behind but the cache.

    Args:
        shared: The cache of several machines behind this one's.
        compliance: Of the policy, which says what earlier results are used.
    """
    address_space.demand_enough()
    Path.cwd()  # raises where it was deleted: MLflow and workers would fail there, each in its own way
    reuse = Reuse() if compliance is None else Reuse.of(compliance)
    demand_writable(cache_root())
    cache_limit = limit_bytes()
    runner = plugins.load("engines", engine)
    plugins.demand(runner)
    remove_leftovers()
    with storage_trouble(), temporary_folder() as scratch:
        try:
            yield Context(
                cache=Cache(cache_root(), cache_secret(), shared=shared, reuse=reuse),
                engine=runner,
                events=EventLog(reporter),
                hardware=hardware(),
                scratch=scratch,
                today=datetime.now(UTC).date(),
                remeasure=remeasure,
            )
        finally:
            runner.close()
            evict(cache_root(), cache_limit)
            release()
