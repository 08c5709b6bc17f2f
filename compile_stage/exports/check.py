"""An export shown to answer as the published version does, before it gets its place.

Of Triton's forms the exported files are run as `config.pbtxt` says, without our package (`stand_in.py`), on the
validation samples, in the smallest and the largest proven batch. Of the others, which serve the bundle by MLflow or by
its own loader, MLflow loads the exported bundle in a new process. All of it happens in a confined worker.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, GateError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Budget, FetchedVersion, Job, SampleSet, record
from compile_stage.exports import pbtxt
from compile_stage.exports.folder import Written
from compile_stage.exports.triton import CONFIG
from compile_stage.exports.version import Version
from compile_stage.promotability import published_samples, refuse_here
from compile_stage.serving.manifest import artifact_of, data_folder, read_manifest
from compile_stage.serving.variants import for_machine
from compile_stage.steps.serve import demand_served, differs, hand_over_trust, read_answers

_SCRIPT = Path(__file__).with_name("stand_in.py")
_EXAMPLE = "serving_input_example.json"
_SAMPLES = 64
_STANDS_IN = ("onnxruntime", "openvino", "python")


@record
class Proof:
    """What the check found.

    Attributes:
        proven: False where it was not run.
        said: What was looked at, or why it was not, as a sentence.
    """

    proven: bool
    said: str


def prove(context: Context, version: Version, folder: Path, written: Written, *, allow_code: bool) -> Proof:
    """Ask an export what the version was validated with.

    Args:
        folder: Of the export; its bundle lies in it.

    Raises:
        GateError: It can't be loaded, or answers otherwise.
    """
    published = version.published
    if (reason := refuse_here(context, published, allow_code=allow_code)) is not None:
        return Proof(proven=False, said=f"Not run here: {reason}.")
    backend = written.served_by.get("backend", "")
    if backend and backend not in _STANDS_IN:
        return Proof(proven=False, said=f"Not run here: nothing stands in for Triton's backend {backend}.")
    context = context.with_own_cache()
    check = _Check(context, version, folder, written)
    return check.by_stand_in() if backend else check.by_mlflow()


class _Check:
    """The check of one export."""

    def __init__(self, context: Context, version: Version, folder: Path, written: Written) -> None:
        self._context, self._version, self._folder, self._written = context, version, folder, written
        manifest = version.manifest
        self._job: Job = revive(Job, manifest["job"])
        self._budget: Budget = revive(Budget, manifest.get("budget", {}))
        interpreter = plugins.interpreter_of(self._job.backend)
        self._limits = WorkerLimits.within(self._budget, self._job.target.threads, interpreter)

    def _samples(self) -> SampleSet | None:
        count = max(_SAMPLES, self._version.batches.sizes[-1])
        return published_samples(self._context, self._version.published, self._job, self._budget, count)

    def by_mlflow(self) -> Proof:
        """MLflow loads the exported bundle in a new process, and it answers as the artifact that was published."""
        bundle = self._folder / self._written.bundle
        manifest = for_machine(read_manifest(bundle), bundle, self._context.hardware)
        artifact, variant = artifact_of(manifest, data_folder(bundle)), manifest.get("variant", "")
        fetched = FetchedVersion(uri=self._version.uri, path=str(bundle), artifact=artifact, variant=variant)
        trust = self._version.published.trust
        said = demand_served(self._context, fetched, self._job.target, self._samples(), self._limits, trust)
        return Proof(proven=True, said=f"{said[0].upper()}{said[1:]}, from the exported files.")

    def by_stand_in(self) -> Proof:
        """The files of a Triton repository, run as their configuration says."""
        name = self._written.served_by["model"]
        config = pbtxt.read((self._folder / name / CONFIG).read_text(encoding="utf-8"))
        for one in config["parameters"]:
            if one["key"] == ["on_hardware_mismatch"]:  # whether it loads elsewhere is not what is asked
                one["value"][0]["string_value"] = ["ignore"]
        task = {"config": config, "home": f"{name}/{self._version.number}"}
        with (
            tempfile.TemporaryDirectory(dir=self._context.scratch) as scratch,
            self._context.worker(f"export {self._version.name}", self._limits) as worker,
        ):
            try:
                if self._version.answers_requests:
                    return self._request(worker, task, Path(scratch))
                return self._tensors(worker, task, Path(scratch))
            except GateError:
                raise
            except CompileStageError as error:
                raise GateError(
                    f"the export can't be run as its configuration says: {error.problem}", where=self._version.uri
                ) from error

    def _ask(
        self, worker: Worker, task: Mapping[str, Any], into: Path, samples: SampleSet | None = None
    ) -> dict[str, Any]:
        trust = self._version.published.trust
        handed = None
        if trust is not None:
            handed = hand_over_trust(trust, str(self._version.published.folder), into.with_name(f"{into.name}-trust"))
        answered: dict[str, Any] = worker.call(
            "answer_export", script=str(_SCRIPT), task=task, model={"path": str(self._folder)}, samples=samples,
            trust=handed, into=str(into),
        )  # fmt: skip
        return answered

    def _tensors(self, worker: Worker, task: Mapping[str, Any], scratch: Path) -> Proof:
        samples, target = self._samples(), self._job.target
        if samples is None:
            return Proof(proven=False, said="Not run here: there are no samples that it takes.")
        sizes = sorted({self._version.batches.sizes[0], self._version.batches.sizes[-1]})
        found = self._ask(worker, {**task, "sizes": sizes}, scratch / "exported", samples)["outputs"]
        exact = True
        for size in sizes:
            worker.call("open_artifact", artifact=self._version.artifact, threads=target.threads)
            files = worker.call("predict", samples=samples, batch_size=size, into=str(scratch / f"own-{size}"))
            rows = samples.count // size * size or samples.count
            own = {name: value[:rows] for name, value in read_answers(files).items()}
            theirs = read_answers({name: by_size[str(size)] for name, by_size in found.items()})
            theirs = {name: value[:rows] for name, value in theirs.items()}
            if (reason := differs(theirs, own)) is not None:
                raise GateError(f"the export answers otherwise in batches of {size}: {reason}", where=self._version.uri)
            exact = exact and all(
                np.array_equal(theirs[name], value, equal_nan=_floats(value)) for name, value in own.items()
            )
        kind = "validation" if samples.real else "synthetic"
        same = "to the last bit" if exact else "to 1e-3 of an output's largest value"
        listed = " and ".join(map(str, sizes))
        how = "`model.py` with a stand-in for Triton's module" if _is_python(task) else "the runtime alone"
        return Proof(
            proven=True,
            said=f"The exported files, run by {how} as config.pbtxt says, answer {samples.count} {kind} samples in "
            f"batches of {listed} as the published artifact does, {same}. Triton's server was not run.",
        )

    def _request(self, worker: Worker, task: Mapping[str, Any], scratch: Path) -> Proof:
        example = self._folder / self._written.bundle / _EXAMPLE
        if not example.is_file():
            return Proof(proven=False, said="Not run here: it was published without an input example to ask.")
        text = example.read_text(encoding="utf-8")
        theirs = self._ask(worker, {**task, "request": text}, scratch / "exported")["response"]
        plain = {**task, "config": {"backend": ["mlflow"]}, "home": self._written.bundle, "request": text}
        own = self._ask(worker, plain, scratch / "own")["response"]
        if json.loads(theirs) != json.loads(own):
            raise GateError("the export answers its input example otherwise than MLflow does", where=self._version.uri)
        return Proof(
            proven=True,
            said="`model.py`, run with a stand-in for Triton's module, answers the input example as MLflow's scoring "
            "server answers it for the same bundle. Triton's server was not run.",
        )


def _is_python(task: Mapping[str, Any]) -> bool:
    return bool(task["config"]["backend"] == ["python"])


def _floats(value: Any) -> bool:
    return bool(value.dtype.kind == "f")
