"""Raw latencies, load time and memory of one participant of a measurement."""

from __future__ import annotations

from compile_stage.core.records.base import record


@record
class Timing:
    """Raw latencies at one batch size; summaries are derived from them (`measure.stats`).

    Attributes:
        latency_s: One value per call, in seconds, in order.
        speedup: Baseline median / own median, from rounds that were interleaved; None for the baseline itself.
        speedup_interval: 95 % bootstrap interval of `speedup`.
        rounds: Interleaved turns.
        disturbed: Rounds that were dropped because others used the cores meanwhile; when too few would be left, none is dropped and
            `stable` is False.
        turns: How many of `latency_s` belong to each round, in order, so that two participants can be compared round by round.
        stable: The interval became narrow enough before the budget ended.
        environment: Hardware fingerprint.
    """

    latency_s: tuple[float, ...]
    batch_size: int
    stable: bool
    environment: str
    rounds: int = 0
    turns: tuple[int, ...] = ()
    disturbed: int = 0
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None


@record
class Measurement:
    """Everything measured of one artifact (or the baseline) in fresh processes.

    Attributes:
        stopped_early: Why it was not measured further after a first short look, or not even proven; empty when it was.
    """

    timings: tuple[Timing, ...]
    load_s: float
    peak_memory_bytes: int
    stopped_early: str = ""

    def timing(self, batch_size: int) -> Timing | None:
        """The timing at that batch size, if it was measured."""
        return next((t for t in self.timings if t.batch_size == batch_size), None)
