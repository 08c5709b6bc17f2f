"""What the stores of files that MLflow's client talks to by itself (S3, Google, Azure) raise.

Where no tracking server hands the files on (`mlflow server --no-serve-artifacts`), each client needs its own way to the
store and its own account there, and what fails is no error of MLflow's, or one that keeps only the store's sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from compile_stage.core.storage import with_causes

_CLIENTS = {
    "S3": ("boto3.", "botocore.", "s3transfer."),
    "Google Cloud Storage": ("google.api_core.", "google.auth.", "google.cloud.", "google.resumable_media."),
    "Azure": ("azure.",),
}
"""Store → where the modules of its client's errors begin."""
_LISTS_FILES = "artifacts from s3://"  # as MLflow says it of a download, of whose errors it keeps the text alone
_SAID = re.compile(r"An error occurred \((\w+)\) when calling the \w+ operation(?: \([^)]*\))?: ?(.*)")  # botocore's
_REFUSED_CODE = re.compile(
    r"40[0135]|AccessDenied|AccountProblem|AuthorizationHeaderMalformed|ExpiredToken|InvalidAccessKeyId|InvalidToken|"
    r"NoSuchBucket|PermanentRedirect|QuotaExceeded|RequestTimeTooSkewed|SignatureDoesNotMatch|TokenRefreshRequired"
)
"""S3's codes for what stays refused, where no status is known."""
_MAY_PASS = ("RequestTimeout", "SlowDown", "OperationAborted")  # S3's codes of a 4xx
_LACKS_FILE = ("404", "NoSuchKey")
_WRONG_PLACE = ("NoSuchBucket", "PermanentRedirect", "AuthorizationHeaderMalformed", "404")
_NO_ACCOUNT = ("Credential", "Token", "ProfileNotFound", "RefreshError", "ClientAuthenticationError", "SSO")
"""In the names of what a client raises before it asks: no account is configured, or it can't be renewed."""
_ACCOUNTS = {
    "S3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else ~/.aws/credentials, or the machine's "
    "role",
    "Google Cloud Storage": "GOOGLE_APPLICATION_CREDENTIALS, else the machine's service account",
    "Azure": "AZURE_STORAGE_CONNECTION_STRING or AZURE_STORAGE_ACCESS_KEY, else the machine's identity",
}
_ADDRESSES = {"S3": "MLFLOW_S3_ENDPOINT_URL, else AWS_ENDPOINT_URL, where it is not Amazon's; AWS_DEFAULT_REGION"}


@dataclass(frozen=True)
class StoreTrouble:
    """What a store's client raised.

    Attributes:
        store: `S3`, `Google Cloud Storage` or `Azure`.
        said: One clause.
        code: The store's own, else the HTTP status; empty where the store said nothing.
        refused: It is the same when it is asked again: no account, no rights, no such bucket.
    """

    store: str
    said: str
    code: str = ""
    refused: bool = False

    @property
    def lacks_bucket(self) -> bool:
        """Not even the bucket is there: nothing follows for the files in it."""
        return self.code == "NoSuchBucket"

    @property
    def fix(self) -> str:
        """What to do about it."""
        after = "then run again; what is finished is kept"
        if self.refused and self.code not in _WRONG_PLACE:
            return (
                f"this machine's client asks the store by itself: check the account there ({_ACCOUNTS[self.store]}), "
                f"that it has not expired, and that it may list, read and write; {after}"
            )
        named = f" ({_ADDRESSES[self.store]})" if self.store in _ADDRESSES else ""
        return f"check the store's address{named}, and that it works and can be reached from this machine; {after}"


def store_trouble(error: BaseException) -> StoreTrouble | None:
    """What the client of a store raised, where `error` is that or was raised for it; else None, also where the store
    just lacks a file."""
    raised = [(one, store) for one in with_causes(error) if (store := _store_of(one))]
    said = _SAID.search(str(error)) if raised or _LISTS_FILES in str(error) else None
    if not raised and said is None:
        return None
    store = raised[0][1] if raised else "S3"
    status, code, text = _answer([one for one, _ in raised])
    if not code and said is not None:
        code, text = said[1], said[2]
    text = " ".join((text or str(raised[0][0] if raised else error)).split())
    if code in _LACKS_FILE:
        return None
    if code:
        by_status = status is not None and 300 <= status < 500 and status not in (408, 429) and code not in _MAY_PASS
        refused = by_status if status is not None else _REFUSED_CODE.fullmatch(code) is not None
        return StoreTrouble(store, f"{text.rstrip('.')} ({code})", code, refused)
    none = any(word in type(one).__name__ for one, _ in raised for word in _NO_ACCOUNT)
    return StoreTrouble(store, text.rstrip("."), refused=none)


def _store_of(error: BaseException) -> str:
    module = type(error).__module__
    return next((store for store, clients in _CLIENTS.items() if module.startswith(clients)), "")


def _answer(errors: list[BaseException]) -> tuple[int | None, str, str]:
    """HTTP status, code and sentence of the store's answer; None and empty where it gave none."""
    for error in errors:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore's
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            said = response.get("Error", {})
            return status, str(said.get("Code", status)), str(said.get("Message", ""))
        status = getattr(error, "status_code", None) or getattr(error, "code", None)  # Azure's and Google's
        if isinstance(status, int):
            return int(status), str(int(status)), str(getattr(error, "message", ""))
    return None, "", ""
