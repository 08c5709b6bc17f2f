"""Calls on the tokens of language models (`engine.calls` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.generation import INPUT_IDS
from compile_stage.core.records import Generation, SampleSet, SourceModel

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


def written_by(session: Any, samples: Any, rows: Sequence[int], generation: Any) -> list[list[int]]:
    """What an open language model writes after the prompts of these samples, the likeliest token each time."""
    how = revive(Generation, generation)
    written: list[list[int]] = session.generate(_prompts(samples, rows, how), how.new_tokens)
    return written


def prompt_tokens(samples: Any, rows: list[int], generation: Any) -> list[list[int]]:
    """The prompts of these samples."""
    tokens: list[list[int]] = _prompts(samples, rows, revive(Generation, generation)).tolist()
    return tokens


def texts_of_tokens(source: Any, tokens: list[list[int]]) -> list[str]:
    """By the source's own tokenizer."""
    model = revive(SourceModel, source)
    return [str(text) for text in plugins.load("sources", model.flavor).texts_of(model, tokens)]


def _prompts(samples: Any, rows: Sequence[int], how: Generation) -> Array:
    import numpy as np

    from compile_stage.measure.samples import open_samples

    ids = open_samples(revive(SampleSet, samples)).inputs[INPUT_IDS]
    return np.asarray(ids[list(rows), : how.prompt_tokens], np.int64)
