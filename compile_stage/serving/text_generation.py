"""Prompts in, continued texts out: what stands in front of and behind a language model's generations.

Vendored into every published model beside `compile_stage.flavor`. predict() takes what MLflow's pyfunc of a
text-generation pipeline takes, and answers in its form: a list with a text for each prompt, the prompt first. A prompt
is continued by itself, as the pipeline does, so no padding is in its way.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.generation import INPUT_IDS
from compile_stage.serving import chat
from compile_stage.serving.generation import Choose, greedy
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.text import TOKENIZER_FILE, read_texts

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

TASK = "text-generation"

SETTINGS = frozenset(("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p"))
"""Of a generation: what a model's own configuration, its `model_config` and params may set."""

PARAMS = SETTINGS | {"return_full_text", "include_prompt", "collapse_whitespace", "add_special_tokens"}

Generate = Callable[..., "list[list[int]]"]
"""`GenerationSession.generate`: prompts [1, tokens], a number of new tokens, `stops`, `choose` → the new tokens."""

_TOP_K = 50  # transformers' own default where it samples
_JOINED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
           (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


class GenerationProcessor:
    """Tokenizer and generation of one published language model. Safe for several threads.

    Args:
        folder: Holds `tokenizer.json`.
        how: The manifest's `answer.text`: `settings` of a generation where nobody says otherwise; `defaults` of
            predict()'s params; `stops`, ids of tokens that end a text; `start`, the id of the token that an empty
            prompt is continued from, or None; `longest`, the largest number of tokens that the network has places for,
            or None; `cleans_up`, whether the tokenizer takes out spaces that it finds superfluous;
            `splits_special_tokens`, whether those that a client writes are text. Of one of MLflow's inference tasks
            also `inference_task`, `model`, the original's name, `tidies`, whether its tokenizer takes out such spaces
            where it is asked to, and for conversations `template` and `special_tokens`.
    """

    def __init__(self, folder: Path, how: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = bool(how.get("splits_special_tokens"))
        self._lock = threading.Lock()
        self._how = how

    def takes(self, data: Any) -> bool:
        """True for text; False for the network's own tensors, by name."""
        return INPUT_IDS not in ({str(key) for key in data} if hasattr(data, "keys") else set())

    def predict(self, data: Any, params: Mapping[str, Any] | None, generate: Generate) -> list[Any]:
        """What the source's pyfunc answers to `data`: texts, or, of one of MLflow's inference tasks, an answer in its
        form each. A list of prompts has texts as its answer whatever the task.

        Raises:
            InputRefusedError: It is no text, too long, or params are not known.
        """
        task = self._how.get("inference_task")
        if task and not isinstance(data, list | str):
            return self._answer_requests(task, *chat.read_requests(data, task, params), generate)
        given = self._given(params)
        prompts = [str(prompt) for prompt in read_texts(data, TASK)]
        answers = []
        for prompt, (_, tokens) in zip(prompts, self._write(prompts, given, generate), strict=True):
            written = self._decode(tokens, tidy=bool(self._how.get("cleans_up")))
            answers.append(prompt + written if given.get("return_full_text") in (None, True) else written)
        if given.get("collapse_whitespace"):
            answers = [re.sub(r"\s+", " ", answer) for answer in answers]
        return [answer.strip() for answer in answers]  # as MLflow's pyfunc does

    def _answer_requests(
        self, task: str, asked: Sequence[Any], params: Mapping[str, Any], generate: Generate
    ) -> list[dict[str, Any]]:
        """MLflow cuts the prompt off the whole text, by the length of the prompt's own tokens as text."""
        given = self._given(params)
        if task == chat.CHAT:
            asked = [chat.render(one, self._how["template"], self._how["special_tokens"]) for one in asked]
        if not all(isinstance(one, str) for one in asked):
            raise InputRefusedError("each prompt is a text")
        prompts, tidy = list(asked), bool(self._how.get("tidies"))
        bare = self._tokens(prompts, added=False)
        answers = []
        for own, (ids, tokens) in zip(bare, self._write(prompts, given, generate), strict=True):
            prompt = self._decode(own.ids, tidy=tidy)
            text = self._decode([*ids, *tokens], tidy=tidy)[len(prompt) :].lstrip()
            total, limit = len(ids) + len(tokens), given.get("max_new_tokens")
            answers.append(chat.answer(task, str(self._how.get("model", "")), text, len(own.ids), total, limit))
        return answers

    def _given(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        given = {**self._how.get("defaults", {}), **(params or {})}
        if unknown := sorted(set(given) - PARAMS):
            raise InputRefusedError(f"{TASK} has no param {unknown[0]!r} here; it has {', '.join(sorted(PARAMS))}")
        return given

    def _write(
        self, prompts: Sequence[str], given: Mapping[str, Any], generate: Generate
    ) -> list[tuple[list[int], list[int]]]:
        """Of each prompt its tokens, and those that follow. An empty one is continued from the token that begins a
        text, which transformers counts among those that follow."""
        choice, written = _choice(self._settings(given)), []
        for encoded in self.encode(prompts, given):
            ids = list(encoded.ids)
            begin = [] if ids else [int(self._how["start"])]
            new = self._new_tokens(given, len(ids or begin))
            (tokens,) = generate(_row(ids or begin), new, stops=self._how.get("stops", ()), choose=choice)
            written.append((ids, [*begin, *tokens]))
        return written

    def encode(self, texts: Sequence[str], params: Mapping[str, Any]) -> list[Any]:
        """The tokens of each prompt, as the package `tokenizers` gives them.

        Raises:
            InputRefusedError: A prompt has none, and the model no token to begin with; or it has as many as the network
                has places for.
        """
        encoded = self._tokens(texts, added=bool(params.get("add_special_tokens", True)))
        longest = self._how.get("longest")
        for number, one in enumerate(encoded):
            if not one.ids and self._how.get("start") is None:
                raise InputRefusedError(f"prompt {number} has no tokens, and the model none that begins a text")
            if longest is not None and len(one.ids) >= longest:
                raise InputRefusedError(
                    f"prompt {number} has {len(one.ids)} tokens, and the model has places for {longest}: shorten it"
                )
        return encoded

    def _tokens(self, texts: Sequence[str], *, added: bool) -> list[Any]:
        with self._lock:
            encoded: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=added)
        return encoded

    def tensors(self, data: Any) -> Batch:
        """The tokens of whole generations, from a dict or data frame that has them."""
        import numpy as np

        values = data[INPUT_IDS]
        values = values.tolist() if hasattr(values, "tolist") else values
        if len(values) == 1 and np.ndim(values[0]) == 2:  # MLflow puts the whole of a dict into one cell
            values = values[0]
        try:
            return {INPUT_IDS: np.asarray(values, np.int64)}
        except (ValueError, TypeError) as error:
            raise InputRefusedError("token ids are rows of whole numbers of one length") from error

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._how.get("settings", {}), **{key: value for key, value in given.items() if key in SETTINGS}}

    def _new_tokens(self, given: Mapping[str, Any], prompt: int) -> int:
        """As many as asked for. A total length counts where nobody asks for new tokens; what the pipeline itself would
        take is in `default_new_tokens`."""
        settings = self._settings(given)
        new = settings.get("max_new_tokens")
        if new is None and settings.get("max_length") is not None:
            new = _whole(settings["max_length"], "max_length") - prompt
        elif new is None and "max_new_tokens" in given:
            raise InputRefusedError("max_new_tokens is a whole number, not None: leave it out for the default")
        new = _whole(self._how.get("default_new_tokens", 256) if new is None else new, "max_new_tokens")
        longest = self._how.get("longest")
        if new < 1:
            raise InputRefusedError(f"the prompt has {prompt} tokens already, and no new ones are asked for")
        if longest is not None and prompt + new > longest + 1:  # the last token is written, not read
            raise InputRefusedError(
                f"the prompt has {prompt} tokens and {new} new ones are asked for, and the model has places for "
                f"{longest}: shorten it, or lower max_new_tokens"
            )
        return new

    def _decode(self, tokens: Sequence[int], *, tidy: bool) -> str:
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        for apart, joined in _JOINED if tidy else ():
            text = text.replace(apart, joined)
        return text


def _row(ids: Sequence[int]) -> Array:
    import numpy as np

    return np.asarray([list(ids)], np.int64)


def _whole(value: Any, name: str) -> int:
    if not (number := _number(value, name)).is_integer():
        raise InputRefusedError(f"{name} is a whole number, not {value!r}")
    return int(number)


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputRefusedError(f"{name} is a number, not {value!r}") from error
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise InputRefusedError(f"{name} is a number, not {value!r}")
    return number


def _choice(settings: Mapping[str, Any]) -> Choose:
    """The likeliest token, or a draw: of logits over the temperature, among the `top_k` likeliest, among the fewest
    that have `top_p` together, in this order, as transformers does."""
    import numpy as np

    if not settings.get("do_sample"):
        return greedy
    # None is what nobody says. 0 is a value: no temperature of the draw, and a share that the likeliest alone has.
    temperature, top_p = (
        1.0 if settings.get(name) is None else _number(settings[name], name) for name in ("temperature", "top_p")
    )
    top_k = settings.get("top_k", _TOP_K)
    most = None if top_k is None else _whole(top_k, "top_k")
    if temperature <= 0:
        raise InputRefusedError("temperature is above 0 where tokens are drawn: for the likeliest say do_sample: false")
    if not 0 <= top_p <= 1:
        raise InputRefusedError("top_p is a share, from 0 to 1")
    if most is not None and most < 0:
        raise InputRefusedError("top_k is above 0, or 0 for all tokens")
    random = np.random.default_rng()

    def draw(logits: Array, _: Array) -> Array:
        return np.array([random.choice(len(p), p=p) for p in map(shares, np.asarray(logits, np.float64))], np.int64)

    def shares(row: Any) -> Any:
        order = np.argsort(-row, kind="stable")
        kept = order[:most] if most else order
        likely = np.exp((row[kept] - row[kept[0]]) / temperature)
        likely /= likely.sum()
        before = np.cumsum(likely) - likely
        likely[1:][before[1:] >= top_p] = 0  # one is always left, as in transformers
        full = np.zeros(len(row))
        full[kept] = likely / likely.sum()
        return full

    return draw
