"""MLflow, searched for the models of a fleet: by the server, a page at a time, so that memory does not grow with the
registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import RegisteredVersion
from compile_stage.registry.mlflow_download import download_file
from compile_stage.registry.mlflow_watch import PROMPT, pages, registered
from compile_stage.registry.model_files import KEY_TAG, read_model

_OWNER = "owner"


def search(client: Any, name: str, alias: str, tags: Mapping[str, str]) -> Iterator[RegisteredVersion]:
    """The versions of the models whose name matches the glob, in order of names.

    Models, which know their aliases, and versions are two searches that are read side by side.

    Args:
        alias: Glob; versions that have such an alias. Empty: the newest version of each model that we did not publish.
        tags: That the version must have.
    """
    models = _InStep(pages(client.search_registered_models, filter_string=_like(name), order_by=["name ASC"]))
    # What has a quote in it the server's grammar can't say; every tag is compared once more below.
    asked = [f"tags.`{key}` = '{value}'" for key, value in tags.items() if not {"'", "`"} & set(key + value)]
    order, newest = ["name ASC", "version_number DESC"], ""
    for version in pages(
        client.search_model_versions, filter_string=" and ".join([_like(name), *asked]), order_by=order
    ):
        held, model = dict(version.tags or {}), models.find(version.name)
        if model is None or PROMPT in held or not fnmatchcase(version.name, name):
            continue
        if any(held.get(key) != value for key, value in tags.items()):
            continue
        here = [one for one, number in (model.aliases or {}).items() if str(number) == str(version.version)]
        if alias and not any(fnmatchcase(one, alias) for one in here):
            continue
        if not alias:
            if KEY_TAG in held or version.name == newest:
                continue
            newest = version.name
        yield registered(version, here, owner=held.get(_OWNER) or (model.tags or {}).get(_OWNER, ""))


def flavor(client: Any, uri: str) -> str:
    """The flavor that a version is read as, by its `MLmodel` alone."""
    with temporary_folder("flavor") as folder:
        download_file(client, uri, "MLmodel", folder)
        return read_model(folder, uri).flavor


class _InStep:
    """Models in the server's order of names, found by names that come in the same order. Held are only those that were
    read and not passed yet: few, since nearly every model has versions."""

    def __init__(self, models: Iterator[Any]) -> None:
        self._models, self._read = models, dict[str, Any]()

    def find(self, name: str) -> Any:
        """The model of that name; None where it was made or deleted while the pages were read."""
        while name not in self._read:
            model = next(self._models, None)
            if model is None:
                return None
            self._read[model.name] = model
        for passed in list(self._read):
            if passed == name:
                break
            del self._read[passed]
        return self._read[name]


def _like(pattern: str) -> str:
    """The filter that the server applies: at least what the glob takes, which is compared once more here."""
    start = pattern.partition("[")[0]
    if "'" in start or '"' in start or "\\" in start:
        return "name LIKE '%'"
    like = start.replace("*", "%").replace("?", "_") + ("%" if start != pattern else "")
    return f"name LIKE '{like}'"
