"""Which rows of a batch the words that a tokenizer makes of its texts depend on, and the counts of these
(`measure.graph_rows`).

ONNX Runtime's `Tokenizer` answers rows of as many words as the longest text of the batch has, and fills the others up
with a word of its own. So how many fillers a row has depends on other rows, and its words do not. It is followed where
`TfIdfVectorizer` counts the words alone, as scikit-learn's converter writes it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from compile_stage.measure.known_tensors import Known, NotFollowedError, reduced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import NodeProto

_WORDS = 7  # of each text: any number, since nothing may depend on it
_RUNTIMES = "com.microsoft"


def is_of_words(node: NodeProto, inputs: Sequence[Known | None]) -> bool:
    """True for a tokenizer, and for what reads its words."""
    return (node.domain == _RUNTIMES and node.op_type == "Tokenizer") or any(
        one is not None and one.filler is not None for one in inputs
    )


def follow_words(node: NodeProto, inputs: Sequence[Known | None]) -> Known:
    """The output of such a node.

    Raises:
        NotFollowedError: It may depend on how many fillers there are.
    """
    (one, *others) = inputs
    attributes = {entry.name: entry for entry in node.attribute}
    if one is not None and not others:
        if one.filler is None:
            return _tokenized(one, attributes["pad_value"].s)
        if node.op_type == "Identity":
            return one
        if node.op_type == "Flatten" and ("axis" not in attributes or attributes["axis"].i == 1):
            rows = reduced(one.rows, range(1, one.rows.ndim)).reshape(-1, 1)
            return replace(one, shape=(one.shape[0], prod(one.shape[1:])), rows=rows)
        if node.op_type == "TfIdfVectorizer" and len(one.shape) == 2:
            if one.filler in attributes["pool_strings"].strings:
                raise NotFollowedError("what its Tokenizer fills short texts up with is counted as a word")
            return Known((one.shape[0], max(attributes["ngram_indexes"].ints) + 1), 1, one.rows, why=one.why)
    raise NotFollowedError(f"what its {node.op_type} does with the words of its texts may depend on the longest text")


def _tokenized(texts: Known, filler: bytes) -> Known:
    if prod(texts.shape[1:]) != 1:
        raise NotFollowedError("its Tokenizer reads several texts of each row")
    rows = texts.rows[..., None]
    return Known((*texts.shape, _WORDS), texts.kind, rows, why=texts.why, filler=filler)
