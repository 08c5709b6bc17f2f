"""The hardware fingerprint."""

from __future__ import annotations

from dataclasses import replace

from compile_stage.core.environment import Hardware, hardware

MACHINE = Hardware(system="Linux", machine="x86_64", cpu="Some CPU", features=("avx2", "avx512_vnni"), cores=4)


def test_whatever_decides_speed_changes_the_fingerprint() -> None:
    """Broken: numbers from one machine would be trusted on another."""
    others = [
        replace(MACHINE, cpu="Other CPU"),
        replace(MACHINE, features=("avx2",)),
        replace(MACHINE, cores=2),
        replace(MACHINE, accelerators=("GPU (driver 1)",)),
        replace(MACHINE, machine="aarch64"),
    ]
    prints = {machine.fingerprint for machine in [MACHINE, *others]}
    assert len(prints) == len(others) + 1


def test_a_target_that_wants_other_hardware_is_told_what_is_lacking() -> None:
    """Broken: a job would be measured on a machine that the target does not mean."""
    assert MACHINE.refuse({"machine": "x86_64", "features": "avx512_vnni avx2"}) is None
    assert MACHINE.refuse({"features": "amx_int8"}) == (
        "the target wants features 'amx_int8', this machine has 'avx2 avx512_vnni'"
    )
    # Part of a word is another thing.
    assert MACHINE.refuse({"features": "avx"}) is not None
    assert MACHINE.refuse({"features": "AVX2"}) is None
    assert replace(MACHINE, cores=32).refuse({"cores": "2"}) is not None
    assert MACHINE.refuse({"cores": "4"}) is None
    assert MACHINE.refuse({"machine": "x86"}) is not None
    assert MACHINE.refuse({"cpu": "some"}) is None
    assert (
        replace(MACHINE, accelerators=("NVIDIA H200 (driver 580.1)",)).refuse({"accelerators": "nvidia h200"}) is None
    )
    assert "can't ask for hardware 'colour'" in (MACHINE.refuse({"colour": "red"}) or "")


def test_this_machine_is_read_once_and_whole() -> None:
    """Broken: fingerprints would differ from call to call."""
    assert hardware() is hardware()
    assert hardware().cores >= 1
    assert hardware().machine
