"""A published text model answers what MLflow's pyfunc of the original pipeline answers: the processor that it carries,
around the original network, is laid beside that pyfunc, task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pandas as pd
import pytest
import small_texts

from compile_stage.core.records import SourceModel, Target
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.serving.text import TextProcessor
from compile_stage.sources import transformers_text
from compile_stage.sources.transformers import TransformersSource

from .conftest import source_of

pytest.importorskip("transformers", reason="the transformers source needs transformers")

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
LONG = " ".join(small_texts.TEXTS * 3)


class Pair:
    """The original's pyfunc and the processor around the original's network."""

    def __init__(self, source: SourceModel, folder: Path) -> None:
        self.made = TransformersSource().processor(source, folder)
        self.original = mlflow.pyfunc.load_model(source.path)
        self._source, self._folder = source, folder

    def answer(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        with TransformersSource().open(self._source, Target(name="cpu")) as session:
            processor = TextProcessor(self._folder, self.made.text, session.signature, batch_size=2)
            return processor.predict(data, params, session.run)

    def demand_same(self, data: Any, params: dict[str, Any] | None = None, *, enforced: bool = True) -> None:
        """Compare the two.

        Args:
            enforced: False: as behind another signature than that of the example, which has one column and no params.
        """
        original = self.original if enforced else self.original._model_impl
        expected, found = original.predict(data, params=params), self.answer(data, params)
        assert type(found) is type(expected)
        assert refuse_prediction(plain_prediction(found), plain_prediction(expected), 1e-5) is None, params


def pair(folder: Path, kind: str, task: str, tokenizer: Any = None, **settings: Any) -> Pair:
    path = small_texts.save(folder / "model", kind, task, tokenizer, **settings)
    made = Pair(source_of(path, "transformers"), folder / "processor")
    assert made.made.refusal == ""
    assert made.made.runtime.keys() == {"tokenizers"}
    return made


def test_a_classifier_answers_lists_frames_pairs_and_params_as_its_pyfunc(tmp_path: Path) -> None:
    """Broken: a client that sends text to the published classifier gets an error, or other labels and scores."""
    params = {"top_k": 2, "truncation": True, "max_length": 8}
    both = pair(
        tmp_path, "BertForSequenceClassification", "text-classification", **small_texts.named(small_texts.LABELS)
    )
    assert len({*both.answer(small_texts.corpus()[:40], {"truncation": True})["label"]}) > 1, (
        "one label for all texts shows little"
    )
    both.demand_same(small_texts.TEXTS)
    both.demand_same("good")
    both.demand_same(pd.DataFrame({"text": small_texts.TEXTS}))
    pairs = pd.DataFrame({"text": small_texts.TEXTS, "text_pair": small_texts.TEXTS[::-1]})
    both.demand_same(pairs, enforced=False)
    both.demand_same(pd.DataFrame(["'good'", "'bad'"]))  # MLflow's pyfunc reads a frame of Python literals as such
    with pytest.raises(InputRefusedError, match="at most 64"):
        both.answer([LONG])
    for given in ({"top_k": 2}, {"top_k": None}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}):
        both.demand_same(small_texts.TEXTS, given, enforced=False)
    for given in (params, {"truncation": True}, {"max_length": 9}):
        both.demand_same([LONG, "good"], given, enforced=False)
    with pytest.raises(InputRefusedError, match="no param 'temperature'"):
        both.answer(["good"], {"temperature": 1})


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_k": 2, "function_to_apply": "sigmoid"}], ids=str)
def test_defaults_of_the_signatures_params_are_those_of_the_answers(tmp_path: Path, params: dict[str, Any]) -> None:
    """Broken: a classifier whose signature has `top_k: 2` was compared without it, so it was published with tensors
    only."""
    kind = "BertForSequenceClassification"
    both = pair(tmp_path, kind, "text-classification", params=params, **small_texts.named(small_texts.LABELS))
    assert both.answer(["good"], params).shape == (1, 2)
    both.demand_same(small_texts.TEXTS, params)


def test_how_the_original_makes_batches_does_not_keep_text_out(tmp_path: Path) -> None:
    """Broken: a classifier that was logged with `batch_size` is published with tensors only."""
    config = {"batch_size": 2, "num_workers": 0}
    both = pair(tmp_path, "BertForSequenceClassification", "text-classification", model_config=config)
    assert both.made.text["defaults"] == config
    both.demand_same(small_texts.TEXTS)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 1},
        {"num_labels": 1, "problem_type": "regression"},
        {"problem_type": "multi_label_classification"},
    ],
)
def test_scores_are_made_of_logits_as_the_pipeline_does(settings: dict[str, Any], tmp_path: Path) -> None:
    """Broken: a regression is answered with probabilities, or several labels at once with their softmax."""
    both = pair(tmp_path, "BertForSequenceClassification", "text-classification", **settings)
    both.demand_same(small_texts.TEXTS)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_entities_are_grouped_as_the_pipeline_groups_them(kind: str, tmp_path: Path) -> None:
    """Broken: the published tagger joins or splits entities otherwise than the original."""
    tokenizer = small_texts.word_pieces() if kind == "Bert" else small_texts.byte_pairs()
    both = pair(tmp_path, f"{kind}ForTokenClassification", "token-classification", tokenizer, **small_texts.named(TAGS))
    both.demand_same(small_texts.TEXTS)
    both.demand_same(pd.DataFrame({"sentence": small_texts.TEXTS}))
    for strategy in ("none", "simple", "first", "max", "average"):
        given = {"aggregation_strategy": strategy}
        for text in small_texts.TEXTS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)  # of words that its tokenizer does not know
                wanted = both.original._model_impl.predict([text], params=given)
            assert both.answer([text], given) == wanted, (strategy, text)


def test_a_mask_is_filled_with_the_likeliest_word(tmp_path: Path) -> None:
    """Broken: the published model fills another word in, or answers one mask in the form of several."""
    both = pair(tmp_path, "BertForMaskedLM", "fill-mask")
    both.demand_same(["The [MASK] is published.", "A [MASK] of the model."])
    both.demand_same(["The [MASK] is published."])
    both.demand_same(["The [MASK] is [MASK].", "A [MASK] of the model."])
    both.demand_same(["The [MASK] is [MASK]."])
    with pytest.raises(InputRefusedError, match="no mask token"):
        both.answer(["no mask here"])


def test_features_are_those_of_the_first_text(tmp_path: Path) -> None:
    """Broken: vectors differ from the original's, or have another form."""
    both = pair(tmp_path, "RobertaModel", "feature-extraction", small_texts.byte_pairs())
    both.demand_same(small_texts.TEXTS)
    assert both.made.text["longest"] == 64, "RoBERTa's positions begin after the padding token's"


def test_the_networks_own_tensors_are_still_taken(tmp_path: Path) -> None:
    """Broken: who sends token ids to the published model, as before it took text, gets an error."""
    both = pair(tmp_path, "BertForSequenceClassification", "text-classification")
    source = source_of(tmp_path / "model", "transformers")
    with TransformersSource().open(source, Target(name="cpu")) as session:
        processor = TextProcessor(tmp_path / "processor", both.made.text, session.signature)
        ids = [[2, 50, 60, 3], [2, 70, 3, 0]]
        for data in ({"input_ids": ids}, pd.DataFrame({"input_ids": ids}), pd.DataFrame([{"input_ids": ids}])):
            assert not processor.takes(data)
            given = processor.tensors(data)
            np.testing.assert_array_equal(given["attention_mask"], [[1, 1, 1, 1], [1, 1, 1, 0]])
            assert session.signature.refuse(given) is None
        assert processor.takes(["a text"])
        assert processor.takes(pd.DataFrame({"text": ["a text"]}))


def refusal(source: SourceModel, folder: Path) -> str:
    return TransformersSource().processor(source, folder).refusal


def test_what_is_no_data_of_a_tokenizer_keeps_text_out(tmp_path: Path) -> None:
    """Broken: a pickle or code beside a tokenizer is read, or MLflow runs code that came with the model."""
    path = small_texts.save(tmp_path / "model", "BertForSequenceClassification", "text-classification")
    source = source_of(path, "transformers")
    hostile = path / "components" / "tokenizer" / "tokenization.py"
    hostile.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "tokenization.py" in refusal(source, tmp_path / "a")
    hostile.rename(hostile.with_suffix(".pkl"))
    assert "tokenization.pkl" in refusal(source, tmp_path / "b")
    hostile.with_suffix(".pkl").unlink()

    about = mlflow.models.Model.load(source.path)
    about.flavors["python_function"]["loader_module"] = "hostile"
    about.save(str(path / "MLmodel"))
    assert "not MLflow's own" in refusal(source, tmp_path / "c")
    about.flavors["python_function"]["loader_module"] = "mlflow.transformers"
    about.flavors["transformers"]["tokenizer_type"] = "HostileTokenizer"
    about.save(str(path / "MLmodel"))
    assert "no HostileTokenizer" in refusal(source, tmp_path / "d")
    assert not (tmp_path / "ran").exists()


def test_a_processor_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    """Broken: predict() is published although it answers otherwise than the original's pyfunc."""
    path = small_texts.save(tmp_path / "model", "BertForSequenceClassification", "text-classification")
    settings = path / "components" / "tokenizer" / "tokenizer_config.json"
    assert refusal(source_of(path, "transformers"), tmp_path / "good") == ""
    about = mlflow.models.Model.load(str(path))
    about.flavors["python_function"]["config"] = {"handle_impossible_answer": True}
    about.save(str(path / "MLmodel"))
    assert settings.is_file()
    assert "handle_impossible_answer" in refusal(source_of(path, "transformers"), tmp_path / "bad")


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_a_network_in_a_narrow_type_still_takes_text(narrow: str, tmp_path: Path) -> None:
    """Broken: the original's pyfunc computes in bfloat16 and the baseline in FP32, so predict() of each published
    version took tensors alone, and said that it answers otherwise."""
    kind = "BertForSequenceClassification"
    path = small_texts.save(tmp_path / "model", kind, "text-classification", dtype=narrow)
    source = source_of(path, "transformers")
    assert refusal(source, tmp_path / "processor") == ""
    portable = TransformersSource().export(source, {}, tmp_path / "graph")
    assert [note for note in portable.notes if narrow in note]
    assert {weight.data_type for weight in onnx.load(portable.path).graph.initializer} <= {
        onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
    }  # fmt: skip


@pytest.mark.parametrize("columns", [("text",), ("text", "text_pair")], ids=str)
def test_a_signature_of_columns_is_asked_in_columns(columns: tuple[str, ...], tmp_path: Path) -> None:
    """Broken: MLflow refuses a list where the signature names columns, so nothing was compared, and a processor with
    the labels in the wrong order was published and promoted."""
    frame = pd.DataFrame(dict(zip(columns, (small_texts.TEXTS, small_texts.TEXTS[::-1]), strict=False)))
    kind, labels = "BertForSequenceClassification", small_texts.named(small_texts.LABELS)
    both = pair(tmp_path, kind, "text-classification", example=frame, **labels)
    both.demand_same(frame)
    source, exporter = source_of(tmp_path / "model", "transformers"), TransformersSource()
    found = exporter.predictions(source, exporter.tokenize(source, small_texts.TEXTS))
    assert found is not None
    assert (found.column, found.pair) == (*columns, "")[:2]
    asked = pd.DataFrame({name: [*found.texts[n:], *found.texts[:n]] for n, name in enumerate(columns)})
    assert found.answer == plain_prediction(both.original.predict(asked))

    described = transformers_text.describe

    def reversed_labels(*given: Any) -> dict[str, Any]:
        how = described(*given)
        return {**how, "labels": how["labels"][::-1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_text, "describe", reversed_labels)
        assert "answers otherwise than its pyfunc" in refusal(source, tmp_path / "reversed")


def test_a_pyfunc_that_answers_no_text_proves_nothing(tmp_path: Path) -> None:
    """Broken: MLflow's pyfunc of a classifier fails on every column that is not called `text`; a model whose answers
    nothing was compared with is said to answer as its original."""
    path = small_texts.save(tmp_path / "model", "BertForSequenceClassification", "text-classification")
    about = mlflow.models.Model.load(str(path))
    for row, reason in (
        ({"review": ["a"]}, "answers none of the texts"),
        ({"text": ["a"], "year": [1]}, "columns beside the text"),
    ):
        about.signature = mlflow.models.infer_signature(pd.DataFrame(row))
        about.save(str(path / "MLmodel"))
        assert reason in refusal(source_of(path, "transformers"), tmp_path / reason)


def test_a_tagger_that_finds_nothing_is_compared(tmp_path: Path) -> None:
    """Broken: a tagger whose pyfunc raises IndexError of each of our texts, since it finds no entity, is refused."""
    kind, tags = "BertForTokenClassification", small_texts.named(["O", "O"])
    assert pair(tmp_path, kind, "token-classification", **tags).answer(["good"]) == [""]


def test_special_tokens_that_a_client_writes_stay_text_where_the_original_splits_them(tmp_path: Path) -> None:
    """Broken: a client of the published model can write `[SEP]` or a padding token into a text, which the original,
    logged with `split_special_tokens`, reads as the letters that they are."""
    path = small_texts.save(tmp_path / "model", "BertForSequenceClassification", "text-classification")
    settings = path / "components" / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "split_special_tokens": True}))
    both = Pair(source_of(path, "transformers"), tmp_path / "processor")
    assert both.made.refusal == ""
    both.demand_same(["good [SEP] bad", "[PAD] [MASK] a"])


def test_texts_become_samples_cut_at_what_the_network_takes(tmp_path: Path) -> None:
    """Broken: validation samples that are texts can't be used, or are longer than the network takes."""
    path = small_texts.save(tmp_path / "model", "BertForSequenceClassification", "text-classification")
    source = source_of(path, "transformers")
    samples = TransformersSource().tokenize(source, [LONG, "good"])
    assert samples["input_ids"].shape == (2, 64)
    full, padded = samples["attention_mask"].sum(axis=1).tolist()
    assert full == 64 > padded
    assert TransformersSource().class_names(source) == ["LABEL_0", "LABEL_1"]
    found = TransformersSource().predictions(source, samples)
    assert found is not None
    assert len(found.texts) == len(found.ids) == len(found.answer["texts"]) >= 3
