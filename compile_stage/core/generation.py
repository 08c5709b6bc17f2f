"""Graphs of language models that hand on a cache, and the one call that the pipeline sees instead of them.

Such a graph has Optimum's names. Inputs are `input_ids` int64 [batch, tokens], `attention_mask` int64 [batch, past +
tokens], `position_ids` int64 [batch, tokens] where the network wants them, and for each layer i
`past_key_values.{i}.key` and `.value` [batch, heads, past, size]. Outputs are `logits` [batch, 1, vocabulary] of the
last token alone, and `present.{i}.key` and `.value`, which are the past of the next call.

The pipeline validates and times whole generations (`serving.generation`): one input `input_ids` int64 [batch, prompt +
new], one output `logits` float32 [batch, new, vocabulary], whose place j is the distribution of the j-th new token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from compile_stage.core.records import Artifact, Generation
from compile_stage.core.tensors import CACHE_INPUTS, Signature, TensorSpec

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

INPUT_IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
CACHE_OUTPUTS = "present."


def has_cache(signature: Signature) -> bool:
    """The graph hands on a cache."""
    return any(spec.name.startswith(CACHE_INPUTS) for spec in signature.inputs)


def cache_specs(signature: Signature) -> tuple[TensorSpec, ...]:
    """The inputs that are the cache, in order."""
    return tuple(spec for spec in signature.inputs if spec.name.startswith(CACHE_INPUTS))


def present_of(past: str) -> str:
    """The output that is, in the next call, the input of that name."""
    return CACHE_OUTPUTS + past.removeprefix(CACHE_INPUTS)


def session_signature(signature: Signature, generation: Generation) -> Signature:
    """Of what the pipeline sees: of a graph with a cache a whole generation, of any other its own."""
    if not has_cache(signature):
        return signature
    batch = signature.input(INPUT_IDS).batch
    vocabulary = next(spec for spec in signature.outputs if spec.name == LOGITS).shape[-1]
    return Signature(
        inputs=(TensorSpec(name=INPUT_IDS, dtype="int64", shape=(batch, generation.tokens)),),
        outputs=(TensorSpec(name=LOGITS, dtype="float32", shape=(batch, generation.new_tokens, vocabulary)),),
    )


def call_signature(artifact: Artifact) -> Signature:
    """What an artifact's opened session takes and gives."""
    if artifact.generation is None:
        return artifact.signature
    return session_signature(artifact.signature, artifact.generation)


def empty_cache(signature: Signature, rows: int) -> dict[str, Array]:
    """The cache before the first call: no token of so many rows."""
    import numpy as np

    return {spec.name: np.zeros(tuple(_empty(spec, rows)), spec.dtype) for spec in cache_specs(signature)}


def token_inputs(signature: Signature, ids: Array, past: int) -> dict[str, Array]:
    """All inputs of a call but the cache: these tokens [batch, tokens], behind `past` others; none is padding."""
    import numpy as np

    rows, count = ids.shape
    made = {
        INPUT_IDS: np.ascontiguousarray(ids, np.int64),
        MASK: np.ones((rows, past + count), np.int64),
        POSITIONS: np.arange(past, past + count, dtype=np.int64)[None].repeat(rows, 0),
    }
    wanted = [spec.name for spec in signature.inputs if not spec.name.startswith(CACHE_INPUTS)]
    return {name: made[name] for name in wanted}


def as_first_call(signature: Signature, ids: Array) -> Batch:
    """A window of tokens as the graph's inputs: all at once, with an empty cache."""
    return {**token_inputs(signature, ids, 0), **empty_cache(signature, len(ids))}


def _empty(spec: TensorSpec, rows: int) -> Iterator[int]:
    """Of [batch, heads, past, size] heads and size are fixed."""
    for axis, size in enumerate(spec.shape):
        yield rows if axis == 0 else size if isinstance(size, int) else 0
