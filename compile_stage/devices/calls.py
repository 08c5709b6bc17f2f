"""What a worker on a device can do: the model is opened here, and all else is `engine.open_model`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.baseline import baseline_target
from compile_stage.core.digest import revive
from compile_stage.core.records import SourceModel, Target
from compile_stage.engine import open_model as on_model
from compile_stage.engine.served import open_as_served

if TYPE_CHECKING:
    from compile_stage.core.ports import Session


def open_published(model: Any) -> dict[str, Any]:
    """Open a version's artifact by the loader that it carries, without what that does around a call, such as filling up
    a batch: so each batch size is asked of the artifact itself.

    Args:
        model: `{"path": ...}`, its directory.
    """
    return on_model.open_model(lambda: _bare(Path(model["path"])))


@contextmanager
def _bare(model: Path) -> Iterator[Session]:
    with open_as_served(model) as opened:
        yield opened._session  # type: ignore[attr-defined]  # of `compile_stage.flavor.CompiledModel`


def open_original(plugin: str, source: Any, target: Any) -> dict[str, Any]:
    """Open the original in its framework.

    Args:
        plugin: `module:class` of its source; no entry points are installed on a device.
    """
    module, _, name = plugin.partition(":")
    exporter = getattr(importlib.import_module(module), name)()
    model, where = revive(SourceModel, source), baseline_target(revive(Target, target))
    return on_model.open_model(lambda: exporter.open(model, where))


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        open_published,
        open_original,
        on_model.open_served,
        on_model.predict,
        on_model.predict_batch,
        on_model.predict_corners,
        on_model.make_calls,
        on_model.warm_up,
        on_model.quick_turn,
        on_model.prepare_turn,
        on_model.call_untimed,
        on_model.time_turn,
        on_model.first_tokens,
        on_model.end_turn,
        on_model.close_model,
    )
}
