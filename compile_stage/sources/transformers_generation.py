"""Causal language models: the network with its cache as a graph, and as the original, which keeps its own.

The graph's names are those of `core.generation`. A module of ours takes the cache as flat tensors, since neither
torch.export nor ONNX knows transformers' classes, and asks for the logits of the last token alone: a generation needs
no others, and of a prompt they would be most of the answer's memory.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.generation import INPUT_IDS, LOGITS, MASK, POSITIONS, present_of
from compile_stage.core.records import PortableModel, ShapeRange, SourceModel
from compile_stage.core.tensors import CACHE_INPUTS, Signature, TensorSpec
from compile_stage.plugin_support.torch_programs import tracing
from compile_stage.sources import graph, torch_portable, torch_signature
from compile_stage.sources.transformers_text import places

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Array, Batch
    from compile_stage.sources.torch_device import Place

TASK = "text-generation"

TOKENS, PAST = "tokens", "past"

_ROWS, _TOKENS, _PAST = 2, 3, 5  # of the traced example: sizes of 0 and 1 would be fixed, and equal ones tied together

_CACHES = {"DynamicLayer": (_TOKENS,), "DynamicSlidingWindowLayer": range(1, _TOKENS + 1)}
"""Layers of transformers' caches that have one key and one value for each token → how many they hold after the example.
The second forgets the tokens that have left its window. The graph is given all, and its mask leaves out the same."""


def refuse(model: Any) -> str | None:
    """The reason why this network has no cache that could be handed on as tensors."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder, and only decoders can be compiled with their cache"
    if not hasattr(model.config, "num_hidden_layers"):
        return "its configuration does not say how many layers it has, so its cache is not known"
    if "dynamic" in _position_types(model.config):
        return "its rotary positions (rope_type: dynamic) are computed anew for each length, and a graph can't do that"
    return None


def _position_types(config: Any) -> set[str]:
    """Kinds of rotary positions: one, or one for each kind of layer. transformers 4 calls them `rope_scaling`."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [one for one in (found, *found.values()) if isinstance(one, Mapping)]
    return {str(one.get("rope_type", one.get("type"))) for one in each}


@dataclass(frozen=True)
class CausalNetwork:
    """A decoder with a head for the next token.

    Attributes:
        heads: By layer: heads and size of keys, and size of values, as its own cache has them.
    """

    model: Any
    heads: Sequence[tuple[int, int, int]]

    @staticmethod
    def of(source: SourceModel, model: Any) -> CausalNetwork:
        """Raises SourceError where its cache is no list of keys and values that grow with the text."""
        import torch

        if (reason := refuse(model)) is not None:
            raise SourceError(reason, where=source.uri)
        ids = torch.zeros((_ROWS, _TOKENS), dtype=torch.int64)
        with torch.no_grad():
            answer = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
        cache = getattr(answer, "past_key_values", None)  # a classifier's answer has none
        heads = []
        for layer in getattr(cache, "layers", ()):
            keys: Any = getattr(layer, "keys", None)
            values: Any = getattr(layer, "values", None)
            kept = _CACHES.get(type(layer).__name__) if keys is not None and values is not None else None
            if not kept or keys.shape[0] != _ROWS or keys.shape[2] not in kept or values.shape[:3] != keys.shape[:3]:
                problem = f"its cache is of {type(layer).__name__}, which is not one key and one value for each token"
                raise SourceError(problem, where=source.uri)
            heads.append((int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3])))
        if not heads:
            raise SourceError(
                "text-generation needs a decoder, and it keeps no cache of keys and values", where=source.uri
            )
        return CausalNetwork(model, heads)

    @property
    def signature(self) -> Signature:
        """Of the graph."""
        token_inputs = [TensorSpec(name=INPUT_IDS, dtype="int64", shape=(graph.BATCH, TOKENS))]
        token_inputs.append(TensorSpec(name=MASK, dtype="int64", shape=(graph.BATCH, f"{PAST} + {TOKENS}")))
        if self._takes_positions:
            token_inputs.append(TensorSpec(name=POSITIONS, dtype="int64", shape=(graph.BATCH, TOKENS)))
        cache = [
            TensorSpec(name=f"{CACHE_INPUTS}{layer}.{kind}", dtype="float32", shape=(graph.BATCH, count, PAST, size))
            for layer, (count, *sizes) in enumerate(self.heads)
            for kind, size in zip(("key", "value"), sizes, strict=True)
        ]
        grown = [
            TensorSpec(
                name=present_of(spec.name),
                dtype="float32",
                shape=(*spec.shape[:2], f"{PAST} + {TOKENS}", spec.shape[3]),
            )
            for spec in cache
        ]
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        logits = TensorSpec(name=LOGITS, dtype="float32", shape=(graph.BATCH, 1, vocabulary))
        return Signature(inputs=(*token_inputs, *cache), outputs=(logits, *grown))

    def trace(self, source: SourceModel) -> ExportedProgram:
        """As a program whose one argument is a dict: the inputs of tokens, and `past`, a list of the cache's tensors.
        Raises SourceError."""
        import torch

        free = torch.export.Dim.DYNAMIC
        example, sizes = self._example(), {}
        for name in example:
            sizes[name] = [{0: free, 2: free} for _ in example[name]] if name == PAST else {0: free, 1: free}
        try:
            with tracing(), torch.no_grad():
                return torch.export.export(self._flat(), (example,), dynamic_shapes=(sizes,))
        except Exception as error:
            raise SourceError(
                f"torch.export can't trace it with its cache: {first_line(error)}",
                fix="log it with attn_implementation='eager', or with a newer transformers",
                where=source.uri,
            ) from error

    def symbols(self, program: ExportedProgram) -> dict[str, str]:
        """Symbol of the exporter → ours. It may give each input its own symbols, and the mask's length is a sum."""
        found: dict[str, str] = {}
        for spec, known in zip(torch_signature.tensors(program), self.signature.inputs, strict=False):
            for size, name in zip(spec.shape, known.shape, strict=True):
                if isinstance(size, str) and isinstance(name, str):
                    found.setdefault(size, name)
        return {size: name for size, name in found.items() if size.isidentifier()}

    def export(
        self, source: SourceModel, program: ExportedProgram, shapes: Mapping[str, ShapeRange], into: Path
    ) -> PortableModel:
        """What `trace` made, as ONNX. Raises SourceError, also where the policy gives shapes."""
        if shapes:
            raise SourceError(
                f"the policy gives shapes for {', '.join(shapes)}, and a language model's lengths are free",
                fix="take shapes out of the target; generation says how long a call is",
                where=source.uri,
            )
        symbols = self.symbols(program)
        portable = torch_portable.export_graph(program, self.signature, source, {}, into, symbols=symbols)
        return replace(portable, places=places(self.model))

    @property
    def _takes_positions(self) -> bool:
        return POSITIONS in inspect.signature(self.model.forward).parameters

    def _example(self) -> dict[str, Any]:
        import torch

        seen = _PAST + _TOKENS
        made: dict[str, Any] = {
            INPUT_IDS: torch.ones((_ROWS, _TOKENS), dtype=torch.int64),
            MASK: torch.ones((_ROWS, seen), dtype=torch.int64),
        }
        if self._takes_positions:
            made[POSITIONS] = torch.arange(_PAST, seen)[None].repeat(_ROWS, 1)
        made[PAST] = [
            torch.randn((_ROWS, count, _PAST, size), generator=torch.Generator().manual_seed(0))
            for count, *sizes in self.heads
            for size in sizes
        ]
        return made

    def _flat(self) -> Any:
        import torch
        from transformers import DynamicCache

        class Network(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
            def __init__(self, model: Any) -> None:
                super().__init__()
                self.model = model

            def forward(self, tensors: dict[str, Any]) -> Any:
                past = tensors[PAST]
                cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
                given = {name: tensor for name, tensor in tensors.items() if name != PAST}
                answer = self.model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                grown = [part for layer in answer.past_key_values.layers for part in (layer.keys, layer.values)]
                return {LOGITS: answer.logits, "present": grown}

        return Network(self.model).eval()


class OriginalSession:
    """The original as a session of its own graph (`serving.generation.CachedSession`): eager, with transformers' own
    cache, which stays where it is."""

    def __init__(self, network: CausalNetwork, there: Place) -> None:
        self.signature = network.signature
        self._there, self._model = there, there.module(network.model)

    def step(self, inputs: Batch, cache: Any) -> tuple[Array, Any]:
        import torch

        there = self._there
        given = {name: there.tensor(torch.from_numpy(array)) for name, array in inputs.items()}
        with torch.no_grad():
            answer = self._model(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        (logits,) = there.arrays([answer.logits.float()])
        return logits, answer.past_key_values


def windows(tokenizer: Any, texts: Sequence[str], tokens: int) -> list[Array]:
    """Of each text its windows of exactly so many tokens, [windows, tokens]. As the pipeline gives a prompt: with the
    special tokens that the tokenizer adds by itself at the beginning."""
    import numpy as np

    found: list[Array] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a text is longer than the network takes: it is cut here
        for text in texts:
            ids = np.asarray(tokenizer(str(text))["input_ids"], np.int64)
            count = len(ids) // tokens
            found.append(ids[: count * tokens].reshape(count, tokens))
    return found


def demand_length(source: SourceModel, model: Any, tokens: int) -> None:
    """Raise SourceError where a sample has more tokens than the network has places for."""
    longest = places(model)
    if longest is not None and tokens > longest:
        raise SourceError(
            f"a sample has {tokens} tokens (generation.prompt_tokens + new_tokens), and the model takes {longest}",
            fix="lower them in the policy's target",
            where=source.uri,
        )
