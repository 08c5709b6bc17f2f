"""A backend that lies: ONNX Runtime, but for one lie each. Every one must be caught, each for its own reason
(tests/integration/test_liars.py); what no prover can see is listed in docs/proof.md.

    targets:
      cpu:
        backends: [liar]
        options: {liar: {mode: [garbage_when_timed, slow_clock]}}

Each mode is a candidate of its own. To add one, write a class below and add it to `MODES`.
"""

import hashlib
import importlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.records import Scheme


class Honest:
    """ONNX Runtime as it is: it must pass."""

    def __init__(self, session):
        self.session = session

    @property
    def signature(self):
        """As the runtime reports it."""
        return self.session.signature

    def run(self, batch):
        """The answer, or what the lie makes of it."""
        return self.session.run(batch)

    def close(self):
        """The end of the session."""


# ------------------------------------------------------------------------------------------------ lies about the answer


class WrongOutput(Honest):
    """Answers zeros."""

    def run(self, batch):
        return {name: np.zeros_like(value) for name, value in super().run(batch).items()}


class Nan(Honest):
    """Answers NaN."""

    def run(self, batch):
        return {name: np.full_like(value, np.nan) for name, value in super().run(batch).items()}


class RenamedOutput(Honest):
    """Gives its outputs other names."""

    def run(self, batch):
        return {f"{name}_0": value for name, value in super().run(batch).items()}


class Empty(Honest):
    """Answers for none of the samples."""

    def run(self, batch):
        return {name: value[:0] for name, value in super().run(batch).items()}


class ZeroedColumn(Honest):
    """One column of each output is dead."""

    def run(self, batch):
        answer = {name: value.copy() for name, value in super().run(batch).items()}
        for value in answer.values():
            value[:, -1] = 0
        return answer


class ConstantAnswer(Honest):
    """Answers every sample as it answers zeros, with a little noise."""

    def run(self, batch):
        steady = {name: value[:1] * 0 + 0.5 for name, value in batch.items()}
        answer = super().run(steady)
        rows = len(next(iter(batch.values())))
        return {name: np.repeat(value, rows, axis=0) for name, value in answer.items()}


class Fp16ClaimedFp32(Honest):
    """Computes in 16 bits what is claimed to be 32."""

    def run(self, batch):
        return {name: value.astype(np.float16).astype(np.float32) for name, value in super().run(batch).items()}


# ----------------------------------------------------------------------------------- lies beyond the validation samples


class Memorised(Honest):
    """Knows the first samples that it is asked for, and answers all others as one of them."""

    KNOWN = 64

    def __init__(self, session):
        super().__init__(session)
        self.known = {}

    def run(self, batch):
        answer = super().run(batch)
        for row in range(len(next(iter(batch.values())))):
            key = tuple(value[row].tobytes() for value in batch.values())
            if key not in self.known and len(self.known) < self.KNOWN:
                self.known[key] = {name: value[row].copy() for name, value in answer.items()}
            known = self.known.get(key, next(iter(self.known.values())))
            for name, value in answer.items():
                value[row] = known[name]
        return answer


class OutOfRange(Honest):
    """Wrong for whatever lies beyond the range of the first samples that it is asked for."""

    def __init__(self, session):
        super().__init__(session)
        self.rows, self.range = 0, {}

    def run(self, batch):
        answer = super().run(batch)
        outside = np.zeros(len(next(iter(batch.values()))), bool)
        for name, value in batch.items():
            low, high = self.range.get(name, (value.min(axis=0), value.max(axis=0)))
            if self.rows < Memorised.KNOWN:
                low, high = np.minimum(low, value.min(axis=0)), np.maximum(high, value.max(axis=0))
                self.range[name] = low, high
            outside |= ((value < low) | (value > high)).any(axis=1)
        self.rows += len(outside)
        for value in answer.values():
            value[outside] = 0
        return answer


class WrongBetweenBatchSizes(Honest):
    """Right in batches of 1 and 8, as if it had kernels for these alone."""

    def run(self, batch):
        answer = super().run(batch)
        rows = len(next(iter(batch.values())))
        return answer if rows in (1, 8) else {name: value * 0 for name, value in answer.items()}


class WrongAtOtherSizes(Honest):
    """Right in the batch sizes that are proven for a policy of 1 and 8. It passes: no published model runs others."""

    def run(self, batch):
        answer = super().run(batch)
        rows = len(next(iter(batch.values())))
        return answer if rows in (1, 2, 4, 7, 8) else {name: value * 0 for name, value in answer.items()}


class WrongAfter1000Calls(Honest):
    """Right as long as it is proven."""

    calls = 0

    def run(self, batch):
        self.calls += 1
        return {name: value * (1 if self.calls <= 1000 else -1) for name, value in super().run(batch).items()}


class Drift(Honest):
    """Every answer is a little larger than the one before."""

    calls = 0

    def run(self, batch):
        self.calls += 1
        return {name: value * np.float32(1 + 2e-6 * self.calls) for name, value in super().run(batch).items()}


class OverwritesBuffer(Honest):
    """Answers in memory that the next call writes to."""

    def __init__(self, session):
        super().__init__(session)
        self.buffers = {}

    def run(self, batch):
        answer = {}
        for name, value in super().run(batch).items():
            buffer = self.buffers.setdefault(name, np.zeros((4096, *value.shape[1:]), value.dtype))
            buffer[: len(value)] = value
            answer[name] = buffer[: len(value)]
        return answer


class ChangesInput(Honest):
    """Computes in the memory of its input, where it can."""

    def run(self, batch):
        answer = super().run(batch)
        for value in batch.values():
            if value.flags.writeable:
                value += 1
        return answer


# ----------------------------------------------------------------------------------------------- lies while it is timed


class _Slow(Honest):
    """Right, and 5 ms slower than ONNX Runtime: only a lie can make it fast."""

    def compute(self, batch):
        time.sleep(0.005)
        return self.session.run(batch)

    def run(self, batch):
        return self.compute(batch)


class GarbageWhenTimed(_Slow):
    """Computes nothing while it is timed."""

    def run(self, batch):
        if not _is_timed():
            return self.compute(batch)
        rows = len(next(iter(batch.values())))
        return {spec.name: np.zeros((rows, *spec.shape[1:]), spec.dtype) for spec in self.signature.outputs}


class RemembersAnswers(_Slow):
    """Looks up what it has answered to the same bytes before."""

    def __init__(self, session):
        super().__init__(session)
        self.answers = {}

    def run(self, batch):
        key = tuple(value.tobytes() for value in batch.values())
        if key not in self.answers:
            self.answers[key] = self.compute(batch)
        return self.answers[key]


class ReturnsBeforeComputed(_Slow):
    """Starts to compute, and returns the buffers that the answer will be in: any asynchronous runtime does, where
    nobody waits for it. While it is not timed, it waits."""

    def run(self, batch):
        rows = len(next(iter(batch.values())))
        buffers = {spec.name: np.zeros((rows, *spec.shape[1:]), spec.dtype) for spec in self.signature.outputs}

        def fill():
            for name, value in self.compute(batch).items():
                buffers[name][:] = value

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        if not _is_timed():
            thread.join()
        return buffers


class LazyAnswer(_Slow):
    """Answers with something that is computed when it is looked at."""

    class Later:
        def __init__(self, compute):
            self.compute = compute

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.compute(), dtype=dtype)

    def run(self, batch):
        return {spec.name: self.Later(lambda n=spec.name: self.compute(batch)[n]) for spec in self.signature.outputs}


class SlowClock(_Slow):
    """Lets the clocks of its process run five times too slow."""

    def __init__(self, session):
        super().__init__(session)
        self.true = {name: getattr(time, name) for name in ("perf_counter", "process_time")}
        for name, clock in self.true.items():
            setattr(time, name, self.slowed(clock))

    def slowed(self, clock):
        began = clock()
        return lambda: began + (clock() - began) / 5

    def close(self):
        for name, clock in self.true.items():
            setattr(time, name, clock)


class SlowClockWaiting(SlowClock):
    """The same, and two of its own threads share a core in all of its calls, so that one of them always waits for it,
    as on a busy machine."""

    def __init__(self, session):
        super().__init__(session)
        self.last_s = time.monotonic()
        self.is_open = True
        for _ in range(2):
            threading.Thread(target=self.contend, daemon=True).start()

    def contend(self):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # of this thread
        while self.is_open:
            if time.monotonic() - self.last_s < 0.01:
                _compute(0.0005)
            else:
                time.sleep(0.001)

    def run(self, batch):
        self.last_s = time.monotonic()
        return super().run(batch)

    def close(self):
        self.is_open = False
        super().close()


class IgnoreThreads(_Slow):
    """Takes eight threads, whatever the policy grants."""

    def __init__(self, session):
        super().__init__(session)
        self.pool = ThreadPoolExecutor(8)

    def run(self, batch):
        list(self.pool.map(_compute, [0.005] * 8))
        return self.session.run(batch)

    def close(self):
        self.pool.shutdown()


class Spins(Honest):
    """Keeps two cores busy as soon as its own calls are over: what is measured beside it looks slow."""

    def __init__(self, session):
        super().__init__(session)
        self.is_open, self.last_s = True, time.monotonic()
        for _ in range(2):
            threading.Thread(target=self.spin, daemon=True).start()

    def spin(self):
        while self.is_open:
            if time.monotonic() - self.last_s > 0.01:
                _compute(0.001)
            else:
                time.sleep(0.001)

    def run(self, batch):
        self.last_s = time.monotonic()
        return super().run(batch)

    def close(self):
        self.is_open = False


class Grows(Honest):
    """Holds 400 MB more after its first hundred calls, as what leaks or keeps every answer does."""

    calls, held = 0, b""

    def run(self, batch):
        self.calls += 1
        if self.calls == 100:
            self.held = bytearray(b"1") * 400_000_000
        return super().run(batch)


class SpinsALittle(Spins):
    """The same with one core, for less than half of the time: on average it is at rest."""

    def spin(self):
        while self.is_open:
            if time.monotonic() - self.last_s > 0.01:
                _compute(0.004)
                time.sleep(0.016)  # of each of two threads
            else:
                time.sleep(0.001)


class MemoryInChild(Honest):
    """Holds 400 MB in a process of its own."""

    HOLD = "import sys; held = bytearray(b'1') * 400_000_000; print(flush=True); sys.stdin.read()"

    def __init__(self, session):
        super().__init__(session)
        self.child = subprocess.Popen([sys.executable, "-c", self.HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.child.stdout.readline()

    def close(self):
        self.child.kill()
        self.child.wait()


# --------------------------------------------------------------------------------------------- lies about what serves


class GarbageWhenServed(Honest):
    """Right and fast, until the loader of a published model opens it."""

    def __init__(self, session):
        super().__init__(session)
        self.served = _is_served()

    def run(self, batch):
        return {name: np.zeros_like(v) if self.served else v for name, v in super().run(batch).items()}


class SlowWhenServed(GarbageWhenServed):
    """5 ms slower there."""

    def run(self, batch):
        if self.served:
            time.sleep(0.005)
        return self.session.run(batch)


class SlowUnlessTimed(Honest):
    """5 ms slower wherever nobody holds a stopwatch."""

    def run(self, batch):
        if not _is_timed():
            time.sleep(0.005)
        return self.session.run(batch)


class Unservable(Honest):
    """Needs a module of the stage that no published model carries."""

    def __init__(self, session):
        super().__init__(session)
        importlib.import_module("compile_stage.steps.benchmark")


MODES = {
    "honest": Honest,
    "wrong_output": WrongOutput,
    "nan": Nan,
    "renamed_output": RenamedOutput,
    "empty": Empty,
    "zeroed_column": ZeroedColumn,
    "constant_answer": ConstantAnswer,
    "fp16_claimed_fp32": Fp16ClaimedFp32,
    "memorised": Memorised,
    "out_of_range": OutOfRange,
    "wrong_between_batch_sizes": WrongBetweenBatchSizes,
    "wrong_at_other_sizes": WrongAtOtherSizes,
    "wrong_after_1000_calls": WrongAfter1000Calls,
    "drift": Drift,
    "overwrites_buffer": OverwritesBuffer,
    "changes_input": ChangesInput,
    "garbage_when_timed": GarbageWhenTimed,
    "remembers_answers": RemembersAnswers,
    "returns_before_computed": ReturnsBeforeComputed,
    "lazy_answer": LazyAnswer,
    "slow_clock": SlowClock,
    "slow_clock_waiting": SlowClockWaiting,
    "ignore_threads": IgnoreThreads,
    "spins": Spins,
    "grows": Grows,
    "spins_a_little": SpinsALittle,
    "memory_in_child": MemoryInChild,
    "garbage_when_served": GarbageWhenServed,
    "slow_when_served": SlowWhenServed,
    "slow_unless_timed": SlowUnlessTimed,
    "unservable": Unservable,
}


class Liar(OnnxRuntime):
    """ONNX Runtime with the lies that the target's option `mode` names."""

    name = "liar"

    def refuse_target(self, target):
        """The reason when a mode is not one of `MODES`."""
        unknown = [mode for mode in _modes(target) if mode not in MODES]
        return f"liar has no mode {', '.join(unknown)}; it has {', '.join(MODES)}" if unknown else None

    def schemes(self, target, precision):
        """One for each mode."""
        if precision != "fp32":
            return ()
        return tuple(
            Scheme(precision="fp32", name=mode, native=True, options={"mode": mode}) for mode in _modes(target)
        )

    def tuning_options(self, target, scheme):
        """None: a lie has no settings."""
        return ()

    def compile(self, model, scheme, target, job_id, into, calibration=None):
        """As ONNX Runtime's, with the lie beside it."""
        built = super().compile(model, scheme, replace(target, options={}), job_id, into, calibration)
        return replace(built, options={"mode": scheme.options["mode"]})

    @contextmanager
    def open(self, artifact, threads):
        """The session, which lies from now on."""
        with super().open(replace(artifact, options={}), threads) as session:
            lying = MODES[artifact.options["mode"]](session)
            try:
                yield lying
            finally:
                lying.close()


def _modes(target):
    asked = target.options.get("liar", {}).get("mode", list(MODES))
    return [asked] if isinstance(asked, str) else list(asked)


def _is_timed():
    """True when the caller holds a stopwatch, as far as it can be known from here."""
    return _is_called_from("compile_stage.measure.timing")


def _is_served():
    """True when the loader of a published model is the caller."""
    return _is_called_from("compile_stage.flavor")


def _is_called_from(module):
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "") == module:
            return True
        frame = frame.f_back
    return False


def _compute(seconds):
    """Use one core for so long; hashing lets other threads run meanwhile."""
    data, ends = bytes(1_000_000), time.monotonic() + seconds
    while time.monotonic() < ends:
        hashlib.sha256(data)
