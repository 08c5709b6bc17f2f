"""A precision that another distribution brings works from the policy on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.policy.json_schema import json_schema
from compile_stage.policy.load import lint

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}"
MODULE = """\
    from dataclasses import replace

    from compile_stage.backends.onnxruntime import OnnxRuntime
    from compile_stage.core.records import Scheme
    from compile_stage.precision.float16 import Float16


    class Half(Float16):
        name = "house-half"


    class Runtime(OnnxRuntime):
        name = "house-runtime"
        capabilities = replace(OnnxRuntime.capabilities, precisions=("fp32", "house-half", "house-native"))

        def schemes(self, target, precision):
            if precision in ("house-half", "house-native"):
                return (Scheme(precision=precision, name=precision, native=precision == "house-native"),)
            return super().schemes(target, precision)
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with a lowering and a backend, installed for this process and its workers."""
    folder = tmp_path / "site"
    info = folder / "house_precisions-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-precisions\nVersion: 1.0\n")
    entries = {
        "lowerings": "house-half = house_precisions:Half",
        "backends": "house-runtime = house_precisions:Runtime",
    }
    (info / "entry_points.txt").write_text("".join(f"[compile_stage.{g}]\n{line}\n" for g, line in entries.items()))
    (folder / "house_precisions.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(folder))
    plugins.refresh()
    yield
    plugins.refresh()


@pytest.mark.slow
@pytest.mark.usefixtures("house")
def test_a_third_partys_lowering_and_a_backends_own_precision_run_from_the_policy_on(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: whoever writes a lowering can install it, and no policy may name it."""
    limits = "{cosine: 0.9}"
    policy = write_policy(
        "backends: [house-runtime], precisions: [house-half, house-native]",
        f"{FAST}\ntolerances: {{house-half: {limits}, house-native: {limits}}}",
    )
    assert lint([policy]) == []
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    passed = {c.job.scheme.precision: c.verdict.passed for c in result.targets[0].candidates if c.verdict is not None}
    assert passed == {"house-half": True, "house-native": True, "fp32": True}
    enum = json_schema()["$defs"]["Target"]["properties"]["precisions"]["items"]["enum"]
    assert enum[-1] == "house-half"


@pytest.mark.usefixtures("house")
def test_the_nearest_installed_precision_is_suggested(write_policy: Callable[..., Path], small_model: Path) -> None:
    """Broken: a typing error in a plug-in's precision is answered with a list that does not have it."""
    policy = write_policy("precisions: [house-hlf]", "tolerances: {house-natve: {cosine: 0.9}}")
    found = lint([policy])
    assert [problem.rpartition("; ")[2] for problem in found] == [
        "did you mean house-half?",
        "did you mean house-native?",
    ]
    assert all("int4, fp8, house-half, house-native" in problem for problem in found)
