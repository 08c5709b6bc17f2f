"""Versions that MLflow's copy_model_version made of others, as where a model goes from one environment to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core.errors import RegistryError
from compile_stage.core.records import Receipt, SourceModel
from compile_stage.registry.mlflow import MLflowRegistry

LogModel = Callable[..., str]
MakeBundle = Callable[..., Any]


@pytest.fixture
def publish(registry: MLflowRegistry, source: SourceModel, make_bundle: MakeBundle) -> Callable[[str], Receipt]:
    return lambda key: registry.push(make_bundle("net-compiled", key), source, {})


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def test_a_copy_within_the_same_model_is_not_taken_for_what_a_killed_push_left(
    publish: Callable[[str], Receipt],
) -> None:
    """Broken: the next run deletes a version that somebody copied, since it has the key of the version that it was
    copied from."""
    published = publish("a")
    copied = client().copy_model_version(published.uri, "net-compiled")
    assert publish("a").version == published.version
    held = {str(version.version) for version in client().search_model_versions("name = 'net-compiled'")}
    assert held == {published.version, str(copied.version)}


def double(published: Receipt, *, of_one_upload: bool) -> Any:
    """A version with the key of another, as a machine leaves it that pushed at the same moment and was killed."""
    first = client().get_model_version(published.name, published.version)
    model = str(first.source).removeprefix("models:/")
    if not of_one_upload:
        experiment = client().get_run(first.run_id).info.experiment_id
        model = client().create_logged_model(experiment, name="double").model_id
        client().finalize_logged_model(model, "READY")
    return client().create_model_version(
        published.name, f"models:/{model}", run_id=first.run_id, model_id=model, tags=first.tags
    )


def test_what_a_killed_machine_left_goes_and_what_somebody_chose_stays(publish: Callable[[str], Receipt]) -> None:
    """Broken: the next run deletes a version that an alias points to, or the files of the version that stays; or a
    double stays for ever, and with it its upload."""
    published = publish("a")
    shared, left, chosen = (double(published, of_one_upload=one) for one in (True, False, False))
    client().set_registered_model_alias(published.name, "live", chosen.version)
    assert publish("a").version == published.version
    held = {str(version.version) for version in client().search_model_versions(f"name = '{published.name}'")}
    assert held == {published.version, str(chosen.version)}
    experiment = client().get_run(chosen.run_id).info.experiment_id
    models = {model.model_id for model in client().search_logged_models([experiment])}
    kept, gone, also_kept = (str(one.source).removeprefix("models:/") for one in (shared, left, chosen))
    assert {kept, also_kept} <= models
    assert gone not in models


def test_of_many_versions_of_a_key_the_lowest_number_is_the_published_one(publish: Callable[[str], Receipt]) -> None:
    """Broken: version 10 is taken for lower than version 2, so two machines keep different ones, each deleting the
    other's."""
    published = publish("a")
    last = [double(published, of_one_upload=True) for _ in range(9)][-1]
    assert str(last.version) == "10"
    client().delete_model_version(published.name, published.version)
    assert publish("a").version == "2"
    assert [str(one.version) for one in client().search_model_versions(f"name = '{published.name}'")] == ["2"]


@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_copy_goes_on_without_the_version_that_it_was_copied_from(
    registry: MLflowRegistry, publish: Callable[[str], Receipt], log_model: LogModel, tmp_path: Path, how: str
) -> None:
    """Broken: once somebody cleared up where models are developed, no copy of one could be promoted, validated or
    compiled: "it is a copy of ..., which is no longer there". Its files are there, and MLflow serves it."""
    made = client().get_model_version("net-compiled", publish("a").version).source
    client().copy_model_version("models:/net-compiled/1", "staged")
    client().copy_model_version("models:/staged/1", "prod")
    client().copy_model_version("models:/net/1", "net-prod")
    for name in ("net-compiled", "net"):
        if how == "renamed":
            client().rename_registered_model(name, f"{name}-old")
        else:
            client().delete_registered_model(name)
    published = registry.published("models:/prod/1")
    assert registry.promote(published, "live").promoted_to == "live"
    file = tmp_path / "x86_64-1.json"
    file.write_text("{}")
    registry.attest(published, file, {"validated.x86_64-1": "passed"})
    held = client().list_logged_model_artifacts(made.removeprefix("models:/"), "validations")
    assert [Path(one.path).name for one in held] == [file.name]
    assert registry.resolve("models:/net-prod/1", tmp_path / "again").logged_model_id


def test_where_an_alias_pointed_before_does_not_come_along_with_a_copy(
    registry: MLflowRegistry, publish: Callable[[str], Receipt]
) -> None:
    """Broken: `prod` was moved from version 1 to 2 of the model that is copied from. After an alias of that name was
    set on the copy by hand, a rollback goes to version 1 of the model that was copied to, whatever that is."""
    for key in ("a", "b"):
        registry.promote(publish(key), "prod")
    for number in (2, 1, 2):
        client().copy_model_version(f"models:/net-compiled/{number}", "served")
    client().set_registered_model_alias("served", "prod", 3)
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback("served", "prod")

    registry.promote(registry.published("models:/served/2"), "prod")
    assert registry.rollback("served", "prod").version == "3"
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback("served", "prod")


def test_the_history_of_a_copy_is_its_own_from_its_first_promotion_on(
    registry: MLflowRegistry, publish: Callable[[str], Receipt]
) -> None:
    """Broken: histories that a promotion wrote on a copy are taken for those that came with it, and no rollback is
    possible among copies; or those of another alias that came along count with them."""
    for key in ("a", "b"):
        for alias in ("prod", "test"):
            registry.promote(publish(key), alias)
    for number in (2, 2, 2):
        client().copy_model_version(f"models:/net-compiled/{number}", "served")
    for number in (1, 2, 3):
        registry.promote(registry.published(f"models:/served/{number}"), "prod")
    client().set_registered_model_alias("served", "test", 3)
    assert [registry.rollback("served", "prod").version for _ in range(2)] == ["2", "1"]
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback("served", "test")
