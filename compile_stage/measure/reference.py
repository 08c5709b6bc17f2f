"""What the original answers: every artifact is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_stage.core.records import record
from compile_stage.measure.extra_calls import ExtraCalls


@record
class Reference:
    """What the original model answers.

    Attributes:
        outputs: Output name → `.npy` file, axis 0 being the sample: the answers to the samples as they are.
        corners: The same at each corner of the policy's shapes that the samples do not have themselves, and between
            them.
        path: The folder of all these files, whose digest it is.
        sample_s: Seconds that a call takes for each of its samples: an idea, no measurement. Of a warm call, or, where
            all samples took long, their mean.
        distinct: How many samples differ, and have a finite answer.
        extra: What it answers in other calls and to other samples; None where the samples prove nothing, so that no
            artifact is asked either.
        rounded: Its answers to the samples in the types of the network's inputs, where they had to be rounded and the
            original takes them unrounded; None where `outputs` are these.
        rounding: How many samples it answers otherwise then, and which columns do it, as a sentence; empty where none.
        mixed_rows: Which output depends on the rest of the batch, and how much; empty where none does, where two equal
            calls differ too, or where the calls of `extra` were not made.
    """

    outputs: Mapping[str, str]
    corners: tuple[Mapping[str, Any], ...]
    digest: str
    batch_size: int
    sample_s: float
    path: str
    distinct: int
    extra: ExtraCalls | None
    rounded: Mapping[str, str] | None = None
    rounding: str = ""
    mixed_rows: str = ""
