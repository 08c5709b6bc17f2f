"""Which rows of a batch the outputs of one ONNX operator depend on, by those of its inputs (`measure.graph_rows`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.measure.known_tensors import FEW, NO_ROWS, Known, NotFollowedError, compact, reduced

if TYPE_CHECKING:
    from onnx import NodeProto

    from compile_stage.core.tensors import Array
    from compile_stage.measure.known_tensors import Rows, Shape

_WHOLE: Mapping[int, type] = {6: np.int32, 7: np.int64}  # by TensorProto.DataType


def _whole(value: Known | None) -> np.uint8:
    return np.uint8(np.bitwise_or.reduce(value.rows, axis=None)) if value is not None else np.uint8(0)


def _all_of(values: Iterable[Known | None]) -> np.uint8:
    return np.uint8(np.bitwise_or.reduce([np.uint8(0), *map(_whole, values)]))


def _attribute(attributes: Mapping[str, Any], name: str, default: int) -> int:
    return int(attributes[name].i) if name in attributes else default


def named(node: NodeProto) -> str:
    """For people."""
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} that makes {node.output[0]!r}"


def _values(node: NodeProto, one: Known | None) -> Array:
    values = one.values() if one is not None else None
    if values is None:
        raise NotFollowedError(f"the sizes or places that its {named(node)} reads are known only when it runs")
    return values


def _flat(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _flat(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh Bernoulli Binarizer BitShift BitwiseAnd BitwiseNot BitwiseOr"
    " BitwiseXor Cast CategoryMapper Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu Greater"
    " GreaterOrEqual HardSigmoid HardSwish Identity Imputer IsInf IsNaN LabelEncoder LeakyRelu Less LessOrEqual"
    " Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow RandomNormalLike RandomUniformLike Reciprocal Relu Round"
    " Scaler Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where"
    " Xor"
)
_OF_THE_FIRST = _flat("CastLike DequantizeLinear DynamicQuantizeLinear QuantizeLinear")
"""Element by element of the first input; all others are for all. DynamicQuantizeLinear takes its range from the whole
batch, and CastLike of its second input the type alone: what that range changes is rounding, which the gates bound in
the calls that are compared."""

_SIZES = _flat("Shape Size ConstantOfShape Range EyeLike RandomNormal RandomUniform Constant")
"""What they make depends on shapes, or on inputs that must depend on no row."""

_REDUCE = _flat(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)
_MOVE = _flat(
    "Reshape Flatten Squeeze Unsqueeze Transpose Slice Concat Split Expand Tile Pad DepthToSpace SpaceToDepth Trilu"
)
_BY_ROW = {
    **dict.fromkeys(
        _flat(
            "Conv ConvTranspose ConvInteger QLinearConv AveragePool MaxPool LpPool LRN Col2Im GlobalAveragePool"
            " GlobalMaxPool GlobalLpPool InstanceNormalization GroupNormalization Resize Upsample AffineGrid STFT"
            " TfIdfVectorizer OneHotEncoder TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor SVMClassifier"
            " SVMRegressor LinearClassifier LinearRegressor Normalizer"
        ),
        (0,),
    ),
    "GridSample": (0, 1),
    "DeformConv": (0, 2, 4),
    "Attention": (0, 1, 2, 4, 5),
    "FeatureVectorizer": tuple(range(64)),
}
"""Row by row of axis 0, whatever is done within one: operator → the inputs that have rows there."""

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")


def rows_of(node: NodeProto, inputs: Sequence[Known | None], shapes: Sequence[Shape], version: int) -> list[Rows]:
    """The rows that each output depends on.

    Args:
        inputs: None for one that is left out.
        shapes: Of the outputs.
        version: Of the operator set.

    Raises:
        NotFollowedError: It is not known for this operator.
    """
    name = node.op_type
    if node.domain not in _DOMAINS:
        raise NotFollowedError(f"its operator {node.domain}.{name} is not one that is followed")
    attributes = {one.name: one for one in node.attribute}
    if name in _SIZES:
        _demand_none(node, inputs if name not in ("Shape", "Size", "EyeLike") else ())
        return [NO_ROWS.reshape([1] * len(shape)) for shape in shapes]
    if name in _ELEMENTWISE or (name == "StringNormalizer" and not _drops_texts(node)):
        return [_together(inputs, shape) for shape in shapes]
    if name in _OF_THE_FIRST:
        rest = _all_of(inputs[1:]) if name != "CastLike" else np.uint8(0)
        return [_first(inputs).rows | rest, *[NO_ROWS.reshape([1] * len(shape)) for shape in shapes[1:]]]
    if name in _SPECIAL:
        return _SPECIAL[name](node, attributes, inputs, shapes, version)
    raise NotFollowedError(f"its operator {name} is not one that is followed")


def size_of(node: NodeProto, inputs: Sequence[Known | None], made: Shape | None) -> Shape | None:
    """The size of an output of those operators whose inference does not say it, or says it wrongly.

    Args:
        made: Of the output before this one; None of the first.
    """
    if node.op_type == "StringNormalizer" and inputs[0] is not None and not _drops_texts(node):
        return inputs[0].shape
    if node.domain != "ai.onnx.ml" or not inputs or inputs[0] is None:
        return None
    shape, attributes = inputs[0].shape, {one.name: one for one in node.attribute}
    if node.op_type in ("Scaler", "Normalizer", "Imputer", "Binarizer"):
        return shape
    if node.op_type == "FeatureVectorizer":
        return (shape[0], sum(one.shape[-1] for one in inputs if one is not None))
    rows = shape[0] if len(shape) > 1 else 1
    if node.op_type == "LinearRegressor":
        return (rows, attributes["targets"].i if "targets" in attributes else 1)
    if node.op_type == "SVMRegressor":
        return (rows, 1)
    if node.op_type == "TreeEnsembleRegressor":
        return (rows, attributes["n_targets"].i if "n_targets" in attributes else 1)
    if node.op_type == "ArrayFeatureExtractor" and inputs[1] is not None:
        return (*(shape[:-1] or (1,)), prod(inputs[1].shape))
    if node.op_type in ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"):
        labels = [a for n, a in attributes.items() if n.startswith("classlabels")]
        count = max(2, *(len(one) for label in labels for one in (label.ints, label.strings)))
        if node.op_type == "SVMClassifier" and not (attributes.get("prob_a") and attributes["prob_a"].floats):
            count = max(2, count * (count - 1) // 2)
        return (rows,) if made is None else (rows, count)
    return None


def _drops_texts(node: NodeProto) -> bool:
    """Whether a StringNormalizer leaves texts out: then those behind are in the rows of others."""
    return any(one.name == "stopwords" and one.strings for one in node.attribute)


def _demand_none(node: NodeProto, inputs: Iterable[Known | None]) -> None:
    if any(one is not None and one.rows.any() for one in inputs):
        raise NotFollowedError(f"the size or the place of what its {named(node)} makes depends on values")


def _first(inputs: Sequence[Known | None]) -> Known:
    if not inputs or inputs[0] is None:
        raise NotFollowedError("a node in it lacks its first input")
    return inputs[0]


def _together(inputs: Iterable[Known | None], shape: tuple[int, ...]) -> Rows:
    """Element by element, as ONNX broadcasts."""
    rows = NO_ROWS.reshape([1] * len(shape))
    for one in inputs:
        if one is not None:
            rows = rows | one.rows
    return rows


def _reduce(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data = _first(inputs)
    rank = len(data.shape)
    if node.op_type in ("ArgMax", "ArgMin"):
        axes = [_attribute(attributes, "axis", 0) % rank]
    elif "axes" in attributes:
        axes = [axis % rank for axis in attributes["axes"].ints]
    else:
        given = inputs[1] if len(inputs) > 1 else None
        axes = [int(axis) % rank for axis in np.ravel(_values(node, given))] if given is not None else []
    if not axes and _attribute(attributes, "noop_with_empty_axes", 0):
        return [data.rows]
    axes = axes or list(range(rank))
    rows = reduced(data.rows, axes)
    return [rows if _attribute(attributes, "keepdims", 1) else rows.reshape(_kept(rows.shape, axes))]


def _kept(shape: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _move(
    node: NodeProto, _: Mapping[str, Any], inputs: Sequence[Known | None], __: Sequence[Shape], version: int
) -> list[Rows]:
    """The operator itself moves the rows of the elements."""
    moved = inputs if node.op_type == "Concat" else inputs[:1]
    _demand_none(node, inputs[len(moved) :])
    if node.op_type == "Transpose":
        perm = next((list(one.ints) for one in node.attribute if one.name == "perm"), None)
        return [np.transpose(_first(inputs).rows, perm)]
    given: list[Array | None] = []
    for number, one in enumerate(inputs):
        if one is None:
            given.append(None)
        elif node.op_type == "Pad" and number == 2:  # what it fills with depends on no row
            given.append(np.zeros((), np.uint8))
        else:
            given.append(np.ascontiguousarray(one.full()) if number < len(moved) else _values(node, one))
    try:
        answers = run_node(node, given, version)
    except Exception as error:
        raise NotFollowedError(f"how its {named(node)} moves rows can't be said") from error
    return [compact(np.asarray(answer, np.uint8)) for answer in answers]


def partly_known(node: NodeProto, inputs: Sequence[Known | None], version: int) -> Array | None:
    """`Known.partly` of what a node makes that moves whole numbers; None of any other."""
    if node.op_type not in ("Concat", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Transpose", "Cast"):
        return None
    moved = len(inputs) if node.op_type == "Concat" else 1
    values: list[Array | None] = []
    for number, one in enumerate(inputs):
        if one is None or one.kind not in _WHOLE or prod(one.shape) > FEW:
            return None
        value = one.values()
        if value is None and number < moved:
            value = one.partly if one.partly is not None else np.zeros(one.shape, _WHOLE[one.kind])
            if one.partly is None and not one.full().all():  # a constant that is not known
                return None
        values.append(value)
    try:
        return np.asarray(run_node(node, values, version)[0])
    except Exception:  # noqa: BLE001 - whatever it raises for what it does not know: then nothing is known
        return None


def run_node(node: NodeProto, values: Sequence[Array | None], version: int) -> list[Any]:
    """What a node answers to these inputs; whatever is raised where it does not take them.

    Args:
        version: Of the operator set.
    """
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    alone = type(node)()
    alone.CopyFrom(node)
    alone.input[:] = [f"i{number}" if value is not None else "" for number, value in enumerate(values)]
    given = {f"i{number}": value for number, value in enumerate(values) if value is not None}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    wanted = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([alone], "node", inputs, wanted)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])
    return list(ReferenceEvaluator(model).run(None, given))


def _softmax(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], _: Sequence[Shape], version: int
) -> list[Rows]:
    data = _first(inputs)
    rank = len(data.shape)
    if version < _SOFTMAX_OF_ONE_AXIS and node.op_type in ("Softmax", "LogSoftmax", "Hardmax"):
        axes = list(range(_attribute(attributes, "axis", 1) % rank, rank))
    else:
        axes = [_attribute(attributes, "axis", -1) % rank]
    return [data.rows | reduced(data.rows, axes)]


def _normalised_behind(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data = _first(inputs)
    rank = len(data.shape)
    statistics = reduced(data.rows, range(_attribute(attributes, "axis", -1) % rank, rank))
    rows = _together([data, *inputs[1:]], data.shape) | statistics
    return [rows, *[statistics] * (len(shapes) - 1)]


def _normalised_over(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], _: Sequence[Shape], __: int
) -> list[Rows]:
    data = _first(inputs)
    axes = list(attributes["axes"].ints) if "axes" in attributes else [0, 2, 3]
    return [data.rows | reduced(data.rows, [axis % len(data.shape) for axis in axes])]


def _normalised_batch(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data = _first(inputs)
    rows = data.rows | _all_of(inputs[1:])
    if _attribute(attributes, "training_mode", 0):
        rows = rows | reduced(data.rows, [axis for axis in range(len(data.shape)) if axis != 1])
    whole = np.bitwise_or.reduce(rows, axis=None, dtype=np.uint8)
    return [rows, *[np.full([1] * len(shape), whole) for shape in shapes[1:]]]


def _along(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    """Whatever lies along one axis, together."""
    data = _first(inputs)
    _demand_none(node, inputs[1:])
    if node.op_type == "CumSum":
        axis = int(np.ravel(_values(node, inputs[1]))[0])
    else:
        axis = _attribute(attributes, "axis", -1)
    return [reduced(data.rows, [axis % len(data.shape)])] * len(shapes)


def _matmul(
    node: NodeProto, _: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], __: int
) -> list[Rows]:
    places = (0, 3) if node.op_type == "QLinearMatMul" else (0, 1)
    one, other = (inputs[place] for place in places)
    if one is None or other is None:
        raise NotFollowedError(f"its {named(node)} lacks an input")
    rest = _all_of(inputs[i] for i in range(len(inputs)) if i not in places)
    left = reduced(one.rows, [len(one.shape) - 1])
    left = left if len(one.shape) > 1 else left.reshape(1, 1)
    right = reduced(other.rows, [max(0, len(other.shape) - 2)])
    right = right if len(other.shape) > 1 else right.reshape(1, 1)
    rows = left | right | rest
    if len(other.shape) == 1:
        rows = rows[..., 0]
    if len(one.shape) == 1:
        rows = rows[..., 0, :] if len(other.shape) > 1 else rows[..., 0]
    return [rows.reshape(rows.shape[len(rows.shape) - len(shapes[0]) :])]


def _gemm(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    one, other = _first(inputs).rows, _first(inputs[1:]).rows
    one = one.T if _attribute(attributes, "transA", 0) else one
    other = other.T if _attribute(attributes, "transB", 0) else other
    return [reduced(one, [1]) | reduced(other, [0]) | _together(inputs[2:], shapes[0])]


def _einsum(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    given, arrow, result = attributes["equation"].s.decode().replace(" ", "").partition("->")
    terms = given.split(",")
    letters = "".join(terms)
    if "." in letters or len(terms) != len(inputs) or any(len(set(term)) < len(term) for term in terms):
        raise NotFollowedError(f"the equation of its {named(node)} is not one that is followed")
    if not arrow:
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    rows = NO_ROWS.reshape([1] * len(shapes[0]))
    for term, one in zip(terms, inputs, strict=True):
        if one is None:
            continue
        bits = reduced(one.rows, [axis for axis, letter in enumerate(term) if letter not in result])
        size = dict(zip(term, range(len(term)), strict=True))
        kept = [letter for letter in result if letter in size]
        summed = [letter for letter in term if letter not in result]
        bits = np.transpose(bits, [size[letter] for letter in (*summed, *kept)])
        bits = bits.reshape(bits.shape[len(summed) :])
        at = iter(bits.shape)
        rows = rows | bits.reshape([next(at) if letter in size else 1 for letter in result])
    return [rows]


def _gather(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], _: Sequence[Shape], __: int
) -> list[Rows]:
    data, places = _first(inputs), _first(inputs[1:])
    axis = _attribute(attributes, "axis", 0) % len(data.shape)
    values = places.values()
    if values is not None:
        return [compact(data.full_along(axis).take(values.astype(np.int64), axis))]
    bits = reduced(data.rows, [axis])
    before, behind = bits.shape[:axis], bits.shape[axis + 1 :]
    rows = bits.reshape(*before, *[1] * len(places.shape), *behind)
    return [rows | places.rows.reshape(*[1] * len(before), *places.rows.shape, *[1] * len(behind))]


def _extract(
    node: NodeProto, _: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], __: int
) -> list[Rows]:
    """Places of the last axis, which are all elements of the second input."""
    data, places = _first(inputs), _first(inputs[1:])
    bits = reduced(data.rows.reshape(data.rows.shape or (1,)), [-1])
    rows = bits | np.broadcast_to(places.rows, places.shape).ravel()
    return [compact(rows.reshape([1] * (len(shapes[0]) - rows.ndim) + list(rows.shape)))]


def _gather_elements(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data, places = _first(inputs), _first(inputs[1:])
    axis = _attribute(attributes, "axis", 0) % len(data.shape)
    cut = tuple(slice(None) if at == axis else slice(0, size) for at, size in enumerate(places.shape))
    values = places.values()
    if values is not None:
        counted = values.astype(np.int64)
        whole = np.where(counted < 0, counted + data.shape[axis], counted)
        return [compact(np.take_along_axis(data.full()[cut], whole, axis))]
    return [compact(reduced(data.full()[cut], [axis]) | places.full())]


def _gather_nd(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    """Along an axis whose places are known, from there; along any other, from all of it."""
    data, places = _first(inputs), _first(inputs[1:])
    shared = _attribute(attributes, "batch_dims", 0)
    values = places.values() if places.values() is not None else places.partly
    count = places.shape[-1]
    full = places.full()
    known = [values is not None and not full[..., column].any() for column in range(count)]
    bits = reduced(data.rows, [shared + column for column in range(count) if not known[column]])
    size = [1 if shared <= a < shared + count and not known[a - shared] else n for a, n in enumerate(data.shape)]
    bits = np.broadcast_to(bits, size)
    lead = places.shape[:-1]
    index: list[Any] = [
        np.arange(lead[axis]).reshape([-1 if at == axis else 1 for at in range(len(lead))]) for axis in range(shared)
    ]
    zeros = np.zeros(lead, np.int64)
    index += [values[..., column] if known[column] and values is not None else zeros for column in range(count)]
    rows = bits[tuple(index)] if index else bits
    own = reduced(full, [len(places.shape) - 1])[..., 0]
    return [compact(rows | own.reshape(*own.shape, *[1] * (rows.ndim - own.ndim)))]


def _scatter_nd(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data, places, new = _first(inputs), _first(inputs[1:]), _first(inputs[2:])
    values = places.values()
    if values is None:
        return [data.rows | _all_of(inputs[1:])]
    rows = data.full().copy()
    index = tuple(np.moveaxis(values, -1, 0))
    adds = "reduction" in attributes and attributes["reduction"].s != b"none"
    if adds:
        np.bitwise_or.at(rows, index, new.full())
    else:
        rows[index] = new.full()
    return [compact(rows)]


def _scatter_elements(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    """What is put anywhere along the axis may be at each place of it."""
    data, places, new = _first(inputs), _first(inputs[1:]), _first(inputs[2:])
    axis = _attribute(attributes, "axis", 0) % len(data.shape)
    put = reduced(places.full() | new.full(), [axis])
    if any(size != data.shape[at] for at, size in enumerate(places.shape) if at != axis):
        return [data.rows | _all_of(inputs[1:])]
    return [compact(data.full() | put)]


def _one_hot(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    places = _first(inputs)
    _demand_none(node, inputs[1:2])
    return [np.expand_dims(places.rows, _attribute(attributes, "axis", -1) % len(shapes[0])) | _all_of(inputs[2:])]


def _recurrent(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    """[time, batch, features] in; [time, directions, batch, features] out, and states [directions, batch, features].
    With `layout`, the batch is first."""
    first = bool(_attribute(attributes, "layout", 0))

    def of_batch(one: Known | None, axis: int) -> Rows:
        if one is None:
            return NO_ROWS.reshape(1)
        return reduced(one.rows, [at for at in range(len(one.shape)) if at != axis]).ravel()

    padded = [*inputs, *[None] * 8]
    batch = of_batch(padded[0], 0 if first else 1) | of_batch(padded[4], 0) | _all_of([*padded[1:4], padded[7]])
    for state in padded[5:7]:
        batch = batch | of_batch(state, 0 if first else 1)
    made = []
    for number, shape in enumerate(shapes):
        axis = 0 if first else (2 if number == 0 else 1)
        made.append(batch.reshape([-1 if at == axis else 1 for at in range(len(shape))]) if shape else batch[:1])
    return made


def _by_row(
    node: NodeProto, _: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], __: int
) -> list[Rows]:
    of_rows = _BY_ROW[node.op_type]
    found = []
    for shape in shapes:
        rows, rank = NO_ROWS.reshape([1] * len(shape)), len(shape)
        for place, one in enumerate(inputs):
            if one is None:
                continue
            if place in of_rows and len(one.shape) > 1 and shape and one.shape[0] == shape[0]:
                bits = reduced(one.rows, range(1, len(one.shape))).ravel()
                rows = rows | bits.reshape([-1, *[1] * (rank - 1)])
            else:
                rows = rows | _whole(one)
        found.append(rows)
    return found


def _reversed(
    node: NodeProto, attributes: Mapping[str, Any], inputs: Sequence[Known | None], shapes: Sequence[Shape], _: int
) -> list[Rows]:
    data, lengths = _first(inputs), _first(inputs[1:])
    time, batch = _attribute(attributes, "time_axis", 0), _attribute(attributes, "batch_axis", 1)
    own = lengths.rows.reshape([-1 if at == batch else 1 for at in range(len(data.shape))])
    return [reduced(data.rows, [time]) | own]


_SOFTMAX_OF_ONE_AXIS = 13  # the operator set from which it is along one axis, and not of all behind it

_SPECIAL: dict[str, Callable[..., list[Rows]]] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _normalised_behind),
    "MeanVarianceNormalization": _normalised_over,
    "BatchNormalization": _normalised_batch,
    **dict.fromkeys(("CumSum", "TopK"), _along),
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    "Gemm": _gemm,
    "Einsum": _einsum,
    "ArrayFeatureExtractor": _extract,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "ReverseSequence": _reversed,
    **dict.fromkeys((*_REDUCE, "ArgMax", "ArgMin"), _reduce),
    **dict.fromkeys(_MOVE, _move),
    **dict.fromkeys(_BY_ROW, _by_row),
}
