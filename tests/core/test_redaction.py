from __future__ import annotations

import pytest

from compile_stage.core.errors import PolicyError, RegistryError, WorkerError
from compile_stage.core.redaction import redacted

SECRETS = {
    "postgresql://u:s3cret@host:5/db": "postgresql://u@host:5/db",
    "can't connect to 'http://u:s3@cret@host/api': refused": "can't connect to 'http://u@host/api': refused",
    "mysql://host/db?user=u&password=s3cret&x=1": "mysql://host/db?user=u&password=***&x=1",
    "ml-user:s3cret@mlflow.example:5000": "ml-user@mlflow.example:5000",
    "there is no file:///srv/u:s3cret@host": "there is no file:///srv/u@host",
    "https://a.blob.example/d/x.npz?sv=2022&se=2026&sig=s3cret%3D": "https://a.blob.example/d/x.npz?sv=2022&se=2026&sig=***",
    "https://b.s3.example/x?X-Amz-Credential=s3cret/1&X-Amz-Signature=s3cret&y=1": (
        "https://b.s3.example/x?X-Amz-Credential=***&X-Amz-Signature=***&y=1"
    ),
    "https://g.example/x?X-Goog-Signature=s3cret": "https://g.example/x?X-Goog-Signature=***",
    "https://h.example/x?token=s3cret": "https://h.example/x?token=***",
    "<a href='https://h.example/x?a=1&amp;sig=s3cret'>": "<a href='https://h.example/x?a=1&amp;sig=***'>",
    '{"url": "https://h.example/x?access_token=s3cret"}': '{"url": "https://h.example/x?access_token=***"}',
    "Authorization: Bearer s3cret.s3cret-1": "Authorization: Bearer ***",
}
PLAIN = [
    "http://host:5000",
    "models:/fraud-compiled@cpu-server-prod",
    "folder:/srv/models/fraud@prod",
    "policy.yaml:3:1: targets: wrong",
    "mailto: a@b.example",
    "runs:/0123/model?step=3",
    "the digest sha256:0123 differs",
    "compile-stage promote models:/NAME/VERSION --alias A@B",
]


@pytest.mark.parametrize("text", SECRETS)
def test_what_opens_doors_is_left_out(text: str) -> None:
    """Broken: a CI log or a report would show a database's password, or the signed URL of a data set."""
    assert redacted(text) == SECRETS[text]
    assert redacted(SECRETS[text]) == SECRETS[text]


@pytest.mark.parametrize("text", PLAIN)
def test_what_opens_nothing_stays(text: str) -> None:
    """Broken: a message would lose the name that it is about."""
    assert redacted(text) == text


def test_no_error_of_ours_carries_a_secret() -> None:
    """Broken: whatever is printed, reported or written to result.json of an error would hold it."""
    url = "https://h.example/x.npz?sig=s3cret"
    errors = (
        RegistryError(url, fix=url, where=url),
        WorkerError("exception", url, detail=url, fix=url),
        PolicyError(url, problems=(url,)),
    )
    assert "s3cret" not in repr([(str(e), e.args, vars(e)) for e in errors])


def test_a_text_of_many_lines_loses_what_each_of_them_would() -> None:
    """Broken: reports are looked through line by line, and a secret could stand where two of them meet."""
    lines = [*SECRETS, *PLAIN]
    assert redacted("\n".join(lines)) == "\n".join(map(redacted, lines))
