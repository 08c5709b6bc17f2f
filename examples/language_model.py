"""A small causal language model of GPT-2's architecture that has read Python's own manual byte by byte, logged as a
transformers pipeline: prompts in, prompts with their continuation out.

    python examples/language_model.py

trains it in about a minute and registers `manual-writer` in the MLflow that MLFLOW_TRACKING_URI names. Its data sets
hold texts, which compile-stage cuts into windows of tokens with the model's own tokenizer. The text is what `help()`
prints (`pydoc_data.topics`, a part of Python): nothing is downloaded.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import mlflow
import numpy as np
import torch
import transformers
from candidate import register
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAME = "manual-writer"
SEED = 0
LENGTH = 96  # tokens of a training sample
PLACES = 256  # tokens that the network has places for
PROMPTS = ["The following ", "A class definition ", "If the object "]
DEFAULTS = {"max_new_tokens": 40, "do_sample": False}


def manual() -> tuple[list[str], list[str]]:
    """Texts to train on, and one of six to judge by."""
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    texts = [text for text in texts if len(text) > 400]
    return [text for n, text in enumerate(texts) if n % 6], [text for n, text in enumerate(texts) if n % 6 == 0]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, as GPT-2's tokenizer would be without any merge."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<end>", pad_token="<end>", model_max_length=PLACES
    )


def train(ids: torch.Tensor, vocabulary: int, end: int, steps: int) -> transformers.GPT2LMHeadModel:
    """Three layers, 96 wide. On one thread: more wait for each other longer than they compute."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=PLACES, n_embd=96, n_layer=3, n_head=4, bos_token_id=end,
            eos_token_id=end, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    slower = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    order = torch.Generator().manual_seed(SEED)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (16,), generator=order)
        rows = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    return model.eval()


def perplexity(model: transformers.GPT2LMHeadModel, ids: torch.Tensor) -> float:
    """Of windows of so many tokens as it was trained on."""
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)[:200]
    with torch.no_grad():
        return math.exp(model(input_ids=rows, labels=rows).loss.item())


def train_and_register(name: str = NAME, steps: int = 300) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    train_texts, test_texts = manual()
    tokenizer = make_tokenizer()
    transformers.logging.set_verbosity_error()  # that a text is longer than the network: it is cut
    train_ids, test_ids = (
        torch.tensor(tokenizer("\n".join(texts))["input_ids"]) for texts in (train_texts, test_texts)
    )
    model = train(train_ids, len(tokenizer), tokenizer.eos_token_id, steps)
    return register(
        name,
        lambda: mlflow.transformers.log_model(
            transformers.pipeline("text-generation", model=model, tokenizer=tokenizer),
            name="model",
            task="text-generation",
            input_example=(PROMPTS, DEFAULTS),  # what predict() may be asked for
            model_config=DEFAULTS,
            pip_requirements=[f"transformers=={transformers.__version__}"],
        ),
        parameters={"steps": steps, "seed": SEED},
        metrics={"perplexity": perplexity(model, test_ids)},
        validation={"text": np.array(test_texts)},
        calibration={"text": np.array(train_texts[:20])},
        tags={"task": "text-generation", "data": "pydoc_data.topics"},
    )


if __name__ == "__main__":
    print(train_and_register())
