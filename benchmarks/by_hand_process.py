"""The processes of benchmarks/by_hand.py. Each is started anew, imports one peer alone, and speaks JSON lines.

by_hand_process.py write NETWORK FOLDER THREADS               exports the network and its samples
by_hand_process.py make PEER NETWORK FOLDER THREADS           makes the files of a peer's recipes
by_hand_process.py open PEER NAME NETWORK FOLDER THREADS BATCH    opens one, and takes turns
by_hand_process.py open published MODEL NETWORK FOLDER THREADS BATCH    the same of a published version
by_hand_process.py open earlier CODE=MODEL NETWORK FOLDER THREADS BATCH    of one that an earlier commit published
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
from peers.recipe import Batch, Given, Recipe, Run  # noqa: E402

from compile_stage.measure import predict, timing  # noqa: E402

PEERS = {
    "onnxruntime": ("peers.onnx_runtime", "RECIPES", "onnxruntime"),
    "openvino": ("peers.open_vino", "RECIPES", "openvino"),
    "pytorch": ("peers.pytorch", "RECIPES", "torch"),
    "litert": ("peers.mobile", "LITERT", "ai_edge_litert"),
    "executorch": ("peers.mobile", "EXECUTORCH", "executorch"),
}
"""Name → module and variable of its recipes, and the package that they need."""

_MOST_BATCHES = 64  # inputs of a turn, made before the clock starts; a longer turn takes them again


def recipes(peer: str) -> tuple[Recipe, ...]:
    module, name, _ = PEERS[peer]
    return tuple(getattr(importlib.import_module(module), name))


def folder_of(peer: str, given: Given, recipe: Recipe) -> Path:
    """Where a recipe's files are: those of the first recipe that makes the same."""
    first = next(one for one in recipes(peer) if one.make is recipe.make)
    return given.folder / re.sub(r"[^a-z0-9]+", "-", first.name.lower())


def make(peer: str, given: Given) -> dict[str, str]:
    """By recipe that suits the network, why it could not be made; empty where it was."""
    made: dict[str, str] = {}
    done: dict[Path, str] = {}
    for recipe in recipes(peer):
        if recipe.networks and given.network not in recipe.networks:
            continue
        folder = folder_of(peer, given, recipe)
        began = time.monotonic()
        try:
            if folder not in done:
                folder.mkdir(exist_ok=True)
                recipe.make(replace(given), folder)  # a recipe may change the network
                done[folder] = ""
            made[recipe.name] = done[folder]
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is why its recipe is left out
            made[recipe.name] = done[folder] = problem(error)
        print(f"{recipe.name}: {time.monotonic() - began:.1f} s {made[recipe.name]}", file=sys.stderr)
    return made


def problem(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:160]


def opened_by(code: str, model: str, threads: int) -> Run:
    """A published version, opened and called by the code of another checkout. The turns stay ours, and so does what
    they import while they run."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "compile_stage"}
    sys.path.insert(0, code)
    from compile_stage.flavor import load_model

    opened = load_model(model, threads=threads)
    sys.modules[predict.__name__] = ours[predict.__name__]
    return lambda inputs: next(iter(opened.run(inputs).values()))


def opened(peer: str, name: str, given: Given, batch: int) -> Run:
    """The call that is timed."""
    if peer == "earlier":
        return opened_by(*name.split("=", 1), threads=given.threads)
    if peer == "published":
        from compile_stage.flavor import load_model

        model = load_model(name, threads=given.threads)
        return lambda inputs: next(iter(model.run(inputs).values()))
    [recipe] = [recipe for recipe in recipes(peer) if recipe.name == name]
    return recipe.open(given, folder_of(peer, given, recipe), batch)


class Turns:
    """What an open model is asked for."""

    def __init__(self, run: Run, given: Given, batch: int) -> None:
        self._given, self._batch = given, batch
        self._call = lambda inputs: {"answer": run(inputs)}

    def answers(self, into: str) -> dict[str, Any]:
        """All validation samples, written as one array, axis 0 being the sample."""
        rows = range(0, len(next(iter(self._given.validation.values()))), self._batch)
        outputs = [np.array(self._call(self._rows(np.arange(at, at + self._batch)))["answer"]) for at in rows]
        np.save(into, np.concatenate(outputs).astype(np.float32))
        return {}

    def warm_up(self) -> dict[str, Any]:
        batch = self._rows(np.arange(self._batch))
        return timing.warm_up(lambda: self._call(batch), max_seconds=1.5)

    def turn(self, calls: int, seed: int) -> dict[str, Any]:
        """Seconds of each call. The inputs are those of every participant with that seed."""
        random = np.random.default_rng(seed)
        count = len(next(iter(self._given.validation.values())))
        drawn = [self._rows(random.permutation(count)[: self._batch]) for _ in range(min(calls, _MOST_BATCHES))]
        batches = (drawn[at % len(drawn)] for at in range(calls))
        timing.spread(lambda: self._call(drawn[-1]))  # as the stage does: others' turns emptied the caches
        latencies = timing.turn(self._call, batches, seconds=timing.LONGEST_TURN_S)
        timing.settle()
        return {"latency_s": latencies}

    def _rows(self, places: np.ndarray) -> Batch:
        return {name: np.ascontiguousarray(array[places]) for name, array in self._given.validation.items()}


@contextmanager
def protocol() -> Iterator[Any]:
    """Where answers go: standard output, which what a peer prints must not reach."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    act, rest = arguments[0], arguments[1:]
    with protocol() as out:

        def say(**answer: Any) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        if act == "write":
            Given(rest[0], Path(rest[1]), int(rest[2])).write()
            say(made={})
        elif act == "make":
            say(made=make(rest[0], Given(rest[1], Path(rest[2]), int(rest[3]))))
        else:
            peer, name, network, folder, threads, batch = rest
            given = Given(network, Path(folder), int(threads))
            try:
                turns = Turns(opened(peer, name, given, int(batch)), given, int(batch))
                say(**turns.warm_up())
                for line in sys.stdin:
                    asked = json.loads(line)
                    say(**getattr(turns, asked.pop("act"))(**asked))
            except Exception as error:  # noqa: BLE001 - as above
                say(problem=problem(error))
    sys.stdout.flush()
    os._exit(0)  # threads of a runtime may hang at the end of the interpreter


if __name__ == "__main__":
    main(sys.argv[1:])
