"""The registered versions that a publication's key has: one, whatever was killed, and however many pushed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_stage.core import alias_history
from compile_stage.core.records import Receipt
from compile_stage.registry.mlflow_connection import is_code, trouble
from compile_stage.registry.mlflow_pinning import Pinned
from compile_stage.registry.model_files import DIGEST_TAG, FAMILY_TAG, KEY_TAG, latest_of_family, replaced


def remove_doubles(client: Any, versions: Sequence[Any]) -> None:
    """Delete the later versions of a key. A machine that pushed at the same moment as another, and was killed before it
    deleted its own version, left one. A version that an alias points to stays: somebody chose it. So does one that was
    copied from another with its tags (`copy_model_version`): somebody made it."""
    from mlflow.exceptions import MlflowException

    first, others = versions[0], [version for version in versions[1:] if not is_copy(version)]
    aliases = client.get_registered_model(first.name).aliases.values() if others else ()
    for other in others:
        if str(other.version) in map(str, aliases):
            continue
        try:
            client.delete_model_version(other.name, other.version)
            if (model := model_of(other)) and model != model_of(first):
                client.delete_logged_model(model)
        except MlflowException as error:  # that machine lives, and was faster
            if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
                raise


def model_of(version: Any) -> str:
    """The id of the logged model that a version was made of, empty for a copy of another version; MLflow fills
    `model_id` in some of its answers only."""
    path = str(version.source).removeprefix("models:/")
    return str(version.model_id or (path if path.startswith("m-") else ""))


def refuse_deleted(client: Any, version: Any) -> str | None:
    """The reason, where the logged model that holds a version's files was deleted: the version is still served, until
    `mlflow gc` removes them. None otherwise, where the registry is another server than the one that holds logged
    models, and for an account that may not read the model's experiment."""
    import mlflow
    from mlflow.exceptions import MlflowException

    if not (model := model_of(version)) or mlflow.get_registry_uri() != mlflow.get_tracking_uri():
        return None
    try:
        client.get_logged_model(model)
    except MlflowException as error:
        if is_code(error, "RESOURCE_DOES_NOT_EXIST"):
            return f"its logged model {model} was deleted, and `mlflow gc` removes its files"
        if not is_code(error, "PERMISSION_DENIED"):
            raise
    return None


def files_removed(client: Any, pinned: Pinned) -> str | None:
    """Why the files of a version, which are not there, will not come back; None where the server records no deletion of
    its logged model: its disk may not be mounted, or somebody deleted the files alone."""
    if not pinned.version:
        return None
    with trouble(pinned.uri):
        return refuse_deleted(client, client.get_model_version(pinned.name, pinned.version))


def is_copy(version: Any) -> bool:
    """True for a version that was made of another (`copy_model_version`, `register_model`), not of a logged model."""
    return str(version.source).startswith("models:/") and not model_of(version)


def own_tags(version: Any) -> dict[str, str]:
    """A version's tags without what a copy brought along that is true of the version it was made of alone: where
    aliases pointed before."""
    tags = dict(version.tags or {})
    return alias_history.without_copied(tags, str(version.creation_timestamp)) if is_copy(version) else tags


def find(client: Any, name: str, key: str) -> Receipt | None:
    """The published version with that key: the lowest, should a dying writer have left a second."""
    versions = versions_of(client, name, key)
    return receipt_of(versions[0]) if versions else None


def find_family(client: Any, name: str, family_key: str) -> tuple[Receipt, ...]:
    """The published versions that hold variants of a family, and that no other was made after, the newest first."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{FAMILY_TAG}` = '{family_key}'")
    versions = {str(version.version): version for version in found if not replaced(version.tags or {})}
    latest = latest_of_family({number: version.tags or {} for number, version in versions.items()})
    return tuple(receipt_of(versions[number]) for number in latest)


def receipt_of(version: Any, *, created: bool = False) -> Receipt:
    """The receipt of a version that the registry holds."""
    return Receipt(
        uri=f"models:/{version.name}/{version.version}",
        name=version.name,
        version=str(version.version),
        digest=(version.tags or {}).get(DIGEST_TAG, ""),
        created=created,
        tags=own_tags(version),
    )


def versions_of(client: Any, name: str, key: str) -> list[Any]:
    """The registered versions with a key, the lowest first; more than one only while machines push at once, or where
    one of these was killed."""
    versions = client.search_model_versions(f"name = '{name}' and tags.`{KEY_TAG}` = '{key}'")
    return sorted(versions, key=lambda version: int(version.version))


def taken_away(error: Exception) -> bool:
    """True when a run or a model is gone that another machine had made, and that it took away since a third one was
    faster than both: what that one made is found at the next attempt."""
    return is_code(error, "RESOURCE_DOES_NOT_EXIST") or "must be in the 'active' state" in str(error)
