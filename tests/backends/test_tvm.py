"""The backend tvm, with the real compiler: its records, its tuning, its shapes and threads."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends.tvm import Tvm
from compile_stage.core import plugins, tuning_records
from compile_stage.core.digest import digest_of
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import Budget, PortableModel, SampleSet, ShapeRange, Target
from compile_stage.steps.plan import plan
from compile_stage.testing import models
from compile_stage.testing.node_cases import Found, collect, judge
from tests.steps.test_plan import POLICY, SOURCE
from tests.steps.test_plan import TARGET as PLANNED

needs_tvm = pytest.mark.skipif(
    plugins.missing(Tvm()) is not None, reason=plugins.missing(Tvm()) or "Apache TVM is installed"
)
TARGET = Target(name="cpu", batch_sizes=(1, 3), threads=2)
SCHEME = Tvm().schemes(TARGET, "fp32")[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def one_layer(folder: Path, seed: int, layers: int = 1) -> tuple[PortableModel, SampleSet]:
    """Linear layers [16] → [16] with weights of their own."""
    g, x = models.Graph(seed), "x"
    for number in range(layers):
        weight, bias = g.weight(16, 16), g.weight(16)
        x = g.add("Relu", g.add("Gemm", x, weight, bias), name="y" if number == layers - 1 else "")
    rows = g.random.standard_normal((8, 16)).astype(np.float32)
    return models.write(g, folder, {"x": rows}, {"y": ("float32", ("batch", 16))})


def tuned(target: Target, trials: int) -> Target:
    return replace(target, options={"tvm": {"trials": trials, "tuning_minutes": 1}})


def files(cache: Path) -> list[Path]:
    return sorted((cache / "tuning").rglob("*.json"))


@needs_tvm
def test_another_model_of_the_same_workloads_starts_from_the_records(cache: Path, tmp_path: Path) -> None:
    """Broken: every model would pay for the tuning of the operators that all of them have."""
    once = replace(TARGET, batch_sizes=(1,))
    first = Tvm().compile(one_layer(tmp_path / "a", 1)[0], SCHEME, tuned(once, 4), "job", tmp_path / "a" / "out")
    known = files(cache)
    pinned = {"records": 1, "records_digest": digest_of([known[0].name])}
    assert first.executed["tuning"] == {"tuned": 1, "untuned": 0, "trials": 4, **pinned}
    other, samples = one_layer(tmp_path / "b", 2, layers=2)
    second = Tvm().compile(other, SCHEME, tuned(once, 4), "job", tmp_path / "b" / "out")
    assert second.executed["tuning"] == {"tuned": 2, "untuned": 0, "trials": 0, **pinned}
    assert files(cache) == known
    assert second.notes == ()
    rows = np.load(Path(samples.path) / "inputs" / "x.npy")[:1]
    from onnx.reference import ReferenceEvaluator

    with Tvm().open(second, 2) as session:
        np.testing.assert_allclose(
            session.run({"x": rows})["y"], ReferenceEvaluator(other.path).run(None, {"x": rows})[0], atol=1e-5
        )
    # Without any trials too: records cost nothing to use.
    third = Tvm().compile(other, SCHEME, once, "job", tmp_path / "c")
    assert third.executed["tuning"] == {"tuned": 2, "untuned": 0, "trials": 0, **pinned}


@needs_tvm
def test_damaged_and_half_written_records_count_as_absent(cache: Path, tmp_path: Path) -> None:
    """Broken: a process that was killed while it wrote would spoil every later compilation on the machine."""
    once, (model, _) = replace(TARGET, batch_sizes=(1,)), one_layer(tmp_path / "a", 1)
    Tvm().compile(model, SCHEME, tuned(once, 2), "job", tmp_path / "out")
    (written,) = files(cache)
    (written.parent / ".part-killed").write_bytes(written.read_bytes()[:100])
    assert Tvm().compile(model, SCHEME, once, "job", tmp_path / "b").executed["tuning"]["tuned"] == 1
    stored = json.loads(written.read_text())
    written.write_text(written.read_text()[:-50])
    assert Tvm().compile(model, SCHEME, once, "job", tmp_path / "c").executed["tuning"]["tuned"] == 0
    written.unlink()
    content = json.dumps({**stored, "records": [["no", "record"]]}).encode()
    tuning_records.write(written.parent, tuning_records.name_of(stored["workload"][0], "json", content), content)
    assert Tvm().compile(model, SCHEME, once, "job", tmp_path / "d").executed["tuning"]["tuned"] == 0


def test_a_file_that_is_no_round_of_trials_is_refused_without_tvm() -> None:
    """Broken: what came from a registry could say that millions of trials were made, and nothing would ever be
    tuned."""
    good = {"workload": ["81", "eJ"], "trials": 8, "records": [["a", "record"]]}

    def refused(name: str = "81-0.json", **changes: Any) -> str | None:
        return Tvm().refuse_record(name, json.dumps({**good, **changes}).encode())

    assert refused() is None
    assert refused(trials=3, records=[]) is None, "in a round nothing may have run"
    assert "another workload" in str(refused("82-0.json"))
    for trials in (0, -1, 9, 10**9, True, 8.0, "8", None):
        assert refused(trials=trials), trials
    assert refused(trials=1, records=[[], []])
    for changes in ({"records": None}, {"workload": "81"}, {"workload": [81, "eJ"]}, {"workload": None}):
        assert "not the JSON" in str(refused(**changes))
    for content in (b"", b"[]", b"\xff", b"{}", b"null"):
        assert "not the JSON" in str(Tvm().refuse_record("81-0.json", content))


def test_records_belong_to_version_machine_and_threads_and_are_asked_for_when_it_tunes() -> None:
    """Broken: kernels would be chosen by what was measured on another machine; or every run would ask the registry."""
    versions, machine = {"apache-tvm": "0.27.0"}, hardware().fingerprint
    assert Tvm().records_key(tuned(TARGET, 8), versions) == f"tvm-0.27.0/{machine}-2-threads"
    assert Tvm().records_key(TARGET, versions) is None
    assert Tvm().records_key(tuned(TARGET, 0), versions) is None


@needs_tvm
def test_time_ends_tuning_and_what_was_measured_is_kept(cache: Path, tmp_path: Path) -> None:
    """Broken: a job would be killed for its time, and the trials lost with it."""
    model, _ = one_layer(tmp_path / "a", 1)
    late = replace(TARGET, options={"tvm": {"trials": 500, "tuning_minutes": 0.02}})
    artifact = Tvm().compile(model, SCHEME, late, "job", tmp_path / "out")
    assert artifact.executed["tuning"]["trials"] < 500
    assert any("time ended tuning" in note for note in artifact.notes)
    kept = sum(json.loads(path.read_text())["trials"] for path in files(cache))
    assert kept == artifact.executed["tuning"]["trials"]


def test_trials_go_to_every_workload_first_and_then_to_the_largest() -> None:
    """Broken: one large convolution would take all trials, and the rest would stay plain loops."""
    from compile_stage.backends.tvm_tuning import allot

    assert allot([100.0, 1.0, 10.0], 24) == [8, 8, 8]
    assert allot([100.0, 1.0, 10.0], 10) == [8, 0, 2]
    shares = allot([100.0, 1.0, 10.0], 88)
    assert sum(shares) == 88
    assert shares[0] > 6 * shares[2] > shares[1]
    assert allot([], 50) == []
    assert allot([1.0], 0) == [0]


@needs_tvm
def test_each_batch_size_has_its_function_and_what_is_between_is_padded(cache: Path, tmp_path: Path) -> None:
    """Broken: a batch of another size would run kernels that were made for other shapes, or come back with rows of
    padding."""
    model, samples = models.conv_net(tmp_path / "m")
    artifact = Tvm().compile(model, SCHEME, TARGET, "job", tmp_path / "out")
    images = np.load(Path(samples.path) / "inputs" / "image.npy")
    assert [one["name"] for one in artifact.options["functions"]] == ["batch_1", "batch_3"]
    with Tvm().open(artifact, 2) as session:
        three = session.run({"image": images[:3]})["scores"]
        one = session.run({"image": images[1:2]})["scores"]
        np.testing.assert_allclose(three[1:2], one, atol=1e-5)
        strided = images[:6:2]
        np.testing.assert_allclose(session.run({"image": strided})["scores"][:1], three[:1], atol=1e-5)
        two = session.run({"image": images[:2]})["scores"]
        assert two.shape[0] == 2
        np.testing.assert_allclose(two, three[:2], atol=1e-5)
        with pytest.raises(UsageError, match=r"shapes up to \[3, 3, 16, 16\]"):
            session.run({"image": images[:4]})
    assert any("batch 2 runs as 3" in note for note in artifact.notes)


@needs_tvm
def test_kernels_that_the_front_end_writes_itself_come_along_for_each_batch_size(cache: Path, tmp_path: Path) -> None:
    """Broken: a model with an Einsum would not compile, or one batch size would run the kernel of another."""
    g = models.Graph(5)
    g.add("Einsum", "x", g.weight(3, 4), name="y", equation="bij,jk->bik")
    rows = g.random.standard_normal((4, 2, 3)).astype(np.float32)
    model, _ = models.write(g, tmp_path / "made", {"x": rows}, {"y": ("float32", ("batch", 2, 4))})
    artifact = Tvm().compile(model, SCHEME, TARGET, "job", tmp_path / "out")
    from onnx.reference import ReferenceEvaluator

    expected = ReferenceEvaluator(model.path)
    with Tvm().open(artifact, 2) as session:
        for size in (1, 3):
            given = {"x": rows[:size]}
            np.testing.assert_allclose(session.run(given)["y"], expected.run(None, given)[0], atol=1e-5)


@needs_tvm
def test_the_same_model_makes_the_same_bytes(cache: Path, tmp_path: Path) -> None:
    """Broken: a time or a path in the library would make every publication another version."""
    model, _ = one_layer(tmp_path / "m", 1)
    made = [Tvm().compile(model, SCHEME, TARGET, "job", tmp_path / name) for name in ("a", "b")]
    assert made[0].digest == made[1].digest
    assert str(tmp_path).encode() not in (tmp_path / "a" / "model.so").read_bytes()


@needs_tvm
def test_threads_are_those_that_open_says_and_no_core_is_bound(cache: Path, tmp_path: Path) -> None:
    """Broken: TVM takes half of the cores by itself, and binds its caller to them; and serving would load its
    compiler."""
    model, _ = one_layer(tmp_path / "m", 1)
    artifact = Tvm().compile(model, SCHEME, TARGET, "job", tmp_path / "out")
    script = f"""
        import json, os, sys
        import numpy as np
        from compile_stage.backends.tvm import Tvm
        from compile_stage.core.digest import load_record
        from compile_stage.core.records import Artifact
        artifact = load_record(Artifact, open({str(tmp_path / "artifact.json")!r}).read())
        before, found = os.sched_getaffinity(0), []
        x = np.zeros((1, 16), np.float32)
        with Tvm().open(artifact, 1) as one, Tvm().open(artifact, 3) as three:
            import tvm_ffi
            count = tvm_ffi.get_global_func("runtime.NumThreads")
            for session in (one, three, one):
                session.run({{"x": x}})
                found.append(int(count()))
        print(json.dumps([found, before == os.sched_getaffinity(0), "tvm" in sys.modules]))
    """
    from compile_stage.core.digest import canonical_json

    (tmp_path / "artifact.json").write_text(canonical_json(artifact))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout) == [[1, 3, 1], True, False]


@needs_tvm
@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count what threads run"
)
def test_threads_without_work_sleep() -> None:
    """Broken: the pool's idle threads would take the cores from whatever runs beside them, and an honest artifact fail
    for computing after its answer."""
    script = """
        import pathlib, time
        from compile_stage.backends.tvm import _use_threads

        def ran():
            files = pathlib.Path("/proc/self/task").glob("*/schedstat")
            return sum(int(file.read_text().split()[0]) for file in files) / 1e9

        _use_threads(1)
        time.sleep(1)  # a thousand yields of each are over
        before = ran()
        time.sleep(1)
        print(ran() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.1


@needs_tvm
def test_operators_that_it_lacks_are_refused_by_name(tmp_path: Path) -> None:
    """Broken: a plan would show a page of TVM's insides, or the job would fail late."""
    import onnx
    from onnx import helper

    model, _ = one_layer(tmp_path / "m", 1)
    graph = onnx.load(model.path)
    graph.graph.node[-1].op_type, graph.graph.node[-1].domain = "Nonsense", "com.example"
    graph.opset_import.append(helper.make_opsetid("com.example", 1))
    onnx.save(graph, model.path)
    reason = Tvm().refuse(model, TARGET)
    assert reason is not None
    assert "Nonsense" in reason
    assert "\n" not in reason


def test_free_shapes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """Broken: a length that nobody named would be compiled as some length."""
    model, _ = one_layer(tmp_path / "m", 1)
    spec = replace(model.signature.inputs[0], shape=("batch", "length"))
    free = replace(model, signature=replace(model.signature, inputs=(spec,)))
    assert "under the target's shapes" in str(Tvm().refuse(free, TARGET))
    promised = {"x": ShapeRange(min=(1, 8), typical=(1, 16), max=(4, 16))}
    many = replace(TARGET, shapes=promised, batch_sizes=tuple(range(1, 10)))
    assert "asks for 18 of them" in str(Tvm().refuse(free, many))


def test_without_a_linker_the_target_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: the job would fail in the middle, in a subprocess of TVM's."""
    assert Tvm().refuse_target(TARGET) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    assert "apt-get install g++" in str(Tvm().refuse_target(TARGET))


@pytest.mark.parametrize("options", [{"trials": -1}, {"trials": 1.5}, {"trials": True}, {"tuning_minutes": "1"}])
def test_options_that_can_not_be_are_refused(options: dict[str, Any]) -> None:
    """Broken: a slip in the policy would silently mean another budget."""
    assert next(iter(options)) in str(Tvm().refuse_target(replace(TARGET, options={"tvm": options})))


@needs_tvm
def test_the_policys_trials_reach_the_job_and_the_note_is_gone() -> None:
    """Broken: budget.tuning_trials would be told to have no effect, or have none."""
    target = replace(PLANNED, target=replace(PLANNED.target, backends=("tvm", "onnxruntime"), precisions=("fp32",)))
    policy = replace(POLICY, targets=(target,), budget=Budget(tuning_trials=50, job_minutes=10))
    made = plan(SOURCE, policy, hardware())
    options = {job.backend: dict(job.target.options) for job in made.jobs}
    assert options == {"tvm": {"tvm": {"trials": 50, "tuning_minutes": 6.0}}, "onnxruntime": {}}
    assert made.notes == ()
    own = replace(target, target=replace(target.target, options={"tvm": {"trials": 7}}))
    jobs = plan(SOURCE, replace(policy, targets=(own,)), hardware()).jobs
    assert [job.target.options["tvm"]["trials"] for job in jobs if job.backend == "tvm"] == [7]


@needs_tvm
@pytest.mark.parametrize(
    ("module", "case", "found", "said"),
    [
        ("div", "test_div_uint16", Found.RIGHT, ""),  # read back on zeros, it divided by one and ended the process
        ("rangeop", "test_range_float_type_positive_delta", Found.RIGHT, ""),  # a kernel whose size depends on data
        ("slice", "test_slice_neg_steps", Found.RIGHT, ""),  # it divides by its step, which is an input
        ("shape", "test_shape", Found.REFUSED, "makes sizes of the output 'y'"),
        ("quantizelinear", "test_quantizelinear_e4m3fn", Found.REFUSED, "which NumPy has no arrays of"),
        ("nonzero", "test_nonzero_example", Found.CAUGHT, "TVM compiled no kernel"),
    ],
)
def test_operators_that_once_ended_in_an_error_of_tvms_own(
    module: str, case: str, found: Found, said: str, tmp_path: Path
) -> None:
    """Broken: a job would end in a bare exception or a dead process where the model is right, or can be refused in the
    plan."""
    (chosen,) = (one for one in collect((module,)) if one.name == case)
    finding = judge(Tvm(), chosen, tmp_path)
    assert finding.found is found, finding
    assert said in finding.reason


@needs_tvm
def test_what_its_runtime_raises_in_a_call_is_told_in_words(tmp_path: Path) -> None:
    """Broken: a served model would answer with an exception of TVM's that no caller knows."""
    model, _ = one_layer(tmp_path / "m", 1)
    artifact = Tvm().compile(model, SCHEME, TARGET, "m--tvm", tmp_path / "a")
    with Tvm().open(artifact, 1) as session:
        ((shapes, (function, buffers, tensors)),) = list(session._functions.items())[:1]  # type: ignore[attr-defined]
        session._functions[shapes] = (function, buffers, [*tensors, *tensors])  # type: ignore[attr-defined]
        with pytest.raises(NothingCompiledError, match="TVM could not run the graph"):
            session.run({"x": np.zeros((1, 16), np.float32)})
