"""Bundle → a version in the registry, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.records import Bundle, Receipt, SourceModel, TargetResult

_KEPT = (
    "the registry already holds a version made from the same inputs; it was kept, and this run's files were not pushed"
)


def publish(context: Context, source: SourceModel, target: TargetResult, files: Mapping[str, Path]) -> TargetResult:
    """Push a target's bundle, or its unvalidated ones, to the registry that the source came from.

    Same key, same version, however often and from wherever. `files` are the reports that go with it.
    """
    if target.bundle is not None:
        return replace(target, receipt=_push(context, source, target.bundle, files))
    pushed = (replace(one, receipt=_push(context, source, one.bundle, files)) for one in target.unvalidated)
    return replace(target, unvalidated=tuple(pushed))


def attach_reports(source: SourceModel, targets: Sequence[TargetResult], files: Mapping[str, Path]) -> None:
    """Give the final reports to the registry, for each version that holds what this run packaged.

    A version that was there already and holds other files keeps its own report: this run's speaks of other files.

    Args:
        files: The reports as written after publication and promotion, so that they hold the receipts.

    Raises:
        RegistryError: The reports could not be replaced; running again replaces them.
    """
    registry = plugins.load("registries", source.registry)
    for target in targets:
        published = [(target.bundle, target.receipt), *((one.bundle, one.receipt) for one in target.unvalidated)]
        for bundle, receipt in published:
            if bundle is not None and receipt is not None and receipt.digest == bundle.digest:
                registry.attach(receipt, files)


def _push(context: Context, source: SourceModel, bundle: Bundle, files: Mapping[str, Path]) -> Receipt:
    with context.events.step("publish", bundle.target) as mark:
        receipt = plugins.load("registries", source.registry).push(bundle, source, files)
        mark.cached = not receipt.created
    if not receipt.created and receipt.digest != bundle.digest:
        return replace(receipt, note=_KEPT)
    return receipt
