"""Texts as MLflow, its scoring server and clients hand them to predict(), and how they share batches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.serving.text import TextProcessor, read_texts

pytest.importorskip("tokenizers", reason="published text models need tokenizers")

WORDS = ["[PAD]", "[UNK]", "one", "two", "three", "four"]


def signature(batch: int | str = "batch", length: int | str = "sequence", *, masked: bool = True) -> Signature:
    names = ("input_ids", "attention_mask") if masked else ("input_ids",)
    return Signature(
        inputs=tuple(TensorSpec(name=name, dtype="int64", shape=(batch, length)) for name in names),
        outputs=(TensorSpec(name="vectors", dtype="float32", shape=(batch, length, 1)),),
    )


def processor(folder: Path, graph: Signature, batch_size: int = 2, **how: Any) -> TextProcessor:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    given = {"task": "sentence-embedding", "pad_id": 0, "output": "vectors", "per_token": ["vectors"], **how}
    return TextProcessor(folder, given, graph, batch_size)


class Network:
    """Answers each token with its id, and remembers the shapes that it was called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        self.shapes.append(batch["input_ids"].shape)
        return {"vectors": batch["input_ids"][..., None].astype(np.float32)}


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([{"text": "a"}, {"text": "b"}], ["a", "b"]),
        ({"text": "a", "text_pair": "b"}, [("a", "b")]),
        ({"text": ["a", "b"]}, ["a", "b"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([["a"], ["b"]]), ["a", "b"]),
        (pd.Series(["a", "b"]), ["a", "b"]),
        (pd.DataFrame(["a", "b"]), ["a", "b"]),
        (pd.DataFrame({"text": ["a"], "text_pair": ["b"]}), [("a", "b")]),
        (pd.DataFrame(["{'text': 'a', 'text_pair': 'b'}"]), [("a", "b")]),
        (pd.DataFrame(["'a'", "'b'"]), ["a", "b"]),
        (pd.DataFrame(["'a'", "b"]), ["'a'", "b"]),
        (pd.DataFrame(["1", "2"]), ["1", "2"]),
        (pd.DataFrame({"text": ["'a'", "'b'"]}), ["'a'", "'b'"]),  # as the original
        (pd.DataFrame({"text": ["None"]}), ["None"]),
        (pd.DataFrame(["{'text': 'a', 'text_pair': None}"]), ["a"]),
        (pd.DataFrame([{"text": np.array("a")}]), ["a"]),  # of dicts, by the scoring server
        (pd.DataFrame([{"text": np.array("a"), "text_pair": np.array("b")}]), [("a", "b")]),
        (pd.DataFrame({"text": [["a"], ["b"]]}), ["a", "b"]),
    ],
)
def test_texts_come_in_many_forms(data: Any, texts: list[Any]) -> None:
    """Broken: a form in which MLflow's pyfunc of the source takes text is refused, or read as something else."""
    assert read_texts(data, "text-classification") == texts


@pytest.mark.parametrize(
    "data",
    [
        [],
        3,
        [1, 2],
        pd.DataFrame({"a": [1.5]}),
        pd.DataFrame({"anything": ["a"]}),
        [["a", "b"]],
        {"a": ["x"], "b": ["y", "z"]},
        pd.DataFrame({"text": [["a", "b"]]}),
        pd.DataFrame(["('a', 'b')"]),  # the original answers the first alone
        pd.DataFrame(["{'text': 'a', 'lang': 'en'}"]),  # and leaves the rest out here
    ],
)
def test_what_is_no_text_is_refused_in_words(data: Any) -> None:
    """Broken: numbers in place of text end in a traceback of the tokenizer, which a server answers with 500."""
    with pytest.raises(InputRefusedError):
        read_texts(data, "text-classification")


@pytest.mark.parametrize("texts", [["None"], ["'good'", "None"]], ids=str)
def test_a_null_that_mlflow_made_a_text_of_is_refused_as_by_the_original(texts: list[str]) -> None:
    """Broken: a request with null for its text is answered with a label, where the original's is an error."""
    with pytest.raises(InputRefusedError, match=r"is missing \(null\)"):
        read_texts(pd.DataFrame(texts), "text-classification")
    assert read_texts(pd.DataFrame(["good", "None"]), "text-classification") == ["good", "None"]


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [
        (signature(), [(2, 2), (1, 3)]),
        (signature(length=4), [(2, 4), (1, 4)]),
        (signature(batch=2, length=4), [(2, 4), (2, 4)]),
        (signature(masked=False), [(1, 1), (1, 2), (1, 3)]),
    ],
)
def test_texts_share_batches_and_are_answered_in_order(
    graph: Signature, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Broken: an answer goes to another text, has its neighbour's padding, or the graph gets a shape that it does not
    take."""
    network = Network()
    made = processor(tmp_path, graph)
    texts = ["one two three", "four", "two one"]
    outputs = made.run_network(made.encode(texts, {}), network)
    assert [row["vectors"].ravel().tolist() for row in outputs] == [[2, 3, 4], [5], [3, 2]]
    assert network.shapes == shapes


def test_texts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Broken: a text that is too long ends in an error of the runtime, or is cut without a word."""
    made = processor(tmp_path, signature(length=2))
    with pytest.raises(InputRefusedError, match="text 1 has 3 tokens, and the model takes at most 2"):
        made.predict(["one", "one two three"], None, Network())
    with pytest.raises(InputRefusedError, match="no tokens"):
        made.predict([""], None, Network())
    unmasked = processor(tmp_path, signature(length=2, masked=False))
    with pytest.raises(InputRefusedError, match="no mask"):
        unmasked.predict(["one"], None, Network())
    for params in ({"truncation": "sideways"}, {"truncation": True, "max_length": 0}, {"unknown": 1}):
        with pytest.raises(InputRefusedError):
            made.predict(["one"], params, Network())


def test_truncation_of_one_call_does_not_reach_another(tmp_path: Path) -> None:
    """Broken: two requests at once get each other's truncation, and with it wrong answers."""
    made = processor(tmp_path, signature())
    wrong = []

    def ask(length: int) -> None:
        for _ in range(200):
            (one,) = made.encode(["one two three four"], {"truncation": True, "max_length": length})
            if len(one.ids) != length:
                wrong.append(length)

    threads = [threading.Thread(target=ask, args=(length,)) for length in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_answers_agree_only_in_form_text_and_number() -> None:
    """Broken: a version that answers otherwise than its source is promoted."""
    frame = pd.DataFrame({"label": ["a"], "score": [0.5]})
    plain = plain_prediction(frame)
    assert refuse_prediction(plain, plain, 0.0) is None
    for other in (
        frame.assign(label=["b"]),
        frame.assign(score=[0.51]),
        frame.rename(columns={"score": "other"}),
        frame[["label"]],
        [{"label": "a", "score": 0.5}],
        frame.assign(score=[float("nan")]),
    ):
        assert refuse_prediction(plain_prediction(other), plain, 1e-3) is not None
    assert refuse_prediction(plain_prediction(np.zeros(2, np.float32)), plain_prediction(np.zeros(2)), 1.0) is not None
