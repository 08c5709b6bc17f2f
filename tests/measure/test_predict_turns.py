"""What predict() is given when it is timed, and what its turns answer."""

from __future__ import annotations

import base64
import io
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compile_stage.core.digest import plain
from compile_stage.core.errors import WorkerError
from compile_stage.core.records import PredictSpeedup
from compile_stage.engine import predict_calls
from compile_stage.measure.predict_turns import PredictTurns, build_input
from compile_stage.steps.predict import PredictComparison, contradicted, judge

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def frame(columns: list[list[Any]], **arrays: Any) -> Any:
    return build_input({"kind": "frame", "columns": columns}, arrays, 2)


def test_a_matrix_becomes_the_columns_of_the_signature() -> None:
    """Broken: MLflow refuses the input for its types, and nothing is measured."""
    built = frame([["a", "float64"], ["b", "int64"], ["c", None]], X=ROWS)
    assert {name: str(dtype) for name, dtype in built.dtypes.items()} == {"a": "float64", "b": "int64", "c": "float32"}
    assert built.to_numpy().tolist() == ROWS[:2].tolist()


def test_columns_of_their_own_keep_texts() -> None:
    """Broken: a model of named columns would be asked with one column's values in another."""
    built = frame([["t", "str"], ["n", "float64"]], n=np.array([1.0, 2.0]), t=np.array(["x", "y"]))
    assert built["t"].tolist() == ["x", "y"]
    assert built["n"].tolist() == [1.0, 2.0]


def test_a_text_that_stands_for_missing_ones_is_missing_in_every_second_place() -> None:
    """Broken: predict() was never asked with a missing text, which it fills in, and the samples have none of them."""
    how = {"kind": "frame", "columns": [["t", "str"], ["u", "str"]], "fills": {"t": {"None": "", "NaN": "x"}}}
    texts = np.array(["x", "y", "x", "x"])
    built = build_input(how, {"t": texts, "u": texts}, 4)
    assert built["t"].isna().tolist() == [True, False, False, True]
    assert built["t"].dropna().tolist() == ["y", "x"]
    assert built["u"].tolist() == texts.tolist()


def test_fewer_samples_than_a_batch_are_repeated() -> None:
    """Broken: a batch would be smaller than the report says."""
    built = build_input({"kind": "array", "dtypes": {}}, {"x": ROWS[:1]}, 3)
    assert built.tolist() == ROWS[:1].tolist() * 3


def test_a_dict_has_the_types_of_its_tensors() -> None:
    """Broken: MLflow refuses an input whose type differs."""
    built = build_input({"kind": "dict", "dtypes": {"x": "float64"}}, {"x": ROWS, "n": ROWS[:, 0]}, 2)
    assert (built["x"].dtype.name, built["n"].dtype.name) == ("float64", "float32")


def test_texts_come_as_a_list_or_a_column_and_arrays_among_them_as_arrays() -> None:
    """Broken: text pipelines and pictures would be timed on what they do not take."""
    how = {"kind": "items", "texts": ["one", "two"], "column": "", "each": False}
    assert build_input(how, {}, 3) == ["one", "two", "one"]
    assert build_input({**how, "column": "text"}, {}, 2)["text"].tolist() == ["one", "two"]
    file = io.BytesIO()
    np.save(file, ROWS)
    picture = "npy:" + base64.b64encode(file.getvalue()).decode()
    assert build_input({**how, "texts": [picture], "each": True}, {}, 1).tolist() == ROWS.tolist()


def test_samples_that_do_not_fill_the_columns_are_refused() -> None:
    """Broken: the figure would be of another input than clients send."""
    with pytest.raises(ValueError, match="do not fill its data frame of 2 columns"):
        frame([["a", None], ["b", None]], X=ROWS)
    with pytest.raises(ValueError, match="the samples of 'a' do not fit its type int64"):
        frame([["a", "int64"]], a=np.array([0.5, 1.0]))


def test_short_calls_follow_one_that_is_not_timed() -> None:
    """Broken: each call would pay for the caches that the other process took."""
    asked: list[Any] = []
    turns = PredictTurns(asked.append, "given")
    warmed = len(asked)
    assert turns.turn() > 0
    assert asked == ["given"] * (warmed + 2)


def test_the_figure_is_the_quotient_of_the_medians() -> None:
    """Broken: predict() would be said to be faster or slower than its own medians say."""
    found = judge([(0.004, 0.002), (0.0041, 0.002), (0.0039, 0.002)] * 10, 1, "an array", seed=0)
    assert found == PredictSpeedup(
        speedup=pytest.approx(2.0),
        interval=found.interval,
        stable=found.stable,
        rows=1,
        pairs=30,
        original_s=0.004,
        compiled_s=0.002,
        given="an array",
    )
    assert found.interval is not None
    low, high = found.interval
    assert 1.7 < low < 1.95, "one process of each: there is room for what processes differ by"
    assert 2.05 < high < 2.3


class WorkerThatEnds:
    """A worker that is gone once a call has raised, as an engine's own: a further call says so."""

    def __init__(self, raises: dict[str, BaseException], alone_s: float = 0.001, words: str = "") -> None:
        self._raises, self._over, self._alone_s, self._words = raises, False, alone_s, words

    def call(self, function: str, /, **given: Any) -> Any:
        if self._over:
            raise WorkerError("crash", "worker 'source' takes no more calls: its last call was interrupted")
        if function in self._raises:
            self._over = True
            raise self._raises[function]
        prepared = {"seconds": 0.001, "answers": {}}
        if given.get("one_thread"):
            return self._alone_s
        answers = {"describe_predict": {"words": self._words}, "open_predict": prepared, "prepare_published": prepared,
                   "time_published_runs": [0.001]}  # fmt: skip
        return answers.get(function, 0.001)


def compared(
    raises: dict[str, BaseException],
    threads: int = 1,
    alone_s: float = 0.001,
    device: str = "cpu",
    baseline: Any = None,
    words: str = "an array",
) -> PredictSpeedup | None:
    """A comparison whose original's worker ends so, or takes 1 ms a call, and with one thread `alone_s`."""
    where = SimpleNamespace(name="cpu", batch_sizes=(1,), threads=threads, device=device, device_index=0)
    context = SimpleNamespace(
        cached=lambda step, name, key, make, anew: SimpleNamespace(value=plain(make(None))),
        alone=nullcontext,
        engine=SimpleNamespace(close=lambda: None),
        hardware=None,
        remeasure=False,
    )
    policy = SimpleNamespace(
        budget=SimpleNamespace(predict_seconds=1), compliance=SimpleNamespace(allow_pickle=False),
        data=SimpleNamespace(seed=0),
    )  # fmt: skip
    target = SimpleNamespace(
        baseline=baseline,
        bundle=SimpleNamespace(digest=""),
        winner=SimpleNamespace(
            artifact=SimpleNamespace(backend="onnxruntime", signature=SimpleNamespace(outputs=("y",))),
            verdict=None,
            measurement=None,
            job=SimpleNamespace(gates=()),
        ),
        policy=SimpleNamespace(target=where),
        samples={"validation": SimpleNamespace(digest="", path="")},
        original=None,
        predictions=None,
    )
    plan = SimpleNamespace(policy=policy, source=SimpleNamespace(flavor="onnx", identity=""))
    comparison: Any = PredictComparison(context, WorkerThatEnds(raises, alone_s, words), plan)  # type: ignore[arg-type]
    where_found: Any = target
    return contradicted(where_found, comparison.take(where_found, lambda: WorkerThatEnds({})))


@pytest.mark.parametrize("function", ["open_predict", "time_predict"])
def test_ctrl_c_while_predict_is_compared_ends_the_run(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: what the ended worker says takes Ctrl-C's place. The run goes on, says that serving can't load what was
    published, and ends with 3; watch and fleet take that for the verdict."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    with pytest.raises(KeyboardInterrupt):
        compared({function: KeyboardInterrupt()})


def test_a_worker_that_crashes_while_predict_is_compared_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the report says that a worker takes no more calls, and not what ended it."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    found = compared({"time_predict": WorkerError("crash", "out of memory")})
    assert found is not None
    assert found.reason == "out of memory"


def test_the_original_is_compared_with_one_thread_where_its_threads_only_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: on a machine whose cores others hold, the original's two threads wait for each other, 313 ms in place of
    0.7, and any winner is hundreds of times as fast."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    found = compared({}, threads=2, alone_s=0.0002)
    assert found is not None
    assert (found.speedup, found.original_s, found.slowed_s) == (pytest.approx(0.2), 0.0002, 0.001)
    assert found.contradiction == ""


@pytest.mark.parametrize(("baseline_s", "is_slowed"), [(0.00025, False), (0.001, True)])
def test_a_baseline_whose_threads_waited_is_found_out(
    baseline_s: float, is_slowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: predict() was slowed down as the baseline was, so the two did not contradict each other, and min_speedup
    held; or a baseline that was measured while the cores were free counts as slowed down too."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    timing = SimpleNamespace(latency_s=[baseline_s] * 5, new_tokens=0)
    found = compared({}, threads=2, alone_s=0.0002, baseline=SimpleNamespace(timing=lambda rows: timing, timings=()))
    assert found is not None
    assert bool(found.contradiction) == is_slowed
    assert not is_slowed or "0.2 ms with one thread (1 ms with 2 threads)" in found.contradiction


@pytest.mark.parametrize(("words", "new_tokens"), [("texts", 0), ("an array", 4)])
@pytest.mark.parametrize(("alone_s", "is_slowed"), [(0.0002, True), (0.0009, False)])
def test_threads_that_wait_tell_of_a_baseline_that_is_no_part_of_predict(
    words: str, new_tokens: int, alone_s: float, is_slowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a text model's baseline of 300 ms, whose threads wait, gives any winner a speedup of hundreds; or each
    baseline of texts longer than those of predict() counts as slowed down."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    timing = SimpleNamespace(latency_s=[0.3] * 5, new_tokens=new_tokens)
    found = compared({}, 2, alone_s, baseline=SimpleNamespace(timing=lambda rows: timing, timings=()), words=words)
    assert found is not None
    assert bool(found.contradiction) == is_slowed
    assert not is_slowed or "took 1 ms with 2 threads, and 0.2 ms with one" in found.contradiction


@pytest.mark.parametrize(
    ("threads", "alone_s", "device"), [(2, 0.0004, "cpu"), (2, 0.002, "cpu"), (1, 0.0002, "cpu"), (2, 0.0002, "cuda")]
)
def test_what_its_threads_cost_otherwise_is_the_originals_own(
    threads: int, alone_s: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: threads that synchronise, or one thread as the target has it, are taken for a slowed baseline."""
    monkeypatch.setattr("compile_stage.steps.predict.baseline_target", lambda where: where)
    found = compared({}, threads, alone_s, device)
    assert found is not None
    assert (found.speedup, found.slowed_s) == (1.0, None)


def test_calls_on_one_thread_leave_the_process_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: calls that should run on one thread run on all, and what waits is not seen; or those after them don't."""
    torch = pytest.importorskip("torch", reason="PyTorch has threads that are set by a call")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        turns = SimpleNamespace(turn=lambda: float(torch.get_num_threads()))
        monkeypatch.setattr(predict_calls, "_opened", (nullcontext(), turns))
        assert predict_calls.time_predict(one_thread=True) == 1.0
        assert predict_calls.time_predict() == 2.0
    finally:
        torch.set_num_threads(before)
