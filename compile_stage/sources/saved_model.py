"""Is a SavedModel a graph that only computes? TensorFlow would run whatever operators a crafted one holds.

A SavedModel is a program: beside arithmetic, TensorFlow has operators that call Python (`PyFunc`), read and write
files, and speak to servers, and some run as soon as the model is loaded. So every operator of every function must stand
on a list of those that compute on tensors, or hold and read the model's own variables. The operators that write and
read checkpoints are in each SavedModel too, in functions of their own that loading does not call; that nothing else
calls them is checked.

`saved_model.pb` is read field by field (`sources.protobuf`), without TensorFlow: a refusal comes before anything is
installed. Numbers of fields are those of `saved_model.proto`, `meta_graph.proto`, `graph.proto`, `function.proto`,
`node_def.proto`, `attr_value.proto` and `saved_object_graph.proto` of TensorFlow 2.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from compile_stage.sources.protobuf import MalformedError, fields, nested, number, signed, text

FILE = "saved_model.pb"

_Answer = TypeVar("_Answer")

_MAX_BYTES = 2 << 30  # where a protobuf message ends
_MAX_NODES = 2_000_000
_MAX_DEPTH = 50

_DEFAULT_SIGNATURES = ("serving_default", "serve")
_INIT = "__saved_model_init_op"

# Arithmetic, shapes, and the model's own variables and functions. What reads or writes elsewhere, calls a program,
# keeps a table, or draws random numbers is not among them.
_COMPUTES = re.compile(
    r"""Abs | Acos | Acosh | Add | AddN | AddV2 | All | Any | ApproximateEqual | ArgMax | ArgMin | Asin | Asinh |
    Atan | Atan2 | Atanh | AvgPool(3D)? | BatchMatMul(V2|V3)? | BatchToSpace(ND)? | BiasAdd(V1)? | Bincount |
    DenseBincount | Bitcast | Bitwise(And|Or|Xor) | Invert | LeftShift | RightShift | BroadcastArgs |
    BroadcastTo | Bucketize | Case | Cast | Ceil | CheckNumerics | ClipByValue | Concat(V2|Offset)? | Const |
    Conv(2D|3D)? | Conv(2D|3D)BackpropInput(V2)? | Cos | Cosh | CropAndResize | Cross | Cumprod | Cumsum |
    CumulativeLogsumexp | DepthToSpace | DepthwiseConv2dNative(BackpropInput)? | Diag(Part)? | Digamma |
    Dilation2D | Div(NoNan)? | DynamicPartition | DynamicStitch | ParallelDynamicStitch | Einsum | Elu | Empty
    | EnsureShape | Equal | Erf | Erfc | Erfinv | Exp | ExpandDims | Expm1 | ExtractImagePatches | Fill |
    Floor | FloorDiv | FloorMod | FusedBatchNorm(V2|V3)? | Gather(Nd|V2)? | Greater(Equal)? | Identity(N)? |
    If | Igamma(c)? | Inv | InvertPermutation | IsFinite | IsInf | IsNan | L2Loss | LRN | LeakyRelu |
    Less(Equal)? | Lgamma | LinSpace | Log | Log1p | LogSoftmax | LogicalAnd | LogicalNot | LogicalOr | MatMul
    | MatrixBandPart | MatrixDiag(V2|V3|Part|PartV2|PartV3)? | MatrixSetDiag(V2|V3)? | MatrixDeterminant |
    MatrixInverse | MatrixSolve | MatrixTriangularSolve | Cholesky | Max | MaxPool(3D|V2)? | Maximum | Mean |
    Min | Minimum | MirrorPad | Mod | Mul | MulNoNan | Ndtri | Neg | NextAfter | NoOp |
    NonMaxSuppression(V2|V3|V4|V5)? | CombinedNonMaxSuppression | NotEqual | NthElement | OneHot | OnesLike |
    Pack | ParallelConcat | Pad(V2)? | PartitionedCall | StatefulPartitionedCall | Placeholder |
    PlaceholderWithDefault | Polygamma | Pow | PreventGradient | StopGradient | Prod | Qr | Range | Rank |
    RealDiv | Reciprocal | Relu | Relu6 | Reshape | ResizeArea | ResizeBicubic | ResizeBilinear |
    ResizeNearestNeighbor | Reverse(V2|Sequence)? | Rint | Roll | Round | Rsqrt | ScatterNd |
    ScaleAndTranslate | SearchSorted | Segment\w+ | Select(V2)? | Selu | Shape(N)? | Sigmoid | Sign | Sin |
    Sinh | Size | Slice | Snapshot | Softmax | Softplus | Softsign | SpaceToBatch(ND)? | SpaceToDepth |
    SparseSoftmaxCrossEntropyWithLogits | Split(V)? | Sqrt | Square | SquaredDifference | Squeeze | Stack |
    Stateless(If|While|Case) | StridedSlice | Sub | Sum | Svd | Tan | Tanh |
    TensorList(Concat|ConcatV2|Element\w+|FromTensor|Gather|GetItem|Length|PopBack|PushBack|Reserve|Resize|SetItem|Split|Stack)
    | EmptyTensorList | TensorScatter\w+ | Tile | TopK(V2)? | Transpose | TruncateDiv | TruncateMod |
    Unique(V2)? | Unpack | UnravelIndex | UnsortedSegment\w+ | UpperBound | LowerBound | Where | While | Xdivy
    | Xlog1py | Xlogy | ZerosLike | Zeta | VarHandleOp | ReadVariableOp | VarIsInitializedOp |
    AssignVariableOp | DisableCopyOnRead | ResourceGather(Nd)? | VariableShape | Assert""",
    re.VERBOSE,
)
_CHECKPOINT = frozenset(
    ("SaveV2", "RestoreV2", "MergeV2Checkpoints", "ShardedFilename", "StringJoin", "StaticRegexFullMatch")
)
_PYTHON = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"))
_FORBIDDEN_OBJECTS = {5: "a file of its own", 10: "a table or another resource", 11: "a saver of its own",
                      16: "a saver of its own"}  # fmt: skip

_OPT_IN = "set compliance.allow_pickle in the policy if you trust where it comes from"
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "str", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip


class RefusedError(ValueError):
    """Loading or calling the SavedModel could do more than compute, or it can't be read; the message says why."""


class Tensor(NamedTuple):
    """An input or output of a signature; an open dimension is None. `dtype` is NumPy's name, `str` for text."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class SavedSignature(NamedTuple):
    """One signature of a SavedModel: inputs and outputs by name, sorted, as TensorFlow itself orders them."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def refuse(folder: Path, *, trusted: bool = False) -> str | None:
    """None when the SavedModel only computes, or the reason with what to do.

    Args:
        trusted: The policy lets it run code of its own. Python functions are refused all the same: they lie in the
            process that made them, and not in the file.
    """
    try:
        _read(folder, _refuse_python if trusted else _check)
    except RefusedError as error:
        return str(error)
    return None


@contextmanager
def checked(folder: Path) -> Iterator[Path]:
    """A folder with the graph that `refuse` looks at and the model's variables, and nothing else: TensorFlow would
    prefer other files, such as `saved_model.cpb`. It ends with the context.

    Raises:
        RefusedError: `refuse` has a reason.
    """
    if (reason := refuse(folder)) is not None:
        raise RefusedError(reason)
    with tempfile.TemporaryDirectory(prefix="compile-stage-saved-model-") as scratch:
        into = Path(scratch)
        (into / FILE).symlink_to((folder / FILE).absolute())
        (into / "variables").mkdir()
        for file in sorted((folder / "variables").glob("variables.*")):
            (into / "variables" / file.name).symlink_to(file.absolute())
        yield into


def signature(folder: Path) -> SavedSignature:
    """The signature that is served: `serving_default`, else Keras's `serve`, else the only one.

    Raises:
        RefusedError: There is none, or the file can't be read.
    """
    found = _read(folder, lambda graph: {one.name: one for one in _signatures(graph)})
    for name in _DEFAULT_SIGNATURES:
        if name in found:
            return found[name]
    if len(found) == 1:
        return next(iter(found.values()))
    has = f"it has {', '.join(sorted(found))}" if found else "it has none"
    raise RefusedError(
        f"its SavedModel has no signature serving_default ({has}): give its __call__ an input_signature "
        "(@tf.function(input_signature=[tf.TensorSpec(...)])) and log it again"
    )


# --------------------------------------------------------------------------------------------------------------- within


def _read(folder: Path, ask: Callable[[memoryview], _Answer]) -> _Answer:
    """What `ask` answers to the one graph of the file, as a `MetaGraphDef`."""
    file = folder / FILE
    try:
        if not file.is_file():
            raise RefusedError(f"its SavedModel has no {FILE}: log the model again")
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise RefusedError(f"its {FILE} has {size >> 20} MiB, which no SavedModel has")
        graphs = list(nested(memoryview(file.read_bytes()), 2))
        if len(graphs) != 1:
            raise RefusedError(f"its SavedModel holds {len(graphs)} graphs, and one of TensorFlow 2 holds one")
        return ask(graphs[0])
    except (MalformedError, OSError) as error:
        raise RefusedError(f"its {FILE} can't be read: {error}") from error


class _Operators:
    """What the functions of a graph consist of.

    Attributes:
        savers: Functions that write or read checkpoints.
        called: Functions that other functions call.
    """

    def __init__(self) -> None:
        self.savers: set[str] = set()
        self.called: set[str] = set()
        self._nodes = 0

    def function(self, function: memoryview) -> None:
        """Look at each node of one `FunctionDef`."""
        name = text(next(nested(function, 1), memoryview(b"")), 1)
        for node in nested(function, 3):
            if self.operator(node, f"its function {name[:60]!r}") in _CHECKPOINT:
                self.savers.add(name)
            self.called.update(_called(node))

    def operator(self, node: memoryview, place: str) -> str:
        """The operator of a `NodeDef`. Raises RefusedError for one that is not on a list."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise RefusedError(f"its SavedModel has more than {_MAX_NODES} nodes, which no model has")
        operator = text(node, 2)
        if operator in _PYTHON:
            raise RefusedError(_python(place, operator))
        if operator not in _CHECKPOINT and _COMPUTES.fullmatch(operator) is None:
            raise RefusedError(
                f"{place} uses the operator {operator[:60]!r}, which is none of those that are known to compute and "
                f"nothing else: {_OPT_IN}"
            )
        return operator


def _refuse_python(graph: memoryview) -> None:
    for definition in nested(graph, 2):
        for library in nested(definition, 2):
            for function in nested(library, 1):
                for node in nested(function, 3):
                    if (operator := text(node, 2)) in _PYTHON:
                        raise RefusedError(_python("one of its functions", operator))


def _check(graph: memoryview) -> None:
    operators = _Operators()
    outer: set[str] = set()
    for definition in nested(graph, 2):
        for node in nested(definition, 1):
            operators.operator(node, "its graph")
            outer.update(_called(node))
        for library in nested(definition, 2):
            for function in nested(library, 1):
                operators.function(function)
            if any(True for _ in nested(library, 3)):
                raise RefusedError(f"its SavedModel registers gradients of its own: {_OPT_IN}")
    objects = list(nested(graph, 7))
    if len(objects) != 1:
        raise RefusedError("its SavedModel is of TensorFlow 1, which has no objects: save it with TensorFlow 2")
    used = operators.called | set(_functions_of_objects(objects[0]))
    if clash := sorted(operators.savers & used):
        raise RefusedError(f"its function {clash[0][:60]!r} reads or writes files, and the model calls it: {_OPT_IN}")


def _python(place: str, operator: str) -> str:
    return (
        f"{place} calls Python code ({operator}, of tf.py_function or tf.numpy_function), which is not in the file and "
        "no compiler takes: write it with TensorFlow's own operators and log the model again"
    )


def _called(node: memoryview) -> Iterator[str]:
    """The functions that a node names in its attributes, in lists of them too."""
    for entry in nested(node, 5):
        for value in nested(entry, 2):
            yield from _named(value, 0)


def _named(value: memoryview, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise RefusedError(f"its attributes are nested deeper than {_MAX_DEPTH} levels, which no model's are")
    for found, content in fields(value):
        if isinstance(content, int):
            continue
        if found == 10:  # AttrValue.func
            yield text(content, 1)
            for entry in nested(content, 2):
                for inner in nested(entry, 2):
                    yield from _named(inner, depth + 1)
        elif found == 1:  # AttrValue.list
            for function in nested(content, 9):
                yield text(function, 1)
                for entry in nested(function, 2):
                    for inner in nested(entry, 2):
                        yield from _named(inner, depth + 1)


def _functions_of_objects(objects: memoryview) -> Iterator[str]:
    """The functions that the objects of the SavedModel can be called by. Raises RefusedError for an object that loading
    makes in another way than from values."""
    for item in nested(objects, 1):
        for found, content in fields(item):
            if found in _FORBIDDEN_OBJECTS:
                raise RefusedError(f"an object of its SavedModel has {_FORBIDDEN_OBJECTS[found]}: {_OPT_IN}")
            if isinstance(content, int):
                continue
            if found == 6:  # SavedFunction
                yield from (_text(name) for name in nested(content, 1))
            elif found == 8:  # SavedBareConcreteFunction
                yield text(content, 1)
    for entry in nested(objects, 2):
        yield text(entry, 1)


def _signatures(graph: memoryview) -> Iterator[SavedSignature]:
    for entry in nested(graph, 5):
        for definition in nested(entry, 2):
            if (name := text(entry, 1)) == _INIT:
                continue
            inputs, outputs = (
                tuple(sorted(_tensors(definition, side), key=lambda tensor: tensor.name)) for side in (1, 2)
            )
            yield SavedSignature(name, inputs, outputs)


def _tensors(definition: memoryview, side: int) -> Iterator[Tensor]:
    for entry in nested(definition, side):
        name = text(entry, 1)
        for info in nested(entry, 2):
            kind = number(info, 2)
            if kind not in _DTYPES:
                raise RefusedError(f"{name!r} of its signature has a type (number {kind}) that no backend takes")
            yield Tensor(name, _DTYPES[kind], tuple(_sizes(info)))


def _sizes(info: memoryview) -> Iterator[int | None]:
    for shape in nested(info, 3):
        for size in nested(shape, 2):
            length = signed(number(size, 1))
            yield None if length < 0 else length


def _text(value: memoryview) -> str:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError("the name of a function is no text") from error
