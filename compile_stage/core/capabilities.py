"""What plug-ins declare of themselves: one frozen record each, in the class attribute `capabilities`.

It is read when a policy is checked and when a run is planned, so it holds plain values and needs none of the plug-in's packages.
"""

from __future__ import annotations

from compile_stage.core.records import record

SOURCE_PRECISION = "fp32"
"""The precision of every source model: the baseline's, and the one that needs no lowering."""


@record
class LoweringCapabilities:
    """What holds for a precision when the lowering of that name makes it.

    Attributes:
        needs_calibration: `lower` looks at calibration samples.
        mixes: Some nodes can stay in higher precision while the others are lowered (`precision.mixed`), so a candidate that misses its
            tolerance is worth a search for them.
        complexity: Of two candidates that are equal within the noise, the one of lower complexity wins. FP32 is 0, bf16 10, int4 60; a number
            between them puts a precision between.
    """

    needs_calibration: bool
    mixes: bool = False
    complexity: int = 100
