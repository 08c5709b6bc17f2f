from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from compile_stage.core.records import Compliance, SourceModel, Target
from compile_stage.sources.transformers import TransformersSource

from .conftest import Proof, run_onnx, source_of

transformers = pytest.importorskip("transformers", reason="the transformers source needs transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "good", "bad"]
TEXTS = ["hello world", "good"]


def save(path: Path, kind: str = "BertForSequenceClassification", task: str = "text-classification") -> SourceModel:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    configuration = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(configuration)
    mlflow.transformers.save_model(
        {"model": model, "tokenizer": tokenizer},
        path,
        task=task,
        input_example=TEXTS,
        pip_requirements=["transformers"],
        signature=mlflow.models.infer_signature(TEXTS, ["label"]),
    )
    return source_of(path, "transformers")


@pytest.mark.slow
def test_a_text_model_keeps_batch_and_sequence_open(tmp_path: Path, prove: Proof) -> None:
    source = save(tmp_path / "model")
    example = TransformersSource().example(source)
    assert example is not None
    np.testing.assert_array_equal(example["input_ids"], [[2, 5, 6, 3], [2, 7, 3, 0]])
    np.testing.assert_array_equal(example["attention_mask"], [[1, 1, 1, 1], [1, 1, 1, 0]])
    longer: dict[str, Any] = {name: np.concatenate([array] * 3, axis=1) for name, array in example.items()}
    made = prove(source, example, sizes=(1, 2))
    assert made.smallest == {}
    assert made.largest["input_ids"] == (None, 512)  # its positions
    assert [str(spec) for spec in made.signature.outputs] == ["logits: float32[batch, 2]"]
    assert {spec.shape for spec in made.signature.inputs} == {("batch", "sequence")}
    with TransformersSource().open(source, Target(name="cpu")) as session:
        np.testing.assert_allclose(run_onnx(made, longer)["logits"], session.run(longer)["logits"], atol=1e-5)
    assert TransformersSource().prediction_format(source)["kind"] == "dict"


def test_a_classifier_that_is_said_to_write_text_is_refused(tmp_path: Path) -> None:
    """Broken: a task that the network can't do ends in a traceback."""
    source = save(tmp_path / "model")
    about = mlflow.models.Model.load(source.path)
    about.flavors["transformers"]["task"] = "text-generation"
    about.save(str(Path(source.path) / "MLmodel"))
    assert "text-generation needs a decoder" in (TransformersSource().refuse(source, Compliance()) or "")


def test_pickled_weights_and_foreign_code_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model")
    folder = Path(source.path) / "model"
    (folder / "modeling.py").write_text("print('hostile')")
    assert "Python code" in (TransformersSource().refuse(source, Compliance()) or "")
    (folder / "modeling.py").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in (TransformersSource().refuse(source, Compliance()) or "")


def test_a_text_model_as_a_program_takes_the_networks_inputs_in_order(tmp_path: Path) -> None:
    """Broken: token ids and mask have one shape and one type, so a compiler that mixes them up would answer without an
    error."""
    import torch

    source = save(tmp_path / "model")
    made = TransformersSource().export_program(source, {}, tmp_path / "program")
    assert made.form == "torch-export"
    assert made.smallest == {}
    assert made.largest["input_ids"] == made.largest["attention_mask"] == (None, 512)
    assert [str(spec) for spec in made.signature.inputs][:2] == [
        "input_ids: int64[batch, sequence]",
        "attention_mask: int64[batch, sequence]",
    ]
    assert [str(spec) for spec in made.signature.outputs] == ["logits: float32[batch, 2]"]
    example = TransformersSource().example(source)
    assert example is not None
    program = torch.export.load(made.path)
    with TransformersSource().open(source, Target(name="cpu")) as session:
        for rows in (1, 2):
            batch = {name: array[:rows] for name, array in example.items()}
            leaves = [torch.from_numpy(batch[spec.name].copy()) for spec in made.signature.inputs]
            args, kwargs = torch.utils._pytree.tree_unflatten(leaves, program.call_spec.in_spec)
            (logits,) = torch.utils._pytree.tree_leaves(program.module()(*args, **kwargs))
            np.testing.assert_allclose(logits.detach().numpy(), session.run(batch)["logits"], atol=1e-5)
