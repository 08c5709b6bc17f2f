"""What the schema can't say: values that don't go together, names of things that don't exist, dates that have passed.

Each check reads the resolved tree and tolerates holes in it, since it also runs when other values were wrong and cut
out.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator
from datetime import date
from pathlib import Path as FilePath

from compile_stage.core import plugins
from compile_stage.core.alias_history import LONGEST_ALIAS
from compile_stage.core.error_codes import Code
from compile_stage.core.performance_keys import PERFORMANCE_KEYS
from compile_stage.core.spelling import did_you_mean, look_alike
from compile_stage.policy.families import family_problems, published_as
from compile_stage.policy.locks import unknown_locks
from compile_stage.policy.metrics import CUSTOM, METRICS
from compile_stage.policy.named_files import data_file, located
from compile_stage.policy.nodes import Node, Path, Place, Problem, show_path
from compile_stage.policy.target_hardware import hardware_problems
from compile_stage.policy.values import SHIPPED_PRECISIONS

# What registries take in no name of a registered model, and `registry.model_files.check_name`.
_UNNAMEABLE = re.compile(r"[/:@'\"`\\%?\x00-\x1f\x7f]")
_LONGEST_NAME = 250
# What MLflow takes as an alias; `latest` and `v1` mean something else to it.
_ALIAS = re.compile(r"(?!(latest|v\d+)\Z)[A-Za-z0-9_-]+\Z")


def check_whole(tree: Node, today: date, forgiven: Collection[Path] = ()) -> Iterator[Problem]:
    """All problems of the resolved policy.

    Args:
        forgiven: Paths whose absence has been explained already.
    """
    yield from unknown_locks(tree)
    yield from _python(tree)
    yield from _trusted_keys(tree)
    for role in ("validation", "calibration"):
        yield from _data_file(tree, ("data", role, "source"))
    yield from _backend_names(tree, ("compliance", "allowed_backends"))
    yield from _template(tree, ("publish", "name"), "model")
    yield from _published_name(tree, ("publish", "name"))
    yield from _template(tree, ("promote", "alias"), "target")
    yield from _approval(tree, ("promote",))
    yield from _precision_keys(tree, ("tolerances",))
    for precision, _ in tree.items("tolerances"):
        yield from _limits(tree, ("tolerances", precision), forgiven)
        for output, _ in tree.items("tolerances", precision, "outputs"):
            yield from _limits(tree, ("tolerances", precision, "outputs", output), forgiven)
    for name, target in tree.items("targets"):
        path: Path = ("targets", name)
        yield from _backend_names(tree, (*path, "backends"))
        yield from _allowed_backends(tree, (*path, "backends"))
        for index, node in enumerate(target.elements("precisions")):
            if not plugins.is_precision(str(node.value)):
                known, where = precisions(), show_path((*path, "precisions", index))
                near = did_you_mean(str(node.value), known)
                yield Problem(
                    node.place,
                    where,
                    f"unknown value {node.value!r}{look_alike(str(node.value))}",
                    f"one of: {', '.join(known)}",
                    near,
                    code=Code.UNKNOWN_NAME,
                )
        yield from _precision_keys(tree, (*path, "tolerances"))
        yield from _option_names(tree, path)
        yield from _shapes(tree, path)
        yield from hardware_problems(tree, path)
        yield from _template(tree, (*path, "promote", "alias"), "target")
        yield from _alias(tree, (*path, "promote", "alias"), published_as(tree, name))
        yield from _approval(tree, (*path, "promote"))
        yield from _served(tree, path, forgiven)
        for precision, _ in target.items("tolerances"):
            yield from _limits(tree, (*path, "tolerances", precision), forgiven)
            for output, _ in target.items("tolerances", precision, "outputs"):
                yield from _limits(tree, (*path, "tolerances", precision, "outputs", output), forgiven)
    yield from family_problems(tree)
    yield from _queries(tree)
    for index, waiver in enumerate(tree.elements("waivers")):
        yield from _waiver(tree, waiver, ("waivers", index), today)
    yield from _waived_twice(tree)


# -------------------------------------------------------------------------------------------------------------- data


def _relative_to(node: Node) -> str:
    """What a file name is relative to, for people: see `located`."""
    if re.search(r"(\A|:)~|\$", str(node.value)):
        return "`~` and variables such as `$HOME` stand for themselves here: write the path out"
    if not node.place.line:
        return "in --set, a path is relative to the current folder"
    return "a path is relative to the policy file that names it"


def _data_file(tree: Node, path: Path) -> Iterator[Problem]:
    node = tree.get(*path)
    file = data_file(node) if node is not None else None
    if node is not None and file is not None and (wrong := _no_file(file)):
        yield Problem(node.place, show_path(path), wrong, _relative_to(node), code=Code.DATA_FILE)


def _no_file(file: str) -> str:
    """Why a path is no file; empty where it is one."""
    try:
        if FilePath(file).is_file():
            return ""
        return f"{file} is a folder" if FilePath(file).is_dir() else f"there is no file {file}"
    except OSError as error:  # the path is too long, or its folder may not be entered
        return f"there is no file {file} that can be read: {error.strerror}"


def _trusted_keys(tree: Node) -> Iterator[Problem]:
    for index, node in enumerate(tree.elements("compliance", "trusted_keys")):
        if not isinstance(node.value, str):
            continue
        if "\0" in node.value:
            wrong, allowed = f"{node.value!r} is not a file name", ""
        elif "-----BEGIN " in node.value:
            wrong, allowed = "this is the text of a key", "write it into a file, and name that file"
        else:
            wrong, allowed = _no_file(located(node)), _relative_to(node)
        if wrong:
            shown = show_path(("compliance", "trusted_keys", index))
            yield Problem(node.place, shown, wrong, allowed, code=Code.DATA_FILE)


def _python(tree: Node) -> Iterator[Problem]:
    """Functions that a policy names though `compliance.allow_python` is false."""
    rule = tree.get("compliance", "allow_python")
    if rule is None or rule.value is not False:
        return
    named: list[tuple[Path, Place]] = []
    for role in ("validation", "calibration"):
        source = tree.get("data", role, "source")
        if source is not None and str(source.value).startswith(CUSTOM):
            named.append((("data", role, "source"), source.place))
    for path in _tolerance_paths(tree):
        named += [
            ((*path, metric), tree.place_of((*path, metric), of_key=True))
            for metric, node in tree.items(*path)
            if metric.startswith(CUSTOM) and node.value is not None
        ]
    for path, place in named:
        message = f"a policy may name no Python function: compliance.allow_python is false ({rule.place.origin})"
        yield Problem(place, show_path(path), message, "samples of a file, and metrics by name", code=Code.FORBIDDEN)


def _tolerance_paths(tree: Node) -> Iterator[Path]:
    """Every group of limits: of the policy and of its targets, for all outputs and for one."""
    for base in ((), *(("targets", name) for name, _ in tree.items("targets"))):
        for precision, _ in tree.items(*base, "tolerances"):
            group = (*base, "tolerances", precision)
            yield group
            yield from ((*group, "outputs", output) for output, _ in tree.items(*group, "outputs"))


# ---------------------------------------------------------------------------------------------------------- backends


def _unknown_backend(place: Place, path: Path, name: str) -> Problem:
    known = plugins.names("backends")
    allowed = f"one of: {', '.join(known)}"
    return Problem(
        place,
        show_path(path),
        f"unknown backend {name!r}{look_alike(name)}",
        allowed,
        did_you_mean(name, known),
        code=Code.UNKNOWN_NAME,
    )


def _backend_names(tree: Node, path: Path) -> Iterator[Problem]:
    for index, node in enumerate(tree.elements(*path)):
        if node.value == "auto":
            wrong_and_allowed = "`auto` stands alone", "write `backends: auto`, or name the backends"
            yield Problem(node.place, show_path((*path, index)), *wrong_and_allowed, code=Code.WRONG_VALUE)
        elif node.value not in plugins.names("backends"):
            yield _unknown_backend(node.place, (*path, index), str(node.value))


def named_backends(tree: Node, target: Path) -> list[str] | None:
    """The backends that a target lists; None where it takes any (`auto`)."""
    listed = tree.get(*target, "backends")
    return [str(node.value) for node in listed.value] if listed is not None and listed.is_list else None


def _option_names(tree: Node, target: Path) -> Iterator[Problem]:
    """Options of backends that are not known. A file may hold options of more backends than the target has, since
    another may extend it; `--set` is about this run."""
    path, used = (*target, "options"), named_backends(tree, target)
    for name, _ in tree.items(*path):
        place = tree.place_of((*path, name), of_key=True)
        if name not in plugins.names("backends"):
            yield _unknown_backend(place, (*path, name), name)
        elif used is not None and name not in used and not place.line and not place.is_shipped:
            wrong = f"the target does not use {name}, so its options would change nothing"
            allowed = f"it uses {', '.join(used) or 'none'}"
            yield Problem(place, show_path((*path, name)), wrong, allowed, code=Code.WRONG_SET)


def _allowed_backends(tree: Node, path: Path) -> Iterator[Problem]:
    listed = tree.get("compliance", "allowed_backends")
    if listed is None or not listed.is_list:  # null: any
        return
    allowed = [node.value for node in tree.elements("compliance", "allowed_backends")]
    rule = tree.place_of(("compliance", "allowed_backends")).origin
    advice = f"one of: {', '.join(map(str, allowed))}" if allowed else "it allows none: null allows any"
    for index, node in enumerate(tree.elements(*path)):
        if node.value in plugins.names("backends") and node.value not in allowed:
            message = f"{node.value} is forbidden by compliance.allowed_backends ({rule})"
            yield Problem(node.place, show_path((*path, index)), message, advice, code=Code.FORBIDDEN)


# -------------------------------------------------------------------------------------------------------- precisions


def precisions() -> tuple[str, ...]:
    """All that a policy may name: those we ship, then what other plug-ins bring."""
    return tuple(dict.fromkeys([*SHIPPED_PRECISIONS, *plugins.precisions()]))


def _precision_keys(tree: Node, path: Path) -> Iterator[Problem]:
    for name, _ in tree.items(*path):
        if not plugins.is_precision(name):
            known, place = precisions(), tree.place_of((*path, name), of_key=True)
            near = did_you_mean(name, known)
            yield Problem(
                place,
                show_path((*path, name)),
                f"unknown precision{look_alike(name)}",
                f"one of: {', '.join(known)}",
                near,
                code=Code.UNKNOWN_NAME,
            )


# ------------------------------------------------------------------------------------------------------------ shapes


def _shapes(tree: Node, target: Path) -> Iterator[Problem]:
    batches = tree.elements(*target, "batch_sizes")
    for name, shape in tree.items(*target, "shapes"):
        path = (*target, "shapes", name)
        ranges = {key: [d.value for d in shape.elements(key)] for key in ("min", "typical", "max") if shape.get(key)}
        if len({len(dims) for dims in ranges.values()}) > 1:
            ranks = ", ".join(f"{key} has {len(dims)}" for key, dims in ranges.items())
            yield Problem(
                shape.place,
                show_path(path),
                f"the shapes have different ranks: {ranks}",
                "equal ranks",
                code=Code.SHAPES,
            )
            continue
        for low, high in (("min", "typical"), ("typical", "max"), ("min", "max")):
            wrong = _axis_out_of_order(ranges.get(low), ranges.get(high))
            if wrong is not None and not (low == "min" and high == "max" and "typical" in ranges):
                message = (
                    f"axis {wrong} of {low} ({ranges[low][wrong]}) is larger than that of {high} "
                    f"({ranges[high][wrong]})"
                )
                place = shape.place_of((low,))
                yield Problem(
                    place, show_path((*path, low)), message, "min <= typical <= max in every axis", code=Code.SHAPES
                )
        if "min" in ranges and "max" in ranges and ranges["min"][0] <= ranges["max"][0]:
            for index, batch in enumerate(batches):
                if not ranges["min"][0] <= batch.value <= ranges["max"][0]:
                    message = f"batch size {batch.value} is outside the shapes of input {name!r}"
                    allowed = f"axis 0 goes from {ranges['min'][0]} to {ranges['max'][0]}"
                    # Batch sizes that nobody wrote are not where the mistake is.
                    at = path if batch.place.is_shipped else (*target, "batch_sizes", index)
                    place = shape.place if batch.place.is_shipped else batch.place
                    yield Problem(place, show_path(at), message, allowed, code=Code.SHAPES)


def _axis_out_of_order(low: list[int] | None, high: list[int] | None) -> int | None:
    if low is None or high is None:
        return None
    return next((axis for axis, (a, b) in enumerate(zip(low, high, strict=True)) if a > b), None)


# ------------------------------------------------------------------------------------------------- names and aliases


def _template(tree: Node, path: Path, field: str) -> Iterator[Problem]:
    node = tree.get(*path)
    if node is None or not isinstance(node.value, str):
        return
    try:
        parts = list(string.Formatter().parse(node.value))
    except ValueError as error:
        yield Problem(
            node.place,
            show_path(path),
            f"{node.value!r} is not a valid template: {error}",
            f"use {{{field}}}",
            code=Code.WRONG_NAME,
        )
        return
    # `{model!r}` and `{model:>20}` would be valid templates, and nobody means them.
    used = {
        f"{name}{'!' + how if how else ''}{':' + width if width else ''}"
        for _, name, width, how in parts
        if name is not None
    }
    for unknown in sorted(used - {field}):
        message = f"unknown placeholder {{{unknown}}}"
        yield Problem(node.place, show_path(path), message, f"use {{{field}}}", code=Code.WRONG_NAME)


def _published_name(tree: Node, path: Path) -> Iterator[Problem]:
    """A name that no registry takes is said now, not after the work."""
    node = tree.get(*path)
    if node is not None and node.value == "{model}":
        message = "the compiled versions would become versions of the source model"
        yield Problem(node.place, show_path(path), message, "use {model}-compiled", code=Code.WRONG_NAME)
    if node is not None and isinstance(node.value, str) and (wrong := _UNNAMEABLE.search(node.value)):
        message = f"{node.value!r} can't be the name of a registered model: it holds {wrong[0]!r}"
        yield Problem(
            node.place, show_path(path), message, "use letters, digits, blanks and . _ -", code=Code.WRONG_NAME
        )
    if node is not None and isinstance(node.value, str) and len(node.value) > _LONGEST_NAME:
        message = f"it has {len(node.value)} characters, and a registered model's name at most {_LONGEST_NAME}"
        yield Problem(node.place, show_path(path), message, "use a shorter one", code=Code.WRONG_NAME)


def _alias(tree: Node, path: Path, target: str) -> Iterator[Problem]:
    node = tree.get(*path)
    if node is None or not isinstance(node.value, str):
        return
    alias = node.value.replace("{target}", target)
    if "{" not in alias and not _ALIAS.match(alias):
        allowed = "letters, digits, `_` and `-`; not `latest`, not `v1`"
        yield Problem(node.place, show_path(path), f"{alias!r} can't be an alias", allowed, code=Code.WRONG_NAME)
    elif len(alias) > LONGEST_ALIAS:
        message = f"the alias has {len(alias)} characters, and one that can be moved back at most {LONGEST_ALIAS}"
        yield Problem(node.place, show_path(path), message, "use a shorter one", code=Code.WRONG_NAME)


def _approval(tree: Node, path: Path) -> Iterator[Problem]:
    approval, approvers = tree.get(*path, "approval"), tree.get(*path, "approvers")
    tag = approval.value if approval is not None else None
    if approval is not None and isinstance(tag, str) and tag.startswith("compile_stage."):
        allowed = "a tag of your own, such as release.approval"
        yield Problem(
            approval.place,
            show_path((*path, "approval")),
            f"{tag!r} is compile-stage's own",
            allowed,
            code=Code.WRONG_NAME,
        )
    if approvers is not None and tree.elements(*path, "approvers") and tag is None:
        wrong, allowed = "promote.approval names no tag, so nobody is asked", "name the tag that they set"
        yield Problem(approvers.place, show_path((*path, "approvers")), wrong, allowed, code=Code.MISSING_KEY)


# ------------------------------------------------------------------------------------------------ limits and waivers


def _limits(tree: Node, path: Path, forgiven: Collection[Path]) -> Iterator[Problem]:
    labels = tree.get("data", "validation", "labels")
    for metric, node in tree.items(*path):
        family = METRICS[metric].family if metric in METRICS else ""
        if (family != "task" and metric != "token_accuracy") or not node.is_map:
            continue
        here = show_path((*path, metric))
        given = [
            key for key in ("max_drop", "max_relative_drop") if (n := node.get(key)) is not None and n.value is not None
        ]
        explained = any(cut[: len(path) + 1] == (*path, metric) for cut in forgiven)
        if len(given) != 1 and not explained:
            wrong = "max_drop and max_relative_drop are both given" if given else "no limit is given"
            yield Problem(node.place, here, wrong, "exactly one of max_drop, max_relative_drop", code=Code.WRONG_VALUE)
        # Of a base without targets the labels are for the policies that extend it to name.
        judged = family == "task" and bool(tree.items("targets")) and not node.place.is_shipped
        without_labels = labels is not None and labels.value is None
        if judged and without_labels and not _has_mistakes(forgiven, ("data", "validation")):
            message = "this needs labels, and data.validation.labels is null, so it could never pass"
            yield Problem(node.place, here, message, "name the array or column that holds them", code=Code.NO_LABELS)


def _has_mistakes(forgiven: Collection[Path], section: Path) -> bool:
    """Whether a value of that section, or the section itself, was wrong: it reads as its default then, and saying that
    it is null would contradict the file."""
    return any(cut[: len(section)] == section[: len(cut)] for cut in forgiven if cut)


def _served(tree: Node, path: Path, forgiven: Collection[Path]) -> Iterator[Problem]:
    """Gates on what is served without what they are measured by."""

    def given(*keys: str) -> bool:
        node = tree.get(*path, *keys)
        return node is not None and node.value is not None

    wrong_there = _has_mistakes(forgiven, (*path, "serving"))
    for gate, wanted in (
        ("throughput_at_p99", "p99_ms"),
        ("max_cost_per_million", "p99_ms"),
        ("max_cost_per_million", "price_per_hour"),
    ):
        if given("performance", gate) and not given("serving", wanted) and not wrong_there:
            wrong = f"this is measured by serving.{wanted}, which is null, so it could never pass"
            where = (*path, "performance", gate)
            yield Problem(
                tree.place_of(where), show_path(where), wrong, f"give serving.{wanted} too", code=Code.MISSING_KEY
            )


def _queries(tree: Node) -> Iterator[Problem]:
    """Queries are groups, so that both can't be named; and a column is either labels or says what belongs together."""
    groups, queries = (tree.get("data", key) for key in ("groups", "queries"))
    labels = tree.get("data", "validation", "labels")
    for key, node in (("groups", groups), ("queries", queries)):
        if node is not None and node.value is not None and labels is not None and node.value == labels.value:
            wrong = f"{node.value!r} holds the labels already (data.validation.labels, {labels.place.origin})"
            yield Problem(node.place, f"data.{key}", wrong, "a column of its own, or null", code=Code.WRONG_VALUE)
    named = queries is not None and queries.value is not None
    if queries is not None and named and groups is not None and groups.value is not None:
        wrong = "data.groups is named too, and the queries are the groups"
        yield Problem(queries.place, "data.queries", wrong, "one of data.groups, data.queries", code=Code.WRONG_VALUE)


def gate_name(word: str) -> str:
    """What a waiver calls a gate → the gate's metric: `min_speedup` is `speedup`."""
    return PERFORMANCE_KEYS.get(word, word)


def _waiver(tree: Node, waiver: Node, path: Path, today: date) -> Iterator[Problem]:
    expires = waiver.get("expires")
    day = expires.value if expires is not None else None
    last = date.fromisoformat(day) if isinstance(day, str) else day
    if expires is not None and isinstance(last, date) and last < today:
        days = (today - last).days
        message = f"the waiver expired on {last}, {days} day{'s' if days != 1 else ''} ago"
        yield Problem(
            expires.place,
            show_path((*path, "expires")),
            message,
            "remove it, or have its owner renew it",
            code=Code.WAIVER,
        )
    gate, target = waiver.get("gate"), waiver.get("target")
    if target is None:
        return
    names = [name for name, _ in tree.items("targets")]
    if target.value not in names:
        allowed = f"one of: {', '.join(names) or 'none'}"
        near = did_you_mean(str(target.value), names)
        yield Problem(
            target.place,
            show_path((*path, "target")),
            f"unknown target {target.value!r}",
            allowed,
            near,
            code=Code.UNKNOWN_NAME,
        )
        return
    gates = _gates(tree, str(target.value))
    if gate is not None and gate_name(str(gate.value)) not in gates:
        message = f"target {target.value!r} has no gate {gate.value!r}"
        near = did_you_mean(str(gate.value), gates)
        yield Problem(
            gate.place, show_path((*path, "gate")), message, f"one of: {', '.join(gates)}", near, code=Code.WAIVER
        )


def _waived_twice(tree: Node) -> Iterator[Problem]:
    """A check says by which waiver it was let through: of two only one would be published, with its owner."""
    first: dict[tuple[str, str], tuple[int, Node]] = {}
    for index, waiver in enumerate(tree.elements("waivers")):
        gate, target = waiver.get("gate"), waiver.get("target")
        if gate is None or target is None:
            continue
        at, other = first.setdefault((gate_name(str(gate.value)), str(target.value)), (index, gate))
        if at == index:
            continue
        where = f"line {other.place.line}" if other.place.file == gate.place.file else other.place.origin
        wrong = f"waivers[{at}] ({where}) lets the same gate of target {str(target.value)!r} be missed"
        yield Problem(gate.place, show_path(("waivers", index, "gate")), wrong, "keep one of the two", code=Code.WAIVER)


def _gates(tree: Node, target: str) -> list[str]:
    """The metrics that a target has limits on, in any precision."""
    names: dict[str, None] = {}
    base = ("targets", target, "tolerances")
    for precision, _ in tree.items(*base):
        groups: list[Path] = [(*base, precision)]
        groups += [(*base, precision, "outputs", output) for output, _ in tree.items(*base, precision, "outputs")]
        for group in groups:
            names |= {
                metric: None for metric, node in tree.items(*group) if metric != "outputs" and node.value is not None
            }
    made = tree.get("data", "robustness", "samples")
    names |= {"robustness": None} if made is not None and made.value else {}
    performance = tree.items("targets", target, "performance")
    names |= {
        PERFORMANCE_KEYS[key]: None for key, node in performance if key in PERFORMANCE_KEYS and node.value is not None
    }
    return list(names)
