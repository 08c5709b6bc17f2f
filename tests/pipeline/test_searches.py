"""The searches for mixed precision of one target together: who is searched, within what, and what each trial is of.
Models are stood in for by what evaluating them would say; `tests/integration/test_mixed_precision.py` runs real ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import COSINE, SIGNATURE, artifact, job, run_context, target_policy

from compile_stage.core.digest import plain
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.core.records import (
    Candidate,
    Check,
    Failure,
    Fallback,
    Outcome,
    PortableModel,
    SampleSet,
    Sensitivity,
    Verdict,
)
from compile_stage.measure.structure import BEHAVIOUR
from compile_stage.pipeline import mixed_precision
from compile_stage.pipeline.evaluate import Evaluation, EvaluationOptions
from compile_stage.pipeline.mixed_precision import (
    Method,
    Passing,
    SearchBudget,
    find_mixed,
    mixed_job,
    search_missed,
    searchable,
)

SAMPLES = SampleSet(path="", digest="sha256:s", count=64, real=True, source="input_example")
SOURCE = PortableModel(
    path="", digest="sha256:g", form="onnx", opset=17, precision="fp32", kept={}, signature=SIGNATURE, made_from=""
)
LOWERED = replace(SOURCE, digest="sha256:l", precision="int8")
NODES = ("a", "b", "c", "d", "e", "f")
SUM = Sensitivity(node="sum", op="Add", effect=0.0, cost=0.0)
RANKING = [Sensitivity(node=node, op="Conv", effect=2.0**-at, cost=1.0) for at, node in enumerate(NODES)]


def checked(cosine: float) -> Verdict:
    outcome = Outcome.PASS if cosine >= COSINE.limit else Outcome.FAIL
    return Verdict(checks=(Check(gate=COSINE, outcome=outcome, measured=cosine, reason=""),))


def missed(backend: str = "onnxruntime", cosine: float = 0.9) -> Candidate:
    of = job("int8", backend, native=False)
    return Candidate(job=of, state="failed", portable=LOWERED, artifact=artifact(of), verdict=checked(cosine))


def passed(backend: str = "openvino", precision: str = "fp32") -> Candidate:
    of = job(precision, backend)
    return Candidate(job=of, state="passed", artifact=artifact(of), verdict=checked(1.0))


class World:
    """What evaluating and timing would say.

    Attributes:
        needed: A trial passes where these are kept.
        latencies: Of a job in seconds, by its id.
        per_node: That each kept node adds to the latency of a trial.
    """

    def __init__(self) -> None:
        self.needed = {"a"}
        self.latencies: dict[str, float] = {}
        self.per_node = 0.001
        self.evaluated: list[tuple[str, tuple[str, ...]]] = []
        self.fails: Failure | None = None
        self.ranked: Any = RANKING
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.graphs: list[PortableModel] = []

    def call(self, name: str, **given: Any) -> Any:
        self.calls.append((name, given))
        if name == "rank_nodes":
            if isinstance(self.ranked, Exception):
                raise self.ranked
            return plain(self.ranked)
        (Path(given["into"]) / "mixed.onnx").write_text("mixed")
        path = f"{given['into']}/mixed.onnx"
        return plain(replace(given["model"], path=path, precision="int8", kept={"fp32": tuple(given["keep"])}))

    def evaluate(self, target: Any, of: Any, options: EvaluationOptions) -> Evaluation:
        assert options.lower is not None
        assert options.time_quickly
        graph = options.lower(self)  # type: ignore[arg-type]
        self.graphs.append(graph)
        kept = next(iter(graph.kept.values()))
        self.evaluated.append((of.id, kept))
        if self.fails is not None:
            return Evaluation(candidate=Candidate(job=of).failed(self.fails))
        holds = self.needed <= set(kept)
        state: Any = "passed" if holds else "failed"
        verdict = checked(0.995 if holds else 0.9 + len(kept) / 100)
        found = Candidate(job=of, state=state, artifact=artifact(of), portable=graph, verdict=verdict)
        plain_s = self.latencies.get(of.id.partition("-mixed")[0], 0.01)
        return Evaluation(candidate=found, quick_latency_s=plain_s + self.per_node * len(kept))

    def fastest(self, target: Any, candidates: Sequence[Candidate], seconds: float) -> Any:
        timed = [(self.latencies[one.job.id], one) for one in candidates if one.job.id in self.latencies]
        return (lambda best: (best[1], best[0]))(min(timed, key=lambda one: one[0])) if timed else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    class Workers:
        def __init__(self, target: Any, ends: float) -> None: ...

        @contextmanager
        def opened(self, of: Any) -> Iterator[Any]:
            yield SimpleNamespace(lowers=made)

        def close(self) -> None: ...

    monkeypatch.setattr(mixed_precision, "TrialWorkers", Workers)
    monkeypatch.setattr(mixed_precision, "evaluate", made.evaluate)
    monkeypatch.setattr(mixed_precision, "fastest", made.fastest)
    monkeypatch.setattr(mixed_precision, "quick_latency", lambda target, one, workers: made.latencies.get(one.job.id))
    return made


def run_of(folder: Path, **fallback: Any) -> Any:
    inputs = SimpleNamespace(portable=SOURCE, calibration=SAMPLES, validation=replace(SAMPLES, digest="sha256:v"))
    return SimpleNamespace(
        context=run_context(folder),
        policy=target_policy(fallback=Fallback(**fallback)),
        inputs=inputs,
        time=SimpleNamespace(for_searches_s=600.0),
    )


def test_the_mixed_one_stands_behind_what_missed_and_keeps_what_it_needs(world: World, tmp_path: Path) -> None:
    """Broken: who missed is published in the place of the mixed one, which has another job, graph or set of nodes than
    the trial that passed; or nodes are kept that nothing needs."""
    world.needed = {"b"}
    first, other = passed("onnxruntime"), passed()
    noted, mixed = search_missed(run_of(tmp_path), [first, missed(), other])[1:3]
    assert noted.verdict == missed().verdict
    assert not noted.has_passed
    assert mixed.has_passed
    assert mixed.job.id == f"{missed().job.id}-mixed"
    assert (mixed.job.scheme.name, mixed.job.scheme.float_type, mixed.job.scheme.float_types) == (
        "int8-mixed",
        "fp32",
        (),
    )
    assert mixed.portable is not None
    assert mixed.portable.kept == {"fp32": ("b",)}
    assert Path(mixed.portable.path).read_text() == "mixed"
    assert (noted.trials[0].kept, noted.trials[0].passed) == (("a",), False)
    assert {trial.kept for trial in noted.trials if trial.passed} >= {("a", "b"), ("b",)}
    for trial in noted.trials:
        assert trial.latency_s == pytest.approx(0.01 + 0.001 * len(trial.kept))
        assert trial.decisive is not None
        assert trial.decisive.gate == COSINE
    assert mixed_job(missed().job, "bf16").id == f"{missed().job.id}-mixed-bf16"
    everyone = search_missed(run_of(tmp_path), [first, missed(), other])
    assert [one.job.id for one in everyone] == [one.job.id for one in (first, noted, mixed, other)]
    assert search_missed(run_of(tmp_path), [first, other]) == [first, other]


@pytest.mark.parametrize(("plain_s", "searched"), [(0.0094, True), (0.0096, False), (None, True)])
def test_who_is_too_slow_with_nothing_kept_is_not_searched(
    world: World, tmp_path: Path, plain_s: float | None, searched: bool
) -> None:
    """Broken: minutes of trials for what can't win; or int8 is given up that is faster than fp32 by 6 %."""
    world.latencies = {passed().job.id: 0.01} | ({} if plain_s is None else {missed().job.id: plain_s})
    found = search_missed(run_of(tmp_path), [missed(), passed()])
    assert bool(world.evaluated) is searched
    assert ("no search for nodes" in found[0].note) is not searched
    world.evaluated.clear()
    by_size = run_of(tmp_path)
    by_size.policy = replace(by_size.policy, prefer="size")
    search_missed(by_size, [missed(), passed()])
    assert world.evaluated


def test_what_failed_is_nothing_to_beat(world: World, tmp_path: Path) -> None:
    """Broken: a fast candidate with wrong answers keeps others from a search."""
    lost = replace(passed(), state="failed")
    world.latencies = {lost.job.id: 0.001, missed().job.id: 0.01}
    search_missed(run_of(tmp_path), [missed(), lost])
    assert world.evaluated


def test_a_mixed_one_that_passes_is_what_the_next_must_beat(world: World, tmp_path: Path) -> None:
    """Broken: the second search finds what is slower than the first's, or the slower of two is kept as the one to
    beat."""
    near, far = missed("onnxruntime", 0.98), missed("openvino", 0.8)
    world.latencies = {near.job.id: 0.005, f"{near.job.id}-mixed": 0.006, far.job.id: 0.007, passed().job.id: 0.02}
    found = search_missed(run_of(tmp_path), [far, near, passed()])
    assert {of.partition("-mixed")[0] for of, _ in world.evaluated} == {near.job.id}
    assert "a call takes 7 ms, and onnxruntime int8-mixed, which passes, 6 ms" in found[0].note


def test_searches_share_the_policys_evaluations_and_the_last_may_use_all(world: World, tmp_path: Path) -> None:
    """Broken: the first search leaves nothing to the second; together they go beyond the limit; or what is left is not
    used."""
    world.needed = {"none of these"}
    near, far = missed("onnxruntime", 0.98), missed("openvino", 0.8)
    found = search_missed(run_of(tmp_path, max_evaluations=3), [far, near])
    assert [len(one.trials) for one in (found[1], found[0])] == [2, 1]
    assert [one.portable for one in found] == [LOWERED, LOWERED]
    (without,) = search_missed(run_of(tmp_path, max_evaluations=0), [near])
    assert without.note == "the search for nodes to keep in higher precision had no budget left"
    late = run_of(tmp_path)
    late.time.for_searches_s = -1.0
    (without,) = search_missed(late, [near])
    assert without.note == "the search for nodes to keep in higher precision had no budget left"
    assert 3590 < SearchBudget.of(run_of(tmp_path, max_minutes=60)).seconds + 3000 < 3601
    assert 50 < SearchBudget.of(run_of(tmp_path, max_minutes=1)).seconds <= 60


def test_a_trial_that_ended_otherwise_passes_nothing(world: World, tmp_path: Path) -> None:
    """Broken: a set of nodes that no backend compiled is what wins."""
    world.fails = Failure(step="compile", kind="exception", problem="no kernel")
    noted, mixed = find_mixed(run_of(tmp_path), missed(), SearchBudget(evaluations=5, ends=math.inf))
    assert mixed is None
    assert {trial.problem for trial in noted.trials} == {"no kernel"}
    assert not any(trial.passed for trial in noted.trials)


def test_nodes_that_can_not_be_ranked_or_of_which_there_is_one_end_the_search(world: World, tmp_path: Path) -> None:
    """Broken: the whole model in fp32 is called int8, or a run ends where a search can't begin."""
    budget = SearchBudget(evaluations=5, ends=math.inf)
    world.ranked = UsageError("too large")
    noted, mixed = find_mixed(run_of(tmp_path / "a"), missed(), budget)
    assert (noted.note, mixed) == ("the effect of each node could not be measured: too large", None)
    world.ranked = [RANKING[0], SUM]  # an Add behind the last that does arithmetic is no node to keep
    noted, mixed = find_mixed(run_of(tmp_path / "b"), missed(), budget)
    assert mixed is None
    assert not world.evaluated
    world.ranked = [replace(SUM, effect=1.0), RANKING[0]]  # before it, it is one
    find_mixed(run_of(tmp_path / "c"), missed(), budget)
    assert world.evaluated


def test_effects_are_measured_once_for_a_graph_and_its_samples(world: World, tmp_path: Path) -> None:
    """Broken: the nodes of one graph are ranked by the effects of another's, or on the samples that judge it."""
    target, other = run_of(tmp_path), run_of(tmp_path)
    budget = SearchBudget(evaluations=50, ends=math.inf)

    def asked(run: Any, candidate: Candidate) -> list[Mapping[str, Any]]:
        world.calls.clear()
        find_mixed(run, candidate, budget)
        return [given for name, given in world.calls if name == "rank_nodes"]

    (given,) = asked(target, missed())
    assert (given["model"], given["lowered"], given["samples"]) == (SOURCE, LOWERED, SAMPLES)
    assert asked(target, missed()) == []
    assert len(asked(target, replace(missed(), portable=replace(LOWERED, digest="sha256:other")))) == 1
    other.inputs.portable = replace(SOURCE, digest="sha256:other")
    assert len(asked(other, missed())) == 1
    other.inputs.calibration = None
    (given,) = asked(other, missed())
    assert given["samples"] == other.inputs.validation


def test_each_set_of_nodes_has_a_graph_of_its_own(world: World, tmp_path: Path) -> None:
    """Broken: a trial is judged by the graph of another set of nodes, of another source, or in another precision."""
    target, budget = run_of(tmp_path), SearchBudget(evaluations=50, ends=math.inf)
    find_mixed(target, missed(), budget)
    made = [given["keep"] for name, given in world.calls if name == "mix"]
    assert sorted(map(tuple, made)) == sorted({kept for _, kept in world.evaluated})
    world.calls.clear()
    find_mixed(target, missed(), budget)
    assert [name for name, _ in world.calls] == []
    for changed in ("portable", "lowered"):
        digest, run = f"sha256:{changed}", run_of(tmp_path)
        run.inputs.portable = replace(SOURCE, digest=digest) if changed == "portable" else SOURCE
        graph = replace(LOWERED, digest=digest) if changed == "lowered" else LOWERED
        find_mixed(run, replace(missed(), portable=graph), budget)
        assert "mix" in [name for name, _ in world.calls], changed
        world.calls.clear()
    world.graphs.clear()
    world.evaluated.clear()
    sized = run_of(tmp_path)
    sized.inputs.portable = replace(SOURCE, smallest={"x": 1}, largest={"x": 9})
    low = missed()
    low = replace(low, job=replace(low.job, scheme=replace(low.job.scheme, float_types=("bf16",))))
    world.per_node = 0.0
    find_mixed(sized, low, budget, passing=Passing(job=passed().job, latency_s=1.0))
    assert all((graph.smallest, graph.largest) == ({"x": 1}, {"x": 9}) for graph in world.graphs)
    assert [float_type for graph in world.graphs for float_type in graph.kept] == ["fp32", "bf16"]
    assert [of.rpartition("-")[2] for of, _ in world.evaluated] == ["mixed", "bf16"]


def test_other_packages_rank_and_mix_anew(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after an update of ONNX Runtime the effects, or the graphs, of the version before are judged."""
    budget = SearchBudget(evaluations=50, ends=math.inf)
    find_mixed(run_of(tmp_path), missed(), budget)
    for updated in ("onnxruntime", "onnx"):
        versions = lambda *names, new=updated: {name: name == new for name in names}  # noqa: E731
        monkeypatch.setattr(mixed_precision.plugins, "package_versions", versions)
        world.calls.clear()
        find_mixed(run_of(tmp_path), missed(), budget)
        assert {name for name, _ in world.calls} == {"rank_nodes", "mix"}, updated


def test_a_method_of_its_own_ranks_and_lowers(world: World, tmp_path: Path) -> None:
    """Broken: a search of `debug`, which keeps nodes of a graph in another way, mixes the int8 graph instead."""
    graphs: list[tuple[str, ...]] = []

    def lower(kept: tuple[str, ...]) -> Any:
        graphs.append(kept)
        return lambda worker: replace(SOURCE, kept={"fp32": kept})

    method = Method(ranking=tuple(RANKING), lower=lower)
    _, mixed = find_mixed(run_of(tmp_path), missed(), SearchBudget(evaluations=9, ends=math.inf), method=method)
    assert mixed is not None
    assert graphs[0] == ("a",)
    assert world.calls == []


@pytest.mark.parametrize("metric", ["outputs", "shape", "samples", *BEHAVIOUR])
def test_no_precision_mends_what_there_is_to_compare(metric: str) -> None:
    """Broken: all evaluations go into a candidate that lost an output or changes its inputs."""
    check = Check(gate=replace(COSINE, metric=metric), outcome=Outcome.FAIL, measured=1.0, reason="")
    both = Verdict(checks=(check, *checked(0.9).checks))
    assert searchable(missed())
    assert not searchable(replace(missed(), verdict=both))


def test_errors_of_the_stage_alone_are_taken_for_an_end(world: World, tmp_path: Path) -> None:
    """Broken: an error of ours reads as a model whose nodes could not be ranked."""
    world.ranked = ZeroDivisionError()
    assert not isinstance(world.ranked, CompileStageError)
    with pytest.raises(ZeroDivisionError):
        find_mixed(run_of(tmp_path), missed(), SearchBudget(evaluations=5, ends=math.inf))
