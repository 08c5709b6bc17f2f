"""The onnx package's own cases of single operators, through our steps, and judged by our verdict and by NumPy apart
from it.

A case is a graph of one operator (or the functions that it is made of), its inputs, and the outputs that the standard
wants. It goes the way of a logged model: the ONNX source reads and exports it, the backend refuses or compiles it, its
session answers, and a `Verdict` is made of that answer with the wanted outputs as the baseline. NumPy then compares the
same two as onnx's own test runner does. The two must agree: a verdict that passes what NumPy finds different
(`PASSED_WRONG`) is the one thing that may never be.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json, digest_tree, load_record
from compile_stage.core.errors import CompileStageError, SourceError
from compile_stage.core.ports import Backend
from compile_stage.core.records import (
    Artifact,
    Compliance,
    Gate,
    Outcome,
    PortableModel,
    SourceModel,
    Target,
    Verdict,
    record,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_PACKAGE = "onnx.backend.test.case.node"
_TWO_ULPS_OF_BFLOAT16 = 2**-6
"""The relative tolerance of onnx's own runner for outputs in bfloat16."""


class Found(StrEnum):
    """What became of a case."""

    RIGHT = "right"
    REFUSED = "refused"  # by the source or the backend, with the reason
    CAUGHT = (
        "caught"  # a failing verdict, or an error that is made for people, and the answer is wrong or there is none
    )
    UNPROVEN = "unproven"  # NumPy finds the answer right, and the verdict does not pass
    CRASHED = "crashed"  # an exception that is none of ours; a process that died is for the caller to see
    PASSED_WRONG = "passed wrong"


@record
class Finding:
    """One case on one backend. `reason` is empty when it is right."""

    case: str
    found: Found
    reason: str = ""


def collect(modules: Sequence[str] = ()) -> list[Any]:
    """The cases (`onnx.backend.test.case.test_case.TestCase`), by name: those of these modules of
    `onnx.backend.test.case.node`, which are made once for a process; of all when none is named, which takes ten
    seconds."""
    if modules:
        found = [case for name in modules for case in _cases_of(name)]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some cases are made with what NumPy warns of: log(0), NaN to int
            found = list(importlib.import_module(_PACKAGE).collect_testcases())
    return sorted(found, key=lambda case: str(case.name))


@cache
def _cases_of(module: str) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module(_PACKAGE)
        before = len(package._NodeTestCases)
        importlib.import_module(f"{_PACKAGE}.{module}")  # making its classes makes the cases
    return tuple(package._NodeTestCases[before:])


def judge(backend: Backend, case: Any, folder: Path) -> Finding:
    """What the backend makes of a case; `folder` must be the case's own."""
    name = str(case.name)
    try:
        return _judge(backend, case, folder, name)
    except CompileStageError as error:
        return Finding(case=name, found=Found.CAUGHT, reason=f"{type(error).__name__}: {error.problem}")
    except Exception as error:  # noqa: BLE001 - whatever escapes is what is looked for
        return Finding(case=name, found=Found.CRASHED, reason=_told(error))


def _judge(backend: Backend, case: Any, folder: Path, name: str) -> Finding:
    try:
        model = _export(case, folder)
    except SourceError as error:
        return Finding(case=name, found=Found.REFUSED, reason=f"source: {error.problem}")
    size = model.signature.fixed_batch
    target = Target(name="node-cases", batch_sizes=(size if size is not None else 1,), threads=1)
    if (reason := backend.refuse_target(target) or backend.refuse(model, target)) is not None:
        return Finding(case=name, found=Found.REFUSED, reason=reason)
    scheme = backend.schemes(target, "fp32")[0]
    built = backend.compile(model, scheme, target, f"{name}--{backend.name}", folder / "artifact")
    artifact = load_record(Artifact, canonical_json(built))
    inputs, wanted = case.data_sets[0]
    given = dict(zip((spec.name for spec in model.signature.inputs), map(_array, inputs), strict=False))
    expected = dict(zip((spec.name for spec in model.signature.outputs), map(_array, wanted), strict=True))
    with backend.open(artifact, target.threads) as session:
        answer = session.run(given)
    verdict = verdict_of(answer, expected, rtol=case.rtol, atol=case.atol)
    different = differs(answer, expected, rtol=case.rtol, atol=case.atol)
    if verdict.passed:
        return Finding(case=name, found=Found.PASSED_WRONG if different else Found.RIGHT, reason=different or "")
    said = next(check.reason for check in verdict.checks if check.outcome is not Outcome.PASS)
    return Finding(case=name, found=Found.CAUGHT if different else Found.UNPROVEN, reason=said)


def verdict_of(answer: Batch, expected: Batch, *, rtol: float, atol: float) -> Verdict:
    """The verdict of `steps.validate` on one call, which is one sample: floats within the tolerance, all else equal."""
    from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
    from compile_stage.measure.predict import plain_array

    gates = []
    for name, value in expected.items():
        if value.dtype.name == "bfloat16":
            options = {"rtol": max(rtol, _TWO_ULPS_OF_BFLOAT16), "atol": atol}
        else:
            options = {"rtol": rtol, "atol": atol}
        floats = plain_array(name, value).dtype.kind == "f"
        gates.append(
            Gate(metric="allclose", limit=1.0, direction="at_most", output=name, options=options)
            if floats
            else Gate(metric="agreement", limit=1.0, direction="at_least", output=name)
        )
    found = {name: plain_array(name, np.asarray(value))[None] for name, value in answer.items()}
    baseline = {name: plain_array(name, value)[None] for name, value in expected.items()}
    checks = check_outputs(gates, found, baseline, SINGLE_CALL, batch_size=1, seed=0)
    return Verdict(checks=checks)


def differs(answer: Batch, expected: Batch, *, rtol: float, atol: float) -> str | None:
    """None when NumPy finds the answer equal, as onnx's own test runner asks it: number, shape and type of the outputs,
    then the values."""
    if list(answer) != list(expected):
        return f"the outputs are {list(answer)}, and should be {list(expected)}"
    for name, wanted in expected.items():
        value = answer[name]
        try:
            np.testing.assert_array_equal(value.shape, wanted.shape)
            if wanted.dtype.kind in "OUS":
                np.testing.assert_array_equal(value.astype(str), wanted.astype(str))
                continue
            np.testing.assert_equal(value.dtype, wanted.dtype)
            room = max(rtol, _TWO_ULPS_OF_BFLOAT16) if wanted.dtype.name == "bfloat16" else rtol
            odd = wanted.dtype.kind == "V" or wanted.dtype.name.startswith("float8")  # NumPy can't compute with these
            pair: tuple[Any, Any] = (value.astype(np.float32), wanted.astype(np.float32)) if odd else (value, wanted)
            np.testing.assert_allclose(*pair, rtol=room, atol=atol)
        except AssertionError as error:
            return f"output {name!r}: {' '.join(str(error).split())[:300]}"
    return None


def _export(case: Any, folder: Path) -> PortableModel:
    """The case's graph as the ONNX source exports a logged model."""
    logged = folder / "logged"
    logged.mkdir(parents=True)
    (logged / "model.onnx").write_bytes(case.model.SerializeToString(deterministic=True))
    (logged / "MLmodel").write_text("flavors:\n  onnx: {data: model.onnx}\n", encoding="utf-8")
    source = SourceModel(
        uri=f"folder:{case.name}",
        name=case.name,
        version="1",
        flavor="onnx",
        path=str(logged),
        digest=digest_tree(logged),
    )
    exporter = plugins.load("sources", "onnx")
    if (reason := exporter.refuse(source, Compliance())) is not None:
        raise SourceError(reason)
    return exporter.export(source, {}, folder / "exported")


def _array(value: Any) -> Any:
    """A tensor of a case: some are given as NumPy scalars, some as they are stored."""
    import onnx

    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _told(error: Exception) -> str:
    """The exception, and the place of ours that it came through."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "compile_stage" in code.co_filename and Path(code.co_filename).name != Path(__file__).name:
            place = f"{Path(code.co_filename).name}:{code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__} in {place or sys.modules[__name__].__name__}: {' '.join(str(error).split())[:300]}"
