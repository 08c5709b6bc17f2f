"""How accurate and how fast our int8 graphs are, beside those of NNCF and of ONNX Runtime's quantizer.

    python benchmarks/int8.py                       # four networks, about twelve minutes on two cores
    python benchmarks/int8.py bert6 --full-weights  # on a CPU without VNNI: what one with it would compute
    python benchmarks/int8.py bert6 --openvino      # OpenVINO's graphs alone, beside NNCF's
    python benchmarks/int8.py --olive .venv-olive/bin/python    # with Olive, which lives in an environment of its own:
                                                    # python -m venv .venv-olive && .venv-olive/bin/pip install olive-ai
                                                    # onnxruntime

Each network is exported, lowered by every int8 scheme of both backends on 32 calibration samples, and compared with
FP32 on 16 others: the signal-to-noise ratio of the first output, *as its graph says* (integer kernels off, so that it
is the same on every machine) and *as it is served* here. NNCF quantises OpenVINO's graph with its defaults (and its
transformer rules for BERT); ONNX Runtime's quantizer is tried with uint8 activations on every operator it knows and on
the heavy ones alone, and the more accurate is taken. Latency: batch 1, two threads, all in turns in one process, the
order drawn anew each round; reported is the median ratio to NNCF's of the same round. ONNX Runtime's threads do not
spin here: they would take the processor from whoever comes next.

On a CPU without VNNI our schemes take 7-bit weights. `--full-weights` lowers with 8 bits all the same, and reports on
the graph only: such kernels saturate here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.modules.setdefault(
    "candidate", types.SimpleNamespace(register=None)
)  # examples/models.py registers; here nothing is

import networks  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import openvino  # noqa: E402
import results  # noqa: E402
from turns import in_turns  # noqa: E402

from compile_stage.backends.onnxruntime import OnnxRuntime  # noqa: E402
from compile_stage.backends.openvino import OpenVino  # noqa: E402
from compile_stage.core.digest import digest_tree  # noqa: E402
from compile_stage.core.environment import hardware  # noqa: E402
from compile_stage.core.records import PortableModel, SampleSet, Target  # noqa: E402
from compile_stage.core.sample_files import write_index  # noqa: E402
from compile_stage.core.tensors import Signature, TensorSpec  # noqa: E402
from compile_stage.precision.int8 import StaticInt8  # noqa: E402
from compile_stage.precision.onnx_graph import simplify  # noqa: E402

CALIBRATION, HELD_OUT, THREADS = 32, 16, 2
TARGET = Target(name="here")
Run = Callable[[dict], np.ndarray]


def one(batch: dict, index: int) -> dict:
    return {name: array[index : index + 1] for name, array in batch.items()}


def export(name: str, folder: Path) -> tuple[PortableModel, SampleSet]:
    example, calibration = networks.samples(name, 2, 0), networks.samples(name, CALIBRATION, 2)
    folder.mkdir(parents=True)
    exported = networks.export(name)
    onnx.save(exported, folder / "model.onnx")
    inputs = tuple(
        TensorSpec(name=key, dtype=value.dtype.name, shape=("batch", *value.shape[1:]))
        for key, value in example.items()
    )
    answer = exported.graph.output[0].type.tensor_type.shape.dim
    output = TensorSpec(name="answer", dtype="float32", shape=("batch", *(dim.dim_value for dim in answer[1:])))
    model = PortableModel(
        path=str(folder / "model.onnx"), digest=digest_tree(folder), form="onnx", opset=18, precision="fp32",
        signature=Signature(inputs=inputs, outputs=(output,)),
    )  # fmt: skip
    place = folder.parent / "samples"
    (place / "inputs").mkdir(parents=True)
    for key, value in calibration.items():
        np.save(place / "inputs" / f"{key}.npy", value)
    write_index(place, {key: f"inputs/{key}.npy" for key in calibration}, labels=False, count=CALIBRATION)
    return model, SampleSet(path=str(place), digest="sha256:benchmark", count=CALIBRATION, real=False, source="noise")


# ----------------------------------------------------------------------------------------------------------- runtimes


def on_onnxruntime(path: Path, exact: bool = False) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, batch)[0]


def on_openvino(path: Path, example: dict, exact: bool = False, hint: str = "f32") -> Run:
    core = openvino.Core()
    graph = core.read_model(path)
    graph.reshape({name: list(array.shape) for name, array in example.items()})
    config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(
        graph, "CPU", config | ({"LP_TRANSFORMS_MODE": "NO"} if exact else {})
    ).create_infer_request()

    def run(batch: dict) -> np.ndarray:
        request.infer(list(batch.values()), share_inputs=True)
        return request.output_tensors[0].data.copy()

    return run


# -------------------------------------------------------------------------------------------------------------- peers


def by_nncf(name: str, model: PortableModel, folder: Path) -> Path:
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    calibration = networks.samples(name, CALIBRATION, 2)
    graph = nncf.quantize(
        openvino.Core().read_model(model.path),
        nncf.Dataset([one(calibration, index) for index in range(CALIBRATION)]),
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=CALIBRATION,
        model_type=nncf.ModelType.TRANSFORMER if name == "bert6" else None,
    )
    openvino.save_model(graph, str(folder / "nncf.xml"), compress_to_fp16=False)
    return folder / "nncf.xml"


def by_onnxruntime(name: str, model: PortableModel, folder: Path, full: bool) -> list[Path]:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    folder.mkdir()
    simple, written = simplify(Path(model.path), folder), []
    for kind, ops in (("every", None), ("heavy", ["Conv", "Gemm", "MatMul"])):
        calibration = networks.samples(name, CALIBRATION, 2)
        batches = iter([one(calibration, index) for index in range(CALIBRATION)])
        reader = types.SimpleNamespace(get_next=lambda batches=batches: next(batches, None))
        quantize_static(
            str(simple), str(folder / f"{kind}.onnx"), reader, quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, op_types_to_quantize=ops,
            reduce_range=not full and hardware().sums_saturate,
        )  # fmt: skip
        written.append(folder / f"{kind}.onnx")
    return written


def by_olive(python: str, name: str, model: PortableModel, folder: Path, full: bool) -> Path:
    samples_file, out = folder / "samples.npz", folder / "olive.onnx"
    np.savez(samples_file, **networks.samples(name, CALIBRATION, 2))
    script = Path(__file__).with_name("olive_int8.py")
    narrow = json.dumps(not full and hardware().sums_saturate)
    subprocess.run([python, script, model.path, samples_file, out, narrow], check=True, stdout=subprocess.DEVNULL)
    return out


# -------------------------------------------------------------------------------------------------------- measurement


def snr_db(expected: list[np.ndarray], run: Run, batch: dict) -> float:
    signal = noise = 0.0
    for index, right in enumerate(expected):
        output = run(one(batch, index)).astype(np.float64)
        signal, noise = signal + np.sum(right.astype(np.float64) ** 2), noise + np.sum((output - right) ** 2)
    return float(10 * np.log10(signal / noise))


def measure(name: str, seconds: float, full: bool, olive: str | None, alone: bool, folder: Path) -> list[dict]:
    model, calibration = export(name, folder / "model")
    held_out = networks.samples(name, HELD_OUT, 1)
    example, fp32 = one(held_out, 0), on_onnxruntime(Path(model.path))
    expected = [fp32(one(held_out, index)) for index in range(HELD_OUT)]
    nncf = by_nncf(name, model, folder)
    rows: dict[str, tuple[float, Run]] = {
        "FP32 (OpenVINO)": (np.inf, on_openvino(Path(model.path), example)),
        "NNCF": (snr_db(expected, on_openvino(nncf, example, exact=True), held_out), on_openvino(nncf, example)),
    }
    if alone:
        rows["NNCF, once more"] = (rows["NNCF"][0], on_openvino(nncf, example))
    else:
        graphs = by_onnxruntime(name, model, folder / "peer", full)
        exact = [snr_db(expected, on_onnxruntime(path, exact=True), held_out) for path in graphs]
        best = int(np.argmax(exact))
        rows["FP32 (ONNX Runtime)"] = (np.inf, fp32)
        rows["quantize_static"] = (exact[best], on_onnxruntime(graphs[best]))
    if olive:
        path = by_olive(olive, name, model, folder, full)
        rows["Olive"] = (snr_db(expected, on_onnxruntime(path, exact=True), held_out), on_onnxruntime(path))
    lowered: dict[str, str] = {}
    for backend in (OpenVino(),) if alone else (OpenVino(), OnnxRuntime()):
        for scheme in backend.schemes(TARGET, "int8"):
            if scheme.native:
                continue
            options = {
                key: value
                for key, value in scheme.options.items()
                if not (full and key in ("reduce_range", "products"))
            }
            key = repr((scheme.activations, scheme.symmetric, scheme.ops, options))  # both backends may want one graph
            if key not in lowered:
                began = time.process_time()
                asked = replace(scheme, options=options)
                lowered[key] = StaticInt8().lower(model, asked, calibration, (), folder / f"ours{len(lowered)}").path
                print(f"{scheme.name}: {time.process_time() - began:.0f} s of processor time", file=sys.stderr)
            path = Path(lowered[key])
            served = on_openvino(path, example) if backend.name == "openvino" else on_onnxruntime(path)
            graph_db = snr_db(expected, on_onnxruntime(path, exact=True), held_out)
            rows[f"ours, {backend.name} {scheme.name}"] = (graph_db, served)
    if full:
        print(f"\n| {name} | SNR dB, the graph, 8-bit weights |\n|---|---|")
        print(
            "\n".join(f"| {kind} | {value:.1f} |" for kind, (value, _) in rows.items() if "FP32" not in kind),
            flush=True,
        )
        graphs_only = {kind: value for kind, (value, _) in rows.items() if "FP32" not in kind}
        return [{"network": name, "by": kind, "graph_snr_db": round(value, 1)} for kind, value in graphs_only.items()]
    served_db = {kind: snr_db(expected, run, held_out) for kind, (_, run) in rows.items() if "FP32" not in kind}
    times = in_turns({kind: run for kind, (_, run) in rows.items()}, example, seconds)
    print(f"\n| {name} | SNR dB, the graph | SNR dB, as served | latency over NNCF's | p50 ms |\n|---|---|---|---|---|")
    figures = []
    for kind, (graph_db, _) in rows.items():
        ratio = statistics.median(own / other for own, other in zip(times[kind], times["NNCF"], strict=True))
        exactly = "" if np.isinf(graph_db) else f"{graph_db:.1f}"
        print(
            f"| {kind} | {exactly} | {f'{served_db[kind]:.1f}' if kind in served_db else ''} | "
            f"{ratio:.{3 if alone else 2}f} | {statistics.median(times[kind]) * 1e3:.2f} |"
        )
        figure = {"network": name, "by": kind, "latency_over_nncf": round(ratio, 3)}
        figure["p50_ms"] = round(statistics.median(times[kind]) * 1e3, 2)
        if kind in served_db:
            figure |= {"graph_snr_db": round(graph_db, 1), "served_snr_db": round(served_db[kind], 1)}
        figures.append(figure)
    print(f"\n{len(times['NNCF'])} rounds", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet50", "bert6", "separable", "small"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of taking turns, a network")
    parser.add_argument("--full-weights", action="store_true", help="8-bit weights, whatever this CPU's kernels do")
    parser.add_argument(
        "--openvino", action="store_true", help="its graphs alone, and NNCF's twice, to see what is chance"
    )
    parser.add_argument("--olive", metavar="PYTHON", help="interpreter of an environment with Olive")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    benchmark = "int8-full-weights" if chosen.full_weights else "int8-openvino" if chosen.openvino else "int8"
    with results.recording(benchmark, chosen.save) as record:
        record.settings |= {"batch": 1, "threads": THREADS, "seconds": chosen.seconds}
        record.settings |= {"calibration_samples": CALIBRATION, "compared_samples": HELD_OUT}
        for name in chosen.networks:
            with tempfile.TemporaryDirectory() as scratch:
                options = (chosen.full_weights, chosen.olive, chosen.openvino)
                record.rows += measure(name, chosen.seconds, *options, Path(scratch))


if __name__ == "__main__":
    main()
