"""Tuning for the backend `tvm`, and the records that it leaves.

What is tuned is a workload: the loops of one fused operator at fixed shapes, without its weights. So what was measured
for one model serves every other that has the same operator. Records are kept (`core.tuning_records`) by TVM version,
machine and thread count, one file for a round of trials of one workload:

    <cache>/tuning/tvm-0.27.0/x86_64-1a2b3c4d5e6f7081-2-threads/<workload>-<digest>.json

A process that is killed loses the round that it was in, and two that tune at once add to each other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from compile_stage.core import tuning_records
from compile_stage.core.digest import canonical_json
from compile_stage.core.environment import hardware
from compile_stage.core.records import record

ROUND = 8
"""Trials between two writings; also the least that one workload gets."""

_KEPT = 3  # of a round, the fastest: what a build takes and a search begins with

_WARM_UP = 2 * ROUND  # trials after which the cost model has a say; TVM's own 100 are more than many a budget
# An eighth of TVM's own population: with the budgets that a pipeline has, more is searched than could ever be measured.
_POPULATION = {"population_size": 64, "init_min_unmeasured": 16, "genetic_num_iters": 2, "genetic_max_fail_count": 4}
_LATE = "time is up"
_RUN = {"number": 1, "repeat": 1, "min_repeat_ms": 80}


@record
class Tuned:
    """What tuning came to.

    Attributes:
        trials: Measured now; none when earlier records were enough.
        stopped: Time ended it before its trials were used up.
        records: Names of the files that say what is known of the workloads, those of earlier runs and of this one.
    """

    trials: int
    stopped: bool
    records: tuple[str, ...]


def records_key(version: str, threads: int) -> str:
    """Of the records that this machine's kernels are chosen by."""
    return f"tvm-{version}/{hardware().fingerprint}-{threads}-threads"


def refuse_record(name: str, content: bytes) -> str | None:
    """The reason when a file can't be a round of trials of the workload that its name says; `RecordStore.read` asks TVM
    for the rest."""
    try:
        stored = json.loads(content)
        workload, trials, records = stored["workload"], stored["trials"], stored["records"]
    except (ValueError, KeyError, TypeError):
        return "it is not the JSON of a round of trials"
    if not isinstance(workload, list) or [type(part) for part in workload] != [str, str] or type(records) is not list:
        return "it is not the JSON of a round of trials"
    hashed = workload[0]
    if not name.startswith(f"{hashed}-"):
        return "it is of another workload than its name says"
    if type(trials) is not int or not max(1, len(records)) <= trials <= ROUND or len(records) > _KEPT:
        return f"it tells of {trials} trials, and a round has 1 to {ROUND}"
    return None


class RecordStore:
    """The records of one machine and thread count, as JSON files.

    Attributes:
        used: The names of those that were read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()

    def read(self, module: Any, into: Any) -> int:
        """Commit the records of a workload to the database `into`; returns how many trials they come from. A file that
        can't be read, or is of a workload that only shares the hash, counts as absent."""
        from tvm.s_tir.meta_schedule.database.database import TuningRecord, Workload

        workload, trials = into.commit_workload(module), 0
        for path in sorted(self.folder.glob(f"{_hash(workload)}-*.json")):
            with contextlib.suppress(Exception):  # whatever is wrong with a file, the answer is to do without
                content = path.read_bytes()
                if tuning_records.refuse(path.name, content) or refuse_record(path.name, content):
                    continue
                stored = json.loads(content)
                if not into.has_workload(Workload.from_json(stored["workload"]).mod):
                    continue
                records = [TuningRecord.from_json(one, workload) for one in stored["records"]]
                for one in records:
                    into.commit_tuning_record(one)
                trials += stored["trials"]
                self.used.add(path.name)
        return trials

    def write(self, module: Any, trials: int, records: Sequence[Any]) -> None:
        """One round: how many trials it had, and the records of those that ran."""
        from tvm.s_tir.meta_schedule.database import MemoryDatabase

        workload = MemoryDatabase().commit_workload(module)
        stored = {
            "workload": _plain(workload.as_json()),
            "trials": trials,
            "records": [_plain(one.as_json()) for one in sorted(records, key=_mean)[:_KEPT]],
        }
        content = canonical_json(stored).encode()
        name = tuning_records.name_of(_hash(workload), "json", content)
        tuning_records.write(self.folder, name, content)
        self.used.add(name)


def _hash(workload: Any) -> str:
    """Of its structure, in which names have no part."""
    return str(workload.as_json()[0])


def tune(
    module: Any, target: Any, store: RecordStore, *, trials: int, seconds: float, threads: int
) -> tuple[Any, Tuned]:
    """A database with what is known of the module's workloads, after measuring what the budget allows.

    Trials are given out as if nothing were known, a round to each workload and the rest by its work; what earlier
    records have of that is not measured again. So the same model, or another of the same workloads, needs no trials.

    Args:
        module: Relax functions and the loops they call, fused.
        seconds: No round begins later.
    """
    from tvm.s_tir.meta_schedule.database import MemoryDatabase
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks

    ends = time.monotonic() + seconds
    database = MemoryDatabase()
    tasks = [
        task
        for task in extract_tasks(module, target)
        if not task.dispatched[0]["main"].attrs.get("tirx.is_scheduled") and _fixed(task.dispatched[0])
    ]
    modules = [task.dispatched[0] for task in tasks]
    shares = allot([_work(one) * int(task.weight) for one, task in zip(modules, tasks, strict=True)], trials)
    done, stopped, search = 0, False, _Search(target, database, store, threads, ends)
    known = [store.read(one, database) for one in modules]
    # A round for each workload before any has its whole share: time may end it, and what is left are plain loops.
    for share in ([min(ROUND, one) for one in shares], shares):
        for at in sorted(range(len(shares)), key=lambda at: -shares[at]):
            wanted = share[at] - known[at]
            if wanted <= 0 or stopped:
                continue
            measured = search.run(tasks[at].task_name, modules[at], wanted)
            known[at], done = known[at] + measured, done + measured
            stopped = measured < wanted and time.monotonic() >= ends
    records = tuple(sorted(store.used))
    return database, Tuned(trials=done, stopped=stopped, records=records)


def allot(work: Sequence[float], trials: int) -> list[int]:
    """Trials for each workload: a round each, the largest first; then one by one to whose share is least for its
    work."""
    shares = [0] * len(work)

    def give(at: int) -> int:
        given = min(ROUND, trials)
        shares[at] += given
        return given

    for at in sorted(range(len(work)), key=lambda at: -work[at]):
        trials -= give(at)
    while trials > 0 and shares:
        trials -= give(max(range(len(work)), key=lambda at: work[at] / (shares[at] / ROUND + 1)))
    return shares


class _Search:
    """MetaSchedule's search over one workload after another, with one cost model that learns from all.

    Candidates are built and measured in this process: TVM's own workers take longer to start than a small budget lasts,
    and a compile worker of ours is as expendable as they are. What it measured before a crash is on disk.
    """

    def __init__(self, target: Any, database: Any, store: RecordStore, threads: int, ends: float) -> None:
        self._target, self._database, self._store = target, database, store
        self._threads, self._ends = threads, ends
        self._model: Any = None

    def run(self, name: str, module: Any, trials: int) -> int:
        """Measure at most `trials` candidates; returns how many were measured."""
        # Makers of candidates for other processors: 50 s of imports where nothing of them is used, since the rules are
        # named below.
        sys.modules.setdefault("tvm.s_tir.tensor_intrin", ModuleType("tvm.s_tir.tensor_intrin"))
        from tvm.s_tir import meta_schedule as ms

        if time.monotonic() >= self._ends:
            return 0
        self._model = self._model or ms.CostModel.create("xgb", num_warmup_samples=_WARM_UP, tree_method="auto")
        space = ms.space_generator.PostOrderApply(
            sch_rules=ms.ScheduleRule.create("llvm"),
            postprocs=ms.Postproc.create("llvm"),
            mutator_probs=ms.Mutator.create("llvm"),
        )
        context = ms.TuneContext(
            mod=module,
            target=self._target,
            space_generator=space,
            search_strategy=ms.search_strategy.EvolutionarySearch(**_POPULATION),
            task_name=name,
            logger=_quiet(),
            rand_state=1,
            num_threads=self._threads,
        ).clone()
        builder, runner, keeper, counted = _measuring(module, self._target, self._store, self._ends)
        callbacks = [ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel(), keeper]
        with tempfile.TemporaryDirectory() as scratch, _until(self._ends):
            ms.tune.tune_tasks(
                tasks=[context],
                task_weights=[1.0],
                work_dir=scratch,
                max_trials_global=trials,
                num_trials_per_iter=ROUND,
                builder=builder,
                runner=runner,
                database=self._database,
                cost_model=self._model,
                measure_callbacks=callbacks,
            )
        return int(counted["trials"])


@contextlib.contextmanager
def _until(ends: float) -> Iterator[None]:
    """TVM hands on what a callback raises as an error of another class."""
    try:
        yield
    except Exception as error:
        if time.monotonic() < ends or _LATE not in str(error):
            raise


def _measuring(module: Any, target: Any, store: RecordStore, ends: float) -> tuple[Any, Any, Any, dict[str, int]]:
    """Builder, runner, and a callback that writes each round; with the count of what was measured. After `ends` nothing
    more is built, and the search ends."""
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    built: dict[str, Any] = {}
    counted = {"trials": 0}

    @derived_object
    class Builder(ms.builder.PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: Any) -> list[Any]:
            return [self._build(one) for one in build_inputs]

        def _build(self, one: Any) -> Any:
            if time.monotonic() >= ends:
                return ms.builder.BuilderResult(None, _LATE)
            try:
                made = tvm.build(one.mod, target=one.target)
            except Exception as error:  # noqa: BLE001 - a schedule that can't be built is one trial's answer
                return ms.builder.BuilderResult(None, str(error)[:200])
            key = str(len(built))
            built[key] = made
            return ms.builder.BuilderResult(key, None)

    @derived_object
    class Runner(ms.runner.PyRunner):  # type: ignore[misc]
        def run(self, runner_inputs: Any) -> list[Any]:
            results = [self._run(one) for one in runner_inputs]
            built.clear()
            return [ms.runner.RunnerFuture(lambda: True, lambda result=result: result) for result in results]

        def _run(self, one: Any) -> Any:
            try:
                seconds = _seconds(built[str(one.artifact_path)], one.args_info)
            except Exception as error:  # noqa: BLE001 - nor is one that can't be run
                return ms.runner.RunnerResult(None, str(error)[:200])
            return ms.runner.RunnerResult(seconds, None)

    @derived_object
    class Keeper(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc]
        def apply(self, scheduler: Any, task_id: int, candidates: Any, builds: Any, runs: Any) -> None:
            tried, records = _records(module, target, list(zip(candidates, runs, strict=True)))
            if tried:
                store.write(module, tried, records)
            counted["trials"] += tried
            if time.monotonic() >= ends:
                raise TimeoutError(_LATE)

    return Builder(), Runner(), Keeper(), counted


def _records(module: Any, target: Any, trials: Sequence[tuple[Any, Any]]) -> tuple[int, list[Any]]:
    """How many of these candidates, each with its run, were tried before the search ended; and a record of each that
    ran."""
    from tvm.s_tir.meta_schedule.database import MemoryDatabase
    from tvm.s_tir.meta_schedule.database.database import TuningRecord

    workload = MemoryDatabase().commit_workload(module)
    records = [
        TuningRecord(one.sch.trace, workload, [float(value) for value in run.run_secs], target, one.args_info)
        for one, run in trials
        if run.error_msg is None and run.run_secs
    ]
    return sum(run.error_msg is None or _LATE not in str(run.error_msg) for _, run in trials), records


def _seconds(made: Any, arguments: Any) -> list[float]:
    """How long a kernel takes, on numbers that no index and no division stumbles over."""
    import numpy as np
    import tvm

    random = np.random.default_rng(0)
    tensors = []
    for argument in arguments:
        shape, dtype = [int(dim) for dim in argument.shape], str(argument.dtype)
        floating = dtype.startswith("float")
        array = random.uniform(0.1, 1.0, shape).astype(dtype) if floating else np.zeros(shape, dtype)
        tensors.append(tvm.runtime.tensor(array))
    module = made.jit() if hasattr(made, "jit") else made
    timed = module.time_evaluator("main", tvm.cpu(0), **_RUN)
    return [float(value) for value in timed(*tensors).results]


def _fixed(module: Any) -> bool:
    """Whether a workload has one size. What answers with a size that depends on data (Range, NonZero) can't be
    measured, and stays plain loops."""
    return all(
        hasattr(parameter, "shape") and all(hasattr(dim, "value") for dim in parameter.shape)  # constants have a value
        for parameter in module["main"].params
    )


def _work(module: Any) -> float:
    """Floating-point operations of a workload; of one that has none, the elements that it reads and writes."""
    from tvm.s_tir.analysis import estimate_tir_flops

    elements = sum(math.prod(int(dim) for dim in buffer.shape) for buffer in module["main"].params)
    return max(float(estimate_tir_flops(module)), float(elements))


def _mean(one: Any) -> float:
    seconds = [float(value) for value in one.run_secs]
    return sum(seconds) / len(seconds)


def _quiet() -> logging.Logger:
    """TVM tells every candidate; standard error is for people."""
    logger = logging.getLogger("compile_stage.tvm")
    logger.setLevel(logging.CRITICAL)
    return logger


def _plain(value: Any) -> Any:
    """TVM's containers as Python's, for JSON."""
    return json.loads(json.dumps(value, default=lambda one: dict(one) if hasattr(one, "items") else list(one)))
