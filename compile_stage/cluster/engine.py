"""The engine `ray`: the driver's own workers are here, and a run's work is on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from compile_stage.core.context import Context
from compile_stage.core.records import Policy, SourceModel
from compile_stage.core.shared_cache import URL_VARIABLE
from compile_stage.engine.local import LocalEngine

if TYPE_CHECKING:
    from compile_stage.cluster.pool import Pool
    from compile_stage.cluster.survey import Survey
    from compile_stage.pipeline.outcome import RunState


class RayEngine(LocalEngine):
    """What the driver itself does, such as resolving the source, is done by workers here."""

    name: ClassVar[str] = "ray"
    requires: ClassVar[tuple[str, ...]] = ("ray",)
    extra: ClassVar[str] = "ray"

    _pool: Pool | None = None

    def run_elsewhere(
        self,
        progress: RunState,
        context: Context,
        uri: str,
        place: Callable[[SourceModel], Path],
        shared: str | None = None,
    ) -> None:
        """Take a run through the cluster that `$RAY_ADDRESS` names (`cluster.driver`).

        Args:
            place: The folder for a source's results, where the caller named none.
            shared: Address of the shared cache; None for what `$COMPILE_STAGE_SHARED_CACHE` names.

        Raises:
            UsageError: There is no cluster, or it has not what the policy's targets ask for.
        """
        from compile_stage.cluster.driver import Driver
        from compile_stage.cluster.pool import Pool

        self._pool = Pool.connect(context.events.reporter)
        address = os.environ.get(URL_VARIABLE, "") if shared is None else shared
        Driver(self._pool, progress, context, address).run(uri, place)

    def survey(self, policy: Policy | None) -> Survey:
        """What the cluster's nodes have (`cluster.survey`). Raises UsageError where there is no cluster."""
        from compile_stage.cluster.pool import Pool
        from compile_stage.cluster.survey import survey

        self._pool = Pool.connect()
        return survey(self._pool, policy)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        super().close()
