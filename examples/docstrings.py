"""Sentences about Python libraries, to train small text models on: the first sentence of what each function and class
of four installed packages says of itself, with the package as its label. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator

MODULES = {
    "numpy": ("numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.ma", "numpy.polynomial", "numpy.strings"),
    "pandas": ("pandas", "pandas.api.types", "pandas.tseries.offsets", "pandas.io.formats.style"),
    "scipy": (
        "scipy.stats", "scipy.signal", "scipy.optimize", "scipy.special", "scipy.linalg", "scipy.sparse",
        "scipy.ndimage", "scipy.spatial", "scipy.integrate", "scipy.interpolate",
    ),
    "sklearn": (
        "sklearn.cluster", "sklearn.datasets", "sklearn.decomposition", "sklearn.ensemble", "sklearn.feature_selection",
        "sklearn.linear_model", "sklearn.metrics", "sklearn.model_selection", "sklearn.neighbors",
        "sklearn.preprocessing", "sklearn.svm", "sklearn.tree", "sklearn.utils",
    ),
}  # fmt: skip
LABELS = sorted(MODULES)


def sentences() -> tuple[list[str], list[int]]:
    """Texts of at least four words, without the packages' own names, and the number of each one's package."""
    texts: dict[str, int] = {}
    for number, label in enumerate(LABELS):
        for module in MODULES[label]:
            for text in _documented(module):
                words = re.sub(rf"\b({'|'.join(LABELS)}|scikit-learn|np|pd)\b", "it", text, flags=re.IGNORECASE)
                if len(words.split()) >= 4:
                    texts.setdefault(words, number)
    return list(texts), list(texts.values())


def _documented(module: str) -> Iterator[str]:
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names
        things = [getattr(found, name, None) for name in sorted(dir(found)) if not name.startswith("_")]
    for thing in things:
        members = [thing]
        if inspect.isclass(thing):
            members += [getattr(thing, name, None) for name in sorted(vars(thing)) if not name.startswith("_")]
        for member in members:
            text = inspect.getdoc(member) if callable(member) else None
            for paragraph in (text or "").split("\n\n")[:3]:
                line = " ".join(paragraph.split())
                if line and not line.startswith((">", "-", ".", "Parameters", "[")) and "----" not in line:
                    yield re.split(r"(?<=[.!?])\s", line)[0][:300]
