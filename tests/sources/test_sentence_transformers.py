"""sentence-transformers: one graph from token ids to the vector, and texts answered as `SentenceTransformer.encode`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import small_texts

from compile_stage.core.records import Compliance, SourceModel, Target
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.serving.text import TextProcessor
from compile_stage.sources.sentence_transformers import SentenceTransformersSource

from .conftest import Proof, source_of

# Importing it takes seconds, and each test process collects every file.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("sentence_transformers"), reason='pip install "compile-stage[sentence-transformers]"'
)


def save(
    folder: Path, length: int = 32, params: Mapping[str, Any] | None = None, column: str | None = None
) -> SourceModel:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dropout, LayerNorm, Normalize, Pooling, Transformer

    tokenizer = small_texts.word_pieces()
    network = small_texts.network("BertModel", tokenizer)
    network.save_pretrained(folder / "network")
    tokenizer.save_pretrained(folder / "network")
    transformer = Transformer(str(folder / "network"), max_seq_length=length)
    width = transformer.get_embedding_dimension()
    after = [] if params else [Dropout(0.5), LayerNorm(width), Normalize()]
    model = SentenceTransformer(
        modules=[transformer, Pooling(width), *after],
        device="cpu", prompts={"query": "find: "},
    )  # fmt: skip
    example = pd.DataFrame({column: small_texts.TEXTS}) if column else small_texts.TEXTS
    mlflow.sentence_transformers.save_model(
        model, folder / "model", input_example=example, pip_requirements=["sentence-transformers"],
        signature=mlflow.models.infer_signature(example, model.encode(small_texts.TEXTS), params),
    )  # fmt: skip
    return source_of(folder / "model", "sentence_transformers")


@pytest.mark.slow
def test_vectors_are_those_of_encode_and_of_the_graph(tmp_path: Path, prove: Proof) -> None:
    """Broken: the exported graph, or the published predict(), gives other vectors than the original; a model with a
    LayerNorm or Dropout behind the pooling is refused."""
    source, exporter = save(tmp_path), SentenceTransformersSource()
    example = exporter.example(source)
    assert example is not None
    made = prove(source, example)
    assert [str(spec) for spec in made.signature.outputs] == ["sentence_embedding: float32[batch, 32]"]
    assert made.smallest == {}
    assert made.largest["input_ids"] == (None, 64)  # its positions
    assert {spec.shape for spec in made.signature.inputs} == {("batch", "sequence")}

    processor = exporter.processor(source, tmp_path / "processor")
    assert processor.refusal == ""
    texts = [*small_texts.TEXTS, " ".join(small_texts.TEXTS * 4), " padded "]
    expected = mlflow.pyfunc.load_model(source.path).predict(texts)
    with exporter.open(source, Target(name="cpu")) as session:
        text = TextProcessor(tmp_path / "processor", processor.text, session.signature, batch_size=2)
        for data in (texts, pd.DataFrame(texts), [{"a": one} for one in texts], pd.DataFrame([{"a": texts}])):
            found = text.predict(data, None, session.run)
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, atol=1e-5)
        alone = text.predict(texts[0], {"normalize_embeddings": True}, session.run)
    np.testing.assert_allclose(alone, expected[0], atol=1e-5)
    predicted = exporter.predictions(source, example)
    assert predicted is not None
    assert predicted.answer["form"] == f"float32 array [{len(predicted.texts)}, 32]"


@pytest.mark.slow
def test_params_and_columns_of_the_signature_are_those_of_the_comparison(tmp_path: Path) -> None:
    """Broken: predict() of a model with `normalize_embeddings` in its signature was compared with vectors that are not
    normalized, and one whose signature names a column was asked in a list, which MLflow refuses: neither could be
    promoted."""
    source, exporter = (
        save(tmp_path, params={"normalize_embeddings": True}, column="text"),
        SentenceTransformersSource(),
    )
    assert exporter.processor(source, tmp_path / "processor").refusal == ""
    found = exporter.predictions(source, exporter.tokenize(source, small_texts.TEXTS))
    assert found is not None
    assert found.column == "text"
    expected = mlflow.pyfunc.load_model(source.path).predict(pd.DataFrame({"text": found.texts}))
    assert refuse_prediction(plain_prediction(expected), found.answer, 1e-5) is None


@pytest.mark.slow
def test_a_param_that_is_not_known_here_keeps_text_out(tmp_path: Path) -> None:
    """Broken: a model with `prompt_name` in its signature is published, and its predict() refuses every text."""
    source = save(tmp_path, params={"prompt_name": "query"})
    refusal = SentenceTransformersSource().processor(source, tmp_path / "processor").refusal
    assert "no param 'prompt_name'" in refusal


def test_only_modules_that_are_data_are_loaded(tmp_path: Path) -> None:
    """Broken: a class or function that a model's files name is imported, or a pickle of its weights is loaded."""
    source, exporter = save(tmp_path), SentenceTransformersSource()
    folder = Path(source.path) / "model.sentence_transformer"
    modules = folder / "modules.json"
    honest = modules.read_text()

    def with_module(**changed: object) -> str:
        modules.write_text(json.dumps([*json.loads(honest)[:1], {**json.loads(honest)[1], **changed}]))
        reason = exporter.refuse(source, Compliance(allow_pickle=True)) or ""
        modules.write_text(honest)
        return reason

    assert "os.system" in with_module(type="os.system")
    assert "sentence_transformers.models.Router" in with_module(type="sentence_transformers.models.Router")
    assert "not the model's own" in with_module(path="../../..")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "activation_function": "os.system"}))
    assert "os.system" in (exporter.refuse(source, Compliance()) or "")
    (folder / "modeling.py").write_text("print('hostile')")
    assert "modeling.py" in (exporter.refuse(source, Compliance()) or "")
    (folder / "modeling.py").rename(folder / "pytorch_model.bin")
    assert "pickle" in (exporter.refuse(source, Compliance()) or "")


def test_a_cross_encoder_is_refused(tmp_path: Path) -> None:
    """Broken: a model that scores pairs of texts is published as one that answers vectors of single texts, since
    MLflow loads it so, and nothing says it."""
    from sentence_transformers import CrossEncoder

    tokenizer = small_texts.word_pieces()
    network = small_texts.network("BertForSequenceClassification", tokenizer)
    network.save_pretrained(tmp_path / "network")
    tokenizer.save_pretrained(tmp_path / "network")
    mlflow.sentence_transformers.save_model(
        CrossEncoder(str(tmp_path / "network"), device="cpu"), tmp_path / "model", pip_requirements=["transformers"]
    )
    source = source_of(tmp_path / "model", "sentence_transformers")
    reason = SentenceTransformersSource().refuse(source, Compliance()) or ""
    assert "it is a CrossEncoder" in reason
    assert "pipeline('text-classification', model=encoder.transformers_model" in reason


def test_a_prompt_before_each_text_keeps_text_out(tmp_path: Path) -> None:
    """Broken: the published model leaves out the prompt that the original puts before each text."""
    source = save(tmp_path)
    settings = Path(source.path) / "model.sentence_transformer" / "config_sentence_transformers.json"
    whole = {**json.loads(settings.read_text()), "prompts": {"query": "query: "}, "default_prompt_name": "query"}
    settings.write_text(json.dumps(whole))
    assert "prompt" in SentenceTransformersSource().processor(source, tmp_path / "processor").refusal
