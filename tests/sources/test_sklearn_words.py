"""Texts that scikit-learn's vectorizers split into words, or characters, and count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.models import infer_signature
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline

from compile_stage.core.records import Compliance, SourceModel
from compile_stage.sources.sklearn import SklearnSource

from .conftest import Proof, source_of

PICKLES = Compliance(allow_pickle=True)
RANDOM = np.random.default_rng(0)
WORDS = ["free", "money", "Lunch", "lunch", "bob", "call", "me", "a", "the", "don't", "e-mail", "#42", "#", "Été",
         "straße", "日本", "naive_9"]  # fmt: skip
TEXTS = pd.DataFrame({"text": [" ".join(RANDOM.choice(WORDS, 1 + n % 7)) for n in range(60)]})
ASKED = ["", " ", "lunché", "élunch money", "ÉTÉ FREE", "money² ½ a b free", "call a me", "free\u00a0money", "don't",
         "x", "語日本", "cheap # ", "free free free money", "a longer text with #42 and more free lunch"]  # fmt: skip


def save(path: Path, vectorizer: Any) -> SourceModel:
    model = make_pipeline(ColumnTransformer([("t", vectorizer, "text")]), Ridge(0.01))
    model.fit(TEXTS, RANDOM.normal(size=len(TEXTS)))
    mlflow.sklearn.save_model(
        model, path, signature=infer_signature(TEXTS, model.predict(TEXTS)), input_example=TEXTS[:9],
        pip_requirements=["scikit-learn"], serialization_format="cloudpickle",
    )  # fmt: skip
    return source_of(path, "sklearn")


VECTORIZERS = {
    "words": TfidfVectorizer(),
    "words as they are": CountVectorizer(lowercase=False),
    "pairs of words": TfidfVectorizer(ngram_range=(1, 2)),
    "words without the commonest": TfidfVectorizer(stop_words="english"),
    "words of one letter too": CountVectorizer(token_pattern=r"(?u)\b\w+\b", ngram_range=(1, 2)),
    "a pattern of ASCII": TfidfVectorizer(token_pattern="[a-z]+"),
    "what lies between spaces": CountVectorizer(token_pattern="[^ ]+"),
    "logarithms": TfidfVectorizer(sublinear_tf=True),
    "characters": TfidfVectorizer(analyzer="char", ngram_range=(1, 3)),
}


@pytest.mark.parametrize("name", VECTORIZERS)
def test_texts_are_split_and_counted_as_by_the_original(tmp_path: Path, prove: Proof, name: str) -> None:
    """Broken: letters beyond ASCII split words, and English samples do not show it; words of one letter stand between
    those of a pair; a word that stands twice counts otherwise; shorter texts of a batch get further `#`; and where the
    locale en_US.UTF-8 is not installed, all are refused."""
    texts = np.array(ASKED, object).reshape(-1, 1)
    prove(save(tmp_path / "model", VECTORIZERS[name]), {"text": texts}, sizes=(1, len(ASKED)), compliance=PICKLES)


@pytest.mark.parametrize(
    ("vectorizer", "words"),
    [
        (TfidfVectorizer(token_pattern=r"\b[a-z]+\b"), "one without backslashes"),
        (CountVectorizer(ngram_range=(1, 2), stop_words=["a"]), "without stop_words"),
    ],
    ids=["pattern", "stop words"],
)
def test_texts_that_would_be_split_otherwise_are_refused(tmp_path: Path, vectorizer: Any, words: str) -> None:
    """Broken: to ONNX Runtime a word ends before a letter beyond ASCII, and stop words stand between those of a pair;
    where the example does not show it, such a model passes."""
    source = save(tmp_path / "model", vectorizer)
    assert words in (SklearnSource().refuse(source, PICKLES) or "")
