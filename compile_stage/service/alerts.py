"""Alerts: a JSON document that is posted to an address, signed as MLflow signs its deliveries."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from compile_stage.core.redaction import redacted
from compile_stage.service.deliveries import signature

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10
_PAUSES_S = (1.0, 4.0, 16.0)


def alert(url: str, secret: str, document: Mapping[str, Any], pauses_s: tuple[float, ...] = _PAUSES_S) -> bool:
    """Post a document until somebody takes it (2xx), four times at the most; True when it was taken.

    The receiver finds `X-Compile-Stage-Delivery-Id`, `-Timestamp` and, where there is a secret, `-Signature`: the HMAC
    of `ID.TIMESTAMP.BODY`, as of MLflow's own deliveries. The id is the same in each attempt.
    """
    delivery, body = str(uuid.uuid4()), json.dumps(document, sort_keys=True).encode()
    for pause_s in (*pauses_s, None):
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "X-Compile-Stage-Delivery-Id": delivery,
            "X-Compile-Stage-Timestamp": timestamp,
        }
        if secret:
            headers["X-Compile-Stage-Signature"] = signature(secret, delivery, timestamp, body)
        try:
            request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - http(s), as checked
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
                return True
        except (OSError, ValueError, urllib.error.URLError) as error:
            _log.warning("the alert was not taken: %s", redacted(str(error)))
        if pause_s is not None:
            time.sleep(pause_s)
    return False
