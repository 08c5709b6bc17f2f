"""Participants of benchmarks/by_hand.py in turns: fresh processes, the same inputs, the same number of rounds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peers.recipe import Given

from compile_stage.core.records import Gate, Outcome
from compile_stage.measure import disturbance, speedups, stats, timing
from compile_stage.measure.metrics import ComparedSamples, check_outputs

HERE = Path(__file__).parent
OURS = "ours"
SCREENING_ROUNDS = 6
NEAR = 1.2
"""Who takes so many times as long as the fastest in the screening is not started again."""
MOST_CONTENDERS = 4


@dataclass(frozen=True)
class Participant:
    """Who takes turns.

    Attributes:
        command: That opens it (`by_hand_process.py open`), without the batch size.
        interpreter: Python of the peer's environment.
        precision: Whose tolerances it must meet; empty for ours, which the stage proved.
    """

    name: str
    command: tuple[str, ...]
    precision: str = ""
    interpreter: str = sys.executable


@dataclass
class Open:
    """A participant in its process."""

    process: subprocess.Popen[str]
    calls: int = 1
    rounds: list[list[float]] = field(default_factory=list)

    def ask(self, **words: Any) -> dict[str, Any]:
        """Raises ChildProcessError with what it says, or that it ended."""
        if words:
            self.process.stdin.write(json.dumps(words) + "\n")
            self.process.stdin.flush()
        return said(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def said(line: str) -> dict[str, Any]:
    if not line:
        raise ChildProcessError("its process ended")
    answer = json.loads(line)
    if problem := answer.get("problem"):
        raise ChildProcessError(problem)
    return answer


def helper(*words: str, interpreter: str = sys.executable, log: Path) -> dict[str, Any]:
    """What `by_hand_process.py` answers to one command. Raises ChildProcessError."""
    command = [interpreter, str(HERE / "by_hand_process.py"), *words]
    with log.open("a") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    return said(done.stdout.strip().rpartition("\n")[2])


class Comparison:
    """Participants of one network and batch size in turns.

    Args:
        gates: By precision, those of the policy.
    """

    def __init__(self, given: Given, batch: int, gates: dict[str, tuple[Gate, ...]], log: Path) -> None:
        self._given, self._batch, self._gates, self._log = given, batch, gates, log
        self.left_out: dict[str, str] = {}
        self.disturbed = self.played = 0

    def start(self, who: Participant, stack: ExitStack) -> Open | None:
        """In a fresh process, warm; None where it can't be opened."""
        command = [who.interpreter, str(HERE / "by_hand_process.py"), *who.command, str(self._batch)]
        errors = stack.enter_context(self._log.open("a"))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        one = Open(process)
        stack.callback(one.close)
        try:
            one.calls = timing.calls_of_a_turn(one.ask()["latency_s"])
        except ChildProcessError as error:
            self.left_out[who.name] = str(error)
            return None
        return one

    def refusal(self, who: Participant, one: Open) -> str:
        """Why its answers miss the tolerances; empty where they meet them."""
        place = self._given.folder / "answers.npy"
        one.ask(act="answers", into=str(place))
        own, original = np.load(place), np.load(self._given.folder / "original.npy")
        compared = ComparedSamples(min_samples=32, real=True)
        gates = self._gates[who.precision or "int8"]
        checks = check_outputs(gates, {"answer": own}, {"answer": original}, compared, batch_size=self._batch, seed=0)
        bad = [check for check in checks if check.outcome is not Outcome.PASS]
        return f"{bad[0].gate.metric}: {bad[0].reason}" if bad else ""

    def rounds(self, members: dict[str, Open], seed: int, count: int, seconds: float) -> None:
        """At least `count` rounds, an even number, and more until the time is up. Rounds in which others used the cores
        are repeated as long as the time lasts; where there were too few quiet ones, all count."""
        clean: list[dict[str, list[float]]] = []
        every: list[dict[str, list[float]]] = []
        ends = time.monotonic() + seconds
        while len(every) < count or len(every) % 2 or time.monotonic() < ends:
            number, before = len(every), disturbance.usage()
            played = {}
            for name in timing.schedule(tuple(members), number, seed):
                one = members[name]
                played[name] = one.ask(act="turn", calls=one.calls, seed=1000 * seed + number)["latency_s"]
            every.append(played)
            if not disturbance.disturbed(before, disturbance.usage(), self._given.threads):
                clean.append(played)
        self.played += len(every)
        self.disturbed += len(every) - len(clean)
        for played in clean if len(clean) >= count else every:
            for name, one in members.items():
                one.rounds.append(played[name])

    def screen(self, everybody: Sequence[Participant]) -> dict[str, tuple[float, str]]:
        """By participant: seconds of a call, and why its answers miss the tolerances. The seconds are the median of the
        fastest round: what disturbs a round only makes it slower."""
        screened: dict[str, tuple[float, str]] = {}
        with ExitStack() as stack:
            members, refusals = {}, {}
            for who in everybody:
                if (one := self.start(who, stack)) is None:
                    continue
                try:
                    refusals[who.name] = self.refusal(who, one)
                except ChildProcessError as error:
                    self.left_out[who.name] = str(error)
                    continue
                members[who.name] = one
            self.rounds(members, seed=0, count=SCREENING_ROUNDS, seconds=0.0)
            for name, one in members.items():
                screened[name] = (min(map(stats.median, one.rounds)), refusals[name])
        return screened

    def race(self, members: Sequence[Participant], starts: int, seconds: float) -> dict[str, list[list[list[float]]]]:
        """By participant, of each start, of each round: seconds of each call."""
        by_name = {who.name: who for who in members}
        taken: dict[str, list[list[list[float]]]] = {name: [] for name in by_name}
        for number in range(starts):
            with ExitStack() as stack:
                # Another order in each start: who is opened first may be slower as long as it lives.
                ordered = timing.schedule(list(by_name), number, seed=0)
                opened = {name: one for name in ordered if (one := self.start(by_name[name], stack)) is not None}
                self.rounds(opened, seed=1 + number, count=4, seconds=seconds / starts)
                for name, one in opened.items():
                    taken[name].append(one.rounds)
        return {name: rounds for name, rounds in taken.items() if len(rounds) == starts}


def contenders(screened: dict[str, tuple[float, str]]) -> list[str]:
    """Who may be the fastest that passes, or the fastest at all, and whoever was no slower than ours."""
    peers = {name: values for name, values in screened.items() if name != OURS}
    chosen: list[str] = []
    for group in ([n for n, (_, why) in peers.items() if not why], list(peers)):
        ordered = sorted(group, key=lambda name: peers[name][0])
        within_s = max(NEAR * peers[ordered[0]][0], screened[OURS][0])
        near = [name for name in ordered if peers[name][0] <= within_s]
        chosen += [name for name in near[:MOST_CONTENDERS] if name not in chosen]
    return chosen


def row_of(taken: dict[str, list[list[list[float]]]], name: str) -> dict[str, Any]:
    """A participant's median, and its ratio to ours with the interval over starts."""

    def flat(who: str) -> list[list[float]]:
        return [turn for start in taken[who] for turn in start]

    owners = [number for number, start in enumerate(taken[name]) for _ in start]
    ratio = speedups.ratio_interval(flat(name), flat(OURS), seed=0, processes=owners)
    return {
        "p50_ms": round(1e3 * stats.median([s for turn in flat(name) for s in turn]), 4),
        "over_ours": round(ratio.value, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4),
    }  # fmt: skip
