"""A published model, loaded as serving loads it: by MLflow, in a new process, with the code that it carries.

Called in a worker, which has our own package loaded and so can't do it itself. The new process is confined as the
worker is: where that is possible it sees neither the cache nor the source, nor anything else that an artifact might
name.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.records import SampleSet
from compile_stage.engine.starter import start
from compile_stage.serving.trust import TRUST_VARIABLE

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.core.tensors import Batch

_TIMEOUT_S = 600  # a large model is read from a slow disk; the worker's own limit comes first
_END_S = 10  # for a process whose questions have ended
_SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
task = json.loads(sys.stdin.readline())
import numpy as np
folder = Path(task["model"])

def load():
    if importlib.util.find_spec("mlflow") is not None:
        import mlflow.pyfunc
        asked = {"variant": task["variant"]} if task["variant"] else {}
        loaded = mlflow.pyfunc.load_model(str(folder), model_config={"on_hardware_mismatch": "ignore", **asked})
        params = (task["questions"] or {}).get("params")
        if params:
            return loaded.get_raw_model(), lambda data: loaded._model_impl.predict(data, params)
        return loaded.get_raw_model(), loaded.predict
    # a toolchain of its own has the runtime alone
    sys.path.insert(0, str(folder / "code"))
    from compile_stage.flavor import CompiledModel
    return CompiledModel(folder / "data", on_hardware_mismatch="ignore", variant=task["variant"] or None), None

def answer_questions(model, predict):
    from compile_stage.serving.predictions import answer_items
    ids, how = [], model.manifest["answer"].get("text")
    if how:
        ids = [list(one.ids) for one in model.processor.encode(task["questions"]["texts"], how.get("defaults", {}))]
    asked = {name: value for name, value in task["questions"].items() if name not in ("params", "pair")}
    column, pair = task["questions"]["column"], task["questions"].get("pair")

    def with_pairs(frame):  # here, since the model's own code, which asks, may be of an earlier release
        texts = frame[column].tolist()
        return predict(frame.assign(**{pair: texts[1:] + texts[:1]}))

    return {"ids": ids, "answer": answer_items(with_pairs if pair else predict, **asked)}

def serve(model, predict):
    outputs = {}
    if task["inputs"]:
        batch = {name: np.load(file, allow_pickle=False) for name, file in task["inputs"].items()}
        for number, (name, value) in enumerate(model.run(batch).items()):
            outputs[name] = str(Path(task["into"]) / f"{number}.npy")
            array = np.asarray(value)
            # Runtimes answer text as Python objects, which .npy holds as a pickle only.
            array = array.astype(str) if array.dtype == object else array
            np.save(outputs[name], array, allow_pickle=False)
    answered = answer_questions(model, predict) if task["questions"] and predict else None
    import compile_stage
    return {"loader": str(Path(compile_stage.__file__).resolve()), "outputs": outputs, "predictions": answered}

def prepare(predict, asked):
    if predict is None:
        raise RuntimeError("MLflow is not installed where the artifact's runtime is, in its toolchain")
    spec = importlib.util.spec_from_file_location("predict_turns", asked["turns"])
    turns = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(turns)
    arrays = {name: np.load(file, allow_pickle=False) for name, file in asked["inputs"].items()}
    warm = turns.PredictTurns(predict, turns.build_input(asked["how"], arrays, asked["rows"]))
    return warm, turns.answer_parts(predict, asked["how"], arrays, asked["rows"], warm.call_s)

def tell(make):
    try:
        answer = make()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {getattr(error, 'problem', error)}"}
    print("\\n" + task["mark"] + json.dumps(answer), flush=True)
    return answer

def begin():
    global model, predict
    model, predict = load()
    return serve(model, predict)

model = predict = turns = None
tell(begin)
for line in sys.stdin if task["stays"] else ():
    asked = json.loads(line)
    def answer():
        global turns
        if not asked:
            return {"seconds": turns.turn()}
        if "runs" in asked:
            batch = {name: np.load(file, allow_pickle=False) for name, file in asked["runs"].items()}
            return {"seconds": turns.time_runs(model.run, batch)}
        turns, answers = prepare(predict, asked)
        return {"seconds": turns.call_s, "answers": answers}
    tell(answer)
if model is not None:
    model.close()
"""

_published: FreshProcess | None = None  # the one that stays


def load_published(
    model: Any,
    samples: Any,
    batch_size: int,
    into: str,
    trust: Any = None,
    questions: Any = None,
    stays: bool = False,
) -> dict[str, Any]:
    """Load a published model by MLflow in a new process, run the first batch of the samples there, and have its
    predict() answer questions.

    Args:
        model: `{"path": ...}`, its directory; `variant`, which of several artifacts, where it is named.
        samples: None to load it only.
        trust: `{"path": ...}`, the folder of the trust file that its signature is verified with; None for none.
        questions: For predict(), of a model that takes more than tensors: `texts`, `column`, `each` and `params` of
            `Predictions`; None for none.
        stays: The process stays for `prepare_published`, until `close_published`.

    Returns:
        `outputs`: output name → `.npy` file below `into`; `predictions`: the tokens of each text (`ids`) and
        predict()'s `answer` as plain JSON, None where nothing was asked, or MLflow is not installed there.

    Raises:
        UsageError: It can't be loaded or run; the message has the error.
    """
    global _published
    close_published()
    Path(into).mkdir(parents=True, exist_ok=True)
    inputs = _first_batch(samples, batch_size) if samples else {}
    trusted = Path(trust["path"]) / "trust.json" if trust else None
    process = FreshProcess(Path(model["path"]), trusted, variant=model.get("variant", ""))
    try:
        files = process.keep(inputs, "asked")
        answer = process.ask({"inputs": files, "into": str(into), "questions": questions, "stays": stays})
        if not Path(answer["loader"]).is_relative_to(Path(model["path"]).resolve()):
            raise UsageError(f"it was loaded by {answer['loader']}, not by the code that it carries")
    except BaseException:
        process.close()
        raise
    if stays:
        _published = process
    else:
        process.close()
    return {"outputs": answer["outputs"], "predictions": answer["predictions"]}


def prepare_published(samples: Any, batch_size: int, how: Any) -> dict[str, Any]:
    """Have predict() of the process that stayed called until it is warm. Returns the seconds of a call (`seconds`) and
    what it answers to some rows (`answers`, as `predict_turns.answer_parts`).

    Args:
        how: What it is given (`measure.predict_turns.build_input`), made of the first batch of the samples.

    Raises:
        UsageError: predict() does not take it, or MLflow is not installed there.
    """
    from compile_stage.measure import predict_turns

    process = _stayed()
    rows = max(batch_size, predict_turns.COMPARED_ROWS)
    files = process.keep({} if how["kind"] == "items" else _first_batch(samples, rows), "timed")
    asked = {"how": how, "rows": batch_size, "inputs": files, "turns": str(predict_turns.__file__)}
    prepared = process.ask(asked)
    return {"seconds": float(prepared["seconds"]), "answers": prepared["answers"]}


def time_published() -> float:
    """Seconds of one call of predict() in the process that stayed."""
    return float(_stayed().ask({})["seconds"])


def time_published_runs(samples: Any, batch_size: int) -> list[float]:
    """Seconds of calls of the artifact alone, with the first batch of the samples, in the process that stayed, after
    `prepare_published`.

    Raises:
        UsageError: It does not take the batch.
    """
    process = _stayed()
    files = process.keep(_first_batch(samples, batch_size), "runs")
    return [float(seconds) for seconds in process.ask({"runs": files})["seconds"]]


def close_published() -> None:
    """End the process that stayed."""
    global _published
    if _published is not None:
        process, _published = _published, None
        process.close()


def _stayed() -> FreshProcess:
    if _published is None:
        raise UsageError("no published model is open in this worker")
    return _published


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


class FreshProcess:
    """A new process for one model directory. It reads JSON, a line for each question, and answers with a marked line:
    the model may print what it likes."""

    def __init__(
        self,
        model: Path,
        trust: Path | None,
        script: str = _SCRIPT,
        variant: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        environment: In place of `serving_environment`.
        """
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="compile-stage-serve-"))
        self._mark = secrets.token_hex(8)
        self._first: dict[str, Any] = {"model": str(model), "variant": variant, "mark": self._mark}
        self._said = self._stack.enter_context((Path(self._folder) / "stderr.txt").open("w+b"))
        self._process = start(
            [sys.executable, "-c", script],
            cwd=self._folder,
            environment=environment or serving_environment(self._folder, trust),
            stderr=self._said,
        )

    @property
    def folder(self) -> Path:
        """Its own, which is its current one."""
        return Path(self._folder)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def keep(self, batch: Batch, name: str) -> dict[str, str]:
        """Write arrays where the process reads them; input name → `.npy` file."""
        import numpy as np

        files = {}
        for number, (key, array) in enumerate(batch.items()):
            files[key] = str(Path(self._folder) / f"{name}-{number}.npy")
            np.save(files[key], array, allow_pickle=False)
        return files

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one question. Raises UsageError for an error there, and where the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked, self._first = {**self._first, **question}, {}
        too_long = threading.Timer(_TIMEOUT_S, self._process.kill)
        too_long.start()
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            line = next((line for line in self._process.stdout if line.startswith(self._mark)), None)
        finally:
            too_long.cancel()
        if line is None:  # the process itself crashed
            code = self._process.wait(_END_S)
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()
            raise UsageError(said[-1] if said else f"it ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line.removeprefix(self._mark))
        if "error" in answer:
            raise UsageError(answer["error"])
        return answer

    def close(self) -> None:
        """End it, and remove its files."""
        with self._stack:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def import_path() -> str:
    """For PYTHONPATH: where this process finds packages."""
    return os.pathsep.join(path for path in sys.path if path)


def serving_environment(folder: str, trust: Path | None) -> dict[str, str]:
    """The worker's, with home, cache and registry elsewhere: nothing of them is part of a published model. Packages are
    found where the worker finds them: plug-ins may lie on its path alone."""
    changed = {
        "HOME": folder,
        "COMPILE_STAGE_CACHE": str(Path(folder) / "no-cache"),
        "MLFLOW_TRACKING_URI": str(Path(folder) / "no-registry"),
        "MLFLOW_REGISTRY_URI": str(Path(folder) / "no-registry"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": import_path(),
    }
    kept = {name: value for name, value in os.environ.items() if name != TRUST_VARIABLE}
    return {**kept, **changed, **({TRUST_VARIABLE: str(trust)} if trust is not None else {})}
