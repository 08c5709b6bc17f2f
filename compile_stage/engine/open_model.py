"""The model that is open in a worker, and all that is asked of it: answers, calls, turns of a measurement.

At most one model is open in a worker: opening another closes the one before, so that a process's peak memory is one
model's. What is imported here is there on a device too (`compile_stage.devices`): numpy, the standard library, and no
package of the stage's own installation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.records import SampleSet, ShapeRange
from compile_stage.engine.fresh_load import run_batch
from compile_stage.engine.served import open_as_served

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.measure.timed_session import TimedSession

_opened: tuple[ExitStack, Session] | None = None
_timed_session: TimedSession | None = None  # the open one


def open_served(model: Any) -> dict[str, Any]:
    """Open a model by the loader that it carries (`engine.served`); it stays open until another is opened.

    Args:
        model: `{"path": ...}`, its directory.
    """
    return open_model(lambda: open_as_served(Path(model["path"])))


def predict(samples: Any, batch_size: int, into: str) -> dict[str, str]:
    """Run the open model over all samples; output name → `.npy` file below `into`, axis 0 being the sample."""
    from compile_stage.measure.predict import predict as run_all
    from compile_stage.measure.samples import open_samples

    written = run_all(open_session(), open_samples(revive(SampleSet, samples)), batch_size, Path(into))
    return {name: str(path) for name, path in written.items()}


def predict_corners(
    samples: Any, shapes: Any, batch_sizes: list[int], into: str, labels: list[str] | None = None
) -> list[dict[str, Any]]:
    """Run the open model at the smallest and largest shapes that the policy promises, and between them.

    Args:
        labels: Only those; None for the original, which may refuse a shape in between.

    Returns one `{"label", "outputs": {name: file}}` for each that differs from the samples' own shape, and from the
    others.
    """
    import numpy as np

    from compile_stage.measure.corners import BETWEEN, CORNERS, corner_batches
    from compile_stage.measure.predict import plain_array
    from compile_stage.measure.samples import open_samples

    session, found = open_session(), []
    wanted = revive(Mapping[str, ShapeRange], shapes)
    corners = corner_batches(
        open_samples(revive(SampleSet, samples)), session.signature, wanted, batch_sizes, (*CORNERS, *BETWEEN)
    )
    for number, (label, batch) in enumerate(corners):
        if labels is not None and label not in labels:
            continue
        try:
            answers = session.run(batch)
        except Exception:
            if labels is None and label.startswith(BETWEEN):
                continue  # whatever the original's framework says of a shape that its network does not take
            raise
        outputs = {}
        for position, (name, array) in enumerate(answers.items()):
            path = Path(into) / f"corner-{number}-{position}.npy"
            np.save(path, plain_array(name, np.asarray(array)), allow_pickle=False)
            outputs[name] = str(path)
        found.append({"label": label, "outputs": outputs})
    return found


def make_calls(samples: Any, calls: list[Any], into: str) -> dict[str, Any]:
    """How the open model behaves from call to call (`measure.behaviour`); its answers are below `into`.

    Args:
        calls: `{"check", "rows"}` each: the numbers of the samples that make up the batch; with `parts`, it is run in
            batches of these sizes.
    """
    from compile_stage.measure.behaviour import make_calls as make
    from compile_stage.measure.samples import open_samples

    return make(open_session(), open_samples(revive(SampleSet, samples)), calls, Path(into))


def find_refused_missing(samples: Any, batch_size: int) -> list[dict[str, Any]]:
    """Where the open model refuses a NaN (`measure.missing`)."""
    from compile_stage.measure.missing import find_refused
    from compile_stage.measure.samples import open_samples

    return find_refused(open_session(), open_samples(revive(SampleSet, samples)), batch_size)


def soak(samples: Any, batch_size: int, seconds: float, seed: int, into: str, in_order: bool = False) -> dict[str, Any]:
    """Call the open model for about `seconds`; some of the answers are kept below `into` (`measure.soak`)."""
    from compile_stage.measure.samples import open_samples
    from compile_stage.measure.soak import run_soak

    opened = open_samples(revive(SampleSet, samples))
    return run_soak(open_session(), opened, batch_size, seconds, seed, Path(into), in_order=in_order)


def predict_batch(samples: Any, batch_size: int, into: str) -> dict[str, str]:
    """Run the open model on the first batch of the samples; output name → `.npy` file below `into`."""
    return run_batch(open_session(), samples, batch_size, Path(into))


def warm_up(samples: Any, batch_size: int, seconds: float) -> dict[str, Any]:
    """Run the open model at one batch size until it is steady (at most `seconds`); says how many calls it took."""
    return _timed().warm_up(revive(SampleSet, samples), batch_size, seconds)


def quick_turn(samples: Any, batch_size: int, seconds: float) -> list[float]:
    """Seconds of each call for about `seconds`, at least one: an idea, no measurement."""
    return _timed().quick_turn(revive(SampleSet, samples), batch_size, seconds)


def prepare_turn(samples: Any, batch_size: int, calls: int, seed: int, checked_seed: int | None) -> int:
    """Make the inputs of one turn of an interleaved measurement; says how many calls will be timed."""
    return _timed().prepare(revive(SampleSet, samples), batch_size, calls, seed, checked_seed)


def call_untimed(seconds: float) -> None:
    """The calls of the prepared turn that are not timed, just before those that are, for at most about `seconds`."""
    _timed().call_untimed(seconds)


def time_turn(seconds: float) -> list[float]:
    """Seconds of each call of the prepared turn, for at most about `seconds`."""
    return _timed().run(seconds)


def first_tokens(into: str | None) -> dict[str, Any]:
    """Of a language model's turn: seconds of each call for its first token alone, and the answers that were kept."""
    return _timed().first_tokens(Path(into) if into else None)


def end_turn(into: str | None) -> list[dict[str, str]]:
    """Write the answers that were kept into the folder, and come to rest; one `{output: file}` for each checked
    batch."""
    return _timed().end(Path(into) if into else None)


def open_model(opener: Callable[[], Any]) -> dict[str, Any]:
    """Open a model in place of the one that is open; `opener` gives the context of its session."""
    global _opened
    close_model()
    stack = ExitStack()
    began = time.perf_counter()
    session = stack.enter_context(opener())
    load_s = time.perf_counter() - began
    _opened = (stack, session)
    writes_tokens = getattr(session, "first", None) is not None
    return {"load_s": load_s, "signature": session.signature, "writes_tokens": writes_tokens}


def close_model() -> None:
    """Close what is open; nothing where nothing is."""
    global _opened, _timed_session
    _timed_session = None
    if _opened is not None:
        stack, _opened = _opened[0], None
        stack.close()


def open_session() -> Session:
    """What is open. Raises UsageError where nothing is."""
    if _opened is None:
        raise UsageError("no model is open in this worker")
    return _opened[1]


def _timed() -> TimedSession:
    from compile_stage.measure.timed_session import TimedSession

    global _timed_session
    if _timed_session is None:
        _timed_session = TimedSession(open_session())
    return _timed_session
