"""Writers that die or race, each in a process of its own; run by the tests as a script.

    writers.py kill SCRATCH SOURCE_URI     pushes, each killed before its next writing call, then run again
    writers.py race SCRATCH SOURCE_URI N   N writers that share nothing but the registry push the same bundle at once

Prints one JSON line for each killed push, or for each racer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

WRITES = (
    "create_run", "log_batch", "log_artifact", "create_logged_model", "finalize_logged_model", "log_outputs",
    "log_inputs", "create_registered_model", "create_model_version", "set_terminated", "set_model_version_tag",
)  # fmt: skip


def arm(deadly: int) -> list[str]:
    """From now on this process dies of SIGKILL before its `deadly`-th writing call; an upload dies half-way."""
    from mlflow import MlflowClient

    from compile_stage.registry import mlflow_publish

    seen: list[str] = []

    def wrap(holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == deadly:
                if name == "upload":
                    for file in Path(args[1]).iterdir():
                        if file.name != "MLmodel":
                            shutil.rmtree(file) if file.is_dir() else file.unlink()
                    real(*args, **kwargs)
                print(json.dumps({"killed_before": name}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(holder, name, call)

    for name in WRITES:
        wrap(MlflowClient, name)
    wrap(mlflow_publish, "upload")
    return seen


def push(scratch: Path, source_uri: str, name: str, key: str) -> dict[str, Any]:
    from conftest import write_bundle

    from compile_stage.registry.mlflow import MLflowRegistry

    registry = MLflowRegistry()
    source = registry.resolve(source_uri, scratch / "sources")
    report = scratch / "report.md"
    report.write_text("# Not published\n")
    receipt = registry.push(write_bundle(scratch, name, key), source, {"report.md": report})
    report.write_text("# Published\n")
    registry.attach(receipt, {"report.md": report})
    return {"version": receipt.version, "created": receipt.created}


def look(name: str, key: str) -> dict[str, Any]:
    """What the registry holds of that key."""
    from mlflow import MlflowClient

    from compile_stage.core.digest import digest_of

    client, tag = MlflowClient(), digest_of(key)
    versions = client.search_model_versions(f"name = '{name}' and tags.`compile_stage.key` = '{tag}'")
    experiments = [e.experiment_id for e in client.search_experiments()]
    models = client.search_logged_models(experiments, filter_string=f"tags.`compile_stage.key` = '{tag}'")
    runs = client.search_runs(experiments, filter_string=f"tags.`compile_stage.run_key` = '{tag}'")
    parents = {run.data.tags["mlflow.parentRunId"] for run in runs}
    children = {run.info.run_id for run in runs}
    return {
        "versions": [v.version for v in versions],
        "models": [str(getattr(m.status, "value", m.status)) for m in models],
        "runs": [run.info.status for run in runs],
        "parents": [client.get_run(p).info.status for p in parents],
        "metrics": sorted({m.key for model in models for m in client.get_logged_model(model.model_id).metrics or ()}),
        "files": sorted(f.path for run in runs for f in client.list_artifacts(run.info.run_id)),
        "notes": sorted(
            {client.get_run(run).data.tags.get("mlflow.note.content", "") for run in (*parents, *children)}
        ),
    }


def child(work: Any) -> int:
    """Run `work` in a fork; returns its wait status. MLflow is imported once, and no connection is shared."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # a fork must not return into its parent's code
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def kill(scratch: Path, source_uri: str) -> None:
    for deadly in range(1, 60):
        name, key = f"killed-{deadly}-compiled", f"kill-{deadly}"

        def die(deadly: int = deadly, name: str = name, key: str = key) -> None:
            arm(deadly)
            push(scratch, source_uri, name, key)

        def again(name: str = name, key: str = key) -> None:
            seen = look(name, key)["versions"]
            print(
                json.dumps({"seen": seen, "push": push(scratch, source_uri, name, key), **look(name, key)}), flush=True
            )

        status = child(die)
        if os.WIFEXITED(status):
            sys.exit(os.waitstatus_to_exitcode(status))  # it went through: every call was tried
        if child(again):
            sys.exit(1)


def race(scratch: Path, source_uri: str, count: int) -> None:
    start = time.time() + 3
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ["COMPILE_STAGE_CACHE"] = str(
                scratch / f"cache-{number}"
            )  # as on another machine: no common lock
            own = scratch / str(number)
            own.mkdir()
            try:
                time.sleep(max(0.0, start - time.time()))
                line = json.dumps(push(own, source_uri, "raced-compiled", "race")) + "\n"
                os.write(1, line.encode())  # at once: two that print would mix their lines
                os._exit(0)
            except BaseException:  # noqa: BLE001  # a fork must not return into its parent's code
                import traceback

                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    print(json.dumps(look("raced-compiled", "race")), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    # Once, before the forks; nothing is connected yet.
    import mlflow.artifacts
    import mlflow.models
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    import compile_stage.registry.mlflow  # noqa: F401

    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1] == "kill":
        kill(folder, sys.argv[3])
    else:
        race(folder, sys.argv[3], int(sys.argv[4]))
