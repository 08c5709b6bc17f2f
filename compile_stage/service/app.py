"""The routes: `POST /webhook` for MLflow, and for people and monitors the page, reports, logs, `/healthz` and
`/metrics`."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.attempt import LOG_FILE
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service import metrics, pages
from compile_stage.service.deliveries import MAX_BODY, Refused, check
from compile_stage.service.polling import Poller
from compile_stage.service.queue import Queue
from compile_stage.service.settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger(__name__)
_SHOWN_JOBS, _SHOWN_REFUSALS, _SHOWN_LOOKS = 200, 50, 50
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": pages.PAGE_POLICY,
}
_Answer = Callable[["Request"], Awaitable["Response"]]


class Routes:
    """What answers. Whatever asks the database does so in a thread, so that a slow page keeps no delivery waiting.

    Args:
        healthy: None while every part of the service works, or what does not.
    """

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        policies: PolicyFolder,
        poller: Poller,
        healthy: Callable[[], str | None],
    ) -> None:
        self._settings, self._queue, self._policies = settings, queue, policies
        self._poller, self._healthy = poller, healthy

    def application(self, lifespan: Any = None) -> Starlette:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/webhook", self.webhook, methods=["POST"]),
            Route("/healthz", self.health),
            Route("/metrics", _threaded(self.metrics)),
            Route("/", _threaded(self.page)),
            Route("/runs/{job:int}/report.html", _threaded(self.report)),
            Route("/runs/{job:int}/log", _threaded(self.log)),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def webhook(self, request: Request) -> Response:
        """Check a delivery, write it down, and answer at once."""
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect

        try:
            body = await _body(request)
        except ClientDisconnect:
            return _json(400, "malformed")
        return await run_in_threadpool(self._take, request, body)

    def _take(self, request: Request, body: bytes | None) -> Response:
        peer = request.client.host if request.client is not None else ""
        if body is None:
            checked: Any = Refused(413, "too_large", f"it is larger than {MAX_BODY} bytes")
        else:
            headers = {key.lower(): value for key, value in request.headers.items()}
            settings = self._settings
            checked = check(headers, body, settings.secrets, now=time.time(), max_age_s=settings.max_age_s)
        try:
            if isinstance(checked, Refused):
                self._queue.refuse(checked, peer)
                return _json(checked.status, checked.reason)
            label = self._queue.accept(checked)
        except Exception:  # noqa: BLE001 - of any database; MLflow sends it again after a 503
            _log.exception("a delivery could not be written down")
            return _json(503, "unavailable")
        return _json(202 if label == "accepted" else 200, label)

    async def health(self, _: Request) -> Response:
        """200 while all parts work, else 503."""
        from starlette.concurrency import run_in_threadpool

        problem = await run_in_threadpool(self._healthy)
        return _json(503, problem) if problem is not None else _json(200, "ok")

    def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        from starlette.responses import Response

        files = self._policies.files()
        broken = sum(bool(file.problem) for file in files)
        states = {"ok": sum(file.policy is not None for file in files), "broken": broken}
        figures = self._queue.figures(metrics.BUCKETS_S)
        text = metrics.exposition(figures, states, self._poller.succeeded_at, poll_failed=bool(self._poller.problem))
        return Response(text, headers={**_ALWAYS, "Content-Type": metrics.CONTENT_TYPE})

    def page(self, _: Request) -> Response:
        """For people."""
        from starlette.responses import HTMLResponse

        jobs = [self._with_files(row) for row in self._queue.rows("jobs", _SHOWN_JOBS)]
        looks, refusals = self._queue.rows("looks", _SHOWN_LOOKS), self._queue.rows("refusals", _SHOWN_REFUSALS)
        poller = self._poller
        poll = {"at": poller.succeeded_at, "problem": poller.problem, "signed": bool(self._settings.secrets)}
        return HTMLResponse(pages.overview(jobs, looks, refusals, self._policies.files(), poll), headers=_ALWAYS)

    def report(self, request: Request) -> Response:
        """A run's report, in a sandbox."""
        from starlette.responses import FileResponse

        file = self._folder(request) / "result" / pages.REPORT
        if not file.is_file():
            return _json(404, "there is no such report")
        policy = {**_ALWAYS, "Content-Security-Policy": pages.REPORT_POLICY}
        return FileResponse(file, media_type="text/html; charset=utf-8", headers=policy)

    def log(self, request: Request) -> Response:
        """What the last attempt at a job printed."""
        from starlette.responses import PlainTextResponse

        job = self._queue.job(int(request.path_params["job"]))
        text = pages.log_of(self._folder(request), job["attempt"]) if job is not None else None
        return PlainTextResponse(text, headers=_ALWAYS) if text is not None else _json(404, "there is no such log")

    def _folder(self, request: Request) -> Path:
        return self._settings.run_folder(int(request.path_params["job"]))

    def _with_files(self, row: Any) -> dict[str, Any]:
        folder = self._settings.run_folder(row["id"])
        log = folder / str(row["attempt"]) / LOG_FILE
        return {**row, "report": (folder / "result" / pages.REPORT).is_file(), "log": log.is_file()}


async def _body(request: Request) -> bytes | None:
    """The whole body; None once it is larger than is read."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


def _threaded(answer: Callable[[Request], Response]) -> _Answer:
    async def answered(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        return await run_in_threadpool(answer, request)

    return answered


def _json(status: int, said: str) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"status": said}, status_code=status, headers=_ALWAYS)
