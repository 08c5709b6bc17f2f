"""A store of files (S3) that MLflow's client talks to by itself, and that refuses, fails, or is another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from s3_server import S3, s3_server

from compile_stage.core.errors import RegistryError
from compile_stage.core.records import SourceModel
from compile_stage.registry.mlflow import MLflowRegistry
from compile_stage.registry.mlflow_connection import trouble
from compile_stage.registry.mlflow_retries import UnreachableError, failed_on_the_way
from compile_stage.registry.mlflow_stores import store_trouble


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as started:
        yield started


@pytest.fixture
def s3(server: S3, registry: MLflowRegistry, source: SourceModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """What is published goes to a bucket of its own; the source lies on this machine's disk."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", server.proxy.uri)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own take seconds
    monkeypatch.setattr("compile_stage.registry.mlflow_retries._PATIENCE_S", 0.1)
    monkeypatch.setattr("compile_stage.registry.mlflow_retries._PAUSES_S", (0.01, 0.01, 0.01))
    MlflowClient().create_experiment("on-s3", artifact_location=f"s3://{server.bucket()}/root")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "on-s3")
    server.proxy.fault = server.proxy.of = ""
    yield server
    server.proxy.fault = ""


def test_a_store_that_fails_is_named_and_nothing_is_published(
    registry: MLflowRegistry, source: SourceModel, s3: S3, make_bundle: Callable[..., Any]
) -> None:
    """Broken: a store that is down is a bug of ours (exit code 70)."""
    bundle = make_bundle("net-compiled")
    for fault in ("dropped", "error 500"):
        s3.proxy.fault, s3.proxy.of = fault, "PUT"
        with pytest.raises(UnreachableError, match=r"store of files \(S3\) fails") as failed:
            registry.push(bundle, source, {})
        assert "MLFLOW_S3_ENDPOINT_URL" in str(failed.value.fix)
    s3.proxy.fault = ""
    assert registry.find(bundle.name, bundle.key) is None
    assert registry.push(bundle, source, {}).created
    assert not registry.push(bundle, source, {}).created


def test_a_store_that_is_down_is_asked_for_the_patience_of_one_call(
    registry: MLflowRegistry,
    source: SourceModel,
    s3: S3,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: the publication is made three times, and each repeats its upload in vain: one and a half minutes before
    a store that refuses connections is named."""
    monkeypatch.setattr("compile_stage.registry.mlflow_retries._PATIENCE_S", 0.0)
    s3.proxy.fault, s3.proxy.of = "dropped", "PUT"
    before = s3.proxy.seen["dropped"]
    with pytest.raises(UnreachableError, match="store of files"):
        registry.push(make_bundle("net-compiled"), source, {})
    assert s3.proxy.seen["dropped"] - before <= 5  # S3's client itself asks up to five times


def test_a_result_that_the_store_does_not_hand_out_is_not_called_missing(
    registry: MLflowRegistry, source: SourceModel, s3: S3, make_bundle: Callable[..., Any], tmp_path: Path
) -> None:
    """Broken: `compare` of a published version says that no result.json is stored with it, since S3 is down."""
    (tmp_path / "result.json").write_text("{}")
    receipt = registry.push(make_bundle("net-compiled"), source, {"result.json": tmp_path / "result.json"})
    bare = registry.push(make_bundle("net-compiled", "other"), source, {})
    for fault, at in (("dropped", "GET"), ("dropped", "result.json"), ("error 500", "")):
        s3.proxy.fault, s3.proxy.of = fault, at
        with pytest.raises(UnreachableError, match=r"store of files \(S3\) fails"):
            registry.result(receipt.uri, tmp_path)
    s3.proxy.fault = ""
    (tmp_path / "result.json").unlink()
    assert registry.result(receipt.uri, tmp_path).read_text() == "{}"
    with pytest.raises(RegistryError, match=f"no result.json is stored with {bare.uri}"):
        registry.result(bare.uri, tmp_path)


class _AnotherStore(BaseHTTPRequestHandler):
    """Has no bucket."""

    def do_GET(self) -> None:
        body = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing on standard error."""


def test_a_bucket_that_is_not_there_damages_no_version(
    registry: MLflowRegistry,
    source: SourceModel,
    s3: S3,
    make_bundle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: a run with another store's address marks a whole version as damaged, and it is refused from then on."""
    bundle = make_bundle("net-compiled")
    receipt = registry.push(bundle, source, {})
    with HTTPServer(("127.0.0.1", 0), _AnotherStore) as another:
        threading.Thread(target=another.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://127.0.0.1:{another.server_port}")
        with pytest.raises(RegistryError, match="NoSuchBucket") as refused:
            registry.push(bundle, source, {})
        another.shutdown()
    assert "MLFLOW_S3_ENDPOINT_URL" in str(refused.value.fix)
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3.proxy.uri)
    tags = MlflowClient().get_model_version(receipt.name, receipt.version).tags
    assert tags["compile_stage.key"] == bundle.key
    again = registry.push(bundle, source, {})
    assert (again.version, again.created) == (receipt.version, False)


def _raised(code: str, status: int) -> Exception:
    """As `S3ArtifactRepository` raises what S3 answered to an upload."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import ClientError

    said = {"Error": {"Code": code, "Message": "No."}, "ResponseMetadata": {"HTTPStatusCode": status}}
    cause = ClientError(said, "PutObject")  # type: ignore[arg-type]
    error = S3UploadFailedError(f"Failed to upload a to b: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "status", "refused"),
    [
        ("AccessDenied", 403, True),
        ("ExpiredToken", 400, True),
        ("PermanentRedirect", 301, True),
        ("RequestTimeout", 400, False),
        ("SlowDown", 503, False),
        ("XMinioStorageFull", 507, False),
    ],
)
def test_what_may_pass_is_asked_again_and_what_is_refused_is_not(code: str, status: int, refused: bool) -> None:
    """Broken: an account without rights is waited for, or a store that is busy ends the run."""
    uploading = _raised(code, status)
    fetching = MlflowException(
        "The following failures occurred while downloading one or more artifacts from s3://b/root:\n"
        f"##### File MLmodel #####\nAn error occurred ({code}) when calling the GetObject operation: No."
    )
    for error in (uploading, fetching):
        assert failed_on_the_way(error) is not refused
        said = rf"\(S3\) {'refuses' if refused else 'fails'}: No \({code}\)"
        with pytest.raises(RegistryError, match=said), trouble("models:/net/1"):
            raise error


def test_whoever_has_no_account_at_the_store_is_told_how_to_name_one() -> None:
    """Broken: credentials that are not set are a bug of ours (exit code 70)."""
    from botocore.exceptions import NoCredentialsError

    assert not failed_on_the_way(NoCredentialsError())
    with pytest.raises(RegistryError, match=r"\(S3\) refuses: Unable to locate") as refused, trouble("models:/net/1"):
        raise NoCredentialsError
    assert "AWS_ACCESS_KEY_ID" in str(refused.value.fix)


def test_an_error_of_googles_client_is_no_error_of_protobuf() -> None:
    """Broken: what Google's store answers is a bug of ours; or a message that can't be read is blamed on the store."""
    exceptions = pytest.importorskip("google.api_core.exceptions")
    message = pytest.importorskip("google.protobuf.message")
    refused = store_trouble(exceptions.Forbidden("no storage.objects.create"))
    assert refused is not None
    assert refused.refused
    assert "GOOGLE_APPLICATION_CREDENTIALS" in refused.fix
    failed = store_trouble(exceptions.ServiceUnavailable("busy"))
    assert failed is not None
    assert not failed.refused
    assert store_trouble(message.DecodeError("no")) is None


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("INTERNAL_ERROR: An error occurred (AccessDenied) when calling the PutObject operation: No."),
        MlflowException(
            "The following failures occurred while downloading one or more artifacts from s3://b/root:\n"
            "##### File a #####\nAn error occurred (404) when calling the HeadObject operation: Not Found"
        ),
    ],
)
def test_what_a_server_says_of_its_own_store_and_a_file_that_is_gone_are_no_trouble_of_the_client(
    error: Exception,
) -> None:
    """Broken: the advice is to check this machine's account where the server's is wrong; or a file is gone, and the
    store is asked again and again."""
    assert store_trouble(error) is None
