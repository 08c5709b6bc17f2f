"""Attempts, policies, the search of the registry, alerts and traces, each by itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import POLICY_TEXT
from service.conftest import PATIENCE_S, SECRET

from compile_stage.core.errors import RegistryError, UsageError
from compile_stage.core.records import RegisteredVersion
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service import requalification, runs
from compile_stage.service.alerts import alert
from compile_stage.service.deciding import Decider, is_needed, needed
from compile_stage.service.deliveries import signature
from compile_stage.service.polling import Poller
from compile_stage.service.queue import Job, Queue
from compile_stage.service.requalification import _validated, requalify
from compile_stage.service.settings import Settings
from compile_stage.service.spans import send
from compile_stage.service.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

COMMAND = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
with open(here / "begun", "a") as file:
    file.write(f"{os.getpid()}\\n")
while not (here / "go").exists():
    time.sleep(0.02)
sys.exit(7)
"""


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the attempt `job/1`, whose command notes that it began, and ends with 7 once there is a file `go`."""
    folder, started = tmp_path / "job" / "1", []
    folder.mkdir(parents=True)
    wrapper = [sys.executable, "-m", "compile_stage.core.attempt", str(folder), sys.executable, "-c", COMMAND]

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([*wrapper, str(tmp_path)]))
        return started[-1]

    yield start
    (tmp_path / "go").touch()
    for process in started:
        process.kill()
        process.wait()


def test_an_attempt_that_is_started_twice_runs_once(
    attempt: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Broken: a service that was killed and started again would run beside what it had begun."""
    first = attempt()
    wait_for((tmp_path / "begun").exists)
    second = attempt()
    (tmp_path / "go").touch()
    assert [first.wait(PATIENCE_S), second.wait(PATIENCE_S)] == [0, 0]
    assert len((tmp_path / "begun").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "job" / "1" / "exit.json").read_text())["exit_code"] == 7


def test_a_clock_that_is_set_meanwhile_makes_no_attempt_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: one step of a machine's clock would use up the budget of a fleet, or give it back more than it had, and
    a histogram of the service's metrics would sink."""
    from compile_stage.core import attempt
    from compile_stage.fleet.local import ended_in
    from compile_stage.fleet.scheduler import Lease

    clock = iter((1e9, 1e9 - 86400))
    monkeypatch.setattr(attempt.signal, "signal", lambda *_: None)  # `main` takes over what ends its process
    monkeypatch.setattr(attempt.time, "time", lambda: next(clock, 1e9 - 86400))
    folder = tmp_path / "job" / "1"
    folder.mkdir(parents=True)
    attempt.main(folder, [sys.executable, "-c", "pass"])
    ended = ended_in(folder, Lease(1, 1, ""), time.monotonic())
    assert ended.exit_code == 0
    assert 0 < ended.seconds < PATIENCE_S


def test_what_follows_a_killed_attempt_waits_for_its_command(
    attempt: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Broken: two runs would write the same bundles and measure beside each other."""
    first = attempt()
    wait_for((tmp_path / "begun").exists)
    first.kill()
    first.wait()
    second = attempt()
    time.sleep(0.5)  # it must not begin, however long it has
    assert len((tmp_path / "begun").read_text().splitlines()) == 1
    (tmp_path / "go").touch()
    assert second.wait(PATIENCE_S) == 0
    assert len((tmp_path / "begun").read_text().splitlines()) == 2


def test_an_interrupted_attempt_interrupts_its_command(
    attempt: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Broken: a stopped service would leave its run behind, or wait for it for ever."""
    first = attempt()
    wait_for((tmp_path / "begun").exists)
    first.send_signal(signal.SIGINT)
    assert first.wait(PATIENCE_S) == 0
    assert json.loads((tmp_path / "job" / "1" / "exit.json").read_text())["exit_code"] != 7


def named(name: str, **sections: str) -> str:
    return POLICY_TEXT.replace("name: cpu-server", f"name: {name}") + "".join(
        f"{k}: {v}\n" for k, v in sections.items()
    )


def test_policies_are_read_again_and_a_broken_one_stops_no_other(tmp_path: Path) -> None:
    """Broken: a policy that was fixed would need a restart, or a typing mistake in one would stop all."""
    folder = PolicyFolder(tmp_path)
    (tmp_path / "a.yaml").write_text(named("a", applies_to="{names: ['fraud*'], tags: {team: risk}}"))
    (tmp_path / "b.yaml").write_text("name: [")
    (tmp_path / "c.yaml").write_text(named("a"))
    (tmp_path / "d.yaml").write_text("apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: d\nowner: o\n")
    problems = [file.problem for file in folder.files()]
    assert [bool(problem) for problem in problems] == [False, True, True, False]
    assert "its name 'a' is that of a.yaml" in problems[2]

    def meant(name: str, **tags: str) -> list[str]:
        version = RegisteredVersion(uri="", name=name, version="1", tags=tags)
        return [file.policy.name for file in folder.meant_for(version, lambda: "onnx") if file.policy is not None]

    assert meant("fraud-eu", team="risk") == ["a"]
    assert meant("fraud-eu", team="growth") == meant("churn", team="risk") == []
    (tmp_path / "b.yaml").write_text(named("b"))
    (tmp_path / "c.yaml").unlink()
    assert meant("churn") == ["b"]
    with pytest.raises(UsageError, match="no such folder of policies"):
        PolicyFolder(tmp_path / "none")


def test_a_broken_policy_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: nothing in the log says why a model is not compiled, or each search repeats it; or it isn't said while
    the registry is away."""

    def away(*_: str) -> object:
        raise RegistryError("away")

    monkeypatch.setattr("compile_stage.core.plugins.load", away)
    poller = Poller(Settings(tmp_path, tmp_path / "state"), None, PolicyFolder(tmp_path))  # type: ignore[arg-type]

    def logged() -> list[str]:
        caplog.clear()
        with pytest.raises(RegistryError):
            poller.poll()
        return caplog.messages

    (tmp_path / "good.yaml").write_text(named("good"))
    (tmp_path / "bad.yaml").write_text(named("bad", nmae="x"))
    (line,) = logged()
    assert line.startswith("bad.yaml is left out until it is fixed: ")
    assert "nmae" in line
    assert logged() == []
    (tmp_path / "bad.yaml").write_text("name: [")
    assert len(logged()) == 1, "another problem"
    (tmp_path / "bad.yaml").write_text(named("bad"))
    assert logged() == []


def version_of(**fields: object) -> RegisteredVersion:
    return RegisteredVersion(**{"uri": "models:/m/1", "name": "m", "version": "1", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "jobs"),
    [
        (version_of(), []),
        (version_of(aliases=("go",)), [("run", "cpu-server")]),
        (version_of(aliases=("stop",)), []),
        (version_of(aliases=("go",), published=True), []),
        (version_of(published=True, approval=("by", "prod")), []),
        (version_of(published=True, approval=("by", "prod"), tags={"by": "ann"}), [("promote", "prod:ann")]),
        (version_of(published=True, approval=("by", "prod"), tags={"by": "ann"}, aliases=("prod",)), []),
    ],
)
@pytest.mark.usefixtures("embedded")
def test_what_a_version_needs(policies: Path, version: RegisteredVersion, jobs: list[tuple[str, str]]) -> None:
    """Broken: what the stage published would be compiled again, or an approved version would wait for ever."""
    assert needed(version, Settings(policies, policies, aliases=("go",)), PolicyFolder(policies)) == jobs


def test_an_approved_version_that_had_the_alias_already_is_not_promoted_again(
    register: Callable[..., None], policies: Path, tmp_path: Path
) -> None:
    """Broken: what was approved and promoted by hand is promoted again by the next search, after the alias moved on to
    a newer version, or after a rollback took it away."""
    from mlflow import MlflowClient

    from compile_stage.core import plugins

    register("m", 4)
    client, registry = MlflowClient(), plugins.load("registries", "mlflow")
    published = {"compile_stage.key": "k", "compile_stage.approval": "by", "compile_stage.approval_alias": "prod"}
    for version in "1234":
        for tag, value in (published | {"by": "ann"}).items():
            client.set_model_version_tag("m", version, tag, value)
    for version in "123":
        registry.promote(registry.published(f"models:/m/{version}"), "prod")
    registry.rollback("m", "prod")
    settings = Settings(policies, tmp_path / "state", aliases=("go",))
    found = {one.version: needed(one, settings, PolicyFolder(policies)) for one in registry.versions()}
    assert found == {"1": [], "2": [], "3": [], "4": [("promote", "prod:ann")]}
    waiting = [Job(1, "promote", "m", version, "prod:ann", 2, 1) for version in "1234"]
    assert [is_needed(job, settings, PolicyFolder(policies)) for job in waiting] == [False, False, False, True]
    client.delete_model_version_tag("m", "4", "by")
    assert not is_needed(waiting[3], settings, PolicyFolder(policies)), "the approval was taken away while it waited"


def test_a_promotion_that_waited_while_somebody_promoted_by_hand_is_not_started(
    policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a promotion that waits for its retry moves the alias back to what a rollback took away meanwhile."""
    settings = Settings(policies, tmp_path / "state", command=("never-started",))
    queue = Queue(Store(f"sqlite:///{tmp_path}/jobs.db"), "test")
    queue.add("promote", "m", "1", "prod:ann")
    monkeypatch.setattr(runs, "is_needed", lambda *_: False)
    stop = threading.Event()
    worker = runs.Worker(settings, queue, PolicyFolder(policies), ("promote",), after=lambda *_: stop.set())
    monkeypatch.setattr(queue, "ended", lambda *given: (ended.append(given[1:]), stop.set()))
    ended: list[tuple[object, ...]] = []
    worker.work(stop)
    assert ended == [(0, 0.0, "not asked for any more: promoted by hand, or no longer approved")]


def test_a_run_whose_job_another_service_has_begun_is_interrupted(
    policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a service that was cut off from the database for some minutes goes on with what another does too; or one
    failed sign of life ends its watch over a run that goes on."""
    settings = Settings(policies, tmp_path / "state", command=(sys.executable, "-c", "import time; time.sleep(600)"))
    queue = Queue(Store(f"sqlite:///{tmp_path}/jobs.db"), "test")
    queue.add("run", "m", "1", "cpu-server")
    signs = iter([OSError("the database is away"), True, False])

    def beat(_: Job) -> bool:
        sign = next(signs)
        if isinstance(sign, OSError):
            raise sign
        return bool(sign)

    monkeypatch.setattr(queue, "beat", beat)
    monkeypatch.setattr(runs, "_BEAT_S", 0.0)
    stop = threading.Event()
    worker = runs.Worker(settings, queue, PolicyFolder(policies), ("run",), after=lambda *_: stop.set())
    worker.work(stop)
    assert list(signs) == []
    (attempt,) = (tmp_path / "state" / "runs").glob("*/1/exit.json")
    assert json.loads(attempt.read_text())["exit_code"] == -signal.SIGINT


@pytest.mark.parametrize("trouble", ["a folder that can't be written", "a policy that is broken for a moment"])
def test_trouble_of_the_machine_does_not_end_a_job_for_good(
    policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: str, trouble: str
) -> None:
    """Broken: what is promoted while the disk is full, or a policy is being written, is never compiled."""
    cache = "/proc/no-cache" if trouble.startswith("a folder") else str(tmp_path / "cache")
    monkeypatch.setenv("COMPILE_STAGE_CACHE", cache)
    settings = Settings(policies, tmp_path / "state", command=(sys.executable, "-m", "compile_stage"))
    queue = Queue(Store(f"sqlite:///{tmp_path}/jobs.db"), "test")
    queue.add("run", "m", "1", "cpu-server")
    if trouble.startswith("a policy"):
        (policies / "cpu.yaml").write_text("name: [")
    stop, real = threading.Event(), queue.ended

    def ended(*given: Any, **named: Any) -> None:
        real(*given, **named)
        stop.set()

    monkeypatch.setattr(queue, "ended", ended)
    runs.Worker(settings, queue, PolicyFolder(policies), ("run",)).work(stop)
    (job,) = queue.rows("jobs", 9)
    assert (job["exit_code"], job["state"]) == (2, "queued"), job["problem"]
    assert job["not_before"] > time.time()


def test_a_search_finds_what_was_not_delivered_and_leaves_alone_what_was_there(
    register: Callable[..., None], policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: what happened while the service was down would never be compiled; or its first start would compile
    everything that was ever promoted; or only the first page of the registry would be seen."""
    from mlflow import MlflowClient

    from compile_stage.registry import mlflow_watch

    monkeypatch.setattr(mlflow_watch, "_PAGE", 2)
    register("old", 1)
    client = MlflowClient()
    client.set_registered_model_alias("old", "go", "1")
    settings = Settings(policies, tmp_path / "state", aliases=("go",))
    store = Store(settings.database_url)
    queue, folder = Queue(store, "here"), PolicyFolder(policies)
    poller, decider = Poller(settings, queue, folder), Decider(settings, queue, folder)
    assert poller.poll() == 0
    register("new", 5)
    client.set_registered_model_alias("new", "go", "5")
    assert poller.poll() == 1
    look = queue.next_look()
    assert look is not None
    decider.decide(look)
    assert [(row["name"], row["version"], row["subject"]) for row in queue.rows("jobs", 9)] == [
        ("new", "5", "cpu-server")
    ]
    assert poller.poll() == 0
    queue.look_at("new", "9", "no such version")
    gone = queue.next_look()
    assert gone is not None
    decider.decide(gone)
    assert queue.next_look() is None
    store.close()


def test_a_search_finds_what_is_asked_of_versions_that_were_there_before(
    register: Callable[..., None], policies: Path, tmp_path: Path
) -> None:
    """Broken: where a delivery is lost, a version from before the first start waits for ever, though somebody gave it
    its alias or approved it since."""
    from mlflow import MlflowClient

    register("m", 2)
    register("made", 1, **{"compile_stage.key": "k", "compile_stage.approval": "by"})
    client = MlflowClient()
    client.set_model_version_tag("made", "1", "compile_stage.approval_alias", "prod")
    client.set_registered_model_alias("m", "go", "1")
    settings = Settings(policies, tmp_path / "state", aliases=("go",))
    store = Store(settings.database_url)
    queue, folder = Queue(store, "here"), PolicyFolder(policies)
    poller = Poller(settings, queue, folder)
    assert poller.poll() == 0
    client.set_registered_model_alias("m", "go", "2")
    client.set_model_version_tag("made", "1", "by", "ann")
    assert poller.poll() == 2
    assert {(row["name"], row["version"]) for row in queue.rows("looks", 9)} == {("m", "2"), ("made", "1")}
    store.close()


def test_a_version_whose_files_are_gone_keeps_no_other_from_being_found(
    register: Callable[..., None], policies: Path, tmp_path: Path
) -> None:
    """Broken: after one version whose flavor can't be read, no version is found by the search, and none that a delivery
    reports is looked at, for ever."""
    from mlflow import MlflowClient

    (policies / "onnx.yaml").write_text(named("onnx", applies_to="{names: [a], flavors: [onnx]}"))
    (policies / "cpu.yaml").write_text(named("cpu", applies_to="{names: [b]}"))
    settings = Settings(policies, tmp_path / "state", aliases=("go",), backlog=True)
    for name in "ab":
        register(name, 1)
        MlflowClient().set_registered_model_alias(name, "go", "1")
    store = Store(settings.database_url)
    queue, folder = Queue(store, "here"), PolicyFolder(policies)
    poller, decider = Poller(settings, queue, folder), Decider(settings, queue, folder)
    assert poller.poll() == 2
    while (look := queue.next_look()) is not None:
        decider.decide(look)
    assert [(row["name"], row["subject"]) for row in queue.rows("jobs", 9)] == [("b", "cpu")]
    assert poller.poll() == 0, "it waits already, and is not added once more by every search"
    assert [row["name"] for row in queue.rows("looks", 9)] == ["a"], "it is looked at again later"
    store.close()


def test_a_version_whose_name_cannot_be_used_is_looked_at_once(policies: Path, tmp_path: Path) -> None:
    """Broken: MLflow registers a model called `a\\b`, and the service looks at its versions again for ever."""
    settings = Settings(policies, tmp_path / "state", aliases=("go",))
    store = Store(settings.database_url)
    queue = Queue(store, "here")
    queue.look_at("a\\b", "1", "go")
    look = queue.next_look()
    assert look is not None
    Decider(settings, queue, PolicyFolder(policies)).decide(look)
    assert queue.rows("looks", 9) == []
    store.close()


class Receiver(BaseHTTPRequestHandler):
    """Refuses the first request, takes the others."""

    got: list[tuple[str, dict[str, str], bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        self.send_response(200 if len(self.got) > 1 else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[HTTPServer]:
    Receiver.got = []
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_alert_is_signed_and_sent_until_it_is_taken(receiver: HTTPServer) -> None:
    """Broken: nobody would hear of a version that fails on this machine, or could tell who says so."""
    url = f"http://127.0.0.1:{receiver.server_port}/alert"
    assert alert(url, SECRET, {"event": "requalification.failed"}, pauses_s=(0, 0))
    (_, first, _), (path, headers, body) = Receiver.got
    delivery, stamp = headers["x-compile-stage-delivery-id"], headers["x-compile-stage-timestamp"]
    assert (path, json.loads(body)) == ("/alert", {"event": "requalification.failed"})
    assert first["x-compile-stage-delivery-id"] == delivery
    assert headers["x-compile-stage-signature"] == signature(SECRET, delivery, stamp, body)
    Receiver.got.clear()
    assert not alert(url, SECRET, {}, pauses_s=())


def test_a_run_is_a_trace_with_a_span_for_each_step(receiver: HTTPServer, tmp_path: Path) -> None:
    """Broken: a collector would refuse what it is sent, or show steps outside of their run."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Receiver.got.append(("", {}, b""))
    steps = [{"step": "compile", "job_id": "j", "started_s": 1.0, "ended_s": 3.5, "cached": False}]
    result = {"status": "failed", "exit_code": 3, "problem": "no winner", "duration_s": 10.0, "events": steps}
    (tmp_path / "result.json").write_text(json.dumps(result))
    job = Job(1, "run", "m", "1", "cpu", 1)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_port}/",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b",
    }
    assert send(job, tmp_path, 1000.0, environment)
    path, headers, body = Receiver.got[-1]
    assert (path, headers["x-key"]) == ("/v1/traces", "a b")
    spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    run, step = spans
    assert [span.name for span in spans] == ["compile-stage run", "compile"]
    assert (run.start_time_unix_nano, run.end_time_unix_nano) == (990 * 10**9, 1000 * 10**9)
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (991 * 10**9, int(993.5 * 10**9))
    assert (step.trace_id, step.parent_span_id, run.status.message) == (run.trace_id, run.span_id, "no winner")
    assert not send(job, tmp_path, 1000.0, {})


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, "passed"), (3, "failed"), (7, "failed"), (2, "unknown"), (4, "unknown"), (-9, "unknown")]
)
def test_a_validation_that_could_not_be_made_is_no_failure_of_the_version(
    tmp_path: Path, code: int, outcome: str
) -> None:
    """Broken: a package that is missing on this machine, or a killed process, is reported as a version that fails, and
    somebody rolls a good one back."""
    ends = f"raise SystemExit({code})" if code >= 0 else f"import os; os.kill(os.getpid(), {-code})"
    version = RegisteredVersion(name="m-compiled", version="1", uri="models:/m-compiled/1", aliases=("prod",), tags={})
    settings = Settings(tmp_path, tmp_path / "state", command=(sys.executable, "-c", ends))
    assert _validated(version, "another driver", settings).outcome == outcome


def test_what_fails_is_not_validated_until_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a version at its limit, which passes in one of twenty validations, passes within weeks of nightly ones;
    or a driver that changed leaves it failed."""
    version = RegisteredVersion(name="m-compiled", version="1", uri="models:/m-compiled/1", aliases=("prod",), tags={})
    counts = "import pathlib; log = pathlib.Path('looked'); log.open('a').write('.'); raise SystemExit(3)"
    settings, differs = Settings(tmp_path, tmp_path / "state", command=(sys.executable, "-c", counts)), ["driver: 2"]
    job = SimpleNamespace(target=SimpleNamespace(hardware={}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requalification.plugins, "load", lambda *_: SimpleNamespace(fetch=lambda *_: tmp_path))
    monkeypatch.setattr(requalification, "check_integrity", lambda *_, **__: {})
    monkeypatch.setattr(requalification, "for_machine", lambda *_: {"job": {}})
    monkeypatch.setattr(requalification, "revive", lambda *_: job)
    monkeypatch.setattr(requalification, "refuse_machine", lambda *_: differs[0])

    def look() -> tuple[str, int]:
        found = requalification._requalified(version, settings)
        assert found.outcome == "failed"
        return found.reason, len((tmp_path / "looked").read_text())

    assert look()[1] == 1
    differs[0] = "its validation on this machine failed"
    assert [look()[1] for _ in range(4)] == [2, 3, 3, 3]
    assert look()[0] == (
        "its validation on this machine failed 3 times, and nothing changed since; compile-stage validate "
        "models:/m-compiled/1 does it again"
    )
    differs[0] = "driver: 3"
    assert look()[1] == 4


def test_a_published_version_whose_files_were_changed_fails_and_is_reported(
    embedded: str, receiver: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: production would go on serving what nobody published, and the one who is to know would not hear of it."""
    from mlflow import MlflowClient

    (tmp_path / "model" / "data").mkdir(parents=True)
    (tmp_path / "model" / "MLmodel").write_text("flavors: {compile_stage: {data: data}}\n")
    (tmp_path / "model" / "data" / "manifest.json").write_text("{}")
    client, tags = MlflowClient(), {"compile_stage.key": "k", "compile_stage.digest": "sha256:0"}
    client.create_registered_model("m-compiled")
    client.create_model_version("m-compiled", str(tmp_path / "model"), tags=tags, await_creation_for=0)
    monkeypatch.setenv("COMPILE_STAGE_WATCH_ALERT_URL", f"http://127.0.0.1:{receiver.server_port}/alert")
    settings, said = Settings(tmp_path, tmp_path / "state", (SECRET,)), list[str]()
    Receiver.got.append(("", {}, b""))
    assert requalify(settings, said.append) == 0  # no alias points to it
    client.set_registered_model_alias("m-compiled", "prod", "1")
    assert requalify(settings, said.append) == 3
    assert [line.startswith("models:/m-compiled/1 (prod): failed: ") for line in said] == [True]
    (version,) = json.loads(Receiver.got[-1][2])["versions"]
    assert (version["uri"], version["aliases"], version["outcome"]) == ("models:/m-compiled/1", ["prod"], "failed")
