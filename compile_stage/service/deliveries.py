"""One delivery of MLflow's webhook: is it what MLflow signed, is it fresh, and what does it report?

MLflow signs `DELIVERY-ID.TIMESTAMP.BODY` with HMAC-SHA256 and sends `v1,BASE64`. The body is checked as the bytes that
came, before anything reads it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIGNATURE_HEADER = "x-mlflow-signature"
DELIVERY_HEADER = "x-mlflow-delivery-id"
TIMESTAMP_HEADER = "x-mlflow-timestamp"
MAX_BODY = 256 * 1024
"""Bytes. MLflow's events hold a name, a version and tags of at most 5000 characters each."""
_MAX_ID = 128
_MAX_NAME = 256  # characters; as MLflow's own column
_OWN_TAGS = "compile_stage."


@dataclass(frozen=True)
class Delivery:
    """What was reported.

    Attributes:
        event: `model_version.created`, `model_version_alias.created` or `model_version_tag.set`.
        alias: The one that was created; empty for other events.
        own: It reports what the stage itself published or tagged.
    """

    id: str
    event: str
    name: str
    version: str
    alias: str = ""
    own: bool = False


@dataclass(frozen=True)
class Refused:
    """Why a delivery is not taken.

    Attributes:
        status: HTTP's.
        reason: A word, for the metrics.
        problem: A sentence.
    """

    status: int
    reason: str
    problem: str


def signature(secret: str, delivery: str, timestamp: str, body: bytes) -> str:
    """The header's value for these, as MLflow makes it."""
    content = f"{delivery}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret.encode(), content, hashlib.sha256).digest()).decode()


def check(
    headers: Mapping[str, str], body: bytes, secrets: Sequence[str], *, now: float, max_age_s: float
) -> Delivery | Refused:
    """What a request reports, or why it is refused.

    Args:
        headers: With names in lower case.
        secrets: Any of which may have signed it; empty: signatures are not looked at.
        now: Seconds since 1970.
    """
    delivery, timestamp = headers.get(DELIVERY_HEADER, ""), headers.get(TIMESTAMP_HEADER, "")
    if not delivery or len(delivery) > _MAX_ID or not timestamp.isascii() or not timestamp.isdigit():
        return Refused(400, "malformed", "it has no delivery id, or no time stamp: MLflow sends both")
    if secrets and not _signed(headers.get(SIGNATURE_HEADER, ""), secrets, delivery, timestamp, body):
        return Refused(401, "signature", "its signature is not that of the webhook's secret")
    age_s = now - int(timestamp[:15])
    if abs(age_s) > max_age_s:
        return Refused(401, "stale", f"it was signed {age_s:.0f} s ago; {max_age_s:.0f} s are allowed")
    return _parsed(delivery, body)


def _signed(given: str, secrets: Sequence[str], delivery: str, timestamp: str, body: bytes) -> bool:
    """Compared in constant time, with every secret."""
    there = given.encode(errors="replace")
    matches = [hmac.compare_digest(there, signature(one, delivery, timestamp, body).encode()) for one in secrets]
    return any(matches)


def _parsed(delivery: str, body: bytes) -> Delivery | Refused:
    try:
        said = json.loads(body)
        event, data = f"{said['entity']}.{said['action']}", said["data"]
        name, version = data.get("name"), str(data.get("version", ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Refused(400, "malformed", "it is not JSON as MLflow sends it")
    if event not in ("model_version.created", "model_version_alias.created", "model_version_tag.set"):
        return Refused(200, "ignored", f"{event[:60]} is no event that the service acts on")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not (version.isascii() and version.isdigit()):
        return Refused(400, "malformed", "it names no version of a registered model")
    alias = data.get("alias") if event == "model_version_alias.created" else ""
    return Delivery(
        id=delivery,
        event=event,
        name=name,
        version=str(int(version[:18])),
        alias=alias[:_MAX_NAME] if isinstance(alias, str) else "",
        own=_is_own(event, data),
    )


def _is_own(event: str, data: Mapping[str, Any]) -> bool:
    """The stage makes a version in one call with all its tags, and sets tags of its own name."""
    if event == "model_version.created":
        tags = data.get("tags")
        return isinstance(tags, dict) and f"{_OWN_TAGS}key" in tags
    return event == "model_version_tag.set" and str(data.get("key", "")).startswith(_OWN_TAGS)
