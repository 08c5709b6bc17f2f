"""Which results of earlier runs a run may use: by what they are, where they were made, and who vouches for them.

What a step makes of its inputs, such as an export or a compiled artifact, is the same wherever the key is the same. A
verdict and a timing also say something of the machine that they were measured on, so a policy says how far they reach
(`compliance.reuse_verdicts`, `compliance.reuse_timings`). The fingerprint of the hardware is in the keys of both:
nothing here makes a result of other hardware usable.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from compile_stage.core.digest import digest_of
from compile_stage.core.records import Compliance, Reach, record

MADE = frozenset(
    (
        "signature",
        "inspect",
        "refuse-model",
        "check-lists",
        "sample",
        "compare-samples",
        "rewrite",
        "lower",
        "compile",
        "rank",
        "mix",
        "tuning",
        "export",
        "export-program",
    )
)
"""Steps whose results follow from their inputs; so do all that begin with `export-`. What they decide is proven
afterwards."""
VERDICTS = frozenset(("reference", "predict", "validate", "look", "timed-answers", "soak", "texts", "serve"))
"""Steps that say what a model answers, or whether that is right."""
TIMINGS = frozenset(("quick_latency", "benchmark", "predict-speedup", "profile", "serving-cost"))
"""Steps that say how fast something is."""

MACHINE_VARIABLE = "COMPILE_STAGE_MACHINE_ID"
HERE = "here"
"""Who vouches for an entry that was made on this disk."""
UNSIGNED = "nobody"
"""Who vouches for an entry of a shared cache without a key."""


@cache
def _of_system() -> str:
    try:
        known = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        known = ""
    return digest_of({"host": platform.node(), "id": known})[7:23]


def machine_id() -> str:
    """Which machine this is, as 16 hexadecimal digits: of its name and `/etc/machine-id`, or of
    `$COMPILE_STAGE_MACHINE_ID` where the name changes with every start."""
    named = os.environ.get(MACHINE_VARIABLE, "")
    return digest_of({"named": named})[7:23] if named else _of_system()


def made_here() -> dict[str, str]:
    """What an entry that is made now says of its origin."""
    return {"machine": machine_id(), "vouched": HERE}


@record
class Reuse:
    """What the policy says.

    Attributes:
        verdicts: `never`, `same-machine`, or `same-fingerprint`: any machine with this hardware.
        timings: The same of what was timed.
        signed_only: Nothing is used that came from a shared cache without a key.
    """

    verdicts: Reach = "same-fingerprint"
    timings: Reach = "same-machine"
    signed_only: bool = False

    @classmethod
    def of(cls, compliance: Compliance) -> Reuse:
        """As the policy says."""
        return cls(
            verdicts=compliance.reuse_verdicts,
            timings=compliance.reuse_timings,
            signed_only=compliance.require_signature,
        )

    def refuse(self, step: str, made: Mapping[str, str]) -> str | None:
        """None when a result of `step` (`name/version`) that was made as `made` says may be used, or the reason."""
        reach = self.reach(step)
        if reach == "never":
            return "the policy uses no earlier result of this step"
        if reach == "same-machine" and made["machine"] != machine_id():
            return "it was measured on another machine"
        if made["vouched"] == UNSIGNED:
            if self.signed_only:
                return "the policy demands signatures, and nobody signed it"
            if not may_be_unsigned(step):
                return "nobody signed it, and it is more than a compiled artifact"
        return None

    def reach(self, step: str) -> Reach:
        """How far results of a step reach. One that is in no group is treated like a timing."""
        name = step.partition("/")[0]
        if name in MADE or name.startswith("export-"):
            return "same-fingerprint"
        return self.verdicts if name in VERDICTS else self.timings


def may_be_unsigned(step: str) -> bool:
    """True for what is validated on this machine after it was taken, and is not believed for who wrote it: lowered
    graphs, compiled artifacts and tuning records. Samples, reference answers and verdicts are what it is validated
    with; a rewritten graph was compared with the graph before where it was made, and is not compared again."""
    return step.partition("/")[0] in ("lower", "compile", "tuning")
