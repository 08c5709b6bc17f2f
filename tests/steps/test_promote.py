"""Promotion: what must not move an alias."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import pytest
import tiny_bundle
from factories import COSINE, artifact, measurement, source, target, target_policy

from compile_stage.core import plugins
from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import GateError, RegistryError
from compile_stage.core.records import (
    Artifact,
    Check,
    Gate,
    Outcome,
    Promotion,
    Receipt,
    Selection,
    TargetResult,
    Timing,
    Verdict,
    Waiver,
)
from compile_stage.measure.recompute import holds
from compile_stage.serving.manifest import read_manifest, write_validation
from compile_stage.serving.trust import Trust
from compile_stage.steps.promote import (
    Incumbent,
    _comparable,
    _look_at,
    demand_passed,
    newer_source,
    promote,
    where_aliases_ended,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, where it is imported for the first time

TARGET = TargetResult(
    policy=target_policy(target(batch_sizes=(1, 8)), promote=Promotion(alias="prod")),
    candidates=(),
    selection=Selection(target="cpu", winner="j", reason="", states={}, reasons={}),
    receipt=Receipt(uri="models:/m-compiled/2", name="m-compiled", version="2", digest="sha256:1", created=True),
)


def timing(batch_size: int, low: float, high: float, *, stable: bool = True) -> Timing:
    return factories.timing((low + high) / 2, 10, batch_size, speedup_interval=(low, high), stable=stable)


def move(*timings: Timing) -> Any:
    """Promote against an incumbent that these were measured against. What gets through fails for want of a run to work
    in."""
    measured = measurement(timings=timings) if timings else None
    context: Any = SimpleNamespace()
    before = Incumbent(artifact=artifact(digest="sha256:old"), uri="models:/m-compiled/1")
    return promote(context, source(), TARGET, "prod", before, measured)


@pytest.mark.parametrize(
    ("timings", "says"),
    [
        ((), "could not be measured against models:/m-compiled/1 at batch size 1"),
        ((timing(1, 1.5, 1.6),), "could not be measured against models:/m-compiled/1 at batch size 8"),
        (
            (timing(1, 1.5, 1.6), replace(timing(8, 1.5, 1.6), speedup_interval=None)),
            "could not be measured against models:/m-compiled/1 at batch size 8",
        ),
        (
            (timing(1, 0.9, 0.95), timing(8, 2.0, 2.1)),
            r"not promoted to 'prod': at batch size 1 its p50 is 1\.081 \(up to 1\.111\) times that of "
            "models:/m-compiled/1, at most 1.02 allowed",
        ),
        (
            (timing(1, 2.0, 2.1), timing(8, 0.9, 0.95)),
            r"not promoted to 'prod': at batch size 8 its p50 is 1\.081 \(up to 1\.111\) times that of "
            "models:/m-compiled/1, at most 1.02 allowed",
        ),
        ((timing(1, 0.8, 3.0, stable=False), timing(8, 2.0, 2.1)), "after 10 rounds it is not known more narrowly"),
        (
            (replace(timing(1, 2.0, 2.1), mean_speedup_interval=(0.25, 0.5)), timing(8, 2.0, 2.1)),
            r"at batch size 1 some of its calls take far longer than others: all together take 2\.000 to 4\.000 times "
            "as long as those of models:/m-compiled/1, at most 1.02 allowed",
        ),
    ],
)
def test_slower_or_not_shown_to_be_as_fast_does_not_move_an_alias(timings: tuple[Timing, ...], says: str) -> None:
    """Broken: a batch size that was not compared, or a machine too noisy to compare on, would count as fast enough."""
    with pytest.raises(GateError, match=says):
        move(*timings)


@pytest.mark.parametrize(("tries", "advice"), [(2, "; a quieter machine"), (3, "; --remeasure on a quieter machine")])
def test_what_was_compared_three_times_is_compared_again_by_the_option_alone(tries: int, advice: str) -> None:
    """Broken: who runs again as advised is told the figures of the cache."""
    context: Any = SimpleNamespace()
    before = Incumbent(artifact=artifact(digest="sha256:old"), uri="models:/m-compiled/1")
    measured = measurement(timings=(timing(1, 0.8, 3.0, stable=False), timing(8, 2.0, 2.1)), tries=tries)
    with pytest.raises(GateError) as refused:
        promote(context, source(), TARGET, "prod", before, measured)
    assert advice in refused.value.fix


def test_as_fast_at_every_batch_size_gets_through() -> None:
    """Broken: nothing would ever be promoted over something else."""
    with pytest.raises(AttributeError):  # of the empty context: nothing refused it
        move(timing(1, 0.99, 1.01), timing(8, 1.5, 2.5, stable=False))
    for mean in ((0.95, 0.97), (0.5, 3.0)):  # within the 2 % that are resolved, and the 2 % that are allowed; unknown
        with pytest.raises(AttributeError):
            move(replace(timing(1, 0.99, 1.01), mean_speedup_interval=mean), timing(8, 1.5, 2.5))
    with pytest.raises(AttributeError):  # its mean is faster, though less so than its median
        move(replace(timing(1, 2.0, 2.5), mean_speedup_interval=(1.5, 1.8)), timing(8, 1.5, 2.5))


def checks_of(*gates: Check, batch_size: int = 1) -> dict[str, Any]:
    """A manifest whose verdict has the structural check and these."""
    samples = Gate(metric="samples", limit=32, direction="at_least")
    structural = Check(gate=samples, outcome=Outcome.PASS, measured=64, reason="", batch_size=batch_size)
    job = {**plain(factories.job(where=factories.target(name="cpu"))), "gates": [plain(COSINE)]}
    verdict = Verdict(checks=(structural, *gates)) if gates else Verdict(checks=())
    return {"verdict": plain(verdict), "job": job, "performance": [], "artifact": {"digest": "sha256:0"}}


def cosine(measured: float | None, outcome: Outcome, **fields: Any) -> Check:
    return Check(gate=COSINE, outcome=outcome, measured=measured, reason="", batch_size=1, **fields)


def test_a_verdict_is_good_only_while_its_waivers_are(tmp_path: Path) -> None:
    """Broken: an exception with an end would have none once something was published under it."""
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-06-30")
    waived = cosine(0.9, Outcome.FAIL, waived=waiver)
    demand_passed(checks_of(waived), tmp_path, date(2026, 6, 30), "uri")
    with pytest.raises(GateError, match="ended on 2026-06-30"):
        demand_passed(checks_of(waived), tmp_path, date(2026, 7, 1), "uri")
    elsewhere = replace(waiver, target="gpu")
    with pytest.raises(GateError, match="does not reach cosine"):
        demand_passed(checks_of(replace(waived, waived=elsewhere)), tmp_path, date(2026, 6, 30), "uri")
    for checks in ((), (cosine(0.9, Outcome.FAIL),), (cosine(None, Outcome.NOT_RUN, waived=waiver),)):
        with pytest.raises(GateError, match="did not pass"):
            demand_passed(checks_of(*checks), tmp_path, date(2026, 1, 1), "uri")


@pytest.mark.parametrize("metric", ["outputs", "shape", "finite", "samples"])
def test_nobody_can_waive_what_every_model_must_have(metric: str, tmp_path: Path) -> None:
    """Broken: a version that lost an output, or answers NaN, is promoted under a waiver that its manifest was given."""
    waiver = Waiver(gate=metric, target="cpu", reason="known", owner="me", expires="2026-06-30")
    gate = Gate(metric=metric, limit=0, direction="at_most")
    lost = Check(gate=gate, outcome=Outcome.FAIL, measured=1.0, reason="", batch_size=1, waived=waiver)
    with pytest.raises(GateError, match=f"{metric} failed, which nobody can waive"):
        demand_passed(checks_of(lost, cosine(0.995, Outcome.PASS)), tmp_path, date(2026, 1, 1), "uri")


def test_outcomes_are_derived_again_from_what_was_measured(tmp_path: Path) -> None:
    """Broken: who writes `pass` beside a measurement that misses its limit would have it promoted."""
    demand_passed(checks_of(cosine(0.995, Outcome.PASS)), tmp_path, date(2026, 1, 1), "uri")
    for lie in (0.93, None, float("nan")):
        with pytest.raises(GateError, match="a check says pass, and its own measurement does not: cosine"):
            demand_passed(checks_of(cosine(lie, Outcome.PASS)), tmp_path, date(2026, 1, 1), "uri")


def decibels(metric: str, measured: float) -> dict[str, Any]:
    """A manifest whose only tolerance is this metric, and says pass."""
    gate = Gate(metric=metric, limit=20.0, direction="at_least", unit="dB")
    check = Check(gate=gate, outcome=Outcome.PASS, measured=measured, reason="", batch_size=1)
    whole = checks_of(check)
    return {**whole, "job": {**whole["job"], "gates": [plain(gate)]}}


@pytest.mark.parametrize("metric", ["snr_db", "mean_snr_db", "psnr_db", "mean_psnr_db", "python:mine:metric"])
def test_no_noise_at_all_is_a_measurement(metric: str, tmp_path: Path) -> None:
    """Broken: a candidate whose answers have the very bits of the original's, so infinite decibels, could never be
    promoted or verified."""
    demand_passed(decibels(metric, float("inf")), tmp_path, date(2026, 1, 1), "uri")
    for lie in (float("-inf"), float("nan"), 19.0):
        with pytest.raises(GateError, match="its own measurement does not"):
            demand_passed(decibels(metric, lie), tmp_path, date(2026, 1, 1), "uri")
    with pytest.raises(GateError, match="its own measurement does not"):  # no cosine is infinite
        demand_passed(decibels("cosine", float("inf")), tmp_path, date(2026, 1, 1), "uri")


def test_an_interval_open_at_its_better_end_holds(tmp_path: Path) -> None:
    """Broken: a relative drop over few right answers, whose better end no samples bound, was told as unmeasured."""
    gate = Gate(metric="accuracy", limit=0.1, direction="at_most", confidence=0.95)
    check = Check(gate=gate, outcome=Outcome.PASS, measured=-0.5, reason="", interval=(float("-inf"), 0.05))
    assert holds(check)
    assert not holds(replace(check, interval=(-0.5, float("inf"))))
    assert not holds(replace(check, interval=(float("nan"), 0.05)))


def test_a_verdict_without_the_checks_of_its_own_job_promotes_nothing(tmp_path: Path) -> None:
    """Broken: a verdict could pass by leaving out what it would fail, or by limits that nobody set."""
    loose = replace(cosine(0.5, Outcome.PASS), gate=replace(COSINE, limit=0.1))
    with pytest.raises(GateError, match="no tolerance of its own job was looked at, at batch size 1"):
        demand_passed(checks_of(loose), tmp_path, date(2026, 1, 1), "uri")
    with pytest.raises(GateError, match="how many samples it was validated with at batch size 1"):
        demand_passed(checks_of(cosine(1.0, Outcome.PASS), batch_size=8), tmp_path, date(2026, 1, 1), "uri")
    speed = Gate(metric="speedup", limit=1.0, direction="at_least", unit="ratio")
    asked = {**checks_of(cosine(1.0, Outcome.PASS)), "performance": [plain(speed)]}
    with pytest.raises(GateError, match="its gate min_speedup was not looked at"):
        demand_passed(asked, tmp_path, date(2026, 1, 1), "uri")


def test_a_soak_that_the_policy_asks_for_is_part_of_the_verdict(tmp_path: Path) -> None:
    """Broken: a version whose policy asks for a soak is promoted, though nothing says that it was called for that long;
    or one from before there was a soak can't be promoted any more."""
    held = cosine(1.0, Outcome.PASS)
    gate = Gate(metric="soak", limit=0.0, direction="at_most")
    soaked = Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason="")
    asked, not_asked, before = ({"budget": budget} for budget in ({"soak_seconds": 2.0}, {"soak_seconds": 0.0}, {}))
    with pytest.raises(GateError, match=r"its policy asks for a soak \(budget.soak_seconds\), and nothing says"):
        demand_passed({**checks_of(held), **asked}, tmp_path, date(2026, 1, 1), "uri")
    demand_passed({**checks_of(held, soaked), **asked}, tmp_path, date(2026, 1, 1), "uri")
    for budget in (not_asked, before):
        demand_passed({**checks_of(held), **budget}, tmp_path, date(2026, 1, 1), "uri")


def test_what_no_validation_can_pass_is_not_sent_to_one(tmp_path: Path) -> None:
    """Broken: a model that was compiled for other hardware, with a limit on what is served, is sent to `validate` again
    and again, which never looks at that limit."""
    speed, rate = (Gate(metric=name, limit=1.0, direction="at_least") for name in ("speedup", "throughput_at_p99"))
    drafted = {**checks_of(), "verdict": None}
    for gates, says in (((speed,), "compile-stage validate uri"), ((speed, rate), "run the stage on a machine")):
        with pytest.raises(GateError) as refused:
            demand_passed({**drafted, "performance": plain(gates)}, tmp_path, date(2026, 1, 1), "uri")
        assert says in str(refused.value.fix)
        assert ("compile-stage validate" in str(refused.value.fix)) is (rate not in gates)


def test_a_validation_that_passed_promotes_what_was_compiled_for_other_hardware(tmp_path: Path) -> None:
    """Broken: a validation that failed, whose figures miss a gate, that left out a gate on speed, that was made on a
    machine that the target is not for, or that nobody signed where signatures are demanded, moves an alias; or one
    that is sound does not, since another one is not."""
    path = tiny_bundle.save_bundle(tmp_path)
    sound, off = (checks_of(cosine(value, Outcome.PASS))["verdict"] for value in (0.9999, 0.1))
    drafted = {**checks_of(), "verdict": None, "key": "sha256:1"}

    def attach(cpu: str = "this CPU", *, passed: bool = True, verdict: Any = sound) -> None:
        machine = replace(hardware(), cpu=cpu)
        found = {
            "key": "sha256:1", "artifact": "sha256:0", "hardware": plain(machine), "fingerprint": machine.fingerprint,
            "passed": passed, "timing": {}, "runtime": {}, "verdict": verdict,
        }  # fmt: skip
        write_validation(found, path / "validations")

    def demand(trust: Trust | None = None, **fields: Any) -> None:
        demand_passed({**drafted, **fields}, path, date(2026, 1, 1), "uri", trust)

    attach(passed=False)
    with pytest.raises(GateError, match="no validation is attached to it that passed, so it can't be promoted"):
        demand()
    attach(verdict=off)
    with pytest.raises(GateError, match="cosine"):
        demand()
    attach("another CPU")
    demand()  # one of two
    attach()
    demand()
    speed = plain((Gate(metric="speedup", limit=1.0, direction="at_least"),))
    with pytest.raises(GateError, match="speedup"):
        demand(performance=speed)
    elsewhere = plain(factories.job(where=factories.target(name="cpu", hardware={"machine": "sparc"})))
    with pytest.raises(GateError, match="its validation is of a machine that it is not for"):
        demand(job={**elsewhere, "gates": [plain(COSINE)]})
    with pytest.raises(GateError, match="passed and is signed by somebody trusted"):
        demand(Trust())


@pytest.mark.parametrize(
    ("gate", "measured", "interval", "passes"),
    [
        (Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95), 0.0, (-0.01, 0.009), True),
        (Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95), 0.0, (-0.01, 0.02), False),
        (Gate(metric="accuracy", limit=0.01, direction="at_most", confidence=0.95), 0.0, None, False),
        (Gate(metric="speedup", limit=1.0, direction="at_least"), 1.0, (0.985, 1.02), True),
        (Gate(metric="speedup", limit=1.0, direction="at_least"), 1.4, (0.9, 1.9), False),
        (Gate(metric="size_mb", limit=10.0, direction="at_most"), 10.0, None, True),
        (Gate(metric="size_mb", limit=10.0, direction="at_most"), 10.1, None, False),
    ],
)
def test_the_rule_of_each_kind_of_check_is_applied_again(
    gate: Gate, measured: float, interval: tuple[float, float] | None, passes: bool
) -> None:
    """Broken: an honest verdict would not be promoted, or a check would hold by its mean where its interval decides."""
    check = Check(gate=gate, outcome=Outcome.PASS, measured=measured, reason="", interval=interval)
    assert holds(check) is passes


def test_of_several_targets_that_moved_one_alias_the_last_has_it() -> None:
    """Broken: the report would name two versions that one alias points to, and its reader serve the one that it does
    not point to."""

    def moved(name: str, version: str, alias: str | None) -> TargetResult:
        receipt = Receipt(
            uri=f"models:/m-compiled/{version}", name="m-compiled", version=version, digest="", created=True,
            promoted_to=alias, previous="1" if alias else None,
        )  # fmt: skip
        return replace(TARGET, policy=target_policy(target(name)), receipt=receipt)

    variants = [moved("x", "5", "other"), moved("y", "5", "other")]  # of one version
    targets = [moved("a", "2", "prod"), moved("b", "3", "prod"), moved("c", "4", None), *variants]
    first, *rest = where_aliases_ended(targets)
    assert first.receipt is not None
    assert (first.receipt.promoted_to, first.receipt.previous) == (None, None)
    assert first.receipt.note == "alias 'prod' went on to models:/m-compiled/3, of target b"
    assert rest == targets[1:]


@pytest.mark.parametrize(
    ("theirs", "ours", "newer"),
    [
        ("models:/net/10", "models:/net/9", True),
        ("models:/net/9", "models:/net/10", False),
        ("models:/net/9", "models:/net/9", False),
        ("models:/other/10", "models:/net/9", False),
        ("models:/net/prod", "models:/net/9", False),
        ("runs:/0a/model", "models:/net/9", False),
        ("models:/net/10", "runs:/0a/model", False),
    ],
)
def test_the_later_version_of_one_model_is_the_newer_source(theirs: str, ours: str, newer: bool) -> None:
    """Broken: a run that began late takes the alias from what was made of a newer version, or a run of the newest one
    would never get it."""
    found = newer_source({"source": {"uri": theirs}}, source(uri=ours))
    assert found == (theirs if newer else None)


Looked = Callable[..., Incumbent]


@pytest.fixture
def look_at(tmp_path: Path) -> Looked:
    """What the alias points to is a published version with these fields in its manifest, on a machine of that
    fingerprint; `validated` is what a validation on it found."""

    def look(
        *,
        validated: bool | None = None,
        successor: Artifact | None = None,
        machine: str = "",
        backend: str = "",
        threads: int | None = None,
        uri: str = "models:/m-compiled/1",
        **fields: Any,
    ) -> Incumbent:
        model = Path(tempfile.mkdtemp(dir=tmp_path)) / "saved"
        path = tiny_bundle.save_bundle(model, **{**tiny_bundle.manifest_fields(), **fields})
        manifest = read_manifest(path)
        manifest["artifact"]["backend"] = backend or manifest["artifact"]["backend"]
        here = replace(hardware(), cpu=machine) if machine else hardware()
        if validated is not None:
            found = {
                "key": manifest["key"], "artifact": manifest["artifact"]["digest"], "hardware": plain(here),
                "fingerprint": here.fingerprint, "passed": validated, "timing": {}, "runtime": {},
            }  # fmt: skip
            write_validation(found, path / "validations")
        context = replace(factories.run_context(tmp_path), hardware=here)
        current = Receipt(uri=uri, name="m-compiled", version="1", digest="sha256:1", created=False)
        other = artifact(digest="sha256:new")
        return _comparable(context, source(uri="models:/m/1"), current, successor or other, threads, (path, manifest))

    return look


def test_what_was_proven_on_this_machine_is_compared(look_at: Looked) -> None:
    """Broken: an alias moves to a slower artifact, since the one that it pointed to was not measured beside it."""
    for found in (look_at(), look_at(verdict=None, validated=True), look_at(machine="another CPU", validated=True)):
        assert (found.obstacle, found.newer) == ("", "")
        assert found.artifact is not None
        assert Path(found.path, "MLmodel").is_file()


def test_what_was_proven_elsewhere_alone_is_no_measure_and_the_alias_stays(look_at: Looked) -> None:
    """Broken: latencies of two machines are compared, or what failed here, or was never validated, counts as proven
    here."""
    for found in (
        look_at(machine="another CPU"),
        look_at(machine="another CPU", validated=False),
        look_at(verdict=None),
        look_at(verdict=None, validated=False),
    ):
        assert found.artifact is None
        assert found.obstacle.startswith("models:/m-compiled/1 was measured on")


def test_the_same_files_with_the_same_options_need_no_comparison(look_at: Looked) -> None:
    """Broken: a version is held to be slower than itself by noise; or another setting of the same files, or
    another runtime that reads the same graph, is never measured."""
    old = look_at().artifact
    assert old is not None
    assert look_at(successor=old) == Incumbent()
    assert look_at(successor=replace(old, options={"threads": 2})).artifact is not None
    assert look_at(successor=replace(old, backend="onnxruntime-openvino")).artifact is not None


def test_the_same_files_with_other_threads_are_compared_with_those_that_serve(look_at: Looked) -> None:
    """Broken: a version for one thread takes the place of one for four, and nobody measures that it is slower."""
    old = look_at().artifact
    assert old is not None
    assert look_at(successor=old, threads=1) == Incumbent()
    found = look_at(successor=old, threads=4)
    assert found.artifact is not None
    assert found.threads == 1


def test_fewer_threads_are_named_where_they_make_it_slower() -> None:
    """Broken: a version is said to be slower than another, and nobody learns that it has fewer threads."""
    before = Incumbent(artifact=artifact(digest="sha256:old"), threads=8, uri="models:/m-compiled/1")
    slower = measurement(timings=(timing(1, 0.5, 0.55), timing(8, 0.5, 0.55)))
    with pytest.raises(GateError, match=r"times that of models:/m-compiled/1 with its 8 threads \(1 here\)"):
        promote(SimpleNamespace(), source(), TARGET, "prod", before, slower)  # type: ignore[arg-type]


def test_what_cannot_run_here_or_is_newer_keeps_the_alias(look_at: Looked) -> None:
    """Broken: an older source takes the place of a newer one, or a run ends where the other's runtime is missing."""
    newer = {**tiny_bundle.manifest_fields()["source"], "uri": "models:/m/2"}
    assert look_at(source=newer).newer == "models:/m-compiled/1, made from models:/m/2"
    assert look_at(source={**newer, "uri": "models:/m/1"}).newer == ""
    assert plugins.missing(plugins.load("backends", "tensorrt")) is not None, "it is not installed where tests run"
    names = ("tensorrt", "coreml", "tvm", "executorch")
    absent = look_at(backend=next(name for name in names if plugins.missing(plugins.load("backends", name))))
    assert absent.artifact is None
    assert absent.obstacle.startswith("models:/m-compiled/1 can't run here: ")


def test_code_that_nobody_vouches_for_is_not_run_beside(look_at: Looked) -> None:
    """Broken: whoever moves an alias has his code run by the next run, which measures what the alias points to."""
    elsewhere = "folder:/elsewhere/m-compiled/1"  # no registry that this machine is set up for
    found = look_at(uri=elsewhere, data={"samples": {}, "spec": {"validation": {"source": "python:theirs:samples"}}})
    assert found.artifact is None
    assert "may not be run: it was not packaged on this machine" in found.obstacle


def test_what_could_not_be_compared_keeps_the_alias() -> None:
    """Broken: an alias moves away from what was measured on another machine, and what it serves becomes slower."""
    context: Any = SimpleNamespace()
    before = Incumbent(obstacle="models:/m-compiled/1 was measured on x86", uri="models:/m-compiled/1")
    with pytest.raises(GateError, match="was measured on x86, so the two can't be compared") as refused:
        promote(context, source(), TARGET, "prod", before, measurement(timings=(timing(1, 2.0, 2.1),)))
    assert "compile-stage promote models:/m-compiled/2 --alias prod" in refused.value.fix


def test_of_what_lost_its_files_nobody_is_told_to_compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: whoever deleted a version's files by hand is told to compare them with the new ones."""

    class Emptied:
        def fetch(self, uri: str, into: Path) -> Path:
            raise RegistryError(f"{uri} has no files", code=Code.REGISTRY)

    monkeypatch.setattr("compile_stage.core.plugins.load", lambda group, name: Emptied())
    context = factories.run_context(tmp_path)
    uri = "models:/m-compiled/1"
    current = Receipt(uri=uri, name="m-compiled", version="1", digest="sha256:1", created=False)
    before = _look_at(context, source(), current, artifact(digest="sha256:new"), None)
    with pytest.raises(GateError, match="can't be had") as refused:
        promote(context, source(), TARGET, "prod", replace(before, uri=uri), None)
    assert refused.value.fix.startswith("bring its files back, or give it up: compile-stage promote ")
