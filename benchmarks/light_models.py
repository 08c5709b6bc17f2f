"""Every lowering on the nine classic networks that the onnx package brings for its own tests.

    python benchmarks/light_models.py                          # all of them, about ten minutes on one core
    python benchmarks/light_models.py squeezenet --only int4   # the names are parts of the files' names

Their weights are made inside the graph, all of one value: they prove structure, not accuracy. For each model and
lowering it is checked that names, types and dimensions of inputs and outputs stay, that a second lowering writes the
same bytes, and that ONNX Runtime and OpenVINO load the graph; or else the reason is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from compile_stage.core import plugins
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme, SourceModel
from compile_stage.core.sample_files import write_index
from compile_stage.sources.onnx import OnnxSource

SCHEMES = (
    Scheme(precision="fp16", name="fp16"),
    Scheme(precision="bf16", name="bf16"),
    Scheme(precision="int8", name="int8-u8", activations="uint8", weights="int8"),
    Scheme(precision="int8", name="int8-sym", activations="int8", weights="int8", symmetric=True,
        ops=("Conv", "Gemm", "MatMul")),
    Scheme(precision="int8-dynamic", name="int8-dynamic", activations="uint8", weights="int8"),
    Scheme(precision="int4", name="int4", weights="uint4", options={"method": "rtn"}),
    Scheme(precision="fp8", name="fp8"),
)  # fmt: skip
RUNTIMES = ("onnxruntime", "openvino")


@dataclass(frozen=True)
class Row:
    """One model and lowering.

    Attributes:
        outcome: `ok`, or the reason of a refusal; what begins with `BROKEN` is a fault of ours.
        loads: By runtime, `ok` or its reason.
    """

    model: str
    lowering: str
    outcome: str
    loads: dict[str, str]
    seconds: float


def files() -> dict[str, Path]:
    """The package's models by short name: resnet50, vgg19, ..."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return {path.stem.removeprefix("light_"): path for path in sorted(folder.glob("*.onnx"))}


def export(path: Path, into: Path) -> tuple[PortableModel, SampleSet]:
    """The model through our own ONNX source, and two samples of noise."""
    logged = into / "logged"
    logged.mkdir(parents=True)
    (logged / "model.onnx").write_bytes(path.read_bytes())
    (logged / "MLmodel").write_text("flavors:\n  onnx: {data: model.onnx}\n")
    source = SourceModel(
        uri=f"file:{path.name}", name=path.stem, version="", flavor="onnx", path=str(logged), digest=digest_tree(logged)
    )
    model = OnnxSource().export(source, {}, into / "exported")
    samples, count = into / "samples", 2
    (samples / "inputs").mkdir(parents=True)
    random = np.random.default_rng(0)
    names = {spec.name: f"inputs/{place}.npy" for place, spec in enumerate(model.signature.inputs)}
    for spec in model.signature.inputs:
        shape = (count, *(size if isinstance(size, int) else 1 for size in spec.shape[1:]))
        np.save(samples / names[spec.name], random.standard_normal(shape, dtype=np.float32))
    write_index(samples, names, labels=False, count=count)
    return model, SampleSet(path=str(samples), digest=digest_tree(samples), count=count, real=False, source="noise")


def check(name: str, model: PortableModel, samples: SampleSet, scheme: Scheme, into: Path) -> Row:
    """Lower twice, compare, load."""
    began = time.monotonic()
    lowering = plugins.load("lowerings", scheme.precision)
    loads: dict[str, str] = {}
    if (reason := lowering.refuse(model, scheme)) is not None:
        return Row(name, scheme.name, f"refused: {reason}", loads, time.monotonic() - began)
    try:
        lowered = lowering.lower(model, scheme, samples, (), into)
        again = lowering.lower(model, scheme, samples, (), into)
    except CompileStageError as error:
        return Row(name, scheme.name, f"refused: {error.problem}", loads, time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - what any of them would be is what is looked for
        return Row(name, scheme.name, f"BROKEN: {type(error).__name__}: {error}", loads, time.monotonic() - began)
    outcome = "ok"
    if lowered.digest != again.digest:
        outcome = "BROKEN: other bytes the second time"
    elif signature(model) != signature(lowered) or lowered.signature != model.signature:
        outcome = "BROKEN: other inputs or outputs"
    for runtime in RUNTIMES:
        loads[runtime] = load(runtime, lowered) or "ok"
    return Row(name, scheme.name, outcome, loads, time.monotonic() - began)


def signature(model: PortableModel) -> list[tuple]:
    """Inputs and outputs as the file itself declares them."""
    graph = onnx.load(model.path, load_external_data=False).graph
    return [
        (
            value.name,
            value.type.tensor_type.elem_type,
            [size.dim_value or size.dim_param for size in value.type.tensor_type.shape.dim],
        )
        for value in (*graph.input, *graph.output)
    ]


def load(runtime: str, model: PortableModel) -> str | None:
    """None when the runtime loads and compiles the graph, or the reason why not."""
    try:
        if runtime == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            onnxruntime.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        else:
            import openvino

            openvino.Core().compile_model(model.path, "CPU", {"INFERENCE_NUM_THREADS": 1})
    except Exception as error:  # noqa: BLE001 - runtimes share no base class
        return " ".join(str(error).split())[:160]
    return None


def rows(names: list[str], only: list[str]) -> Iterator[Row]:
    """A row for each model and scheme that was asked for; empty lists ask for all."""
    for name, path in files().items():
        if names and not any(part in name for part in names):
            continue
        with TemporaryDirectory() as folder:
            model, samples = export(path, Path(folder))
            for scheme in SCHEMES:
                if not only or scheme.name in only:
                    with TemporaryDirectory(dir=folder) as into:
                        yield check(name, model, samples, scheme, Path(into))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--only", nargs="*", default=[], help="names of schemes")
    chosen = parser.parse_args()
    print("| model | lowering | outcome | ONNX Runtime | OpenVINO | s |\n|---|---|---|---|---|---|")
    broken = 0
    for row in rows(chosen.models, chosen.only):
        broken += row.outcome.startswith("BROKEN")
        loaded = " | ".join(row.loads.get(runtime, "") for runtime in RUNTIMES)
        print(f"| {row.model} | {row.lowering} | {row.outcome} | {loaded} | {row.seconds:.1f} |", flush=True)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
