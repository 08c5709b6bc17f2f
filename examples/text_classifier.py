"""A small BERT that tells which Python library a sentence of documentation comes from (numpy, pandas, scipy, sklearn),
logged as a transformers pipeline: text in, label and score out.

    python examples/text_classifier.py

trains its tokenizer and the network in about a minute and registers `docstring-classifier` in the MLflow that
MLFLOW_TRACKING_URI names. Its data sets hold texts, which compile-stage tokenizes with the model's own tokenizer.
"""

from __future__ import annotations

import mlflow
import numpy as np
import torch
import transformers
from candidate import register
from docstrings import LABELS, sentences
from sklearn.model_selection import train_test_split
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

NAME = "docstring-classifier"
SEED = 0
VOCABULARY = 2000
LENGTH = 64
TRAINED = 2500  # texts


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Word pieces in lower case, as BERT's."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=LENGTH,
    )  # fmt: skip


def train(
    tokenizer: transformers.PreTrainedTokenizerFast, texts: list[str], labels: np.ndarray, epochs: int
) -> transformers.BertForSequenceClassification:
    """Two layers, 48 wide."""
    torch.manual_seed(SEED)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, max_position_embeddings=LENGTH, num_labels=len(LABELS),
            id2label=dict(enumerate(LABELS)), label2id={label: number for number, label in enumerate(LABELS)},
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(SEED)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(texts), generator=order).split(64):
            batch = tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
            )
            loss = model(**batch, labels=torch.from_numpy(labels)[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def train_and_register(name: str = NAME, epochs: int = 4) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    texts, labels = sentences()
    numbers = np.array(labels, np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        texts, numbers, test_size=0.2, random_state=SEED, stratify=numbers
    )
    train_x, train_y = train_x[:TRAINED], train_y[:TRAINED]
    tokenizer = make_tokenizer(train_x)
    model = train(tokenizer, train_x, train_y, epochs)
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    answers = pipeline(test_x, batch_size=64, truncation=True)
    accuracy = float(np.mean([answer["label"] == LABELS[label] for answer, label in zip(answers, test_y, strict=True)]))
    return register(
        name,
        lambda: mlflow.transformers.log_model(
            pipeline,
            name="model",
            task="text-classification",
            input_example=test_x[:4],
            pip_requirements=[f"transformers=={transformers.__version__}"],
        ),
        parameters={"epochs": epochs, "seed": SEED},
        metrics={"accuracy": accuracy},
        validation={"text": np.array(test_x), "y": test_y},
        calibration={"text": np.array(train_x[:300]), "y": train_y[:300]},
        tags={"task": "text-classification", "data": "docstrings"},
    )


if __name__ == "__main__":
    print(train_and_register())
