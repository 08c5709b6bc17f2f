"""Limits that hold whatever a model answers, targets without any, exceptions without an end, and locks and settings
(`policy.unused_settings`) that change nothing: no mistakes, so warnings of `lint`, and first lines of every report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date

from compile_stage.core.error_codes import Code
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.checks import gate_name
from compile_stage.policy.locks import words_of
from compile_stage.policy.metrics import CUSTOM, METRICS
from compile_stage.policy.nodes import Node, Path, Problem, show_path
from compile_stage.policy.tried_precisions import tried_precisions
from compile_stage.policy.unused_settings import unused_settings

FEW_SAMPLES = 8
"""Below so many samples not even a column's spread is looked at (`measure.columns.FEW`)."""

LONGEST_WAIVER_DAYS = 366

_LARGEST_FACTOR = 100.0
"""So many times what the shipped limits of int8 grant, a cosine of 0.99, is all that there is: a cosine of 0."""

_LARGEST_SLOWDOWN = 10.0
"""Nobody who asks for a limit on the latency, or on a speedup, means a model that is so many times as slow."""

_TERABYTE_MB = 1e6

_HUGE = 1e30  # no unit of measurement makes a distance of it
_AT_LEAST: dict[str, tuple[float, str]] = {
    "cosine": (0.0, "unrelated answers have a cosine of 0"),
    "mean_cosine": (0.0, "unrelated answers have a cosine of 0"),
    "snr_db": (0.0, "an answer of zeros has 0 dB"),
    "mean_snr_db": (0.0, "an answer of zeros has 0 dB"),
    "psnr_db": (0.0, "an answer of zeros has 0 dB or more"),
    "mean_psnr_db": (0.0, "an answer of zeros has 0 dB or more"),
    "top1_agreement": (0.0, "no answer is below 0"),
    "topk_agreement": (0.0, "no answer is below 0"),
    "similarity_spearman": (0.0, "unrelated vectors have a rank correlation of 0"),
    "nearest_kept": (0.0, "no answer is below 0"),
    "agreement": (0.0, "no answer is below 0"),
    "token_top1_agreement": (0.0, "no answer is below 0"),
    "column_spread": (0.0, "a constant answer has 0"),
}
"""`at_least` metric → the limit up to which it can't fail, and why."""
_AT_MOST: dict[str, tuple[float, str]] = {
    "max_abs": (_HUGE, "no answer is that far off"),
    "mean_abs": (_HUGE, "no answer is that far off"),
    "max_rel": (1.0, "an answer of zeros has 1"),
    "kl": (27.0, "probabilities are taken as 1e-12 at least, so no divergence is above 27.6"),
    "mean_kl": (27.0, "probabilities are taken as 1e-12 at least, so no divergence is above 27.6"),
    "token_kl": (10.0, "an even guess among 22,000 tokens has no more"),
    "top1_regret": (1.0, "a class picked at random has 1"),
    "column_nrmse": (1.0, "an answer that stays at the mean has 1"),
}
"""`at_most` metric → the limit from which on it can't fail, and why."""


def weak_limits(tree: Node, today: date) -> Iterator[Problem]:
    """Of a resolved policy without mistakes."""
    needed = tree.get("data", "min_samples")
    if needed is not None and isinstance(needed.value, int) and needed.value < FEW_SAMPLES:
        wrong = f"{needed.value} samples prove next to nothing: what a model answers to others is not known"
        yield Problem(
            needed.place,
            "data.min_samples",
            wrong,
            f"a number >= {FEW_SAMPLES}; the shipped one is 32",
            code=Code.TOO_FEW_SAMPLES,
        )
    factor = tree.get("data", "robustness", "factor")
    if factor is not None and (_number(factor) or 0) >= _LARGEST_FACTOR:
        wrong = f"at {factor.text} times their tolerance gates prove next to nothing: unrelated answers pass in int8"
        allowed = f"a number < {_LARGEST_FACTOR:g}; the shipped one is 5"
        yield Problem(factor.place, "data.robustness.factor", wrong, allowed, code=Code.LIMIT_NEVER_FAILS)
    for name, _ in tree.items("targets"):
        yield from _without_limits(tree, name)
    yield from unused_settings(tree)
    yield from _locks_of_no_target(tree)
    bases: list[Path] = [("targets", name) for name, _ in tree.items("targets")]
    for base in bases or [()]:
        yield from _slowdown(tree, (*base, "promote", "max_slowdown"))
        yield from _performance(tree, (*base, "performance"))
        for precision, _ in tree.items(*base, "tolerances"):
            yield from _weak(tree, (*base, "tolerances", precision))
            for output, _ in tree.items(*base, "tolerances", precision, "outputs"):
                yield from _weak(tree, (*base, "tolerances", precision, "outputs", output))
    yield from _waivers(tree, today)


def _slowdown(tree: Node, path: Path) -> Iterator[Problem]:
    node = tree.get(*path)
    if node is not None and (_number(node) or 0) >= _LARGEST_SLOWDOWN:
        wrong = f"a version that is {node.text} times as slow would still take the alias"
        allowed = f"a number < {_LARGEST_SLOWDOWN:g}; 1.1 is 10 % slower"
        yield Problem(node.place, show_path(path), wrong, allowed, code=Code.LIMIT_NEVER_FAILS)


def _performance(tree: Node, path: Path) -> Iterator[Problem]:
    """Limits that all hold that can be measured: no call takes longer than `budget.job_minutes`."""
    minutes = tree.get("budget", "job_minutes")
    longest_ms = ((_number(minutes) if minutes is not None else None) or math.inf) * 60e3
    ended = f"a call that takes {longest_ms / 1e3:g} s is ended (budget.job_minutes)"
    at_most = {
        "p95_latency_ms": (longest_ms, ended),
        "ttft_p95_ms": (longest_ms, ended),
        "tpot_p95_ms": (longest_ms, ended),
        "max_size_mb": (_TERABYTE_MB, "no artifact has a terabyte"),
        "max_memory_mb": (_TERABYTE_MB, "no process takes a terabyte"),
    }
    slowest = 1 / _LARGEST_SLOWDOWN
    at_least = {
        "min_speedup": (slowest, f"what is {_LARGEST_SLOWDOWN:g} times as slow as the original holds it too"),
        "min_tokens_per_s": (1e3 / longest_ms, ended),
    }
    for gate, node in tree.items(*path):
        value = _number(node)
        if value is None or node.place.is_shipped:
            continue
        most, least = at_most.get(gate), at_least.get(gate)
        found = [(most[1], f"a number < {most[0]:g}")] if most is not None and value >= most[0] else []
        found += [(least[1], f"a number > {least[0]:g}")] if least is not None and value <= least[0] else []
        for why, wanted in found:
            wrong = f"{gate} can't fail with this limit: {why}"
            wanted += "; null says that there is no limit"
            yield Problem(node.place, show_path((*path, gate)), wrong, wanted, code=Code.LIMIT_NEVER_FAILS)


def _without_limits(tree: Node, target: str) -> Iterator[Problem]:
    """A target none of whose precisions is held to anything: nothing is compiled that could not be judged."""
    path: Path = ("targets", target)
    precisions = tried_precisions(tree, target)
    if any(_is_limited(tree, (*path, "tolerances", precision)) for precision in precisions):
        return
    first = tree.get(*path, "tolerances", precisions[0])
    place = first.place if first is not None and not first.place.is_shipped else tree.place_of(path)
    wrong = f"no limit is left on {' and '.join(precisions)}, so every job of the target is refused"
    allowed = "keep the limits of one of them, or name a precision that has some"
    yield Problem(place, show_path((*path, "tolerances")), wrong, allowed, code=Code.MISSING_KEY)


def _locks_of_no_target(tree: Node) -> Iterator[Problem]:
    """Locks on a target that is not there. A file that extends this one may add it, so that is no mistake. Without any
    target the file is a base, and the names are not known yet."""
    names = [name for name, _ in tree.items("targets")]
    for index, element in enumerate(tree.elements("locked")):
        path = words_of(str(element.value))
        if not names or path[:1] != ("targets",) or len(path) < 2 or path[1] in ("*", *names):
            continue
        near = did_you_mean(str(path[1]), names)
        meant = show_path(("targets", near, *path[2:])) if near else ""
        wrong = f"{element.value!r} locks nothing: there is no target {path[1]!r}"
        allowed = f"one of: {', '.join(names)}, or * for all of them"
        yield Problem(element.place, show_path(("locked", index)), wrong, allowed, meant, code=Code.LOCKED)


def _is_limited(tree: Node, path: Path) -> bool:
    groups = [path, *((*path, "outputs", output) for output, _ in tree.items(*path, "outputs"))]
    return any(key != "outputs" and node.value is not None for group in groups for key, node in tree.items(*group))


def _weak(tree: Node, path: Path) -> Iterator[Problem]:
    for metric, node in tree.items(*path):
        if metric == "outputs" or node.value is None or node.place.is_shipped:
            continue
        for limit, why, wanted in _reasons(metric, node):
            if not limit.place.is_shipped:
                wrong = f"{metric} can't fail with this limit: {why}"
                yield Problem(limit.place, show_path((*path, metric)), wrong, wanted, code=Code.LIMIT_NEVER_FAILS)


def _reasons(metric: str, node: Node) -> Iterator[tuple[Node, str, str]]:
    """(where the limit stands, why it can't fail, what can) for each number of a limit that is too weak."""
    if metric in METRICS and METRICS[metric].family == "task":
        unbounded = METRICS[metric].unbounded
        ends = {
            "max_drop": _HUGE if unbounded else 1.0 if metric in ("r2", "spearman") else 0.5,
            "max_relative_drop": 1.0 if unbounded else 0.5,
        }
        for key, end in ends.items():
            drop = node.get(key)
            if drop is not None and (value := _number(drop)) is not None and value >= end:
                yield drop, f"a model that lost {value:g} of it is of no use", f"a number < {end:g}"
        return
    increase = node.get("max_relative_increase") if metric == "perplexity" else None
    if increase is not None and (value := _number(increase)) is not None and value >= 1:
        yield increase, f"a model with {1 + value:g} times the perplexity is of no use", "a number < 1"
    limit = node.get("limit") if node.is_map and metric != "allclose" else node
    if metric == "allclose":
        rtol = node.get("rtol")
        if rtol is not None and (_number(rtol) or 0) >= 1:
            yield rtol, "an answer of zeros is within an rtol of 1", "a number < 1"
        return
    value = _number(limit) if limit is not None else None
    if limit is None or value is None:
        return
    if metric.startswith(CUSTOM) and abs(value) >= _HUGE:
        direction = node.get("direction")
        if direction is not None and (direction.value == "at_most") is (value > 0):
            yield limit, "no metric is that far off", f"a number of less than {_HUGE:g}"
    if metric in _AT_LEAST and value <= _AT_LEAST[metric][0]:
        yield limit, _AT_LEAST[metric][1], f"a number > {_AT_LEAST[metric][0]:g}"
    if metric in _AT_MOST and value >= _AT_MOST[metric][0]:
        yield limit, _AT_MOST[metric][1], f"a number < {_AT_MOST[metric][0]:g}"


def _number(node: Node) -> float | None:
    value = node.value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _waivers(tree: Node, today: date) -> Iterator[Problem]:
    waived: dict[str, dict[str, Node]] = {}
    for index, waiver in enumerate(tree.elements("waivers")):
        gate, target, expires = (waiver.get(key) for key in ("gate", "target", "expires"))
        if gate is not None and target is not None:
            waived.setdefault(str(target.value), {})[gate_name(str(gate.value))] = waiver
        day = expires.value if expires is not None else None
        last = date.fromisoformat(day) if isinstance(day, str) else day
        if expires is not None and isinstance(last, date) and (last - today).days > LONGEST_WAIVER_DAYS:
            wrong = f"the waiver holds for {(last - today).days / 365:.0f} years"
            path = show_path(("waivers", index, "expires"))
            yield Problem(
                expires.place,
                path,
                wrong,
                f"a day within {LONGEST_WAIVER_DAYS} days, to be renewed then",
                code=Code.WAIVER,
            )
    for target_name, by_gate in waived.items():
        for precision, limits in tree.items("targets", target_name, "tolerances"):
            gates = {key: node for key, node in limits.items() if key != "outputs" and node.value is not None}
            if any(meant and meant <= by_gate.keys() for meant in _meant(gates)):
                wrong = f"every gate on {precision} of target {target_name!r} is waived, so whatever it answers passes"
                yield Problem(
                    next(iter(by_gate.values())).place, "waivers", wrong, "keep one gate at least", code=Code.WAIVER
                )


def _meant(gates: dict[str, Node]) -> tuple[set[str], set[str]]:
    """The gates that hold for a language model, and for any other: of the shipped ones each has its own."""
    of_tokens = {key for key in gates if key in METRICS and METRICS[key].family == "tokens"}
    own = {key for key, node in gates.items() if not node.place.is_shipped}
    return of_tokens | own, (gates.keys() - of_tokens) | own
