"""Run both graphs on the inputs beside this file, and say how far their answers lie apart.

Needs numpy, onnx and onnxruntime, and openvino where a graph is a .xml file. Ends with 0 when the error is seen again,
with 1 when it is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(path: Path, batch: dict[str, Any], outputs: list[str], tensor: str, hint: str) -> tuple[list[Any], Any]:
    """All outputs, and one tensor in between, as the graph says: without the runtime's optimisations."""
    if path.suffix == ".onnx":
        import onnx
        import onnxruntime

        model = onnx.load(path)
        if tensor not in [value.name for value in (*model.graph.output, *model.graph.input)]:
            model.graph.output.append(onnx.ValueInfoProto(name=tensor))
        watched = path.with_name(f"watched-{path.name}")
        onnx.save(model, watched)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(watched), options, providers=["CPUExecutionProvider"])
        answers = list(session.run(outputs, batch))
        watched.unlink()
        return answers, batch[tensor] if tensor in batch else session.run([tensor], batch)[0]
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    listed = [name for port in model.outputs for name in port.get_names()]
    if tensor not in listed and tensor not in batch:
        # What has no name in the file, as NNCF's quantisations have none, is called by its operation and place.
        ports = [port for operation in model.get_ordered_ops() for port in operation.outputs()]
        called = {f"{port.get_node().get_friendly_name()}:{port.get_index()}": port for port in ports}
        model.add_outputs([called.get(tensor, tensor)])
    config = {"INFERENCE_PRECISION_HINT": hint, "LP_TRANSFORMS_MODE": "NO"}
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    request.infer(batch)
    arrays = [answers.data.copy() for answers in request.output_tensors]

    def place(name: str, otherwise: int) -> int:
        return next((i for i, port in enumerate(compiled.outputs) if name in port.get_names()), otherwise)

    answers = [arrays[place(name, i)] for i, name in enumerate(outputs)]
    return answers, batch[tensor] if tensor in batch else arrays[place(tensor, len(arrays) - 1)]


def snr_db(candidate: Any, reference: Any) -> float:
    """Signal to noise, in dB; larger is nearer."""
    import numpy as np

    a, b = np.asarray(candidate, np.float64), np.asarray(reference, np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return -np.inf
    both = np.isfinite(a)
    noise, signal = np.sum((a - b)[both] ** 2), np.sum(b[both] ** 2)
    if noise == 0:
        return np.inf
    return float(10 * np.log10(signal / noise)) if signal else -np.inf


def main() -> int:
    """Compare, and compare with what was seen when the bundle was written."""
    import numpy as np

    facts = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    inputs, answers = np.load(HERE / "inputs.npz"), np.load(HERE / "answers.npz")
    arrays = {name: inputs[f"input_{i}"] for i, name in enumerate(facts["inputs"])}
    results = {}
    for role in ("reference", "candidate"):
        batch = {name: arrays[name] for name in facts["fed"][role]}
        results[role] = run(
            HERE / facts["files"][role], batch, facts["outputs"][role], facts["tensor"][role], facts["hint"]
        )
    print(facts["summary"])
    again = snr_db(results["candidate"][1], results["reference"][1])
    before = snr_db(answers["candidate/tensor"], answers["reference/tensor"])
    print(f"tensor {facts['tensor']['reference']}: {again:.1f} dB here, {before:.1f} dB when this was written")
    for position, name in enumerate(facts["outputs"]["reference"]):
        here = snr_db(results["candidate"][0][position], results["reference"][0][position])
        print(f"output {name}: {here:.1f} dB")
    seen = again == before or abs(again - before) < 3
    print("seen again" if seen else "not seen here")
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main())
