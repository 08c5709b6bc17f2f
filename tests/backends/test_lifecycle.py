"""The life of every installed backend, third parties' too: it declares, refuses and plans; compiles, opens and runs;
and serves from what is published.

What is special about one backend is tested in its own file, and the whole contract by the kit (tests/conformance).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json, digest_file
from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Backend
from compile_stage.core.records import Target
from compile_stage.serving.saving import copy_loader
from compile_stage.testing import Case, models
from compile_stage.testing.comparing import RELATIVE_ERROR, off

SLOW = ("executorch", "inductor", "iree", "litert", "tvm", "xla")
"""Compilers that take tens of seconds: with --compilers, as CI does in a job for each."""

# A word of the reason that people read, for what users ask most often.
LACKS = {
    ("executorch", "fp16"): "float16",
    ("litert", "bf16"): "bfloat16",
    ("torchscript", "int8"): "types it was traced in",
}

PLAN = """
import json, sys
from compile_stage.core import plugins
from compile_stage.core.records import Target
backend = plugins.load("backends", sys.argv[1])
device = "cpu" if "cpu" in backend.capabilities.devices else backend.capabilities.devices[0]
target = Target(name="plan", device=device)
asked = Target(name="plan", device=device, options={backend.name: {"no_such_option": True}})
precisions = plugins.precisions()
print(json.dumps({
    "here": backend.refuse_target(target),
    "option": backend.refuse_target(asked),
    "device": backend.refuse_target(Target(name="plan", device="no-such-device")),
    "elsewhere": [p for p in precisions if backend.schemes(Target(name="plan", device="no-such-device"), p)],
    "schemes": {p: [scheme.precision for scheme in backend.schemes(target, p)] for p in precisions},
    "lacks": {p: backend.capabilities_for(target).why_lacking(p) for p in precisions},
    "loaded": sorted(sys.modules),
}))
"""

SERVE = """
import sys
code, blocked, name, text, inputs = sys.argv[1:]
sys.path.insert(0, code)
for absent in blocked.split(","):
    sys.modules[absent] = None
import json
import numpy as np
from compile_stage import flavor
from compile_stage.core.digest import load_record
from compile_stage.core.records import Artifact
assert flavor.__file__.startswith(code), flavor.__file__
artifact = load_record(Artifact, text)
batch = {spec.name: np.load(f"{inputs}/{spec.name}.npy") for spec in artifact.signature.inputs}
with flavor._backend(name, {}).open(artifact, 1) as session:
    print(json.dumps({output: array.tolist() for output, array in session.run(batch).items()}))
"""

HEAVY = ("onnx", "nncf", "torch", "torchax", "sklearn", "pandas", "compile_stage.precision", "compile_stage.testing")
"""What a serving environment need not have, unless a backend opens with it."""

names = pytest.mark.parametrize("name", plugins.names("backends"))


@names
def test_it_plans_and_refuses_without_its_packages(name: str) -> None:
    """Broken: `plan` would take the seconds that importing a compiler takes, ignore a typo in a policy, compile
    silently for a device that nobody serves, or drop a precision without saying why."""
    backend = plugins.load("backends", name)
    done = subprocess.run([sys.executable, "-c", PLAN, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert not set(said["loaded"]) & set(backend.requires)
    assert "no-such-device" in said["device"]
    assert "no_such_option" in said["option"] or said["option"] == said["here"]  # such as: this machine has no GPU
    for precision, schemes in said["schemes"].items():
        assert set(schemes) <= {precision}
        assert not schemes or precision in backend.capabilities.precisions
        assert schemes or said["lacks"][precision], f"nobody learns why {name} has no {precision}"
        assert LACKS.get((name, precision), "") in said["lacks"][precision]


NOT_SERVED = {"onnxruntime_attention", "onnxruntime_decoder", "onnxruntime_products"}
"""They rewrite the graph of a language model when it is compiled. Nobody profiles where a model is served, either."""


@names
def test_every_file_of_it_counts_for_the_key_and_is_published(name: str, tmp_path: Path) -> None:
    """Broken: an edit of a second file would leave old artifacts in force, or a published model could not be opened."""
    module = sys.modules[type(plugins.load("backends", name)).__module__]
    main = Path(str(module.__file__))
    files = sorted([main, *main.parent.glob(f"{main.stem}_*.py")])
    counted = plugins._identity("backends", name)
    for file in files:
        assert counted["plug-in file" if file == main else f"plug-in file {file.name}"] == digest_file(file)
    copy_loader(name, tmp_path)
    published = sorted(path.name for path in (tmp_path / "backends").iterdir())
    served = [file.name for file in files if file.stem not in NOT_SERVED and not file.stem.endswith("_profile")]
    assert published == sorted(["__init__.py", *served])


@names
def test_it_compiles_opens_runs_and_serves(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Broken: a published model would need the compiler's packages, or answer otherwise where only its runtime is."""
    backend = plugins.load("backends", name)
    target = _usable_target(backend, request)
    model, samples = models.conv_net(tmp_path / "model")
    case = Case(backend, model, samples, backend.schemes(target, "fp32")[0], tmp_path / "work", target)
    with contextlib.closing(case):
        artifact, batch = case.artifact, case.batch(1)
        if artifact.not_runnable_here:
            with pytest.raises(CompileStageError, match="can't be run here"), backend.open(artifact, 1):
                pass
            return
        with backend.open(artifact, 1) as session:
            here = session.run(batch)
        for output, wanted in case.expected(batch).items():
            assert off(output, here[output], wanted, RELATIVE_ERROR["fp32"]) is None
        for output, served in _serve(backend, canonical_json(artifact), batch, tmp_path).items():
            np.testing.assert_allclose(np.array(served, here[output].dtype), here[output], atol=1e-6)


def _usable_target(backend: Backend, request: pytest.FixtureRequest) -> Target:
    device = "cpu" if "cpu" in backend.capabilities.devices else backend.capabilities.devices[0]
    target = Target(name="lifecycle", device=device, batch_sizes=(1, 3), threads=1)
    if (reason := plugins.missing(backend) or backend.refuse_target(target)) is not None:
        pytest.skip(reason)
    if plugins.interpreter_of(backend.name):
        pytest.skip("it runs in a toolchain of its own: tests/conformance drives it there")
    if backend.name in SLOW and not request.config.getoption("--compilers"):
        pytest.skip("builds with a slow compiler: run pytest --compilers, as CI does in a job of its own")
    return target


def _serve(backend: Backend, artifact: str, batch: Any, folder: Path) -> dict[str, Any]:
    """The outputs of a process that has the published code only, and none of the packages that opening does not
    need."""
    code, inputs = folder / "published", folder / "inputs"
    copy_loader(backend.name, code / "compile_stage")
    inputs.mkdir()
    for key, array in batch.items():
        np.save(inputs / f"{key}.npy", array)
    needed = {module.partition(".")[0] for module in backend.capabilities.opens_with or backend.requires}
    blocked = ",".join(module for module in HEAVY if module not in needed)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(code), blocked, backend.name, artifact, str(inputs)],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outputs
