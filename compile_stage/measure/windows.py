"""Samples of language models: windows of tokens, cut of texts, and the tokens that the model has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from compile_stage.core.errors import PolicyError
from compile_stage.measure.readers import Rows, SampleRequest, Table

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

Windows: TypeAlias = Callable[[Sequence[str], int], "Sequence[Array]"]
"""Texts, and a number of tokens → of each text its windows of exactly so many, [windows, tokens]."""


def cut(request: SampleRequest, texts: Sequence[str], groups: Array | None, windows: Windows) -> Table:
    """The windows of texts, as many tokens each as a sample of the signature has.

    Args:
        groups: Of each text; all its windows are of it.

    Raises:
        PolicyError: No text is long enough.
    """
    ids, tokens = request.signature.inputs[0], int(request.signature.inputs[0].shape[1])
    found = windows(texts, tokens)
    counts = [len(each) for each in found]
    if not sum(counts):
        raise PolicyError(
            f"none of the {len(counts)} texts has {tokens} tokens, which a sample of this model takes",
            fix="give longer texts, or lower generation.prompt_tokens and new_tokens of the policy's target",
            where=request.spec.source,
        )
    short = f"; {counts.count(0)} that are too short were left out" if 0 in counts else ""
    note = (
        f"the model's own tokenizer cut {len(counts)} texts into {sum(counts)} windows of {tokens} tokens, the last "
        f"{_new_tokens(request)} of them to be found{short}"
    )
    return Table(
        {ids.name: Rows.of(np.concatenate([each for each in found if len(each)]))},
        None,
        Rows.of(np.repeat(groups, counts, axis=0)) if groups is not None else None,
        notes=(note,),
    )


def with_new_tokens_as_labels(request: SampleRequest, table: Table) -> Table:
    """Labels [n, new], int64: the last tokens of each window, where the table has no labels itself."""
    ids, new = table.columns.get(request.signature.inputs[0].name), _new_tokens(request)
    if table.labels is not None or ids is None or len(ids.shape) != 2 or ids.dtype.kind not in "iu":
        return table
    return replace(
        table,
        labels=Rows((ids.shape[0], new), np.dtype(np.int64), lambda rows: ids.take(rows)[:, -new:].astype(np.int64)),
    )


def demand_known(request: SampleRequest, ids: Array) -> None:
    """Raise PolicyError where a sample [samples, tokens] has a token that the model does not know: the original ends
    with an index error at it, as if the model were the cause."""
    vocabulary = request.signature.outputs[0].shape[-1]
    if not isinstance(vocabulary, int):
        return
    tokens = np.asarray(ids, np.int64)
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if unknown.size:
        raise PolicyError(
            f"the samples have the token {unknown[0]}, and the model knows 0 to {vocabulary - 1}",
            fix="make the tokens with the model's own tokenizer, or give the texts themselves as a column `text`",
            where=request.spec.source,
        )


def _new_tokens(request: SampleRequest) -> int:
    return int(request.signature.outputs[0].shape[1])
