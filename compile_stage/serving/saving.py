"""What a published model directory is written with: the artifact, the loader, MLflow's own files, and the manifest.

`compile_stage.flavor` reads it again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import UsageError
from compile_stage.core.generation import call_signature
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.examples import EXAMPLE_KEYS, is_example_name
from compile_stage.serving.manifest import (
    ARTIFACT_NAME,
    DATA_NAME,
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    artifact_of,
    list_beside,
    pin,
    sealed,
)
from compile_stage.serving.mlmodel import LOADER_MODULE, MLMODEL, deciding_fields
from compile_stage.serving.python_model import PYFUNC_FOLDER
from compile_stage.serving.text import TOKENIZER_FILE, TOKENIZER_FOLDER
from compile_stage.serving.variant_files import VARIANTS_FOLDER
from compile_stage.serving.vendoring import copy_modules, our_imports

if TYPE_CHECKING:
    from compile_stage.core.records import Artifact

FLAVOR_NAME = "compile_stage"

# No entry points exist where only the vendored files are; third-party backends are found by theirs.
BACKENDS = {
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
CONSTRAINTS = "constraints.txt"
"""Where MLflow puts the constraints that a model was logged with (`pip_requirements=["-c ..."]`)."""


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
        data_dir: Folder with `artifact/`, the backend's files, `tokenizer/` of a model that takes text, and `variants/`
            of a version that holds several artifacts. They are copied.
        path: A folder that does not exist yet, or is empty.
        manifest: As in the docstring of `compile_stage.flavor`; `schema`, `files`, `code`, `beside` and `digest` are
            filled in here, from what was really written.
        signature: What MLflow enforces before `predict`: MLflow's own `ModelSignature`, or ours. It gives way to that
            of `source_model`, also where that has none.
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
    answer = manifest.get("answer", {})
    source = Model.load(str(source_model)) if source_model is not None else None
    wrapped = Path(source_model) if answer.get("python_model") and source_model is not None else None
    _copy_data(data_dir, wrapped, path / DATA_NAME)
    for backend in {one["artifact"]["backend"] for one in _others(manifest)} | {artifact.backend}:
        copy_loader(backend, path / _CODE_NAME / "compile_stage")
    model = Model(metadata=dict(metadata) if metadata else None)
    model.signature, kept = _contract(source, answer, call_signature(artifact), _mlflow_signature(signature))
    if kept and kept.saved_input_example_info:
        _copy_example(Path(str(source_model)), kept, path, model)
    settings = {
        "threads": int(manifest.get("threads", 1)),
        "on_hardware_mismatch": manifest.get("on_hardware_mismatch", "error"),
    }
    if "variants" in manifest:  # each has threads of its own
        settings = {**settings, "threads": None, "variant": None}
    if source is not None and any(answer.get(key) for key in ("python_model", "text", "media")):
        # A custom pyfunc's code reads them as `context.model_config`; of a pipeline they are defaults of its params.
        settings = {**_own_config(source), **settings}
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
    _write_environment(path, _requirements(manifest, wrapped))
    if wrapped is not None and (constraints := _kept_lines(wrapped / CONSTRAINTS, _pinned(manifest))):
        (path / CONSTRAINTS).write_text(_lines(constraints), encoding="utf-8")
    for name, text in (documents or {}).items():
        (path / name).write_text(text, encoding="utf-8")
    model.save(str(path / MLMODEL))
    _write_manifest(path, {**manifest, "mlmodel": deciding_fields(path)})
    model.model_size_bytes = sum((path / name).stat().st_size for name in list_tree(path))
    model.save(str(path / MLMODEL))


def _copy_data(data_dir: Path, wrapped: Path | None, into: Path) -> None:
    """What the loader reads, into a folder that is not there yet.

    Args:
        wrapped: The model directory of a custom pyfunc, whose code goes along.
    """
    shutil.copytree(data_dir / ARTIFACT_NAME, into / ARTIFACT_NAME)
    if wrapped is not None:
        shutil.copytree(wrapped, into / PYFUNC_FOLDER)
    if (data_dir / TOKENIZER_FOLDER).is_dir():
        (into / TOKENIZER_FOLDER).mkdir()
        shutil.copyfile(data_dir / TOKENIZER_FOLDER / TOKENIZER_FILE, into / TOKENIZER_FOLDER / TOKENIZER_FILE)
    if (data_dir / VARIANTS_FOLDER).is_dir():
        shutil.copytree(data_dir / VARIANTS_FOLDER, into / VARIANTS_FOLDER)


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
    """Copy the loader, the backend's file, and what of ours these import, however indirectly, into the folder `into`,
    which is the package `compile_stage` of a published model.

    A third party's backend comes with a package of its own, which the model's requirements name; what that imports of
    ours is copied, since these files hide an installed compile-stage.
    """
    modules = {LOADER_MODULE, "compile_stage.pyfunc", "compile_stage.serving.predictions"}
    if backend in BACKENDS:
        modules.add(BACKENDS[backend].partition(":")[0])
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
    pinned = _pinned(manifest)
    ours = [pin(name, version) for name, version in sorted(pinned.items())]
    return [*ours, *_kept_requirements(wrapped, pinned)] if wrapped is not None else ours


def _pinned(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What serving needs, by package, at the versions that were proven."""
    import mlflow

    runtimes = [manifest.get("runtime", {}), *(one.get("runtime", {}) for one in _others(manifest))]
    wanted = {name: version for runtime in reversed(runtimes) for name, version in runtime.items()}
    return {"mlflow": mlflow.__version__, **plugins.package_versions("numpy"), **wanted}


def _others(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The manifests of a version's other artifacts."""
    return [entry["manifest"] for entry in manifest.get("variants", {}).values() if entry["manifest"] is not None]


def _own_config(source: Any) -> dict[str, Any]:
    """The `model_config` that the source was logged with."""
    config = source.flavors.get("python_function", {}).get("config")
    return dict(config) if isinstance(config, Mapping) else {}


def _kept_requirements(wrapped: Path, pinned: Mapping[str, str]) -> list[str]:
    """The line `-c constraints.txt` stays where that file has a line left."""
    lines = _kept_lines(wrapped / "requirements.txt", pinned)
    constrained = bool(_kept_lines(wrapped / CONSTRAINTS, pinned))
    return [line for line in lines if constrained or line.split() != ["-c", CONSTRAINTS]]


def _kept_lines(file: Path, pinned: Mapping[str, str]) -> list[str]:
    """Lines of a requirements file, but for the packages whose versions are named here."""
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


def _contract(source: Any, answer: Mapping[str, Any], graph: Signature, own: Any) -> tuple[Any, Any]:
    """The signature that MLflow enforces before predict(), and the source's `MLmodel` where its input example fits.

    A source without a signature is asked without one, with float64, lists or data frames: any signature of ours would
    make MLflow refuse some of these before the loader converts them. Where the source has one it is kept, if clients
    of the compiled model can keep to it. A signature of columns fits when we know which input the columns make up; one
    of text, pictures or recordings, when the model takes these.
    """
    if source is None:
        return own, None
    if source.signature is None or source.signature.inputs is None:
        return source.signature, source
    inputs = source.signature.inputs
    names = {spec.name for spec in graph.inputs}
    described = any(answer.get(key) for key in ("columns", "python_model", "text", "media"))
    fits = inputs.is_tensor_spec() or described or set(inputs.input_names()) == names
    return (source.signature, source) if fits else (own, None)


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
