"""Words that were probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(word: str, allowed: Sequence[str]) -> str:
    """The nearest allowed word, or an empty string. Small and capital letters are alike: `CUDA` means `cuda`."""
    words = {known.casefold(): known for known in reversed(allowed)}
    near = difflib.get_close_matches(word.casefold(), list(words), n=1, cutoff=0.6)
    return words[near[0]] if near else ""
