"""Whole generations of a language model, through its cache, by any runtime's session of its graph.

Vendored into every published model beside `compile_stage.flavor`. What goes in first, the prompt, is one call with an
empty cache; each token after it is one call with the cache of the call before.

A session may have a method of its own for that, so that the cache is handed on without a copy:

    step(inputs, cache) -> (logits [batch, 1, vocabulary], cache)

`inputs` are all inputs but the cache, `cache` is what the call before gave, None for the first. A cache is used once:
the memory of one that was handed on belongs to the next. Without that method arrays go back and forth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from compile_stage.core.errors import UsageError
from compile_stage.core.generation import (
    INPUT_IDS,
    LOGITS,
    cache_specs,
    empty_cache,
    present_of,
    session_signature,
    token_inputs,
)
from compile_stage.core.records import Artifact, Generation
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend, Session
    from compile_stage.core.tensors import Array, Batch

_ROOM = 256
"""New tokens that there is room for at first: a caller may allow any number, and end at a token."""

Choose = Callable[["Array", "Array"], "Array"]
"""Logits [batch, vocabulary] of the next token and all tokens so far [batch, tokens] → the next token [batch]."""


class CachedSession(Protocol):
    """A session of a graph with a cache that hands the cache on by itself."""

    @property
    def signature(self) -> Signature: ...

    def step(self, inputs: Batch, cache: Any) -> tuple[Array, Any]: ...


def greedy(logits: Array, _: Array) -> Array:
    """The likeliest token of each row."""
    import numpy as np

    return np.asarray(np.argmax(logits, axis=-1), np.int64)


def whole_prompts(ids: Any) -> Array:
    """Prompts as int64 [batch, tokens]. Raises UsageError where they are anything else, or there is none: a runtime may
    end the process over a batch without a row."""
    import numpy as np

    try:
        tokens = np.asarray(ids)
    except ValueError as error:  # rows of different lengths
        raise UsageError("prompts are of one length in one call", fix="call it for each length") from error
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise UsageError(
            f"prompts are whole numbers [batch, tokens], at least one token each, and these are {tokens.dtype}"
            f"{list(tokens.shape)}"
        )
    return tokens.astype(np.int64, copy=False)


class GenerationSession:
    """A session whose call is a whole generation with given tokens: `input_ids` int64 [batch, prompt + new] → `logits`
    float32 [batch, new, vocabulary].

    The prompt goes in at once, then the given tokens one by one, but the last: nothing follows it. The work is that of
    a greedy generation of as many tokens, without the choice of the likeliest.

    Args:
        session: Of the graph, or of a network that takes and gives the same.
    """

    def __init__(self, session: Session | CachedSession, generation: Generation) -> None:
        self._session, self._generation = session, generation
        self.graph_signature = session.signature
        self.signature: Signature = session_signature(session.signature, generation)

    def run(self, batch: Batch) -> Batch:
        """The distribution of each new token, given all tokens before it. Raises UsageError where the batch does not
        fit."""
        import numpy as np

        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        ids, prompt = batch[INPUT_IDS], self._generation.prompt_tokens
        logits, cache = self._step(ids[:, :prompt], 0, None)
        answers = np.empty((len(ids), self._generation.new_tokens, logits.shape[-1]), np.float32)
        answers[:, 0] = logits
        for place in range(1, self._generation.new_tokens):
            past = prompt + place - 1
            logits, cache = self._step(ids[:, past : past + 1], past, cache)
            answers[:, place] = logits
        return {LOGITS: answers}

    def first(self, batch: Batch) -> Batch:
        """The distribution of the first new token alone, [batch, 1, vocabulary]: what has to be waited for until a text
        begins. It takes the batch of `run`, and reads the prompts of it."""
        import numpy as np

        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        logits, _ = self._step(batch[INPUT_IDS][:, : self._generation.prompt_tokens], 0, None)
        return {LOGITS: np.array(logits, np.float32)[:, None]}

    def generate(
        self, ids: Array, new_tokens: int, *, stops: Sequence[int] = (), choose: Choose = greedy
    ) -> list[list[int]]:
        """Up to `new_tokens` tokens after the prompts [batch, tokens], all of one length and without padding; a row
        ends behind its first token of `stops`. Raises UsageError for what `whole_prompts` refuses."""
        import numpy as np

        prompts = whole_prompts(ids)
        rows, held = prompts.shape
        written: list[list[int]] = [[] for _ in range(rows)]
        if new_tokens < 1:
            return written
        last, open_rows, ends = held + new_tokens, list(range(rows)), set(stops)
        tokens = np.empty((rows, min(last, held + _ROOM)), np.int64)
        tokens[:, :held] = prompts
        logits, cache = self._step(prompts, 0, None)
        while True:
            chosen = choose(logits, tokens[:, :held])
            tokens[:, held] = chosen
            held += 1
            for row in open_rows:
                written[row].append(int(chosen[row]))
            if ends:
                open_rows = [row for row in open_rows if written[row][-1] not in ends]
            if not open_rows or held == last:
                return written
            if held == tokens.shape[1]:
                tokens = np.concatenate([tokens, np.empty_like(tokens)], axis=1)
            logits, cache = self._step(tokens[:, held - 1 : held], held - 1, cache)

    def _step(self, ids: Array, past: int, cache: Any) -> tuple[Array, Any]:
        """The logits [batch, vocabulary] behind these tokens, and the cache that holds them too."""
        inputs = token_inputs(self.graph_signature, ids, past)
        own = getattr(self._session, "step", None)
        logits, cache = own(inputs, cache) if own else self._by_run(inputs, cache)
        return logits[:, -1], cache

    def _by_run(self, inputs: Mapping[str, Array], cache: Any) -> tuple[Array, Any]:
        held = cache if cache is not None else empty_cache(self.graph_signature, len(inputs[INPUT_IDS]))
        session: Any = self._session
        outputs = session.run({**inputs, **held})
        return outputs[LOGITS], {
            spec.name: outputs[present_of(spec.name)] for spec in cache_specs(self.graph_signature)
        }


@contextmanager
def opened_as_called(backend: Backend, artifact: Artifact, threads: int) -> Iterator[Any]:
    """An artifact opened as the pipeline and serving call it: a graph with a cache as whole generations, any other as
    its backend's own session."""
    with backend.open(artifact, threads) as session:
        yield session if artifact.generation is None else GenerationSession(session, artifact.generation)
