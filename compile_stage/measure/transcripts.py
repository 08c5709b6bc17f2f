"""Word error rate of speech models: text, or the scores of connectionist temporal classification (CTC)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compile_stage.measure.elementwise import F64, NotMeasurableError
from compile_stage.measure.task_intervals import FAR, Score

if TYPE_CHECKING:
    from compile_stage.core.records import JsonMap
    from compile_stage.core.tensors import Array


def wer(truth: Array, output: Array, options: JsonMap) -> Score:
    """jiwer's word error rate: (substitutions + deletions + insertions) / words of the labels, of all samples.

    Args:
        truth: `[n]` texts, as they were said.
        output: `[n]` texts, or `[n, frames, tokens]` scores, which are decoded greedily (`transcripts`).

    Raises NotMeasurableError.
    """
    import jiwer

    said, heard = [str(text) for text in truth], transcripts(output, options)
    if not all(text.strip() for text in said):
        raise NotMeasurableError("some labels are empty, so that a share of their words is not defined")
    each = [jiwer.process_words(a, b) for a, b in zip(said, heard, strict=True)]
    errors = np.array([float(words.substitutions + words.deletions + words.insertions) for words in each])
    length = np.array([float(words.hits + words.substitutions + words.deletions) for words in each])

    def of(weights: F64) -> F64:
        return np.asarray(weights @ errors / (weights @ length))

    # A ruined transcript has every word wrong at most, but for words that it makes up.
    influence, share = float(length.max() / length.sum()), errors / length
    return Score(float(jiwer.wer(said, heard)), of, share, share, influence, FAR)


def transcripts(output: Array, options: JsonMap) -> list[str]:
    """The text of each sample. Of scores it is the best token of each frame, repeats taken once and blanks left out."""
    if output.dtype.kind == "U" and output.ndim == 1:
        return [str(text) for text in output]
    if output.dtype.kind != "f" or output.ndim != 3:
        raise NotMeasurableError(f"wer reads texts, or scores [n, frames, tokens], and the output is {_kind(output)}")
    tokens = [str(token) for token in options.get("vocabulary") or ()]
    if len(tokens) != output.shape[2]:
        held = f"names {len(tokens)}" if tokens else "names none"
        raise NotMeasurableError(
            f"the output has scores of {output.shape[2]} tokens, and the limit {held}: give wer "
            "{vocabulary: [...]}, in the model's order"
        )
    blank = str(options.get("blank") or tokens[0])
    if blank not in tokens:
        raise NotMeasurableError(f"the blank {blank!r} is no token of the vocabulary")
    delimiter = str(options.get("delimiter") or " ")
    texts = []
    for best in np.argmax(output, axis=2):
        kept = best[np.diff(best, prepend=-1) != 0]
        text = "".join(tokens[place] for place in kept if tokens[place] != blank)
        texts.append(" ".join(text.replace(delimiter, " ").split()))
    return texts


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape[1:])}"
