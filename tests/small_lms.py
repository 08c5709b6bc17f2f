"""Small causal language models with a tokenizer of bytes, logged as a user would: GPT-2's architecture, trained for
some seconds on the licence's text, and Llama's with grouped queries and random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import small_texts

TEMPLATE = (
    "{% for message in messages %}\n[{{ message['role'] }}] {{ message['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPTS = ["The artifact", "a model is", "What is "]
END = "<end>"
PARTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": 6, "head_dim": 16, "attn_logit_softcapping": 2.0},
    "phi": {"hidden_size": 128},  # heads of 32, of which 16 are turned
    "phi3": {
        "pad_token_id": 0, "original_max_position_embeddings": 12, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 12,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        },
    },
}  # fmt: skip
OF_ONE_LAYER = ("mistral", "mixtral", "phi", "phi3")
"""Kinds with one layer, whose export takes less time: others show that layers follow each other rightly."""


def bytes_tokenizer(**settings: Any) -> Any:
    """A token for each byte, as GPT-2's tokenizer would be without any merge."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=END, pad_token=END, model_max_length=128, **settings
    )


def network(kind: str, tokenizer: Any) -> Any:
    """Two layers, or one, 32 to 128 wide, with places for 128 tokens."""
    import torch
    import transformers

    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if kind in ("gpt2", "trained"):
        configuration: Any = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=128, **ends,
            initializer_range=0.02 if kind == "trained" else 0.3,
        )  # fmt: skip
    else:
        usual: dict[str, Any] = {
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "initializer_range": 0.3,
        }  # fmt: skip
        usual |= {"num_hidden_layers": 1} if kind in OF_ONE_LAYER else {}
        configuration = transformers.AutoConfig.for_model(kind, **{**usual, **ends, **PARTS.get(kind, {})})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configuration).eval()


@cache
def trained_gpt2(steps: int = 30) -> Any:
    """A network that has learned which letters follow which; some seconds on one core."""
    import torch

    tokenizer = bytes_tokenizer()
    model = network("trained", tokenizer).train()
    ids = torch.tensor(tokenizer("\n".join(small_texts.corpus()))["input_ids"])
    optimizer, order = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (16,), generator=order)
        rows = torch.stack([ids[start : start + 64] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def save(path: Path, kind: str = "gpt2", **settings: Any) -> Path:
    """Log a pipeline to a folder, as `mlflow.transformers.save_model` of a user does.

    Args:
        kind: `gpt2`, `llama`, `mistral` (a sliding window), `mixtral` (a mixture of experts), `gemma2` (capped scores),
            `phi` (a part of each head is turned) or `phi3` (angles depend on the text's length) with random weights, or
            `trained`.
        settings: `params`, `model_config` and `task` are MLflow's, `tokenizer` takes the place of ours.
    """
    import mlflow
    import transformers

    tokenizer = settings.pop("tokenizer", None) or bytes_tokenizer()
    params, config, task = (settings.pop(name, None) for name in ("params", "model_config", "task"))
    model = trained_gpt2() if kind == "trained" else network(kind, tokenizer)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    example = (PROMPTS, params) if params else PROMPTS
    mlflow.transformers.save_model(
        pipeline,
        path,
        task=task or "text-generation",
        input_example=None if task else example,
        pip_requirements=["transformers"],
        model_config=config,
        **settings,
    )
    return path
