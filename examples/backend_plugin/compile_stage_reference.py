"""A backend in sixty lines: ONNX's reference implementation, in Python. It compiles nothing and is slow, so the gate on
speed rejects it, as it should.
"""

import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.errors import UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend
from compile_stage.core.records import Scheme
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form


class Reference(Backend):
    """See docs/backends/writing-one.md."""

    name, requires, extra = "reference", ("onnx",), ""
    capabilities = BackendCapabilities(forms=("onnx",), devices=("cpu",), precisions=("fp32",), runtime=("onnx",))

    def toolchain(self):
        return package_versions("onnx", "numpy")

    def refuse_target(self, target):
        if (reason := super().refuse_target(target)) is not None:
            return reason
        options = target.options.get(self.name, {})
        return f"reference has no options, and was given {', '.join(map(repr, options))}" if options else None

    def schemes(self, target, precision):
        cpu_fp32 = target.device == "cpu" and precision == "fp32"
        return (Scheme(precision="fp32", name="fp32", native=True),) if cpu_fp32 else ()

    def refuse(self, model, target):
        return refuse_form(self, model, target)

    def compile(self, model, scheme, target, job_id, into, calibration=None):
        import onnx

        into.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.path, into / "model.onnx")
        ops = Counter(node.op_type for node in onnx.load(model.path).graph.node)
        executed = {"providers": {"python": ops.total()}, "ops": dict(ops), "precision": {"all": scheme.precision}}
        return describe(self, model, scheme, job_id, into, Compiled(entry="model.onnx", executed=executed))

    @contextmanager
    def open(self, artifact, threads):
        session = _Session(Path(artifact.path) / artifact.entry, artifact.signature)
        yield session
        session.evaluator = None


class _Session:
    def __init__(self, path, signature):
        from onnx.reference import ReferenceEvaluator

        self.evaluator, self.signature = ReferenceEvaluator(str(path)), signature

    def run(self, batch):
        if self.evaluator is None:
            raise UsageError("this session is closed; call it inside its context")
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, self.evaluator.run(names, dict(batch)), strict=True))
