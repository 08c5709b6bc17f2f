"""The service as a whole: its threads, its one place on the state folder, and how it is stopped.

SIGTERM or Ctrl-C drains it: no further job is begun, the running one has its time to end, is then interrupted, which
the stage resumes from, and put back. A second signal interrupts at once. kill -9 at any moment loses nothing: the queue
is on the disk, and a run goes on without the service and is taken up by the next (`attempt`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.ending import ending_signals
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service import spans
from compile_stage.service.app import Routes
from compile_stage.service.deciding import Decider
from compile_stage.service.polling import Poller
from compile_stage.service.queue import Queue
from compile_stage.service.runs import Worker
from compile_stage.service.settings import Settings
from compile_stage.service.store import Store

if TYPE_CHECKING:
    from starlette.applications import Starlette

_log = logging.getLogger(__name__)
_PAUSE_S = 5.0  # before a part of the service that failed is started again
_HEAVY, _LIGHT = ("run", "requalify"), ("promote",)


class Service:
    """All parts of the service on one state folder.

    Raises:
        UsageError: Another service uses the state folder, there is no folder of policies, or the registry can't be
            watched.
        StorageError: The database can't be opened.
    """

    def __init__(self, settings: Settings) -> None:
        registry = plugins.load("registries", settings.registry)
        if not registry.capabilities.can_be_watched:
            raise UsageError(f"the registry {settings.registry} can't be watched")
        self.settings, self.policies = settings, PolicyFolder(settings.policies)
        self._lock = _only_one(settings.state)
        self._store = Store(settings.database_url)
        self.queue = Queue(self._store, settings.owner, settings.retry_s, hardware().fingerprint)
        self.poller = Poller(settings, self.queue, self.policies)
        decider = Decider(settings, self.queue, self.policies)
        self.workers = [self._worker(_HEAVY) for _ in range(settings.runs)] + [self._worker(_LIGHT)]
        works = [decider.work, self.poller.work, *(worker.work for worker in self.workers)]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=_kept_going, args=(work, self._stop), name=work.__qualname__, daemon=True)
            for work in works
        ]

    def start(self) -> None:
        """Start every part; what ran when the service was killed comes first."""
        for number, job in enumerate(self.queue.unfinished()):
            able = [worker for worker in self.workers if job.kind in worker.kinds]
            able[number % len(able)].first.append(job)
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Begin nothing more, let what runs end for a while, interrupt it then; returns when all has ended."""
        self._stop.set()
        ends = time.monotonic() + self.settings.drain_s
        while any(thread.is_alive() for thread in self._threads) and not self.hurried:
            with self.queue.changed:
                self.queue.changed.notify_all()
            if time.monotonic() > ends:
                break
            time.sleep(0.2)
        self.hurry()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=120)
        self._store.close()
        self._lock.release()

    @property
    def hurried(self) -> bool:
        """True once what runs is interrupted."""
        return any(worker.interrupt.is_set() for worker in self.workers)

    def hurry(self) -> None:
        """Interrupt what runs."""
        for worker in self.workers:
            worker.interrupt.set()

    def problem(self) -> str | None:
        """What does not work; None when all does."""
        if not all(thread.is_alive() for thread in self._threads):
            return "stopping" if self._stop.is_set() else "a part of the service has ended"
        try:
            self.queue.known()
        except Exception as error:  # noqa: BLE001 - of any database
            return f"the queue's database fails: {type(error).__name__}"
        return None

    def application(self) -> Starlette:
        """The ASGI application; it starts the service, and drains it when it ends."""
        from starlette.concurrency import run_in_threadpool

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.start()
            yield
            await run_in_threadpool(self.drain)

        routes = Routes(self.settings, self.queue, self.policies, self.poller, self.problem)
        return routes.application(lifespan)

    def _worker(self, kinds: tuple[str, ...]) -> Worker:
        return Worker(self.settings, self.queue, self.policies, kinds, spans.send, lambda: bool(self.poller.problem))


def serve(settings: Settings, host: str, port: int, say: Callable[[str], object]) -> None:
    """Run the service until it is stopped.

    Args:
        say: Hears where it listens.

    Raises:
        UsageError: It can't listen there, or as `Service`.
    """
    import uvicorn

    class _Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:  # its own raises the signal once more when all has ended well
            yield

    service = Service(settings)
    config = uvicorn.Config(
        service.application(), host=host, port=port, log_config=None, access_log=False, server_header=False,
        limit_concurrency=256, timeout_keep_alive=5, timeout_graceful_shutdown=10, ws="none",
    )  # fmt: skip
    server = _Server(config)
    sockets = [_listen(config)]
    bound = sockets[0].getsockname()
    say(f"listening on http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}, policies in "
        f"{settings.policies}, state in {settings.state}")  # fmt: skip
    with _own_signals(service, server):
        asyncio.run(server.serve(sockets))


def _listen(config: Any) -> Any:
    import socket

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family=family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise UsageError(f"it can't listen on {config.host}:{config.port}: {error.strerror}", fix="--port N") from error
    return listener


@contextmanager
def _own_signals(service: Service, server: Any) -> Iterator[None]:
    def stop(*_: object) -> None:
        if server.should_exit:
            service.hurry()
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kept_going(work: Callable[[threading.Event], None], stop: threading.Event) -> None:
    """Work until it is stopped; a database that is away for a while ends no part of the service."""
    while not stop.is_set():
        try:
            work(stop)
        except Exception:  # noqa: BLE001 - it is logged, and tried again
            _log.exception("%s failed, and goes on in %.0f s", work.__qualname__, _PAUSE_S)
            stop.wait(_PAUSE_S)


def _only_one(state: Path) -> Any:
    from filelock import FileLock, Timeout

    state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / "service.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(
            "another service uses this state folder", where=str(state), fix="stop it, or name another with --state"
        ) from error
    return lock
