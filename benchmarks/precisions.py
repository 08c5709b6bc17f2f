"""Size, speed and error of each precision, by backend and scheme.

    python benchmarks/precisions.py                          # four networks, up to four minutes each on one core
    python benchmarks/precisions.py bert6 --seconds 20

Every candidate is lowered, compiled and opened as the stage does it. Then all of a network's candidates run in turns
within one process, at batch 1, so that what disturbs the machine disturbs all of them alike: the ratio is the median
over the turns of fp32's time over the candidate's, within the same backend. The error is that of the output over all
samples against ONNX Runtime in fp32, as a signal-to-noise ratio. The weights are random (see examples/models.py):
trained ones quantise differently.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
import models as networks  # noqa: E402
import results  # noqa: E402

from compile_stage.core import plugins  # noqa: E402
from compile_stage.core.digest import digest_tree  # noqa: E402
from compile_stage.core.errors import CompileStageError  # noqa: E402
from compile_stage.core.records import PortableModel, SampleSet, Scheme, Target  # noqa: E402
from compile_stage.core.sample_files import write_index  # noqa: E402
from compile_stage.sources.graph import signature_of  # noqa: E402

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4")
BACKENDS = ("onnxruntime", "openvino")
SAMPLES = 8
DOCUMENTED = {"separable": "separable-224"}  # another network than the one of benchmarks/networks.py


class Separable(nn.Module):
    """A small network of depthwise-separable convolutions, as MobileNet's: [batch, 3, 224, 224] → [batch, 1000]
    logits."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 128, 256, 256, 512, 512, 512, 1024)
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        for place, (before, after) in enumerate(pairwise(widths)):
            stride = 2 if place in (1, 3, 5, 8) else 1
            layers += [
                nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
                nn.BatchNorm2d(before),
                nn.ReLU6(),
            ]
            layers += [nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU6()]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.network(pixel_values)


def separable() -> nn.Module:
    """In evaluation mode, with statistics of its own noise, or every activation would vanish."""
    torch.manual_seed(networks.SEED)
    model = Separable()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain average
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 224, 224))
    return model.eval()


def products() -> nn.Module:
    """Eight products of 1024 × 1024: at batch 1, as when a language model writes, reading the weights is what takes the
    time.
    """
    torch.manual_seed(networks.SEED)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    return nn.Sequential(*layers).eval()


BUILDERS: dict[str, Callable[[], nn.Module]] = {**networks.BUILDERS, "separable": separable, "products": products}


def inputs_of(name: str, seed: int) -> dict[str, np.ndarray]:
    if name == "products":
        return {"input": np.random.default_rng(seed).standard_normal((SAMPLES, 1024), dtype=np.float32)}
    return networks.samples("resnet50" if name == "separable" else name, SAMPLES, seed=seed)


@dataclass
class Candidate:
    backend: str
    scheme: Scheme
    size_mb: float
    session: object
    times_s: list[float] = field(default_factory=list)


def export(name: str, into: Path) -> tuple[PortableModel, SampleSet]:
    """The network as ONNX with a free batch, and samples of noise."""
    inputs = inputs_of(name, seed=2)
    given = tuple(torch.from_numpy(array[:2]) for array in inputs.values())
    (into / "model").mkdir(parents=True)
    path = into / "model" / "model.onnx"
    free = {key: {0: torch.export.Dim.AUTO} for key in inputs}
    program = torch.onnx.export(
        BUILDERS[name](), given, input_names=list(inputs), output_names=["y"], dynamic_shapes=tuple(free.values()),
        dynamo=True, opset_version=18, verbose=False,
    )  # fmt: skip
    onnx.save(program.model_proto, path)
    signature = signature_of(onnx.load(path))
    (into / "samples" / "inputs").mkdir(parents=True)
    for key, array in inputs.items():
        np.save(into / "samples" / "inputs" / f"{key}.npy", array)
    write_index(into / "samples", {key: f"inputs/{key}.npy" for key in inputs}, labels=False, count=SAMPLES)
    model = PortableModel(
        path=str(path), digest=digest_tree(path.parent), form="onnx", opset=18, precision="fp32", signature=signature
    )
    samples = SampleSet(
        path=str(into / "samples"), digest=digest_tree(into / "samples"), count=SAMPLES, real=False, source="noise"
    )
    return model, samples


def prepare(
    model: PortableModel, samples: SampleSet, target: Target, into: Path, stack: ExitStack
) -> tuple[list[Candidate], list[str]]:
    """What could be compiled, open; and a line for each that could not."""
    candidates, refused = [], []
    for name in BACKENDS:
        backend = plugins.load("backends", name)
        for precision in PRECISIONS:
            schemes = backend.schemes(target, precision)
            if not schemes:
                refused.append(
                    f"{name} has no {precision} here: {backend.capabilities_for(target).why_lacking(precision)}"
                )
            for scheme in schemes:
                place = into / name / scheme.name
                try:
                    lowered = model
                    if not scheme.native:
                        lowering = plugins.load("lowerings", precision)
                        if (reason := lowering.refuse(model, scheme)) is not None:
                            refused.append(f"{name} {scheme.name}: {reason}")
                            continue
                        lowered = lowering.lower(model, scheme, samples, (), place / "lowered")
                    artifact = backend.compile(
                        lowered, scheme, target, "benchmark", place / "artifact", calibration=samples
                    )
                except CompileStageError as error:
                    refused.append(f"{name} {scheme.name}: {error.problem}")
                    continue
                session = stack.enter_context(backend.open(artifact, target.threads))
                candidates.append(Candidate(name, scheme, artifact.size_bytes / 1e6, session))
    return candidates, refused


def measure(name: str, seconds: float, threads: int) -> list[dict[str, object]]:
    inputs = inputs_of(name, seed=1)
    target = Target(name="cpu", threads=threads, batch_sizes=(1,))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model, samples = export(name, Path(folder) / "source")
        candidates, refused = prepare(model, samples, target, Path(folder), stack)
        output = model.signature.outputs[0].name
        rows = [{key: array[place : place + 1] for key, array in inputs.items()} for place in range(SAMPLES)]
        answers = [np.concatenate([c.session.run(row)[output] for row in rows]).astype(np.float64) for c in candidates]
        ends, turn = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            row = rows[turn % SAMPLES]
            turn += 1
            for candidate in candidates:
                began = time.perf_counter()
                candidate.session.run(row)
                candidate.times_s.append(time.perf_counter() - began)
    plain = {c.backend: c for c in candidates if c.scheme.precision == "fp32"}
    print(
        f"\n| {name}, {turn} turns, {threads} thread(s) | size MB | p50 ms | times as fast as fp32 | SNR dB "
        "|\n|---|---|---|---|---|"
    )
    figures: list[dict[str, object]] = []
    for candidate, answer in zip(candidates, answers, strict=True):
        ratio = median(a / b for a, b in zip(plain[candidate.backend].times_s, candidate.times_s, strict=True))
        noise = np.sum((answer - answers[0]) ** 2)
        snr = f"{10 * np.log10(np.sum(answers[0] ** 2) / noise):.1f}" if noise else "exact"
        print(
            f"| {candidate.backend} {candidate.scheme.name} | {candidate.size_mb:.1f} | "
            f"{1e3 * median(candidate.times_s):.2f} | {ratio:.2f} | {snr} |"
        )
        figure = {"network": DOCUMENTED.get(name, name), "backend": candidate.backend, "scheme": candidate.scheme.name}
        figure |= {"size_mb": round(candidate.size_mb, 1), "times_as_fast_as_fp32": round(ratio, 2), "turns": turn}
        figures.append(figure | ({"snr_db": float(snr)} if noise else {}))
    for line in refused:
        print(f"\n{line}.")
    sys.stdout.flush()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BUILDERS), metavar="NETWORK", help=", ".join(BUILDERS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, a network")
    parser.add_argument("--threads", type=int, default=1)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("precisions", chosen.save) as record:
        record.settings |= {"batch": 1, "threads": chosen.threads, "seconds": chosen.seconds}
        for name in chosen.models or list(BUILDERS):
            record.rows += measure(name, chosen.seconds, chosen.threads)


if __name__ == "__main__":
    main()
