"""`debug`: which of its four questions is asked, and the page that answers it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.errors import UsageError
from compile_stage.core.events import Reporter
from compile_stage.core.run_context import open_context
from compile_stage.core.shipped import policy_file
from compile_stage.functions.runs import model_folder
from compile_stage.policy.load import load_policy

if TYPE_CHECKING:
    from compile_stage.graph_debug.diagnosis import Diagnosis

PathLike = str | os.PathLike[str]


def debug(
    subject: str,
    candidate: str | None = None,
    *,
    policy_path: PathLike | None = None,
    policy_roots: Sequence[PathLike] = (),
    job: str = "*",
    targets: Sequence[str] = (),
    sets: Sequence[str] = (),
    backend: str | None = None,
    data: str | None = None,
    samples: int = 16,
    out: PathLike | None = None,
    reporter: Reporter | None = None,
) -> Diagnosis:
    """Why a candidate's answers, or its compilation, go wrong.

    Args:
        subject: A model's URI (with `policy_path`), a `result.json` or its folder, an `.onnx` to compare `candidate`
            with, or an `.onnx` that `backend` may not take.
        candidate: A second model file, `.onnx` or `.xml`.
        job: Glob over job ids; the first that matches and does not pass is looked into.
        data: File of samples, for two model files.
        samples: How many of them are traced.
        out: Folder for `debug.html`, `debug.json` and the bundle; by default `compile-stage-debug/NAME`.

    Raises:
        PolicyError: What was given can't be looked into; the message says why.
        RegistryError: The model can't be had.
        SourceError: The model is refused or unreadable.
    """
    from compile_stage.diagnosis.files import diagnose_compilation, diagnose_files
    from compile_stage.diagnosis.job import diagnose_job
    from compile_stage.pipeline.run import make_plan
    from compile_stage.report import debug_page

    here = Path(subject)
    with open_context(reporter, "local") as context:
        if candidate is not None or backend is not None:
            folder, graph = _folder(out, here.stem), _existing(here)
            if candidate is not None:
                diagnosis = diagnose_files(context, graph, _existing(Path(candidate)), data, folder, count=samples)
            else:
                diagnosis = diagnose_compilation(context, graph, backend or "", folder)
        else:
            uri, policy, pattern = subject, policy_path, job
            if (here / "result.json").is_file():
                here /= "result.json"
            if here.suffix == ".json":
                uri, policy, pattern = debug_page.read_result(here, job, policy_path)
            if policy is None:
                raise UsageError(
                    f"nothing says how {subject!r} is to be looked into",
                    fix="name a policy with -p, a second model file to compare with, or a backend with --backend",
                )
            loaded = load_policy(policy_file(policy), sets=sets, targets=targets, roots=policy_roots)
            expanded = make_plan(context, loaded, uri)
            folder = _folder(out, model_folder(expanded.source))
            diagnosis = diagnose_job(context, expanded, pattern, folder, count=samples)
        debug_page.write(diagnosis, folder)
        return diagnosis


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise UsageError("there is no such file", where=str(file))
    return file.absolute()


def _folder(out: PathLike | None, name: str) -> Path:
    """Absolute, since a worker has a current folder of its own."""
    return (Path(out) if out is not None else Path("compile-stage-debug") / name).absolute()
