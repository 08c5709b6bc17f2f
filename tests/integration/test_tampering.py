"""Every file, tag and validation of a real published version, tampered with: refused when it is loaded and when it is
promoted, where signatures are required."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command_line
from factories import policy_text
from signing_keys import make_key
from small_net import write_small_net

from compile_stage import api, flavor
from compile_stage.core import run_context
from compile_stage.core.cache import Cache, sealed_entry
from compile_stage.core.digest import digest_file, digest_of, digest_tree
from compile_stage.core.environment import hardware
from compile_stage.core.errors import CompileStageError, GateError, IntegrityError, PolicyError, UsageError
from compile_stage.core.provenance import refuse_code
from compile_stage.core.records import RunResult
from compile_stage.serving.manifest import plain_validation, sealed

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

BODY = """\
tolerances: {fp32: {snr_db: 60}}
performance: {min_speedup: null, max_size_mb: 100}
budget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}
promote: {alias: "{target}-prod"}
compliance: {require_signature: true, trusted_keys: [keys/ci.pub]}
"""
TARGET = "backends: [onnxruntime], precisions: [fp32]"
Write = Callable[..., Path]


OUTPUTS = (
    "tolerances: {{fp32: {{column_spread: 1.5, outputs: {{y: {{column_spread: 0.1}}, z: {{column_spread: {}}}}}}}}}\n"
    "performance: {{min_speedup: null}}"
)


@pytest.fixture(scope="module")
def signed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A run that signed, published and promoted: its folder, with model, policy, keys and registry; and its result."""
    folder = tmp_path_factory.mktemp("signed")
    write_small_net(folder)
    make_key(folder / "keys")
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(folder / "data.npz", TARGET, BODY))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COMPILE_STAGE_CACHE", str(folder / "cache"))
        (folder / "secret").write_bytes(b"s" * 32)
        environment.setenv("COMPILE_STAGE_CACHE_KEY", str(folder / "secret"))
        environment.setenv("COMPILE_STAGE_SIGNING_KEY", str(folder / "keys" / "ci.pem"))
        result = api.run(f"folder:{folder / 'small-net'}", policy, out=folder / "out")
    assert result.exit_code == 0, result.problem
    return folder, result


@pytest.fixture
def published(signed_run: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The folder of a copy of the version that a run published, and its URI. Its signer is trusted."""
    folder, result = signed_run
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to == "cpu-prod"
    name = Path(receipt.uri.removeprefix("folder:")).parent
    shutil.copytree(name, tmp_path / name.name)
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(folder / "keys" / "ci.pub"))
    return tmp_path / name.name / "1", f"folder:{tmp_path / name.name / '1'}"


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    yield "first byte", flipped(content, 0)
    yield "middle byte", flipped(content, len(content) // 2)
    yield "last byte", flipped(content, len(content) - 1)
    yield "cut off", content[:-1]
    yield "appended", content + b"x"
    yield "empty", b""


def means_the_same(content: bytes, damaged: bytes) -> bool:
    """Two spellings of one document do: another last digit of 17 can be the same float."""
    try:
        return content == damaged or bool(json.loads(content) == json.loads(damaged))
    except ValueError:
        return False


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (IntegrityError, GateError):
        return True
    return False


@pytest.mark.slow
def test_each_byte_class_of_each_file_is_refused(published: tuple[Path, str]) -> None:
    """Broken: a file of a published model could be changed by whoever may write to the registry, and be served."""
    version, uri = published
    model = version / "model"
    flavor.load_model(str(model)).close()
    files = [path for path in sorted(model.rglob("*")) if path.is_file() and path.name != "MLmodel"]
    assert {"manifest.json", "model.onnx", "flavor.py", "requirements.txt", "mlbom.cdx.json", "model.sig"} <= {
        path.name for path in files
    }
    accepted = []
    for path in files:
        content = path.read_bytes()
        for name, damaged in damages(content):
            if damaged == content:  # an empty file
                continue
            path.write_bytes(damaged)
            if not refused(lambda: flavor.load_model(str(model)).close()):
                accepted.append((path.relative_to(model).as_posix(), name, "loaded"))
        path.write_bytes(flipped(content, len(content) // 2) if content else b"x")
        if not refused(lambda: api.promote(uri, "other")):
            accepted.append((path.relative_to(model).as_posix(), "middle byte", "promoted"))
        path.unlink()
        if not refused(lambda: flavor.load_model(str(model)).close()):
            accepted.append((path.relative_to(model).as_posix(), "removed", "loaded"))
        path.write_bytes(content)
    assert accepted == []
    flavor.load_model(str(model)).close()
    assert api.promote(uri, "other").promoted_to == "other"


def test_each_line_of_mlmodel_that_is_no_id_is_refused(published: tuple[Path, str]) -> None:
    """Broken: MLmodel, which no signature can be over, could send MLflow to other code or other weights."""
    version, uri = published
    file = version / "model" / "MLmodel"
    lines = file.read_text().splitlines()
    ids = (
        "model_uuid",
        "utc_time_created",
        "mlflow_version",
        "model_size_bytes",
        "model_id",
        "run_id",
        "artifact_path",
    )
    accepted = []
    for number, line in enumerate(lines):
        if line.startswith(ids) or line.rstrip().endswith(("null", "{}")):
            continue
        without = [other for at, other in enumerate(lines) if at != number]
        for changed in (without, [*lines[:number], f"{line}x", *lines[number + 1 :]]):
            file.write_text("\n".join(changed) + "\n")
            if not refused(lambda: flavor.load_model(str(version / "model")).close()):
                accepted.append(line)
    file.write_text("\n".join([*lines, "flavors: {python_function: {loader_module: os, data: data}}"]))
    assert refused(lambda: api.promote(uri, "other"))
    assert accepted == []


@pytest.mark.parametrize(
    "name", ["extra.bin", "code/numpy.py", "data/artifact/more.bin", "signature/other.json", "code/x/__pycache__/y.pyc"]
)
def test_an_added_file_is_refused(published: tuple[Path, str], name: str) -> None:
    """Broken: code could be brought in beside what was signed."""
    version, uri = published
    file = version / "model" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * 32)
    assert refused(lambda: flavor.load_model(str(version / "model")))
    assert refused(lambda: api.promote(uri, "other"))


TAGS = (
    "key", "digest", "source", "source_digest", "policy", "policy_digest", "target", "backend", "precision", "scheme",
    "verdict", "hardware",
)  # fmt: skip


def test_tags_that_contradict_the_files_are_refused(published: tuple[Path, str]) -> None:
    """Broken: dashboards and webhooks would read a verdict, or a policy, that the model does not have."""
    version, uri = published
    record = version / "version.json"
    written = json.loads(record.read_text())
    for tag in TAGS:
        assert f"compile_stage.{tag}" in written["tags"]
        record.write_text(json.dumps({**written, "tags": {**written["tags"], f"compile_stage.{tag}": "sha256:other"}}))
        with pytest.raises(IntegrityError):
            api.promote(uri, "other")
    record.write_text(json.dumps(written))
    api.promote(uri, "other")


def test_who_seals_again_what_he_changed_is_refused(published: tuple[Path, str]) -> None:
    """Broken: digests, manifest and tags written anew so that all agree would pass for what was signed."""
    version, uri = published
    data = version / "model" / "data"
    weights = data / "artifact" / "model.onnx"
    weights.write_bytes(flipped(weights.read_bytes(), 1000))
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["artifact"]["digest"] = digest_tree(data / "artifact")
    manifest["files"]["artifact/model.onnx"] = digest_file(weights)
    (data / "manifest.json").write_text(json.dumps(sealed(manifest)))
    record = json.loads((version / "version.json").read_text())
    record["tags"]["compile_stage.digest"] = digest_tree(data)
    (version / "version.json").write_text(json.dumps(record))
    flavor.check_integrity(version / "model", beside=True)  # all of it agrees with itself
    with pytest.raises(IntegrityError, match="is not what was signed"):
        flavor.load_model(str(version / "model"))
    with pytest.raises(IntegrityError, match="is not what was signed"):
        api.promote(uri, "other")


def test_a_rollback_to_what_is_not_signed_is_refused(published: tuple[Path, str]) -> None:
    """Broken: the tag that says where a rollback goes can be written by any writer, and would lead to any version."""
    version, _ = published
    forged = version.parent / "7"
    shutil.copytree(version, forged)
    shutil.rmtree(forged / "model" / "signature")
    record = json.loads((version / "version.json").read_text())
    record["tags"]["compile_stage.previous.cpu-prod"] = "7"
    (version / "version.json").write_text(json.dumps(record))
    with pytest.raises(IntegrityError, match="it is not signed"):
        api.rollback(f"folder:{version.parent}@cpu-prod")
    assert json.loads((version.parent / "aliases.json").read_text()) == {"cpu-prod": "1"}


def test_a_run_that_can_not_sign_compiles_nothing(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: hours of compiling would end in something that nobody may promote; result.json says that the model
    failed, where nothing was tried; and `plan` says nothing of a run that ends at once."""
    key, _ = make_key(tmp_path / "keys")
    stranger, _ = make_key(tmp_path / "keys", "stranger")
    policy = write_policy(TARGET, BODY)
    plan = api.plan(f"folder:{small_model}", policy)
    assert any("there is no key to sign with (fix: --signing-key KEY" in note for note in plan.notes), plan.notes
    assert plan.exit_code == 0, "a run may be given a key as an option, which who plans need not have"
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", str(stranger))
    plan = api.plan(f"folder:{small_model}", policy)
    assert any("is not trusted, so what this run signs would be refused" in note for note in plan.notes), plan.notes
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", str(key))
    assert not any("as things are, a run ends" in note for note in api.plan(f"folder:{small_model}", policy).notes)
    monkeypatch.delenv("COMPILE_STAGE_SIGNING_KEY")
    with pytest.raises(UsageError, match="there is no key to sign with"):
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "refused"
    with pytest.raises(UsageError, match="is not trusted, so what this run signs would be refused"):
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out", signing_key=stranger)
    assert not list((tmp_path / "out").glob("bundles"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("performance: {min_speedup: null, max_size_mb: 0.0001}", "size_mb is 0.00"),
        ("performance: {min_speedup: 1000}", "speedup was not measured as the policy asks"),
        ("tolerances: {fp32: {psnr_db: 300}}\nperformance: {min_speedup: null}", "psnr_db was not measured"),
        ("performance: {min_speedup: null, max_size_mb: 50}", ""),
        (OUTPUTS.format(0.2), ""),  # in the general limit's place
        (OUTPUTS.format("null"), "column_spread of output 'z'"),
    ],
)
def test_a_policy_of_the_verifiers_is_not_the_manifests(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str], body: str, says: str
) -> None:
    """Broken: whoever loosens the gates of a run would have them believed by everybody who verifies it."""
    (folder, _), (_, uri) = signed_run, published
    policy = folder / "verifiers.yaml"
    policy.write_text(policy_text(folder / "data.npz", TARGET, body))
    found = api.verify(uri, policy_path=policy, revalidate=False)
    assert found.passed is (not says), found
    assert any(says in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("data.min_samples=9999", "samples, fewer than 9999 (data.min_samples)"),
        ("targets.cpu.batch_sizes=[1, 77]", "it was not validated at the policy's batch size 77"),
        ("data.robustness.factor=1.0", ""),
    ],
)
def test_the_samples_and_sizes_of_a_verifiers_policy_count(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str], asked: str, says: str
) -> None:
    """Broken: a version that was proven on fewer samples than the policy asks for, or at other batch sizes, is said to
    be verified by it, since the validation is not run again."""
    (folder, _), (_, uri) = signed_run, published
    found = api.verify(uri, policy_path=folder / "policy.yaml", sets=[asked], revalidate=False)
    assert found.passed is (not says), found
    assert any(says in note for note in found.notes), found.notes


def test_what_the_verifiers_policy_asks_is_measured_anew(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str]
) -> None:
    """Broken: `verify -p` would run the validation by the gates and samples of the manifest."""
    (folder, _), (_, uri) = signed_run, published
    found = api.verify(uri, policy_path=folder / "policy.yaml")
    assert found.passed, found
    assert "it was published under this very policy (test)" in found.notes
    np.savez(folder / "few.npz", x=np.zeros((8, 8), np.float32))
    few = folder / "few.yaml"
    few.write_text(policy_text(folder / "few.npz", TARGET, "performance: {min_speedup: null}"))
    found = api.verify(uri, policy_path=few)
    assert not found.passed
    assert any("8 real samples are fewer" in check.reason for check in found.checks)
    elsewhere = folder / "elsewhere.yaml"
    elsewhere.write_text(policy_text(folder / "data.npz", TARGET).replace("  cpu: {", "  edge: {"))
    with pytest.raises(UsageError, match="is for the target 'cpu', and the policy has edge"):
        api.verify(uri, policy_path=elsewhere, revalidate=False)


def test_a_policy_that_is_not_meant_for_the_model_judges_nothing(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str]
) -> None:
    """Broken: `verify -p` would vouch for a model by the policy of other models, which `run` refuses."""
    (folder, _), (_, uri) = signed_run, published
    policy = folder / "others.yaml"
    for applies_to, says in (
        ("{names: [vision-*]}", r"applies to models named vision-\*, this one is 'small-net'"),
        ("{tags: {task: images}}", "applies to models tagged task=images, this one has task=nothing"),
    ):
        policy.write_text(policy_text(folder / "data.npz", TARGET, f"{BODY}applies_to: {applies_to}"))
        for revalidate in (False, True):
            with pytest.raises(UsageError, match=says):
                api.verify(uri, policy_path=policy, revalidate=revalidate)
    policy.write_text(policy_text(folder / "data.npz", TARGET, f"{BODY}applies_to: {{names: [small-*]}}"))
    for revalidate in (False, True):
        assert api.verify(uri, policy_path=policy, revalidate=revalidate).passed


def test_layers_of_the_verifiers_policy_may_lie_below_a_named_root(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str], tmp_path: Path
) -> None:
    """Broken: a policy that `run` takes with --policy-root could not be verified by."""
    (folder, _), (_, uri) = signed_run, published
    base = tmp_path / "org" / "base.yaml"
    base.parent.mkdir()
    text = policy_text(folder / "data.npz", TARGET, "performance: {min_speedup: null, max_size_mb: 0.0001}")
    base.write_text(text)
    own = tmp_path / "team" / "policy.yaml"
    own.parent.mkdir()
    head = "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: team\nowner: team\n"
    own.write_text(f"{head}extends: [{base}]\n")
    command = ("verify", uri, "-p", str(own), "--no-revalidate")
    without = command_line(*command)
    assert without.returncode == 2
    assert "--policy-root" in without.stderr
    there = command_line(*command, "--policy-root", str(base.parent))
    assert there.returncode == 7, there.stderr
    assert "size_mb is 0.00" in " ".join(there.stdout.split())


# -------------------------------------------------------------------------------------------------- cache and policy


def entries(root: Path) -> list[tuple[str, dict[str, Any], Path]]:
    """Step, key and folder of every entry of a cache."""
    found = []
    for file in sorted(root.rglob("entry.json")):
        stored = json.loads(file.read_text())
        found.append((stored["step"], stored["key"], file.parent))
    return found


def test_each_byte_class_of_each_file_of_the_cache_is_made_anew(
    signed_run: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """Broken: who may write to a shared cache would choose the graph that is compiled, the samples and reference
    answers that it is judged by, or what was measured; and a run would sign it."""
    folder, _ = signed_run
    root = Path(shutil.copytree(folder / "cache", tmp_path / "cache"))
    cache = Cache(root, (folder / "secret").read_bytes())
    steps = {step.partition("/")[0] for step, _, _ in entries(root)}
    assert {"export", "sample", "reference", "compile", "validate"} <= steps, steps
    accepted = []
    for step, key, entry in entries(root):
        assert cache.read(step, key) is not None
        for file in [path for path in sorted(entry.rglob("*")) if path.is_file()]:
            content = file.read_bytes()
            for name, damaged in damages(content) if content else [("appended", b"x")]:
                file.write_bytes(damaged)
                if not means_the_same(content, damaged) and cache.read(step, key) is not None:
                    accepted.append((step, file.relative_to(entry).as_posix(), name))
            file.unlink()
            if cache.read(step, key) is not None:
                accepted.append((step, file.relative_to(entry).as_posix(), "removed"))
            file.write_bytes(content)
        (entry / "files" / "more").write_bytes(b"x")
        if cache.read(step, key) is not None:
            accepted.append((step, "more", "added"))
        (entry / "files" / "more").unlink()
    # What says how long ago a cache's entry was used decides nothing but when it is removed.
    assert [one for one in accepted if one[1] != "used"] == []


def test_an_entry_sealed_anew_counts_without_the_secret_only(
    signed_run: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """Broken: the digests of an entry can be written by whoever writes the entry; with a secret that is not enough."""
    folder, _ = signed_run
    root = Path(shutil.copytree(folder / "cache", tmp_path / "cache"))
    for step, key, entry in entries(root):
        stored = json.loads((entry / "entry.json").read_text())
        forged = sealed_entry(step, key, {"forged": True}, stored["files"], stored["made"])
        for mac in ({}, {"mac": stored["mac"]}, {"mac": ""}):
            (entry / "entry.json").write_text(json.dumps({**forged, **mac}))
            assert Cache(root, (folder / "secret").read_bytes()).read(step, key) is None
        assert Cache(root).read(step, key) is not None  # as docs/signing.md says


def test_a_note_that_it_was_packaged_here_needs_the_secret(
    signed_run: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: who may write to a shared cache would vouch for executable artifacts of his own."""
    folder, result = signed_run
    bundle = result.targets[0].bundle
    assert bundle is not None
    data = Path(bundle.path) / "data"
    executable = {**bundle.manifest, "job": {**bundle.manifest["job"], "backend": "torchscript"}}
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(folder / "secret"))
    assert refuse_code(bundle.path, data, executable) is None
    forged = tmp_path / "cache" / "packaged"
    forged.mkdir(parents=True)
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(forged.parent))
    for content in (b"", b"0" * 64):
        (forged / digest_tree(data)[7:]).write_bytes(content)
        assert "was not packaged on this machine" in (refuse_code(bundle.path, data, executable) or "")


def test_each_line_of_the_policy_that_changes_is_noticed(
    signed_run: tuple[Path, RunResult], published: tuple[Path, str], tmp_path: Path
) -> None:
    """Broken: whoever loosens the policy file would have it taken for the one that the model was published under."""
    (folder, _), (_, uri) = signed_run, published
    lines = (folder / "policy.yaml").read_text().splitlines()
    policy = folder / "changed.yaml"
    unnoticed = []
    for number, line in enumerate(lines):
        for changed in ([], [f"{line}x"], [line.replace("6", "5").replace("1", "2")]):
            text = "\n".join([*lines[:number], *changed, *lines[number + 1 :]])
            if not line.strip() or changed == [line] or line.startswith("report:"):
                continue  # what a report shows beside the verdict is no part of the policy's digest
            policy.write_text(f"{text}\n")
            try:
                found = api.verify(uri, policy_path=policy, revalidate=False)
            except (PolicyError, UsageError, IntegrityError):
                continue
            if any("this very policy" in note for note in found.notes):
                unnoticed.append((line, changed))
    assert unnoticed == []


@pytest.mark.usefixtures("known_original")
def test_a_policy_without_its_demand_for_signatures_promotes_nothing_unsigned(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever writes the policy could take the demand out of it, where the machine makes it."""
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(make_key(tmp_path / "keys")[1]))
    body = BODY.partition("compliance:")[0]
    result = api.run(f"folder:{small_model}", write_policy(TARGET, body), out=tmp_path / "out")
    assert result.exit_code == 3
    assert "it is not signed, and a signature is required" in result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to is None


# -------------------------------------------------------------------------------------------------- a tracking server


@pytest.mark.slow
def test_what_is_tampered_with_on_a_tracking_server_is_neither_loaded_nor_promoted(
    server: Any, small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: what holds in a plain folder would not hold where models are: on a server, whose tags and files a writer
    changes by its own API and store. A sample of the files and tags."""
    import mlflow

    client = mlflow.MlflowClient()
    client.create_registered_model("tampered")
    run = client.create_run("0").info.run_id
    model_id = client.create_logged_model("0", name="tampered", source_run_id=run).model_id
    client.log_model_artifacts(model_id, str(small_model))
    client.finalize_logged_model(model_id, "READY")
    client.create_model_version("tampered", f"models:/{model_id}", run_id=run, model_id=model_id)
    key, public = make_key(tmp_path / "keys")
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", str(key))
    result = api.run("models:/tampered/1", write_policy(TARGET, BODY), out=tmp_path / "out")
    assert result.exit_code == 0, result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to == "cpu-prod"
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(public))
    location = client.get_logged_model(
        client.get_model_version(receipt.name, receipt.version).source.removeprefix("models:/")
    ).artifact_location
    stored = server.log.parent / "artifacts" / location.removeprefix("mlflow-artifacts:/")

    def load() -> None:
        flavor.load_model(receipt.uri).close()

    load()
    accepted = []
    sample = ("data/artifact/model.onnx", "data/manifest.json", "code/compile_stage/flavor.py", "signature/model.sig")
    for name in sample:
        file, content = stored / name, (stored / name).read_bytes()
        for damage, damaged in (("middle byte", flipped(content, len(content) // 2)), ("removed", None)):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            accepted += [(name, damage, "loaded")] if not refused(load) else []
            accepted += [(name, damage, "promoted")] if not refused(lambda: api.promote(receipt.uri, "other")) else []
        file.write_bytes(content)
    (stored / "code" / "more.py").write_text("x = 1")
    accepted += [("code/more.py", "added", "loaded")] if not refused(load) else []
    (stored / "code" / "more.py").unlink()
    version = client.get_model_version(receipt.name, receipt.version)
    for tag in ("digest", "verdict", "source"):
        client.set_model_version_tag(receipt.name, receipt.version, f"compile_stage.{tag}", "sha256:other")
        accepted += [(tag, "tag", "promoted")] if not refused(lambda: api.promote(receipt.uri, "other")) else []
        client.set_model_version_tag(
            receipt.name, receipt.version, f"compile_stage.{tag}", version.tags[f"compile_stage.{tag}"]
        )
    assert accepted == []
    assert api.promote(receipt.uri, "other").promoted_to == "other"


# ------------------------------------------------------------------------------------------------------- validations


@pytest.mark.slow
@pytest.mark.usefixtures("fake_backends")
def test_a_validation_counts_when_somebody_trusted_signed_it(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a forged validation would promote a draft that nobody proved."""
    device = hardware()
    ci, public = make_key(tmp_path / "keys")
    stranger, _ = make_key(tmp_path / "keys", "stranger")
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", str(ci))
    policy = write_policy(
        f"backends: [fake-cross], precisions: [fp32], hardware: {{fingerprint: {device.fingerprint}}}", BODY
    )
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(device, cpu="a build machine's"))
        (draft,) = api.run(f"folder:{small_model}", policy, out=tmp_path / "out").targets[0].unvalidated
    assert draft.receipt is not None
    uri = draft.receipt.uri
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(public))
    with pytest.raises(UsageError, match="the validation would count for nothing"):
        api.validate(uri, signing_key=stranger)

    assert api.validate(uri).passed
    file = next((Path(uri.removeprefix("folder:")) / "model" / "validations").glob("*.json"))
    signed = json.loads(file.read_text())

    def attach(document: dict[str, Any]) -> None:
        file.write_text(json.dumps({**document, "digest": digest_of(document)}))

    honest = {name: value for name, value in signed.items() if name != "digest"}
    bare = {name: value for name, value in honest.items() if name != "envelope"}
    assert plain_validation(bare) == bare
    for forged in (bare, {**honest, "at": "2026-01-01T00:00:00+00:00"}, {**honest, "passed": True, "samples": "other"}):
        attach(forged)
        with pytest.raises(GateError, match="no validation is attached to it that passed and is signed"):
            api.promote(uri, "edge")
        with pytest.raises(CompileStageError, match="not validated on this machine"):
            flavor.load_model(str(file.parents[1]))
    attach(honest)
    assert api.promote(uri, "edge").promoted_to == "edge"
