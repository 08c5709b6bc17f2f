"""Bundle → a version in the registry, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.records import SourceModel, TargetResult

_STANDS = (
    "the registry already holds a version made from the same inputs; it stands, and this run's files were not pushed"
)


def publish(context: Context, source: SourceModel, target: TargetResult, files: Mapping[str, Path]) -> TargetResult:
    """Push a target's bundle, if it has one, to the registry that the source came from.

    Same key, same version, however often and from wherever. `files` are the reports that go with it.
    """
    bundle = target.bundle
    if bundle is None:
        return target
    with context.events.step("publish", bundle.target) as mark:
        receipt = plugins.load("registries", source.registry).push(bundle, source, files)
        mark.cached = not receipt.created
    if not receipt.created and receipt.digest != bundle.digest:
        receipt = replace(receipt, note=_STANDS)
    return replace(target, receipt=receipt)
