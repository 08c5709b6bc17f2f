"""What each graph rewrite gains, by runtime and precision: the graph as exported beside the rewritten one.

    python benchmarks/graph_rewrites.py                  # BERT and a small ViT, two minutes
    python benchmarks/graph_rewrites.py bert6 --save

Both graphs take turns in one process, at batch 1. A ratio is the exported graph's median over the rewritten one's, with
its 95 % interval over turns: above 1 the rewritten graph is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import float_rest  # noqa: E402
import int8  # noqa: E402
import networks  # noqa: E402
import results  # noqa: E402
from turns import in_turns  # noqa: E402

from compile_stage.backends.openvino import OpenVino  # noqa: E402
from compile_stage.core.records import PortableModel, SampleSet  # noqa: E402
from compile_stage.graph_rewrites.apply import rewrite_graph  # noqa: E402
from compile_stage.measure import speedups  # noqa: E402
from compile_stage.precision.int8 import StaticInt8  # noqa: E402


def runs_of(model: PortableModel, calibration: SampleSet, example: dict, folder: Path) -> dict[str, int8.Run]:
    """The graph by runtime and precision."""
    fp32 = Path(model.path)
    runs = {f"OpenVINO {hint}": float_rest.opened(fp32, example, hint) for hint in float_rest.hints()}
    scheme = next(s for s in OpenVino().schemes(int8.TARGET, "int8") if not s.native)
    lowered = StaticInt8().lower(model, scheme, calibration, (), folder / "int8")
    best = float_rest.hints()[1] if len(float_rest.hints()) > 1 else "f32"
    runs[f"OpenVINO {scheme.name}, rest in {best}"] = float_rest.opened(Path(lowered.path), example, best)
    runs["ONNX Runtime f32"] = int8.on_onnxruntime(fp32)
    return runs


def measure(name: str, seconds: float, folder: Path) -> list[dict[str, Any]]:
    model, calibration = int8.export(name, folder / "model")
    rewritten = rewrite_graph(model, calibration, folder / "rewritten")
    print(f"\n{name}: {'; '.join(rewritten.notes) or 'nothing was rewritten'}", flush=True)
    if rewritten is model:
        return []
    example = int8.one(networks.samples(name, 1, 1), 0)
    before = runs_of(model, calibration, example, folder)
    after = runs_of(rewritten, calibration, example, folder / "of-rewritten")
    both = {f"exported {key}": run for key, run in before.items()} | {f"rewritten {k}": run for k, run in after.items()}
    times, rows = in_turns(both, example, seconds), []
    for key in before:
        own, plain = times[f"rewritten {key}"], times[f"exported {key}"]
        ratio = speedups.ratio_interval([(t,) for t in plain], [(t,) for t in own], seed=0)
        rows.append(
            {
                "network": name,
                "runtime": key,
                "rewrites": list(rewritten.notes),
                "exported_ms": round(statistics.median(plain) * 1e3, 3),
                "rewritten_ms": round(statistics.median(own) * 1e3, 3),
                "ratio": round(ratio.value, 3),
                "interval": [round(ratio.low, 3), round(ratio.high, 3)],
            }
        )
        print(f"  {key}: {rows[-1]['ratio']} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert6", "vit"])
    parser.add_argument("--seconds", type=float, default=40.0, help="of taking turns, a network")
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("graph-rewrites", chosen.save) as record:
        record.settings.update(batch=1, threads=int8.THREADS, seconds=chosen.seconds)
        for name in chosen.networks:
            with tempfile.TemporaryDirectory() as folder:
                record.rows += measure(name, chosen.seconds, Path(folder))


if __name__ == "__main__":
    main()
