"""A small trained language model by a real runtime: what its gates tell apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_lms
import small_texts

from compile_stage.core import plugins
from compile_stage.core.generation import INPUT_IDS, LOGITS, token_inputs
from compile_stage.core.language_models import fitting_gates
from compile_stage.core.records import Artifact, Check, Gate, Generation, Outcome, PortableModel, SourceModel, Target
from compile_stage.measure.metrics import ComparedSamples, check_outputs
from compile_stage.policy.load import load_policy
from compile_stage.serving.generation import GenerationSession, opened_as_called

pytest.importorskip("transformers", reason="the model is a transformers pipeline")
pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and PyTorch's own deprecations

GENERATION = Generation(prompt_tokens=32, new_tokens=12)
TARGET = Target(name="cpu", generation=GENERATION)
SEQUENCES = 48

Rounding = Callable[[str, np.ndarray], np.ndarray]


def bits(weights: np.ndarray, count: int) -> np.ndarray:
    """Rounded to so many bits, with one scale for all of them."""
    most = 2 ** (count - 1)
    scale = np.abs(weights).max() / max(1, most - 1)
    return np.clip(np.round(weights / scale), -most, most - 1) * scale


class Model:
    """The graph, the original's answers, and the shipped limits."""

    def __init__(self, folder: Path, kind: str = "trained") -> None:
        path = small_lms.save(folder / "model", kind)
        source = SourceModel(
            uri=f"folder:{path}", name="m", version="", flavor="transformers", path=str(path), digest="d"
        )
        exporter: Any = plugins.load("sources", "transformers")
        self.folder, self.compiler = folder, plugins.load("backends", "onnxruntime")
        (folder / "graph").mkdir()
        self.portable: PortableModel = exporter.export(source, {}, folder / "graph")
        lines = small_texts.corpus()
        texts = [" ".join(lines[i : i + 3]) for i in range(0, 3 * SEQUENCES, 3)]
        self.ids = np.concatenate([rows[:1] for rows in exporter.token_windows(source, texts, GENERATION.tokens)])
        with exporter.open(source, TARGET) as original:
            self.expected = original.run({INPUT_IDS: self.ids})[LOGITS]
        (folder / "p.yaml").write_text(
            "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {}}\n"
        )
        self.shipped = load_policy(folder / "p.yaml").targets[0].tolerances

    def rewritten(self, rounded: Rounding) -> PortableModel:
        """The graph with its matrices rounded."""
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(self.portable.path)
        for tensor in graph.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
                made = rounded(tensor.name, numpy_helper.to_array(tensor)).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(made, tensor.name))
        path = self.folder / "rewritten.onnx"
        onnx.save(graph, path)
        return replace(self.portable, path=str(path))

    def compiled(self, portable: PortableModel, name: str) -> Artifact:
        """By ONNX Runtime."""
        (scheme, *_) = self.compiler.schemes(TARGET, "fp32")
        made = self.compiler.compile(portable, scheme, TARGET, "job", self.folder / name)
        return replace(made, generation=GENERATION)

    def answered(self, portable: PortableModel, name: str) -> np.ndarray:
        """Logits of all new tokens."""
        with opened_as_called(self.compiler, self.compiled(portable, name), 1) as session:
            return np.asarray(session.run({INPUT_IDS: self.ids})[LOGITS])

    def judged(self, answers: np.ndarray, precision: str) -> dict[str, Check]:
        """By the shipped limits of that precision: what `plan` gives a language model."""
        gates: tuple[Gate, ...] = fitting_gates(self.shipped[precision], language_model=True)
        samples = ComparedSamples(min_samples=32, real=True, labels=self.ids[:, -GENERATION.new_tokens :])
        checks = check_outputs(gates, {LOGITS: answers}, {LOGITS: self.expected}, samples, batch_size=1, seed=0)
        return {check.gate.metric: check for check in checks}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("language-model"))


def test_precisions_hold_their_shipped_limits_and_are_told_apart(model: Model) -> None:
    """Broken: a right conversion fails, an int4 artifact passes for 16 bits, or nobody could tell them apart."""
    int4: Any = plugins.load("lowerings", "int4")
    scheme = next(s for s in model.compiler.schemes(TARGET, "int4"))
    (model.folder / "int4").mkdir()
    answers = {
        "fp32": model.answered(model.portable, "fp32-artifact"),
        "fp16": model.answered(model.rewritten(lambda _, w: w.astype(np.float16)), "fp16-artifact"),
        "int4": model.answered(int4.lower(model.portable, scheme, None, (), model.folder / "int4"), "int4-artifact"),
    }
    found = {precision: model.judged(logits, precision) for precision, logits in answers.items()}
    for precision, checks in found.items():
        assert [c.reason for c in checks.values() if c.outcome is not Outcome.PASS] == [], precision
        assert {"token_kl", "token_top1_agreement", "perplexity"} <= checks.keys()
        assert not {"cosine", "max_rel", "column_nrmse"} & checks.keys(), "those are for other models"
    kl = [found[precision]["token_kl"].interval for precision in ("fp32", "fp16", "int4")]
    assert kl[0][1] < kl[1][0], "the interval of fp32 ends before that of fp16"
    assert kl[1][1] < kl[2][0], "the interval of fp16 ends before that of int4"
    assert model.judged(answers["int4"], "fp32")["token_kl"].outcome is Outcome.FAIL


def test_a_sabotaged_layer_fails(model: Model) -> None:
    """Broken: a lowering rounds one layer to 2 bits, and the model is published as int4."""
    answers = model.answered(
        model.rewritten(lambda name, weights: bits(weights, 2) if "lm_head" in name else weights), "sabotaged"
    )
    checks = model.judged(answers, "int4")
    for metric in ("token_kl", "perplexity"):
        assert checks[metric].outcome is Outcome.FAIL
        assert checks[metric].interval[0] > 2 * checks[metric].gate.limit, "it is no matter of luck"


def test_a_cache_that_is_lost_fails(tmp_path: Path) -> None:
    """Broken: a runtime hands on an empty cache, so that each token is read as if it were the first."""
    model = Model(tmp_path, "gpt2")  # wide random weights look at all tokens; a network trained for seconds hardly does
    with model.compiler.open(model.compiled(model.portable, "forgetful"), 1) as session:

        class Forgetful:
            signature = session.signature

            def step(self, inputs: Any, cache: Any) -> tuple[Any, Any]:
                alone = token_inputs(session.signature, inputs[INPUT_IDS], 0)
                return session.step(alone, None)

        answers = GenerationSession(Forgetful(), GENERATION).run({INPUT_IDS: model.ids})[LOGITS]
    check = model.judged(answers, "fp16")["token_kl"]
    assert check.outcome is Outcome.FAIL
    assert check.interval[0] > 100 * check.gate.limit, "it is no matter of luck"
    np.testing.assert_allclose(answers[:, 0], model.expected[:, 0], atol=1e-3)
