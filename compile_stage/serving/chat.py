"""Conversations in, answers out: MLflow's inference tasks `llm/v1/chat` and `llm/v1/completions` of a language model.

Vendored into every published model beside `compile_stage.flavor`. The chat template is the tokenizer's own; it is a
program, and runs in jinja2's sandbox, as in transformers.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from compile_stage.serving.prediction_io import InputRefusedError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser

CHAT, COMPLETIONS = "llm/v1/chat", "llm/v1/completions"
FIELDS = {CHAT: "messages", COMPLETIONS: "prompt"}
"""Inference task → the field of a request that holds what is continued."""

_OBJECTS = {CHAT: "chat.completion", COMPLETIONS: "text_completion"}
_WITHOUT_EFFECT = {"stream": False, "n": 1}
"""Fields that may be given with the value that changes nothing."""


def read_requests(data: Any, task: str, params: Mapping[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """The conversations (or prompts) of a data frame or dict as MLflow hands it on, and the params: its other fields,
    of the first row, by the names that transformers has for them.

    Raises:
        InputRefusedError: It is something else.
    """
    field = FIELDS[task]
    if not hasattr(data, "columns") and not isinstance(data, Mapping):
        raise InputRefusedError(f"a model of the task {task} takes {field}, not {type(data).__name__}")
    framed = hasattr(data, "columns")
    fields = {str(name): data[name].tolist() if framed else [data[name]] for name in data}
    if field not in fields:
        raise InputRefusedError(f"the request has no {field!r}; it has {', '.join(fields) or 'nothing'}")
    asked = fields.pop(field)
    found = {**(params or {}), **{name: values[0] for name, values in fields.items() if not _absent(values[0])}}
    for name, value in _WITHOUT_EFFECT.items():
        if name in found and found[name] == value:
            del found[name]
    if found.get("max_tokens") is not None:
        found["max_new_tokens"] = found["max_tokens"]
    found.pop("max_tokens", None)
    return asked, found


def render(messages: Any, template: str, tokens: Mapping[str, str]) -> str:
    """The prompt of a conversation, up to where the model answers.

    Args:
        tokens: Special tokens by name, such as `bos_token`.

    Raises:
        InputRefusedError: It is no list of messages, or the template does not take it.
    """
    from jinja2 import TemplateError

    given = list(messages.tolist() if hasattr(messages, "tolist") else messages)
    if not given or not all(isinstance(message, Mapping) and "role" in message for message in given):
        raise InputRefusedError("messages are a list of {'role': ..., 'content': ...}")
    try:
        return _compiled(template).render(
            # Without what is null, which transformers takes out: a template would write "None".
            messages=[{key: value for key, value in message.items() if value is not None} for message in given],
            tools=None, documents=None, add_generation_prompt=True, **tokens,
        )  # fmt: skip
    except (TemplateError, TypeError) as error:
        raise InputRefusedError(f"the model's chat template does not take these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """A chat template, with what transformers offers it. Raises jinja2.TemplateError."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marked(Extension):
        """`{% generation %}...{% endgeneration %}` marks what a model learns to write; it renders as what it holds."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marked, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    return environment.from_string(template)


def answer(task: str, name: str, text: str, prompt_tokens: int, total_tokens: int, limit: int | None) -> dict[str, Any]:
    """One answer, as MLflow writes it.

    Args:
        name: Of the original, as it was logged.
        limit: `max_new_tokens`, where it was asked for.
    """
    written = total_tokens - prompt_tokens
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if written == limit else "stop"}
    choice |= {"text": text} if task == COMPLETIONS else {"message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": total_tokens}
    return {
        "id": str(uuid.uuid4()),
        "object": _OBJECTS[task],
        "created": int(time.time()),
        "model": name,
        "usage": usage,
        "choices": [choice],
    }


def without_identity(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answers without what differs between two calls: the id and the time."""
    return [{key: value for key, value in one.items() if key not in ("id", "created")} for one in answers]


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _to_json(value: Any, **settings: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **settings})
