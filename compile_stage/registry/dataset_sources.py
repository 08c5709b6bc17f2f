"""Which addresses the stage fetches a data set from. The address stands in the source's run, so whoever may log to that
run chose it: any URL that this machine can reach, or any file that it can read."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from compile_stage.core.errors import RegistryError

VARIABLE = "COMPILE_STAGE_DATASET_SOURCES"
"""Names further ones: prefixes such as `https://data.example/` or `/srv/data/`, with blanks between them."""

_STORES = frozenset(
    (
        "mlflow-artifacts",
        "runs",
        "models",
        "s3",
        "r2",
        "b2",
        "gs",
        "wasb",
        "wasbs",
        "abfs",
        "abfss",
        "hdfs",
        "viewfs",
        "dbfs",
    )
)
"""MLflow's artifact stores: what may be read there is the store's own decision, by this machine's credentials."""


def demand_allowed(uri: str, name: str) -> None:
    """Raise RegistryError for a data set whose address is neither in an artifact store, nor on the tracking server's
    own host, nor named by `VARIABLE`. A file of this machine is allowed where the registry itself is one."""
    try:
        scheme, host = urlsplit(uri).scheme.lower(), urlsplit(uri).netloc
    except ValueError:  # no address at all
        scheme, host = "?", ""
    if scheme in _STORES or _is_registrys_own(scheme, host) or any(_is_below(uri, one) for one in _named()):
        return
    place = f"{scheme}://{host}/" if scheme not in ("", "file") else "/FOLDER/"
    raise RegistryError(
        f"the data set {name!r} of the source's run lies at an address that is not fetched: {uri}",
        fix=f"log the file as artifact datasets/{name}.npz of that run, or allow the place: {VARIABLE}={place}",
    )


def _is_registrys_own(scheme: str, host: str) -> bool:
    import mlflow

    tracking = urlsplit(str(mlflow.get_tracking_uri()))
    if scheme in ("", "file"):
        return tracking.scheme in ("", "file", "sqlite")
    return scheme in ("http", "https") and (scheme, host) == (tracking.scheme, tracking.netloc)


def _named() -> list[str]:
    return os.environ.get(VARIABLE, "").split()


def _is_below(uri: str, prefix: str) -> bool:
    """True for an address under the prefix, whole path segments only, without a way back up."""
    if ".." in urlsplit(uri).path.split("/") or "%2e" in uri.lower():
        return False
    uri, prefix = (text.removeprefix("file://") for text in (uri, prefix))
    return uri == prefix or uri.startswith(prefix.rstrip("/") + "/")
