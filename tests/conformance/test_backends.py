"""Every installed backend, here or in a toolchain of its own, through every check of the kit, at every scheme, on real
models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_stage.core import plugins
from compile_stage.core.environment import hardware
from compile_stage.core.records import Target
from compile_stage.testing import Finding, check_backend, models

from . import in_toolchain

SLOW = ("executorch", "inductor", "iree", "litert", "tvm", "xla")
"""Compilers that take tens of seconds for a case of the kit: they are looked at with --compilers, as CI does in a job
for each."""


@pytest.fixture(scope="module", params=plugins.names("backends"))
def backend(request: pytest.FixtureRequest) -> Any:
    found = plugins.load("backends", request.param)
    if (reason := plugins.missing(found) or found.refuse_target(Target(name="conformance"))) is not None:
        pytest.skip(reason)  # such as: it converts for devices that nothing here can run
    return found


def failures(findings: tuple[Finding, ...]) -> list[str]:
    return [f"{finding.case} {finding.check}: {finding.reason}" for finding in findings if not finding.passed]


def demand_time(request: pytest.FixtureRequest, backend: Any) -> None:
    if backend.name in SLOW and not request.config.getoption("--compilers"):
        pytest.skip("builds with a slow compiler: run pytest --compilers, as CI does in a job of its own")


MODELS = [
    pytest.param(make, id=make.__name__, marks=[pytest.mark.slow] if make is models.transformer else [])
    for make in models.ALL
]


@pytest.mark.parametrize("make", MODELS)
def test_backend_conforms(backend: Any, make: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    demand_time(request, backend)
    if (backend.name, make.__name__) == ("openvino", "transformer") and "amx_int8" in hardware().features:
        reason = "OpenVINO 2026.4.1 answers wrongly to its int8 on a CPU with AMX (docs/backends/openvino.md)"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    if plugins.interpreter_of(backend.name):
        findings = in_toolchain.check(backend.name, make.__name__, tmp_path)
    else:
        model, samples = make(tmp_path / "model")
        findings = check_backend(backend, model, samples, tmp_path / "work")
    assert {finding.case.split("/")[1] for finding in findings} >= {"fp32"}, "fp32, the safe floor, was not looked at"
    assert failures(findings) == []


def test_backend_conforms_with_a_fixed_batch(backend: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A model whose export fixed the batch is calibrated, compiled and run at that batch."""
    demand_time(request, backend)
    if plugins.interpreter_of(backend.name):
        findings = in_toolchain.check(backend.name, "conv_net", tmp_path, batch=4)
    else:
        model, samples = models.conv_net(tmp_path / "model", batch=4)
        findings = check_backend(backend, model, samples, tmp_path / "work", precisions=("fp32", "int8"))
    assert failures(findings) == []
