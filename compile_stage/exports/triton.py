"""`--to triton`: a model repository.

MODEL/config.pbtxt
MODEL/VERSION/               the artifact, or `model.py` of Triton's Python backend
MODEL/compile-stage/bundle/  the bundle as it was published; Triton leaves folders alone whose names are no numbers
README.md, export.json
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compile_stage.exports import pbtxt
from compile_stage.exports.folder import BUNDLE, Written, common_differences, copy_bundle, link_artifact
from compile_stage.exports.options import ExportOptions
from compile_stage.exports.triton_config import PYTHON, Choice, choose, configure, pays
from compile_stage.exports.version import Version, plain_name
from compile_stage.report.numbers import count
from compile_stage.serving.manifest import refused_values_of
from compile_stage.serving.refused_values import RefusedValues
from compile_stage.serving.shape_limits import ShapeLimits
from compile_stage.serving.taken_values import place_text, taken_text

CONFIG = "config.pbtxt"
BESIDE = "compile-stage"
_MODEL_PY = Path(__file__).with_name("copied") / "triton_model.py"


def write(version: Version, options: ExportOptions, folder: Path) -> Written:
    """Write the repository into the folder."""
    choice, name = choose(version), plain_name(version.name)
    home = folder / name
    bundle = home / BESIDE / BUNDLE
    copy_bundle(version, bundle)
    place = home / version.number
    if choice.backend == PYTHON:
        place.mkdir()
        shutil.copyfile(_MODEL_PY, place / "model.py")
    else:
        link_artifact(version, bundle, place)
    config = configure(version, choice, name)
    (home / CONFIG).write_text(pbtxt.write(config), encoding="utf-8")
    mounts = '-v "$PWD":/models'
    return Written(
        bundle=f"{name}/{BESIDE}/{BUNDLE}",
        served_by={
            "server": "Triton",
            "backend": choice.backend,
            "reason": choice.why,
            "model": name,
            "version": version.number,
        },
        start=[
            f"docker run --rm -p 8000:8000 -p 8001:8001 {mounts} IMAGE tritonserver --model-repository=/models",
            f"curl -s localhost:8000/v2/models/{name}/ready",
        ],
        differs=[*common_differences(version), *_differences(version, choice, config)],
    )


def _differences(version: Version, choice: Choice, config: dict[str, Any]) -> list[str]:
    said = ["Triton's server itself was not run for this export: the configuration was written by its documentation."]
    if choice.backend == PYTHON:
        said.append(
            f"It runs on Triton's Python backend ({choice.why}), by the loader that the bundle carries. The image "
            "needs the packages of the bundle's `requirements.txt`."
        )
    else:
        held = version.manifest.get("runtime", {})
        named = ", ".join(f"{package} {number}" for package, number in held.items())
        said.append(
            f"The predictions were proven with {named}. Triton's backend {choice.backend} brings a version of its own, "
            "and Triton does not check that it is this one. Take an image that has it, or compare the server's answers "
            "with predict() before it serves."
        )
    values = refused_values_of(version.manifest, version.published.folder, version.published.trust)
    if choice.backend != PYTHON and (refused := _refused_missing(values)):
        said.append(
            f"Triton answers a request with a missing number (NaN) in {refused}, and the answer is not proven: the "
            "original refuses such a request or answers it otherwise, so predict() raises an error. Keep such requests "
            "from the server."
        )
    if choice.backend != PYTHON and (taken := _taken(values)):
        said.append(
            f"{taken}. Triton answers a request with other values too, and the answer is not proven: the original "
            "refuses them, so predict() raises an error. Keep such requests from the server."
        )
    if choice.backend != PYTHON and (limits := ShapeLimits.of(version.manifest).described()):
        said.append(
            f"Triton answers inputs of all sizes, and the answer is right, or proven, only where {limits}. predict() "
            "raises an error for others. Keep such requests from the server."
        )
    said += _batches_said(version, choice, config["max_batch_size"])
    if choice.backend == "onnxruntime" and not version.artifact.options.get("spinning", True):
        said.append("Threads spin between calls: config.pbtxt can't switch that off, and it was proven without.")
    if choice.backend == "openvino" and config["max_batch_size"]:
        said.append(f"OpenVINO's backend runs each request as a batch of {config['max_batch_size']}, filled up.")
    threads = count(version.manifest.get("threads", 1), "thread")
    said.append(f"One instance with {threads}, as it was measured; several instances were not.")
    return said


def _refused_missing(values: RefusedValues) -> str:
    """Where predict() refuses a NaN, such as `input 'x' (columns 0, 2)`; empty where it does nowhere."""
    places = []
    for name, entries in (values.missing.refused if values.missing is not None else {}).items():
        columns = sorted({column for listed, _ in entries if listed is not None for column in listed})
        whole = any(listed is None for listed, _ in entries)
        places.append(f"input {name!r}" + ("" if whole else f" ({_columns(columns)})"))
    return " and ".join(places)


def _columns(numbers: Sequence[int]) -> str:
    """`columns 0 to 2, 5`: neighbours as a range, since a matrix may have hundreds of columns."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    words = [" to ".join(map(str, span)) for span in spans]
    return f"column{'' if len(numbers) == 1 else 's'} {', '.join(words)}"


def _taken(values: RefusedValues) -> str:
    """Which whole numbers and categories are taken, such as `input 'ids' takes whole numbers from 0 to 99`; empty where
    all are."""
    rules = values.taken.rules if values.taken is not None else ()
    return "; ".join(f"{place_text(rule)} takes {taken_text(rule)}" for rule in rules)


def _batches_said(version: Version, choice: Choice, largest: int) -> list[str]:
    if choice.requests:
        return ["A request is one JSON text of MLflow's scoring protocol, and the response another."]
    sizes = ", ".join(map(str, version.batches.sizes))
    if not largest:
        return [f"The batch is a fixed size of the graph, so Triton puts no requests together (proven: {sizes})."]
    said = []
    if choice.backend == "onnxruntime" or choice.backend == "tensorrt":
        said.append(
            f"Triton runs a request of any size up to {largest} as it is; proven were {sizes}, and the published "
            "model fills other sizes up to those."
        )
    if choice.backend == PYTHON:
        said.append("Requests are not put together: `model.py` answers each by itself.")
    elif pays(version):
        said.append("Triton puts requests of several clients together, to sizes that were proven.")
    else:
        said.append(
            "Requests are not put together: nothing measured shows that larger batches are faster, or that a row's "
            "answer is independent of the others."
        )
    return said
