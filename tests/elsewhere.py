"""Another machine, for tests of what is published: an environment with a model's own requirements, and a server in it.

It is a virtual environment with nothing in it but what pip would install for that file: the closure of its
requirements, each checked against its pin, as links to the files that this environment holds. So nothing is downloaded,
and neither compile-stage nor the source's framework can be imported there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def closure(requirements: Path) -> dict[str, Distribution]:
    """What pip would install for the file, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(line) for line in requirements.read_text().split("\n") if line.strip()]
    while waiting:
        wanted = waiting.pop()
        held = distribution(wanted.name)
        assert wanted.specifier.contains(held.version, prereleases=True), f"{wanted}, and {held.version} is here"
        if held.name in found and not wanted.extras:
            continue
        found[held.name] = held
        for needed in map(Requirement, held.requires or ()):
            extras = wanted.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def install(requirements: Path, folder: Path) -> Path:
    """A virtual environment that holds the closure of the file and nothing else. Returns its `bin`."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    programs = folder / "bin"
    for held in closure(requirements).values():
        for file in held.files or ():
            if file.parts[0] == "..":  # a script; made below
                continue
            link = site / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(held.locate_file(file))
        for entry in held.entry_points.select(group="console_scripts"):
            script = programs / entry.name
            script.write_text(
                f"#!{programs}/python\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                f'if __name__ == "__main__":\n    sys.exit({entry.attr}())\n'  # servers' workers import it once more
            )
            script.chmod(0o755)
    return programs


def importable(programs: Path, *modules: str) -> list[str]:
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m)])"
    done = subprocess.run(
        [programs / "python", "-c", code, *modules], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.split()


@contextmanager
def served(programs: Path, uri: str, port: int, folder: Path) -> Iterator[str]:
    """`mlflow models serve` of that environment; yields where it answers."""
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(folder),
        "MLFLOW_TRACKING_URI": os.environ["MLFLOW_TRACKING_URI"],
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    log = folder / "serve.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [programs / "mlflow", "models", "serve", "-m", uri, "--env-manager", "local", "-p", str(port)],
            env=environment, stdout=written, stderr=written, cwd=folder, start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300  # it starts in 5 s, but on a busy machine in minutes
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{address}/ping", timeout=20):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"it does not answer:\n{log.read_text()[-3000:]}"
            time.sleep(0.1)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def ask(address: str, body: bytes) -> Any:
    request = urllib.request.Request(f"{address}/invocations", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.loads(answer.read())["predictions"]


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
