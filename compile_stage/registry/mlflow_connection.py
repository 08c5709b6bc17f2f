"""The way to an MLflow server or database: bounded waiting, and every kind of trouble as one sentence."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from compile_stage.core.cache_folder import cache_root
from compile_stage.core.digest import digest_of
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import CompileStageError, RegistryError, StorageError
from compile_stage.core.machine_identity import machine_identity
from compile_stage.core.redaction import redacted
from compile_stage.core.storage import disk_full, without_folder
from compile_stage.registry.folder_files import disk_fix
from compile_stage.registry.mlflow_retries import (
    RetryingClient,
    UnreachableError,
    answer_limit_s,
    failed_on_the_way,
    is_foreign_404,
    refused_with,
    repeated_call,
    within,
)
from compile_stage.registry.mlflow_stores import StoreTrouble, store_trouble

# MLflow retries a dead server for about four minutes, and one that says `Retry-After: 3600` after an hour. The first
# three bound it to seconds; whoever set a variable keeps it.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is ours: it may be JSON
}
_PROBE_S = 19  # one that was put to sleep, or stands behind a slow gateway, takes 10 to 30 s for its first answer
_PROBE_PATIENCE_S = 2.0
_PROBE_LIMIT_S = 40.0  # two attempts and what lies between them
_FIRST_PATIENCE_S = 5.0  # a wrong address stays wrong; a lost request gets five attempts
_LOCK_S = 1800.0
_LONGEST_SENTENCE = 1000  # characters of a message of MLflow's
_TOO_MANY = re.compile(r"too many (\d{3}) error responses")  # as urllib3 says it
_NO_JSON = re.compile(r"not in a valid JSON format|\(char \d+\)$")  # as MLflow and Python's json say it
_RELEASE = re.compile(r"(\d+)\.\d+[\w.]*")  # as an MLflow server answers /version
_FIRST_WITH_LOGGED_MODELS = 3
_HOST_AND_PORT = re.compile(r"(?!file:)[\w.-]+:\d+(/|$)")
_FILE_FAILED = re.compile(r"##### File (.+?) #####\n(.*)", re.DOTALL)  # as MLflow says it, after a line without a cause
_BUSY_DATABASE = "database is locked"  # as SQLite says it

_UNREACHABLE_FIX = (
    "check MLFLOW_TRACKING_URI and that the server runs (`compile-stage doctor` shows what is used), then run again; "
    "what is finished is kept"
)
_BUSY_FIX = (
    "wait for the program that is writing to the database, or end it, then run again; what is finished is kept. A "
    "tracking server takes several writers"
)
_NO_PROXY_SAID = "the proxy in front of the server can't be reached"
_PROXY_REFUSED_SAID = "the proxy in front of the server refuses"
_NOT_VERIFIED_SAID = "the server's certificate can't be verified"
_NO_AUTHORITIES_SAID = "there is no file of certificates at"
_FIXES = {
    (_NO_PROXY_SAID, _PROXY_REFUSED_SAID): "check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY; where the server needs no "
    "proxy, add its host to NO_PROXY. Then run again; what is finished is kept",
    (_NOT_VERIFIED_SAID,): "name the certificate of the authority that issued it in MLFLOW_TRACKING_SERVER_CERT_PATH, "
    "a PEM file; or, where host or date is what is wrong, use the host that it is for, renew it, or set this machine's "
    "clock",
    (_NO_AUTHORITIES_SAID,): "MLFLOW_TRACKING_SERVER_CERT_PATH, REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE names it: name a "
    "file that is there",
}
"""What is said of the way to the server → what to do about it."""
_REFUSED_BY_PROXY = re.compile(r"Tunnel connection failed: (\d{3}[\w -]*)")  # as http.client says it
_NOT_VERIFIED = re.compile(r"certificate verify failed(?:: ([^(]+?)\.? \(_ssl)?", re.IGNORECASE)  # as OpenSSL says it
_NO_AUTHORITIES = re.compile(r"suitable TLS CA certificate bundle, invalid path: (\S+)")  # as requests says it
_NOT_ARRIVED = " did not arrive whole"
_CUT_OFF = "connection broken"  # as urllib3 says it of an answer that ends too early
SAME_FILE_FIX = (
    "Where the same file fails each time, look at what is in front of the server (a proxy, a gateway): at its limits "
    "on size and time"
)
TRANSFER_FIX = f"run again; what is finished is kept. {SAME_FILE_FIX}"
_NO_JSON_SAID = "what came in place of the server's answer is no JSON"
_NO_JSON_FIX = (
    "look at what is in front of the server: a log-in page answers in its place (set an account or a token that needs "
    "no page), or a proxy cuts its answers short. Then run again; what is finished is kept"
)
_ACCOUNT = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_LOGIN_FIX = f"set {_ACCOUNT}, of an account with the rights"
_WRONG_LOGIN_FIX = (
    f"check {_ACCOUNT}, else ~/.mlflow/credentials: the server does not take what is set there (a wrong password, an "
    "expired token)"
)
_RIGHTS_FIX = (
    "have the account granted READ on the source's model and its experiment, and, to publish, EDIT on the compiled "
    "model and on the experiment of its runs (MLFLOW_EXPERIMENT_NAME, else compile-stage); or name another one: "
    f"{_ACCOUNT}"
)


_PACKAGES = {
    "MySQLdb": "mysqlclient",
    "azure": "azure-storage-blob azure-identity",
    "botocore": "boto3",
    "google": "google-cloud-storage",
    "psycopg2": "psycopg2-binary",
}
"""What to install for a module that MLflow's stores and SQLAlchemy import, where its name is another."""

ALIASES = "aliases"

_answered: set[str] = set()
"""Addresses at which MLflow answered this process."""


def connect() -> Any:
    """An `MlflowClient` for the URIs that MLflow's own environment variables name.

    Raises:
        RegistryError: The server does not answer.
    """
    for variable, value in _DEFAULTS.items():
        os.environ.setdefault(variable, value)
    import mlflow
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells every step of making a database
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        with trouble(where()):
            _demand_scheme(str(mlflow.get_tracking_uri()))
            _probe(str(mlflow.get_tracking_uri()))
            client = MlflowClient()  # it opens a database at once
            _demand_mlflow(client, str(mlflow.get_tracking_uri()))
    except UnreachableError as error:  # a wrong address is said at once, not after the patience of `repeatable`
        if _BUSY_DATABASE in error.problem:
            raise
        raise RegistryError(error.problem, fix=error.fix, where=error.where, code=error.code) from error
    return RetryingClient(client, bounded=_is_server(str(mlflow.get_tracking_uri())))


def where() -> str:
    """The tracking URI without its password, for messages."""
    import mlflow

    return redacted(str(mlflow.get_tracking_uri()))


def reason_unreachable() -> str | None:
    """None when the registry answers, or the reason. Creates no database that isn't there yet."""
    import mlflow

    uri = str(mlflow.get_tracking_uri())
    if (file := _database_file(uri)) is not None and not file.exists():
        return _refused_folder(file)
    try:
        client = connect()
        with trouble(where()):
            client.search_experiments(max_results=1)
            client.search_registered_models(max_results=1)
    except RegistryError as error:
        return f"{error.where}: {error.problem}" if error.where else error.problem
    return None


@contextmanager
def trouble(place: str, missing: str = "") -> Iterator[None]:
    """Turn whatever MLflow, HTTP or the database raises into a RegistryError.

    Args:
        place: What was being reached: a URI or the server.
        missing: What to say when it does not exist.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except CompileStageError as error:
        if isinstance(error, UnreachableError) and not error.where:
            error.where = _at(place)
        raise
    except MlflowException as error:
        raise _full(error, place) or _of_store(error, place) or _explained(error, place, missing) from error
    except Exception as error:
        if (full := _full(error, place)) is not None:
            raise full from error
        if (of_store := _of_store(error, place)) is not None:
            raise of_store from error
        if (known := without_folder(error) or _refused(error, place)) is not None:
            raise known from error
        if isinstance(error, ImportError) and not (error.name or "").startswith("compile_stage"):
            raise _unusable_package(error, place) from error
        family = type(error).__module__.partition(".")[0]
        if family in ("requests", "urllib3", "json"):
            problem = f"the registry can't be reached: {_short_network(str(error))}"
        elif family in ("sqlalchemy", "sqlite3", "psycopg2", "alembic"):
            problem = f"the registry's database fails: {_sentence(error)}"
        elif isinstance(error, OSError):
            raise RegistryError(
                f"the registry's files can't be read or written: {redacted(str(error))}",
                fix=disk_fix(error),
                where=place,
            ) from error
        else:
            raise
        raise UnreachableError(problem, fix=_fix_for(problem), where=_at(place)) from error


def _of_store(error: Exception, place: str) -> RegistryError | None:
    """What to say of a store of files that this machine's client talks to by itself."""
    found: StoreTrouble | None = store_trouble(error)
    if found is None:
        return None
    kind = RegistryError if found.refused else UnreachableError
    does = "refuses" if found.refused else "fails"
    problem = f"the registry's store of files ({found.store}) {does}: {_first_sentence(found.said)}"
    return kind(problem, fix=found.fix, where=place, code=Code.REGISTRY_UNREACHABLE)


def _full(error: Exception, place: str) -> StorageError | None:
    """What to say of a full disk. Where the error names no file, it may be the registry's disk or one of ours."""
    full = disk_full(error)
    if full is not None and not full.where:
        full.where = redacted(place)
        full.fix = (
            "free space where the registry keeps its files; where it does so on another machine, below TMPDIR and "
            "COMPILE_STAGE_CACHE. Then run again: what is finished is kept"
        )
    return full


@contextmanager
def single_writer(name: str, *, of: str = "") -> Iterator[str]:
    """Hold this machine's one writer's place for a registered model; yields an identity that all holders of it share,
    and nobody else: not a machine or a container of the same name that has this path too.

    What another holder of the same place left unfinished was left by a process that is dead.

    Args:
        of: `ALIASES` for the place of who moves them, beside that of who publishes: a rollback must not wait for an
            upload, which takes minutes.

    Raises:
        RegistryError: Another process has held it for half an hour.
    """
    import mlflow

    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    held = [redacted(str(mlflow.get_registry_uri())), name, *filter(None, [of])]
    place = folder / f"{digest_of(held)[7:31]}.lock"
    try:
        with FileLock(place, timeout=_LOCK_S):
            disk = folder.stat()
            yield digest_of([machine_identity(), str(place), disk.st_dev, disk.st_ino])[7:23]
    except Timeout as error:
        raise RegistryError(
            f"another process has been writing {name!r} for {_LOCK_S / 60:.0f} minutes",
            fix="wait for it, or end it; the lock ends with the process that holds it",
            where=str(place),
        ) from error


def is_code(error: Exception, *codes: str) -> bool:
    """True for an MLflow error of one of these codes."""
    return getattr(error, "error_code", None) in codes


def _is_server(uri: str) -> bool:
    return urlsplit(uri).scheme in ("http", "https")


def _database_file(uri: str) -> Path | None:
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///")).partition("?")[0]).absolute()


def _refused_folder(file: Path) -> str | None:
    folder = next(place for place in file.parents if place.exists())
    return None if os.access(folder, os.W_OK) else f"{file} does not exist, and {folder} can't be written"


def _probe(uri: str) -> None:
    # MLflow would try for minutes to make a database where none can be.
    if (file := _database_file(uri)) is not None and not file.exists() and (reason := _refused_folder(file)):
        raise RegistryError(reason, fix=_UNREACHABLE_FIX, where=uri, code=Code.REGISTRY_UNREACHABLE)
    if not _is_server(uri):
        return
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    # Any answer will do, also one that is cut off: a proxy in front of the server may not let /health through.
    probe = partial(http_request, get_default_host_creds(uri), "/health", "GET", timeout=_PROBE_S, max_retries=1)
    ask = partial(probe, backoff_factor=1, raise_on_status=False, stream=True, respect_retry_after_header=False)
    with repeated_call(within, ask, lambda: _PROBE_LIMIT_S, patience_s=_PROBE_PATIENCE_S) as answer:
        _demand_no_redirect(uri, answer)
        wait_s = _asked_to_wait_s(uri, answer)
    time.sleep(wait_s)  # once: who refuses again after it is repeated as any other


def _asked_to_wait_s(uri: str, answer: Any) -> int:
    """The seconds after which a server that refuses for now may be asked again, by its `Retry-After`; 0 where it says
    nothing. Raises RegistryError where that is later than anybody waits here."""
    asked = str(answer.headers.get("Retry-After", ""))
    if answer.status_code not in (429, 503) or not asked:
        return 0
    if not (asked.isdigit() and int(asked) <= _PROBE_LIMIT_S):
        when = f"in {asked} s" if asked.isdigit() else f"at {redacted(asked[:64])}"
        raise RegistryError(
            f"the server takes no requests for now ({answer.status_code}), and says to ask again {when} (Retry-After)",
            fix="run again then; what is finished is kept",
            where=redacted(uri),
            code=Code.REGISTRY_UNREACHABLE,
        )
    return int(asked)


def _demand_mlflow(client: Any, uri: str) -> None:
    """Ask once in each process whether MLflow is at the address, and whether it works: what answers in its place (404,
    502, a log-in page) is said in seconds, and not after the patience that a server has which answered before."""
    if not _is_server(uri) or uri in _answered:
        return
    ask = partial(client.search_experiments, max_results=1)
    try:
        repeated_call(within, ask, answer_limit_s, patience_s=_FIRST_PATIENCE_S)
    except Exception as error:
        if failed_on_the_way(error) or _TOO_MANY.search(str(error)):
            raise
        # Whoever may not do this may do other things; and what else went wrong is said where it matters.
    _demand_logged_models(uri)
    _answered.add(uri)


def _demand_logged_models(uri: str) -> None:
    """Raise RegistryError where the server says that it is older than logged models, which versions are published as,
    and without which this MLflow lists no run's files: each such call is answered as a wrong address is (404)."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        said = http_request(get_default_host_creds(uri), "/version", "GET", timeout=_PROBE_S, max_retries=0)
    except Exception:  # noqa: BLE001 - what keeps it away is said of the calls that need an answer
        return
    release = _RELEASE.fullmatch(said.text.strip()) if said.status_code == 200 else None
    if release is not None and int(release[1]) < _FIRST_WITH_LOGGED_MODELS:
        raise RegistryError(
            f"the server runs MLflow {release[0]}, and compile-stage needs {_FIRST_WITH_LOGGED_MODELS}.0 or newer",
            fix="upgrade the server (pip install --upgrade mlflow, then mlflow db upgrade); or copy the model (mlflow "
            "artifacts download -u models:/NAME/VERSION -d FOLDER) and name it folder:FOLDER",
            where=redacted(uri),
        )


def _demand_scheme(uri: str) -> None:
    """Raise RegistryError for `HOST:PORT`, which MLflow takes for a folder, or HOST for a scheme."""
    if _HOST_AND_PORT.match(uri):
        raise RegistryError(
            "MLFLOW_TRACKING_URI names no scheme",
            fix=f"write http://{redacted(uri)}, or https://{redacted(uri)}",
            where=redacted(uri),
            code=Code.REGISTRY_UNREACHABLE,
        )


def _demand_no_redirect(uri: str, answer: Any) -> None:
    """Raise RegistryError where all of the server is elsewhere, as where http:// is sent on to https://: what reads
    would work, and what writes would arrive without its content. A log-in page for /health alone is no such thing."""
    asked, got = (urlsplit(str(url)) for url in ([*answer.history, answer][0].url, answer.url))
    changes_method = any(hop.status_code in (301, 302, 303) for hop in answer.history)
    if changes_method and asked.path == got.path and asked[:2] != got[:2]:
        there = f"{got.scheme}://{got.netloc}{got.path.removesuffix('/health')}"
        raise RegistryError(
            f"the server sends every request on to {redacted(there)}, and requests that write lose their content so",
            fix=f"set MLFLOW_TRACKING_URI to {redacted(there)}",
            where=redacted(uri),
            code=Code.REGISTRY_UNREACHABLE,
        )


def _at(place: str) -> str:
    """What was being reached, and at which server: a job's variables may name another one than its reader thinks."""
    server = where()
    return redacted(place) if redacted(place) == server or not _is_server(server) else f"{redacted(place)}, at {server}"


def _explained(error: Any, place: str, missing: str) -> RegistryError:
    code, text = str(error.error_code), _sentence(error)
    status = getattr(error, "get_http_status_code", lambda: 500)()
    if is_foreign_404(error):  # of the model that was asked for, this says nothing
        return UnreachableError(
            "the registry can't be reached: the server knows no MLflow at this address (404)",
            fix="check MLFLOW_TRACKING_URI, also the path in it (https://HOST/PATH), and what is in front of the "
            "server; or the server is too old for what was asked",
            where=_at(place),
        )
    if code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND") or status == 404:
        return RegistryError(
            missing or text,
            fix="check the name and MLFLOW_TRACKING_URI; the registry's page lists what there is",
            where=place,
            code=Code.NOT_IN_REGISTRY,
        )
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or status in (401, 403):
        known = code == "PERMISSION_DENIED" or status == 403  # who asks, and has not the right to
        fix = _RIGHTS_FIX if known else _login_fix()
        return RegistryError(f"the registry refuses: {text}", fix=fix, where=_at(place), code=Code.REGISTRY_UNREACHABLE)
    if (refusals := _TOO_MANY.search(text)) is not None:
        number = refusals[1]
        said = "it takes no more requests for now" if number == "429" else "it, or what is in front of it, fails"
        return UnreachableError(
            f"the server answers with error {number} again and again: {said}",
            fix="run again later; what is finished is kept. If it stays so, look at the server (its log, and "
            "whether its disk is full) and at what is in front of it, also at limits on requests",
            where=_at(place),
        )
    if failed_on_the_way(error):
        problem = f"the registry can't be reached: {_short_network(str(error.message))}"
        return UnreachableError(problem, fix=_fix_for(problem), where=_at(place))
    if code == "INVALID_PARAMETER_VALUE":
        return RegistryError(f"the registry refuses: {text}", where=place)
    return RegistryError(f"the registry fails: {text}", fix=_fix_for(text), where=_at(place))


def _login_fix() -> str:
    from mlflow.utils.credentials import read_mlflow_creds

    is_set = os.environ.get("MLFLOW_TRACKING_TOKEN") or read_mlflow_creds().username
    return _WRONG_LOGIN_FIX if is_set else _LOGIN_FIX


def _fix_for(problem: str) -> str:
    for said, fix in _FIXES.items():
        if any(words in problem for words in said):
            return fix
    if problem.endswith(_NO_JSON_SAID) or _NO_JSON.search(problem):
        return _NO_JSON_FIX
    if _NOT_ARRIVED in problem or problem.endswith(_CUT_OFF):
        return TRANSFER_FIX
    return _BUSY_FIX if _BUSY_DATABASE in problem else _UNREACHABLE_FIX


def _refused(error: Exception, place: str) -> RegistryError | None:
    """What an upload or download was refused with, beside the API whose errors are MLflow's own; None for all else."""
    status = refused_with(error)
    if status == 413:
        return RegistryError(
            "the registry refuses a file of this size (413)",
            fix="raise the limit on the size of a request in the server, or in what is in front of it (nginx: "
            "client_max_body_size)",
            where=place,
        )
    if status is not None:
        problem = f"the registry refuses its files: {_sentence(error)}"
        fix = _RIGHTS_FIX if status == 403 else _login_fix()
        return RegistryError(problem, fix=fix, where=_at(place), code=Code.REGISTRY_UNREACHABLE)
    return None


def _unusable_package(error: ImportError, place: str) -> RegistryError:
    """What to say where MLflow lacks the package of a store or a database, which it imports when it is first asked for
    it; or where it was written for another version of one."""
    import mlflow

    module = (error.name or "").partition(".")[0]
    package = _PACKAGES.get(module, module)
    if package and (isinstance(error, ModuleNotFoundError) or module in _PACKAGES):
        return RegistryError(
            f"MLflow needs {package} to reach it, which is not installed", fix=f"pip install {package}", where=place
        )
    return RegistryError(
        f"MLflow {mlflow.__version__} does not work with the installed {package or 'packages'}: {_sentence(error)}",
        fix=f"install a newer MLflow, or an older version of {package or 'that package'}",
        where=place,
    )


def _short_network(text: str) -> str:
    """The innermost cause of a nested network message (`... Connection refused`)."""
    if _NO_JSON.search(text):  # a page is not shown: it may hold anything
        return _NO_JSON_SAID
    if "WRONG_VERSION_NUMBER" in text:  # as OpenSSL says it
        return "what answers there speaks no TLS: its address begins with http://"
    if (failed := _FILE_FAILED.search(text)) is not None:
        return f"{failed[1]}{_NOT_ARRIVED} ({_short_network(failed[2])})"
    if (absent := _NO_AUTHORITIES.search(text)) is not None:
        return f"{_NO_AUTHORITIES_SAID} {absent[1]}"
    if (invalid := _NOT_VERIFIED.search(text)) is not None:
        return ": ".join(filter(None, (_NOT_VERIFIED_SAID, invalid[1])))
    if (refused := _REFUSED_BY_PROXY.search(text)) is not None:
        return f"{_PROXY_REFUSED_SAID}: {refused[1].strip()}"
    if "ProxyError" in text or "Unable to connect to proxy" in text:
        return f"{_NO_PROXY_SAID}: {_cause(text)}"
    return _cause(text)


def _cause(text: str) -> str:
    for cause in (
        "Connection refused",
        "Name or service not known",
        "timed out",
        "No route to host",
        "Connection reset by peer",
        "Remote end closed connection",
        _CUT_OFF,
    ):
        if cause.lower() in text.lower():
            return cause[0].lower() + cause[1:]
    return _first_sentence(text)


def _sentence(error: Exception) -> str:
    return _first_sentence(str(getattr(error, "message", "") or error) or type(error).__name__)


def _first_sentence(text: str) -> str:
    text = redacted(next((line.strip() for line in text.splitlines() if line.strip()), ""))
    # MLflow's longest, on its file store, has 590 characters, and what to do about it at the end.
    return text if len(text) <= _LONGEST_SENTENCE else f"{text[:_LONGEST_SENTENCE]}..."
