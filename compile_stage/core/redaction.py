"""Secrets that stand in addresses, and what is shown in their place.

Libraries quote in their messages what they were given: a database's URI with its password, the signed URL of a data
set. Messages end up in CI logs, reports and result.json, which more people read than may read the registry.
"""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s]*@")
# A tracking URI that somebody wrote without its scheme: user:password@host. Not models:/name@alias.
_BARE_PASSWORD = re.compile(r"(?<![\w.+-])([\w.+-]+):[^\s/:@'\"]+@(?=[\w\[])")
_PARAMETER = re.compile(
    r"""([?&;](?:
        sig | signature | pin-value | token | access_?token | id_token | refresh_token | auth | authorization | code
      | passw(?:or)?d | pwd | secret | client_secret | api_?key | key | credential s?
      | awsaccesskeyid | googleaccessid | key-pair-id | policy
      | x-(?:amz|goog|oss)-(?:signature | credential | security-token)
    )=)[^&;\s'"<>)\]}]+""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def redacted(text: str) -> str:
    """A text without the secrets of the addresses in it.

    `postgresql://user:secret@host/db` → `postgresql://user@host/db`; `https://host/x.npz?sig=abc` →
    `https://host/x.npz?sig=***`; a header's `Bearer abc...` → `Bearer ***`.
    """
    # Each pattern has a character that it can't do without: most texts, and most words of a report, hold none.
    if "@" in text:
        text = _without_passwords(text)
    if "=" in text:
        text = _PARAMETER.sub(r"\1***", text)
    return _HEADER.sub(r"\1 ***", text) if "Bearer" in text or "Basic" in text else text


def _without_passwords(text: str) -> str:
    """Looks at the words with an `@` alone: a report holds a library of 900 kB in a few lines."""
    parts: list[str] = []
    done = 0
    while (at := text.find("@", done)) >= 0:
        begin = max(done, *(text.rfind(space, done, at) + 1 for space in " \n"))
        end = min(found if (found := text.find(space, at)) >= 0 else len(text) for space in " \n")
        parts += [text[done:begin], _BARE_PASSWORD.sub(r"\1@", _PASSWORD.sub(r"\1@", text[begin:end]))]
        done = end
    return "".join([*parts, text[done:]])
