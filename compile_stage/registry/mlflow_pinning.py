"""A model URI of MLflow → the one immutable version that it means now."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError
from compile_stage.core.records import record
from compile_stage.core.spelling import did_you_mean
from compile_stage.registry.mlflow_connection import is_code, trouble
from compile_stage.registry.mlflow_retries import UnreachableError
from compile_stage.registry.model_files import check_alias, check_name

_FORMS = "write models:/NAME/VERSION, models:/NAME@ALIAS, models:/NAME/latest, models:/m-ID or runs:/RUN_ID/NAME"
_MODEL_ID = re.compile(r"m-[0-9a-f]{32}")
_MODEL_FOLDER = re.compile(r"/models/(m-[0-9a-f]{32})/artifacts/?$")
_SUGGESTED_FROM = 500  # names that a mistyped one is compared with
_COPIES = 8  # a version copied from a copy of a copy ...; more than that is a circle


@record
class Pinned:
    """What a URI stands for, once.

    Attributes:
        uri: Immutable, as published in lineage.
        download: What its files are fetched by.
    """

    uri: str
    download: str
    name: str
    version: str = ""
    model_id: str = ""
    run_id: str = ""
    experiment_id: str = ""
    tags: dict[str, str]


def pin(client: Any, uri: str) -> Pinned:
    """The immutable thing that the URI means now."""
    scheme, _, rest = uri.partition(":")
    if scheme == "runs":
        return _pin_run(client, uri, rest)
    if not rest.startswith("/") or rest.startswith("//"):
        raise RegistryError(f"{uri!r} is not a model URI that can be resolved", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    path = rest.strip("/")
    if _MODEL_ID.fullmatch(path):
        return _pin_logged_model(client, uri, path)
    name, slash, version = path.partition("/")
    alias = ""
    if not slash:
        name, _, alias = path.rpartition("@")
        if not name or not alias:
            raise RegistryError(f"{uri!r} names no version", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    check_name(name)
    if "/" in version or (slash and not (version.isdigit() or version == "latest")):
        raise RegistryError(
            f"{version!r} is not a version number",
            fix=f"{_FORMS}; MLflow's stages are deprecated, use an alias",
            where=uri,
            code=Code.NOT_IN_REGISTRY,
        )
    return _pin_version(client, uri, name, version, alias)


def origin_id(client: Any, version: Any, uri: str) -> str:
    """The id of the logged model behind a version, through copies of versions; empty when it was registered from plain
    files, or when what it was copied from is gone and the place of its files names no logged model.

    Args:
        uri: Of the version, for messages.
    """
    from mlflow.exceptions import MlflowException

    copied = version
    for _ in range(_COPIES):
        if version.model_id:
            return str(version.model_id)
        path = str(version.source).removeprefix("models:/")
        if _MODEL_ID.fullmatch(path):
            return path
        if not str(version.source).startswith("models:/"):
            return ""
        name, _, number = path.rpartition("/")
        try:
            with trouble(uri):
                version = client.get_model_version(name, number)
        except RegistryError as error:  # renamed, or deleted: a copy has its files all the same
            if not (
                isinstance(cause := error.__cause__, MlflowException) and is_code(cause, "RESOURCE_DOES_NOT_EXIST")
            ):
                raise
            return _stored_as(client, copied, uri)
    raise RegistryError("it is a copy of a copy without end", where=uri)


def _pin_version(client: Any, uri: str, name: str, version: str, alias: str) -> Pinned:
    with trouble(uri, missing=f"there is no model version {uri}"), naming_what_is_missing(client, uri, name):
        if alias:
            check_alias(alias)
            version = _aliased(client, uri, name, alias)
        elif version == "latest":
            client.get_registered_model(name)  # so that a missing model is named as such
            newest = client.search_model_versions(f"name = '{name}'", max_results=1, order_by=["version_number DESC"])
            if not newest:
                raise RegistryError(
                    f"the registered model {name!r} has no version", where=uri, code=Code.NOT_IN_REGISTRY
                )
            version = str(newest[0].version)
        held = client.get_model_version(name, version)
    exact = f"models:/{name}/{held.version}"
    model = _origin(client, held, exact)
    return Pinned(
        uri=exact,
        download=exact,
        name=name,
        version=str(held.version),
        model_id=model.model_id if model else "",
        run_id=held.run_id or (model.source_run_id if model else "") or "",
        experiment_id=(model.experiment_id if model else _experiment_of(client, held.run_id)) or "",
        tags={str(k): str(v) for k, v in (held.tags or {}).items()},
    )


@contextmanager
def naming_what_is_missing(client: Any, uri: str, name: str) -> Iterator[None]:
    """Say which word of the URI is wrong: MLflow answers alike for a model that is missing and for a version."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if not is_code(error, "RESOURCE_DOES_NOT_EXIST"):
            raise
        held = [model.name for model in client.search_registered_models(max_results=_SUGGESTED_FROM)]
        if name in held:
            raise
        near = did_you_mean(name, held)
        hint = f"did you mean {near!r}?" if near else "check the name and MLFLOW_TRACKING_URI"
        raise RegistryError(
            f"there is no registered model {name!r}", fix=hint, where=uri, code=Code.NOT_IN_REGISTRY
        ) from error


def _aliased(client: Any, uri: str, name: str, alias: str) -> str:
    aliases = client.get_registered_model(name).aliases
    if alias not in aliases:
        listed = (
            f"it has: {', '.join(sorted(aliases))}" if aliases else "it has none; name a version: models:/NAME/VERSION"
        )
        raise RegistryError(
            f"the registered model {name!r} has no alias {alias!r}", fix=listed, where=uri, code=Code.NOT_IN_REGISTRY
        )
    return str(aliases[alias])


def _origin(client: Any, version: Any, uri: str) -> Any:
    """The logged model behind a version; None when it was registered from plain files, or may not be read."""
    model_id = origin_id(client, version, uri)
    return _logged_model(client, model_id) if model_id else None


def _stored_as(client: Any, version: Any, uri: str) -> str:
    """The id of the logged model whose files a version has, by where they lie; empty where that names none."""
    with trouble(uri):
        place = str(client.get_model_version_download_uri(version.name, version.version))
    named = _MODEL_FOLDER.search(place)
    model = _logged_model(client, named[1]) if named else None
    return model.model_id if model is not None and model.artifact_location == place else ""


def _logged_model(client: Any, model_id: str) -> Any:
    """The logged model, or None where one may read the version but not the experiment that the model belongs to."""
    from mlflow.exceptions import MlflowException

    try:
        with trouble(f"models:/{model_id}"):
            return client.get_logged_model(model_id)
    except RegistryError as error:
        cause = error.__cause__
        if isinstance(cause, MlflowException) and is_code(cause, "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
            return None
        raise


def _pin_logged_model(client: Any, uri: str, model_id: str) -> Pinned:
    with trouble(uri, missing=f"there is no logged model {model_id}"):
        model = client.get_logged_model(model_id)
    _demand_ready(model, uri)
    return _pinned_model(model)


def _pin_run(client: Any, uri: str, rest: str) -> Pinned:
    run_id, _, path = rest.strip("/").partition("/")
    if not path or rest.startswith("//"):
        raise RegistryError(f"{uri!r} names no model of the run", fix=_FORMS, code=Code.NOT_IN_REGISTRY)
    with trouble(uri, missing=f"there is no run {run_id}"):
        run = client.get_run(run_id)
        models = client.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id = '{run_id}'")
    named = [model for model in models if model.name == path]
    if named:
        ready = [model for model in named if model.status == "READY"]
        # A run may log the same name at several steps; MLflow itself takes the newest.
        newest = max(ready or named, key=lambda model: (model.creation_timestamp, model.model_id))
        _demand_ready(newest, uri)
        return _pinned_model(newest)
    with trouble(uri):
        held = [file.path for file in client.list_artifacts(run_id, path)]
    if f"{path}/MLmodel" not in held:
        names = sorted({model.name for model in models})
        listed = f"it has: {', '.join(names)}" if names else "it has none"
        raise RegistryError(f"run {run_id} has no model {path!r}", fix=listed, where=uri, code=Code.NOT_IN_REGISTRY)
    exact = f"runs:/{run_id}/{path}"  # logged by MLflow 2, as plain artifacts of the run
    return Pinned(
        uri=exact,
        download=exact,
        name=path.rpartition("/")[2],
        run_id=run_id,
        experiment_id=run.info.experiment_id,
        tags={},
    )


def _pinned_model(model: Any) -> Pinned:
    uri = f"models:/{model.model_id}"
    return Pinned(
        uri=uri,
        download=uri,
        name=model.name or model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id or "",
        experiment_id=str(model.experiment_id),
        tags={str(k): str(v) for k, v in (model.tags or {}).items()},
    )


def _demand_ready(model: Any, uri: str) -> None:
    if model.status != "READY":
        status = getattr(model.status, "value", model.status)
        raise RegistryError(
            f"the logged model {model.model_id} is {status}, not READY: its upload never ended",
            fix="log the model again",
            where=uri,
        )


def _experiment_of(client: Any, run_id: str | None) -> str:
    if not run_id:
        return ""
    try:
        with trouble(f"runs:/{run_id}"):
            return str(client.get_run(run_id).info.experiment_id)
    except UnreachableError:  # what is published would stand in another experiment for good
        raise
    except RegistryError:
        return ""  # lineage goes to tags then; the model itself can still be read
