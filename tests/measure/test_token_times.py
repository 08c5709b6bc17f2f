"""Time to the first token, time per output token, and tokens a second: of the same calls, from the same rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.generation import INPUT_IDS, LOGITS
from compile_stage.core.records import Gate, Generation, Measurement, Outcome, Timing
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure import timing
from compile_stage.measure.participant import Turn
from compile_stage.measure.performance import calls_needed, check_performance
from compile_stage.measure.restarts import merge
from compile_stage.measure.timed_answers import AnswerLog, Proof
from compile_stage.measure.timed_inputs import checked_batch
from compile_stage.measure.token_times import token_times
from compile_stage.measure.turn_rules import refuse_turns
from compile_stage.serving.generation import GenerationSession

NEW = 9
TTFT = Gate(metric="ttft_p95_ms", limit=4.5, direction="at_most", unit="ms")
TPOT = Gate(metric="tpot_p95_ms", limit=1.2, direction="at_most", unit="ms")
FLOW = Gate(metric="tokens_per_s", limit=650, direction="at_least", unit="tokens/s")


def timed(first_ms: float, next_ms: float, batch_size: int = 1, seed: int = 0, rounds: int = 90) -> Timing:
    """Three starts of rounds of 4 calls; what slows a call slows its first token alike."""
    random = np.random.default_rng(seed)
    first = first_ms / 1e3 * np.exp(0.02 * random.standard_normal(4 * rounds))
    whole = first + (NEW - 1) * next_ms / 1e3 * np.exp(0.02 * random.standard_normal(4 * rounds))
    return Timing(
        latency_s=tuple(whole), first_s=tuple(first), new_tokens=NEW, batch_size=batch_size, stable=True,
        environment="", rounds=rounds, turns=(4,) * rounds, processes=tuple(n % 3 for n in range(rounds)),
    )  # fmt: skip


def test_each_token_after_the_first_has_its_share() -> None:
    """Broken: the prompt's time is counted as that of tokens, so that long prompts look like slow writing."""
    times = token_times(timed(4.0, 1.0), timed(8.0, 3.0, seed=1))
    assert times.first_s.value == pytest.approx(0.004, rel=0.01)
    assert times.next_s.value == pytest.approx(0.001, rel=0.02)
    assert times.tokens_per_s.value == pytest.approx(NEW / 0.012, rel=0.01)
    assert times.first_ratio.low < 2 < times.first_ratio.high
    assert times.next_ratio.low < 3 < times.next_ratio.high
    for known in (times.first_s, times.next_s, times.first_p95_s, times.tokens_per_s):
        assert known.low < known.value < known.high
    assert times.first_p95_s.value > times.first_s.value
    hit = timed(4.0, 1.0)  # others' work slows one short call, and not the whole one beside it
    hit = replace(hit, first_s=(1.0, *hit.first_s[1:]))
    assert hit.token_s[0] < 0
    assert token_times(hit, timed(8.0, 3.0, seed=1)).next_ratio.value == pytest.approx(3, rel=0.02)
    eight = token_times(timed(4.0, 1.0, batch_size=8))
    assert eight.tokens_per_s.value == pytest.approx(8 * NEW / 0.012, rel=0.01)
    assert token_times(replace(timed(4.0, 1.0), first_s=(), new_tokens=0)) is None


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.booleans(), st.booleans()), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_ratios_are_of_the_starts_that_both_ran(starts: list[tuple[float, bool, bool]]) -> None:
    """Broken: of two equal models, the one that joined after the first start, in which the machine was slower, is shown
    as 1.5 times as fast; or its interval has no room for what processes differ by."""

    def started(slowed: float, rounds: int) -> Measurement:
        calls = {"latency_s": (0.11 * slowed,) * rounds, "first_s": (0.01 * slowed,) * rounds}
        of_rounds = {"rounds": rounds, "turns": (1,) * rounds, "processes": ()}
        return Measurement(
            timings=(replace(timed(1.0, 1.0, rounds=1), **calls, **of_rounds),), load_s=1, peak_memory_bytes=1
        )

    made = [
        {"baseline": started(slowed, 8)} | ({"joined": started(slowed, 4 if left else 8)} if joined else {})
        for slowed, joined, left in [*starts, (1.0, True, False)]
    ]
    merged = merge(made, "baseline", seed=0)
    own = merged["joined"].timings[0]
    times = token_times(own, merged["baseline"].timings[0])
    for ratio in (times.first_ratio, times.next_ratio):
        assert ratio.value == pytest.approx(1.0)
        if len(set(own.processes)) < 3:
            assert ratio.high > 1.05


def test_limits_on_tokens_are_judged_by_the_bounds() -> None:
    """Broken: a language model that answers too late, or too slowly, is promoted."""
    gates = (TTFT, TPOT, FLOW)
    fine = Measurement(timings=(timed(4.0, 1.0), timed(6.0, 1.5, batch_size=4)), load_s=1, peak_memory_bytes=1)
    checks = check_performance(gates, fine, 1)
    assert [check.outcome for check in checks] == [Outcome.PASS] * 3
    assert "p95 of the time to the first token is 4.1" in checks[0].reason
    assert "with 4 sequences at a time" in checks[2].reason, "the largest batch size"
    late = replace(fine, timings=(timed(5.0, 1.4), timed(60.0, 1.5, batch_size=4)))
    assert [check.outcome for check in check_performance(gates, late, 1)] == [Outcome.FAIL] * 3
    near = check_performance((replace(TTFT, limit=1e3 * token_times(timed(4.0, 1.0)).first_p95_s.value),), fine, 1)
    assert near[0].reason.startswith("too uncertain")
    other = replace(fine, timings=(replace(timed(4.0, 1.0), first_s=(), new_tokens=0),))
    assert {check.outcome for check in check_performance(gates, other, 1)} == {Outcome.NOT_RUN}
    few = replace(fine, timings=(timed(4.0, 1.0, rounds=3),))
    assert check_performance((TTFT,), few, 1)[0].outcome is Outcome.NOT_RUN
    assert calls_needed((TPOT,)) == calls_needed((replace(TPOT, metric="p95_latency_ms"),)) > 0


def test_first_tokens_of_all_starts_stay_beside_their_calls() -> None:
    """Broken: a first token is subtracted from another process's generation."""
    one, other = timed(4.0, 1.0, rounds=6), timed(5.0, 2.0, rounds=6, seed=3)
    starts = [
        {"baseline": Measurement(timings=(t,), load_s=1, peak_memory_bytes=1),
         "mine": Measurement(timings=(t,), load_s=1, peak_memory_bytes=1)} for t in (one, other)
    ]  # fmt: skip
    (merged,) = merge(starts, "baseline", seed=0)["mine"].timings
    assert merged.first_s == one.first_s + other.first_s
    assert merged.token_s == one.token_s + other.token_s


class Counting:
    """A graph with a cache of one key, whose logits count the tokens that went in."""

    signature = Signature(
        inputs=(
            TensorSpec(name=INPUT_IDS, dtype="int64", shape=("batch", "tokens")),
            TensorSpec(name="past_key_values.0.key", dtype="float32", shape=("batch", 1, "past", 1)),
        ),
        outputs=(
            TensorSpec(name=LOGITS, dtype="float32", shape=("batch", 1, 5)),
            TensorSpec(name="present.0.key", dtype="float32", shape=("batch", 1, "all", 1)),
        ),
    )

    def step(self, inputs, cache):
        """As `serving.generation` says."""
        seen = (0 if cache is None else cache) + inputs[INPUT_IDS].shape[1]
        return np.full((len(inputs[INPUT_IDS]), 1, 5), seen, np.float32), seen


def test_a_first_token_is_that_of_the_prompt_alone() -> None:
    """Broken: the time to the first token is that of a whole generation, or of another number of tokens."""
    session = GenerationSession(Counting(), Generation(prompt_tokens=6, new_tokens=3))
    batch = {INPUT_IDS: np.zeros((2, 9), np.int64)}
    assert session.run(batch)[LOGITS][:, :, 0].tolist() == [[6, 7, 8], [6, 7, 8]]
    first = session.first(batch)[LOGITS]
    assert first.shape == (2, 1, 5)
    assert first.dtype == np.float32
    assert np.all(first == 6)


def test_ways_to_call_take_turns_on_the_same_batches() -> None:
    """Broken: one of two ways always finds what the other has warmed."""
    seen: list[tuple[str, int]] = []

    def way(name: str):
        def run(batch):
            seen.append((name, int(batch["x"][0])))
            return {"y": batch["x"]}

        return run

    batches = [{"x": np.array([n])} for n in range(3)]
    kept: dict[str, list[int]] = {"a": [], "b": []}
    keep = [lambda place, _, name=name: kept[name].append(place) for name in kept]
    taken = timing.turn_of_each((way("a"), way("b")), batches, seconds=10, keep=keep)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert kept == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert [len(calls) for calls in taken] == [3, 3]


def test_the_stages_clock_bounds_both_kinds_of_calls() -> None:
    """Broken: a worker claims first tokens that took longer, or shorter, than the turn has room for."""
    turn = Turn(latency_s=(0.03,) * 4, first_s=(0.01,) * 4, wall_s=0.161, took_s=0.2, cpu_s=0.16, threads=1)
    assert refuse_turns([turn] * 6, [turn] * 6, 1) == ""
    more = replace(turn, first_s=(0.05,) * 4)
    assert "its clock is wrong" in refuse_turns([more] * 6, [turn] * 6, 1)
    less = replace(turn, first_s=(0.0001,) * 4)
    assert "its clock is wrong" in refuse_turns([less] * 6, [turn] * 6, 1)


def test_first_tokens_that_are_wrong_while_they_are_timed_are_refused(tmp_path: Path) -> None:
    """Broken: an artifact that answers a prompt with garbage at once has the shortest time to the first token."""
    random = np.random.default_rng(0)
    reference = (4 * random.standard_normal((16, NEW, 30))).astype(np.float32)
    np.save(tmp_path / "reference.npy", reference)
    gate = Gate(metric="token_kl", limit=0.01, direction="at_most")
    proof = Proof(gates={"mine": (gate,)}, reference={LOGITS: str(tmp_path / "reference.npy")}, digest="")

    def answered(name: str, rows: np.ndarray) -> dict[str, str]:
        path = tmp_path / f"{name}-{random.integers(1 << 40)}.npy"
        np.save(path, rows)
        return {LOGITS: str(path)}

    def refused(first, whole) -> str:
        log = AnswerLog(tmp_path, 16, 4)
        for _ in range(3):
            seed, folder = log.begin_round()
            batch = checked_batch(16, 4, seed, 0)
            rows = reference[batch.rows[batch.order]]
            turns = {
                name: Turn(
                    latency_s=(1.0,),
                    first_s=(0.5,),
                    answers=(answered(name, whole(rows) if name == "mine" else rows),),
                    first_answers=(answered(name, first(rows[:, :1]) if name == "mine" else rows[:, :1]),),
                )
                for name in ("baseline", "mine")
            }
            log.end_round(seed, folder, turns)
        return log.refuse("mine", "baseline", proof)

    right = [lambda rows: rows + 5, lambda rows: rows + np.float32(0.05) * np.cos(rows * 9)]
    for same in right:
        assert refused(same, same) == ""
    assert "of the first token" in refused(np.zeros_like, right[0])
    assert "of the first token" in refused(lambda rows: rows[::-1], right[0])
    assert "output 'logits' is wrong" in refused(right[0], lambda rows: np.roll(rows, 1, axis=1))
    assert "NaN" in refused(right[0], lambda rows: np.where(rows > 4, np.nan, rows).astype(np.float32))
