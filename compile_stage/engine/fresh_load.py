"""A published model, loaded as serving loads it: by MLflow, in a new process, with the code that it carries.

Called in a worker, which has our own package loaded and so can't do it itself. The new process is confined as the
worker is: where that is possible it sees neither the cache nor the source, nor anything else that an artifact might
name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.records import SampleSet
from compile_stage.serving.trust import TRUST_VARIABLE

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.core.tensors import Batch

_TIMEOUT_S = 600  # a large model is read from a slow disk; the worker's own limit comes first
_SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
task = json.load(sys.stdin)
import numpy as np
folder = Path(task["model"])

def load():
    if importlib.util.find_spec("mlflow") is not None:
        import mlflow.pyfunc
        loaded = mlflow.pyfunc.load_model(str(folder), model_config={"on_hardware_mismatch": "ignore"})
        return loaded.get_raw_model(), loaded.predict
    # a toolchain of its own has the runtime alone
    sys.path.insert(0, str(folder / "code"))
    from compile_stage.flavor import CompiledModel
    return CompiledModel(folder / "data", on_hardware_mismatch="ignore"), None

def answer_questions(model, predict):
    from compile_stage.serving.predictions import answer_items
    ids, how = [], model.manifest["answer"].get("text")
    if how:
        ids = [list(one.ids) for one in model.processor.encode(task["questions"]["texts"], how.get("defaults", {}))]
    return {"ids": ids, "answer": answer_items(predict, **task["questions"])}

def serve():
    (model, predict), outputs = load(), {}
    if task["inputs"]:
        batch = {name: np.load(file, allow_pickle=False) for name, file in task["inputs"].items()}
        for number, (name, value) in enumerate(model.run(batch).items()):
            outputs[name] = str(Path(task["into"]) / f"{number}.npy")
            np.save(outputs[name], np.asarray(value), allow_pickle=False)
    answered = answer_questions(model, predict) if task["questions"] and predict else None
    model.close()
    import compile_stage
    return {"loader": str(Path(compile_stage.__file__).resolve()), "outputs": outputs, "predictions": answered}

try:
    answer = serve()
except BaseException as error:
    answer = {"error": f"{type(error).__name__}: {getattr(error, 'problem', error)}"}
print("\\n" + json.dumps(answer))
"""


def load_published(
    model: Any, samples: Any, batch_size: int, into: str, trust: Any = None, questions: Any = None
) -> dict[str, Any]:
    """Load a published model by MLflow in a new process, run the first batch of the samples there, and have its
    predict() answer questions.

    Args:
        model: `{"path": ...}`, its directory.
        samples: None to load it only.
        trust: `{"path": ...}`, the folder of the trust file that its signature is verified with; None for none.
        questions: For predict(), of a model that takes more than tensors: `texts`, `column` and `each` of
            `Predictions`; None for none.

    Returns:
        `outputs`: output name → `.npy` file below `into`; `predictions`: the tokens of each text (`ids`) and
        predict()'s `answer` as plain JSON, None where nothing was asked, or MLflow is not installed there.

    Raises:
        UsageError: It can't be loaded or run; the message has the error.
    """
    Path(into).mkdir(parents=True, exist_ok=True)
    inputs = _first_batch(samples, batch_size) if samples else {}
    trusted = Path(trust["path"]) / "trust.json" if trust else None
    return _in_new_process(Path(model["path"]), inputs, questions, Path(into), trusted)


def run_batch(session: Session, samples: Any, batch_size: int, into: Path) -> dict[str, str]:
    """Run an open model on the first batch of the samples; output name → `.npy` file below `into`."""
    import numpy as np

    from compile_stage.measure.predict import plain_array

    into.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (name, array) in enumerate(session.run(_first_batch(samples, batch_size)).items()):
        files[name] = str(into / f"{number}.npy")
        np.save(files[name], plain_array(name, np.asarray(array)), allow_pickle=False)
    return files


def _first_batch(samples: Any, batch_size: int) -> Batch:
    """The first samples; fewer than a batch are repeated to fill it."""
    import numpy as np

    from compile_stage.measure.samples import open_samples

    opened = open_samples(revive(SampleSet, samples))
    rows = np.arange(batch_size) % opened.count
    return {name: np.ascontiguousarray(array[rows]) for name, array in opened.inputs.items()}


def _in_new_process(model: Path, inputs: Batch, questions: Any, into: Path, trust: Path | None) -> dict[str, Any]:
    import numpy as np

    with tempfile.TemporaryDirectory(prefix="compile-stage-serve-") as folder:
        files = {}
        for number, (name, array) in enumerate(inputs.items()):
            files[name] = str(Path(folder) / f"{number}.npy")
            np.save(files[name], array, allow_pickle=False)
        task = {"model": str(model), "inputs": files, "into": str(into), "questions": questions}
        done = subprocess.run(  # noqa: S603 - our own interpreter and script
            [sys.executable, "-c", _SCRIPT], input=json.dumps(task), capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False, cwd=folder, env=_environment(folder, trust),
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:  # the process itself crashed
        said = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise UsageError(said[-1])
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise UsageError(answer["error"])
    if not Path(answer["loader"]).is_relative_to(model.resolve()):
        raise UsageError(f"it was loaded by {answer['loader']}, not by the code that it carries")
    return {"outputs": answer["outputs"], "predictions": answer["predictions"]}


def _environment(folder: str, trust: Path | None) -> dict[str, str]:
    """The worker's, with home, cache and registry elsewhere: nothing of them is part of a published model. Packages are
    found where the worker finds them: plug-ins may lie on its path alone."""
    changed = {
        "HOME": folder,
        "COMPILE_STAGE_CACHE": str(Path(folder) / "no-cache"),
        "MLFLOW_TRACKING_URI": str(Path(folder) / "no-registry"),
        "MLFLOW_REGISTRY_URI": str(Path(folder) / "no-registry"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    kept = {name: value for name, value in os.environ.items() if name != TRUST_VARIABLE}
    return {**kept, **changed, **({TRUST_VARIABLE: str(trust)} if trust is not None else {})}
