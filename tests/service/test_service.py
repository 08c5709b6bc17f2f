"""The service as a process: what it answers, and that kill -9 loses and doubles nothing."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service.conftest import PATIENCE_S, SECRET, SERVING, Running

from compile_stage.core.errors import UsageError
from compile_stage.service.deliveries import Refused
from compile_stage.service.server import Service
from compile_stage.service.settings import Settings, alert_url, read_secrets

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here


@pytest.mark.slow
def test_each_version_runs_once_though_the_service_is_killed_twice(
    service: Running, register: Callable[..., None]
) -> None:
    """Broken: a delivery that was answered with 202 would be lost with the service, a version would be compiled twice,
    or a forged or stale delivery would be believed."""
    register("m", 20)
    chance = random.Random(0)
    # Versions 1 to 12 are reported by MLflow, the others only by what must not be believed.
    sends: list[tuple[int, dict[str, object]]] = [(version, {"delivery": f"d-{version}"}) for version in range(1, 13)]
    sends += [(version, {"delivery": f"d-{version}"}) for version in range(1, 13, 2)]  # the same once more
    sends += [(version, {"secret": "f" * 32}) for version in range(13, 17)]
    sends += [(version, {"age_s": 400}) for version in range(17, 21)]
    chance.shuffle(sends)
    killed_after = {len(sends) // 3, 2 * len(sends) // 3}
    service.start()
    answers: Counter[int | None] = Counter()
    for number, (version, how) in enumerate(sends):
        if number in killed_after:
            service.kill()
            threading.Thread(target=service.start).start()  # MLflow tries again meanwhile
        while (answer := service.deliver(version, **how)) is None:  # type: ignore[arg-type]
            time.sleep(0.1)
        answers[answer] += 1
    service.wait_for(lambda: len(service.recorded()) >= 12 and "queued" not in _metrics(service, "jobs"))
    assert answers == {202: 12, 200: 6, 401: 8}
    runs = Counter(line[1] for line in service.recorded())
    assert runs == {f"models:/m/{version}": 1 for version in range(1, 13)}
    assert service.stop() == 0


def _metrics(service: Running, name: str) -> str:
    answer = service.ask("GET", "/metrics")
    lines = answer[2].splitlines() if answer is not None else ["jobs queued"]
    return "\n".join(line for line in lines if name in line and not line.startswith("#"))


@pytest.fixture
def settings(tmp_path: Path, policies: Path, embedded: str) -> Settings:
    command = (sys.executable, str(SERVING.with_name("recorded.py")), str(tmp_path))
    state = tmp_path / "state"
    return Settings(policies, state, (SECRET,), aliases=("go",), poll_s=3600, drain_s=0, command=command)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stopped_service_interrupts_its_run_and_takes_it_up_again(settings: Settings, tmp_path: Path) -> None:
    """Broken: a redeployment would lose the running run, or wait for it for hours; or end as if it had failed."""
    (tmp_path / "slow").touch()
    service = Service(settings)
    service.queue.add("run", "m", "1", "cpu-server")
    service.queue.add("run", "m", "2", "cpu-server")
    service.start()
    until(lambda: len(runs_in(tmp_path)) == 1)
    with pytest.raises(UsageError, match="another service uses this state folder"):
        Service(settings)
    service.drain()
    assert len(runs_in(tmp_path)) == 1  # the other was not begun
    (tmp_path / "slow").unlink()
    service = Service(settings)
    assert [row["state"] for row in service.queue.rows("jobs", 9)] == ["queued", "queued"]
    service.start()
    until(lambda: [row["state"] for row in service.queue.rows("jobs", 9)] == ["done", "done"])
    service.drain()
    assert sorted(line[1] for line in runs_in(tmp_path)) == ["models:/m/1", "models:/m/1", "models:/m/2"]


def runs_in(folder: Path) -> list[list[str]]:
    return Running(folder, 0).recorded()


def test_the_page_shows_what_happened_and_nothing_that_runs(settings: Settings) -> None:
    """Broken: a model's name would be a script in the page of whoever looks, a report could read the page's address,
    or a broken policy would be seen by nobody."""
    (settings.policies / "broken.yaml").write_text("name: [<i>unfinished")
    service = Service(settings)
    service.queue.add("run", "<b>m", "1", "cpu-server")
    service.queue.refuse(Refused(401, "signature", "its signature is <u>wrong"), "203.0.113.7")
    result = settings.run_folder(1) / "result"
    result.mkdir(parents=True)
    (result / "report.html").write_text("<script>alert(1)</script>")
    application = service.application()
    status, headers, page = get(application, "/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "&lt;b&gt;m/1" in page
    assert [tag for tag in ("<b>", "<i>", "<u>", "<script") if tag in page] == []
    assert [words for words in ("broken.yaml", "not valid YAML", "203.0.113.7") if words not in page] == []
    assert SECRET not in page
    status, headers, _ = get(application, "/runs/1/report.html")
    assert (status, headers["content-security-policy"][:28]) == (200, "sandbox; default-src 'none';")
    assert get(application, "/runs/2/report.html")[0] == get(application, "/runs/1/log")[0] == 404
    assert get(application, "/runs/..%2f1/log")[0] == 404
    assert 'policies{state="broken"} 1' in get(application, "/metrics")[2]
    assert get(application, "/healthz")[0] == 503  # its threads were not started
    service.drain()


def get(application: Any, path: str) -> tuple[int, dict[str, str], str]:
    """Ask an ASGI application: status, headers and body."""
    messages: list[dict[str, Any]] = []

    async def ask() -> None:
        asked = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            return asked.pop() if asked else await asyncio.get_running_loop().create_future()  # nobody hangs up

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await application({**scope, "headers": [], "root_path": "", "http_version": "1.1"}, receive, send)

    asyncio.run(ask())
    headers = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages[1:]).decode()


@pytest.mark.parametrize(
    ("lines", "insecure", "says"),
    [
        (None, False, "there is no secret"),
        ("short", False, "a secret of 5 characters can be guessed"),
        (SECRET, True, "a secret is given"),
    ],
)
def test_a_service_that_anybody_could_use_does_not_start(
    tmp_path: Path, lines: str | None, insecure: bool, says: str
) -> None:
    """Broken: a forgotten secret would let whoever reaches the port start runs, and nothing would say so."""
    file = tmp_path / "secret"
    file.write_text(lines or "\n")
    with pytest.raises(UsageError, match=says):
        read_secrets(file, insecure=insecure, environment={})
    file.write_text(f"{SECRET}\n\n  {SECRET[::-1]} \n")
    assert read_secrets(file, insecure=False, environment={}) == (SECRET, SECRET[::-1])


@pytest.mark.parametrize("url", ["alerts.example.com/hook", "ftp://alerts.example.com", "https://", "http://["])
def test_an_alert_url_that_nothing_can_be_posted_to_is_refused(url: str) -> None:
    """Broken: the service starts, a requalification fails, and nobody hears of it."""
    with pytest.raises(UsageError, match="COMPILE_STAGE_WATCH_ALERT_URL is no http or https URL"):
        alert_url({"COMPILE_STAGE_WATCH_ALERT_URL": url})


def test_an_alert_url_is_no_must() -> None:
    assert alert_url({}) == ""
    assert alert_url({"COMPILE_STAGE_WATCH_ALERT_URL": " https://alerts.example.com/hook"}).startswith("https")
