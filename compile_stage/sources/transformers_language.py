"""What a text-generation pipeline has around its network, proven against the original's pyfunc before anything is
compiled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.records import Generation, Predictions, Processor, SourceModel
from compile_stage.serving import chat
from compile_stage.serving.generation import GenerationSession
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.serving.text_generation import PARAMS, SETTINGS, TASK, GenerationProcessor
from compile_stage.sources import mlmodel
from compile_stage.sources import transformers_text as text
from compile_stage.sources.torch_device import Place
from compile_stage.sources.transformers_generation import CausalNetwork, OriginalSession

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_SHORTEST = Generation(prompt_tokens=1, new_tokens=2)
"""Of a session whose `generate` alone is called."""

GREEDY = {"do_sample": False, "max_new_tokens": 16}
"""Params of the calls that two models are compared by: what is drawn at random can't be compared."""

_COMPARED = 8
"""Prompts: at sixteen tokens each, 128 choices that rounding could turn where two tokens are alike by chance."""

_HELLO = {"role": "user", "content": "Hello, world"}
_CONVERSATIONS = ([_HELLO], [_HELLO, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And?"}])

_SAYS_NOTHING = {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
                 "_from_model_config", "cache_implementation", "return_dict_in_generate", "output_attentions",
                 "output_hidden_states"}  # fmt: skip


def processor(source: SourceModel, tokenizer: Any, into: Path) -> Processor:
    """The tokenizer, and how predict() generates. Around the network that its pyfunc has loaded: one copy of it in
    memory."""
    try:
        text.write_tokenizer(tokenizer, into)
        original, model = _original(source)
        how = _describe(source, model, tokenizer)
        network = OriginalSession(CausalNetwork.of(source, model), Place("cpu"))
    except SourceError as error:
        return Processor(refusal=error.problem)
    except Exception as error:  # noqa: BLE001 - whatever MLflow and transformers raise of a pipeline they can't make
        return Processor(refusal=f"its own pyfunc can't be loaded: {first_line(error)}")
    session = GenerationSession(network, _SHORTEST)
    made = GenerationProcessor(into, how)
    compared, tried = 0, _tried(source)
    without_prompt = {**GREEDY, "return_full_text": False}
    for prompt, params in [*((prompt, GREEDY) for prompt in (*tried, "")), (tried[0], without_prompt)]:
        expected = _answer(original, [prompt], params)
        if expected is None:
            continue
        try:
            found = plain_prediction(made.predict([prompt], params, session.generate))
        except InputRefusedError as error:
            return Processor(refusal=f"it refuses {prompt!r}, which its pyfunc answers: {error}")
        if (reason := refuse_prediction(found, expected, 0.0)) is not None:
            return Processor(refusal=f"to {prompt!r} it answers otherwise than its pyfunc: {reason}")
        compared += 1
    if (reason := _refuse_requests(made, how, original, session)) is not None:
        return Processor(refusal=reason)
    if not compared:
        return Processor(refusal="its pyfunc answers none of the prompts that were tried")
    return Processor(text=how, runtime=package_versions("tokenizers", *(["jinja2"] if "template" in how else [])))


def _refuse_requests(
    made: GenerationProcessor, how: Mapping[str, Any], original: Any, session: GenerationSession
) -> str | None:
    """The reason when requests of an inference task are answered otherwise than by the original's pyfunc."""
    if not (task := how.get("inference_task")):
        return None
    import pandas as pd

    model, field = original._model_impl, chat.FIELDS[task]
    for one in _CONVERSATIONS if task == chat.CHAT else ["Hello, world"]:
        # Two requests of a frame, the params of the first hold.
        data = pd.DataFrame({field: [one, one], "max_tokens": [6, 6]})
        model.llm_inference_task = task
        try:
            expected = model.predict(data, {"do_sample": False})
        except Exception as error:  # noqa: BLE001 - a template may want other roles than these
            return f"its pyfunc does not answer {one!r}: {first_line(error)}"
        finally:
            model.llm_inference_task = None
        try:
            found = made.predict(data, {"do_sample": False}, session.generate)
        except InputRefusedError as error:
            return f"it refuses {one!r}, which its pyfunc answers: {error}"
        if chat.without_identity(found) != chat.without_identity(expected):
            return f"to {one!r} it answers otherwise than its pyfunc"
    return None


def predictions(source: SourceModel, tokenizer: Any, samples: Batch) -> Predictions | None:
    """What the original's pyfunc writes after some prompts, without drawing tokens at random: those of the example, and
    the beginnings of samples."""
    original, _ = _original(source)
    beginnings = {"input_ids": samples["input_ids"][:, : max(1, samples["input_ids"].shape[1] // 2)]}
    tried = list(dict.fromkeys([*_tried(source), *text.decoded(tokenizer, beginnings)]))
    kept = [prompt for prompt in tried[: 2 * _COMPARED] if _answer(original, [prompt], GREEDY) is not None][:_COMPARED]
    if not kept:
        return None
    ids = tuple(tuple(map(int, tokenizer(prompt)["input_ids"])) for prompt in kept)
    answer = _answer(original, kept, GREEDY)
    return Predictions(texts=tuple(kept), ids=ids, answer=answer, params=GREEDY) if answer is not None else None


def _original(source: SourceModel) -> tuple[Any, Any]:
    """The original's pyfunc, and its network."""
    original = text.original_pyfunc(source)
    original._model_impl.llm_inference_task = None  # it is asked for texts; requests are compared by themselves
    return original, original._model_impl.pipeline.model


def _tried(source: SourceModel) -> list[str]:
    return text.tried_texts(text.example_texts(mlmodel.raw_example(source))[:3], None)[:6]


def _answer(original: Any, prompts: Sequence[str], params: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where the original fails: a prompt that is too long, for example. MLflow drops params that the signature
    does not name, so the flavor's own wrapper is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of params that take the place of others
        try:
            return plain_prediction(original._model_impl.predict(list(prompts), dict(params)))
        except Exception:  # noqa: BLE001
            return None


def _describe(source: SourceModel, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The manifest's `answer.text` (`serving.text_generation.GenerationProcessor`)."""
    from transformers import TextGenerationPipeline

    own = model.generation_config.to_diff_dict()
    if unknown := sorted(key for key in set(own) - SETTINGS - _SAYS_NOTHING if own[key] not in (None, False)):
        raise SourceError(f"its generation configuration sets {unknown[0]}, which a published model does not know")
    defaults = dict(mlmodel.flavor(source, "python_function").get("config") or {})
    if unknown := sorted(set(defaults) - PARAMS):
        raise SourceError(f"its model_config sets {unknown[0]}, which a published model does not know")
    pipelines = getattr(TextGenerationPipeline, "_default_generation_config", None)
    usual = pipelines.to_diff_dict() if pipelines is not None else {}
    # Without a number of its own, a total length of the model's holds instead of the pipeline's new tokens.
    settings = {key: value for key, value in {**usual, **own}.items() if key in SETTINGS}
    new = settings.pop("max_new_tokens", None) if "max_new_tokens" not in own else None
    stops = model.generation_config.eos_token_id
    return {
        **_describe_requests(source, tokenizer),
        "task": TASK,
        "settings": settings,
        "default_new_tokens": new or 256,
        "defaults": defaults,
        "start": model.generation_config.bos_token_id,
        "stops": [] if stops is None else list(stops) if isinstance(stops, list | tuple) else [int(stops)],
        "longest": text.longest_input(model, ["input_ids"]),
        "splits_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "cleans_up": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
    }


def _describe_requests(source: SourceModel, tokenizer: Any) -> dict[str, Any]:
    """Of a model that was logged with one of MLflow's inference tasks. Raises SourceError where its tokenizer has no
    chat template for conversations."""
    flavor = mlmodel.flavor(source, "transformers")
    if not (task := flavor.get("inference_task")):
        return {}
    spaced = tokenizer("a , b", add_special_tokens=False)["input_ids"]
    tidies = tokenizer.decode(spaced, clean_up_tokenization_spaces=True) != tokenizer.decode(spaced)
    how = {"inference_task": task, "model": str(flavor.get("source_model_name", "")), "tidies": tidies}
    if task != chat.CHAT:
        return how
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise SourceError("its tokenizer has no chat template, or several")
    tokens = {str(name): str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {**how, "template": template, "special_tokens": tokens}
