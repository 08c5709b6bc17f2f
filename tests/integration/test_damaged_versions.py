"""Versions whose files, or whose samples, are no longer what they were: what `run`, `rollback` and `promote` say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories import policy_text
from mlflow import MlflowClient

from compile_stage import api
from compile_stage.core.errors import AliasMovedError, IntegrityError, RegistryError
from compile_stage.core.records import Receipt
from compile_stage.registry.folder import FolderRegistry

pytestmark = [
    pytest.mark.usefixtures("known_run"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

KNOWN = (
    "backends: [onnxruntime], precisions: [fp32]",
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}",
)


def publish(small_model: Path, policy: Path, out: Path) -> Path:
    """Run, and return the folder of the registered name, which has one version."""
    result = api.run(f"folder:{small_model}", policy, out=out)
    assert result.exit_code == 0, result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    return Path(receipt.uri.removeprefix("folder:")).parent


@pytest.fixture(scope="module")
def whole(small_net: Path, cache_of_the_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `published` is a copy of."""
    folder = tmp_path_factory.mktemp("published")
    shutil.copytree(small_net, folder, dirs_exist_ok=True)
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(folder / "data.npz", *KNOWN))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(folder))
        environment.setenv("COMPILE_STAGE_CACHE", str(shutil.copytree(cache_of_the_original, folder / "cache")))
        return publish(folder / "small-net", policy, folder / "out")


@pytest.fixture
def published(whole: Path, tmp_path: Path) -> Path:
    """A registered name with one version, of a model and of samples that lie elsewhere."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def second(name: Path) -> None:
    """The version again, as 2, and the alias `prod` moved from it to the first."""
    shutil.copytree(name / "1", name / "2")
    (name / "aliases.json").write_text(json.dumps({"prod": "1"}))
    record = json.loads((name / "1" / "version.json").read_text())
    record["tags"]["compile_stage.previous.prod"] = "2"
    (name / "1" / "version.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("file", "remeasure"),
    [
        ("data/artifact/model.onnx", False),
        ("data/artifact/model.onnx", True),
        ("code/compile_stage/flavor.py", False),
        ("MLmodel", False),
    ],
)
def test_a_run_publishes_anew_what_was_damaged(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, file: str, remeasure: bool
) -> None:
    """Broken: a run would end with "already published, unchanged" for a version that nobody can load, for ever."""
    published = publish(small_model, write_policy(*KNOWN), tmp_path / "out")
    if file == "MLmodel":
        text = (published / "1" / "model" / file).read_text()
        (published / "1" / "model" / file).write_text(text.replace("compile_stage.flavor", "os"))
    else:
        flip(published / "1" / "model" / file)
    result = api.run(f"folder:{small_model}", write_policy(*KNOWN), out=tmp_path / "out", remeasure=remeasure)
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert (receipt.created, receipt.version) == (True, "2")
    assert f"{file} is not what was published" in receipt.note
    assert api.verify(receipt.uri, revalidate=False).passed
    again = api.run(f"folder:{small_model}", write_policy(*KNOWN), out=tmp_path / "out").targets[0].receipt
    assert again is not None
    assert (again.created, again.version) == (False, "2")
    assert (published / "1" / "model").is_dir(), "it must stay, so that people can look at it"


@pytest.mark.parametrize("file", ["requirements.txt", "MLmodel"])
def test_what_is_damaged_is_named_by_its_version(published: Path, file: str) -> None:
    """Broken: the error names the temporary folder that the version was fetched into, and in the log of a pipeline that
    verifies many nobody sees which is damaged."""
    (published / "1" / "model" / file).write_text("x: [")
    with pytest.raises(IntegrityError) as caught:
        api.verify(f"folder:{published}/1", revalidate=False)
    assert caught.value.where.startswith(f"folder:{published}/1")


@pytest.mark.parametrize("how", ["changed", "a tag", "gone"])
def test_a_rollback_to_what_is_damaged_is_refused(published: Path, how: str) -> None:
    """Broken: going back, which is for when production is broken, would put something worse in its place."""
    second(published)
    if how == "gone":
        shutil.rmtree(published / "2" / "model")
    elif how == "changed":
        flip(published / "2" / "model" / "data" / "artifact" / "model.onnx")
    else:
        record = json.loads((published / "2" / "version.json").read_text())
        record["tags"]["compile_stage.verdict"] = "passed under waivers"
        (published / "2" / "version.json").write_text(json.dumps(record))
    with pytest.raises(IntegrityError, match=r"'prod' stays at .*/1") as caught:
        api.rollback(f"folder:{published}@prod")
    assert f"compile-stage promote folder:{published}/VERSION --alias prod" in caught.value.fix
    assert json.loads((published / "aliases.json").read_text()) == {"prod": "1"}


def test_a_rollback_to_what_is_whole_moves_the_alias(published: Path) -> None:
    """Broken: no rollback at all; or one to an original, which has no digests, would be impossible, or said to be
    whole."""
    second(published)
    assert api.rollback(f"folder:{published}@prod").note == ""
    (published / "aliases.json").write_text(json.dumps({"prod": "1"}))
    (published / "2" / "version.json").write_text("{}")
    assert "compile-stage did not publish it" in api.rollback(f"folder:{published}@prod").note
    assert json.loads((published / "aliases.json").read_text()) == {"prod": "2"}
    (published / "aliases.json").write_text(json.dumps({"prod": "1"}))
    shutil.rmtree(published / "2")
    with pytest.raises(RegistryError, match="no longer there"):
        api.rollback(f"folder:{published}@prod")


@pytest.mark.parametrize("tag", ["1", "latest", "02", "2 ", "../net/1", "1" * 30, "9"])
def test_a_rollback_to_what_is_no_version_before_names_what_helps(published: Path, tag: str) -> None:
    """Broken: a tag that somebody wrote by hand has the alias "moved" to where it is, or out of the model's folder, or
    says that somebody else moved it, and the advice leads nowhere."""
    second(published)
    record = json.loads((published / "1" / "version.json").read_text())
    record["tags"]["compile_stage.previous.prod"] = tag
    (published / "1" / "version.json").write_text(json.dumps(record))
    said = f"previous.prod says '{tag}', which is no version before 1"
    said = "version 9, .* is no longer there" if tag == "9" else said
    with pytest.raises(RegistryError, match=said) as caught:
        api.rollback(f"folder:{published}@prod")
    assert f"compile-stage promote folder:{published}/VERSION --alias prod" in caught.value.fix
    assert json.loads((published / "aliases.json").read_text()) == {"prod": "1"}


@pytest.mark.parametrize("how", ["moved", "an answer without the alias"])
def test_a_rollback_goes_only_to_the_version_that_was_looked_at(
    published: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Broken: somebody moves the alias while a rollback looks at the version before, or the registry's answer is empty,
    and the alias goes to a damaged version that nobody looked at."""
    second(published)
    flip(published / "2" / "model" / "data" / "artifact" / "model.onnx")
    if how == "moved":
        shutil.copytree(published / "2", published / "3")
        (published / "aliases.json").write_text(json.dumps({"prod": "3"}))
        record = json.loads((published / "3" / "version.json").read_text())
        record["tags"]["compile_stage.previous.prod"] = "1"
        (published / "3" / "version.json").write_text(json.dumps(record))
    real = FolderRegistry.current

    def current(self: FolderRegistry, name: str, alias: str) -> Receipt | None:
        seen = real(self, name, alias) if how == "moved" else None
        (published / "aliases.json").write_text(json.dumps({"prod": "1"}))
        return seen

    monkeypatch.setattr(FolderRegistry, "current", current)
    with pytest.raises(AliasMovedError, match="somebody else moved 'prod' meanwhile: it points to 1"):
        api.rollback(f"folder:{published}@prod")
    assert json.loads((published / "aliases.json").read_text()) == {"prod": "1"}


@pytest.mark.slow
def test_promote_says_when_the_validation_samples_are_others(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: an alias would move without a word where `verify` says that the data were replaced since, or where they
    were deleted and made-up samples took their place."""
    uri = f"folder:{publish(small_model, write_policy(*KNOWN), tmp_path / 'out')}/1"
    assert api.promote(uri, "prod").note.endswith("answers a batch of validation samples there as the proven artifact")
    data = tmp_path / "data.npz"
    with np.load(data) as arrays:
        replaced = {name: array + 1 if array.dtype.kind == "f" else array for name, array in arrays.items()}
    np.savez(data, **replaced)
    assert api.promote(uri, "prod").note.endswith("; the validation samples are not those that it was published with")
    data.unlink()
    note = api.promote(uri, "prod").note
    assert "a batch of synthetic samples" in note
    assert "; the validation samples can't be had here: the policy's samples can't be read" in note


@pytest.mark.slow
def test_promote_by_hand_says_what_it_did_not_compare_and_what_was_waived(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: an alias would move by hand to a version that a run held back as slower, or that stands under a waiver,
    without a word on either."""
    waiver = "waivers: [{gate: size_mb, target: cpu, reason: a test, owner: me, expires: 2099-01-01}]\n"
    limit = KNOWN[1].replace("min_speedup: null", "min_speedup: null, max_size_mb: 0.000001")
    uris = []
    for number, policy in enumerate((KNOWN, (KNOWN[0], limit + "\n" + waiver))):
        result = api.run(f"folder:{small_model}", write_policy(*policy), out=tmp_path / f"out{number}")
        assert result.exit_code == 0, result.problem
        receipt = result.targets[0].receipt
        assert receipt is not None
        uris.append(receipt.uri)
    first, second = (api.promote(uri, "by-hand") for uri in uris)
    assert "not compared" not in first.note
    assert "waiver" not in first.note
    assert second.note.endswith(
        "it passed under a waiver of size_mb; it was not compared with version 1, to which the alias pointed"
    )


def published_in_mlflow(small_model: Path, policy: Path, out: Path) -> tuple[MlflowClient, Receipt]:
    """Register a model, run, and return what was published of it."""
    client = MlflowClient()
    logged = client.create_logged_model("0", name="net")
    client.log_model_artifacts(logged.model_id, str(small_model))
    client.finalize_logged_model(logged.model_id, "READY")
    client.create_registered_model("net")
    client.create_model_version("net", f"models:/{logged.model_id}", model_id=logged.model_id)
    receipt = api.run("models:/net/1", policy, out=out).targets[0].receipt
    assert receipt is not None
    return client, receipt


def test_a_folder_named_like_the_version_does_not_stand_for_it(
    embedded: str, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: who opens a pull request commits a whole bundle as `models:/net-compiled/1`, and CI verifies, validates
    or promotes the registry's damaged version by it."""
    client, receipt = published_in_mlflow(small_model, write_policy(*KNOWN), tmp_path / "out")
    source = client.get_model_version(receipt.name, receipt.version).source
    stored = Path(client.get_logged_model(source.removeprefix("models:/")).artifact_location)
    shutil.copytree(stored, Path("models:") / receipt.name / receipt.version)
    flip(stored / "data" / "artifact" / "model.onnx")
    commands: list[Callable[[str], object]] = [api.verify, api.validate, lambda uri: api.promote(uri, "prod")]
    for command in commands:
        with pytest.raises(IntegrityError, match="the files are not those that were published"):
            command(receipt.uri)
    assert not client.get_registered_model(receipt.name).aliases


def test_a_version_that_the_next_clean_up_removes_is_named_so(
    embedded: str, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: somebody verifies a version and moves an alias to it, and the next `mlflow gc` deletes what production
    loads, of which nobody was told."""
    client, receipt = published_in_mlflow(small_model, write_policy(*KNOWN), tmp_path / "out")
    model = client.get_model_version(receipt.name, receipt.version).source.removeprefix("models:/")
    notes = api.verify(receipt.uri).notes
    assert not any(model in note for note in notes)
    copied = client.copy_model_version(receipt.uri, receipt.name)
    copy = f"models:/{copied.name}/{copied.version}"
    client.delete_logged_model(model)
    caution = f"its logged model {model} was deleted, and `mlflow gc` removes its files: the next run publishes it anew"
    assert caution in api.verify(receipt.uri).notes
    assert caution in (api.promote(receipt.uri, "prod", serve_check=False).note or "")
    api.promote(copy, "prod", serve_check=False)
    assert api.rollback(f"models:/{receipt.name}@prod").note == caution
    client.delete_model_version(copied.name, copied.version)  # it has the same key
    again = api.run("models:/net/1", write_policy(*KNOWN), out=tmp_path / "again").targets[0].receipt
    assert again is not None
    assert again.created, "as the note says"
    api.promote(again.uri, "prod", serve_check=False)
    back = api.rollback(f"models:/{receipt.name}@prod")
    assert back.version == receipt.version, "its files are whole until the clean-up"
    assert back.note == caution.replace("the next run publishes it anew", "a run published a new version in its place")
