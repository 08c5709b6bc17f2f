"""Is a `.keras` archive data only? `keras.saving.load_model` would run code, and read files, that a crafted one names.

A `.keras` file is a zip archive: `config.json` says which classes make the model up, `model.weights.h5` holds the
numbers. A class is looked up by module and name, and made from its own configuration: a `Lambda` layer holds Python
bytecode, a lookup layer the name of a file, others whole programs of other frameworks. So every class that the
configuration names must stand on a list of those that compute on tensors and nothing else. Keras has checks of its own
(`safe_mode`); several were got around (CVE-2025-1550, CVE-2025-8747, CVE-2025-9906, CVE-2025-12058).

A zip file can be made so that two readers see different records in it. So Keras never sees the file itself: `checked`
writes a new archive of what was read and found harmless, without the optimizer and the loss, and that is loaded.

Nothing here needs Keras: a refusal comes before anything is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from compile_stage.core import archives

_CHUNK = 1 << 20
_MAX_CONFIG_BYTES = 64 << 20
_MAX_DEPTH = 100
_CONFIG, _METADATA, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
_RECORDS = frozenset((_CONFIG, _METADATA, _WEIGHTS))

_LAYERS = re.compile(
    r"""Input(Layer|Spec) | Activation | Add | Average | Concatenate | Dot | Maximum | Minimum | Multiply | Subtract
    |   (Depthwise|Separable)?Conv[123]D(Transpose)? | (Separable)?Convolution[123]D(Transpose)?
    |   Dense | EinsumDense | Embedding | ReversibleEmbedding | Identity
    |   (Average|Max|GlobalAverage|GlobalMax|AdaptiveAverage|AdaptiveMax)Pooling[123]D
    |   (Avg|Max|GlobalAvg|GlobalMax)Pool[123]D
    |   (Batch|Group|Layer|RMS|Unit)?Normalization | SpectralNormalization
    |   (Alpha|Gaussian|Spatial[123]D)?Dropout | SpatialDropout[123]D | GaussianNoise | ActivityRegularization
    |   ELU | LeakyReLU | PReLU | ReLU | Softmax
    |   Flatten | Reshape | Permute | RepeatVector | Cropping[123]D | UpSampling[123]D | ZeroPadding[123]D | Masking
    |   (Additive|MultiHead|GroupQuery)?Attention
    |   (LSTM|GRU|SimpleRNN)(Cell)? | ConvLSTM[123]D | RNN | StackedRNNCells | Bidirectional | TimeDistributed
    |   Rescaling | Resizing | CenterCrop | Random[A-Z]\w+ | CategoryEncoding | Discretization""",
    re.VERBOSE,
)
_OPERATION = re.compile(r"[A-Z]\w*")
# Module → the classes of it that a model may be made of.
_CLASSES: Mapping[str, re.Pattern[str]] = {
    "keras": re.compile("Sequential|Functional|Model|DTypePolicy|FloatDTypePolicy"),
    "keras.models": re.compile("Sequential|Functional|Model"),
    "keras.src.models.functional": re.compile("Functional"),
    "keras.src.models.sequential": re.compile("Sequential"),
    "keras.layers": _LAYERS,
    "keras.initializers": re.compile(r"(Glorot|He|Lecun)(Normal|Uniform)|Constant|Identity(Initializer)?|Ones|Zeros|"
                                     r"Orthogonal(Initializer)?|Random(Normal|Uniform)|TruncatedNormal|"
                                     r"VarianceScaling"),
    "keras.regularizers": re.compile("L1|L2|L1L2|OrthogonalRegularizer"),
    "keras.constraints": re.compile("MaxNorm|MinMaxNorm|NonNeg|UnitNorm"),
    "keras.dtype_policies": re.compile("DTypePolicy|FloatDTypePolicy"),
    "keras.random": re.compile("SeedGenerator"),
    "keras.src.random.seed_generator": re.compile("SeedGenerator"),
    "keras.src.ops.numpy": _OPERATION,
    "keras.src.ops.nn": _OPERATION,
    "keras.src.ops.math": _OPERATION,
    # Not those that call a function of the model's: Map, Scan, Cond, WhileLoop and their kin.
    "keras.src.ops.core": re.compile("Cast|SaturateCast|Scatter|ScatterUpdate|Slice|SliceUpdate|StopGradient|Unstack"),
    "keras.src.ops.linalg": re.compile("Norm"),
    "keras.src.ops.image": re.compile("Resize|PadImages|CropImages|AffineTransform"),
}  # fmt: skip
_FUNCTION = re.compile(
    "celu|elu|exponential|gelu|glu|hard_shrink|hard_sigmoid|hard_silu|hard_swish|hard_tanh|leaky_relu|linear|"
    "log_sigmoid|log_softmax|mish|relu|relu6|selu|sigmoid|silu|soft_shrink|softmax|softplus|softsign|sparse_plus|"
    "sparse_sigmoid|sparsemax|squareplus|swish|tanh|tanh_shrink|threshold"
)
_VALUES = frozenset(("__keras_tensor__", "__tensor__", "__numpy__", "__ellipsis__", "__slice__"))
_IN_CONFIGS = frozenset(("vocabulary", "filepath", "file_path", "path", "call_model_method", "url"))

_OPT_IN = "set compliance.allow_pickle in the policy if you trust where it comes from"


class RefusedError(ValueError):
    """Loading the archive could run code of its own, or it can't be read; the message says why."""


class Input(NamedTuple):
    """An input as the archive declares it; an open dimension is None. `dtype` is NumPy's name."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


def refuse(path: Path) -> str | None:
    """None when loading the archive can't run code of its own, or the reason with what to do."""
    try:
        with zipped(path) as archive:
            _checked_config(archive)
    except RefusedError as error:
        return str(error)
    return None


@contextmanager
def checked(path: Path) -> Iterator[Path]:
    """A copy of the archive with the classes that `refuse` looks at, and nothing else; it ends with the context.

    Raises:
        RefusedError: `refuse` has a reason.
    """
    with zipped(path) as archive, tempfile.TemporaryDirectory(prefix="compile-stage-keras-") as scratch:
        config = _checked_config(archive)
        copy = Path(scratch) / "model.keras"
        with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as safe:
            safe.writestr(_METADATA, json.dumps({"keras_version": _version(archive)}))
            safe.writestr(_CONFIG, json.dumps(_for_inference(config)))
            info = zipfile.ZipInfo(_WEIGHTS)
            info.file_size = archive.getinfo(_WEIGHTS).file_size  # beyond 4 GiB it needs another header
            with archive.open(_WEIGHTS) as record, safe.open(info, "w") as written:
                shutil.copyfileobj(record, written, _CHUNK)
        yield copy


def inputs(path: Path) -> tuple[Input, ...]:
    """The inputs, in the order in which Keras lists them; empty where the archive does not say, as that of a model of a
    class of the user's own does not.

    Raises:
        RefusedError: The archive can't be read.
    """
    with zipped(path) as archive:
        config = _config(archive)
    return tuple(_inputs(config))


def gives_a_dict(path: Path) -> bool:
    """True where the model answers with a dict of tensors. Raises RefusedError when the archive can't be read."""
    with zipped(path) as archive:
        inner = _config(archive).get("config")
    return isinstance(inner, dict) and isinstance(inner.get("output_layers"), dict)


def output_layers(path: Path) -> tuple[str, ...]:
    """The layers whose outputs are the answer, where that is a flat list of several tensors; empty for any other.

    Raises:
        RefusedError: The archive can't be read.
    """
    with zipped(path) as archive:
        inner = _config(archive).get("config")
    listed = inner.get("output_layers") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or len(listed) < 2 or not all(map(_is_tensor, listed)):
        return ()
    return tuple(str(tensor[0]) for tensor in listed)


@contextmanager
def zipped(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, opened. Raises RefusedError when it is none, or unpacks to far more than it holds."""
    try:
        if (reason := archives.refuse(path)) is not None:
            raise RefusedError(f"its archive {path.name} {reason}")
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (OSError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise RefusedError(f"its file {path.name} is no readable .keras archive: {error}") from error


# --------------------------------------------------------------------------------------------------------------- within


def _checked_config(archive: zipfile.ZipFile) -> dict[str, Any]:
    names = archive.namelist()
    strange = sorted(set(names) - _RECORDS)
    if strange or len(names) != len(set(names)):
        what = f"holds {', '.join(strange[:3])}" if strange else "lists a record twice"
        raise RefusedError(f"its archive {what}, which only layers with files of their own need: {_OPT_IN}")
    if absent := sorted({_CONFIG, _WEIGHTS} - set(names)):
        raise RefusedError(f"its archive lacks {', '.join(absent)}: log the model again")
    config = _config(archive)
    _check(config, "the model", 0)
    return config


def _config(archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        info = archive.getinfo(_CONFIG)
    except KeyError:
        raise RefusedError(f"its archive lacks {_CONFIG}: log the model again") from None
    if info.file_size > _MAX_CONFIG_BYTES:
        raise RefusedError(f"its {_CONFIG} has {info.file_size >> 20} MiB, which no model's has")
    try:
        with archive.open(info) as record:
            config = json.loads(record.read(_MAX_CONFIG_BYTES + 1))
    except (ValueError, RecursionError, RuntimeError) as error:
        raise RefusedError(f"its {_CONFIG} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise RefusedError(f"its {_CONFIG} describes no model")
    return config


def _version(archive: zipfile.ZipFile) -> str:
    """Which Keras wrote it; Keras only warns by it. What is no version is left out."""
    try:
        with archive.open(_METADATA) as record:
            found = str(json.loads(record.read(_CHUNK)).get("keras_version", ""))
    except (KeyError, ValueError, AttributeError, RecursionError, RuntimeError):
        return ""
    return found if re.fullmatch(r"[\w.+-]{1,32}", found) else ""


def _for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only training needs: optimizer, loss and metrics."""
    return {key: value for key, value in config.items() if key != "compile_config"}


def _check(value: Any, place: str, depth: int) -> None:
    """Raise RefusedError at the first thing that is more than data."""
    if depth > _MAX_DEPTH:
        raise RefusedError(f"its {_CONFIG} is nested deeper than {_MAX_DEPTH} levels, which no model's is")
    if isinstance(value, list):
        for item in value:
            _check(item, place, depth + 1)
    elif isinstance(value, dict):
        if "class_name" in value:
            place = _check_class(value, place)
        for key, item in value.items():
            if key == "compile_config" and depth == 0:
                continue  # it is left out of what is loaded
            if key in _IN_CONFIGS and item is not None:
                raise RefusedError(f"{place} names a file or a method in {key!r}: {_OPT_IN}")
            if key == "dtype" and (policy := _policy(item)) is not None:
                raise RefusedError(
                    f"{place} computes in {policy}, and the original that a compiled model is compared with computes "
                    "in FP32: build it with keras.config.set_dtype_policy('float32'), load its weights, log it again"
                )
            if key == "stateful" and item is True:
                raise RefusedError(
                    f"{place} keeps its state from one call to the next (stateful=True), and a compiled model answers "
                    "each call alone: log it with stateful=False"
                )
            if key.endswith("activation") and isinstance(item, str) and _FUNCTION.fullmatch(item) is None:
                raise RefusedError(_custom(place, f"the function {item!r}"))
            _check(item, place, depth + 1)


def _policy(dtype: Any) -> str | None:
    """The name of a policy that computes in another precision than FP32; None for one that does not, and for the type
    of an input."""
    if isinstance(dtype, dict):
        inner = dtype.get("config")
        dtype = inner.get("name") if isinstance(inner, dict) else None
    held = dtype if isinstance(dtype, str) else ""
    return held[:60] if "float" in held and held != "float32" else None


def _check_class(described: Mapping[str, Any], place: str) -> str:
    """What the class is called for people. Raises RefusedError unless the class is on the list."""
    name, module, config = described["class_name"], described.get("module"), described.get("config")
    layer = config.get("name") if isinstance(config, dict) else None
    here = f"its layer {str(layer)[:60]!r}" if isinstance(layer, str) else place
    if name in ("Lambda", "__lambda__"):
        raise RefusedError(
            f"{here} is Python code (a Lambda), which runs when the model is loaded: use layers and keras.ops in its "
            f"place and log the model again, or {_OPT_IN}"
        )
    if not isinstance(name, str):
        raise RefusedError(_custom(here, f"the class {str(module)[:60]}.{str(name)[:60]}"))
    if name in _VALUES:
        return here
    if name == "function":
        if not isinstance(config, str) or _FUNCTION.fullmatch(config) is None:
            raise RefusedError(_custom(here, f"the function {str(config)[:60]!r}"))
        return here
    known = _CLASSES.get(module) if isinstance(module, str) else None
    if known is None or known.fullmatch(name) is None:
        raise RefusedError(_custom(here, f"the class {str(module)[:60]}.{str(name)[:60]}"))
    registered = described.get("registered_name")
    if registered not in (None, name):
        raise RefusedError(_custom(here, f"the class {str(registered)[:60]}"))
    return here


def _custom(place: str, what: str) -> str:
    return (
        f"{place} is made by {what}, which is code of its own, or none of those that are known to run no code when "
        f"the model is loaded: {_OPT_IN}"
    )


def _inputs(config: Mapping[str, Any]) -> Iterator[Input]:
    inner = config.get("config")
    if not isinstance(inner, dict) or not isinstance(inner.get("layers"), list):
        return
    declared = {}
    for layer in inner["layers"]:
        if not isinstance(layer, dict) or layer.get("class_name") != "InputLayer":
            continue
        if isinstance(described := layer.get("config"), dict):
            found = _input(described)
            declared[found.name] = found
    order = list(_names(inner.get("input_layers"))) or list(declared)
    yield from (declared[name] for name in order if name in declared)


def _input(config: Mapping[str, Any]) -> Input:
    shape = config.get("batch_shape")
    shape = shape if isinstance(shape, list) else []
    sizes = tuple(size if isinstance(size, int) else None for size in shape)
    # The batch of the first call sticks to a Sequential model that was never given an input shape; Keras takes any.
    dtype = config.get("dtype")
    dtype = dtype if isinstance(dtype, str) else "float32"
    return Input(str(config.get("name")), dtype, (None, *sizes[1:]))


def _is_tensor(described: Any) -> bool:
    """Whether it is one `[layer, 0, 0]`, and not a list of such."""
    return isinstance(described, list) and bool(described) and isinstance(described[0], str)


def _names(structure: Any) -> Iterator[str]:
    """The layers of `input_layers`: one `[name, 0, 0]`, a list or a dict of them, in Keras's order, which sorts a
    dict."""
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from _names(structure[key])
    elif isinstance(structure, list):
        if _is_tensor(structure):
            yield structure[0]
        else:
            for item in structure:
                yield from _names(item)
