"""The machine: what an artifact was compiled for, and what a number was measured on.

Only the standard library is used, since this file is vendored into every published model, where it decides whether
the machine that serves is the one that was measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

from compile_stage.core.digest import digest_of
from compile_stage.core.records import record

# Instruction sets that decide which kernels a runtime picks. The full flag list would tie an artifact to a kernel
# version, since new kernels learn to print new flags.
_FEATURES = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


@record
class Hardware:
    """What decides speed and kernel choice on this machine.

    Attributes:
        machine: `x86_64`, `aarch64`, ...
        cpu: Model name as the operating system gives it.
        features: The instruction sets that runtimes choose kernels by.
        cores: Logical CPUs that this process may use.
        accelerators: `name (driver version)` of each GPU, empty without one.
    """

    system: str
    machine: str
    cpu: str
    features: tuple[str, ...]
    cores: int
    accelerators: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Short readable identity: `x86_64-1a2b3c4d5e6f7081`. Equal fingerprints mean that numbers may be compared."""
        return f"{self.machine}-{digest_of(self)[7:23]}"

    def kind_for(self, device: str) -> tuple[object, ...]:
        """What decides which kernels run on a target's device, and so the answers: not the CPU's model and the number
        of cores, which change the speed alone, and for `cpu` no accelerator."""
        return self.system, self.machine, self.features, self.accelerators if device != "cpu" else ()

    @property
    def multiplies_bf16(self) -> bool:
        """True where the CPU has instructions for products of bfloat16."""
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(self.features))

    @property
    def multiplies_fp16(self) -> bool:
        """True where the CPU has matrix instructions for float16. AVX512-FP16 alone doesn't count: OpenVINO 2026.4.1
        runs float16 on it 1.4 times slower than float32 (ResNet-50, benchmarks/float_rest.py)."""
        return "amx_fp16" in self.features

    @property
    def sums_saturate(self) -> bool:
        """True where products of 8-bit integers are summed in 16 bits, which overflow: x86 without VNNI (`pmaddubsw`).
        Weights of 7 bits are safe there."""
        return self.machine in ("x86_64", "AMD64") and not {"avx512_vnni", "avx_vnni", "amx_int8"} & set(self.features)

    def refuse(self, wanted: dict[str, str]) -> str | None:
        """None when this machine has what a target asks for, or the first thing that it lacks. `without` names features
        that it must not have."""
        for key, value in wanted.items():
            if key == "without":
                if held_words := sorted(set(value.casefold().split()) & {word.casefold() for word in self.features}):
                    return f"the target wants a machine without {' '.join(held_words)}, which this machine has"
                continue
            have = getattr(self, key, None)
            if have is None:
                return (
                    f"a target can't ask for hardware {key!r}; it can for: fingerprint, system, machine, cpu, "
                    "features, without, cores, accelerators"
                )
            words = value.split() if isinstance(have, tuple) else [value]
            held = " ".join(have) if isinstance(have, tuple) else str(have)
            for word in words:
                # Names are searched; of all else a part is another thing: avx is not avx2, 2 cores are not 32.
                whole = held.casefold() if key in ("cpu", "accelerators") else held.casefold().split()
                if word.casefold() not in whole:
                    return f"the target wants {key} {word!r}, this machine has {held or 'none'!r}"
        return None


@cache
def hardware() -> Hardware:
    """This machine, read once."""
    cpu, features = _cpu()
    return Hardware(
        system=platform.system(),
        machine=platform.machine(),
        cpu=cpu,
        features=features,
        cores=available_cores(),
        accelerators=_gpus(),
    )


def usable_cores() -> list[int]:
    """The numbers of the logical CPUs that the calling thread may use, in order; empty where the system has no affinity
    (macOS, Windows)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def available_cores() -> int:
    """Logical CPUs that this process may use."""
    return len(usable_cores()) or os.cpu_count() or 1


def python_version() -> str:
    """`3.11.7`."""
    return ".".join(map(str, sys.version_info[:3]))


def _cpu() -> tuple[str, tuple[str, ...]]:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
        flags = set((fields.get("flags") or fields.get("features") or "").split())
        name = fields.get("model name") or f"{fields.get('cpu implementer', '')} {fields.get('cpu part', '')}".strip()
        return name or platform.processor(), tuple(f for f in _FEATURES if f in flags)
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor(), ()
    return platform.processor(), ()


def _gpus() -> tuple[str, ...]:
    listed = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return tuple(
        f"{name.strip()} (driver {driver.strip()})"
        for name, _, driver in (line.partition(",") for line in listed.splitlines() if "," in line)
    )


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
