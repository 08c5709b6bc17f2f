"""How many requests a published model answers behind MLflow's server, beside plain ONNX Runtime and the original.

    python benchmarks/served.py                 # four minutes

A random forest of 50 trees on the breast cancer data (30 columns), one row a request, one thread. `published` is the
published version in ONNX Runtime, `by hand` the pyfunc below around the same ONNX file, as a user would write it, and
`original` scikit-learn's model. All three are behind the server that `load-test` starts, and are asked by its load
generator; every answer is compared with the original's. In each round the servers are started anew, and take turns in
shuffled order. Reported are geometric means over the rounds, and the published version's figure over each of the
others with its 95 % interval (Student's t over the rounds).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import mlflow  # noqa: E402
import psutil  # noqa: E402
import results  # noqa: E402
from predict_cost import TREES, published  # noqa: E402
from sklearn.datasets import load_breast_cancer  # noqa: E402

from compile_stage.engine import serving_calls  # noqa: E402
from compile_stage.engine.fresh_load import FreshProcess  # noqa: E402
from compile_stage.measure import served_load  # noqa: E402
from compile_stage.measure.generator_process import LoadGenerator  # noqa: E402
from compile_stage.measure.stats import samples_needed, student_t  # noqa: E402

BY_HAND = """\
import mlflow, numpy, onnxruntime

class Forest(mlflow.pyfunc.PythonModel):
    def load_context(self, context):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(context.artifacts["graph"], options)
        self.input, self.label = self.session.get_inputs()[0].name, self.session.get_outputs()[0].name

    def predict(self, context, model_input, params=None):
        return self.session.run([self.label], {self.input: model_input.to_numpy(numpy.float32)})[0]

mlflow.models.set_model(Forest())
"""
PUBLISHED, ORIGINAL = "published", "original"
BODIES = 16
CLIENTS = (1, 8)
DRAIN_S = 10.0
MOST_REQUESTS = 2000  # of a trial
TRIALS = 7  # of a search: the same number for all, so that none is found to a finer step than another
NEEDED = samples_needed(served_load.LEVEL)
THROUGHPUT, CPU = "requests/s at the p99 limit", "CPU µs of the server a request"


def save_models(folder: Path) -> dict[str, Path]:
    """The directories of the three, which take the same requests."""
    ours, original = published(folder)
    script, by_hand = folder / "by_hand.py", folder / "by-hand"
    script.write_text(BY_HAND)
    mlflow.pyfunc.save_model(
        by_hand, python_model=str(script), artifacts={"graph": str(folder / "data" / "artifact" / "model.onnx")},
        signature=mlflow.models.Model.load(original).signature, pip_requirements=["onnxruntime"],
    )  # fmt: skip
    return {PUBLISHED: ours, "by hand": by_hand, ORIGINAL: original}


@contextmanager
def started(models: Mapping[str, Path]) -> Iterator[dict[str, FreshProcess]]:
    """A server of each, in a process of its own; they are started at a time, in the environment of one thread."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = {name: FreshProcess(path, None, serving_calls._SCRIPT) for name, path in models.items()}
        for process in servers.values():
            stack.callback(process.close)
        list(pool.map(lambda process: process.ask({"socket": "s", "threads": 1}), servers.values()))
        yield servers


class Round:
    """One start of the servers, and the trials of each.

    Attributes:
        found: Figures by (what answers, which figure).
    """

    def __init__(self, servers: Mapping[str, FreshProcess], generator: LoadGenerator, chance: random.Random) -> None:
        self.servers, self.generator, self.chance = servers, generator, chance
        self.found: dict[tuple[str, str], float] = {}
        self.cpu: dict[str, list[tuple[float, int]]] = {name: [] for name in servers}

    def aim(self, name: str, bodies: list[str], expected: list[Any]) -> None:
        self.generator.aim([str(self.servers[name].folder / "s")], bodies, expected, 1e-3)

    def shuffled(self) -> list[str]:
        return self.chance.sample(list(self.servers), len(self.servers))

    def closed(self, name: str, clients: int, seconds: float) -> float:
        """Requests a second of clients that wait for their answers, with HTTP and JSON."""
        before = self.cpu_s(name)
        point = served_load.point_of("closed", self.generator.loop(clients, seconds, DRAIN_S), None, clients=clients)
        if point.missed:
            raise SystemExit(f"{name}: {point.wrong} wrong answers, {point.errors} errors, {point.unanswered} without")
        self.cpu[name].append((self.cpu_s(name) - before, point.requests))
        return point.throughput_per_s

    def predicts(self, name: str, bodies: list[str], clients: int, seconds: float) -> float:
        """Calls a second of predict() alone."""
        calls = self.servers[name].ask({"bodies": bodies, "clients": clients, "seconds": seconds})
        return len(calls["latencies_s"]) / calls["seconds"]

    def search(self, name: str, limit_s: float, first: float, seconds: float) -> float | None:
        """The highest rate of arrivals of which 99 % are answered rightly within the limit."""
        ends, trials = time.monotonic() + seconds, 0

        def measure(rate: float) -> bool | None:
            nonlocal trials
            trials += 1
            count = min(MOST_REQUESTS, max(NEEDED, math.ceil(4 * (limit_s * rate) ** 2)))
            trial = self.generator.arrive(rate, count, self.chance.randrange(2**31), DRAIN_S)
            point = served_load.point_of("open", trial, limit_s, rate=rate)
            if point.wrong or point.errors:
                raise SystemExit(f"{name}: {point.wrong} wrong answers, {point.errors} errors")
            return None if point.invalid else served_load.holds(point)

        return served_load.find_rate(measure, first, lambda: trials < TRIALS and time.monotonic() < ends)

    def cpu_s(self, name: str) -> float:
        times = psutil.Process(self.servers[name]._process.pid).cpu_times()
        return times.user + times.system


def measure(chosen: argparse.Namespace) -> list[dict[tuple[str, str], float]]:
    """Of each round, figures by (what answers, which figure)."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), LoadGenerator() as generator:
        warnings.simplefilter("ignore")  # of MLflow: pickles, and integers in signatures
        models = save_models(Path(folder))
        data = load_breast_cancer(as_frame=True).data
        bodies = [serving_calls._body(data[row : row + 1]) for row in range(BODIES)]
        expected = serving_calls.answer_requests({"path": str(models[ORIGINAL])}, bodies)
        rounds: list[dict[tuple[str, str], float]] = []
        for number in range(chosen.rounds):
            before = rounds[-1] if rounds else {}
            with started(models) as servers:
                one = Round(servers, generator, random.Random(chosen.seed + number))
                rounds.append(measure_round(one, (bodies, expected), chosen, before))
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
    return rounds


def measure_round(
    one: Round,
    asked: tuple[list[str], list[Any]],
    chosen: argparse.Namespace,
    before: Mapping[tuple[str, str], float],
) -> dict[tuple[str, str], float]:
    for name in one.shuffled():  # the first seconds of a server are slower
        one.aim(name, *asked)
        one.closed(name, CLIENTS[-1], chosen.seconds)
        one.cpu[name].clear()
    for clients in CLIENTS:
        for name in one.shuffled():
            one.aim(name, *asked)
            one.found[name, f"requests/s of {_clients(clients)}"] = one.closed(name, clients, chosen.seconds)
    for clients in CLIENTS:
        for name in one.shuffled():
            key = name, f"predict() calls/s of {_clients(clients)}"
            one.found[key] = one.predicts(name, asked[0], clients, chosen.seconds)
    for name in one.shuffled():
        one.aim(name, *asked)
        first = before.get((name, THROUGHPUT)) or 0.7 * one.found[name, f"requests/s of {_clients(CLIENTS[-1])}"]
        rate = one.search(name, chosen.p99_ms / 1e3, first, chosen.search_seconds)
        if rate:
            one.found[name, THROUGHPUT] = rate
        seconds, requests = (sum(values) for values in zip(*one.cpu[name], strict=True))
        one.found[name, CPU] = seconds / requests * 1e6
    return one.found


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


def summarised(rounds: list[dict[tuple[str, str], float]]) -> list[dict[str, Any]]:
    """A row for each of the three and each figure. The ratio is over rounds that have both figures."""
    rows = []
    for name, figure in dict.fromkeys(key for one in rounds for key in one):
        values = [one[name, figure] for one in rounds if (name, figure) in one]
        row: dict[str, Any] = {
            "model": "random forest", "answers": name, "figure": figure, "rounds": len(values),
            "value": round(statistics.geometric_mean(values), 1),
        }  # fmt: skip
        pairs = [
            one[PUBLISHED, figure] / one[name, figure]
            for one in rounds
            if {(name, figure), (PUBLISHED, figure)} <= {*one}
        ]
        if name != PUBLISHED and len(pairs) > 1:
            ratio, low, high = over_rounds(pairs, found_by_search=figure == THROUGHPUT)
            row |= {"published_over_it": ratio, "low": low, "high": high}
        rows.append(row)
    return rows


def over_rounds(ratios: list[float], *, found_by_search: bool) -> tuple[float, float, float]:
    """Geometric mean and 95 % interval. A search adds its resolution to the interval."""
    if found_by_search:
        mean, interval = served_load.over_starts(ratios)
        assert mean is not None
        assert interval is not None
        return round(mean, 3), round(interval[0], 3), round(interval[1], 3)
    logs = [math.log(ratio) for ratio in ratios]
    half = student_t(len(logs) - 1, 0.95) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.mean(logs)
    return round(math.exp(middle), 3), round(math.exp(middle - half), 3), round(math.exp(middle + half), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="starts of the servers")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a trial with clients")
    parser.add_argument("--search-seconds", type=float, default=8.0, help="of a search in one round, at most")
    parser.add_argument("--p99-ms", type=float, default=100.0, help="that 99 %% of the requests must hold")
    parser.add_argument("--seed", type=int, default=0)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with results.recording("served", chosen.save) as record:
        record.settings |= {
            "trees": TREES, "rows": 1, "threads": 1, "instances": 1, "rounds": chosen.rounds, "p99_ms": chosen.p99_ms,
            "seconds": chosen.seconds, "search_seconds": chosen.search_seconds,
        }  # fmt: skip
        rounds = measure(chosen)
        record.rows += summarised(rounds)
        for name in (PUBLISHED, "by hand", ORIGINAL):
            lacking = sum((name, THROUGHPUT) not in one for one in rounds)
            if lacking:
                record.notes.append(
                    f"{name}: no rate that holds the p99 limit was found in {lacking} of {len(rounds)} rounds"
                )
                print(record.notes[-1])
        for row in record.rows:
            over = f"published {row['published_over_it']} ({row['low']} to {row['high']})" if "low" in row else ""
            print(f"{row['answers']:10} {row['figure']:32} {row['value']:10.1f}  {over}")


if __name__ == "__main__":
    main()
