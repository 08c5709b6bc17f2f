"""Small text pipelines with real tokenizers, logged as a user would: for tests of what predict() takes and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "good", "don't  stop — the Café is open, isn't it?"]
LABELS = ["negative", "neutral", "positive"]


def corpus() -> list[str]:
    """Lines of the licence: text that no commit changes, so that what is trained on it stays the same."""
    lines = [line.strip() for line in (ROOT / "LICENSE").read_text().splitlines()]
    return [line for line in lines if len(line) > 40]


def word_pieces(vocabulary: int = 600) -> Any:
    """A tokenizer as BERT's, trained on `corpus`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=64,
    )  # fmt: skip


def byte_pairs(vocabulary: int = 400) -> Any:
    """A tokenizer as RoBERTa's, by bytes and without prefixes of words, trained on `corpus`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pairs.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    )
    pairs.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip


def network(kind: str, tokenizer: Any, **settings: Any) -> Any:
    """A transformer of two layers with random weights, spread wide enough that its scores differ."""
    import torch
    import transformers

    family = "Roberta" if kind.startswith("Roberta") else "Bert"
    configuration = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66 if family == "Roberta" else 64, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, kind)(configuration).eval()


def named(labels: Sequence[str]) -> dict[str, Any]:
    """The configuration of these classes."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {n: i for i, n in enumerate(labels)},
    }


def save(path: Path, kind: str, task: str, tokenizer: Any = None, **settings: Any) -> Path:
    """Log a pipeline to a folder, as `mlflow.transformers.save_model` of a user does.

    Args:
        settings: `params`, `model_config` and the input `example` are MLflow's, `dtype` is the type of the network's
            weights; others are the network's.
    """
    import mlflow
    import torch
    import transformers

    tokenizer = tokenizer or word_pieces()
    params, config = settings.pop("params", None), settings.pop("model_config", None)
    example = [f"{text} {tokenizer.mask_token}" for text in TEXTS] if task == "fill-mask" else TEXTS
    example = example[:1] if task == "feature-extraction" else example
    given, dtype = settings.pop("example", None), settings.pop("dtype", "float32")
    example = example if given is None else given
    model = network(kind, tokenizer, **settings).to(getattr(torch, dtype))
    pipeline = transformers.pipeline(task, model=model, tokenizer=tokenizer)
    mlflow.transformers.save_model(
        pipeline, path, task=task, input_example=(example, params) if params else example,
        pip_requirements=["transformers"], model_config=config,
    )  # fmt: skip
    return path
