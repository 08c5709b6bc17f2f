"""A published model behind MLflow's own scoring server, in a worker: what `mlflow models serve` runs, on local
sockets.

Each instance is a process of its own, with the code that the model carries, confined as its worker is. The sockets lie
in the worker's folder. A worker may have no network at all (`engine.confinement`), and a local socket needs none.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, UsageError, first_line
from compile_stage.core.records import Predictions, SampleSet, SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.engine.fresh_load import FreshProcess

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_SCRIPT = """
import json, os, socket, sys, threading, time
task = json.loads(sys.stdin.readline())
said = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of the server's log of requests, which is on, as users have it

def tell(make):
    try:
        answer = make()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {getattr(error, 'problem', error)}"}
    said.write("\\n" + task["mark"] + json.dumps(answer) + "\\n")
    said.flush()

def begin():
    global model, scoring_server
    began = time.perf_counter()
    import uvicorn
    import mlflow.pyfunc
    from mlflow.pyfunc import scoring_server
    config = {"on_hardware_mismatch": "ignore", "threads": task["threads"]}
    model = mlflow.pyfunc.load_model(task["model"], model_config=config)
    app = scoring_server.init(model)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(task["socket"])
    listening.listen(2048)
    server = uvicorn.Server(uvicorn.Config(app))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    import compile_stage
    return {"load_s": time.perf_counter() - began, "loader": os.path.realpath(compile_stage.__file__)}

def predict(asked):
    schema = model.metadata.get_input_schema()
    given = [scoring_server._parse_json_data(body, model.metadata, schema).data for body in asked["bodies"]]
    for one in given[:3]:
        model.predict(one)
    began, calls = time.perf_counter(), []
    def client(number):
        at = number
        while (start := time.perf_counter()) - began < asked["seconds"]:
            model.predict(given[at % len(given)])
            calls.append(time.perf_counter() - start)
            at += 1
    clients = [threading.Thread(target=client, args=(number,)) for number in range(asked["clients"])]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return {"latencies_s": calls, "seconds": time.perf_counter() - began}

tell(begin)
for line in sys.stdin:
    asked = json.loads(line)
    tell(lambda: predict(asked))
os._exit(0)
"""

_servers: list[FreshProcess] = []
_stack = ExitStack()


def make_requests(model: Any, samples: Any, signature: Any, predictions: Any, rows: int, count: int) -> list[str]:
    """Bodies of requests to a published model, as MLflow's scoring server takes them.

    Args:
        model: `{"path": ...}`, its directory.
        samples: Each body has `rows` of them, from where the one before ended.
        predictions: What the original answers to texts, pictures or recordings; None where predict() takes tensors.
        count: At most so many bodies; fewer where the samples are few.

    Raises:
        UsageError: What predict() takes can't be written as JSON.
        SourceError: The samples are not what it takes.
    """
    import numpy as np

    from compile_stage.measure.predict_turns import build_input
    from compile_stage.measure.samples import open_samples
    from compile_stage.sources import original_predict

    published = SourceModel(uri="", name="", version="", flavor="", path=model["path"], digest="", registry="")
    how = original_predict.describe_input(
        published, revive(Signature, signature), revive(Predictions | None, predictions)
    )
    inputs: Batch = {} if how["kind"] == "items" else open_samples(revive(SampleSet, samples)).inputs
    held = len(how["texts"]) if how["kind"] == "items" else len(next(iter(inputs.values())))
    bodies = []
    for number in range(max(1, min(count, held // rows))):
        chosen = np.arange(number * rows, (number + 1) * rows) % held
        if how["kind"] == "items":
            part = {**how, "texts": [how["texts"][int(index)] for index in chosen]}
            given = build_input(part, {}, rows)
        else:
            given = build_input(
                how, {name: np.ascontiguousarray(values[chosen]) for name, values in inputs.items()}, rows
            )
        bodies.append(_body(given))
    return bodies


def answer_requests(model: Any, bodies: list[str]) -> list[Any]:
    """What a published model answers to bodies, one after the other and without a server, when this installation opens
    it: what its servers are compared with.

    Raises:
        UsageError: It refuses one, or MLflow is not installed here.
    """
    from compile_stage import flavor as _  # noqa: F401 - before MLflow looks for the one that the model carries

    try:
        from mlflow import pyfunc
        from mlflow.pyfunc import scoring_server
    except ImportError as error:
        raise UsageError("MLflow is not installed where the artifact's runtime is, in its toolchain") from error
    loaded = pyfunc.load_model(model["path"], model_config={"on_hardware_mismatch": "ignore"})
    schema = loaded.metadata.get_input_schema()
    answers = []
    for body in bodies:
        try:
            answered = scoring_server.invocations(body.encode(), "application/json", loaded, schema)
        except Exception as error:
            raise UsageError(f"it refuses a request: {_line(error)}") from error
        if answered.status != 200:
            raise UsageError(f"it refuses a request with status {answered.status}: {answered.response[:200]}")
        answers.append(json.loads(answered.response))
    return answers


def start_servers(model: Any, instances: int, threads: int) -> dict[str, Any]:
    """So many servers of a published model, each in a process of its own with `threads` compute threads. They end with
    the worker.

    Returns:
        `sockets`: paths, one for each; `load_s`: of the slowest, in seconds.

    Raises:
        UsageError: The model can't be loaded; the message has the error.
    """
    folder, loads = Path(model["path"]), []
    for _ in range(instances):
        process = FreshProcess(folder, None, _SCRIPT)
        _stack.callback(process.close)
        _servers.append(process)
    for process in _servers:
        answer = process.ask({"socket": "s", "threads": threads})
        if not Path(answer["loader"]).is_relative_to(folder.resolve()):
            raise UsageError(f"it was loaded by {answer['loader']}, not by the code that it carries")
        loads.append(answer["load_s"])
    return {"sockets": [str(process.folder / "s") for process in _servers], "load_s": max(loads)}


def are_servers_up() -> bool:
    """False once one of them has ended."""
    return all(process.is_running for process in _servers)


def time_predicts(bodies: list[str], clients: int, seconds: float) -> dict[str, Any]:
    """`clients` threads of the first server's process that call predict() one call after the other, without HTTP and
    without JSON. Returns `latencies_s` and `seconds`. Raises UsageError where predict() fails."""
    return _servers[0].ask({"bodies": bodies, "clients": clients, "seconds": seconds})


def _body(given: Any) -> str:
    try:
        if hasattr(given, "columns"):
            table = {
                "columns": [str(name) for name in given.columns],
                "data": [_plain(row) for row in given.to_numpy()],
            }
            return json.dumps({"dataframe_split": table})
        return json.dumps({"inputs": _plain(given)})
    except (TypeError, ValueError) as error:
        raise UsageError(f"what predict() takes can't be written as JSON: {_line(error)}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _line(error: BaseException) -> str:
    if isinstance(error, CompileStageError):
        return error.problem
    return first_line(error)
