"""Text in, answers out: what stands in front of and behind a network that reads token ids.

Vendored into every published model beside `compile_stage.flavor`. A model whose manifest has `answer.text` carries its
tokenizer as `data/tokenizer/tokenizer.json`, and its predict() takes what its source's pyfunc took: texts, a list of
them, a data frame with a column of them, and params. The tokenizer runs in the package `tokenizers`, which loads no
code from that file and needs no PyTorch.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compile_stage.core.tensors import Signature
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.text_answers import ANSWERS, PARAMS, Processed

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

Text: TypeAlias = str | tuple[str, str]
"""A text, or a pair of texts (`text`, `text_pair`)."""

TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILE = "tokenizer.json"

_PAIR = {"text", "text_pair"}
_TOKENIZE = {"truncation", "max_length", "padding", "add_special_tokens"}
_TRUNCATES = {True: "longest_first", "longest_first": "longest_first", "only_first": "only_first"}
_NO_TRUNCATION = (None, False, "do_not_truncate")


class TextProcessor:
    """Tokenizer, batches and answers of one published model. Safe for several threads.

    Args:
        folder: Holds `tokenizer.json`.
        how: The manifest's `answer.text`: `task`; `defaults` of its params; `labels`; `function` that makes scores of
            logits; ids of special tokens (`pad_id`, `pad_type_id`, `mask_id`, `unk_id`); `model_max_length`, at which
            the tokenizer truncates where it is asked to; `splits_special_tokens`, where those that a client writes are
            text; `longest`, the largest number of tokens that the network takes, or None; `per_token`, the outputs
            whose axis 1 is the token; `output`, what the answer is made of.
        signature: Of the graph.
        batch_size: At most so many texts go through the graph at once.
    """

    def __init__(self, folder: Path, how: Mapping[str, Any], signature: Signature, batch_size: int = 1) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._tokenizer.no_padding()
        # Whether `[SEP]` in a text is what a client wrote, and no special token; no part of the file.
        self._tokenizer.encode_special_tokens = bool(how.get("splits_special_tokens"))
        self._lock = threading.Lock()  # truncation is a setting of the tokenizer, not of the call
        self._how, self._signature = how, signature
        self._batch_size = signature.fixed_batch or batch_size
        lengths = [spec.shape[1] for spec in signature.inputs if len(spec.shape) > 1]
        self._fixed_length = next((length for length in lengths if isinstance(length, int)), None)
        limits = [limit for limit in (self._fixed_length, how.get("longest")) if limit is not None]
        self._longest = min(limits, default=None)

    def takes(self, data: Any) -> bool:
        """True for text; False for the network's own tensors, by name."""
        names = {str(key) for key in data} if hasattr(data, "keys") else set()
        return self._signature.inputs[0].name not in names

    def predict(self, data: Any, params: Mapping[str, Any] | None, run: Callable[[Batch], Batch]) -> Any:
        """What the source's pyfunc answers to `data`.

        Args:
            run: The network: all inputs by name → all outputs by name.

        Raises:
            InputRefusedError: It is no text, too long, or params are not known.
        """
        task = self._how["task"]
        wanted = {**self._how.get("defaults", {}), **(params or {})}
        if unknown := sorted(set(wanted) - PARAMS[task] - _TOKENIZE):
            known = ", ".join(sorted(PARAMS[task] | _TOKENIZE))
            raise InputRefusedError(f"{task} has no param {unknown[0]!r} here; it has {known}")
        texts = read_texts(data, task)
        if task == "feature-extraction":
            texts = texts[:1]  # MLflow's own pyfunc answers the first text alone
        encoded = self.encode(texts, wanted)
        outputs = self.run_network(encoded, run)
        processed = Processed(texts, encoded, outputs, self._how, wanted, self._tokenizer, isinstance(data, str))
        return ANSWERS[task](processed)

    def encode(self, texts: Sequence[Text], params: Mapping[str, Any]) -> list[Any]:
        """The tokens of each text, as the package `tokenizers` gives them; none is padded.

        Raises:
            InputRefusedError: A text has more tokens than the network takes.
        """
        with self._lock:
            self._truncate(params)
            added = bool(params.get("add_special_tokens", True))
            encoded: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=added)
        for number, one in enumerate(encoded):
            if not one.ids:
                raise InputRefusedError(f"text {number} has no tokens")
            if self._longest is not None and len(one.ids) > self._longest:
                raise InputRefusedError(
                    f"text {number} has {len(one.ids)} tokens, and the model takes at most {self._longest}: shorten it"
                )
        return encoded

    def run_network(self, encoded: Sequence[Any], run: Callable[[Batch], Batch]) -> list[Batch]:
        """The outputs for each text by itself, without its padding. Texts of similar length share a batch."""
        order = sorted(range(len(encoded)), key=lambda index: len(encoded[index].ids))
        answers: list[Batch] = [{} for _ in encoded]
        for chunk in self._chunks(order, encoded):
            outputs = run(self._batch([encoded[index] for index in chunk]))
            for row, index in enumerate(chunk):
                answers[index] = self._row(outputs, row, len(encoded[index].ids))
        return answers

    def tensors(self, data: Any) -> Batch:
        """The network's inputs from a dict or data frame that has them by name. A mask that is not among them hides
        the padding: MLflow hands on only the columns that the signature has."""
        import numpy as np

        given = {str(name): _array(data[name]) for name in data}
        ids = given[self._signature.inputs[0].name]
        for spec in self._signature.inputs[1:]:
            if spec.name in given:
                continue
            pad = self._how.get("pad_id")
            known = spec.name == "attention_mask" and pad is not None
            given[spec.name] = (ids != pad).astype(np.int64) if known else np.zeros(ids.shape, np.int64)
        return given

    def _truncate(self, params: Mapping[str, Any]) -> None:
        asked, length = params.get("truncation"), params.get("max_length")
        if asked is None and length is not None and not params.get("padding"):
            asked = True  # transformers takes a length alone as the wish for it
        length = length if length is not None else self._how.get("model_max_length")
        sound = isinstance(length, int) and not isinstance(length, bool) and length > 0
        if asked not in (*_NO_TRUNCATION, *_TRUNCATES) or not (sound or length is None):
            raise InputRefusedError(f"texts can't be truncated by {asked!r} to {length!r} tokens")
        if asked in _NO_TRUNCATION or length is None:
            self._tokenizer.no_truncation()
            return
        side = "left" if self._how.get("truncates_left") else "right"
        self._tokenizer.enable_truncation(length, strategy=_TRUNCATES[asked], direction=side)

    def _chunks(self, order: Sequence[int], encoded: Sequence[Any]) -> list[list[int]]:
        masked = any(spec.name == "attention_mask" for spec in self._signature.inputs)
        chunks: list[list[int]] = []
        for index in order:
            length = len(encoded[index].ids)
            if not masked and self._fixed_length not in (None, length):
                raise InputRefusedError(
                    f"text {index} has {length} tokens, and the model, which has no mask for padding, takes "
                    f"{self._fixed_length}"
                )
            last = chunks[-1] if chunks else None
            fits = last is not None and len(last) < self._batch_size
            if fits and last is not None and (masked or len(encoded[last[0]].ids) == length):
                last.append(index)
            else:
                chunks.append([index])
        return chunks

    def _batch(self, encoded: Sequence[Any]) -> Batch:
        """Padded at the end, whatever side the tokenizer pads: positions stay those of the text alone."""
        import numpy as np

        rows = self._signature.fixed_batch or len(encoded)
        length = self._fixed_length or max(len(one.ids) for one in encoded)
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        padding = {"input_ids": self._how.get("pad_id") or 0, "token_type_ids": self._how.get("pad_type_id") or 0}
        batch = {}
        for spec in self._signature.inputs:
            array = np.full((rows, length), padding.get(spec.name, 0), np.dtype(spec.dtype))
            for row in range(rows):  # a fixed batch is filled with its last text
                values = getattr(encoded[min(row, len(encoded) - 1)], fields[spec.name])
                array[row, : len(values)] = values
            batch[spec.name] = array
        return batch

    def _row(self, outputs: Batch, row: int, length: int) -> Batch:
        tokens = self._how.get("per_token", ())
        return {name: array[row, :length] if name in tokens else array[row] for name, array in outputs.items()}


def read_texts(data: Any, task: str) -> list[Text]:
    """The texts of what MLflow hands to predict(): a text, a list of texts or of dicts, a dict, a series, a data frame.

    Raises:
        InputRefusedError: There is none, or something else than text.
    """
    framed = hasattr(data, "columns")
    if isinstance(data, str):
        records: list[Any] = [data]
    elif framed:
        records = [dict(zip(data.columns, row, strict=True)) for row in data.itertuples(index=False, name=None)]
    elif isinstance(data, Mapping):
        records = _records(data)
    elif isinstance(data, list | tuple) or hasattr(data, "tolist"):
        records = list(data.tolist() if hasattr(data, "tolist") else data)
    else:
        raise InputRefusedError(f"the model takes texts, a list of texts or a data frame, not {type(data).__name__}")
    if task == "sentence-embedding" and len(records) == 1 and isinstance(records[0], Mapping):
        (first, *_) = records[0].values()  # MLflow puts a dict's list of texts into one cell
        records = list(first) if isinstance(first, list) else records
    if not records:
        raise InputRefusedError("there is no text")
    texts = [_text(record, number, task) for number, record in enumerate(records)]
    unnamed = framed and not isinstance(next(iter(data.columns), ""), str)
    return _unquoted(texts) if unnamed and task == "text-classification" else texts


def _records(data: Mapping[str, Any]) -> list[Any]:
    """A dict of texts is one record, a dict of lists one record for each place in them."""
    if all(isinstance(value, str) for value in data.values()):
        return [dict(data)]
    columns = [value.tolist() if hasattr(value, "tolist") else value for value in data.values()]
    columns = [[column] if isinstance(column, str) else list(column) for column in columns]
    if len({len(column) for column in columns}) != 1:
        raise InputRefusedError("the lists of the dict differ in length")
    return [dict(zip(data, values, strict=True)) for values in zip(*columns, strict=True)]


def _text(record: Any, number: int, task: str) -> Any:
    if isinstance(record, list | tuple) and len(record) == 1:
        record = record[0]
    if isinstance(record, Mapping):
        if task == "text-classification" and set(record) == _PAIR:
            record = (_cell(record["text"]), _cell(record["text_pair"]))
        elif task == "text-classification" and (len(record) > 1 or any(map(_is_other_name, record))):
            raise InputRefusedError(f"text {number} has the keys {', '.join(map(str, record))}, not text and text_pair")
        else:
            record = _cell(next(iter(record.values())))
    values = record if isinstance(record, tuple) else (record,)
    if not all(isinstance(value, str) for value in values):
        raise InputRefusedError(f"text {number} is no text, but {type(record).__name__}")
    return record


def _is_other_name(key: Any) -> bool:
    """Columns without names have numbers."""
    return isinstance(key, str) and key != "text"


def _cell(value: Any) -> Any:
    """A text that MLflow's scoring server put into an array, or a client into a list, of one; all else as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _unquoted(texts: list[Text]) -> list[Text]:
    """MLflow's scoring server hands dicts on as their source text, and null as "None"; its pyfunc reads all rows of a
    data frame whose columns have no names as Python literals where each is one; a pair comes as {'text': ...,
    'text_pair': ...}. Numbers and the like, with which the original fails, are taken for texts.

    Raises:
        InputRefusedError: All are literals, and one is None, which the original refuses; or is a tuple, or a dict with
            more than a text and its pair, of which the original answers a part.
    """
    if not all(isinstance(text, str) for text in texts):
        return texts
    try:
        values: list[Any] = [ast.literal_eval(str(text)) for text in texts]
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return texts
    if None in values:
        raise InputRefusedError(f"text {values.index(None)} is missing (null): send a text in its place")
    found: list[Text] = []
    for number, value in enumerate(values):
        if isinstance(value, tuple) or (isinstance(value, Mapping) and "text" in value and not set(value) <= _PAIR):
            raise InputRefusedError(f"text {number} is a {type(value).__name__}: send a text, or text and text_pair")
        if isinstance(value, Mapping) and "text" in value:
            pair = value.get("text_pair")
            value = value["text"] if pair is None else (value["text"], pair)
        if not all(isinstance(part, str) for part in (value if isinstance(value, tuple) else (value,))):
            return texts
        found.append(value)
    return found


def _array(column: Any) -> Array:
    """An input of the network; in a data frame each cell is a row."""
    import numpy as np

    values = column.tolist() if hasattr(column, "tolist") else column
    if len(values) == 1 and np.ndim(values[0]) == 2:  # MLflow puts the whole of a dict into one cell
        values = values[0]
    try:
        return np.asarray(values, np.int64)
    except (ValueError, TypeError) as error:
        raise InputRefusedError("token ids are rows of whole numbers of one length") from error
