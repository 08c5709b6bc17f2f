"""Outputs of a network that reads text → the answer of the source's pyfunc, task by task.

Vendored with `serving.text`. Each function follows the task's pipeline of transformers 5 and what `mlflow.transformers`
makes of its result; `tests/sources/test_text_pipelines.py` compares it with both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_stage.serving.prediction_io import InputRefusedError

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch


@dataclass(frozen=True)
class Processed:
    """Texts that went through the network.

    Attributes:
        encoded: Their tokens.
        outputs: Of each text by itself, without padding.
        how: The manifest's `answer.text`.
        params: Of this call, with the model's own defaults.
        single: One bare text was given, not a list.
    """

    texts: Sequence[Any]
    encoded: Sequence[Any]
    outputs: Sequence[Batch]
    how: Mapping[str, Any]
    params: Mapping[str, Any]
    tokenizer: Any
    single: bool

    def arrays(self) -> list[Array]:
        """The output that the answer is made of, for each text."""
        return [outputs[self.how["output"]] for outputs in self.outputs]


def classify(given: Processed) -> Any:
    """A data frame with `label` and `score`; with the param `top_k` one of dicts, a column for each rank."""
    import pandas as pd

    labels, name = given.how["labels"], given.params.get("function_to_apply") or given.how["function"]
    function = FUNCTIONS.get(str(name).lower())
    if function is None:
        raise InputRefusedError(f"function_to_apply can be {', '.join(FUNCTIONS)}, not {name!r}")
    scores = [function(logits) for logits in given.arrays()]
    if given.params.get("top_k", "") == "":
        return pd.DataFrame([{"label": labels[int(row.argmax())], "score": row.max().item()} for row in scores])
    top = given.params["top_k"]
    if top is not None and (not isinstance(top, int) or isinstance(top, bool)):
        raise InputRefusedError(f"top_k is a whole number, or None for all labels, not {top!r}")
    ranked = [
        sorted(
            ({"label": label, "score": score.item()} for label, score in zip(labels, row, strict=True)),
            key=lambda entry: -entry["score"],
        )[:top]
        for row in scores
    ]
    return pd.DataFrame(ranked[0] if given.single else ranked)


def tag(given: Processed) -> list[str]:
    """The entities of each text, in order, joined by commas. A text without any has an empty string, where MLflow's
    pyfunc raises IndexError."""
    import numpy as np

    strategy = str(given.params.get("aggregation_strategy") or "none").lower()
    if strategy not in ("none", "simple", *_WORDS):
        raise InputRefusedError(f"aggregation_strategy can't be {strategy!r}")
    ignored = given.params.get("ignore_labels")
    ignored = ("O",) if ignored is None else ignored
    answers = []
    for text, tokens, logits in zip(given.texts, given.encoded, given.arrays(), strict=True):
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = shifted / shifted.sum(axis=-1, keepdims=True)
        kept = [index for index, special in enumerate(tokens.special_tokens_mask) if not special]
        if strategy in _WORDS:
            rows = [_WORDS[strategy](scores[group]) for group in _words(given, text, tokens, kept)]
        else:
            rows = [scores[index] for index in kept]
        labels = [given.how["labels"][int(row.argmax())] for row in rows]
        found = labels if strategy == "none" else _groups(labels)
        answers.append(",".join(label for label in found if label not in ignored).strip())
    return answers


def fill(given: Processed) -> list[Any]:
    """The likeliest token of each mask: a text, or a list of them for a text with several masks."""
    import numpy as np

    answers: list[Any] = []
    for number, (tokens, logits) in enumerate(zip(given.encoded, given.arrays(), strict=True)):
        places = [index for index, token in enumerate(tokens.ids) if token == given.how["mask_id"]]
        if not places:
            raise InputRefusedError(f"text {number} has no mask token ({given.how['mask_token']})")
        likeliest = [int(np.argmax(logits[place])) for place in places]
        words = [given.tokenizer.decode([token], skip_special_tokens=False).strip() for token in likeliest]
        answers.append(words[0] if len(words) == 1 else words)
    return answers[0] if len(answers) == 1 and isinstance(answers[0], list) else answers


def features(given: Processed) -> Array:
    """The vectors of the first text's tokens, [tokens, features] in float64; of a bare text that of its first token."""
    import numpy as np

    (array,) = given.arrays()
    return np.asarray(array[0] if given.single else array, np.float64)


def embed(given: Processed) -> Array:
    """A vector for each text, [texts, features]; of a bare text the vector alone."""
    import numpy as np

    vectors: Any = np.stack(given.arrays())
    if given.params.get("normalize_embeddings"):
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    found: Array = vectors[0] if given.single else vectors
    return found


def _softmax(logits: Array) -> Any:
    import numpy as np

    values: Any = logits
    shifted = np.exp(values - np.max(values, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def _sigmoid(logits: Array) -> Any:
    import numpy as np

    values: Any = logits
    return 1.0 / (1.0 + np.exp(-values))


def _words(given: Processed, text: str, tokens: Any, kept: Sequence[int]) -> list[list[int]]:
    """Tokens that make up one word, as transformers groups them: by the tokenizer's prefix of continued words where it
    has one, else by the spaces of the text."""
    prefix = getattr(given.tokenizer.model, "continuing_subword_prefix", None)
    groups: list[list[int]] = []
    for index in kept:
        start, end = tokens.offsets[index]
        continued = start > 0 and " " not in text[start - 1 : start + 1]
        if prefix:
            continued = len(given.tokenizer.id_to_token(tokens.ids[index])) != end - start
        if tokens.ids[index] == given.how.get("unk_id"):
            continued = False
        if continued and groups:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _groups(labels: Sequence[str]) -> list[str]:
    """Neighbours of one entity become one; B- begins a new one."""
    found: list[str] = []
    last = None
    for label in labels:
        begins, name = label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label
        if name != last or begins:
            found.append(label.split("-", 1)[-1])
        last = name
    return found


FUNCTIONS: dict[str, Callable[[Array], Any]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "none": lambda logits: logits,
}
_WORDS: dict[str, Callable[[Any], Any]] = {
    "first": lambda scores: scores[0],
    "max": lambda scores: scores[int(scores.max(axis=1).argmax())],
    "average": lambda scores: scores.mean(axis=0),
}
_BATCHING = ("batch_size", "num_workers")  # of the pipeline's own work; here the validated batch sizes decide
ANSWERS: Mapping[str, Callable[[Processed], Any]] = {
    "text-classification": classify,
    "token-classification": tag,
    "fill-mask": fill,
    "feature-extraction": features,
    "sentence-embedding": embed,
}
PARAMS: Mapping[str, frozenset[str]] = {
    "text-classification": frozenset(("top_k", "function_to_apply", *_BATCHING)),
    "token-classification": frozenset(("aggregation_strategy", "ignore_labels", *_BATCHING)),
    "fill-mask": frozenset(("top_k", *_BATCHING)),
    "feature-extraction": frozenset(),
    "sentence-embedding": frozenset(("normalize_embeddings", "batch_size", "show_progress_bar")),
}
"""Beside those of the tokenizer."""
