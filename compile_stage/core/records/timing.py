"""Raw latencies, load time and memory of one participant of a measurement."""

from __future__ import annotations

from compile_stage.core.records.base import record


@record
class Timing:
    """Raw latencies at one batch size; summaries are derived from them (`measure.stats`).

    Attributes:
        latency_s: One value per call, in seconds, in order.
        speedup: The baseline's median latency / the own one, each over all its calls of the same interleaved rounds;
            None for the baseline itself.
        speedup_interval: 95 % bootstrap interval of that quotient; rounds are what is resampled.
        rounds: Interleaved turns.
        disturbed: Rounds that were dropped because others used the cores meanwhile; when too few would be left, none
            is.
        turns: How many of `latency_s` belong to each round, in order, so that two participants can be compared round by
            round.
        stable: The interval's half width is at most 10 % of `speedup`. One that is not stable is shown as its interval,
            without a figure: see `headline_speedup`.
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

    @property
    def headline_speedup(self) -> float | None:
        """`speedup` where one figure may stand for it; None where it is unstable, and for the baseline."""
        return self.speedup if self.stable else None


@record
class Measurement:
    """Everything measured of one artifact (or the baseline) in fresh processes.

    Attributes:
        stopped_early: Why it was not measured further after a first short look, or not even proven; empty when it was.
        notes: Of the baseline's measurement: what a reader should know of all that were measured beside it, such as
            that the machine was busy.
    """

    timings: tuple[Timing, ...]
    load_s: float
    peak_memory_bytes: int
    stopped_early: str = ""
    notes: tuple[str, ...] = ()

    def timing(self, batch_size: int) -> Timing | None:
        """The timing at that batch size, if it was measured."""
        return next((t for t in self.timings if t.batch_size == batch_size), None)
