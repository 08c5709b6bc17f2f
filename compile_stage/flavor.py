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
    data/manifest.json               what it is, what it was made from, the digest of every file (`serving.manifest`)
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import IntegrityError, MissingDependencyError, UsageError
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.examples import EXAMPLE_KEYS, is_example_name
from compile_stage.serving.manifest import (
    ARTIFACT_NAME,
    DATA_NAME,
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    artifact_of,
    batches_of,
    check_integrity,
    data_folder,
    list_beside,
    pin,
    read_manifest,
    refuse_machine,
    runtime_to_install,
    sealed,
)
from compile_stage.serving.media import MediaProcessor
from compile_stage.serving.mlmodel import LOADER_MODULE, MLMODEL, deciding_fields
from compile_stage.serving.prediction_io import InputRefusedError, from_outputs, to_batch
from compile_stage.serving.python_model import PYFUNC_FOLDER, load_python_model, with_network
from compile_stage.serving.signatures import verify_model
from compile_stage.serving.text import TOKENIZER_FILE, TOKENIZER_FOLDER, TextProcessor
from compile_stage.serving.trust import TRUST_VARIABLE, Trust, trust_of_environment
from compile_stage.serving.vendoring import copy_modules, our_imports

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend
    from compile_stage.core.records import Artifact
    from compile_stage.core.tensors import Batch

__all__ = [
    "FLAVOR_NAME",
    "MANIFEST_SCHEMA",
    "CompiledModel",
    "check_integrity",
    "load_model",
    "read_manifest",
    "save_model",
]

FLAVOR_NAME = "compile_stage"

# No entry points exist where only the vendored files are; third-party backends are found by theirs.
_BACKENDS = {
    "onnxruntime": "compile_stage.backends.onnxruntime:OnnxRuntime",
    "onnxruntime-openvino": "compile_stage.backends.onnxruntime:OnnxRuntimeOpenVino",
    "iree": "compile_stage.backends.iree:Iree",
    "openvino": "compile_stage.backends.openvino:OpenVino",
    "tensorrt": "compile_stage.backends.tensorrt:TensorRt",
    "inductor": "compile_stage.backends.inductor:Inductor",
    "torchscript": "compile_stage.backends.torchscript:TorchScript",
    "executorch": "compile_stage.backends.executorch:ExecuTorch",
    "litert": "compile_stage.backends.litert:LiteRt",
    "coreml": "compile_stage.backends.coreml:CoreMl",
    "tvm": "compile_stage.backends.tvm:Tvm",
    "xla": "compile_stage.backends.xla:Xla",
}
_CODE_NAME = "code"


# ----------------------------------------------------------------------------------------------------------------- save


def save_model(
    data_dir: str | Path,
    path: str | Path,
    *,
    manifest: Mapping[str, Any],
    signature: Any = None,
    source_model: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    documents: Mapping[str, str] | None = None,
) -> None:
    """Write a complete MLflow model directory.

    Args:
        data_dir: Folder with `artifact/`, the backend's files, and `tokenizer/` of a model that takes text. They are
            copied.
        path: A folder that does not exist yet, or is empty.
        manifest: As in the module's docstring; `schema`, `files`, `code`, `beside` and `digest` are filled in here,
            from what was really written.
        signature: What MLflow enforces before `predict`: MLflow's own `ModelSignature`, or ours. It gives way to that
            of `source_model`.
        source_model: The source's model directory. Where the published model can keep the source's MLflow signature and
            input example, it does, so that clients see one contract before and after.
        metadata: For `MLmodel`.
        documents: File name → text of what lies beside, such as a bill of materials.

    Raises:
        IntegrityError: `data_dir` lacks the artifact that the manifest describes.
        UsageError: `path` holds files already.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    data_dir, path = Path(data_dir), Path(path).absolute()
    artifact = artifact_of(manifest, data_dir)
    if path.exists() and any(path.iterdir()):
        raise UsageError(
            "a model can't be saved over files that are there", fix="name an empty folder", where=str(path)
        )
    shutil.copytree(data_dir / ARTIFACT_NAME, path / DATA_NAME / ARTIFACT_NAME)
    wraps = bool(manifest.get("answer", {}).get("python_model"))
    if wraps and source_model is not None:
        shutil.copytree(source_model, path / DATA_NAME / PYFUNC_FOLDER)
    if (data_dir / TOKENIZER_FOLDER).is_dir():
        (path / DATA_NAME / TOKENIZER_FOLDER).mkdir()
        shutil.copyfile(
            data_dir / TOKENIZER_FOLDER / TOKENIZER_FILE, path / DATA_NAME / TOKENIZER_FOLDER / TOKENIZER_FILE
        )
    copy_loader(artifact.backend, path / _CODE_NAME / "compile_stage")
    model = Model(metadata=dict(metadata) if metadata else None)
    kept = _source_contract(source_model, manifest.get("answer", {}), artifact.signature)
    model.signature = kept.signature if kept else _mlflow_signature(signature)
    if kept and kept.saved_input_example_info:
        _copy_example(Path(str(source_model)), kept, path, model)
    settings = {
        "threads": int(manifest.get("threads", 1)),
        "on_hardware_mismatch": manifest.get("on_hardware_mismatch", "error"),
    }
    pyfunc.add_to_model(
        model,
        loader_module=LOADER_MODULE,
        data=DATA_NAME,
        code=_CODE_NAME,
        conda_env="conda.yaml",
        python_env="python_env.yaml",
        model_config=settings,  # only keys that are declared here can be set when the model is loaded
    )
    model.add_flavor(FLAVOR_NAME, schema=MANIFEST_SCHEMA, data=DATA_NAME, code=_CODE_NAME, backend=artifact.backend)
    _write_environment(path, _requirements(manifest, Path(source_model) if wraps and source_model else None))
    for name, text in (documents or {}).items():
        (path / name).write_text(text, encoding="utf-8")
    model.save(str(path / MLMODEL))
    _write_manifest(path, {**manifest, "mlmodel": deciding_fields(path)})
    model.model_size_bytes = sum((path / name).stat().st_size for name in list_tree(path))
    model.save(str(path / MLMODEL))


def save_draft(code: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    """Write what of a model directory its loader reads, data and manifest, for a model that is not published: MLflow's
    own files are left out.

    Args:
        code: What `copy_loader` wrote.
        path: A folder that does not exist yet; on the disk of the artifact, so that its files are linked, not copied.
        manifest: With what `CompiledModel` asks for; `artifact` is the record as the backend made it.
    """
    artifact: Artifact = manifest["artifact"]
    shutil.copytree(artifact.path, path / DATA_NAME / ARTIFACT_NAME, copy_function=_link_or_copy)
    shutil.copytree(code, path / _CODE_NAME, copy_function=_link_or_copy)
    _write_manifest(path, {**manifest, "artifact": replace(artifact, path=ARTIFACT_NAME)})


def _link_or_copy(file: str, place: str) -> None:
    try:
        os.link(os.path.realpath(file), place)
    except OSError:  # another disk, or one without links
        shutil.copy2(file, place)


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    data, code = path / DATA_NAME, path / "code"
    whole = {
        **manifest,
        "schema": MANIFEST_SCHEMA,
        "files": {name: digest_file(data / name) for name in list_tree(data)},
        "code": {f"code/{name}": digest_file(code / name) for name in list_tree(code) if "__pycache__" not in name},
        "beside": {name: digest_file(path / name) for name in list_beside(path)},
    }
    text = json.dumps(sealed(whole), indent=2, sort_keys=True, ensure_ascii=False)
    (data / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def copy_loader(backend: str, into: Path) -> None:
    """Copy this file, the backend's, and what of ours these import, however indirectly, into the folder `into`, which
    is the package `compile_stage` of a published model.

    A third party's backend comes with a package of its own, which the model's requirements name; what that imports of
    ours is copied, since these files hide an installed compile-stage.
    """
    modules = {LOADER_MODULE, "compile_stage.pyfunc", "compile_stage.serving.predictions"}
    if backend in _BACKENDS:
        modules.add(_BACKENDS[backend].partition(":")[0])
    else:
        for file in plugins.source_files("backends", backend):
            modules |= our_imports(file)
    copy_modules(modules, into)


def _requirements(manifest: Mapping[str, Any], wrapped: Path | None = None) -> list[str]:
    """MLflow is named as MLflow itself names it: what is installed here may be mlflow-skinny, of the same version,
    which can't serve alone.

    Args:
        wrapped: The model directory of a custom pyfunc, whose own requirements stay, but for what is named here.
    """
    import mlflow

    pinned = {"mlflow": mlflow.__version__, **plugins.package_versions("numpy"), **manifest.get("runtime", {})}
    ours = [pin(name, version) for name, version in sorted(pinned.items())]
    return [*ours, *_kept_requirements(wrapped, pinned)] if wrapped is not None else ours


def _kept_requirements(wrapped: Path, pinned: Mapping[str, str]) -> list[str]:
    file = wrapped / "requirements.txt"
    known = {name.lower().replace("_", "-") for name in (*pinned, "compile-stage", "mlflow-skinny")}
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = {line: re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0] for line in lines}
    return [line.strip() for line, name in names.items() if name and name.lower().replace("_", "-") not in known]


def _write_environment(path: Path, pinned: Sequence[str]) -> None:
    """The files that MLflow makes an environment from, as its documentation describes them.

    `mlflow.pyfunc.save_model` would write them too (docs/decisions/0026 says why it is not called): it compares every
    requirement with what is installed here, which takes half a second and is wrong for a runtime that lies in a
    toolchain of its own.
    """
    python = platform.python_version()
    installed = plugins.package_versions("pip", "setuptools", "wheel")
    build = [f"{name}=={installed[name]}" if name in installed else name for name in ("pip", "setuptools", "wheel")]
    pip = f"pip<={installed['pip']}" if "pip" in installed else "pip"
    (path / "requirements.txt").write_text(_lines(pinned), encoding="utf-8")
    (path / "conda.yaml").write_text(
        f"channels:\n- conda-forge\ndependencies:\n- python={python}\n- {pip}\n- pip:\n"
        + _lines(f"  - {requirement}" for requirement in pinned)
        + "name: mlflow-env\n",
        encoding="utf-8",
    )
    (path / "python_env.yaml").write_text(
        f"python: {python}\nbuild_dependencies:\n"
        + _lines(f"- {requirement}" for requirement in build)
        + "dependencies:\n- -r requirements.txt\n",
        encoding="utf-8",
    )


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _source_contract(source_model: str | Path | None, answer: Mapping[str, Any], graph: Signature) -> Any:
    """The source's `MLmodel`, if clients of the compiled model can keep to its signature; else None.

    A signature of columns fits when we know which input the columns make up; one of text, pictures or recordings, when
    the model takes these.
    """
    from mlflow.models import Model

    if source_model is None:
        return None
    source = Model.load(str(source_model))
    if source.signature is None or source.signature.inputs is None:
        return None
    inputs = source.signature.inputs
    names = {spec.name for spec in graph.inputs}
    described = any(answer.get(key) for key in ("columns", "python_model", "text", "media"))
    fits = inputs.is_tensor_spec() or described or set(inputs.input_names()) == names
    return source if fits else None


def _copy_example(source: Path, kept: Any, path: Path, model: Any) -> None:
    info = dict(kept.saved_input_example_info)
    names = [info[key] for key in EXAMPLE_KEYS if info.get(key)]
    if not all(map(is_example_name, names)):
        return
    model.saved_input_example_info = info
    for name in names:
        if (source / name).is_file() and not (source / name).is_symlink():
            shutil.copyfile(source / name, path / name)


def _mlflow_signature(signature: Any) -> Any:
    if not isinstance(signature, Signature):
        return signature
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    return ModelSignature(
        inputs=Schema([_mlflow_tensor(spec) for spec in signature.inputs]),
        outputs=Schema([_mlflow_tensor(spec) for spec in signature.outputs]),
    )


def _mlflow_tensor(spec: TensorSpec) -> Any:
    import numpy as np
    from mlflow.types import TensorSpec as MlflowTensorSpec

    shape = tuple(dim if isinstance(dim, int) else -1 for dim in spec.shape)
    return MlflowTensorSpec(np.dtype("str" if spec.dtype == "str" else spec.dtype), shape, name=spec.name)


# ----------------------------------------------------------------------------------------------------------------- load


class CompiledModel:
    """A published model, open and ready to run. Safe for several threads; close it, or use it as a context manager.

    Attributes:
        manifest: What was published.
        signature: As the runtime reports it.
    """

    def __init__(
        self, model_dir: str | Path, *, threads: int | None = None, on_hardware_mismatch: str | None = None
    ) -> None:
        data = data_folder(model_dir)
        trust = trust_of_environment()
        if trust is not None:
            verify_model(data.parent, trust)  # before anything of it is read
        self.manifest = check_integrity(data)
        _demand_trust(self.manifest, trust, data)
        mode = on_hardware_mismatch or self.manifest.get("on_hardware_mismatch", "error")
        _accept_machine(self.manifest, data, mode, trust)
        threads = threads if threads is not None else self.manifest.get("threads", 1)
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise UsageError(f"threads must be a whole number from 1, not {threads!r}")
        artifact = artifact_of(self.manifest, data)
        self._stack = ExitStack()
        self._downloaded = self._stack.enter_context(ExitStack())  # ends last: the runtime may have mapped the files
        self._session = self._stack.enter_context(_backend(artifact.backend, self.manifest).open(artifact, threads))
        # A session promises nothing about threads, and one call already uses all the compute threads it was given.
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, self._stack.close)  # for those who never close it
        self.signature: Signature = self._session.signature
        self._batches = batches_of(self.manifest, data, trust)
        self._data = data
        self._processor: TextProcessor | MediaProcessor | None = None

    @property
    def processor(self) -> TextProcessor | MediaProcessor | None:
        """What stands between texts, pictures or recordings and the graph; None for a model that takes tensors alone.
        Raises MissingDependencyError where a package that it needs is not installed."""
        answer = self.manifest.get("answer", {})
        with self._lock:
            if self._processor is None and (answer.get("text") or answer.get("media")):
                self._processor = _open_processor(self._data, answer, self.signature, self.manifest)
        return self._processor

    def run(self, batch: Batch) -> Batch:
        """All outputs by name, for exactly the names, types and shapes of `signature`, of any number of rows from 1:
        what was not proven in one batch is run in several (`compile_stage.serving.batches`).

        Raises:
            UsageError: It does not fit the signature; or it has another number of rows than the batches that were
                proven, and parts of a batch may not be answered by themselves.
        """
        if self._batches is None or self._batches.takes(_rows(batch)):
            return self._run(batch)
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        return self._batches.run(self._run, batch)

    def _run(self, batch: Batch) -> Batch:
        with self._lock:
            return self._session.run(batch)

    def close(self) -> None:
        """Give the runtime's memory back. A second call does nothing."""
        with self._lock:
            self._end()

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
) -> CompiledModel:
    """Open a published model by URI (`models:/...`, `runs:/...`) or by the path of its folder.

    Args:
        threads: Compute threads; those of the manifest when None.
        on_hardware_mismatch: `error`, `warn` or `ignore`; the manifest's when None.
        dst_path: Where to download to; a temporary folder, which ends with the model, when None. A local folder is used
            where it is.

    Raises:
        IntegrityError: A file is not what was published, or this is another machine and that is an error.
        MissingDependencyError: The runtime is not installed.
    """
    if Path(model_uri).is_dir():
        return CompiledModel(model_uri, threads=threads, on_hardware_mismatch=on_hardware_mismatch)
    import mlflow.artifacts

    with ExitStack() as stack:
        if dst_path is None:
            dst_path = tempfile.mkdtemp(prefix="compile-stage-model-")
            stack.callback(shutil.rmtree, dst_path, ignore_errors=True)
        Path(dst_path).mkdir(parents=True, exist_ok=True)
        local = mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(dst_path))
        model = CompiledModel(local, threads=threads, on_hardware_mismatch=on_hardware_mismatch)
        model._downloaded.push(stack.pop_all())
        return model


def _demand_trust(manifest: Mapping[str, Any], trust: Trust | None, data: Path) -> None:
    if trust is None and manifest.get("signature_required"):
        raise IntegrityError(
            "its policy requires a signature, and nothing here says whose is trusted",
            fix=f"set {TRUST_VARIABLE} to the signer's public key, or to a trust file",
            where=str(data.parent),
        )


def _accept_machine(manifest: Mapping[str, Any], data: Path, mode: str, trust: Trust | None) -> None:
    if mode not in ("error", "warn", "ignore"):
        raise UsageError(f"on_hardware_mismatch can't be {mode!r}; it can be error, warn or ignore")
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
    if name in _BACKENDS:
        module, _, attribute = _BACKENDS[name].partition(":")
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


def _open_processor(
    data: Path, answer: Mapping[str, Any], signature: Signature, manifest: Mapping[str, Any]
) -> TextProcessor | MediaProcessor:
    text, media = answer.get("text"), answer.get("media", {})
    try:
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


class _Pyfunc:
    """What MLflow's pyfunc calls."""

    def __init__(self, model: CompiledModel) -> None:
        self._model, self._processor = model, model.processor

    def get_raw_model(self) -> CompiledModel:
        return self._model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        from mlflow.exceptions import MlflowException

        how, processor = self._model.manifest.get("answer", {}), self._processor
        try:
            if processor is not None and processor.takes(data):
                return processor.predict(data, params, self._model.run)
            data = data if processor is None else processor.tensors(data)
            outputs = self._model.run(to_batch(data, self._model.signature, how))
        # The scoring server answers 400, with this sentence. A session refuses what is larger than all that it was
        # compiled for.
        except (InputRefusedError, UsageError) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return from_outputs(outputs, data, how)


class _Wrapped(_Pyfunc):
    """A custom pyfunc's own predict(), which calls the artifact in place of its network. The files of the pyfunc were
    compared with the manifest before they are loaded."""

    def __init__(self, model: CompiledModel, how: Mapping[str, Any], folder: Path) -> None:
        super().__init__(model)
        self._loaded = with_network(load_python_model(folder), how, model.run)

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
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
        path, threads=settings.get("threads"), on_hardware_mismatch=settings.get("on_hardware_mismatch")
    )
    how = model.manifest.get("answer", {}).get("python_model")
    return _Wrapped(model, how, Path(path) / PYFUNC_FOLDER) if how else _Pyfunc(model)
