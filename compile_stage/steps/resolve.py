"""URI → immutable source model, with its files in our cache."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.records import AppliesTo, SourceModel


def resolve(context: Context, uri: str) -> SourceModel:
    """Pin the URI once; everything after this uses the pinned version."""
    registry = plugins.registry_for(uri)
    with context.events.step("resolve"):
        source = registry.resolve(uri, context.cache.root / "sources")
    context.cache.use(Path(source.path))
    return source


def refuse_policy(source: SourceModel, applies_to: AppliesTo) -> str | None:
    """None when the policy is meant for this model, or the reason why it isn't."""
    if applies_to.names and not any(fnmatchcase(source.name, pattern) for pattern in applies_to.names):
        return f"the policy applies to models named {', '.join(applies_to.names)}, this one is {source.name!r}"
    for key, wanted in applies_to.tags.items():
        if (have := source.tags.get(key)) != wanted:
            return f"the policy applies to models tagged {key}={wanted}, this one has {key}={have or 'nothing'}"
    if applies_to.flavors and source.flavor not in applies_to.flavors:
        return f"the policy applies to models of flavor {', '.join(applies_to.flavors)}, this one is {source.flavor!r}"
    return None
