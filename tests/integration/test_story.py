"""What holds over the whole of a run, whichever step is concerned."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from compile_stage import api
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.errors import EXIT_NOTHING_COMPILED, EXIT_SOURCE, RegistryError, SourceError, StorageError
from compile_stage.core.events import Silent
from compile_stage.core.records import RunResult, TargetResult
from compile_stage.pipeline import run as pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# With "backends: [onnxruntime], precisions: [fp32]" it is the policy of `known_run`.
FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}"


@pytest.mark.slow
def test_a_publication_does_not_depend_on_which_other_targets_ran(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: `-t cpu` after a run of all targets, one of which calibrates, would publish the same thing a second
    time."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32]",
        "  small: {device: cpu, threads: 1, required: false, backends: [onnxruntime], precisions: [int8]}\n" + FAST,
    )
    uri = f"folder:{small_model}"
    every = api.run(uri, policy, out=tmp_path / "every")
    alone = api.run(uri, policy, out=tmp_path / "alone", targets=["cpu"])
    (cpu,) = (target for target in every.targets if target.policy.target.name == "cpu")
    assert cpu.receipt is not None
    assert cpu.receipt.created
    assert cpu.receipt.uri == alone.targets[0].receipt.uri  # type: ignore[union-attr]
    assert not alone.targets[0].receipt.created  # type: ignore[union-attr]
    assert set(every.samples) == {"validation", "calibration"}
    assert set(cpu.samples) == {"validation"}


@pytest.fixture
def pickled_model(tmp_path: Path) -> Path:
    """A scikit-learn model as a pickle, which says so when it is loaded."""
    import mlflow
    from sklearn.linear_model import LinearRegression

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 8)).astype(np.float32)
    folder = tmp_path / "pickled"
    mlflow.sklearn.save_model(
        LinearRegression().fit(rows, rows.sum(axis=1)),
        str(folder),
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],  # else MLflow loads the model in another process to find out
    )
    np.savez(tmp_path / "data.npz", X=rows)
    return folder


def test_a_refused_source_is_reported(pickled_model: Path, write_policy: Callable[..., Path], tmp_path: Path) -> None:
    """Broken: a CI job would find neither result.json nor junit.xml for the model that was refused."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    result = api.run(f"folder:{pickled_model}", policy, out=tmp_path / "out")
    assert (result.status, result.exit_code) == ("refused", EXIT_SOURCE)
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["status"] == "refused"
    assert "pickle" in written["problem"]
    assert (tmp_path / "out" / "junit.xml").is_file()


def test_what_refused_every_job_is_how_the_run_ended(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: who runs quietly, or reads only `problem`, would not learn what to install or to change."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32], hardware: {machine: vax}", FAST)
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == EXIT_NOTHING_COMPILED
    assert "every job was refused before it ran: the target wants machine 'vax'" in result.problem


@pytest.mark.usefixtures("known_run")
def test_a_publication_that_fails_is_in_the_files(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: result.json would say `passed` and 0 of a run that left with 4, and a CI job that reads it would go
    on."""

    def refused(*_: object) -> TargetResult:
        problem = "the disk quota of the registry is used up"
        raise RegistryError(problem)

    monkeypatch.setattr(pipeline, "publish", refused)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    told: list[RunResult] = []
    with pytest.raises(RegistryError):
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out", on_result=told.append)
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (written["status"], written["exit_code"], told[-1].exit_code) == ("failed", 4, 4)
    assert "disk quota" in written["problem"]
    assert written["targets"][0]["winner"] is not None
    assert written["targets"][0]["receipt"] is None


PROMOTED = FAST + '\npromote: {alias: "{target}-prod"}'


def _published_reports(result: RunResult) -> dict[str, str]:
    (target,) = result.targets
    assert target.receipt is not None
    folder = Path(target.receipt.uri.removeprefix("folder:")) / "files"
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.usefixtures("known_run")
def test_the_registry_holds_the_final_report(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: who opens the report in the registry would read "Not published in this run", and find no receipt in its
    result.json."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", PROMOTED)
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    reports = _published_reports(result)
    assert reports == {name: (tmp_path / "out" / name).read_text() for name in reports}
    (target,) = json.loads(reports["result.json"])["targets"]
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert (target["receipt"]["uri"], target["receipt"]["version"]) == (receipt.uri, "1")
    assert (target["receipt"]["digest"], target["receipt"]["alias"]) == (receipt.digest, "cpu-prod")
    assert "Not published" not in reports["report.html"]


@pytest.mark.usefixtures("known_run")
def test_a_version_says_how_fast_and_how_exact_it_is(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: the registry would show no word on a version, and no tail latency, which is what a service promises."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    (target,) = api.run(f"folder:{small_model}", policy, out=tmp_path / "out").targets
    assert target.bundle is not None
    assert target.receipt is not None
    metrics = target.bundle.metrics
    # On a busy machine the calls may tell too little to carry a p95.
    assert metrics.get("latency_p95_ms.batch_1", math.inf) >= metrics["latency_p50_ms.batch_1"] > 0
    assert metrics["throughput_per_s.batch_1"] == pytest.approx(1e3 / metrics["latency_p50_ms.batch_1"])
    said = json.loads((Path(target.receipt.uri.removeprefix("folder:")) / "version.json").read_text())["description"]
    what, median, speedup, checks, size = said.split("; ")
    assert what == "small-net compiled by onnxruntime to fp32 for cpu"
    assert median == f"median {metrics['latency_p50_ms.batch_1']:.3g} ms at batch 1"
    assert "times the original's speed" in speedup
    assert re.match(r"all \d+ accuracy checks passed, closest to its limit: \w+ of output '[yz]' is \S+ <= ", checks)
    assert size.endswith(" MB.")


@pytest.mark.usefixtures("known_run")
@pytest.mark.parametrize("moment", ["attach_reports", "_promote"])
def test_a_run_killed_after_its_publication_is_finished_by_the_next(
    small_model: Path,
    write_policy: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """Broken: the version would keep a report for ever that says it was not published."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", PROMOTED)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    again = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    (target,) = json.loads(_published_reports(again)["result.json"])["targets"]
    assert again.targets[0].receipt is not None
    assert again.targets[0].receipt.version == "1"
    assert (target["receipt"]["version"], target["receipt"]["alias"]) == ("1", "cpu-prod")


@pytest.mark.usefixtures("known_run")
def test_a_version_that_was_there_keeps_the_report_of_its_own_run(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the report in the registry would hold other figures than the files that it lies with."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    first = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    reports = _published_reports(first)
    # As on another machine of the same kind: nothing is in its cache, so all is measured again.
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "other-cache"))
    other = api.run(f"folder:{small_model}", policy, out=tmp_path / "other")
    assert other.targets[0].receipt is not None
    assert not other.targets[0].receipt.created
    assert _published_reports(other) == reports


@pytest.mark.usefixtures("known_original")
def test_two_runs_into_one_folder_take_turns(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: one run replaced the bundle that the other was publishing, and that ended in a bug of ours."""
    out, measured = tmp_path / "out", threading.Event()

    class Reporter(Silent):
        def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
            if step == "benchmark":
                measured.set()

    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    out.mkdir()
    with ThreadPoolExecutor() as pool:
        with FileLock(out / ".lock"):  # as another run holds it
            second = pool.submit(api.run, f"folder:{small_model}", policy, out=out, publish=False, reporter=Reporter())
            assert measured.wait(500)
            time.sleep(0.5)
            assert not (out / "bundles").exists()
        assert second.result().status == "passed"
    assert (out / "bundles" / "cpu" / "MLmodel").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["resolve", "export", "sample", "compile", "validate", "benchmark"])
def test_a_cache_that_is_removed_meanwhile_is_named_and_running_again_helps(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, step: str
) -> None:
    """Broken: a clean-up job on a CI machine ended runs as a bug of ours (70), or as candidates that fail one by
    one."""

    class Remover(Silent):
        def ended(self, ended: str, job_id: str, seconds: float, outcome: str) -> None:
            if ended == step:
                shutil.rmtree(cache_root(), ignore_errors=True)

    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    with pytest.raises(StorageError, match="it was removed while the run used it") as caught:
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out", reporter=Remover())
    assert str(cache_root()) in caught.value.where
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (written["status"], written["exit_code"]) == ("failed", 2)
    if step == "benchmark":  # once is enough: there is no cache then, whichever step lost it
        assert api.run(f"folder:{small_model}", policy, out=tmp_path / "out").status == "passed"


@pytest.mark.parametrize("step", ["export", "compile", "benchmark"])
def test_temporary_files_that_are_removed_meanwhile_are_named(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Broken: a clean-up of TMPDIR ended runs as a bug of ours."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    class Remover(Silent):
        def ended(self, ended: str, job_id: str, seconds: float, outcome: str) -> None:
            if ended == step:
                for path in (tmp_path / "tmp").iterdir():
                    shutil.rmtree(path, ignore_errors=True)

    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    problem = ""  # none where what was removed was not needed any more
    try:
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out", reporter=Remover())
    except StorageError as error:
        problem = error.problem
    assert problem in ("", "it was removed while the run used it")
    assert api.run(f"folder:{small_model}", policy, out=tmp_path / "out").status == "passed"


def test_a_model_that_is_not_there_is_in_the_files(
    write_policy: Callable[..., Path], tmp_path: Path, small_model: Path
) -> None:
    """Broken: what an earlier run left in the folder would be read as the answer of this one."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    with pytest.raises(RegistryError):
        api.run(f"folder:{tmp_path}/none", policy, out=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (written["status"], written["exit_code"], written["targets"]) == ("refused", 4, [])
    assert written["policy"]["name"] == "test"
    assert 'errors="1"' in (tmp_path / "out" / "junit.xml").read_text()


@pytest.mark.slow
def test_verify_unpickles_nothing_unless_asked(
    pickled_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever can write a bundle's manifest could have its reader run a pickle, by naming it as the source."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST + "\ncompliance: {allow_pickle: true}")
    result = api.run(f"folder:{pickled_model}", policy, out=tmp_path / "out", publish=False)
    assert result.status == "passed", result.problem
    bundle = tmp_path / "out" / "bundles" / "cpu"
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "empty-cache"))
    with pytest.raises(SourceError, match="pickle") as refused:
        api.verify(str(bundle))
    assert "--allow-pickle" in refused.value.fix  # the policy is not read here
    assert api.verify(str(bundle), allow_pickle=True).passed
    assert api.verify(str(bundle), revalidate=False).passed
