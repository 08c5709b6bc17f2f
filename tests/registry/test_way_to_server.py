"""What is said where a proxy or a certificate keeps the tracking server away, and what to do about it."""

from __future__ import annotations

import datetime
import errno
import http.server
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_stage.core.errors import CompileStageError, RegistryError, StorageError
from compile_stage.registry import mlflow_connection
from compile_stage.registry.folder_files import file_trouble
from compile_stage.registry.mlflow_connection import connect

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
AUTHORITIES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS", "REQUESTS_CA_BUNDLE")


@pytest.fixture(autouse=True)
def only_what_a_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.lower, PROXIES), *AUTHORITIES, "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mlflow_connection, "_PROBE_PATIENCE_S", 0.0)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, issued by itself, in one PEM file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = tmp_path / "server.pem"
    file.write_bytes(key.private_bytes(*form) + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
def tls_port(certificate: Path) -> Iterator[int]:
    """A server that speaks TLS, and answers 404."""

    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_error(404)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def refusal(uri: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Problem and advice."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(RegistryError) as refused:
        connect()
    return refused.value.problem, refused.value.fix


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_not_there_is_named(scheme: str, closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: "connection refused; check MLFLOW_TRACKING_URI and that the server runs", of a server that runs and was
    never asked."""
    monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{closed_port}")
    problem, fix = refusal(f"{scheme}://mlflow.example.org", monkeypatch)
    assert "the proxy in front of the server can't be reached: connection refused" in problem
    assert "NO_PROXY" in fix


def test_the_advice_on_proxies_mends_it(closed_port: int, tls_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who follows it still waits for the proxy."""
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    problem, _ = refusal(f"https://127.0.0.1:{tls_port}", monkeypatch)
    assert "proxy" not in problem
    assert "certificate" in problem


def test_an_authority_that_nobody_trusts_is_to_be_named(
    tls_port: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: "check MLFLOW_TRACKING_URI and that the server runs", where a company's own authority issued the server's
    certificate; nothing said which variable names it."""
    uri = f"https://127.0.0.1:{tls_port}"
    problem, fix = refusal(uri, monkeypatch)
    assert "the server's certificate can't be verified: self-signed certificate" in problem
    assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in fix
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
    connect()


def test_a_host_that_the_certificate_is_not_for_is_said(
    tls_port: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever named the authority reads once more that the certificate can't be verified, and not that it is
    for another host."""
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
    problem, fix = refusal(f"https://localhost:{tls_port}", monkeypatch)
    assert "certificate is not valid for 'localhost'" in problem
    assert "use the host that it is for" in fix


def test_a_file_of_certificates_that_is_not_there_is_named(
    tls_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: "check that the server runs", where a path of the own machine is wrong."""
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "absent.pem"))
    problem, fix = refusal(f"https://127.0.0.1:{tls_port}", monkeypatch)
    assert f"there is no file of certificates at {tmp_path}/absent.pem" in problem
    assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in fix


def test_a_server_of_mlflow_2_is_said_to_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after 50 s, "the registry can't be reached: the server knows no MLflow at this address", of a server that
    had answered all calls but those for logged models, which MLflow 2 lacks."""

    class Old(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"2.22.0" if self.path == "/version" else b"{}")

        do_POST = do_GET  # noqa: N815 - called by this name

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        problem, fix = refusal(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        server.shutdown()
    assert problem == "the server runs MLflow 2.22.0, and compile-stage needs 3.0 or newer"
    assert "upgrade the server" in fix
    assert "folder:FOLDER" in fix


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [
        (errno.ENOSPC, StorageError, "free space where the registry keeps its files"),
        (errno.EROFS, RegistryError, "mount it for writing"),
        (errno.EACCES, RegistryError, "the right to read and write there"),
        (errno.EIO, RegistryError, "look at the disk there"),
    ],
)
def test_what_the_registrys_disk_refuses_says_where_and_what_to_do(
    code: int, kind: type[CompileStageError], fix: str
) -> None:
    """Broken: of a full artifact store the message names no place and the folders of this machine, which have space;
    of one that is mounted read-only, it says nothing to do."""
    with pytest.raises(kind) as caught, mlflow_connection.trouble("models:/m-1/MLmodel"):
        raise OSError(code, os.strerror(code))  # as `write` raises it, without the file's name
    assert caught.value.where == "models:/m-1/MLmodel"
    assert fix in caught.value.fix
    with pytest.raises(RegistryError) as found, file_trouble("folder:/models"):
        raise OSError(code, os.strerror(code))
    assert fix.partition(" where ")[0] in found.value.fix
