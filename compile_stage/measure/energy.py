"""Energy that the machine used, where its counters can be read: RAPL of the processor, NVML of NVIDIA GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class EnergyMeter:
    """Counters of energy, read before and after.

    Args:
        device: Of the target; only of `cuda` GPUs are counted too.
        powercap: Folder of the kernel's power capping framework.

    Attributes:
        source: What is read, or why nothing is.
    """

    def __init__(self, device: str, powercap: Path = _POWERCAP) -> None:
        self._zones, why = _zones(powercap)
        self._gpus, why_not_gpus = _gpus() if device == "cuda" else (None, "")
        parts = [f"RAPL ({', '.join(sorted(self._zones))})"] if self._zones else []
        parts += ["NVML"] if self._gpus is not None else []
        self.source = " and ".join(parts) or "; ".join(filter(None, ("not measured: " + why, why_not_gpus)))
        if device == "cuda" and self._gpus is None and self._zones:
            self.source += f"; GPUs not measured: {why_not_gpus}"

    def read(self) -> Mapping[str, float] | None:
        """Counter → joules so far; None where nothing can be read."""
        found = {}
        for name, zone in self._zones.items():
            found[name] = int((zone / "energy_uj").read_text(encoding="utf-8")) / 1e6
        if self._gpus is not None:
            found |= self._gpus.read()
        return found or None

    def between(self, before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> float | None:
        """Joules from one reading to the next. A counter of RAPL begins again at 0 at its largest value, which takes
        minutes at least; once is seen."""
        if before is None or after is None:
            return None
        joules = 0.0
        for name, value in after.items():
            used = value - before[name]
            if used < 0 and name in self._zones:
                used += int((self._zones[name] / "max_energy_range_uj").read_text(encoding="utf-8")) / 1e6
            joules += used
        return joules


def _zones(powercap: Path) -> tuple[dict[str, Path], str]:
    """The packages' zones by their names; those below them are parts of them."""
    if not powercap.is_dir():
        return {}, f"there is no {powercap}, as in most virtual machines and containers"
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            name = (zone / "name").read_text(encoding="utf-8").strip()
            int((zone / "energy_uj").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if name.startswith("package"):
            found[name] = zone
    return found, "" if found else f"no counter of RAPL below {powercap} can be read; the kernel lets root read them"


class _Nvml:
    def __init__(self, library: ctypes.CDLL, devices: list[ctypes.c_void_p]) -> None:
        self._library, self._devices = library, devices

    def read(self) -> dict[str, float]:
        found = {}
        for number, device in enumerate(self._devices):
            millijoules = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
                found[f"gpu {number}"] = millijoules.value / 1e3
        return found


def _gpus() -> tuple[_Nvml | None, str]:
    try:
        library = ctypes.CDLL(_NVML)
    except OSError:
        return None, f"there is no {_NVML}"
    count = ctypes.c_uint()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None, "NVML can't be asked"
    devices = []
    for number in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(device)) == 0:
            devices.append(device)
    nvml = _Nvml(library, devices)
    return (nvml, "") if nvml.read() else (None, "the GPU has no counter of energy")
