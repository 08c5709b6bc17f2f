"""`init`: a first policy that is valid, says what was found, and can be run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_lms
from small_net import write_small_net

from compile_stage import api
from compile_stage.cli.main import main
from compile_stage.core.errors import UsageError
from compile_stage.policy.load import findings, load_policy

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x [batch, 8], from 64 samples of `data.npz` beside it, which has nothing but `x`."""
    folder = tmp_path_factory.mktemp("first")
    write_small_net(folder)
    return folder / "small-net"


def test_a_file_of_samples_becomes_a_policy_that_plans(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the first thing that a user sees is a policy with mistakes, that names another file (its path is relative
    to the policy, not to the shell), or whose labels are taken for an input; or a command that no shell takes."""
    held = dict(np.load(model.parent / "data.npz"))
    samples = len(held["x"])
    np.savez(tmp_path / "samples.npz", x=held["x"], classes=np.zeros(samples, np.int64))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["init", f"folder:{model}", "--data", "samples.npz", "-o", "my policies/first.yaml", "--name", "on"])
    assert left.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.endswith(f"next: compile-stage run folder:{model} -p 'my policies/first.yaml'\n")

    file = tmp_path / "my policies" / "first.yaml"
    text = file.read_text(encoding="utf-8")
    assert "# inputs: x: float32[batch, 8]" in text
    assert [found.message for found in findings(file) if found.level == "error"] == []
    policy = load_policy(file)
    assert (policy.name, policy.data.validation.labels) == ("on", "classes")  # `on` is a text, not YAML's true
    assert policy.applies_to.names == ("small-net",)
    plan = api.plan(f"folder:{model}", file)
    assert plan.exit_code == 0, plan.problem
    assert {job.backend for job in plan.jobs} <= {"onnxruntime", "openvino"}


def test_more_samples_than_a_run_takes_are_said_to_be_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the policy says "600 samples", and the run's report 512."""
    monkeypatch.chdir(tmp_path)
    np.savez("many.npz", x=np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32))
    text = api.init(f"folder:{model}", data="many.npz")
    Path("many.yaml").write_text(text, encoding="utf-8")
    data = load_policy("many.yaml").data
    for taken in (data.validation.max_samples, data.calibration.max_samples):  # the shipped defaults, as is said
        assert f"# 600 samples, of which {taken} are taken: max_samples takes more" in text


def test_a_language_model_is_offered_weights_in_four_and_eight_bits(tmp_path: Path) -> None:
    """Broken: the first policy of a language model tries static int8, which gains nothing for single tokens, and not
    the precisions that read fewer bytes of weights at each."""
    path = small_lms.save(tmp_path / "model", "llama")
    assert "precisions: [int4, int8-dynamic, bf16, fp32]" in api.init(f"folder:{path}")


def test_without_samples_the_policy_says_what_is_missing(model: Path) -> None:
    """Broken: `init` gives a policy that can never pass, and does not say why."""
    text = api.init(f"folder:{model}")
    assert 'validation: {source: "input_example"}' in text
    assert "A proof needs 32 real samples or" in text


def test_a_policy_that_plan_refuses_is_not_said_to_run_next(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: `init` says that a run is next, and the run ends with 3."""
    held = dict(np.load(model.parent / "data.npz"))
    np.savez(tmp_path / "few.npz", x=held["x"][:9])
    with pytest.raises(SystemExit) as left:
        main(["init", f"folder:{model}", "--data", str(tmp_path / "few.npz"), "-o", str(tmp_path / "p.yaml")])
    assert left.value.code == 0
    shown = capsys.readouterr()
    assert "warning: a run would fail: required target 'cpu' can have no winner: there are 9 validation" in shown.err
    plan = f"compile-stage plan folder:{model} -p {tmp_path / 'p.yaml'}\n"
    assert shown.out.endswith(f"next: change {tmp_path / 'p.yaml'} until this ends with 0: {plan}")


def test_a_file_that_is_there_is_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a policy that somebody wrote is lost."""
    mine = tmp_path / "policy.yaml"
    mine.write_text("mine")
    with pytest.raises(SystemExit) as left:
        main(["init", f"folder:{model}", "-o", str(mine)])
    assert left.value.code == 2
    assert "is there already" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(("name", "says"), [("absent.npz", "can't be read"), ("data.txt", "is no file of samples")])
def test_samples_that_can_not_be_read_are_named(model: Path, tmp_path: Path, name: str, says: str) -> None:
    """Broken: a traceback of NumPy's."""
    (tmp_path / "data.txt").write_text("1 2 3")
    with pytest.raises(UsageError, match=says):
        api.init(f"folder:{model}", data=tmp_path / name)


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"x": np.zeros((64, 12), np.float32)}, "12"),
        ({"a": np.zeros((64, 8), np.float32), "b": np.zeros((64, 8), np.float32), "y": np.zeros(64)}, "no array for"),
    ],
    ids=["another size", "another name"],
)
def test_samples_that_do_not_fit_the_model_make_no_policy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: dict[str, np.ndarray], says: str
) -> None:
    """Broken: `init` writes a policy that every plan refuses, and says that a run is next."""
    np.savez(tmp_path / "other.npz", **held)
    with pytest.raises(SystemExit) as left:
        main(["init", f"folder:{model}", "--data", str(tmp_path / "other.npz"), "-o", str(tmp_path / "p.yaml")])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "its samples do not fit the model" in shown
    assert says in shown
    assert not (tmp_path / "p.yaml").exists()


def test_labels_that_the_file_lacks_are_named(model: Path) -> None:
    """Broken: the policy names labels that no run finds."""
    with pytest.raises(UsageError, match="has no 'target'") as caught:
        api.init(f"folder:{model}", data=model.parent / "data.npz", labels="target")
    assert caught.value.fix.startswith("it has ")
