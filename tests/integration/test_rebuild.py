"""`verify --rebuild`: a published version made again from its source by the command line, and its bytes compared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command_line

from compile_stage import api
from compile_stage.core.digest import digest_file, digest_tree
from compile_stage.serving.manifest import sealed

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# OpenVINO writes fp32 by the code that writes int8, from the graph that ort-fp32 has.
TARGETS = {
    "ort-fp32": "backends: [onnxruntime], precisions: [fp32]",
    "ort-int8": "backends: [onnxruntime], precisions: [int8]",
    "ov-int8": "backends: [openvino], precisions: [int8]",
}


def write_wide_net(folder: Path) -> Path:
    """`folder/wide-net`, x [batch, 64] → y [batch, 16], whose int8 form is much smaller; and 64 samples."""
    import mlflow
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((64, 256)) / 8, rng.standard_normal((256, 16)) / 16
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h"], name="fc1"),
            helper.make_node("Relu", ["h"], ["r"], name="act"),
            helper.make_node("MatMul", ["r", "w2"], ["y"], name="fc2"),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])],
        [numpy_helper.from_array(w.astype(np.float32), n) for w, n in ((first, "w1"), (second, "w2"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    mlflow.onnx.save_model(model, str(folder / "wide-net"), pip_requirements=["onnx"])
    np.savez(folder / "data.npz", x=rng.standard_normal((64, 64)).astype(np.float32))
    return folder / "wide-net"


Published = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Gives the folder of the version that was published for a target, which is made when it is first asked for: a run
    of one takes 4 CPU seconds, of all three 14. Source and samples stay where they are."""
    folder = tmp_path_factory.mktemp("rebuilt")
    source, policy = write_wide_net(folder), folder / "policy.yaml"
    targets = "".join(f"  {name}: {{device: cpu, threads: 1, {keys}}}\n" for name, keys in TARGETS.items())
    policy.write_text(
        f"""\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: test
owner: tests
report:
  profile: false
data:
  validation: {{source: "file:{folder / "data.npz"}", max_samples: 64}}
  calibration: {{source: "file:{folder / "data.npz"}", max_samples: 64}}
targets:
{targets}
tolerances: {{int8: {{cosine: 0.95, snr_db: 10}}}}
performance: {{min_speedup: null}}
select: {{prefer: size}}
fallback: {{mixed_precision: false}}
budget: {{measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}}
"""
    )

    @cache
    def publish(name: str) -> Path:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("COMPILE_STAGE_CACHE", str(folder / "cache"))
            result = api.run(f"folder:{source}", policy, out=folder / name, targets=[name])
        assert result.exit_code == 0, result.problem
        (target,) = result.targets
        assert target.receipt is not None
        assert target.winner is not None
        assert target.winner.job.scheme.precision == name.partition("-")[2]
        return Path(target.receipt.uri.removeprefix("folder:"))

    return publish


def rebuild(version: Path) -> subprocess.CompletedProcess[str]:
    return command_line("verify", f"folder:{version}", "--rebuild", "--no-revalidate")


def copied(version: Path, folder: Path) -> Path:
    return Path(shutil.copytree(version, folder / "net-compiled" / "1"))


def seal_again(version: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Write digests, manifest and tags anew, as a writer of the registry can."""
    data, record = version / "model" / "data", version / "version.json"
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["artifact"]["digest"] = digest_tree(data / "artifact")
    manifest["files"] = {f"artifact/{p.name}": digest_file(p) for p in (data / "artifact").iterdir()}
    change(manifest)
    (data / "manifest.json").write_text(json.dumps(sealed(manifest)))
    written = json.loads(record.read_text())
    named = {"source": manifest["source"]["uri"], "source_digest": manifest["source"]["digest"]}
    named |= {"digest": digest_tree(data), "hardware": manifest["fingerprint"]}
    written["tags"] |= {f"compile_stage.{name}": value for name, value in named.items()}
    record.write_text(json.dumps(written))


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_source_gives_the_same_bytes_again(target: str, published: Published) -> None:
    """Broken: an honest version could not be told from a forged one."""
    # A process of its own: the order of a set, and so perhaps the bytes, differs from process to process.
    command = [sys.executable, "-m", "compile_stage", "verify", f"folder:{published(target)}", "--rebuild"]
    done = subprocess.run(
        [*command, "--no-revalidate"], capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("rebuilt_graph", "rebuilt_artifact"):
        assert f"passed  {check}" in done.stdout
    assert "verified: folder:" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("target", "file"), [("ort-int8", "model.onnx"), ("ov-int8", "model.bin")])
def test_weights_that_were_changed_and_sealed_again_are_found(
    target: str, file: str, published: Published, tmp_path: Path
) -> None:
    """Broken: who may write to the registry could change weights a little, write all digests anew, and every check by
    digests and tolerances would hold."""
    version = copied(published(target), tmp_path)
    weights = version / "model" / "data" / "artifact" / file
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    seal_again(version)
    digests = command_line("verify", f"folder:{version}", "--no-revalidate")
    assert digests.returncode == 0  # all of it agrees with itself
    done = rebuild(version)
    assert done.returncode == 7, done.stdout + done.stderr
    assert f"artifact/{file}: {'onnxruntime' if file == 'model.onnx' else 'openvino'} writes other bytes" in done.stdout
    assert "NOT verified" in done.stdout


def test_a_graph_of_another_model_is_found(published: Published, tmp_path: Path) -> None:
    """Broken: the manifest could name a good source beside the artifact of another graph."""
    version = copied(published("ort-fp32"), tmp_path)
    seal_again(version, lambda manifest: manifest["artifact"].update(made_from="sha256:" + "0" * 64))
    done = rebuild(version)
    assert done.returncode == 7, done.stdout + done.stderr
    assert f"and sha256:{'0' * 64} was compiled" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("change", "says", "mends"),
    [
        (
            lambda m: m["artifact"]["toolchain"].update(onnxruntime="1.0.0"),
            "onnxruntime 1.0.0 there",
            "pip install onnxruntime==1.0.0",
        ),
        (lambda m: m.update(fingerprint="aarch64-0"), "the machine aarch64-0 there", "where it was made (aarch64-0)"),
        (lambda m: m.pop("made_by"), "did not record its own version", "where it was made"),
    ],
)
def test_other_versions_and_machines_can_not_tell(
    change: Callable[[dict[str, Any]], None], says: str, mends: str, published: Published, tmp_path: Path
) -> None:
    """Broken: bytes that another version of a compiler writes would be called a forgery, or a forgery honest."""
    version = copied(published("ort-fp32"), tmp_path)
    seal_again(version, change)
    if "pip" in mends:
        assert rebuild(version).returncode == 0  # the bytes are the same, whatever is said of versions
    weights = version / "model" / "data" / "artifact" / "model.onnx"
    weights.write_bytes(weights.read_bytes() + b"\x3a\x00")  # an empty field of the file format's own
    seal_again(version)
    done = rebuild(version)
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "can't be known: artifact/model.onnx differs, and so does what made it: " in said
    assert says in said
    assert mends in said


def test_a_source_that_is_gone_or_another_one_is_said(published: Published, tmp_path: Path) -> None:
    """Broken: a version whose source nobody has would pass, or end in a traceback."""
    version = copied(published("ort-fp32"), tmp_path)
    seal_again(version, lambda manifest: manifest["source"].update(uri=f"folder:{tmp_path}/nowhere"))
    gone = rebuild(version)
    assert gone.returncode == 4, gone.stdout + gone.stderr
    assert "nowhere" in gone.stderr
    version = copied(published("ort-fp32"), tmp_path / "other")
    seal_again(version, lambda manifest: manifest["source"].update(digest="sha256:other"))
    other = rebuild(version)
    assert other.returncode == 7, other.stdout + other.stderr
    assert "and was sha256:other" in other.stderr
