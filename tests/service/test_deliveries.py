"""Deliveries of MLflow's webhook: which are taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.service.deliveries import Delivery, Refused, check, signature

SECRET, NOW = "0123456789abcdef0123456789abcdef", 1_790_000_000.0
ALIAS = {
    "entity": "model_version_alias",
    "action": "created",
    "timestamp": "2026-11-23T20:00:00",
    "data": {"name": "fraud", "alias": "candidate", "version": "7"},
}


def sent(
    document: Any = ALIAS, *, secret: str = SECRET, age_s: float = 0, **changed: str
) -> tuple[dict[str, str], bytes]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    stamp = str(int(NOW - age_s))
    headers = {"x-mlflow-delivery-id": "d-1", "x-mlflow-timestamp": stamp}
    headers["x-mlflow-signature"] = signature(secret, "d-1", stamp, body)
    return {**headers, **changed}, body


def checked(headers: dict[str, str], body: bytes, secrets: tuple[str, ...] = (SECRET,)) -> Delivery | Refused:
    return check(headers, body, secrets, now=NOW, max_age_s=300)


def test_the_signature_is_mlflows_own() -> None:
    """Broken: every delivery of a real MLflow would be refused, or what it does not sign would be taken."""
    from mlflow.webhooks.delivery import _generate_hmac_signature

    payload = json.dumps(ALIAS)
    theirs = _generate_hmac_signature(SECRET, "d-1", "1790000000", payload)
    assert signature(SECRET, "d-1", "1790000000", payload.encode()) == theirs


def test_what_mlflow_signed_is_taken() -> None:
    """Broken: nothing would ever run; or, while a secret is replaced, only half of the deliveries would."""
    expected = Delivery(id="d-1", event="model_version_alias.created", name="fraud", version="7", alias="candidate")
    assert checked(*sent()) == expected
    assert checked(*sent(), secrets=("another-secret-of-32-characters", SECRET)) == expected


@pytest.mark.parametrize(
    ("delivery", "reason"),
    [
        (sent(secret="f" * 32), "signature"),
        (sent(**{"x-mlflow-signature": ""}), "signature"),
        (sent(**{"x-mlflow-signature": "v1,é"}), "signature"),
        (sent(**{"x-mlflow-delivery-id": "d-2"}), "signature"),
        (sent(**{"x-mlflow-timestamp": str(int(NOW) + 1)}), "signature"),
        ((sent()[0], json.dumps({**ALIAS, "data": {**ALIAS["data"], "version": "8"}}).encode()), "signature"),  # type: ignore[dict-item]
        (sent(age_s=301), "stale"),
        (sent(age_s=-301), "stale"),
        (sent(**{"x-mlflow-timestamp": "soon"}), "malformed"),
        (sent(**{"x-mlflow-delivery-id": ""}), "malformed"),
        (sent(**{"x-mlflow-delivery-id": "d" * 129}), "malformed"),
        (sent(b"{"), "malformed"),
        (sent(b"[" * 100_000), "malformed"),
        (sent([]), "malformed"),
        (sent({**ALIAS, "data": None}), "malformed"),
        (sent({**ALIAS, "data": {"name": "fraud", "version": "../1"}}), "malformed"),
        (sent({**ALIAS, "data": {"name": ["fraud"], "version": "1"}}), "malformed"),
        (sent({**ALIAS, "action": "deleted"}), "ignored"),
    ],
)
def test_all_else_is_refused(delivery: tuple[dict[str, str], bytes], reason: str) -> None:
    """Broken: whoever reaches the port could start runs, replay an old delivery, or end the service."""
    refused = checked(*delivery)
    assert isinstance(refused, Refused)
    assert refused.reason == reason


@given(st.binary(max_size=400), st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_no_bytes_end_the_check(body: bytes, headers: dict[str, str]) -> None:
    """Broken: a request of a stranger would be answered by a traceback."""
    assert isinstance(check({**sent()[0], **headers}, body, (), now=NOW, max_age_s=300), Delivery | Refused)


@pytest.mark.parametrize(
    ("event", "data", "own"),
    [
        ("model_version.created", {"tags": {"compile_stage.key": "sha256:0"}}, True),
        ("model_version.created", {"tags": {"team": "risk"}}, False),
        ("model_version_tag.set", {"key": "compile_stage.report", "value": "final"}, True),
        ("model_version_tag.set", {"key": "release.by", "value": "ann"}, False),
    ],
)
def test_what_the_stage_did_itself_is_known_by_its_tags(event: str, data: dict[str, Any], own: bool) -> None:
    """Broken: each publication would be looked at a dozen times, once for each tag that the stage sets."""
    entity, _, action = event.partition(".")
    document = {"entity": entity, "action": action, "data": {"name": "fraud", "version": "7", **data}}
    delivery = checked(*sent(document))
    assert isinstance(delivery, Delivery)
    assert delivery.own is own
