"""What splits texts into words or characters (CountVectorizer, TfidfVectorizer), and counts them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.sources.graph import put_behind
from compile_stage.sources.sklearn_parts import parts

if TYPE_CHECKING:
    from onnx import ModelProto

# Python's \w and \b know all letters, those of ONNX Runtime (RE2) ASCII alone. In RE2's words: pattern → the same.
_WORD = r"[\p{L}\p{N}_]"
_PATTERNS: Mapping[str, str] = {
    r"\b\w\w+\b": _WORD + "{2,}",
    r"\w\w+": _WORD + "{2,}",
    r"\w{2,}": _WORD + "{2,}",
    r"\b\w+\b": _WORD + "+",
    r"\w+": _WORD + "+",
}
_NO_WORD = "\U0010ffff"  # Unicode will never give it to a character

_ASCII_ALONE = re.compile(r"\\[wWbBdDsS]")


def refuse_words(estimator: Any) -> str | None:
    """The reason when words are split by a pattern that ONNX Runtime reads otherwise than Python, or some are left out
    between others."""
    for part in _vectorizers(estimator):
        if part.analyzer != "word" or part.tokenizer is not None:
            continue
        if part.stop_words is not None and part.ngram_range[1] > 1:
            return (
                f"its {type(part).__name__} pairs words that have stop words between them, and the graph leaves none "
                "out: fit it without stop_words, or with ngram_range=(1, 1)"
            )
        pattern = _plain(part.token_pattern)
        if pattern not in _PATTERNS and _ASCII_ALONE.search(pattern):
            return (
                f"its {type(part).__name__} splits texts by token_pattern={part.token_pattern!r}, which ONNX Runtime "
                f"reads otherwise where a letter is not ASCII: use the default, {', '.join(map(repr, _PATTERNS))}, or "
                "one without backslashes, such as '[a-z0-9]+'"
            )
    return None


def word_options(estimator: Any) -> dict[int, dict[str, Any]]:
    """Options of skl2onnx by the id of the step that they are for. By default letters beyond ASCII split words, and the
    runtime needs a locale that few containers have; glibc has C.UTF-8 always, which lowers the same letters."""
    options: dict[int, dict[str, Any]] = {}
    for part in _vectorizers(estimator):
        chosen = options.setdefault(id(part), {"locale": "C.UTF-8"} if sys.platform == "linux" else {})
        if part.analyzer == "char":
            chosen["tokenexp"] = "(?s)."  # line breaks too
        elif part.analyzer == "word" and (pattern := _plain(part.token_pattern)) in _PATTERNS:
            chosen["tokenexp"] = _PATTERNS[pattern]
    return options


def write_sublinear_counts(model: ModelProto, estimator: Any) -> None:
    """Have each vectorizer with `sublinear_tf` take 1 + log(n) of a word that stands n times in a text, as scikit-learn
    does, and 0 where it does not. skl2onnx takes log(1 + n)."""
    from onnx import helper, numpy_helper

    widths = {
        len(part.idf_) if part.use_idf else part.n_features_in_
        for part in parts(estimator)
        if type(part).__name__ == "TfidfTransformer" and part.sublinear_tf
    }
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    users = {name: node for node in model.graph.node for name in node.input[:1]}
    for total in [node for node in model.graph.node if node.op_type == "Add"]:
        ones, log = values.get(total.input[1]), users.get(total.output[0])
        if ones is None or ones.size not in widths or not np.all(ones == 1) or log is None or log.op_type != "Log":
            continue
        counts, one, answer = total.input[0], total.input[1], log.output[0]
        at_least, logarithm, above, sign = (f"{answer}_{word}" for word in ("at_least", "log", "above", "sign"))
        made = [
            helper.make_node("Max", [counts, one], [at_least], name=at_least),
            helper.make_node("Log", [at_least], [logarithm], name=logarithm),
            helper.make_node("Add", [logarithm, one], [above], name=above),
            helper.make_node("Sign", [counts], [sign], name=sign),
            helper.make_node("Mul", [above, sign], [answer], name=answer),
        ]
        put_behind(model, log, made)
        model.graph.node.remove(total)
        model.graph.node.remove(log)


def pad_with_no_word(model: ModelProto) -> None:
    """Fill the texts of a batch that have fewer words, or characters, up with what is in no text. skl2onnx takes `#`:
    beside a longer text each shorter one got some more of it."""
    for node in model.graph.node:
        for entry in node.attribute:
            if node.op_type == "Tokenizer" and entry.name == "pad_value":
                entry.s = _NO_WORD.encode()


def _vectorizers(estimator: Any) -> list[Any]:
    return [part for part in parts(estimator) if type(part).__name__ in ("CountVectorizer", "TfidfVectorizer")]


def _plain(pattern: str) -> str:
    return pattern.removeprefix("(?u)")
