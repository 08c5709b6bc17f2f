"""The MLflow flavor `compile_stage`: a published artifact, loaded anywhere.

    mlflow.pyfunc.load_model("models:/fraud-compiled@cpu-server-prod").predict(...)     answers as the source model did
    compile_stage.flavor.load_model("models:/fraud-compiled/3").run({"input": array})   all outputs by name

A published model carries this file, the part of `core` that it needs, and the one backend's file in `code/`, so that it
serves where compile-stage is not installed: there must be MLflow, NumPy and the one runtime. It looks like this:

    MLmodel, requirements.txt, ...   MLflow's own
    code/compile_stage/              the vendored loader
    signature/                       where it is signed (`compile_stage.serving.signatures`)
    data/artifact/                   what the backend compiled
    data/pyfunc/                     of a custom pyfunc: its own model directory (`compile_stage.serving.python_model`)
    data/tokenizer/                  of a model that takes text
    data/variants/                   of a version that holds several artifacts: the others (`serving.variants`)
    data/manifest.json               what it is, what it was made from, the digest of every file (`serving.manifest`)
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import logging
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from compile_stage.core import plugins
from compile_stage.core.errors import IntegrityError, MissingDependencyError, UsageError
from compile_stage.core.tensors import Signature, form_of, has_form
from compile_stage.core.uris import is_uri
from compile_stage.serving.generation import opened_as_called, whole_prompts
from compile_stage.serving.manifest import (
    DATA_NAME,
    MANIFEST_SCHEMA,
    artifact_of,
    batches_of,
    check_integrity,
    data_folder,
    pin,
    read_manifest,
    refuse_machine,
    refused_values_of,
    runtime_to_install,
)
from compile_stage.serving.media import MediaProcessor
from compile_stage.serving.mlmodel import MLMODEL
from compile_stage.serving.prediction_io import InputRefusedError, demand_params, from_outputs, run_any_rows, to_batch
from compile_stage.serving.python_model import PYFUNC_FOLDER, load_python_model, with_network
from compile_stage.serving.saving import BACKENDS, FLAVOR_NAME, save_model
from compile_stage.serving.shape_limits import ShapeLimits
from compile_stage.serving.signatures import verify_model
from compile_stage.serving.text import TOKENIZER_FOLDER, TextProcessor
from compile_stage.serving.text_generation import TASK as GENERATION
from compile_stage.serving.text_generation import GenerationProcessor
from compile_stage.serving.trust import TRUST_VARIABLE, Trust, trust_of_environment
from compile_stage.serving.variant_files import shares_files
from compile_stage.serving.variants import Chosen, choose, holds_variants

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend
    from compile_stage.core.tensors import Array, Batch, Form
    from compile_stage.serving.batches import ProvenBatches

    Processor: TypeAlias = TextProcessor | GenerationProcessor | MediaProcessor

_log = logging.getLogger(__name__)

__all__ = [
    "FLAVOR_NAME",
    "MANIFEST_SCHEMA",
    "CompiledModel",
    "check_integrity",
    "load_model",
    "read_manifest",
    "save_model",
]


# ----------------------------------------------------------------------------------------------------------------- load


class CompiledModel:
    """A published model, open and ready to run. Safe for several threads; close it, or use it as a context manager.

    In a process that was forked from the one that loaded it, the first call opens the artifact anew, where the backend
    can do that, and is refused otherwise.

    Attributes:
        manifest: What was published; of a version that holds several artifacts, the manifest of the one that is open.
        variant: The id of that one (docs/variants.md); empty where the version holds one artifact.
        variant_reason: Why that one, as a sentence.
        signature: As the runtime reports it.
        refused_values: Which values predict() refuses, such as a NaN that the original does not take. `run` takes all.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        threads: int | None = None,
        on_hardware_mismatch: str | None = None,
        variant: str | None = None,
    ) -> None:
        data = data_folder(model_dir)
        self._trust = trust = trust_of_environment()
        if trust is not None:
            verify_model(data.parent, trust)  # before anything of it is read
        self.manifest: Mapping[str, Any] = check_integrity(data)
        self._digest = self.manifest["digest"]
        _demand_trust(self.manifest, trust, data)
        mode = on_hardware_mismatch or self.manifest.get("on_hardware_mismatch", "error")
        self.variant = self.variant_reason = ""
        if holds_variants(self.manifest):
            chosen = _choose(self.manifest, data, _known_mode(mode), trust, variant)
            self.manifest, self.variant_reason = chosen.manifest, chosen.reason
            self.variant = str(chosen.manifest["variant"])
        else:
            _accept_machine(self.manifest, data, _known_mode(mode), trust)
        threads = threads if threads is not None else self.manifest.get("threads", 1)
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise UsageError(f"threads must be a whole number from 1, not {threads!r}")
        self._data, self._threads = data, threads
        self._lock: threading.Lock
        self._begin()
        with self._lock:
            self.signature: Signature = self._opened().signature
        self._batches = batches_of(self.manifest, data, trust)
        self._limits = ShapeLimits.of(self.manifest)
        # Of the last batch that was run whole. Limits and proven sizes are of shapes alone, and a small network's call
        # is no longer than 60 µs.
        self._checked: Form | None = None
        self.refused_values = refused_values_of(self.manifest, data, trust)
        self._processor: Processor | None = None
        self._defaults: Mapping[str, Any] = {}  # of the processor's params, in place of the manifest's
        _OPEN.add(self)

    def _begin(self) -> None:
        """Without a session, and with nothing that has to end."""
        self._session: Any = None
        self._forked = False
        self._stack = ExitStack()
        self._downloaded = self._stack.enter_context(ExitStack())  # ends last: the runtime may have mapped the files
        # A session promises nothing about threads, and one call already uses all the compute threads it was given.
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, self._stack.close)  # for those who never close it

    def _opened(self) -> Any:
        """The session, opened where there is none. The lock must be held."""
        if self._session is None:
            if not self._end.alive:
                raise UsageError("this model is closed: load it anew")
            with ExitStack() as opening:
                artifact = artifact_of(self.manifest, self._data, _folder_for(self.manifest, opening))
                backend = _backend(artifact.backend, self.manifest)
                if self._forked:
                    self._demand_reopening(backend)
                self._session = opening.enter_context(opened_as_called(backend, artifact, self._threads))
                self._stack.push(opening.pop_all())
        return self._session

    def _demand_reopening(self, backend: Backend) -> None:
        """Raise UsageError for a backend that a forked process can't use, IntegrityError for other files than those
        that were loaded."""
        if not backend.capabilities.reopens_after_fork:
            raise UsageError(
                f"this process was forked from the one that loaded the model, and {backend.name} can't run here: its "
                "threads stayed there",
                fix="load the model in each process, after the fork (gunicorn: without --preload; multiprocessing: the "
                "start method spawn)",
            )
        if self._trust is not None:
            verify_model(self._data.parent, self._trust)
        if check_integrity(self._data)["digest"] != self._digest:
            raise IntegrityError(
                "the model was replaced after it was loaded", fix="load it anew", where=str(self._data.parent)
            )

    def _leave_behind(self) -> None:
        """In a process that was just forked from the one that opened the model.

        The runtime's threads are not here: a call would wait for them for ever, and so would the end of the session.
        Nothing of it is used or ended here, and no file is deleted, since they are the other process's. Another thread
        may have held the lock.
        """
        if self._end.detach() is None:  # closed before
            self._lock = threading.Lock()
            return
        _keep_for_good(self._stack)
        _keep_for_good(self._session)
        self._begin()
        self._forked = True

    @property
    def processor(self) -> Processor | None:
        """What stands between texts, pictures or recordings and the graph; None for a model that takes tensors alone.
        Raises MissingDependencyError where a package that it needs is not installed."""
        answer = self.manifest.get("answer", {})
        with self._lock:
            if self._processor is None and (answer.get("text") or answer.get("media")):
                answer = _with_defaults(answer, self._defaults)
                self._processor = _open_processor(self._data, answer, self.signature, self.manifest)
        return self._processor

    def run(self, batch: Batch) -> Batch:
        """All outputs by name, for exactly the names, types and shapes of `signature`, of any number of rows from 1:
        what was not proven in one batch is run in several (`compile_stage.serving.batches`).

        Raises:
            UsageError: It does not fit the signature; or it is larger than what was proven; or it has another number of
                rows than the batches that were proven, and parts of a batch may not be answered by themselves.
        """
        checked = has_form(batch, self._checked)
        if not checked:
            self._limits.demand(batch)
            batches = self._batches
            if batches is not None and not batches.takes(_rows(batch)):
                return self._in_parts(batches, self.run, batch)
        with self._lock:
            outputs: Batch = self._opened().run(batch)
        if not checked:
            self._checked = form_of(batch)
        return outputs

    @property
    def first(self) -> Callable[[Batch], Batch] | None:
        """Of a language model, what answers as `run` does, for the first new token alone (`serving.generation`); None
        for any other model."""
        with self._lock:
            return self._first if hasattr(self._opened(), "first") else None

    def _first(self, batch: Batch) -> Batch:
        self._limits.demand(batch)
        batches = self._batches
        if batches is None or batches.takes(_rows(batch)):
            with self._lock:
                outputs: Batch = self._opened().first(batch)
            return outputs
        return self._in_parts(batches, self._first, batch)

    def _in_parts(self, batches: ProvenBatches, run: Callable[[Batch], Batch], batch: Batch) -> Batch:
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        return batches.run(run, batch)

    def generate(self, ids: Array, new_tokens: int, **settings: Any) -> list[list[int]]:
        """Of a language model: what it writes after prompts [batch, tokens] of one length
        (`compile_stage.serving.generation.GenerationSession.generate`), in batches that were proven, as `run`.

        Raises:
            UsageError: It is no language model; or these are no prompts; or they need more places than the network has,
                as far as that is known; or so many were not proven, and parts may not be answered by themselves.
        """
        with self._lock:
            writes = hasattr(self._opened(), "generate")
        if not writes:
            raise UsageError("this model is no language model, so it generates nothing; call run")
        prompts = whole_prompts(ids)
        longest = (self.manifest.get("answer", {}).get("text") or {}).get("longest")
        if longest is not None and prompts.shape[1] + new_tokens > longest + 1:  # the last token is written, not read
            raise UsageError(
                f"the prompts have {prompts.shape[1]} tokens and {new_tokens} new ones are asked for, and the model "
                f"has places for {longest}"
            )

        def write(rows: Array) -> list[list[int]]:
            with self._lock:
                tokens: list[list[int]] = self._opened().generate(rows, new_tokens, **settings)
            return tokens

        return write(prompts) if self._batches is None else self._batches.run_lists(write, prompts)

    def close(self) -> None:
        """Give the runtime's memory back. A second call does nothing."""
        with self._lock:
            self._end()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a published model can't be pickled or copied, since its runtime holds it: load it by its URI in each "
            "process, mlflow.pyfunc.load_model(URI)"
        )

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_OPEN: weakref.WeakSet[CompiledModel] = weakref.WeakSet()
"""The models of this process."""


def _leave_all_behind() -> None:
    for model in list(_OPEN):
        model._leave_behind()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_all_behind)


def _keep_for_good(held: object) -> None:
    """Never let it end, not with the process either: a runtime that ends waits for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _rows(batch: Batch) -> int:
    """Of the first input; 0 where there is none, or it is no array of rows."""
    for array in batch.values():
        shape = getattr(array, "shape", ())
        return int(shape[0]) if shape else 0
    return 0


def load_model(
    model_uri: str,
    *,
    threads: int | None = None,
    on_hardware_mismatch: str | None = None,
    dst_path: str | Path | None = None,
    variant: str | None = None,
) -> CompiledModel:
    """Open a published model by URI (`models:/...`, `runs:/...`) or by the path of its folder.

    Args:
        threads: Compute threads; those of the manifest when None.
        on_hardware_mismatch: `error`, `warn` or `ignore`; the manifest's when None.
        dst_path: Where to download to; a temporary folder, which ends with the model, when None. A local folder is used
            where it is.
        variant: Of a version that holds several artifacts, the id of the one to open; that which is the fastest and
            proven for this machine when None.

    Raises:
        IntegrityError: A file is not what was published, or this is another machine and that is an error.
        MissingDependencyError: The runtime is not installed.
    """
    if not is_uri(model_uri) and Path(model_uri).is_dir():
        return CompiledModel(model_uri, threads=threads, on_hardware_mismatch=on_hardware_mismatch, variant=variant)
    import mlflow.artifacts

    with ExitStack() as stack:
        if dst_path is None:
            dst_path = tempfile.mkdtemp(prefix="compile-stage-model-")
            stack.callback(shutil.rmtree, dst_path, ignore_errors=True)
        Path(dst_path).mkdir(parents=True, exist_ok=True)
        local = mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(dst_path))
        model = CompiledModel(local, threads=threads, on_hardware_mismatch=on_hardware_mismatch, variant=variant)
        model._downloaded.push(stack.pop_all())
        return model


def _known_mode(mode: str) -> str:
    if mode not in ("error", "warn", "ignore"):
        raise UsageError(f"on_hardware_mismatch can't be {mode!r}; it can be error, warn or ignore")
    return mode


def _choose(whole: Mapping[str, Any], data: Path, mode: str, trust: Trust | None, wanted: str | None) -> Chosen:
    """The variant that this machine loads, said in one line of the log."""
    chosen = choose(whole, data, mode=mode, trust=trust, wanted=wanted)
    _log.info("variant %s: %s", chosen.manifest["variant"], chosen.reason)
    if chosen.doubt and mode != "ignore":
        text = f"{chosen.doubt}; loaded is {chosen.manifest['variant']}, whose accuracy and speed are not known here"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return chosen


def _folder_for(manifest: Mapping[str, Any], stack: ExitStack) -> Path | None:
    """A folder for an artifact that must be put together, which ends with the stack; None for any other."""
    if not shares_files(str(manifest.get("folder", "")), manifest.get("stored") or {}):
        return None
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compile-stage-variant-")))


def _demand_trust(manifest: Mapping[str, Any], trust: Trust | None, data: Path) -> None:
    if trust is None and manifest.get("signature_required"):
        raise IntegrityError(
            "its policy requires a signature, and nothing here says whose is trusted",
            fix=f"set {TRUST_VARIABLE} to the signer's public key, or to a trust file",
            where=str(data.parent),
        )


def _accept_machine(manifest: Mapping[str, Any], data: Path, mode: str, trust: Trust | None) -> None:
    if mode == "ignore" or (reason := refuse_machine(manifest, data, trust)) is None:
        return
    problem = f"the model was compiled and validated elsewhere ({reason}), so its accuracy and speed are not known here"
    if mode == "warn":
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
        return
    ways = [f"pip install {' '.join(wanted)}"] if (wanted := runtime_to_install(manifest, data, trust)) else []
    ways += ["run compile-stage, or compile-stage validate, on this kind of machine"]
    raise IntegrityError(
        problem,
        fix=", or ".join([*ways, "load it with model_config={'on_hardware_mismatch': 'warn'}"]),
    )


def _backend(name: str, manifest: Mapping[str, Any]) -> Backend:
    if name in BACKENDS:
        module, _, attribute = BACKENDS[name].partition(":")
        try:
            backend: Backend = getattr(importlib.import_module(module), attribute)()
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("compile_stage."):
                raise
            # A process has one `compile_stage`: that of the first model that it loaded, which carries the files of its
            # own backend.
            raise MissingDependencyError(
                f"the model runs on {name}, and this process has the loader of another published model, which lacks "
                f"{error.name}",
                fix="load models of different backends in processes of their own, or install compile-stage and import "
                "compile_stage.flavor first",
            ) from error
    else:
        backend = plugins.load_here("backends", name)
    if absent := plugins.absent_to_open(backend):
        pinned = " ".join(pin(package, version) for package, version in manifest.get("runtime", {}).items())
        raise MissingDependencyError(
            f"the model runs on {name}, which is not installed ({', '.join(absent)})",
            fix=f"pip install {pinned or name}",
        )
    return backend


def _with_defaults(answer: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's `answer` with other defaults of its params."""
    changed = {kind: answer[kind] for kind in ("text", "media") if answer.get(kind)}
    return {
        **answer,
        **{kind: {**how, "defaults": {**how.get("defaults", {}), **defaults}} for kind, how in changed.items()},
    }


def _open_processor(
    data: Path, answer: Mapping[str, Any], signature: Signature, manifest: Mapping[str, Any]
) -> Processor:
    text, media = answer.get("text"), answer.get("media", {})
    try:
        if text and text.get("task") == GENERATION:
            return GenerationProcessor(data / TOKENIZER_FOLDER, text)
        if text:
            return TextProcessor(data / TOKENIZER_FOLDER, text, signature, int(text.get("batch_size", 1)))
        return MediaProcessor(media, signature, int(media.get("batch_size", 1)))
    except ModuleNotFoundError as error:
        package = {"PIL": "pillow"}.get(str(error.name), str(error.name))
        version = manifest.get("runtime", {}).get(package)
        raise MissingDependencyError(
            f"the model takes {'text' if text else 'pictures'}, and the package {package} is not installed",
            fix=f"pip install {pin(package, version) if version else package}",
        ) from error


_SETTINGS = ("threads", "on_hardware_mismatch", "variant")
"""What of `model_config` is ours; the rest goes to a custom pyfunc's code, or is a default of a pipeline's params."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _with_signature(method: _Method) -> _Method:
    """Keep what `inspect.signature` says of it. MLflow asks in every call, and the answer took longer than all else
    that a small model's call does."""
    method.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return method


@contextmanager
def _refusals_said() -> Iterator[None]:
    """The scoring server answers 400 with the sentence of what we refuse; of any other error it says none. A session
    refuses what is larger than all that it was compiled for."""
    try:
        yield
    except (InputRefusedError, UsageError) as error:
        from mlflow.exceptions import MlflowException

        raise MlflowException.invalid_parameter_value(str(error)) from error


class _Pyfunc:
    """What MLflow's pyfunc calls."""

    def __init__(self, model: CompiledModel) -> None:
        self._model, self._processor = model, model.processor

    def get_raw_model(self) -> CompiledModel:
        return self._model

    @_with_signature
    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        how, processor = self._model.manifest.get("answer", {}), self._processor
        with _refusals_said():
            if processor is not None and processor.takes(data):
                if isinstance(processor, GenerationProcessor):
                    return processor.predict(data, params, self._model.generate)
                return processor.predict(data, params, self._model.run)
            demand_params(params, how)
            data = data if processor is None else processor.tensors(data)
            batch = to_batch(data, self._model.signature, how, self._model.refused_values)
            outputs = run_any_rows(self._model.run, batch, how)
        return from_outputs(outputs, data, how)


class _Wrapped(_Pyfunc):
    """A custom pyfunc's own predict(), which calls the artifact in place of its network. The files of the pyfunc were
    compared with the manifest before they are loaded."""

    def __init__(self, model: CompiledModel, how: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._how = how
        self._loaded = with_network(load_python_model(folder, config), how, self._run)

    def _run(self, batch: Batch) -> Batch:
        """As its network did: with an error for a value that it refused."""
        if (reason := self._model.refused_values.refuse(batch)) is not None:
            raise InputRefusedError(reason)
        return run_any_rows(self._model.run, batch, self._how)

    @_with_signature
    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        with _refusals_said():
            return self._loaded.predict(data, params=dict(params)) if params else self._loaded.predict(data)


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> _Pyfunc:
    """Called by `mlflow.pyfunc.load_model` with the path of the data folder."""
    if Path(path).name != DATA_NAME or not (Path(path).parent / MLMODEL).is_file():
        raise IntegrityError(
            "MLmodel is not what was published: its field flavors.python_function.data differs",
            fix="fetch the model again",
            where=path,
        )
    settings = model_config or {}
    model = CompiledModel(
        path,
        threads=settings.get("threads"),
        on_hardware_mismatch=settings.get("on_hardware_mismatch"),
        variant=settings.get("variant"),
    )
    how = model.manifest.get("answer", {}).get("python_model")
    own = {name: value for name, value in settings.items() if name not in _SETTINGS}
    if not how:
        model._defaults = own
        return _Pyfunc(model)
    return _Wrapped(model, how, Path(path) / PYFUNC_FOLDER, own)
