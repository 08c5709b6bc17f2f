"""One published version with several artifacts, and which of them a machine loads (docs/variants.md).

The manifest of such a version is the ordinary one of the lead, the variant that the publishing machine loads, and two
fields more:

    family    {name, elsewhere, lead, key}: elsewhere says what is done on a machine that none is proven for
              (`refuse` or `portable-fp32`)
    variants  id → {key, folder, stored, manifest}: its own key, where its files are below data/ (file of the artifact →
              path), and its own manifest; null for the lead

An id is TARGET--FINGERPRINT of what was proven where it was compiled, TARGET--BACKEND--SCHEME of what was only
compiled, and `portable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.environment import Hardware, hardware
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.records import record
from compile_stage.serving.manifest import passed_here, refuse_machine, runtime_to_install, validations
from compile_stage.serving.trust import Trust

PORTABLE = "portable"
PORTABLE_FP32 = "portable-fp32"

# Of the version, not of one of its artifacts.
_SHARED = (
    "schema", "files", "code", "beside", "mlmodel", "digest", "family", "variants", "on_hardware_mismatch",
    "signature_required", "approval",
)  # fmt: skip


@record
class Chosen:
    """What a machine loads.

    Attributes:
        manifest: The variant's own, as `as_variant` makes it.
        reason: Why this one, as a sentence.
        doubt: Why nothing is proven of it here; empty where it is.
    """

    manifest: Mapping[str, Any]
    reason: str
    doubt: str = ""


def holds_variants(manifest: Mapping[str, Any]) -> bool:
    """True for the manifest of a version with a family."""
    return bool(manifest.get("variants"))


def as_variant(whole: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The ordinary manifest of one variant, from that of the version: what knows one artifact reads it like any."""
    entry = whole["variants"][variant]
    own = entry["manifest"]
    if own is None:
        return {**whole, "key": entry["key"], "variant": variant}
    shared = {key: whole[key] for key in _SHARED if key in whole}
    kept = {key: value for key, value in own.items() if key not in _SHARED}
    return {**kept, **shared, "folder": entry["folder"], "stored": entry["stored"], "variant": variant}


def every_variant(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each variant's manifest; that of a version with one artifact as it is."""
    if not holds_variants(whole):
        yield dict(whole)
    for variant in whole.get("variants", {}):
        yield as_variant(whole, variant)


def proven_targets(whole: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None) -> tuple[str, ...]:
    """The family's targets that the version holds something proven for, wherever it was proven."""
    names: dict[str, None] = {}
    for one in every_variant(whole):
        proven = one["verdict"] is not None or any(v["passed"] for v in validations(one, model_dir, trust))
        if proven and one.get("variant") != PORTABLE:
            names[one["target"]["name"]] = None
    return tuple(names)


def for_machine(
    whole: Mapping[str, Any], model_dir: str | Path, machine: Hardware, trust: Trust | None = None
) -> Mapping[str, Any]:
    """The manifest of the variant that a machine loads; the lead's where it loads none. A version with one artifact has
    one manifest."""
    if not holds_variants(whole):
        return whole
    try:
        return choose(whole, model_dir, machine=machine, trust=trust).manifest
    except IntegrityError:
        return as_variant(whole, whole["family"]["lead"])


def choose(
    whole: Mapping[str, Any],
    model_dir: str | Path,
    *,
    mode: str = "error",
    trust: Trust | None = None,
    wanted: str | None = None,
    machine: Hardware | None = None,
) -> Chosen:
    """The fastest variant that is proven for a machine.

    Args:
        mode: `error`, or, to load one that is not proven for it where none is, `warn` or `ignore`.
        wanted: The id of the one that is to be loaded; it must be proven too, unless `mode` says else.
        machine: This one when None.

    Raises:
        IntegrityError: None is proven for it, or `wanted` is not.
        UsageError: There is no variant `wanted`.
    """
    machine, model_dir = machine or hardware(), Path(model_dir)
    if wanted:
        return _named(whole, model_dir, mode, trust, (wanted, machine))
    ours = [one for one in every_variant(whole) if one["variant"] != PORTABLE]
    refused = {one["variant"]: refuse_machine(one, model_dir, trust, machine) for one in ours}
    if proven := [one for one in ours if refused[one["variant"]] is None]:
        fastest = min(proven, key=lambda one: _latency_s(one, model_dir, trust, machine))
        return Chosen(manifest=fastest, reason=_why(fastest, proven, refused, (model_dir, trust, machine)))
    why = "; ".join(f"{variant}: {reason}" for variant, reason in refused.items())
    problem = f"none of its variants is proven for this machine, {machine.fingerprint} ({why})"
    if whole["family"]["elsewhere"] == PORTABLE_FP32 and PORTABLE in whole["variants"]:
        reason = "no variant is proven for this machine, and the policy says portable-fp32"
        return Chosen(manifest=as_variant(whole, PORTABLE), reason=reason, doubt=problem)
    if mode != "error":
        meant = [one for one in ours if machine.refuse(dict(one["target"].get("hardware", {}))) is None] or ours
        fastest = min(meant, key=lambda one: _latency_s(one, model_dir, trust, machine))
        return Chosen(manifest=fastest, reason="no variant is proven for this machine", doubt=problem)
    raise IntegrityError(problem, fix=_ways_out(ours, model_dir, trust, machine))


def _named(
    whole: Mapping[str, Any], model_dir: Path, mode: str, trust: Trust | None, asked: tuple[str, Hardware]
) -> Chosen:
    wanted, machine = asked
    if wanted not in whole["variants"]:
        raise UsageError(f"there is no variant {wanted!r}; there are: {', '.join(whole['variants'])}")
    one = as_variant(whole, wanted)
    doubt = refuse_machine(one, model_dir, trust, machine) or ""
    if doubt and mode == "error":
        raise IntegrityError(
            f"the variant {wanted} is not proven for this machine: {doubt}",
            fix=_ways_out([one], model_dir, trust, machine),
        )
    return Chosen(manifest=one, reason="it was asked for by name", doubt=doubt)


def _latency_s(one: Mapping[str, Any], model_dir: Path, trust: Trust | None, machine: Hardware) -> float:
    """The measured median of a call at the first batch size, in seconds: on this very machine where it was validated
    here."""
    measured = passed_here(one, model_dir, trust, machine) or one
    timing = measured.get("timing", {}).get(str(one["target"]["batch_sizes"][0]))
    return float(timing["p50_s"]) if timing else math.inf


def _why(
    fastest: Mapping[str, Any],
    proven: Sequence[Mapping[str, Any]],
    refused: Mapping[str, str | None],
    given: tuple[Path, Trust | None, Hardware],
) -> str:
    model_dir, trust, machine = given
    here = passed_here(fastest, model_dir, trust, machine) is not None
    same = here or fastest["fingerprint"] == machine.fingerprint
    where = "on this machine" if same else f"on {fastest['fingerprint']}, which has the same instruction sets"
    latency_s = _latency_s(fastest, model_dir, trust, machine)
    words = f"median {latency_s * 1e3:.3g} ms at batch {fastest['target']['batch_sizes'][0]}"
    rank = f"the fastest of {len(proven)} that are proven here" if len(proven) > 1 else "the only one proven here"
    passed_over = [f"{variant} ({reason})" for variant, reason in refused.items() if reason is not None]
    rest = f"; passed over: {', '.join(passed_over)}" if passed_over else ""
    return f"{rank}: proven {where}, {words}{rest}"


def _ways_out(ours: Sequence[Mapping[str, Any]], model_dir: Path, trust: Trust | None, machine: Hardware) -> str:
    missing = filter(None, (runtime_to_install(one, model_dir, trust, machine) for one in ours))
    ways = [
        *(f"pip install {' '.join(wanted)}" for wanted in missing),
        "run compile-stage, or compile-stage validate, on this kind of machine",
        "publish with elsewhere: portable-fp32 in the policy's section publish",
    ]
    return ", or ".join(dict.fromkeys(ways))
