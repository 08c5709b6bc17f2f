"""The load generator as a process of its own, outside of every worker: what answers can't reach it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from compile_stage.core.errors import UsageError
from compile_stage.measure import load_generator

_MORE_S = 60.0  # than a trial should last, before the generator counts as stuck
_END_S = 5.0


class LoadGenerator:
    """A generator, and what it asks of which servers. Use it as a context manager."""

    def __init__(self) -> None:
        # -I: neither the current folder nor the user's packages are looked at.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and script
            [sys.executable, "-I", str(load_generator.__file__)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
        )  # fmt: skip

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def aim(self, sockets: Sequence[str], bodies: Sequence[str], expected: Sequence[Any], tolerance: float) -> None:
        """Name the servers, what they are asked in turn, and what they must answer.

        Args:
            sockets: Paths of local sockets, one for each server.
            bodies: JSON.
            expected: Of each body the answer, as plain JSON.
            tolerance: Of the largest number of an answer, by which a number may differ.

        Raises:
            UsageError: There is no such socket of ours here, as where the worker runs on another machine.
        """
        for path in sockets:
            if not _is_ours(Path(path)):
                raise UsageError("the servers can't be reached from here: their worker runs elsewhere")
        config = {"sockets": sockets, "bodies": bodies, "expected": expected, "tolerance": tolerance}
        self._write({"config": config})

    def arrive(self, rate: float, count: int, seed: int, drain_s: float) -> dict[str, Any]:
        """A trial of requests that arrive as a Poisson process (`load_generator.run_open`)."""
        asked = {"rate": rate, "count": count, "seed": seed, "drain_s": drain_s}
        return self._ask({"open": asked}, count / rate + drain_s)

    def loop(self, clients: int, seconds: float, drain_s: float) -> dict[str, Any]:
        """A trial of clients that wait for their answers (`load_generator.run_closed`)."""
        return self._ask({"closed": {"clients": clients, "seconds": seconds, "drain_s": drain_s}}, seconds + drain_s)

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        too_long = threading.Timer(seconds + _MORE_S, self._process.kill)
        too_long.start()
        try:
            self._write(question)
            line = self._process.stdout.readline()
        finally:
            too_long.cancel()
        found: dict[str, Any] = json.loads(line) if line else {"problem": "the load generator ended"}
        if "problem" in found:
            raise UsageError(found["problem"])
        return found

    def _write(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise UsageError("the load generator ended") from error


def _is_ours(path: Path) -> bool:
    try:
        seen = path.stat()
    except OSError:
        return False
    return stat.S_ISSOCK(seen.st_mode) and seen.st_uid == os.getuid()
