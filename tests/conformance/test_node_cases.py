"""A sample of the onnx package's operator cases (`benchmarks/node_cases.py` runs them all), and what judges them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.records import Artifact
from compile_stage.testing.node_cases import Found, collect, differs, judge, verdict_of

MODULES = (
    "abs", "argmax", "batch_normalization", "clip", "compress", "concat", "conv", "convinteger", "cumsum",
    "dynamicquantizelinear", "einsum", "gather", "gemm", "groupnormalization", "isnan", "layernormalization",
    "logsoftmax", "lstm", "matmul", "lrn", "mod", "nonmaxsuppression", "onehot", "gathernd", "pad", "pow",
    "quantizelinear", "reducemax", "reducemin", "reshape", "resize", "scatternd", "slice", "topk", "where",
)  # fmt: skip
NAMED = {
    # what a runtime or NumPy can't do, each with what a user is told
    "test_compress_bfloat16": (Found.REFUSED, "is bfloat16, which NumPy has no arrays of"),
    "test_convinteger_with_padding": (Found.REFUSED, "each sample has its own part of every input, along axis 0"),
    "test_quantizelinear_e4m3fn": (Found.REFUSED, "is float8_e4m3fn"),
    "test_quantizelinear_int4": (Found.REFUSED, "is int4"),
    "test_reduce_max_empty_set": (Found.CAUGHT, "input 'data' is empty"),
    "test_slice_start_out_of_bounds": (Found.UNPROVEN, "there is nothing to compare"),
    "test_sequence_insert_at_back": (Found.REFUSED, "is no tensor (a sequence or a map), which no backend takes"),
    "test_string_concat": (Found.RIGHT, ""),
    "test_isnan": (Found.RIGHT, ""),
    "test_reduce_max_default_axes_keepdim_example": (Found.RIGHT, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> dict[str, object]:
    return {case.name: case for case in collect((*MODULES, "sequenceinsert", "string_concat", "bitshift"))}


def test_no_verdict_passes_what_numpy_finds_different(cases: dict[str, object], tmp_path: Path) -> None:
    """Every seventh case: a verdict that passed a wrong answer, or an exception that is none of ours, shows here."""
    sample = [case for place, case in enumerate(cases.values()) if place % 7 == 0]
    found = [judge(OnnxRuntime(), case, tmp_path / str(place)) for place, case in enumerate(sample)]
    assert [one for one in found if one.found in (Found.PASSED_WRONG, Found.CRASHED)] == []
    assert sum(one.found is Found.RIGHT for one in found) > len(found) / 2 > 20, "hardly anything was compared"


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_had_is_told_in_words(name: str, cases: dict[str, object], tmp_path: Path) -> None:
    """Types that NumPy lacks, empty tensors, sequences: refused or failed with the reason, never compared as something
    else."""
    finding = judge(OnnxRuntime(), cases[name], tmp_path)
    wanted, said = NAMED[name]
    assert finding.found is wanted, finding
    assert said in finding.reason


def test_an_operator_set_that_is_too_new_is_told_without_paths(cases: dict[str, object], tmp_path: Path) -> None:
    """The runtime's own words name its source files and our scratch folder, and not what to do."""
    finding = judge(OnnxRuntime(), cases["test_bitshift_left_int32"], tmp_path)
    if finding.found is Found.RIGHT:
        pytest.skip("this ONNX Runtime knows the newest operator set of this onnx")
    assert "export it with an older one" in finding.reason
    assert "/" not in finding.reason


@pytest.mark.parametrize(
    ("own", "wanted", "same"),
    [
        ([1.0, np.nan], [1.0, np.nan], True),
        ([np.nan, 1.0], [1.0, np.nan], False),
        ([np.inf, 1.0], [np.inf, 1.0], True),
        ([-np.inf, 1.0], [np.inf, 1.0], False),
        ([1.0005, 2.0], [1.0, 2.0], True),
        ([1.002, 2.0], [1.0, 2.0], False),
        ([1e-5, 2.0], [0.0, 2.0], False),
        ([1, 2], [1, 3], False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
        (3.0, 3.0, True),
        (3.0, 3.1, False),
        ([[1.0, 2.0]], [1.0, 2.0], False),
    ],
)
def test_verdict_and_numpy_agree(own: object, wanted: object, same: bool) -> None:
    """What onnx's own runner calls different fails here too: NaN and infinity elsewhere, text, single numbers, another
    shape."""
    answer, expected = {"y": np.asarray(own)}, {"y": np.asarray(wanted)}
    assert verdict_of(answer, expected, rtol=1e-3, atol=1e-7).passed is same
    assert (differs(answer, expected, rtol=1e-3, atol=1e-7) is None) is same


class Liar(OnnxRuntime):
    """Its sessions answer with every float a hundredth too large."""

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Any]:
        with super().open(artifact, threads) as session:
            run = session.run
            session.run = lambda batch: {  # type: ignore[method-assign]
                name: value * value.dtype.type(1.01) if value.dtype.kind == "f" else value
                for name, value in run(batch).items()
            }
            yield session


@pytest.mark.parametrize("name", ["test_matmul_2d", "test_layer_normalization_2d_axis0", "test_gemm_all_attributes"])
def test_wrong_answers_are_caught(name: str, cases: dict[str, object], tmp_path: Path) -> None:
    """If nothing were compared, every backend would be right in every case."""
    assert judge(OnnxRuntime(), cases[name], tmp_path / "honest").found is Found.RIGHT
    assert judge(Liar(), cases[name], tmp_path / "liar").found is Found.CAUGHT


_RUN = """
import importlib.util, json, os, sys
from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.testing.node_cases import collect
spec = importlib.util.spec_from_file_location("node_cases", sys.argv[1])
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
cases = [case for case in collect(("abs", "add")) if "int" not in case.name]

class Fragile(OnnxRuntime):
    def compile(self, model, scheme, target, job_id, *rest, **more):
        if job_id.startswith(cases[1].name + "--"):
            os.kill(os.getpid(), 11)
        return super().compile(model, scheme, target, job_id, *rest, **more)

load = benchmark.plugins.load
benchmark.plugins.load = lambda group, name: Fragile() if group == "backends" else load(group, name)
kept = []
found = benchmark.run("fragile", cases, kept.append)
assert kept == found
print(json.dumps([[one.case, one.found, one.reason] for one in found]))
print(json.dumps([case.name for case in cases]))
"""


def test_a_case_that_ends_the_process_is_counted_and_the_rest_go_on() -> None:
    """A crash must cost one case and be named, not end the table or go missing from it."""
    script = Path(__file__).parents[2] / "benchmarks" / "node_cases.py"
    done = subprocess.run([sys.executable, "-c", _RUN, str(script)], capture_output=True, text=True, check=True)
    found, names = map(json.loads, done.stdout.splitlines())
    assert [case for case, _, _ in found] == names
    assert [kind for _, kind, _ in found] == ["right", "crashed", *["right"] * (len(names) - 2)]
    assert found[1][2] == "the process ended with signal 11"
