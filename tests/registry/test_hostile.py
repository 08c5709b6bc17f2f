"""Folders, descriptions, addresses and servers that mean harm: each ends with a sentence, in bounded time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import CompileStageError, IntegrityError, RegistryError, SourceError
from compile_stage.registry import dataset_sources, mlflow_connection, mlflow_retries
from compile_stage.registry.folder import FolderRegistry
from compile_stage.registry.mlflow import MLflowRegistry

from .conftest import LogModel, MakeBundle, write_model

SECRET = "s3cret"


def make_pipe(place: Path) -> None:
    os.mkfifo(place)


def make_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(place.parent)  # a socket's path may have 107 characters
        bound.bind(place.name)


HARMFUL: dict[str, Callable[[Path], Any]] = {
    "a link to a file outside": lambda place: place.symlink_to(place.parents[2] / "secret.txt"),
    "a link to a folder above": lambda place: place.symlink_to(place.parents[1]),
    "a link to a folder of its own": lambda place: place.symlink_to(place.parent.parent / "data"),
    "a link that leads nowhere": lambda place: place.symlink_to("nothing"),
    "a link to itself": lambda place: place.symlink_to(place.name),
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a link to a device": lambda place: place.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_a_source_folder_holds_its_own_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Broken: a link would bring a secret file into what is published, and a pipe or a circle would never end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text(SECRET)
    folder = write_model(tmp_path / "net")
    HARMFUL[what](folder / "data" / "extra.json")
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"its data/extra\.json is a") as caught:
        FolderRegistry().resolve(f"folder:{folder}", tmp_path / "sources")
    assert time.monotonic() - began < 20
    assert SECRET not in str(caught.value)
    assert not [
        path for path in (tmp_path / "sources").rglob("*") if path.is_file() and SECRET in path.read_text("latin-1")
    ]


@pytest.mark.parametrize("what", ["a link to a file outside", "a named pipe"])
def test_so_does_the_folder_of_a_local_mlflow(embedded: str, log_model: LogModel, tmp_path: Path, what: str) -> None:
    """Broken: MLflow copies what a link leads to, and waits for a pipe."""
    uri = log_model("net")
    (tmp_path / "secret.txt").write_text(SECRET)
    [stored] = Path("mlruns").rglob("artifacts/MLmodel")
    (stored.parent / "other").mkdir()
    place = stored.parent / "other" / "extra.json"
    if what == "a named pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / "secret.txt")
    with pytest.raises(SourceError, match=r"its other/extra\.json is a"):
        MLflowRegistry().resolve(uri, tmp_path / "sources")


def test_links_to_a_models_own_files_are_followed(tmp_path: Path) -> None:
    """Broken: a model whose folder names one file twice would be refused."""
    folder = write_model(tmp_path / "net")
    (folder / "data" / "same.onnx").symlink_to("model.onnx")
    source = FolderRegistry().resolve(f"folder:{folder}", tmp_path / "sources")
    copied = Path(source.path) / "data" / "same.onnx"
    assert copied.read_bytes() == (folder / "data" / "model.onnx").read_bytes()
    assert not copied.is_symlink()


def test_a_published_version_with_a_link_out_of_it_is_damaged(tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: fetching a version would copy what its links lead to."""
    registry = FolderRegistry()
    source = registry.resolve(f"folder:{write_model(tmp_path / 'net')}", tmp_path / "sources")
    receipt = registry.push(make_bundle("net-compiled"), source, {})
    (Path(receipt.uri.removeprefix("folder:")) / "model" / "extra").symlink_to("/etc/hostname")
    with pytest.raises(IntegrityError, match="extra is a link that leads out"):
        registry.fetch(receipt.uri, tmp_path / "fetched")


LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
)
MERGES = "\n".join(
    ["m0: &m0 {k: v}"] + [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 10)]
)
DESCRIPTIONS = {
    "of 100 MB": ("metadata: '" + "x" * 3 * 2**20 + "'", "larger than 2 MiB"),
    "aliases of aliases": (LAUGHS, "once its aliases"),
    "merges of merges": (MERGES, "once its aliases"),
    "an anchor within itself": ("a: &a [*a]", "stands within what it names"),
    "nested without end": ("a: " + "[" * 10_000 + "]" * 10_000, "nested too deeply"),
    "a number without end": ("a: 1" + ":59" * 300_000, "unquoted word"),
    "a tag that runs code": (
        "a: !!python/object/apply:os.system ['touch it-ran']",
        "could not determine a constructor",
    ),
    "no UTF-8": (b"a: \xff\xfe", "can't be parsed"),
    "an example outside": (
        "saved_input_example_info: {artifact_path: ../../secret.json, type: ndarray}",
        "secret.json",
    ),
    "an example of an absolute path": (
        "saved_input_example_info: {artifact_path: input_example.json, serving_input_path: /etc/passwd, type: ndarray}",
        "/etc/passwd",
    ),
    "an example that would replace the artifact": (
        "saved_input_example_info: {artifact_path: data/artifact/model.json, type: ndarray}",
        "data/artifact/model.json",
    ),
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_a_description_that_means_harm_is_refused_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Broken: a source's MLmodel would take all memory or minutes, or name files outside of its folder."""
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "net")
    text, says = DESCRIPTIONS[what]
    with (folder / "MLmodel").open("ab") as stream:
        stream.write(b"\n" + (text if isinstance(text, bytes) else text.encode()))
    began = time.monotonic()
    with pytest.raises(SourceError, match=says if what != "no UTF-8" else "can't be parsed") as caught:
        FolderRegistry().resolve(f"folder:{folder}", tmp_path / "sources")
    assert time.monotonic() - began < 30
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "it-ran").exists()


def test_an_ordinary_description_with_an_alias_is_read(tmp_path: Path) -> None:
    """Broken: a model whose MLmodel names a value twice would be refused."""
    folder = write_model(tmp_path / "net")
    with (folder / "MLmodel").open("a") as stream:
        stream.write("\nmetadata: {one: &one {a: 1}, two: *one}\n")
    assert FolderRegistry().resolve(f"folder:{folder}", tmp_path / "sources").flavor == "onnx"


# ----------------------------------------------------------------------------------------------------------- addresses

SERVER = "https://mlflow.example:5000"
ADDRESSES = {
    # tracking URI, data set's address, what the variable names → allowed
    ("sqlite:///mlflow.db", "/data/val.csv", ""): True,
    (SERVER, "/data/val.csv", ""): False,
    (SERVER, "file:///data/val.csv", "/data/"): True,
    (SERVER, "/data/../etc/val.csv", "/data/"): False,
    (SERVER, "/database/val.csv", "/data"): False,
    (SERVER, "s3://bucket/val.parquet", ""): True,
    (SERVER, "mlflow-artifacts:/0/val.npz", ""): True,
    (SERVER, "https://mlflow.example:5000/files/val.npz", ""): True,
    (SERVER, "http://mlflow.example:5000/files/val.npz", ""): False,
    (SERVER, "http://169.254.169.254/latest/x.csv", ""): False,
    (SERVER, "https://data.example/val.npz?sig=s3cret", ""): False,
    (SERVER, "https://data.example/val.npz?sig=s3cret", "https://other.example/ https://data.example/"): True,
    (SERVER, "https://data.example.evil.example/val.npz", "https://data.example"): False,
    (SERVER, "ftp://host/val.npz", ""): False,
    (SERVER, "https://[bad/val.npz", ""): False,
}


@pytest.mark.parametrize("case", ADDRESSES, ids=" ".join)
def test_a_data_set_is_fetched_from_known_places_only(
    case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever may log to the source's run could have the stage fetch any URL, or read any file of it."""
    tracking, address, named = case
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    monkeypatch.setenv(dataset_sources.VARIABLE, named)
    if ADDRESSES[case]:
        dataset_sources.demand_allowed(address, "val")
        return
    with pytest.raises(RegistryError, match="is not fetched") as caught:
        dataset_sources.demand_allowed(address, "val")
    assert "s3cret" not in str(caught.value)
    assert dataset_sources.VARIABLE in caught.value.fix


def test_a_data_set_of_the_run_is_not_fetched_from_anywhere(
    server: Any, log_model: LogModel, unique: str, tmp_path: Path
) -> None:
    """Broken: the rule would stand there, and nobody would ask it."""
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput

    registry = MLflowRegistry()
    source = registry.resolve(log_model(unique), tmp_path / "sources")
    logged = Dataset("val", "1", "http", '{"url": "http://127.0.0.1:9/val.csv?token=s3cret"}')
    MlflowClient().log_inputs(source.run_id, datasets=[DatasetInput(logged)])
    with pytest.raises(RegistryError, match="is not fetched: http://127") as caught:
        registry.dataset(source, "val", tmp_path / "data")
    assert "s3cret" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- servers


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None], *, healthy: bool = True) -> Iterator[str]:
    """A server that answers by `answer`, but for /health, which it answers as MLflow does where it is `healthy`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if healthy and self.path.startswith("/health"):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"OK")
                return
            with suppress(OSError):
                answer(self)

        do_POST = do_GET  # noqa: N815 - called by this name

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()


def never(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(60)


def dripping(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [never, dripping])
def test_a_server_that_does_not_finish_its_answer_is_given_up(
    answer: Callable[[BaseHTTPRequestHandler], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a run would wait for eight minutes, or for ever."""
    monkeypatch.setattr(mlflow_retries, "_ANSWER_S", 2.0)  # the limit, but in a test's time
    monkeypatch.setattr(mlflow_retries, "_PATIENCE_S", 1.0)
    with serving(answer) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        began = time.monotonic()
        with pytest.raises(RegistryError, match="no whole answer within 2 s") as caught:
            MLflowRegistry().resolve("models:/net/1", tmp_path)
        assert caught.value.where == uri
        assert time.monotonic() - began < 30


def test_an_answer_that_is_cut_off_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a gateway that cuts one answer off, without having said how long it is, would end the run."""
    asked = []

    def cut(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        missing = b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such thing"}'
        handler.send_response(200 if len(asked) < 3 else 404)
        handler.end_headers()
        handler.wfile.write(b'{"registered_model": {"na' if len(asked) < 3 else missing)

    with serving(cut) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError, match=r"there is no|no such thing"):
            MLflowRegistry().current("net", "prod") or MLflowRegistry().resolve("models:/net/1", tmp_path)
    assert len(asked) >= 3


def always(status: int, page: bytes, asked: list[str]) -> Callable[[BaseHTTPRequestHandler], None]:
    """Who answers each request with this page, and notes its path."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(page)

    return answer


def test_a_gateways_own_404_is_asked_again_and_says_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: while a gateway had no server behind it, or with a path missing in the address, a version that is there
    would be called missing, and a rollback would tell people to promote another one."""
    asked: list[str] = []
    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0, 0.0))
    with serving(always(404, b"<html>404 page not found</html>", asked)) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError, match=r"knows no MLflow at this address \(404\)") as caught:
            MLflowRegistry().published("models:/net/1")
    assert len(asked) > 1
    assert caught.value.code == Code.REGISTRY_UNREACHABLE
    assert "MLFLOW_TRACKING_URI, also the path in it" in caught.value.fix


def test_a_page_in_place_of_every_answer_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: behind a log-in page each command ends after 44 seconds: the whole of it is made three times, and each
    call in it five times."""
    asked: list[str] = []
    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0, 0.0))
    with serving(always(200, b"<html>Log in</html>", asked)) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError, match="no JSON") as caught:
            MLflowRegistry().resolve("models:/net/1", tmp_path)
    assert len(asked) == 3
    assert caught.value.code == Code.REGISTRY_UNREACHABLE
    assert "log-in page" in caught.value.fix


def test_an_operation_that_failed_in_its_last_call_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a publication that takes longer than the patience ends with one answer that was cut off, in its last
    call; or one whose server hangs is made three times, for minutes each."""
    monkeypatch.setattr(mlflow_retries, "_PATIENCE_S", 0.0)
    tries: list[type[Exception]] = []

    @mlflow_retries.repeatable
    def publish(error: type[RegistryError], failures: int) -> str:
        tries.append(error)
        if len(tries) <= failures:
            raise error("no")
        return "there"

    assert publish(mlflow_retries.UnreachableError, 2) == "there"
    for error, made in ((mlflow_retries.UnreachableError, 3), (mlflow_retries.NoAnswerError, 1), (RegistryError, 1)):
        tries.clear()
        with pytest.raises(error):
            publish(error, 99)
        assert len(tries) == made


def test_a_server_whose_answer_is_cut_off_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run asks a dozen times whether the server is there, and one of these answers that a proxy cut off ends
    it with 4, after it has published."""

    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"O" if handler.path == "/health" else b"{}")

    with serving(cut, healthy=False) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert mlflow_connection.connect() is not None


@pytest.mark.slow
def test_a_server_that_was_asleep_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: where the server is stopped while nobody uses it, the first job of the day ends with 4: "timed out"."""
    asked: list[str] = []

    def waking(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        if len(asked) == 1:
            time.sleep(14)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"{}")

    with serving(waking, healthy=False) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert mlflow_connection.connect() is not None
    assert asked[0] == "/health"


def test_a_server_that_sends_every_request_on_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: behind a gateway that sends http:// on to https://, a run compiled and measured for an hour, and then
    failed to publish with "405", since a request that is sent on so loses its content."""

    def there(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()

    with serving(there) as other:

        def send_on(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(301)
            handler.send_header("Location", other + handler.path)
            handler.end_headers()

        def log_in(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"{other}/login")
            handler.end_headers()

        with serving(send_on, healthy=False) as uri:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            with pytest.raises(RegistryError, match="sends every request on to") as caught:
                mlflow_connection.connect()
            assert caught.value.fix == f"set MLFLOW_TRACKING_URI to {other}"
        with serving(log_in, healthy=False) as uri:  # /health alone may ask for a log-in
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            assert mlflow_connection.connect() is not None


@pytest.mark.parametrize("healthy", [False, True])
def test_a_server_that_asks_to_wait_for_an_hour_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, healthy: bool
) -> None:
    """Broken: the run waits for as long as the server likes, and then says only that there was no whole answer."""

    def later(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(503)
        handler.send_header("Retry-After", "3600")
        handler.end_headers()

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0,))
    with serving(later, healthy=healthy) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError) as caught:
            mlflow_connection.connect()
    assert ("error 503 again and again" if healthy else "says to ask again in 3600 s") in caught.value.problem
    assert caught.value.code == Code.REGISTRY_UNREACHABLE


def test_a_server_that_asks_for_some_seconds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the first command after a restart behind a gateway that says `Retry-After: 20` fails after 7 seconds."""
    waited: list[float] = []

    def later(handler: BaseHTTPRequestHandler) -> None:
        body = b"{}"
        handler.send_response(200 if any(waited) else 503)
        if not any(waited):
            handler.send_header("Retry-After", "20")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(mlflow_connection, "time", SimpleNamespace(sleep=waited.append))
    with serving(later, healthy=False) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert mlflow_connection.connect() is not None
        assert mlflow_connection.connect() is not None
    assert waited == [20, 0]


def test_a_gateway_without_a_server_is_said_by_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each of a run's calls has the patience that a server has which worked before, and a wrong address is said
    after more than a minute."""
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        handler.send_response(404)
        handler.end_headers()

    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0, 0.0))
    with serving(answer) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError, match=r"knows no MLflow at this address \(404\)") as caught:
            MLflowRegistry().published("models:/net/1")
    assert caught.value.where == uri
    assert [path for path in asked if "experiments/search" not in path] == []


def test_a_server_that_takes_no_more_requests_is_not_called_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who is held back by a limit on requests was told to check the address and whether the server runs."""

    def limited(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(429)
        handler.end_headers()

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setattr(mlflow_retries, "_PAUSES_S", (0.0,))
    with serving(limited) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(RegistryError, match="error 429 again and again: it takes no more requests") as caught:
            MLflowRegistry().published("models:/net/1")
    assert "limits on requests" in caught.value.fix


def test_a_transfer_may_go_on_while_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a large model would be given up although it arrives, or one that stopped would be waited for; or the 84
    small files of a published version, of which a slow server takes 10 s for each, share what one file has."""
    monkeypatch.setattr(mlflow_retries, "_TRANSFER_S", 1.0)
    monkeypatch.setattr(mlflow_retries, "_FILE_S", 2.0)
    monkeypatch.setattr(mlflow_retries, "_SLOWEST_BYTES_PER_S", 1000)
    limit = mlflow_retries.transfer_limit(tmp_path)
    assert limit() == 1.0
    (tmp_path / "part").write_bytes(bytes(5000))
    assert limit() == 8.0
    (tmp_path / "another").touch()
    assert limit() == 10.0

    def stopped() -> None:
        time.sleep(60)

    (tmp_path / "part").unlink()
    (tmp_path / "another").unlink()
    with pytest.raises(CompileStageError, match="no whole answer"):
        mlflow_retries.within(stopped, mlflow_retries.transfer_limit(tmp_path))


# ---------------------------------------------------------------------------------------------- what others left behind


def test_what_a_killed_or_repeated_push_left_is_deleted_by_the_next(
    embedded: str, log_model: LogModel, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """Broken: a second version would stay for ever, and so would a run that stays RUNNING."""
    from mlflow import MlflowClient

    client, registry = MlflowClient(), MLflowRegistry()
    source = registry.resolve(log_model("net"), tmp_path / "sources")
    bundle = make_bundle("net-compiled")
    first = registry.push(bundle, source, {})
    version = client.get_model_version("net-compiled", first.version)
    twice = client.create_logged_model("0", name="double")
    client.create_model_version("net-compiled", f"models:/{twice.model_id}", tags=version.tags, model_id=twice.model_id)
    chosen = client.create_model_version("net-compiled", version.source, tags=version.tags)
    client.set_registered_model_alias("net-compiled", "chosen", chosen.version)
    assert registry.push(bundle, source, {}).version == first.version
    held = sorted(int(v.version) for v in client.search_model_versions("name = 'net-compiled'"))
    assert held == [int(first.version), int(chosen.version)], "the double goes, what an alias points to stays"
    assert twice.model_id not in [m.model_id for m in client.search_logged_models(["0"])]


def test_a_run_that_was_made_twice_does_not_stay_running(
    embedded: str, log_model: LogModel, make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a request whose answer was lost, and that HTTP sent again, would leave a run that stays RUNNING."""
    from mlflow import MlflowClient

    real = MlflowClient.create_run

    def twice(self: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    registry = MLflowRegistry()
    source = registry.resolve(log_model("net"), tmp_path / "sources")
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "create_run", twice)
        registry.push(make_bundle("net-compiled"), source, {})
    client = MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert [run.info.status for run in runs] == ["FINISHED"] * 3, "the training, the parent and the child"
