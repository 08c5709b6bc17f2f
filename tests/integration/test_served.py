"""An alias moves to what MLflow loads in a new process, with the code that the model carries, and answers as what was
proven."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core import run_context
from compile_stage.core.context import Context
from compile_stage.core.environment import hardware
from compile_stage.core.errors import GateError
from compile_stage.core.records import FetchedVersion, RunResult
from compile_stage.serving import saving
from compile_stage.serving.vendoring import copy_modules
from compile_stage.steps import serve

pytestmark = [
    pytest.mark.usefixtures("known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}\n"
    'promote: {alias: "{target}-prod"}'
)
Write = Callable[..., Path]


def run_with(
    change: Callable[[Path], object],
    small_model: Path,
    write_policy: Write,
    monkeypatch: pytest.MonkeyPatch,
    *,
    body: str = BODY,
    only_packaged: bool = True,
) -> RunResult:
    """A run whose models carry the loader changed; digests are made of what is there, so that all of them hold.

    Args:
        only_packaged: What is measured has it unchanged, as if it had been replaced during the run.
    """

    def copy(modules: Iterable[str], into: Path) -> None:
        copy_modules(modules, into)
        if not (only_packaged and "loaders" in into.parts):
            change(into)

    monkeypatch.setattr(saving, "copy_modules", copy)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", body)
    return api.run(f"folder:{small_model}", policy, out=policy.parent / "out")


def replace_run(code: Path, run: str) -> None:
    """Put another statement in place of the one that runs the session, in the loader below `code`."""
    file = code / "flavor.py"
    honest = "outputs: Batch = self._opened().run(batch)"
    assert honest in file.read_text()
    file.write_text(file.read_text().replace(honest, run))


def negate(code: Path) -> None:
    """All answers with the other sign."""
    replace_run(code, "return {n: -v for n, v in self._opened().run(batch).items()}")


def sleep(code: Path) -> None:
    """Each call takes 5 ms more."""
    replace_run(code, "import time; time.sleep(0.005); return self._opened().run(batch)")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda code: (code / "serving" / "prediction_io.py").unlink(),
            "serving can't load it: ModuleNotFoundError: No module named 'compile_stage.serving.prediction_io'",
        ),
        (negate, "answered differently while it was timed"),
        (sleep, "times the baseline's speed"),
    ],
    ids=["missing", "wrong", "slow"],
)
def test_a_loader_that_is_broken_is_seen_when_the_candidate_is_measured(
    change: Callable[[Path], object],
    reason: str,
    small_model: Path,
    write_policy: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: what is measured was opened by the installed package, and what is published carries a loader that can't
    open it, is wrong or is slow: it won, and was published."""
    body = BODY.replace("min_speedup: null", "min_speedup: 0.3")
    result = run_with(change, small_model, write_policy, monkeypatch, body=body, only_packaged=False)
    assert result.exit_code == 3
    (target,) = result.targets
    assert target.receipt is None
    (candidate,) = target.candidates
    assert reason in candidate.reason, candidate.reason


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_what_serving_can_not_load_is_not_promoted(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a model whose loader lacks a module was published, promoted and verified, and loaded nowhere."""
    result = run_with(
        lambda code: (code / "serving" / "prediction_io.py").unlink(), small_model, write_policy, monkeypatch
    )
    assert result.exit_code == 3
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to is None
    assert "serving can't load it: ModuleNotFoundError: No module named 'compile_stage.serving.prediction_io'" in (
        result.problem
    )
    with pytest.raises(GateError, match="serving can't load it"):
        api.promote(receipt.uri, "by-hand")
    assert not (Path(receipt.uri.removeprefix("folder:")).parent / "aliases.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_what_answers_otherwise_in_serving_is_not_promoted(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: what is proven is opened by this installation, and what is served by the code in the model; nobody would
    see that they differ."""
    result = run_with(negate, small_model, write_policy, monkeypatch)
    assert result.exit_code == 3
    assert "answers otherwise when MLflow loads it: output 'y' is off by" in result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    with pytest.raises(GateError, match="answers otherwise when MLflow loads it: output 'y' is off by"):
        api.promote(receipt.uri, "by-hand")
    (tmp_path / "data.npz").unlink()  # a machine that has no samples
    with pytest.raises(GateError, match="answers otherwise when MLflow loads it"):
        api.promote(receipt.uri, "by-hand")


@pytest.mark.usefixtures("known_run")
@pytest.mark.parametrize("kills", [1, 2])
def test_what_somebody_killed_while_it_was_loaded_is_loaded_once_more(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Broken: after somebody's kill -9 a run says that serving can't load what it published, and fails; or who kills
    itself is loaded for ever."""
    answers, killed = serve._answers, []

    def kill_first(worker: Any, *given: Any) -> Any:
        if len(killed) < kills:
            killed.append(worker._started().pid)
            os.kill(killed[-1], signal.SIGKILL)
        return answers(worker, *given)

    monkeypatch.setattr(serve, "_answers", kill_first)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out")
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert (len(killed), result.exit_code, receipt.promoted_to) == (kills, *((0, "cpu-prod"), (3, None))[kills - 1])


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_the_very_files_are_loaded_once_and_others_anew(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: each run that finds all in the cache would pay for loading MLflow, or what was looked at in one version
    would be believed of another with other files."""
    looked: list[str] = []
    look = serve._looked_at

    def looked_at(context: Context, version: FetchedVersion, *given: Any) -> str:
        looked.append(version.uri)
        return look(context, version, *given)

    monkeypatch.setattr(serve, "_looked_at", looked_at)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    for _ in range(2):
        result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out")
        receipt = result.targets[0].receipt
        assert receipt is not None
        assert receipt.promoted_to == "cpu-prod"
        assert looked == [receipt.uri]
    body = f'{BODY}\npublish: {{name: "another"}}'  # the same artifact, samples and machine, and one other file
    broken = run_with(negate, small_model, write_policy, monkeypatch, body=body)
    assert "answers otherwise when MLflow loads it: output 'y' is off by" in broken.problem
    assert len(looked) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_promoting_by_hand_says_what_the_answers_were_compared_on(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: whoever promotes could not tell a comparison from none."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", promote=False)
    receipt = result.targets[0].receipt
    assert receipt is not None
    there = "MLflow loads it in a new process, and it answers a batch of {} samples there as the proven artifact"
    assert api.promote(receipt.uri, "by-hand").note == there.format("validation")
    (tmp_path / "data.npz").unlink()
    note = api.promote(receipt.uri, "by-hand").note
    assert note.startswith(f"{there.format('synthetic')}; the validation samples can't be had here: ")
    assert "data.npz" in note


@pytest.mark.slow
def test_what_nobody_could_load_is_promoted_by_name_of_the_option_only(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: from a machine that can't run the model, any version was promoted unseen."""
    device = hardware()
    target = f"backends: [onnxruntime], precisions: [fp32], hardware: {{fingerprint: {device.fingerprint}}}"
    result = api.run(f"folder:{small_model}", write_policy(target, BODY), out=tmp_path / "out", promote=False)
    receipt = result.targets[0].receipt
    assert receipt is not None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(device, cpu="a laptop's"))
        with pytest.raises(GateError, match="whether serving loads it can't be known: this machine is not what") as no:
            api.promote(receipt.uri, "by-hand")
        assert f"compile-stage validate {receipt.uri}" in no.value.fix
        assert api.promote(receipt.uri, "unseen", serve_check=False).note == "it was not loaded, as the option says"
    assert api.validate(receipt.uri).passed  # as the advice says
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(device, cpu="a laptop's"))
        promoted = api.promote(receipt.uri, "by-hand")
    assert promoted.note == f"it was loaded where it was validated, on {device.fingerprint}"


@pytest.mark.usefixtures("fake_backends")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (negate, "answers otherwise when MLflow loads it"),
        pytest.param(
            lambda code: (code / "serving" / "prediction_io.py").unlink(),
            "serving can't load it: ModuleNotFoundError",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["wrong", "missing"],
)
def test_a_validation_elsewhere_loads_the_version_too(
    change: Callable[[Path], object],
    says: str,
    small_model: Path,
    write_policy: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: what was compiled for other hardware was validated by this installation, and served by what it carries:
    it could be promoted, and load nowhere."""
    device = hardware()
    target = f"backends: [fake-cross], precisions: [fp32], hardware: {{fingerprint: {device.fingerprint}}}"
    real = copy_modules

    def copy(modules: Iterable[str], into: Path) -> None:
        real(modules, into)
        change(into)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(saving, "copy_modules", copy)
        elsewhere.setattr(run_context, "hardware", lambda: replace(device, cpu="a build machine's"))
        result = api.run(f"folder:{small_model}", write_policy(target, BODY), out=small_model.parent / "out")
    (draft,) = result.targets[0].unvalidated
    assert draft.receipt is not None
    found = api.validate(draft.receipt.uri)
    assert not found.passed
    failed = [check for check in found.checks if check.outcome != "pass"]
    assert [check.gate.metric for check in failed] == ["served"]
    assert says in failed[0].reason
    with pytest.raises(GateError, match="no validation is attached to it that passed"):
        api.promote(draft.receipt.uri, "edge")


@pytest.mark.usefixtures("known_run")
def test_the_copy_is_loaded_where_cache_and_source_are_hidden(
    small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: a model that reads what lies on the machine that made it would load there, and nowhere else."""
    from compile_stage.engine.confinement import hands_files_over

    if not hands_files_over():
        pytest.skip("this kernel has no Landlock, so files can't be hidden")
    secret = tmp_path / "beside.txt"
    secret.write_text("here")

    def read(code: Path) -> None:
        file = code / "flavor.py"
        file.write_text(f"{file.read_text()}\nPath({str(secret)!r}).read_text()\n")

    result = run_with(read, small_model, write_policy, monkeypatch)
    assert result.exit_code == 3
    assert "PermissionError" in result.problem
