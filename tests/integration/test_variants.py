"""One version with an artifact for each kind of machine. This machine is said to have other instruction sets than it
has: to the run as `core.run_context` gives it the machine, and to what loads the version as /proc/cpuinfo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from signing_keys import make_key

from compile_stage import api, flavor
from compile_stage.core import run_context
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.environment import Hardware, hardware
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.plugins import registry_for
from compile_stage.core.records import RunResult, TargetResult
from compile_stage.serving.manifest import read_manifest
from compile_stage.serving.variants import as_variant, choose

pytestmark = [
    pytest.mark.usefixtures("known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BASE = ("sse4_2", "avx", "fma", "f16c")
VNNI = replace(hardware(), features=(*BASE[:2], "avx2", *BASE[2:], "avx512f", "avx512_vnni", "avx512_bf16"))
AVX2 = replace(hardware(), features=(*BASE[:2], "avx2", *BASE[2:]))
STRANGER = replace(hardware(), features=("sse4_2",))
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: test
owner: tests
data: {{validation: {{source: "file:{data}", max_samples: 64}}, calibration: {{source: "file:{data}"}}}}
report: {{profile: false}}
targets:
  x86-vnni:
    family: x86
    backends: [onnxruntime]
    precisions: [{vnni}]
    hardware: {{features: avx512_vnni}}
    tolerances: {{{without}}}
  x86-avx2:
    family: x86
    backends: [onnxruntime]
    precisions: [fp32]
    hardware: {{features: avx2, without: avx512_vnni}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}}
publish: {{elsewhere: {elsewhere}}}
promote: {{alias: "{{target}}-prod", max_slowdown: 100}}
"""
Run = Callable[[Hardware], RunResult]


MASK = """
import sys
from pathlib import Path
_read = Path.read_text
def read_text(self, *args, **kwargs):
    lines = _read(self, *args, **kwargs).splitlines()
    if str(self) == "/proc/cpuinfo":
        lines = ["flags : " + sys.argv[3] if line.startswith("flags") else line for line in lines]
    return "\\n".join(lines)
Path.read_text = read_text
"""
"""Makes /proc/cpuinfo name the features of the third argument, and no others."""


LOAD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import mlflow.pyfunc
config = json.loads(sys.argv[2])
try:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        loaded = mlflow.pyfunc.load_model(sys.argv[1], model_config=config or None)
except Exception as error:
    print(json.dumps({"error": getattr(error, "problem", str(error)), "fix": getattr(error, "fix", "")}))
else:
    model = loaded.get_raw_model()
    y = model.run({"x": np.ones((2, 8), np.float32)})["y"]
    print(json.dumps({"variant": model.variant, "why": model.variant_reason, "shape": y.shape,
                      "precision": model.manifest["scheme"]["precision"],
                      "warned": " ".join(str(one.message) for one in warned)}))
"""


def load_on(features: tuple[str, ...], version: Path, tmp_path: Path, **config: Any) -> dict[str, Any]:
    """What `mlflow.pyfunc.load_model` does in a new process whose CPU has these features."""
    script = tmp_path / "load.py"
    script.write_text(MASK + LOAD)
    command = [sys.executable, script, version, json.dumps(config), " ".join(features)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


SIDE_BY_SIDE = """
import sys, time
from dataclasses import replace
from pathlib import Path
from compile_stage import api
from compile_stage.core import run_context
from compile_stage.core.environment import hardware
from compile_stage.registry.folder import FolderRegistry

source, policy, target, other, features, meet = sys.argv[1:]
here = replace(hardware(), features=tuple(features.split()))
run_context.hardware = lambda: here
push = FolderRegistry.push
def push_together(self, *args):
    Path(meet, target).touch()
    until = time.monotonic() + 240
    while not Path(meet, other).exists() and time.monotonic() < until:
        time.sleep(0.05)
    return push(self, *args)
FolderRegistry.push = push_together
result = api.run(source, Path(policy), out=Path(meet, f"out-{target}"), targets=[target])
assert result.exit_code == 0, result.problem
"""
"""A run of one target, which publishes once another run has looked for earlier versions too."""


@contextmanager
def on(which: Hardware) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as here:
        here.setattr(run_context, "hardware", lambda: which)
        yield


@pytest.fixture
def run(small_model: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """The stage on a machine, with the policy above."""

    def on_machine(which: Hardware, *, vnni: str = "int8", elsewhere: str = "refuse") -> RunResult:
        policy = tmp_path / "policy.yaml"
        without = "" if vnni == "fp32" else "fp32: null"
        given = {"vnni": vnni, "without": without, "elsewhere": elsewhere}
        policy.write_text(POLICY.format(data=tmp_path / "data.npz", **given))
        with on(which):
            return api.run(f"folder:{small_model}", policy, out=tmp_path / "out")

    return on_machine


def lead(result: RunResult) -> TargetResult:
    (target,) = (target for target in result.targets if target.receipt is not None)
    return target


def files_of(result: RunResult, into: Path) -> Path:
    receipt = lead(result).receipt
    assert receipt is not None
    return registry_for(receipt.uri).fetch(receipt.uri, into)


@pytest.mark.slow
def test_a_second_machine_adds_its_variant_and_each_machine_loads_its_own(
    run: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Broken: a fleet of two kinds of machine could not share one alias, or a machine would load what was proven on
    another kind."""
    first = run(VNNI)
    assert first.exit_code == 0, first.problem
    alone = lead(first)
    assert alone.policy.target.name == "x86-vnni"
    assert alone.receipt is not None
    assert alone.receipt.promoted_to == "x86-prod"
    assert {refusal.target for refusal in first.refused} >= {"x86-avx2"}

    second = run(AVX2)
    assert second.exit_code == 0, second.problem
    both = lead(second)
    assert both.receipt is not None
    assert both.receipt.uri != alone.receipt.uri
    assert both.receipt.promoted_to == "x86-prod"
    assert any(f"taken over from {alone.receipt.uri}" in note for note in second.notes)
    ids = [f"x86-vnni--{VNNI.fingerprint}", f"x86-avx2--{AVX2.fingerprint}"]
    assert both.receipt.tags["compile_stage.variants"] == ", ".join(sorted(ids))
    # The same runs again add nothing.
    for again in (run(AVX2), run(VNNI)):
        receipt = lead(again).receipt
        assert receipt is not None
        assert (receipt.uri, receipt.created) == (both.receipt.uri, False)

    version = files_of(second, tmp_path / "version")
    loaded = [load_on(one.features, version, tmp_path) for one in (VNNI, AVX2)]
    assert [one["variant"] for one in loaded] == ids
    assert [one["precision"] for one in loaded] == ["int8", "fp32"]
    assert [one["shape"] for one in loaded] == [[2, 4], [2, 4]]
    assert "the only one proven here: proven on" in loaded[0]["why"]
    assert f"passed over: {ids[1]}" in loaded[0]["why"]
    refused = load_on(STRANGER.features, version, tmp_path)
    assert "none of its variants is proven for this machine" in refused["error"]
    assert all(one in refused["error"] for one in ids)
    assert "compile-stage validate" in refused["fix"]
    assert "portable-fp32" in refused["fix"]
    # Other cores and another CPU of the same instruction sets are served; a failed demand by name is not.
    whole = read_manifest(version)
    elsewhere = replace(AVX2, cpu="another", cores=AVX2.cores + 4)
    chosen = choose(whole, version, machine=elsewhere)
    assert (chosen.manifest["variant"], chosen.doubt) == (ids[1], "")
    assert "the same instruction sets" in chosen.reason
    with pytest.raises(IntegrityError, match="is not proven for this machine"):
        choose(whole, version, machine=elsewhere, wanted=ids[0])
    with pytest.raises(UsageError, match="there is no variant 'x86'"):
        choose(whole, version, wanted="x86")
    with on(AVX2):
        found = api.verify(both.receipt.uri, revalidate=False)
    assert found.passed, found
    for which, one in ((VNNI, ids[0]), (AVX2, ids[1])):
        with on(which):
            exported = api.export_version(both.receipt.uri, "triton", tmp_path / f"export-{one}", check=False)
        assert exported.artifact_digest == as_variant(read_manifest(version), one)["artifact"]["digest"]
        assert f"Of its variants that is {one}" in exported.said

    # Under another policy nothing is proven for the other machine yet: it would be left without an artifact.
    third = lead(run(VNNI, elsewhere="portable-fp32")).receipt
    assert third is not None
    assert third.created
    assert third.promoted_to is None
    assert f"'x86-prod' stays at {both.receipt.uri}, which is proven for x86-avx2" in third.note


@pytest.mark.slow
def test_machines_that_publish_at_the_same_time_join_their_variants_and_sign_them(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: of two nodes of a cluster, each of which has its part of the targets, the later one would publish a
    version without the other's variant, and move the alias to it: the other's machines would have no artifact."""
    policy, meet = tmp_path / "policy.yaml", tmp_path / "meet"
    signed = "compliance: {require_signature: true, trusted_keys: [keys/ci.pub]}\n"
    policy.write_text(POLICY.format(data=tmp_path / "data.npz", vnni="fp32", without="", elsewhere="refuse") + signed)
    key, public = make_key(tmp_path / "keys")
    (secret := tmp_path / "secret").write_bytes(b"s" * 32)
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", str(key))
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(secret))
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(public))
    meet.mkdir()
    (script := tmp_path / "side_by_side.py").write_text(SIDE_BY_SIDE)
    machines = {"x86-vnni": ("x86-avx2", VNNI), "x86-avx2": ("x86-vnni", AVX2)}
    begun = [
        subprocess.Popen(
            [sys.executable, script, f"folder:{small_model}", policy, target, other, " ".join(which.features), meet],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for target, (other, which) in machines.items()
    ]  # fmt: skip
    for one in begun:
        _, said = one.communicate()
        assert one.returncode == 0, said[-2000:]

    name = f"folder:{small_model.parent / 'compiled-models' / f'{small_model.name}-compiled'}"
    registry = registry_for(name)
    now = registry.current(name, "x86-prod")
    assert now is not None
    ids = sorted(f"{target}--{which.fingerprint}" for target, (_, which) in machines.items())
    assert now.tags["compile_stage.variants"] == ", ".join(ids)
    # What each published before it knew of the other is not what a later run starts from.
    assert registry.find_family(name, now.tags["compile_stage.family_key"]) == (now,)
    held = sorted(registry.published(f"{name}/{version}").tags["compile_stage.variants"] for version in (1, 2))
    assert held == sorted(ids)
    found = api.verify(now.uri, revalidate=False)
    assert found.passed, found
    with on(AVX2):
        assert api.promote(now.uri, "by-hand").promoted_to == "by-hand"


@pytest.mark.slow
def test_a_file_is_stored_once_and_what_runs_anywhere_is_loaded_where_the_policy_says_so(
    run: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Broken: weights would be stored once for each kind of machine; or a machine that nothing is proven for would load
    nothing although the policy says what, or load it without a word."""
    run(VNNI, vnni="fp32", elsewhere="portable-fp32")
    result = run(AVX2, vnni="fp32", elsewhere="portable-fp32")
    assert result.exit_code == 0, result.problem
    version = files_of(result, tmp_path / "version")
    whole = read_manifest(version)
    assert sorted(whole["variants"]) == ["portable", f"x86-avx2--{AVX2.fingerprint}", f"x86-vnni--{VNNI.fingerprint}"]
    data = version / "data"
    digests = [digest_file(data / name) for name in list_tree(data) if name != "manifest.json"]
    assert len(digests) == len(set(digests)) == 1, list_tree(data)

    vnni = load_on(VNNI.features, version, tmp_path)
    assert vnni["variant"] == f"x86-vnni--{VNNI.fingerprint}"
    anywhere = load_on(STRANGER.features, version, tmp_path)
    assert anywhere["variant"] == "portable"
    assert "none of its variants is proven for this machine" in anywhere["warned"]

    # A digest that the manifest does not give is not put together either.
    (file,) = (data / "artifact").glob("*.onnx")
    file.write_bytes(file.read_bytes() + b"\0")
    assert "its digest differs" in load_on(VNNI.features, version, tmp_path)["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_backends", "served_here")
def test_what_was_compiled_for_a_machine_that_is_not_here_is_loaded_once_that_machine_proved_it(
    small_model: Path, tmp_path: Path
) -> None:
    """Broken: a draft would be served that nobody ran, or one that was proven on its machine would never be."""
    mine = hardware()
    builder = replace(mine, features=(*mine.features, "amx_fp16"), cpu="a build machine's")
    policy = tmp_path / "policy.yaml"
    text = POLICY.format(data=tmp_path / "data.npz", vnni="fp32", without="", elsewhere="refuse")
    text = text.replace("hardware: {features: avx512_vnni}", "hardware: {features: amx_fp16}")
    text = text.replace("features: avx2, without: avx512_vnni", f"fingerprint: {mine.fingerprint}")
    policy.write_text(text.replace("[onnxruntime]", "[onnxruntime, fake-cross]", 2))
    with on(builder):
        result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    assert result.exit_code == 0, result.problem
    receipt = lead(result).receipt
    assert receipt is not None
    assert "not proven, compiled on" in " ".join(result.notes)
    draft = "x86-avx2--fake-cross--fp32"
    assert draft in receipt.tags["compile_stage.variants"]
    before = registry_for(receipt.uri).fetch(receipt.uri, tmp_path / "before")
    with pytest.raises(IntegrityError, match="not validated on this machine"):
        flavor.load_model(str(before))

    found = api.validate(receipt.uri)
    assert found.passed, found
    assert f"for the variant {draft}: passed" in found.notes[-1]
    after = registry_for(receipt.uri).fetch(receipt.uri, tmp_path / "after")
    with flavor.load_model(str(after)) as model:
        assert model.variant == draft
        assert "proven on this machine" in model.variant_reason
    assert api.promote(receipt.uri, "edge").promoted_to == "edge"
