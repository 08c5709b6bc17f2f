"""Calls in turns, in one process: what several programs of one network take beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def in_turns(runs: Mapping[str, Callable[[Any], Any]], example: Any, seconds: float) -> dict[str, list[float]]:
    """The seconds of each one's calls, at least five, in a new order each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    random, end = np.random.default_rng(0), time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, times.values())) < 5:
        for name in random.permutation(list(runs)):
            runs[name](example)  # a warm cache, like that of a model served alone
            began = time.perf_counter()
            runs[name](example)
            times[name].append(time.perf_counter() - began)
    return times
