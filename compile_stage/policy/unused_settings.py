"""Settings that change nothing in their policy, or leave a backend or every model out: warnings of `lint`, and first
lines of every report.

What a base says is left out: other policies that extend it may have what the setting is for. So is what `--set` says,
which is about one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.error_codes import Code
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.checks import named_backends
from compile_stage.policy.nodes import Node, Path, Place, Problem, show_path
from compile_stage.policy.tried_precisions import tried_precisions

_MEASURES = ("p99_ms", "rates")
"""Of `serving`: where neither is given, nothing is measured under load."""
_UNITS_S = {"minutes": 60, "seconds": 1}


def unused_settings(tree: Node) -> Iterator[Problem]:
    """Of a resolved policy without mistakes; of one without targets, a base, nothing."""
    names = [name for name, _ in tree.items("targets")]
    files = {tree.place_of(("targets", name)).file for name in names}

    def is_own(place: Place) -> bool:
        """Whether it was written where the targets are."""
        return place.file in files and bool(place.line)

    for name in names:
        path: Path = ("targets", name)
        yield from _refused_options(tree, path)
        yield from _options(tree, path)
        for unused in (_serving(tree, path), _approval(tree, path), _search(tree, path)):
            if unused is not None and is_own(unused.place):
                yield unused
    of_all = (
        *_flavors(tree),
        *_tolerances(tree, names),
        *_elsewhere(tree, names),
        *_settings_search(tree, names),
        *_times(tree),
    )
    for unused in of_all:
        if is_own(unused.place):
            yield unused


def _refused_options(tree: Node, target: Path) -> Iterator[Problem]:
    """Options that a backend does not have, or has with other values: it is left out for them, and another one may
    win."""
    for name, _ in tree.items(*target, "options"):
        known, left_out = _known_options(name), f"so the target does without {name}"
        if known is None:
            continue
        for option, value in tree.items(*target, "options", name):
            path = (*target, "options", name, option)
            if option not in known:
                wrong = f"{name} has no option {option!r}, {left_out}"
                allowed, near = f"one of: {', '.join(known) or 'none'}", did_you_mean(option, list(known))
                place = tree.place_of(path, of_key=True)
                yield Problem(place, show_path(path), wrong, allowed, near, code=Code.UNKNOWN_NAME)
            elif (reason := known[option].refusal(value.plain())) is not None:
                wrong = f"{name}'s option {option} {reason}, {left_out}"
                yield Problem(value.place, show_path(path), wrong, code=Code.UNKNOWN_NAME)


def _options(tree: Node, target: Path) -> Iterator[Problem]:
    """Options of backends that the file's own target does not use."""
    used = named_backends(tree, target)
    if used is None:
        return
    for name, node in tree.items(*target, "options"):
        place = tree.place_of((*target, "options", name), of_key=True)
        if name not in used and node.value != {} and place.file == tree.place_of(target).file and place.line:
            wrong = f"the target does not use {name}, so its options change nothing"
            allowed = f"leave them out, or add {name} to its backends: {', '.join(used)}"
            yield Problem(place, show_path((*target, "options", name)), wrong, allowed, code=Code.UNKNOWN_NAME)


def _known_options(backend: str) -> Mapping[str, Any] | None:
    """What each option of one of our backends may be (`plugin_support.options`); None of those of third parties, whose
    code is run in workers alone."""
    if backend not in plugins.names("backends") or plugins.third_party("backends", backend):
        return None
    known: Mapping[str, Any] | None = getattr(plugins.load("backends", backend), "options", None)
    return known


def _flavors(tree: Node) -> Iterator[Problem]:
    """Flavors that no model has that can be read here: a service and a fleet would leave the policy out in silence."""
    known = plugins.names("sources")
    for index, node in enumerate(tree.elements("applies_to", "flavors")):
        if node.value not in known:
            wrong = f"no installed source reads models of flavor {node.value!r}, so no model has it"
            near, where = did_you_mean(str(node.value), known), show_path(("applies_to", "flavors", index))
            yield Problem(node.place, where, wrong, f"one of: {', '.join(known)}", near, code=Code.UNKNOWN_NAME)


def _tolerances(tree: Node, names: list[str]) -> Iterator[Problem]:
    """Limits of a precision that is not tried, where one that is called nearly so is tried by the shipped limits:
    `int8` where the target names `int8-dynamic`. Others are no mistake: a policy may hold limits for more precisions
    than it tries."""
    tried = {name: tried_precisions(tree, name) for name in names}
    of_all = {precision for asked in tried.values() for precision in asked}
    for name, asked in tried.items():
        limits = dict(tree.items("targets", name, "tolerances"))
        for precision in limits.keys() - set(asked):
            place = _first_own(limits[precision])
            if place is None or (precision in of_all and place in _places(tree.get("tolerances", precision))):
                continue
            for near in asked:
                called_so = near.startswith(precision) or precision.startswith(near)
                if called_so and near in limits and _first_own(limits[near]) is None:
                    wrong = f"{precision} is not tried, and {near} is, by the shipped limits and not by these"
                    allowed = f"limits on {near}, or {precision} among the precisions"
                    path = ("targets", name, "tolerances", precision)
                    yield Problem(place, show_path(path), wrong, allowed, code=Code.UNKNOWN_NAME)


def _first_own(limits: Node) -> Place | None:
    """Where the first limit stands that is not a shipped one; None where all are, or take one away."""
    places = sorted(place for place in _places(limits) if not place.is_shipped)
    return places[0] if places else None


def _places(node: Node | None) -> Iterator[Place]:
    if node is not None and node.is_map:
        for child in node.value.values():
            yield from _places(child)
    elif node is not None and node.value is not None:
        yield node.place


def _serving(tree: Node, target: Path) -> Problem | None:
    if any(node.value for key, node in tree.items(*target, "serving") if key in _MEASURES):
        return None
    own = [(key, node) for key, node in tree.items(*target, "serving") if not node.place.is_shipped]
    own = [(key, node) for key, node in own if key not in _MEASURES and node.value is not None]
    if not own:
        return None
    key, node = own[0]
    wrong = "it changes nothing: without p99_ms and rates nothing is measured under load"
    allowed = "name serving.p99_ms or serving.rates, or leave it out"
    return Problem(node.place, show_path((*target, "serving", key)), wrong, allowed, code=Code.MISSING_KEY)


def _approval(tree: Node, target: Path) -> Problem | None:
    alias, approval = (tree.get(*target, "promote", key) for key in ("alias", "approval"))
    if approval is None or approval.value is None or alias is None or alias.value is not None:
        return None
    wrong = "nobody is asked: promote.alias is null, so no alias moves"
    allowed = "name promote.alias, or leave it out"
    return Problem(approval.place, show_path((*target, "promote", "approval")), wrong, allowed, code=Code.MISSING_KEY)


def _search(tree: Node, target: Path) -> Problem | None:
    """Limits on a search of mixed precision that is not made."""
    mixed = tree.get(*target, "fallback", "mixed_precision")
    limits = [(key, node) for key, node in tree.items(*target, "fallback") if key.startswith("max_")]
    own = [(key, node) for key, node in limits if not node.place.is_shipped]
    if not own or mixed is None or mixed.value:
        return None
    key, node = own[0]
    wrong = "it changes nothing: fallback.mixed_precision is false, so nothing is searched"
    allowed = "say mixed_precision: true, or leave it out"
    return Problem(node.place, show_path((*target, "fallback", key)), wrong, allowed, code=Code.MISSING_KEY)


def _settings_search(tree: Node, names: list[str]) -> Iterator[Problem]:
    minutes = tree.get("budget", "search_minutes")
    ladders = [node for name in names if (node := tree.get("targets", name, "ladder")) is not None and node.value]
    if minutes is not None and not minutes.place.is_shipped and not ladders:
        wrong = "it changes nothing: no target says ladder: true, and only then settings of the runtime are searched"
        allowed = "say ladder: true in a target, or leave it out"
        yield Problem(minutes.place, "budget.search_minutes", wrong, allowed, code=Code.MISSING_KEY)


def _times(tree: Node) -> Iterator[Problem]:
    """Times of a part of the run that the whole run does not have: often seconds in the place of minutes."""
    whole = tree.get("budget", "minutes")
    for key, node in tree.items("budget"):
        unit_s = _UNITS_S.get(key.rpartition("_")[2], 0)
        if whole is None or key == "minutes" or not unit_s or node.place.is_shipped:
            continue
        if node.value * unit_s > whole.value * 60:
            wrong = f"it is longer than the whole run, which has {whole.value:g} minutes (budget.minutes)"
            allowed = f"at most {whole.value * 60 / unit_s:g}, or more budget.minutes"
            yield Problem(node.place, show_path(("budget", key)), wrong, allowed, code=Code.WRONG_VALUE)


def _elsewhere(tree: Node, names: list[str]) -> Iterator[Problem]:
    rule = tree.get("publish", "elsewhere")
    families = [node for name in names if (node := tree.get("targets", name, "family")) is not None and node.value]
    if rule is not None and not rule.place.is_shipped and rule.value != "refuse" and not families:
        wrong = "it changes nothing: no target is in a family, and only a version that holds one has it"
        yield Problem(
            rule.place, "publish.elsewhere", wrong, "give the targets a family, or leave it out", code=Code.MISSING_KEY
        )
