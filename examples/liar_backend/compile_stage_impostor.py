"""A source and lowerings that deceive: ONNX as it is, with one attempt each. None may have an effect beyond what
docs/proof.md lists as its word (tests/integration/test_impostors.py).

A model of the flavor `impostor` names the attempts in its MLmodel, and what each aims at:

    flavors: {impostor: {modes: {swaps_samples: "", reads_secrets: PATH, opens_network: PORT}}}

A lowering is a precision of its own, which a policy names: `impostor-other-network`.
"""

import os
import socket
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.digest import digest_tree
from compile_stage.core.ports import Lowering
from compile_stage.core.records import Outcome
from compile_stage.measure import metrics
from compile_stage.sources import mlmodel
from compile_stage.sources.onnx import OnnxSource


def _patch_the_judge():
    """Whatever is compared by this process passes: done when the plug-in is imported."""
    compare = metrics.check_outputs

    def pass_all(*args, **kwargs):
        return tuple(replace(check, outcome=Outcome.PASS) for check in compare(*args, **kwargs))

    metrics.check_outputs = pass_all


_patch_the_judge()

# ------------------------------------------------------------------------------------------------ the original, falsely


class _Session:
    def __init__(self, session):
        self.session, self.signature = session, session.signature

    def run(self, batch):
        """As the original answers."""
        return self.session.run(batch)


class _Zeros(_Session):
    def run(self, batch):
        return {name: np.zeros_like(value) for name, value in self.session.run(batch).items()}


class _Slow(_Session):
    def run(self, batch):
        time.sleep(0.005)
        return self.session.run(batch)


class _ZerosWhenTimed(_Slow):
    """Whatever is compared with it then seems wrong, or it seems slow."""

    def run(self, batch):
        answer = super().run(batch)
        return {name: value * 0 for name, value in answer.items()} if _is_timed() else answer


SESSIONS = {"garbage_baseline": _Zeros, "slow_baseline": _Slow, "garbage_when_timed": _ZerosWhenTimed}


def _swap_samples(_):
    """From now on all samples that this process writes are zeros, with the label 0: whatever is right there passes."""
    save = np.save

    def forged(path, array, *args, **kwargs):
        is_sample = Path(path).parent.name == "inputs" or Path(path).stem == "labels"
        save(path, np.zeros_like(array) if is_sample else array, *args, **kwargs)

    np.save = forged
    return "forged"


# ------------------------------------------------------------------------------------------ beyond what it is there for


def _reads_secrets(aim):
    found = [value for name, value in os.environ.items() if "TOKEN" in name or "SECRET" in name]
    with suppress(OSError):
        found.append(Path(aim).read_text())
    return f"read {found}"


def _opens_network(aim):
    with socket.create_connection(("127.0.0.1", int(aim)), timeout=5) as server:
        server.sendall(b"the model")
    return "sent"


def _writes_elsewhere(aim):
    Path(aim).write_text("planted")
    return "written"


ATTEMPTS = {
    "swaps_samples": _swap_samples,
    "reads_secrets": _reads_secrets,
    "opens_network": _opens_network,
    "writes_elsewhere": _writes_elsewhere,
}


def _tried(modes):
    """What each attempt came to."""
    for mode, attempt in ATTEMPTS.items():
        if mode in modes:
            try:
                yield f"{mode}: {attempt(modes[mode])}"
            except OSError as error:
                yield f"{mode}: {type(error).__name__}"


MARKUP = "<script>alert('x')</script>\x1b[2J\x1b]0;owned\x07[click](javascript:alert(1))|"


class Impostor(OnnxSource):
    """ONNX, and what the mode of the model asks for."""

    name = "impostor"
    framework = f"ONNX Runtime {MARKUP}"
    capabilities = replace(OnnxSource.capabilities, forms=("onnx",))

    def refuse(self, source, compliance):
        """As ONNX; for the mode `refuses`, with markup in the reason."""
        return f"no: {MARKUP}" if "refuses" in _modes(source) else super().refuse(source, compliance)

    @contextmanager
    def open(self, source, target):
        """The session, which deceives from now on."""
        with super().open(source, target) as session:
            for mode in _modes(source):
                session = SESSIONS.get(mode, _Session)(session)
            yield session

    def export(self, source, shapes, into):
        """The graph, with what the attempts came to as notes."""
        modes = _modes(source)
        model = super().export(source, shapes, into)
        model = replace(model, notes=(*_tried(modes), MARKUP))
        if "false_digest" in modes:
            model = replace(model, digest="sha256:" + "0" * 64)
        return replace(model, path=str(modes["names_other_file"])) if "names_other_file" in modes else model


def _modes(source):
    return mlmodel.flavor(source, "impostor").get("modes") or {}


# ------------------------------------------------------------------------------------------------------------ lowerings


class _Forged(Lowering):
    requires, extra = ("onnx",), ""
    capabilities = LoweringCapabilities(needs_calibration=False, complexity=5)

    def refuse(self, model, scheme):
        """Never."""
        return

    def lower(self, model, scheme, calibration, keep, into):
        """The graph as it was, forged."""
        import onnx

        graph = onnx.load(model.path)
        self.forge(graph, model, into)
        into.mkdir(parents=True, exist_ok=True)
        onnx.save(graph, into / "model.onnx")
        return self.describe(model, into)

    def forge(self, graph, model, into):
        """Nothing."""

    def describe(self, model, into):
        """What was written."""
        return replace(
            model, path=str(into / "model.onnx"), digest=digest_tree(into), precision=self.name, made_from=model.digest
        )


class OtherNetwork(_Forged):
    """Weights of its own, under the digest of the graph that it was given, so that what is known of that is taken for
    it."""

    name = "impostor-other-network"

    def forge(self, graph, model, into):
        from onnx import numpy_helper

        for tensor in graph.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(0.5), tensor.name))

    def describe(self, model, into):
        return replace(super().describe(model, into), digest=model.digest)


class PatchesWorker(OtherNetwork):
    """As before, and whoever opens a graph in this process gets the original's."""

    name = "impostor-patches-worker"

    def forge(self, graph, model, into):
        super().forge(graph, model, into)
        import onnxruntime

        original = Path(model.path).read_bytes()

        class Session(onnxruntime.InferenceSession):
            def __init__(self, path_or_bytes, *args, **kwargs):
                super().__init__(original, *args, **kwargs)

        onnxruntime.InferenceSession = Session


class ReadsOutside(_Forged):
    """Weights that lie in a file of the machine's."""

    name = "impostor-reads-outside"

    def forge(self, graph, model, into):
        from onnx import TensorProto

        tensor = graph.graph.initializer[0]
        length = str(len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../../../../../../../etc/passwd")
        tensor.external_data.add(key="length", value=length)

    def lower(self, model, scheme, calibration, keep, into):
        import onnx

        graph = onnx.load(model.path)
        self.forge(graph, model, into)
        (into / "model.onnx").write_bytes(graph.SerializeToString())
        return self.describe(model, into)


class LinksOutside(_Forged):
    """A link in place of the graph."""

    name = "impostor-links-outside"

    def lower(self, model, scheme, calibration, keep, into):
        (into / "model.onnx").symlink_to("/etc/passwd")
        return replace(model, path=str(into / "model.onnx"), precision=self.name)


class NamesOtherFile(_Forged):
    """A file that is not its own."""

    name = "impostor-names-other-file"

    def describe(self, model, into):
        return replace(super().describe(model, into), path="/etc/passwd")


def _is_timed():
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "") == "compile_stage.measure.timing":
            return True
        frame = frame.f_back
    return False
