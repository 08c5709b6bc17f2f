"""`lint` warns of data files that hold too few samples, or no labels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_stage.cli.main import main
from compile_stage.policy.data_files import read_contents
from compile_stage.policy.load import lint

from .conftest import warnings

TARGET = "targets: {t: {}}\n"


def save(path: Path, rows: int) -> Path:
    """`x` and labels `y`, a blank line and a quoted line break among the text where the format has such."""
    if path.suffix == ".npz":
        np.savez(path, x=np.zeros((rows, 3), np.float32), y=np.zeros(rows, np.int64))
    else:
        frame = pd.DataFrame({"x": ["a\nb"] * rows, "y": np.zeros(rows, int)})
        if path.suffix == ".parquet":
            frame.to_parquet(path)
        else:
            path.write_text(frame.to_csv(index=False) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_lint_warns_of_too_few_samples_and_of_absent_labels(write, suffix: str) -> None:
    """Broken: the first who hears of a validation set of 10 samples is the one who waited for the run."""
    file = save(Path(f"val.{suffix}"), 10).resolve()
    path = write(TARGET + f"data: {{min_samples: 11, validation: {{source: 'file:val.{suffix}', labels: truth}}}}")
    assert lint([path]) == []
    assert warnings(path) == [
        f"p.yaml:5:46: data.validation.source: {file} holds 10 samples, fewer than data.min_samples (11), so no "
        "candidate can pass; name a file with more samples",
        f"p.yaml:5:{67 + len(suffix)}: data.validation.labels: {file} has no labels 'truth', so every run is refused; "
        "it has x, y",
    ]
    assert warnings(path, ["data.min_samples=10", "data.validation.labels=y"]) == []


def test_lint_warns_of_what_no_file_can_help(write) -> None:
    """Broken: `max_samples` below `min_samples` lets nothing pass, whatever the data."""
    path = write(TARGET + "data: {min_samples: 50, validation: {source: input_example, max_samples: 49}}")
    says = "49 samples are fewer than data.min_samples (50), so no candidate can pass; a number >= 50"
    assert warnings(path) == [f"p.yaml:5:74: data.validation.max_samples: {says}"]
    (synthetic,) = warnings(path, ["data.validation.source=synthetic"])
    assert "synthetic samples prove nothing" in synthetic
    assert warnings(write(TARGET)) == []


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_lint_says_how_many_samples_the_confidence_of_the_winner_takes(write, suffix: str) -> None:
    """Broken: `confidence_of: winner` with 512 samples refuses most of what is right, and nobody says so before."""
    file = save(Path(f"val.{suffix}"), 999).resolve()
    path = write(
        "targets: {t: {precisions: [int8]}, u: {}}\n"
        f"data: {{validation: {{source: 'file:val.{suffix}', labels: y}}}}\n"
        "select: {confidence_of: winner}"
    )
    refused = (
        "and with fewer than about 1,000 a candidate that holds int8 accuracy is often refused where others miss it; "
        "more samples, a wider limit, or confidence_of: candidate"
    )
    at = "p.yaml:6:25: targets.t.select.confidence_of:"
    assert warnings(path) == [f"{at} 512 samples are taken (max_samples), {refused}"]
    many = "data.validation.max_samples=5000"
    assert warnings(path, [many]) == [f"{at} {file} holds 999 samples, {refused}"]
    assert warnings(path, ["tolerances.int8.accuracy=0.02"]) == []
    assert warnings(path, ["select.confidence_of=candidate"]) == []
    (not_run,) = warnings(path, ["data.validation.max_samples=200"])
    assert "needs at least 299" in not_run, "what is NOT_RUN is said once"
    save(Path(f"val.{suffix}"), 1000)
    assert warnings(path, [many]) == []


def test_lint_warns_of_too_few_samples_for_a_confidence(write) -> None:
    """Broken: who has 298 labelled samples hears after the run that a drop of 0.01 takes 299."""
    file = save(Path("val.npz"), 298).resolve()
    path = write(
        "targets: {t: {precisions: [int8]}}\ndata: {validation: {source: 'file:val.npz', labels: y}, calibration: "
        "{source: synthetic}}"
    )
    (warning,) = warnings(path)
    says = (
        f"{file} holds 298 samples, and int8 accuracy needs at least 299 to be shown at its confidence, so it would be "
        "NOT_RUN"
    )
    assert f"p.yaml:5:29: targets.t.tolerances.int8.accuracy: {says}" in warning
    assert warnings(path, ["tolerances.int8.accuracy={max_drop: 0.02}"]) == []
    assert warnings(path, ["tolerances.int8.accuracy={max_drop: 0.01, confidence: null}"]) == []
    (fewer,) = warnings(path, ["tolerances.int8.accuracy={max_drop: 0.02}", "data.validation.max_samples=100"])
    assert "100 samples are taken (max_samples), and int8 accuracy needs at least 149" in fewer
    (never,) = warnings(path, ["tolerances.int8.accuracy=0"])
    assert "no number of samples shows a drop of at most 0" in never
    save(Path("val.npz"), 299)
    assert warnings(path) == []


def test_of_accuracy_only_the_limit_in_force_is_judged_and_said_once(write) -> None:
    """Broken: a limit that an output's own has taken the place of is said to be NOT_RUN, for the file and once more
    for max_samples."""
    file = save(Path("val.npz"), 298).resolve()
    target = "targets: {t: {precisions: [int8]}}\n"
    data = "data: {validation: {source: 'file:val.npz', labels: y}}\n"
    outputs = "outputs: {y: {accuracy: 0.4}, z: {accuracy: null}}"
    path = write(f"{target}{data}tolerances: {{int8: {{accuracy: {{max_drop: 0.001}}, {outputs}}}}}")
    assert warnings(path) == []
    (warning,) = warnings(path, ["tolerances.int8.outputs.y.accuracy=null"])
    assert (
        f"{file} holds 298 samples, and at most 512 samples are taken (max_samples), and int8 accuracy needs at least "
        "2995 " in warning
    )


def test_lint_warns_of_too_few_prompts_for_the_same_tokens(write) -> None:
    """Broken: who asks for 99 % of the same tokens with a confidence hears after the run that it takes 299 prompts; or
    is told of the few texts of a file, each of which is many prompts."""
    np.savez("ids.npz", input_ids=np.zeros((298, 96), np.int64))
    path = write(
        "targets: {t: {precisions: [int8]}}\ndata: {validation: {source: 'file:ids.npz'}}\n"
        "tolerances: {int8: {token_top1_agreement: {limit: 0.99, confidence: 0.95}}}"
    )
    (warning,) = warnings(path)
    says = (
        f"p.yaml:6:43: targets.t.tolerances.int8.token_top1_agreement: {Path('ids.npz').resolve()} holds 298 prompts, "
        "and int8 token_top1_agreement needs at least 299 to be shown at its confidence where fewer than 10 prompts "
        "change, so it would be NOT_RUN; more prompts, a wider limit, or confidence: null"
    )
    assert warning == says
    assert warnings(path, ["tolerances.int8.token_top1_agreement.limit=0.98"]) == []
    assert warnings(path, ["tolerances.int8.token_top1_agreement.confidence=null"]) == []
    (never,) = warnings(path, ["tolerances.int8.token_top1_agreement.limit=1"])
    assert "no number of prompts shows that all tokens are the same" in never
    assert "a limit below 1" in never
    (of_fp32,) = warnings(path, ["tolerances.int8=null", "tolerances.fp32.token_accuracy=0.01"])
    assert "fp32 token_accuracy needs at least 299" in of_fp32, "fp32 is tried whether or not it is named"

    pd.DataFrame({"text": ["many tokens"] * 10}).to_csv("texts.csv", index=False)
    texts = "data.validation.source=file:texts.csv"
    assert warnings(path, [texts]) == []
    (fewer,) = warnings(path, [texts, "data.validation.max_samples=200"])
    assert "200 prompts are taken (max_samples), and int8 token_top1_agreement needs at least 299" in fewer


def test_lint_warns_of_groups_that_are_not_there(write) -> None:
    """Broken: the first who hears that the column is called otherwise is the one who waited for the run."""
    save(Path("val.npz"), 40)
    path = write(TARGET + "data: {groups: patient, validation: {source: 'file:val.npz'}}")
    (warning,) = warnings(path)
    assert warning.startswith("p.yaml:5:16: data.groups: ")
    assert warning.endswith("has no groups 'patient', so every run is refused; it has x, y")
    assert warnings(path, ["data.groups=x"]) == []


def test_a_file_that_is_not_what_its_name_says_is_a_warning(write) -> None:
    """Broken: a broken file ends lint with a traceback."""
    for name in ("a.npz", "b.parquet", "c.csv"):
        Path(name).write_bytes(b"\xff\xfe nothing")
        path = write(TARGET + f"data: {{validation: {{source: 'file:{name}'}}}}")
        (warning,) = warnings(path)
        assert "can't be read" in warning


def test_without_pyarrow_lint_says_what_to_install(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the run says it, an hour later and on another machine."""
    save(Path("val.parquet"), 40)
    path = write(TARGET + "data: {validation: {source: 'file:val.parquet'}}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (warning,) = warnings(path)
    assert warning.endswith('pyarrow, which is not installed here; pip install "compile-stage[parquet]"')


def test_the_command_prints_a_warning_and_ends_with_0(write, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: CI fails, or hears nothing, for data that another machine may have whole."""
    save(Path("val.npz"), 10)
    path = write(TARGET + "data: {validation: {source: 'file:val.npz'}}")
    with pytest.raises(SystemExit) as caught:
        main(["lint", str(path)])
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert "p.yaml: ok" in shown.out
    assert shown.err.startswith("warning: p.yaml:5:")


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), version=st.sampled_from([(1, 0), (2, 0)]), width=st.integers(0, 3))
def test_rows_and_names_of_an_npz_are_numpys(tmp_path: Path, rows: int, version: tuple[int, int], width: int) -> None:
    """Headers are read by hand; NumPy decides whether rightly."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("é.npy", "w") as stream:
        np.lib.format.write_array(stream, np.zeros((rows, *[2] * width)), version=version)
    contents = read_contents(tmp_path / "a.npz", 5)
    with np.load(tmp_path / "a.npz") as arrays:
        assert contents.names == tuple(arrays.files)
        assert contents.rows == len(arrays["é"])
