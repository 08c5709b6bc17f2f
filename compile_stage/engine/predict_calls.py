"""The original's predict() in a worker: what it is given, and its calls in turns with those of the published model."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import Compliance, Predictions, SampleSet, SourceModel, Target
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.measure.predict_turns import PredictTurns

_opened: tuple[ExitStack, PredictTurns] | None = None


def describe_predict(source: Any, compliance: Any, signature: Any, predictions: Any = None) -> dict[str, Any]:
    """What the original's predict() is given (`sources.original_predict.describe_input`). Raises SourceError where the
    policy does not let MLflow load it, or samples are not what it takes."""
    from compile_stage.sources import original_predict

    model = revive(SourceModel, source)
    if (reason := original_predict.refuse(model, revive(Compliance, compliance))) is not None:
        raise SourceError(reason, where=model.uri)
    how = original_predict.describe_input(model, revive(Signature, signature), revive(Predictions | None, predictions))
    fills = plugins.load("sources", model.flavor).prediction_format(model).get("fills") if _has_texts(how) else None
    return {**how, "fills": fills} if fills else how


def _has_texts(how: dict[str, Any]) -> bool:
    return how["kind"] == "frame" and any(dtype == "str" for _, dtype in how["columns"])


def open_predict(source: Any, compliance: Any, target: Any, samples: Any, how: Any) -> dict[str, Any]:
    """Load the original's pyfunc and call it until it is warm; it stays open. Returns the seconds of a call (`seconds`)
    and what it answers to some rows (`answers`, as `predict_turns.answer_parts`).

    Args:
        how: From `describe_predict`.
        target: Its threads, its device, and the first of its batch sizes.
    """
    from compile_stage.measure.predict_turns import PredictTurns, answer_parts, build_input
    from compile_stage.measure.samples import open_samples
    from compile_stage.sources import original_predict

    global _opened
    close_predict()
    model, where = revive(SourceModel, source), revive(Target, target)
    with ExitStack() as stack:
        loaded = stack.enter_context(original_predict.open_predict(model, revive(Compliance, compliance), where))
        try:
            inputs = open_samples(revive(SampleSet, samples)).inputs
            rows = where.batch_sizes[0]
            turns = PredictTurns(loaded.predict, build_input(how, inputs, rows))
            answers = answer_parts(loaded.predict, how, inputs, rows, turns.call_s)
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise SourceError(f"its predict() does not take the samples: {said}") from error
        _opened = stack.pop_all(), turns
        return {"seconds": turns.call_s, "answers": answers}
    raise AssertionError("unreachable")


def time_predict(one_thread: bool = False) -> float:
    """Seconds of one call of the open predict().

    Args:
        one_thread: OpenMP, BLAS and PyTorch compute with one thread in it. What has threads of its own keeps them.
    """
    if _opened is None:
        raise SourceError("no predict() is open in this worker")
    from compile_stage.sources.original_predict import limited

    with limited(1) if one_thread else nullcontext():
        return _opened[1].turn()


def close_predict() -> None:
    """Let go of the original's pyfunc."""
    global _opened
    if _opened is not None:
        stack, _opened = _opened[0], None
        stack.close()
