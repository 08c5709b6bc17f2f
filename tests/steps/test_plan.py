"""Planning: from what plug-ins declare, without importing a compiler."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import factories
import pytest

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core import plugins
from compile_stage.core.environment import hardware
from compile_stage.core.records import (
    AppliesTo,
    Budget,
    Compliance,
    Data,
    DataSpec,
    Gate,
    Policy,
    Promotion,
    Scheme,
    Target,
)
from compile_stage.measure.behaviour import calls_to_compare
from compile_stage.steps import plan as plan_module
from compile_stage.steps.plan import plan
from compile_stage.steps.resolve import refuse_policy

SOURCE = factories.source(uri="models:/fraud/7", name="fraud", version="7", tags={"task": "tab"})
GATES = (Gate(metric="cosine", limit=0.99, direction="at_least"),)
TARGET = factories.target_policy(
    factories.target(precisions=("int8", "fp32")), tolerances={"int8": GATES, "fp32": GATES}
)
SYNTHETIC = DataSpec(source="synthetic")
POLICY = factories.policy(TARGET, data=Data(validation=SYNTHETIC, calibration=SYNTHETIC))


def with_target(**changes: object) -> Policy:
    return replace(POLICY, targets=(replace(TARGET, target=replace(TARGET.target, **changes)),))


def test_a_job_for_each_backend_and_scheme_with_readable_ids() -> None:
    """Broken: job ids could not be selected, compared between runs or read."""
    made = plan(SOURCE, POLICY, hardware())
    ids = [job.id for job in made.jobs]
    assert "fraud-7--cpu--onnxruntime--fp32" in ids
    assert len(set(ids)) == len(ids) > 1
    assert all(job.gates == GATES for job in made.jobs)


def test_fp32_is_always_there_as_the_safe_floor() -> None:
    """Broken: a policy that asks for int8 only would end with nothing when int8 misses its tolerance."""
    made = plan(SOURCE, with_target(precisions=("int8",)), hardware())
    assert any(job.scheme.precision == "fp32" for job in made.jobs)


def test_a_precision_without_tolerance_is_refused() -> None:
    """Broken: a candidate could pass although nothing was asked of it."""
    policy = replace(POLICY, targets=(replace(TARGET, tolerances={"fp32": GATES}),))
    made = plan(SOURCE, policy, hardware())
    assert [job.scheme.precision for job in made.jobs] == ["fp32"]
    assert all("no tolerance for int8" in refusal.reason for refusal in made.refused)
    assert made.refused


def test_a_precision_that_a_backend_lacks_is_refused_with_its_reason() -> None:
    """Broken: a reader would not learn whether fp8 is missing here, or can't be had on this device."""
    policy = with_target(precisions=("fp8",), backends=("onnxruntime",))
    (refusal,) = plan(SOURCE, policy, hardware()).refused
    assert refusal.reason.startswith("onnxruntime has no fp8 on cpu here: its CPU kernels have no 8-bit floats")


def test_a_backend_need_not_say_why_it_lacks_a_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a third party's backend that says nothing of it would end the plan."""
    monkeypatch.setattr(
        OnnxRuntime, "capabilities_for", lambda self, _: replace(self.capabilities, lacks={}, compiles_any_graph=False)
    )
    (refusal,) = plan(SOURCE, with_target(precisions=("fp8",)), hardware()).refused
    assert refusal.reason == "onnxruntime has no fp8 on cpu here"


def test_weights_alone_need_no_samples() -> None:
    """Broken: an int4 candidate would wait for calibration samples that it never looks at."""
    data = replace(POLICY.data, validation=DataSpec(source="file:a.npz"), calibration=DataSpec(source="file:a.npz"))
    gates = {"int4": GATES, "int8": GATES, "fp32": GATES}
    for precision, noted in (("int4", False), ("int8", True)):
        target = replace(TARGET, tolerances=gates, target=replace(TARGET.target, precisions=(precision,)))
        made = plan(SOURCE, replace(POLICY, data=data, targets=(target,)), hardware())
        assert {job.scheme.precision for job in made.jobs} == {precision, "fp32"}
        assert any("calibrated on the samples" in note for note in made.notes) == noted


def test_a_device_that_no_backend_serves_is_refused_with_the_reason() -> None:
    """Broken: a job for a GPU would quietly run on the CPU."""
    made = plan(SOURCE, with_target(device="cuda"), hardware())
    assert not made.jobs
    assert made.refused[0].reason


def test_hardware_that_is_not_here_is_refused() -> None:
    """Broken: numbers from this machine would be published for another."""
    made = plan(SOURCE, with_target(hardware={"features": "amx_fantasy"}), hardware())
    assert not made.jobs
    assert "amx_fantasy" in made.refused[0].reason


def test_a_backend_that_the_policy_does_not_allow_is_refused() -> None:
    """Broken: compliance.allowed_backends would be decoration."""
    made = plan(SOURCE, replace(POLICY, compliance=Compliance(allowed_backends=("openvino",))), hardware())
    assert not made.jobs
    assert "allowed_backends" in made.refused[0].reason


def test_applies_to_keeps_a_policy_from_other_models() -> None:
    """Broken: a policy for vision models would be run on a fraud model."""
    assert refuse_policy(SOURCE, AppliesTo(names=("fra*",), tags={"task": "tab"})) is None
    assert "vision-*" in (refuse_policy(SOURCE, AppliesTo(names=("vision-*",))) or "")
    assert "task=text" in (refuse_policy(SOURCE, AppliesTo(tags={"task": "text"})) or "")


def test_planning_imports_no_compiler() -> None:
    """Broken: `compile-stage plan` would take seconds, and fail where a compiler's import fails."""
    program = (
        "import sys; from compile_stage.core import plugins\n"
        "from compile_stage.core.records import Target\n"
        "[plugins.load('backends', n).schemes(Target(name='t'), p) for n in plugins.names('backends') for p in "
        "('fp32', 'int8', 'bf16')]\nprint([m for m in ('onnx', 'onnxruntime', 'openvino', 'nncf', 'torch') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_schemes_that_could_be_mixed_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a third party's backend that names two schemes alike would have one's measurement decide over the other,
    and one that offers another precision than it is asked for would be judged by the wrong tolerances."""

    def schemes(self: OnnxRuntime, target: Target, precision: str) -> tuple[Scheme, ...]:
        if precision == "int8":
            return (
                Scheme(precision="int8", name="best", native=True),
                Scheme(precision="int8", name="best", native=True, symmetric=True),
            )
        return (Scheme(precision="fp16", name="half", native=True),)

    monkeypatch.setattr(OnnxRuntime, "schemes", schemes)
    made = plan(SOURCE, POLICY, hardware())
    assert [job.scheme.symmetric for job in made.jobs] == [False]
    reasons = " | ".join(refusal.reason for refusal in made.refused)
    assert "calls two of its schemes 'best'" in reasons
    assert "asked for fp32, the backend offers fp16" in reasons


def test_a_backend_that_is_named_twice_runs_once() -> None:
    """Broken: its jobs would overwrite each other's results."""
    once, twice = POLICY, with_target(backends=("onnxruntime", "onnxruntime"))
    assert plan(SOURCE, once, hardware()).jobs == tuple(
        replace(job, target=TARGET.target) for job in plan(SOURCE, twice, hardware()).jobs
    )


def test_judging_by_the_calibration_samples_is_said() -> None:
    """Broken: int8 would look better than it is, and nobody would know why."""
    same = DataSpec(source="file:/data/all.npz")
    found = plan(SOURCE, replace(POLICY, data=Data(validation=same, calibration=same)), hardware())
    assert any("come from the same place" in note for note in found.notes)
    other = Data(validation=same, calibration=DataSpec(source="file:/data/train.npz"))
    assert not any("the same place" in n for n in plan(SOURCE, replace(POLICY, data=other), hardware()).notes)


def test_targets_that_move_the_same_alias_are_told() -> None:
    """Broken: the alias of a server would point to what was compiled for the edge, by the order of two keys."""
    other = replace(TARGET, target=replace(TARGET.target, name="edge"))

    def notes(alias: str) -> list[str]:
        targets = tuple(replace(t, promote=Promotion(alias=alias)) for t in (TARGET, other))
        return [n for n in plan(SOURCE, replace(POLICY, targets=targets), hardware()).notes if "alias" in n]

    assert notes("{target}-prod") == []
    assert "cpu and edge move the same alias 'prod'" in notes("prod")[0]


def test_a_budget_that_no_backend_uses_is_told() -> None:
    """Broken: a platform team would believe that its models are tuned."""
    asked = plan(SOURCE, replace(POLICY, budget=Budget(tuning_trials=50)), hardware())
    assert any(note.startswith("budget.tuning_trials has no effect") for note in asked.notes)
    assert not any("tuning" in note for note in plan(SOURCE, POLICY, hardware()).notes)


def test_a_backend_that_starts_from_a_program_gets_one_where_the_source_has_one() -> None:
    """Broken: a compiler of PyTorch programs would be given an ONNX graph, or a model that has no program would fail in
    the middle of a run."""
    if (reason := plugins.missing(plugins.load("backends", "inductor"))) is not None:
        pytest.skip(reason)
    policy = with_target(backends=("onnxruntime", "inductor"), precisions=("fp32", "int8"))
    made = plan(replace(SOURCE, flavor="pytorch"), policy, hardware())
    assert {(job.backend, job.scheme.name): job.form for job in made.jobs if job.scheme.precision == "fp32"} == {
        ("onnxruntime", "fp32"): "onnx",
        ("inductor", "fp32"): "torch-export",
    }
    (lacking,) = (refusal for refusal in made.refused if refusal.backend == "inductor")
    assert "inductor has no int8 on cpu here: PyTorch's quantisers" in lacking.reason
    made = plan(replace(SOURCE, flavor="sklearn"), policy, hardware())
    assert {job.backend for job in made.jobs} == {"onnxruntime"}
    (refused,) = (refusal for refusal in made.refused if refusal.backend == "inductor")
    assert refused.reason == "inductor takes torch-export, and a model of flavor sklearn is given as onnx"


def test_a_graph_becomes_a_program_where_what_that_takes_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run would end in an ImportError, or nobody would learn which package brings that form."""
    if (reason := plugins.missing(plugins.load("backends", "inductor"))) is not None:
        pytest.skip(reason)
    policy, real = with_target(backends=("onnxruntime", "inductor"), precisions=("fp32",)), plugins._importable
    monkeypatch.setattr(plugins, "_importable", lambda module: module == "onnx2torch" or real(module))
    assert {job.backend: job.form for job in plan(SOURCE, policy, hardware()).jobs} == {
        "onnxruntime": "onnx",
        "inductor": "torch-export",
    }
    monkeypatch.setattr(plugins, "_importable", lambda module: module != "onnx2torch" and real(module))
    (refused,) = plan(SOURCE, policy, hardware()).refused
    assert refused.reason == (
        "inductor takes torch-export: a PyTorch program is made of a model of flavor onnx with onnx2torch, which is "
        'not installed: pip install "compile-stage[onnx2torch]"'
    )


def test_a_jax_model_is_given_as_stablehlo_where_a_backend_takes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: XLA would ask for PyTorch to compile a JAX model, or be planned for programs that it can't read."""
    if "jax" not in plugins.names("sources"):
        pytest.skip("the installed compile-stage is older than this clone: make its environment again")
    policy, real = with_target(backends=("onnxruntime", "xla", "iree"), precisions=("fp32",)), plugins._importable
    there = ("jax", "jaxlib", "flatbuffers", "iree.compiler", "iree.runtime")
    monkeypatch.setattr(
        plugins, "_importable", lambda module: module in there or (module != "torchax" and real(module))
    )
    made = plan(replace(SOURCE, flavor="jax"), policy, hardware())
    assert {job.backend: job.form for job in made.jobs} == {
        "onnxruntime": "onnx", "xla": "stablehlo", "iree": "stablehlo",
    }  # fmt: skip
    (refused,) = plan(replace(SOURCE, flavor="pytorch"), replace(policy), hardware()).refused
    assert refused.backend == "xla"
    assert refused.reason == (
        'xla takes torch-export with torchax, which is not installed: pip install "compile-stage[xla]"'
    )


def test_a_keras_model_is_given_to_litert_and_xla_in_forms_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: LiteRT and XLA would refuse Keras models, or IREE would lose the free batch that ONNX keeps."""
    policy = with_target(backends=("onnxruntime", "litert", "xla", "iree"), precisions=("fp32",))
    monkeypatch.setattr(plugins, "missing", lambda plugin: None)
    made = plan(replace(SOURCE, flavor="keras"), policy, hardware())
    assert {job.backend: job.form for job in made.jobs} == {
        "onnxruntime": "onnx", "litert": "tflite", "xla": "stablehlo", "iree": "onnx",
    }  # fmt: skip


@pytest.mark.parametrize("backends", [("onnxruntime",), ("auto",)])
def test_a_source_whose_packages_are_missing_has_no_jobs(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...]
) -> None:
    """Broken: `plan` would say "run" of jobs that end at the run's first step, and not which package to install."""
    real = plugins._importable
    monkeypatch.setattr(plugins, "_importable", lambda module: module != "onnxscript" and real(module))
    made = plan(replace(SOURCE, flavor="pytorch"), with_target(backends=backends), hardware())
    assert made.jobs == ()
    reason = {refusal.backend: refusal.reason for refusal in made.refused}["onnxruntime"]
    assert reason.startswith("pytorch needs ")
    assert reason.endswith('onnxscript, which is not installed: pip install "compile-stage[torch]"')


def test_a_variant_for_other_hardware_is_not_required_where_the_family_has_one_for_this_machine() -> None:
    """Broken: no run of a family could pass on any machine; or one would pass where none of its variants is for it."""
    here = replace(hardware(), features=("avx2",))

    def required(*wanted: str) -> list[bool]:
        targets = tuple(
            replace(TARGET, family="x86", target=replace(TARGET.target, name=f"t{number}", hardware={"features": word}))
            for number, word in enumerate(wanted)
        )
        made = plan(SOURCE, replace(POLICY, targets=targets), here)
        assert len([note for note in made.notes if "not required here" in note]) == sum(
            not rules.target.required for rules in made.policy.targets
        )
        return [rules.target.required for rules in made.policy.targets]

    assert required("avx2", "avx512_vnni") == [True, False]
    assert required("amx_int8", "avx512_vnni") == [True, True]


def test_more_threads_than_can_compute_here_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: times of threads that wait for each other are taken for those of a machine that has enough cores."""

    def notes(**changes: object) -> list[str]:
        machine = replace(hardware(), cores=4)
        return [note for note in plan(SOURCE, with_target(**changes), machine).notes if "threads" in note]

    monkeypatch.setattr(plan_module, "cpu_limit", lambda: math.inf)
    assert notes(threads=4) == []
    (note,) = notes(threads=64)
    assert note.startswith("target cpu has threads: 64, and this machine has 4 cores")
    assert notes(threads=64, hardware={"cores": "96"}) == [], "it is measured elsewhere"
    monkeypatch.setattr(plan_module, "cpu_limit", lambda: 1.5)
    assert "has threads: 2, and this machine has a CPU limit of 1.5 cores" in notes(threads=2)[0]


def test_a_batch_that_takes_long_to_prove_is_noted() -> None:
    """Broken: `batch_sizes: [1048576]` runs for minutes in one step, and neither plan nor run says why; or the number
    of rows is not what the proof takes."""
    assert not [note for note in plan(SOURCE, with_target(batch_sizes=(1, 512)), hardware()).notes if "rows" in note]
    (note,) = [note for note in plan(SOURCE, with_target(batch_sizes=(1, 2**17)), hardware()).notes if "rows" in note]
    assert "a batch size of 131,072: the original and each candidate answer about 655,360 rows" in note
    answered = sum(len(call["rows"]) for call in calls_to_compare(100, (1, 2**17), 0))
    assert answered + 2**17 == pytest.approx(655_360, rel=0.2)  # and once to repeat a call
