"""What a text pipeline has around its network: the tokenizer, written for a published model; and the original's pyfunc,
which that is compared with.

The tokenizer is never copied: transformers loads it without code of the model's own, and writes the state of its Rust
tokenizer as one JSON file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import Predictions, SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.serving.chat import FIELDS
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.serving.text import TOKENIZER_FILE, TextProcessor
from compile_stage.sources import graph, mlmodel, torch_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Batch

TASKS = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-classification": "text-classification",
    "token-classification": "token-classification",
    "fill-mask": "fill-mask",
    "feature-extraction": "feature-extraction",
    "text-generation": "text-generation",
}
"""Pipelines whose published models take text, by the name that `serving.text_answers` has for them."""

MAX_TOKENIZER_BYTES = 256 * 2**20
"""As JSON. The largest vocabularies in use (256,000 entries) take about 35 MB."""

MAX_COMPARED = 32
"""Texts that the published predict() is compared on: what differs by code or files shows in one; some seconds."""

_PLACES_MORE = 8  # of a table of positions, before or behind those of tokens; OPT's and RoBERTa's have 2
_MAX_COLUMNS = 2  # text, text_pair
_UNBOUNDED = 10**9  # transformers writes 1e30 for a tokenizer without a limit
_ALLOWED = {".json", ".txt", ".model", ".jinja", ".md"}
_TRIED = (
    "The quick brown fox jumps over the lazy dog.",
    "Café ÑANDÚ, naïve – résumé… £5 or 3,14?",
    "don't   stop\tme  now!\nSecond line",
    "東京 is 日本's capital 🙂",
    "a",
    "It was, all things considered, a rather long sentence about nothing in particular, and it went on and on.",
)
"""Accents, case, spaces, signs of other scripts, and lengths that need padding in one batch."""

_TOLERANCE = 1e-4
"""Of scores and vectors between one text at a time and a padded batch, both in FP32 in PyTorch."""


def refuse(source: SourceModel, tokenizer: Path) -> str | None:
    """The reason why a published model can't take text."""
    task = str(mlmodel.flavor(source, "transformers").get("task", ""))
    if task not in TASKS:
        return f"there is no text in and out for the task {task!r}"
    if (reason := refuse_pyfunc(source)) is not None:
        return reason
    if strange := sorted(path.name for path in tokenizer.rglob("*") if path.suffix not in _ALLOWED and path.is_file()):
        return f"beside its tokenizer lie files that are no data of a tokenizer ({', '.join(strange[:3])})"
    large = [path.name for path in tokenizer.rglob("*") if path.stat().st_size > MAX_TOKENIZER_BYTES]
    return f"its tokenizer's {large[0]} has more than {MAX_TOKENIZER_BYTES >> 20} MiB" if large else None


def refuse_pyfunc(source: SourceModel) -> str | None:
    """The reason why MLflow's pyfunc of a pipeline is not the one that a published model answers as."""
    flavor, pyfunc = mlmodel.flavor(source, "transformers"), mlmodel.flavor(source, "python_function")
    if pyfunc.get("loader_module") != "mlflow.transformers" or pyfunc.get("code"):
        return "its pyfunc is not MLflow's own for transformers"
    if elsewhere := [
        key for key in ("peft_adaptor", "local_base_model_path", "source_model_revision") if flavor.get(key)
    ]:
        return f"parts of it lie elsewhere ({elsewhere[0]})"
    if (foreign := _foreign_class(flavor)) is not None:
        return f"transformers has no {foreign}"  # MLflow would load it with trust_remote_code
    if flavor.get("inference_task") not in (None, *FIELDS) or _prompt_template(source):
        return f"it was logged with a prompt template, or with another inference task than {', '.join(FIELDS)}"
    return None


def write_tokenizer(tokenizer: Any, into: Path) -> None:
    """The tokenizer's own state as `into/tokenizer.json`. Raises SourceError for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SourceError("its tokenizer runs in Python alone; save a fast one (AutoTokenizer.from_pretrained)")
    text = backend.to_str()
    if len(text) > MAX_TOKENIZER_BYTES:
        raise SourceError(f"its tokenizer has more than {MAX_TOKENIZER_BYTES >> 20} MiB")
    into.mkdir(parents=True, exist_ok=True)
    (into / TOKENIZER_FILE).write_text(text, encoding="utf-8")


def describe_tokenizer(tokenizer: Any, signature: Signature, longest: int | None) -> dict[str, Any]:
    """What `serving.text` has to know of any tokenizer.

    Args:
        longest: The largest number of tokens that the network takes; None for any.
    """
    length = tokenizer.model_max_length
    return {
        "pad_id": tokenizer.pad_token_id,
        "pad_type_id": getattr(tokenizer, "pad_token_type_id", 0),
        "mask_id": getattr(tokenizer, "mask_token_id", None),
        "mask_token": getattr(tokenizer, "mask_token", None),
        "unk_id": tokenizer.unk_token_id,
        # A setting of the call in transformers, which the tokenizer's own file does not keep.
        "splits_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "truncates_left": getattr(tokenizer, "truncation_side", "right") == "left",
        "model_max_length": int(length) if length and length < _UNBOUNDED else None,
        "longest": longest,
        "per_token": [
            spec.name for spec in signature.outputs if len(spec.shape) > 2 and isinstance(spec.shape[1], str)
        ],
    }


def describe(source: SourceModel, model: Any, tokenizer: Any, signature: Signature) -> dict[str, Any]:
    """The manifest's `answer.text` of a pipeline (`serving.text.TextProcessor`)."""
    task = TASKS[str(mlmodel.flavor(source, "transformers").get("task"))]
    configuration = model.config
    longest = longest_input(model, [spec.name for spec in signature.inputs])
    how = {"task": task, **describe_tokenizer(tokenizer, signature, longest)}
    how["output"] = signature.outputs[0].name if task == "feature-extraction" else "logits"
    how["defaults"] = _defaults(source, task, how)
    if task in ("text-classification", "token-classification"):
        how["labels"] = [str(configuration.id2label[index]) for index in range(configuration.num_labels)]
    if task == "text-classification":
        how["function"] = _function(configuration)
    if task == "fill-mask" and how["mask_id"] is None:
        raise SourceError("its tokenizer has no mask token")
    return how


def places(model: Any) -> int | None:
    """Tokens that a text has at most, by the network's configuration; None where it does not say, and where the number
    bounds nothing: DeBERTa without `position_biased_input` has only positions relative to each other, of any length."""
    if getattr(model.config, "position_biased_input", True) is False:
        return None
    length = getattr(model.config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def longest_input(model: Any, inputs: Sequence[str]) -> int | None:
    """The largest number of tokens that the network takes; None where its configuration names none.

    It is tried only where the network has a table of about as many places: such tables are short. Others compute their
    positions, of up to millions of tokens, which no machine takes at once.
    """
    import torch

    if (length := places(model)) is None:
        return None
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    if not any(abs(rows - length) <= _PLACES_MORE for rows in tables):
        return length
    pad = getattr(model.config, "pad_token_id", None)
    # RoBERTa and its kin count positions from the one after the padding token's id.
    for tried in dict.fromkeys((length, length - 1 - (pad if isinstance(pad, int) else 0))):
        filler = {name: torch.ones((1, tried), dtype=torch.int64) for name in inputs}
        filler["input_ids"] += 1 if pad == 1 else 0
        try:
            with torch.no_grad():
                model(**filler)
        except (IndexError, RuntimeError):
            continue
        return tried
    return None


def original_pyfunc(source: SourceModel) -> Any:
    """MLflow's own pyfunc of the model, its network in FP32 as the baseline is: one that was logged in bfloat16 or
    float16 answers with that type's rounding, which says nothing of how its texts are read. The caller has asked
    `refuse`, so it is the one that MLflow brings."""
    import mlflow.pyfunc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # versions of packages; what differs is found by the comparison
        original = mlflow.pyfunc.load_model(source.path)
    original._model_impl.pipeline.model.float()
    return original


def asked_columns(source: SourceModel) -> tuple[str, ...] | None:
    """The columns that predict() is asked in, none for a list: that of the texts, and of a model of pairs a second one.
    None where the signature has further ones, which there is nothing to fill with."""
    columns = mlmodel.columns(source) or ()
    return columns if len(columns) <= _MAX_COLUMNS and columns == mlmodel.text_columns(source) else None


def asked(texts: Sequence[str], columns: Sequence[str]) -> Any:
    """Texts as predict() takes them: a list, or a data frame with these columns. A second one has the texts once more,
    each one place further; one text alone is paired with itself."""
    if not columns:
        return list(texts)
    import pandas as pd

    return pd.DataFrame({column: [*texts[place:], *texts[:place]] for place, column in enumerate(columns)})


def refuse_answers(
    processor: TextProcessor,
    run: Callable[[Batch], Batch],
    original: Any,
    tried: Sequence[str],
    params: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = (),
    task: str = "",
) -> str | None:
    """The reason when the processor, around the original network, answers otherwise than the original's pyfunc, one
    text at a time and all at once; or when that answers none.

    Args:
        params: The signature's with their defaults, which MLflow hands to the original, and to what is published.
        columns: As `asked_columns` finds them.
    """
    if columns is None:
        return "its signature has columns beside the text"
    compared, failure = False, ""
    for texts in [*([text] for text in tried), list(tried)]:
        data = asked(texts, columns)
        try:
            expected = original.predict(data)
        except IndexError as error:
            if task != "token-classification" or len(texts) > 1:
                failure = first_line(error)
                continue
            expected = [""]  # MLflow's pyfunc fails so on a text without entities
        except Exception as error:  # noqa: BLE001 - a text may be too long for it
            failure = first_line(error)
            continue
        try:
            found = processor.predict(data, params, run)
        except InputRefusedError as error:
            return f"it refuses {texts[0]!r}, which its pyfunc answers: {error}"
        if (reason := refuse_prediction(plain_prediction(found), plain_prediction(expected), _TOLERANCE)) is not None:
            return f"to {texts[0]!r} it answers otherwise than its pyfunc: {reason}"
        compared = True
    return None if compared else f"its own pyfunc answers none of the texts that are tried: {failure}"


def tried_texts(example: Sequence[str], mask: str | None) -> list[str]:
    """The model's own example and some that are hard to tokenize, with a mask where the task needs one."""
    texts = list(dict.fromkeys([*example[:8], *_TRIED]))
    return texts if mask is None else [text if mask in text else f"{text} {mask}" for text in texts]


def _function(configuration: Any) -> str:
    """As the pipeline chooses it."""
    kind = getattr(configuration, "problem_type", None)
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or configuration.num_labels == 1 else "softmax"


def _defaults(source: SourceModel, task: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """The `model_config` that the model was logged with; a param that predict() lacks is the reason to refuse it."""
    from compile_stage.serving.text_answers import PARAMS

    defaults = dict(mlmodel.flavor(source, "python_function").get("config") or {})
    known = PARAMS[task] | {"truncation", "max_length", "padding", "add_special_tokens"}
    if unknown := sorted(set(defaults) - known):
        raise SourceError(f"its model_config sets {unknown[0]}, which a published model does not know")
    if task == "token-classification" and how["model_max_length"] is not None:
        defaults.setdefault("truncation", True)  # that pipeline always does
    return defaults


def _foreign_class(flavor: Mapping[str, Any]) -> str | None:
    import transformers

    names = [str(value) for key, value in flavor.items() if key.endswith("_type") and key != "instance_type" and value]
    return next((name for name in names if not hasattr(transformers, name)), None)


def _prompt_template(source: SourceModel) -> bool:
    from mlflow.models import Model

    return bool((Model.load(source.path).metadata or {}).get("prompt_template"))


def predictions_of(
    original: Any, tokenizer: Any, task: str, texts: Sequence[str], columns: Sequence[str] = ()
) -> Predictions | None:
    """The answers of the original's pyfunc to the texts that it can answer, at most `MAX_COMPARED`; None where it
    answers none.

    Args:
        columns: As `asked_columns` finds them.
    """
    mask = tokenizer.mask_token if task == "fill-mask" else None
    kept: list[str] = []
    for text in dict.fromkeys(f"{text} {mask}" if mask and mask not in text else text for text in texts):
        try:
            original.predict(asked([text], columns))
        except Exception:  # noqa: BLE001, S112 - a text that is too long, or that it finds nothing in
            continue
        kept.append(text)
        if len(kept) == MAX_COMPARED:
            break
    if not kept:
        return None
    truncated = task in ("token-classification", "sentence-embedding")
    ids = tuple(tuple(map(int, tokenizer(text, truncation=truncated)["input_ids"])) for text in kept)
    answer = plain_prediction(original.predict(asked(kept, columns)))
    column, pair = (*columns, "", "")[:_MAX_COLUMNS]
    return Predictions(texts=tuple(kept), ids=ids, answer=answer, column=column, pair=pair)


def length_of(tokenizer: Any) -> int:
    """Where its tokenizer truncates; 512 for one without a limit, as most networks that read text have."""
    length = tokenizer.model_max_length
    return int(length) if length and length < _UNBOUNDED else 512


def tokenized(tokenizer: Any, texts: Sequence[Any], inputs: Sequence[str], longest: int) -> Batch:
    """Texts, or pairs, as the network's inputs [texts, tokens], padded to the longest and cut at `longest` tokens."""
    first = [text[0] if isinstance(text, tuple) else text for text in texts]
    second = [text[1] for text in texts] if isinstance(texts[0], tuple) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoded = tokenizer(first, second, padding=True, truncation=True, max_length=longest, return_tensors="np")
    return {name: encoded[name].astype("int64") for name in inputs}


def example_texts(raw: Any) -> list[str]:
    """Text from what MLflow keeps of an input example: a string, a list, a dict of lists, a data frame's first
    column."""
    if raw is None:
        return []
    if isinstance(raw, str):
        return [raw]
    if hasattr(raw, "columns"):
        raw = raw[raw.columns[0]].tolist()
    if isinstance(raw, Mapping):
        raw = next(iter(raw.values()), [])
    return [raw] if isinstance(raw, str) else [str(text) for text in raw if isinstance(text, str)]


def decoded(tokenizer: Any, samples: Batch) -> list[str]:
    """Samples of tokens as text; those that are nothing but special tokens are left out."""
    mask = samples.get("attention_mask")
    texts = (
        tokenizer.decode(ids[mask[row] != 0] if mask is not None else ids, skip_special_tokens=True)
        for row, ids in enumerate(samples["input_ids"])
    )
    return [text for text in texts if text.strip()]


def axes_of(program: ExportedProgram, sequence: str) -> dict[str, str]:
    """Symbol of the exporter → ours: axis 0 of every input is the batch, axis 1 the `sequence`, though the exporter may
    give each input its own symbols."""
    taken = len(program.graph_signature.user_inputs)
    return {
        str(size): (graph.BATCH, sequence)[axis]
        for spec in islice(torch_signature.tensors(program), taken)
        for axis, size in enumerate(spec.shape)
    }
