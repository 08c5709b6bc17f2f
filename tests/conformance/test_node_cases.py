"""A sample of the onnx package's operator cases (`benchmarks/node_cases.py` runs them all), and what judges them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.testing.node_cases import Found, collect, differs, judge, verdict_of

MODULES = (
    "abs", "argmax", "batch_normalization", "clip", "compress", "concat", "conv", "convinteger", "cumsum", "dynamicquantizelinear", "einsum",
    "gather", "gemm", "groupnormalization", "isnan", "layernormalization", "logsoftmax", "lstm", "matmul", "lrn", "mod", "nonmaxsuppression",
    "onehot", "gathernd", "pad", "pow", "quantizelinear", "reducemax", "reducemin", "reshape", "resize", "scatternd", "slice", "topk", "where",
)  # fmt: skip
NAMED = {
    # what a runtime or NumPy can't do, each with what a user is told
    "test_compress_bfloat16": (Found.REFUSED, "is bfloat16, which NumPy has no arrays of"),
    "test_convinteger_with_padding": (Found.CAUGHT, "NothingCompiledError: ONNX Runtime could not run the graph: Non-zero"),
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
    """Every fifth case: a verdict that passed a wrong answer, or an exception that is none of ours, shows here."""
    sample = [case for place, case in enumerate(cases.values()) if place % 5 == 0]
    found = [judge(OnnxRuntime(), case, tmp_path / str(place)) for place, case in enumerate(sample)]
    assert [one for one in found if one.found in (Found.PASSED_WRONG, Found.CRASHED)] == []
    assert sum(one.found is Found.RIGHT for one in found) > len(found) / 2 > 20, "hardly anything was compared"


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_had_is_told_in_words(name: str, cases: dict[str, object], tmp_path: Path) -> None:
    """Types that NumPy lacks, empty tensors, sequences: refused or failed with the reason, never compared as something else."""
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
    """What onnx's own runner calls different fails here too: NaN and infinity elsewhere, text, single numbers, another shape."""
    answer, expected = {"y": np.asarray(own)}, {"y": np.asarray(wanted)}
    assert verdict_of(answer, expected, rtol=1e-3, atol=1e-7).passed is same
    assert (differs(answer, expected, rtol=1e-3, atol=1e-7) is None) is same
