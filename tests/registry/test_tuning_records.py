"""Tuning records in every registry: idempotent, a union whoever pushes when, and nothing that fails a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core import tuning_records
from compile_stage.core.errors import RegistryError
from compile_stage.registry import mlflow_records
from compile_stage.registry.mlflow import MLflowRegistry

Case = Any  # conftest.Case
HERE = "x86_64-1a2b3c4d5e6f7081-2-threads"


@pytest.fixture
def key(unique: str) -> str:
    """Of this test's own: the server is shared."""
    return f"tvm-{unique}/{HERE}"


def records(folder: Path, *contents: str) -> dict[str, Path]:
    made = {}
    for content in contents:
        name = tuning_records.name_of("81", "json", content.encode())
        made[name] = tuning_records.write(folder, name, content.encode())
    return made


def pulled(case: Case, source: Any, key: str, into: Path, have: frozenset[str] = frozenset()) -> dict[str, str]:
    into.mkdir()
    case.registry.pull_records(source, key, have, into)
    return {path.name: path.read_text() for path in into.iterdir()}


def test_what_one_run_pushed_others_pull_once(case: Case, key: str, tmp_path: Path) -> None:
    """Broken: a fresh machine would tune from nothing, records would pile up, or other hardware's would be taken."""
    source, mine = case.resolve(tmp_path / "sources"), records(tmp_path / "mine", "one", "two", "three")
    assert pulled(case, source, key, tmp_path / "nothing yet") == {}
    assert case.registry.push_records(source, key, mine) == 3
    assert case.registry.push_records(source, key, mine) == 0
    more = records(tmp_path / "mine", "four")
    assert case.registry.push_records(source, key, {**mine, **more}) == 1
    whole = {name: path.read_text() for name, path in {**mine, **more}.items()}
    assert pulled(case, source, key, tmp_path / "a") == whole
    rest = pulled(case, source, key, tmp_path / "b", frozenset(mine))
    assert rest == dict.fromkeys(more, "four")
    assert pulled(case, source, key, tmp_path / "c", frozenset(whole)) == {}
    assert pulled(case, source, f"{key}-of-another", tmp_path / "d") == {}


def test_two_that_push_at_once_lose_nothing(case: Case, key: str, tmp_path: Path) -> None:
    """Broken: of two pipelines that tune at the same time, one's hours would be lost."""
    source, start = case.resolve(tmp_path / "sources"), threading.Barrier(2)
    sets = [records(tmp_path / str(n), "both", *(f"{n}-{i}" for i in range(3))) for n in range(2)]
    failures: list[BaseException] = []

    def push(mine: dict[str, Path]) -> None:
        try:
            start.wait(30)
            case.registry.push_records(source, key, mine)
        except BaseException as error:  # noqa: BLE001 - told to the test, whatever it is
            failures.append(error)

    threads = [threading.Thread(target=push, args=(mine,)) for mine in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    wanted = {name: path.read_text() for mine in sets for name, path in mine.items()}
    assert len(wanted) == 7
    assert pulled(case, source, key, tmp_path / "a") == wanted


def test_machines_that_made_a_run_each_are_read_together(embedded: str, tmp_path: Path) -> None:
    """Broken: where two machines push the first records of a key at once, one's would never be found."""
    from mlflow import MlflowClient

    client, key = MlflowClient(), f"tvm-1/{HERE}"
    sets = [records(tmp_path / str(n), "both", f"only {n}") for n in range(2)]
    experiment = mlflow_records._make_experiment(client)
    assert mlflow_records._make_experiment(client) == experiment, "another process may have made it meanwhile"
    for mine in sets:
        run = mlflow_records._make_run(client, experiment, key)
        for path in mine.values():
            client.log_artifact(run, str(path), "records")
    into = tmp_path / "into"
    into.mkdir()
    mlflow_records.pull(client, key, frozenset(), into)
    assert {path.read_text() for path in into.iterdir()} == {"both", "only 0", "only 1"}
    assert mlflow_records.push(client, key, {**sets[0], **sets[1]}) == 0
    assert all(run.info.status == "FINISHED" for run in client.search_runs([experiment]))


def test_an_upload_that_was_killed_is_mended(embedded: str, tmp_path: Path) -> None:
    """Broken: half a file under a record's name would keep the whole one out for ever."""
    from mlflow import MlflowClient

    client, key, mine = MlflowClient(), f"tvm-1/{HERE}", records(tmp_path / "mine", "whole")
    (name,) = mine
    assert mlflow_records.push(client, key, mine) == 1
    (run,) = client.search_runs([client.get_experiment_by_name(mlflow_records.EXPERIMENT).experiment_id])
    stored = Path(run.info.artifact_uri.removeprefix("file://")) / "records" / name
    stored.write_text("who")
    assert mlflow_records.push(client, key, mine) == 1
    assert stored.read_text() == "whole"


def test_trouble_is_one_sentence(embedded: str, tmp_path: Path) -> None:
    """Broken: the run would end with a traceback for what it can do without."""
    from mlflow import MlflowClient

    registry, key, mine = MLflowRegistry(), f"tvm-1/{HERE}", records(tmp_path / "mine", "one")
    source: Any = None  # MLflow's place does not depend on it
    registry.push_records(source, key, mine)
    client = MlflowClient()
    client.delete_experiment(client.get_experiment_by_name(mlflow_records.EXPERIMENT).experiment_id)
    with pytest.raises(RegistryError, match="was deleted"):
        registry.push_records(source, key, mine)
    with pytest.raises(RegistryError, match="was deleted"):
        registry.pull_records(source, key, frozenset(), tmp_path)


def test_a_folder_that_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    """Broken: an OSError of the registry's disk would end the run."""
    from compile_stage.registry.folder import FolderRegistry
    from tests.registry.conftest import write_model

    root = tmp_path / "registry"
    write_model(root / "net" / "1" / "model")
    (root / ".tuning").write_text("in the way")
    registry = FolderRegistry()
    source = registry.resolve(f"folder:{root}/net/1", tmp_path / "sources")
    with pytest.raises(RegistryError, match="can't be read or written"):
        registry.push_records(source, f"tvm-1/{HERE}", records(tmp_path / "mine", "one"))
