"""All that a fitted scikit-learn model is made of, wherever it holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


def parts(estimator: Any) -> Iterator[Any]:
    """The estimator and every object in it, each once: steps, inner models, fitted trees. An estimator may hold them in
    any of its attributes, so all of these are looked at."""
    return _parts(estimator, set())


def is_tree(part: Any) -> bool:
    """Whether it is a fitted tree itself, and not the estimator around it."""
    return type(part).__module__.startswith("sklearn.tree._") and hasattr(part, "children_left")


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    import numpy as np

    if id(value) in seen or isinstance(value, str | bytes | int | float | type | ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for held in value.values():
            yield from _parts(held, seen)
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        for held in np.ravel(value) if isinstance(value, np.ndarray) else value:
            yield from _parts(held, seen)
    else:
        yield value
        if not is_tree(value) and hasattr(value, "__dict__"):
            # The encoder in a histogram gradient boosting numbers the categories of its splits. It is no step that is
            # converted: what it knows is written into the splits (`sklearn_categories`).
            for name, held in vars(value).items():
                if name != "_preprocessor":
                    yield from _parts(held, seen)
