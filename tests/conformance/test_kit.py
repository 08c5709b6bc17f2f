"""The kit itself: each way of being wrong is caught by the check that is made for it."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.digest import digest_tree, tree_size
from compile_stage.core.tensors import Signature
from compile_stage.testing import CHECKS, Case, Finding, check_backend, check_case, models


class Bent:
    """A session that does one thing wrong to what a good one answers."""

    def __init__(self, good: Any, bend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.good, self.bend, self.signature = good, bend, good.signature

    def run(self, batch: Any) -> Any:
        return self.bend(self.good.run(batch))


class BadSession(OnnxRuntime):
    """A good backend whose answers are bent. The last output of the perceptron is a float: `probabilities`."""

    def __init__(self, bend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.bend = bend

    @contextlib.contextmanager
    def open(self, artifact: Any, threads: int) -> Iterator[Any]:
        with super().open(artifact, threads) as session:
            yield Bent(session, self.bend)


def on(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda outputs: {key: change(value) if key == name else value for key, value in outputs.items()}


def with_nan(value: Any) -> Any:
    bent = value.copy()
    bent[0, 0] = np.nan
    return bent


RANDOM = np.random.default_rng(0)


def noisy(value: Any) -> Any:
    return value + RANDOM.normal(size=value.shape).astype(value.dtype) * np.float32(1e-6)


def in_main_thread(value: Any) -> Any:
    return value if threading.current_thread() is threading.main_thread() else np.zeros_like(value)


class Buffer:
    """Hands out the same array every time."""

    def __init__(self) -> None:
        self.arrays: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        kept = self.arrays.setdefault(value.shape, value)
        kept[...] = value
        return kept


BENT = {
    "lost output": (lambda out: {"probabilities": out["probabilities"]}, "answers_like_the_reference"),
    "renamed output": (
        lambda out: {"label": out["label"], "proba": out["probabilities"]},
        "answers_like_the_reference",
    ),
    "outputs in another order": (lambda out: dict(reversed(out.items())), "answers_like_the_reference"),
    "NaN": (on("probabilities", with_nan), "answers_like_the_reference"),
    "empty arrays": (on("probabilities", lambda value: value[:, :0]), "answers_like_the_reference"),
    "no rows": (on("probabilities", lambda value: value[:0]), "answers_like_the_reference"),
    "fewer iterations": (on("probabilities", lambda value: value[:1]), "answers_like_the_reference"),
    "more iterations": (on("label", lambda value: np.concatenate([value, value])), "answers_like_the_reference"),
    "another dtype": (on("probabilities", lambda value: value.astype(np.float64)), "answers_like_the_reference"),
    "a list instead of an array": (on("label", list), "answers_like_the_reference"),
    "all zeros": (on("probabilities", np.zeros_like), "answers_like_the_reference"),
    "wrong labels": (on("label", lambda value: value + 1), "answers_like_the_reference"),
    "another answer each time": (on("probabilities", noisy), "is_deterministic"),
    "its own buffer": (on("probabilities", Buffer()), "gives_its_arrays_away"),
    "zeros beside the main thread": (on("probabilities", in_main_thread), "answers_in_any_thread"),
    "read-only arrays": (on("probabilities", lambda v: (v.setflags(write=False), v)[1]), "gives_its_arrays_away"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.perceptron(tmp_path_factory.mktemp("perceptron"))


def case(backend: Any, made: Any, folder: Path) -> Case:
    model, samples = made
    scheme = OnnxRuntime().schemes(Case(backend, model, samples, None, folder).target, "fp32")[0]  # type: ignore[arg-type]
    return Case(backend, model, samples, scheme, folder)


def failed(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.check: finding.reason for finding in findings if not finding.passed}


@pytest.mark.parametrize("wrong", BENT)
def test_bent_answer_is_caught(wrong: str, made: Any, tmp_path: Path) -> None:
    bend, check = BENT[wrong]
    reason = CHECKS[check](case(BadSession(bend), made, tmp_path))
    assert reason, f"{wrong} passed {check}"


def test_good_backend_passes_what_the_bent_ones_fail(made: Any, tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    assert failed(check_case(case(OnnxRuntime(), made, tmp_path))) == {}


class TalksAnyway(OnnxRuntime):
    """Takes whatever it is given, and goes on after its context."""

    @contextlib.contextmanager
    def open(self, artifact: Any, threads: int) -> Iterator[Any]:
        inner = super().open(artifact, threads)
        session = inner.__enter__()

        class Lenient:
            signature = session.signature

            def run(self, batch: Any) -> Any:
                with contextlib.suppress(Exception):
                    return session.run(batch)
                return {}

        yield Lenient()


class LiesAboutFiles(OnnxRuntime):
    def compile(self, *args: Any, **more: Any) -> Any:
        return replace(super().compile(*args, **more), digest="sha256:0", executed={})


class LosesAnOutput(OnnxRuntime):
    def compile(self, *args: Any, **more: Any) -> Any:
        artifact = super().compile(*args, **more)
        signature = Signature(inputs=artifact.signature.inputs, outputs=artifact.signature.outputs[:1])
        return replace(artifact, signature=signature)


class KeepsItElsewhere(OnnxRuntime):
    """The artifact points to a file outside its folder."""

    def compile(self, model: Any, scheme: Any, target: Any, job_id: str, into: Path, calibration: Any = None) -> Any:
        artifact = super().compile(model, scheme, target, job_id, into, calibration)
        return replace(artifact, options={**artifact.options, "model": model.path})

    @contextlib.contextmanager
    def open(self, artifact: Any, threads: int) -> Iterator[Any]:
        elsewhere = Path(artifact.options["model"])
        plain = {key: value for key, value in artifact.options.items() if key != "model"}
        with super().open(replace(artifact, path=str(elsewhere.parent), options=plain), threads) as session:
            yield session


class Litters(OnnxRuntime):
    def compile(self, *args: Any, **more: Any) -> Any:
        Path("left-behind.tmp").write_text("")
        return super().compile(*args, **more)


class Numbers(OnnxRuntime):
    """What it writes depends on how much it wrote before, as of a library that numbers what has no name."""

    count = 0

    def compile(self, model: Any, scheme: Any, target: Any, job_id: str, into: Path, calibration: Any = None) -> Any:
        artifact = super().compile(model, scheme, target, job_id, into, calibration)
        self.count += 1
        (into / "number").write_text(str(self.count))
        return replace(artifact, digest=digest_tree(into), size_bytes=tree_size(into))


class RefusesNothing(OnnxRuntime):
    def refuse_target(self, target: Any) -> None:
        return None

    def refuse(self, model: Any, target: Any) -> None:
        return None


class RefusesWithoutWords(OnnxRuntime):
    def refuse_target(self, target: Any) -> Any:
        return False if target.device != "cpu" or target.options else None


class NamesTwice(OnnxRuntime):
    def schemes(self, target: Any, precision: str) -> Any:
        return super().schemes(target, "fp32" if precision == "bf16" else precision)


class Crashes(OnnxRuntime):
    def compile(self, *args: Any, **more: Any) -> Any:
        raise RuntimeError("the compiler gave up")


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (TalksAnyway, "refuses_wrong_input"),
        (TalksAnyway, "ends_with_its_context"),
        (LiesAboutFiles, "writes_its_artifact"),
        (LiesAboutFiles, "reads_back_what_ran"),
        (LosesAnOutput, "keeps_names_and_types"),
        (KeepsItElsewhere, "is_self_contained"),
        (Litters, "leaves_nothing_behind"),
        (Numbers, "follows_others_as_it_says"),
        (RefusesNothing, "refuses_in_words"),
        (RefusesWithoutWords, "refuses_in_words"),
        (NamesTwice, "declares_schemes"),
    ],
)
def test_wrong_backend_is_caught(kind: Any, check: str, made: Any, tmp_path: Path) -> None:
    findings = {finding.check: finding for finding in check_case(case(kind(), made, tmp_path))}
    assert not findings[check].passed
    assert findings[check].reason


def test_a_crash_is_a_finding(made: Any, tmp_path: Path) -> None:
    """Every check that needs the artifact fails with what was raised; none is left out."""
    findings = check_case(case(Crashes(), made, tmp_path))
    assert len(findings) == len(CHECKS)
    assert "the compiler gave up" in failed(findings)["answers_like_the_reference"]


def test_nothing_looked_at_is_not_a_pass(made: Any, tmp_path: Path) -> None:
    model, samples = made
    (finding,) = check_backend(OnnxRuntime(), model, samples, tmp_path, precisions=())
    assert not finding.passed


def test_models_are_the_same_every_time(tmp_path: Path) -> None:
    for make in models.ALL:
        first, second = make(tmp_path / "a" / make.__name__), make(tmp_path / "b" / make.__name__)
        assert first[0].digest == second[0].digest
        assert first[1].digest == second[1].digest
    shutil.rmtree(tmp_path)
