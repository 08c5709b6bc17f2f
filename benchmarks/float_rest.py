"""Quantised graphs in OpenVINO with the rest of their arithmetic in float32, bfloat16 or float16, as far as this CPU
has it.

    python benchmarks/float_rest.py                        # ResNet-50 and BERT, two minutes
    python benchmarks/float_rest.py bert6 --seconds 60

Every graph with every hint takes turns in one process. Signal over noise is over the FP32 original, on samples that
nothing was calibrated on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import int8  # noqa: E402
import networks  # noqa: E402
import openvino  # noqa: E402
import results  # noqa: E402
from turns import in_turns  # noqa: E402

from compile_stage.backends.openvino import OpenVino  # noqa: E402
from compile_stage.core.environment import hardware  # noqa: E402
from compile_stage.precision.int8 import StaticInt8  # noqa: E402


def hints() -> list[str]:
    machine = hardware()
    return ["f32", *(["bf16"] if machine.multiplies_bf16 else []), *(["f16"] if machine.multiplies_fp16 else [])]


def opened(path: Path, example: dict, hint: str) -> int8.Run:
    core = openvino.Core()
    graph = core.read_model(path)
    graph.reshape({name: list(array.shape) for name, array in example.items()})
    config = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": int8.THREADS,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(graph, "CPU", config).create_infer_request()

    def run(batch: dict) -> int8.np.ndarray:
        request.infer(list(batch.values()), share_inputs=True)
        return request.output_tensors[0].data.copy()

    return run


def measure(name: str, seconds: float, folder: Path) -> list[dict]:
    model, calibration = int8.export(name, folder / "model")
    held_out = networks.samples(name, int8.HELD_OUT, 1)
    example, fp32 = int8.one(held_out, 0), int8.on_onnxruntime(Path(model.path))
    expected = [fp32(int8.one(held_out, index)) for index in range(int8.HELD_OUT)]
    graphs = {"fp32": Path(model.path), "int8-nncf": int8.by_nncf(name, model, folder)}
    for scheme in OpenVino().schemes(int8.TARGET, "int8"):
        if not scheme.native:
            lowered = StaticInt8().lower(model, replace(scheme), calibration, (), folder / scheme.name)
            graphs[scheme.name] = Path(lowered.path)
    runs = {(graph, hint): opened(path, example, hint) for graph, path in graphs.items() for hint in hints()}
    quality = {key: int8.snr_db(expected, run, held_out) for key, run in runs.items()}
    times = in_turns({" ".join(key): run for key, run in runs.items()}, example, seconds)
    print(f"\n| {name} | rest in | SNR dB | p50 ms | over its own f32 |\n|---|---|---|---|---|")
    rows = []
    for graph, hint in runs:
        own, plain = times[f"{graph} {hint}"], times[f"{graph} f32"]
        ratio = statistics.median(a / b for a, b in zip(own, plain, strict=True))
        row = {
            "network": name,
            "graph": graph,
            "hint": hint,
            "served_snr_db": round(quality[graph, hint], 1),
            "p50_ms": round(statistics.median(own) * 1e3, 2),
            "latency_over_f32": round(ratio, 3),
        }
        print(
            f"| {graph} | {hint} | {row['served_snr_db']} | {row['p50_ms']} | {row['latency_over_f32']} |", flush=True
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet50", "bert6"])
    parser.add_argument("--seconds", type=float, default=40.0, help="of taking turns, a network")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("float-rest", chosen.save) as record:
        record.settings.update(batch=1, threads=int8.THREADS, seconds=chosen.seconds, hints=hints())
        for name in chosen.networks:
            with tempfile.TemporaryDirectory() as folder:
                record.rows += measure(name, chosen.seconds, Path(folder))


if __name__ == "__main__":
    main()
