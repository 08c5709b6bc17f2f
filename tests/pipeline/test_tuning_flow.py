"""What option tuning accepts, in which order, and on top of what. Models are stood in for by what evaluating and
measuring them would say; `tests/integration/test_ladder.py` runs real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import pytest
from factories import measurement, run_context, target, target_policy, timing

from compile_stage.core.errors import UsageError
from compile_stage.core.records import (
    Artifact,
    Budget,
    Candidate,
    Failure,
    Job,
    Plan,
    PortableModel,
    SampleSet,
    TuningOption,
)
from compile_stage.measure.successive_halving import FoundSettings, Ranked
from compile_stage.pipeline import option_tuning
from compile_stage.pipeline.evaluate import Evaluation, EvaluationOptions
from compile_stage.pipeline.option_tuning import tune
from compile_stage.steps.benchmark import BASELINE, Measured

TARGET = target(batch_sizes=(4, 8))
POLICY = target_policy(TARGET, ladder=True)
SAMPLES = SampleSet(path="", digest="sha256:s", count=64, real=True, source="input_example")
ARENA = TuningOption(kind="memory", name="arena", options={"arena": False})
STATIC = TuningOption(kind="tuning", name="static", options={"static": True})
SPIN = TuningOption(kind="tuning", name="spin", options={"spin": 1}, opening={"spin": 1})
FLUSH = TuningOption(kind="tuning", name="flush", options={"flush": 1}, opening={"flush": 1})
INT8, FP32 = factories.job("int8", where=TARGET), factories.job("fp32", where=TARGET)


GRAPH = PortableModel(
    path="", digest="", form="onnx", opset=17, precision="int8", kept={}, signature=factories.SIGNATURE, made_from=""
)


def made(of: Job, **fields: Any) -> Candidate:
    graph = GRAPH if of.scheme.precision == "int8" else None
    return factories.passed(of, artifact=factories.artifact(of, **fields), measurement=None, portable=graph)


class World:
    """What evaluating and measuring would say, by the names of the options.

    Attributes:
        speedups: Over what the options are laid over.
        wrong: Their answers miss a tolerance.
        crash: They end while they are measured.
    """

    def __init__(self) -> None:
        self.offered: list[TuningOption] = [ARENA, STATIC]
        self.speedups: dict[str, float] = {}
        self.wrong: set[str] = set()
        self.crash: set[str] = set()
        self.latencies = {INT8.id: 0.001, FP32.id: 0.002}
        self.found: FoundSettings | Exception = FoundSettings()
        self.searched: list[tuple[str, list[str]]] = []
        self.measured: list[tuple[str, str]] = []
        self.left_s: list[float | None] = []

    def evaluate(self, target: Any, of: Job, options: EvaluationOptions) -> Evaluation:
        # The graph that was proven is opened otherwise, not lowered again; what has none is lowered by its own step.
        graph = options.lower(None) if options.lower is not None else None  # type: ignore[arg-type]
        assert graph == (GRAPH if of.scheme.precision == "int8" else None)
        candidate = replace(made(of), portable=graph)
        if of.tuning_options[-1] in self.wrong:
            candidate = candidate.in_state("failed", "cosine is 0.5")
        return Evaluation(candidate=candidate)

    def fastest(self, target: Any, candidates: Any, seconds: float) -> Any:
        timed = sorted((self.latencies[one.job.id], one.job.id) for one in candidates if one.job.id in self.latencies)
        by_id = {one.job.id: one for one in candidates}
        return (by_id[timed[0][1]], timed[0][0]) if timed else None

    def benchmark(self, context: Any, below: Artifact, artifacts: dict[str, Artifact], request: Any) -> Measured:
        ((name, own),) = artifacts.items()
        assert request.target.batch_sizes == (4,)
        assert request.samples == SAMPLES
        assert request.budget.measure_seconds == 8
        self.left_s.append(request.left_s)
        self.measured.append((below.job_id, own.job_id))
        last = name.rpartition("-")[2]
        if last in self.crash:
            failure = Failure(step="benchmark", kind="crash", problem="it ended")
            return Measured(measurements={}, failures={name: failure}, cached=False)
        timings = (timing(self.speedups.get(last, 1.0), batch_size=4),)
        base = measurement(timings=(timing(None, batch_size=4),))
        return Measured(measurements={name: measurement(timings=timings), BASELINE: base}, failures={}, cached=False)

    def find_settings(self, target: Any, below: Candidate, options: Any, seconds: float) -> FoundSettings:
        self.searched.append((below.job.id, [option.name for option in options]))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for name in ("evaluate", "fastest", "benchmark", "find_settings"):
        monkeypatch.setattr(option_tuning, name, getattr(made, name))
    monkeypatch.setattr(option_tuning, "options_of", lambda *_: made.offered)
    return made


def run_of(folder: Path, *, search_minutes: float = 1.0, **fields: Any) -> Any:
    policy = replace(POLICY, **fields)
    budget = Budget(minutes=30, measure_seconds=30, search_minutes=search_minutes)
    plan = Plan(source=factories.source(), policy=factories.policy(policy, budget=budget), jobs=(), refused=())
    inputs: Any = SimpleNamespace(validation=SAMPLES)
    return option_tuning.TargetRun(run_context(folder), plan, policy, inputs)


def ids(candidates: list[Candidate]) -> list[str]:
    return [one.job.id for one in candidates]


def test_each_option_is_laid_over_what_was_accepted_before(world: World, tmp_path: Path) -> None:
    """Broken: an option is compared with the base, though another is accepted already, and claims what that gained; or
    what is no faster is accepted, and what is, is not."""
    world.speedups = {"arena": 1.5, "static": 1.3}
    found, tuning = tune(run_of(tmp_path), [made(FP32), made(INT8)])
    arena = f"{INT8.id}--memory-arena"
    assert ids(found) == [FP32.id, INT8.id, arena, f"{arena}--tuned-static"]
    assert world.measured == [(INT8.id, arena), (arena, f"{arena}--tuned-static")]
    assert tuning is not None
    assert (tuning.base, tuning.reason) == (INT8.id, "")
    assert [(step.name, step.accepted) for step in tuning.steps] == [("arena", True), ("static", True)]
    world.speedups, world.measured = {"arena": 0.9, "static": 1.3}, []
    found, _ = tune(run_of(tmp_path), [made(FP32), made(INT8)])
    assert ids(found) == [FP32.id, INT8.id, f"{INT8.id}--tuned-static"]
    assert world.measured[1] == (INT8.id, f"{INT8.id}--tuned-static")


def test_the_seconds_left_are_no_part_of_what_a_comparison_is_known_by(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: near the end of `budget.minutes` each run compares every option anew: each has another time left."""
    tune(run_of(tmp_path), [made(INT8)])
    assert world.left_s == [None, None]
    world.left_s = []
    monkeypatch.setattr(option_tuning._Tuner, "_seconds", 3.25)
    tune(run_of(tmp_path), [made(INT8)])
    assert world.left_s == [3.25, 3.25]


@pytest.mark.parametrize("how", ["wrong", "crash"])
def test_an_option_with_wrong_answers_is_not_accepted(world: World, tmp_path: Path, how: str) -> None:
    """Broken: the fastest candidate is one that missed a tolerance, or one that crashed."""
    world.speedups = {"arena": 2.0, "static": 1.3}
    getattr(world, how).add("arena")
    found, tuning = tune(run_of(tmp_path), [made(FP32), made(INT8)])
    assert ids(found) == [FP32.id, INT8.id, f"{INT8.id}--tuned-static"]
    assert tuning is not None
    rejected = tuning.steps[0]
    assert not rejected.accepted
    assert rejected.reason in ("rejected: cosine is 0.5", "rejected: it failed during benchmarking: it ended")


def test_options_are_tried_on_what_passes_alone(world: World, tmp_path: Path) -> None:
    """Broken: a fast candidate with wrong answers is tuned and published; or, where size is preferred, a large one."""
    wrong = made(INT8).in_state("failed", "cosine is 0.5")
    world.speedups = {"arena": 1.5}
    found, tuning = tune(run_of(tmp_path), [made(FP32), wrong])
    assert ids(found) == [FP32.id, f"{FP32.id}--memory-arena", INT8.id]
    assert tuning is not None
    assert tuning.base == FP32.id
    stated = replace(FP32, target=replace(TARGET, options={"onnxruntime": {"arena": True}}))
    _, tuning = tune(run_of(tmp_path), [made(stated)])
    assert tuning is not None
    assert [step.reason for step in tuning.steps if "already set by the policy" in step.reason and not step.tried]
    assert tune(run_of(tmp_path), [wrong])[1] == option_tuning.Tuning(reason="no candidate passed every tolerance")
    world.latencies = {INT8.id: 0.002, FP32.id: 0.001}
    small, large = made(INT8, size_bytes=10), made(FP32, size_bytes=40)
    _, tuning = tune(run_of(tmp_path), [large, small])
    assert tuning is not None
    assert tuning.base == FP32.id
    _, tuning = tune(run_of(tmp_path, prefer="size"), [large, small])
    assert tuning is not None
    assert (tuning.base, tuning.why) == (INT8.id, "the only one of the smallest that pass")
    world.latencies = {}
    _, tuning = tune(run_of(tmp_path), [large, small])
    assert tuning is not None
    assert (tuning.base, tuning.why) == (FP32.id, "the first that passes: none could be timed")


def test_the_best_combination_that_is_right_is_laid_over_what_was_accepted(world: World, tmp_path: Path) -> None:
    """Broken: the best of the search is taken with wrong answers, where the next one has right ones; a setting is
    tried again alone, or reported twice; or a combination is searched that the policy gives no time."""
    world.offered = [ARENA, SPIN, FLUSH]
    world.speedups = {"arena": 1.5, "spin": 1.4, "flush": 1.6}
    first, second = Ranked(settings=("flush",), speedup=1.6), Ranked(settings=("spin",), speedup=1.4)
    world.found = FoundSettings(ranked=(first, second), tried=3, valid=3, alone={"spin": 1.4, "flush": 1.6})
    world.wrong = {"flush"}
    found, tuning = tune(run_of(tmp_path), [made(INT8)])
    arena = f"{INT8.id}--memory-arena"
    assert world.searched == [(arena, ["spin", "flush"])]
    assert ids(found) == [INT8.id, arena, f"{arena}--tuned-spin"]
    assert tuning is not None
    assert [(step.name, step.accepted) for step in tuning.steps] == [
        ("arena", True), ("flush", False), ("spin", True),
    ]  # fmt: skip
    both = Ranked(settings=("spin", "flush"), speedup=1.7)
    world.found = replace(world.found, ranked=(both,))
    _, tuning = tune(run_of(tmp_path), [made(INT8)])
    assert tuning is not None
    assert [(step.name, step.accepted) for step in tuning.steps[1:]] == [
        ("spin+flush", False), ("spin", False), ("flush", False),
    ]  # fmt: skip
    assert tuning.steps[2].reason.startswith("rejected: its combination spin+flush was not accepted; alone about 1.40")
    for fields in ({"prefer": "memory"}, {"search_minutes": 0.0}):
        world.searched.clear()
        tune(run_of(tmp_path, **fields), [made(INT8)])
        assert world.searched == []
    world.found = UsageError("gone")
    found, tuning = tune(run_of(tmp_path), [made(INT8)])
    assert ids(found) == [INT8.id, arena]
    assert tuning is not None
    assert all("gone" in step.reason for step in tuning.steps[1:])
