"""What predict() of a published model costs around its runtime: CPU time of a call, for each kind of input.

    python benchmarks/predict_cost.py                 # about half a minute

A random forest of 50 trees on the breast cancer data (30 columns), in ONNX Runtime, published as any model; one row a
call. `runtime` is the session's own call, `predict` our pyfunc (conversion and runtime), `MLflow` the same through
`mlflow.pyfunc`, whose checks come first; `original` is scikit-learn's model through `mlflow.pyfunc`. All take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage import flavor  # noqa: E402
from compile_stage.core.digest import digest_tree  # noqa: E402
from compile_stage.core.environment import hardware  # noqa: E402
from compile_stage.core.records import Artifact, SourceModel, Target  # noqa: E402
from compile_stage.sources.sklearn import SklearnSource  # noqa: E402

TREES = 50
CALLS = 40  # in one turn


def published(folder: Path) -> tuple[Path, Path]:
    """The directories of the published model and of its source."""
    data = load_breast_cancer(as_frame=True)
    forest = RandomForestClassifier(TREES, random_state=0, n_jobs=1).fit(data.data, data.target)
    original, into = folder / "original", folder / "data" / "artifact"
    mlflow.sklearn.save_model(
        forest, original, input_example=data.data[:2], serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
    )  # fmt: skip
    source = SourceModel(
        uri="models:/forest/1", name="forest", version="1", flavor="sklearn", path=str(original), digest="forest"
    )
    portable = SklearnSource().export(source, {}, into)
    artifact = Artifact(
        path="artifact", entry="model.onnx", digest=digest_tree(into), job_id="forest", backend="onnxruntime",
        precision="fp32", toolchain={"onnxruntime": version("onnxruntime")}, hardware=hardware().fingerprint,
        signature=portable.signature, size_bytes=1,
    )  # fmt: skip
    manifest = {
        "artifact": artifact, "target": Target(name="cpu"), "hardware": hardware(), "threads": 1,
        "fingerprint": hardware().fingerprint, "runtime": {"onnxruntime": version("onnxruntime")},
        "answer": SklearnSource().prediction_format(source), "signature": portable.signature,
    }  # fmt: skip
    flavor.save_model(folder / "data", folder / "published", manifest=manifest, source_model=original)
    return folder / "published", original


def calls(folder: Path) -> dict[tuple[str, str], Callable[[], Any]]:
    """(what answers, what it is given) → one call."""
    ours, theirs = (mlflow.pyfunc.load_model(str(path)) for path in published(folder))
    model = ours.get_raw_model()
    row = load_breast_cancer(as_frame=True).data[:1]
    matrix = row.to_numpy().astype(np.float32)
    batch = {model.signature.inputs[0].name: matrix}
    lists: Mapping[str, Any] = {name: row[name].to_numpy() for name in row}
    loaded = flavor._Pyfunc(model)
    found: dict[tuple[str, str], Callable[[], Any]] = {("runtime", "array"): lambda: model._session.run(batch)}
    for kind, given in (("data frame", row), ("dict of columns", lists), ("array", matrix), ("dict of inputs", batch)):
        found["predict", kind] = lambda given=given: loaded.predict(given)
    for kind, given in (("data frame", row), ("dict of columns", lists)):  # the signature is of columns
        found["MLflow", kind] = lambda given=given: ours.predict(given)
        found["original", kind] = lambda given=given: theirs.predict(given)
    return found


def measure(turns: int) -> list[dict[str, Any]]:
    """A row for each kind of call: CPU time in microseconds, the median of the turns."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow: pickles, and integers in signatures
        made = calls(Path(folder))
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in made}
        for call in made.values():
            call()
        for _ in range(turns):
            for key, call in made.items():
                times = CALLS if key[0] != "original" else 2
                began = time.process_time()
                for _ in range(times):
                    call()
                taken[key].append((time.process_time() - began) / times)
    return [
        {"answers": answers, "given": given, "cpu_us": round(statistics.median(values) * 1e6, 1)}
        for (answers, given), values in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with results.recording("predict-cost", chosen.save) as record:
        record.settings |= {"trees": TREES, "rows": 1, "threads": 1, "turns": chosen.turns, "backend": "onnxruntime"}
        record.rows += measure(chosen.turns)
        for row in record.rows:
            print(f"{row['answers']:10} {row['given']:16} {row['cpu_us']:10.1f} us")


if __name__ == "__main__":
    main()
