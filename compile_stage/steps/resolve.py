"""URI → immutable source model, with its files in our cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import IntegrityError, RegistryError
from compile_stage.core.records import AppliesTo, SourceModel


def resolve(context: Context, uri: str) -> SourceModel:
    """Pin the URI once; everything after this uses the pinned version."""
    registry = plugins.registry_for(uri)
    with context.events.step("resolve"):
        source = registry.resolve(uri, context.cache.root / "sources")
    context.cache.use(Path(source.path))
    return source


def resolve_made_from(context: Context, made_from: Mapping[str, Any]) -> SourceModel:
    """The source of a published version. Where its registered version was deleted, the logged model that this was
    registered from stands for it, if its files are the same.

    Args:
        made_from: The manifest's `source`; `model_id` beside it where the version's tags name the logged model.

    Raises:
        IntegrityError: The files are not those that the version was made from.
        RegistryError: They can't be had; the message says what can be verified without them.
    """
    uri, model_id = made_from["uri"], made_from.get("model_id", "")
    try:
        source = resolve(context, uri)
    except RegistryError as error:
        if error.code is not Code.NOT_IN_REGISTRY:
            raise
        try:
            if not model_id:
                raise
            source = replace(
                resolve(context, f"models:/{model_id}"),
                uri=uri, name=made_from["name"], version=made_from["version"],
            )  # fmt: skip
        except RegistryError as last:
            if last.code is not Code.NOT_IN_REGISTRY:
                raise
            raise RegistryError(
                f"the source that it was made from can't be had any more: {error.problem}",
                fix="judge it by what was measured when it was published, which needs no source: compile-stage verify "
                "URI --no-revalidate; for a validation, put the source back there, or run the stage on a version of it "
                "that is there",
                where=uri,
                code=Code.NOT_IN_REGISTRY,
            ) from error
    if source.digest != made_from["digest"]:
        raise IntegrityError(f"{source.uri} is {source.digest} now, and was {made_from['digest']}")
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
