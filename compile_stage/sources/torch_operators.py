"""Operators that PyTorch's ONNX exporter would refuse, or write with other answers than PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compile_stage.plugin_support.torch_programs import use_instead

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Translations for `torch.onnx.export(custom_translation_table=...)`.

    The exporter writes `logsigmoid` as Log(Sigmoid(x)), which in ONNX Runtime is -inf from -30 down and 4 % off at -16,
    and `logaddexp` as Log(Exp(a) + Exp(b)), which is inf from 89 up (`logaddexp2` from 128). ONNX's Softplus,
    log(1 + exp(x)), has neither. Its `atan2` is -pi where PyTorch's is pi, for 0 and a negative number: the angle of
    the first number of every spectrum. It refuses the product of each group of rows with the group's own
    matrix, by which transformers computes a mixture of experts; and `cdist`, `hypot` and `signbit`.
    """
    import torch
    from onnx import TensorProto
    from onnxscript import opset18 as op

    # Arguments are called as in PyTorch's schemas: 2.9 leaves a translation aside whose arguments are called otherwise.
    def log_sigmoid(self: Any) -> Any:
        return op.Neg(op.Softplus(op.Neg(self)))

    def logaddexp(self: Any, other: Any) -> Any:
        zero = op.CastLike(0.0, self)
        apart = op.Where(op.Equal(self, other), zero, op.Sub(self, other))  # infinity less infinity is no number
        return op.Add(op.Max(self, other), op.Softplus(op.Neg(op.Abs(apart))))

    def logaddexp2(self: Any, other: Any) -> Any:
        two = op.CastLike(math.log(2), self)
        return op.Div(logaddexp(op.Mul(self, two), op.Mul(other, two)), two)

    def atan2(self: Any, other: Any) -> Any:
        zero, pi = op.CastLike(0.0, self), op.CastLike(math.pi, self)
        nothing = op.And(op.Equal(self, zero), op.Equal(other, zero))
        angle = op.Where(nothing, zero, op.Atan(op.Div(op.Abs(self), op.Abs(other))))
        angle = op.Where(op.Less(other, zero), op.Sub(pi, angle), angle)
        return op.Where(op.Less(self, zero), op.Neg(angle), angle)

    def grouped_mm(input: Any, weight: Any, offs: Any) -> Any:  # noqa: A002 - the schema's name
        """[rows, in] by [groups, in, out], where `offs` says behind which row each group ends."""
        ends, begin, products = op.Cast(offs, to=TensorProto.INT64), op.Constant(value_ints=[0]), []
        for group in range(weight.shape[0]):
            end = op.Slice(ends, op.Constant(value_ints=[group]), op.Constant(value_ints=[group + 1]))
            own = op.Slice(input, begin, end, op.Constant(value_ints=[0]))
            products.append(op.MatMul(own, op.Gather(weight, op.Constant(value_int=group))))
            begin = end
        return op.Concat(*products, axis=0)

    def hypot(self: Any, other: Any) -> Any:
        most, least = op.Max(op.Abs(self), op.Abs(other)), op.Min(op.Abs(self), op.Abs(other))
        one = op.CastLike(1.0, self)
        share = op.Where(op.Equal(most, least), one, op.Div(least, most))  # 0 / 0 and inf / inf are no numbers
        return op.Mul(most, op.Sqrt(op.Add(one, op.Mul(share, share))))  # its square may be beyond the type

    def signbit(self: Any) -> Any:
        zero = op.CastLike(0, self)
        if not self.dtype.is_floating_point():
            return op.Less(self, zero)
        return op.Or(op.Less(self, zero), op.Less(op.Reciprocal(self), zero))  # 1 / -0.0 is -inf

    def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
        """[..., rows, features] and [..., others, features] to [..., rows, others]."""
        known = [size for size in (x1.shape[-2], x2.shape[-2]) if isinstance(size, int)]
        features = x1.shape[-1] if isinstance(x1.shape[-1], int) else 0
        if p == 2 and compute_mode != 2 and features > 16 and max(known, default=0) > 25:
            # As PyTorch does above 25 rows: a product, and no tensor of all differences. Of few features it is small.
            squares = [op.ReduceSumSquare(rows, op.Constant(value_ints=[-1]), keepdims=1) for rows in (x1, x2)]
            turned = list(range(len(x2.shape)))
            turned[-2:] = reversed(turned[-2:])
            product = op.MatMul(op.Mul(x1, op.CastLike(-2.0, x1)), op.Transpose(x2, perm=turned))
            both = op.Add(squares[0], op.Transpose(squares[1], perm=turned))
            return op.Sqrt(op.Max(op.Add(both, product), op.CastLike(0.0, x1)))
        last = op.Constant(value_ints=[-1])
        apart = op.Sub(op.Unsqueeze(x1, op.Constant(value_ints=[-2])), op.Unsqueeze(x2, op.Constant(value_ints=[-3])))
        if p == 0:
            zero = op.CastLike(0.0, x1)
            return op.ReduceSum(op.CastLike(op.Not(op.Equal(apart, zero)), x1), last, keepdims=0)
        if p == 1:
            return op.ReduceL1(apart, last, keepdims=0)
        if p == 2:
            return op.Sqrt(op.ReduceSumSquare(apart, last, keepdims=0))
        if p == math.inf:
            return op.ReduceMax(op.Abs(apart), last, keepdims=0)
        powers = op.ReduceSum(op.Pow(op.Abs(apart), op.CastLike(p, x1)), last, keepdims=0)
        return op.Pow(powers, op.CastLike(1 / p, x1))

    aten, mixtures = torch.ops.aten, {}
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        mixtures[torch.ops.transformers.grouped_mm_fallback.default] = grouped_mm
    return {
        **mixtures,
        aten.log_sigmoid.default: log_sigmoid,
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        aten.atan2.default: atan2,
        aten.hypot.default: hypot,
        aten.signbit.default: signbit,
        torch.ops.prims.signbit.default: signbit,  # what `copysign` is made of
        aten._cdist_forward.default: cdist,
    }


def write_for_exporter(program: ExportedProgram) -> None:
    """Write in other operators what the exporter refuses, or writes with other answers than PyTorch's."""
    _write_own_divisors(program)
    _write_adaptive_max_pools(program)
    _write_promoted_differences(program)
    _write_scattered_means(program)
    _write_hamming_windows(program)
    _write_norms_without_statistics(program)
    _give_attention_heads(program)
    _keep_layouts_of_attention(program)
    program.graph_module.recompile()


def _write_scattered_means(program: ExportedProgram) -> None:
    """Write the mean of a `scatter_reduce` (the neighbours of a node of a graph) as a sum divided by a count: ONNX has
    no scattered mean, and the exporter writes the last value of each place in its stead."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target is not aten.scatter_reduce.two or node.args[4] != "mean":
            continue
        held, axis, index, values = node.args[:4]
        rounding = None if node.meta["val"].dtype.is_floating_point else "floor"
        with program_graph.inserting_before(node):
            added = program_graph.call_function(node.target, (held, axis, index, values, "sum"), node.kwargs)
            ones = [program_graph.call_function(aten.ones_like.default, (given,)) for given in (held, values)]
            count = program_graph.call_function(node.target, (ones[0], axis, index, ones[1], "sum"), node.kwargs)
            mean = program_graph.call_function(aten.div.Tensor_mode, (added, count), {"rounding_mode": rounding})
        use_instead(program, node, mean)


def _write_hamming_windows(program: ExportedProgram) -> None:
    """Write a Hamming window by PyTorch's numbers, 0.54 and 0.46. The exporter takes ONNX's, 25/46 and 21/46, which are
    9 % off at the ends, and knows a window with other settings than the default ones not at all."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    defaults = [True, 0.54, 0.46]
    for node in list(program_graph.nodes):
        if getattr(node.target, "overloadpacket", None) is not aten.hamming_window:
            continue
        length, periodic, alpha, beta = list(node.args) + defaults[len(node.args) - 1 :]
        if not isinstance(length, int) or length < 2:
            continue
        turn = 2 * math.pi / (length if periodic else length - 1)
        with program_graph.inserting_before(node):
            places = program_graph.call_function(aten.arange.default, (length,), {"dtype": node.meta["val"].dtype})
            wave = program_graph.call_function(
                aten.cos.default, (program_graph.call_function(aten.mul.Tensor, (places, turn)),)
            )
            window = program_graph.call_function(
                aten.add.Tensor, (program_graph.call_function(aten.mul.Tensor, (wave, -beta)), alpha)
            )
        use_instead(program, node, window)


def _write_norms_without_statistics(program: ExportedProgram) -> None:
    """Write a `batch_norm` that has no running statistics, by which weights are standardised, as the mean and variance
    that it takes. The exporter writes ONNX's BatchNormalization in training mode, which runtimes refuse."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target is not aten.batch_norm.default or node.args[3] is not None or node.args[5] is not True:
            continue
        given, weight, bias, _, _, _, _, eps = node.args[:8]
        axes = [axis for axis in range(given.meta["val"].ndim) if axis != 1]
        channels = [-1 if axis == 1 else 1 for axis in range(len(axes) + 1)]
        with program_graph.inserting_before(node):
            mean = program_graph.call_function(aten.mean.dim, (given, axes, True))
            apart = program_graph.call_function(aten.sub.Tensor, (given, mean))
            squares = program_graph.call_function(aten.mul.Tensor, (apart, apart))
            variance = program_graph.call_function(aten.mean.dim, (squares, axes, True))
            raised = program_graph.call_function(aten.add.Tensor, (variance, eps))
            scale = program_graph.call_function(aten.sqrt.default, (raised,))
            normal = program_graph.call_function(aten.div.Tensor, (apart, scale))
            for factor, operator in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
                if factor is not None:
                    each = program_graph.call_function(aten.view.default, (factor, channels))
                    normal = program_graph.call_function(operator, (normal, each))
        use_instead(program, node, normal)


def _write_own_divisors(program: ExportedProgram) -> None:
    """Write an average pool with a `divisor_override`, which the exporter leaves out, as the average of its window and
    a factor. With `ceil_mode` the windows at the ends are smaller, and it is left to the proof."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target not in (aten.avg_pool2d.default, aten.avg_pool3d.default) or len(node.args) < 7:
            continue
        given, window, stride, padding, ceil_mode, _, divisor = node.args
        if divisor is None or ceil_mode:
            continue
        axes = 2 if node.target is aten.avg_pool2d.default else 3
        elements = math.prod(window) if len(window) > 1 else window[0] ** axes
        node.args = (given, window, stride, padding, False, True)
        with program_graph.inserting_before(node.next):
            scaled = program_graph.call_function(aten.mul.Tensor, (node, elements / divisor))
        use_instead(program, node, scaled)


def _write_adaptive_max_pools(program: ExportedProgram) -> None:
    """Write an adaptive max pool as the largest of each window, axis by axis. ONNX has only pools whose windows are all
    of one size. One whose places are asked for, or that makes several windows of an open axis, is left as it is."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    pools = {
        aten.adaptive_max_pool1d.default: 1,
        aten.adaptive_max_pool2d.default: 2,
        aten.adaptive_max_pool3d.default: 3,
    }
    for node in list(program_graph.nodes):
        if node.target not in pools or any(user.args[1] != 0 and user.users for user in node.users):
            continue
        axes = pools[node.target]
        given, windows = node.args[0], list(node.args[1]) * (axes if len(node.args[1]) == 1 else 1)
        sizes = given.meta["val"].shape[-axes:]
        if not all(
            count == 1 or (isinstance(count, int) and isinstance(size, int))
            for count, size in zip(windows, sizes, strict=True)
        ):
            continue
        for user in [user for user in node.users if user.args[1] == 0]:
            with program_graph.inserting_before(user):
                found = given
                for axis, count, size in zip(range(-axes, 0), windows, sizes, strict=True):
                    found = _largest_of_windows(program_graph, found, axis, count, size)
            use_instead(program, user, found)
            program_graph.erase_node(user)


def _largest_of_windows(program_graph: Any, given: Any, axis: int, count: int, size: Any) -> Any:
    """The largest of each of `count` windows along an axis, as PyTorch lays them: window i from i * size // count, to
    (i + 1) * size / count rounded up."""
    import torch

    aten, largest = torch.ops.aten, []
    for window in range(count):
        part = given
        if count > 1:
            begin, end = window * size // count, -(-(window + 1) * size // count)
            part = program_graph.call_function(aten.slice.Tensor, (given, axis, begin, end))
        largest.append(program_graph.call_function(aten.amax.default, (part, [axis], True)))
    return program_graph.call_function(aten.cat.default, (largest, axis)) if count > 1 else largest[0]


def _give_attention_heads(program: ExportedProgram) -> None:
    """Write attention of [batch, length, width], without heads, with one axis more, as the exporter wants it."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default or node.meta["val"].ndim != 3:
            continue
        with program_graph.inserting_before(node):
            given = [program_graph.call_function(aten.unsqueeze.default, (each, 0)) for each in node.args[:3]]
        with program_graph.inserting_before(node.next):
            answer = program_graph.call_function(aten.squeeze.dim, (node, 0))
        use_instead(program, node, answer)
        node.args = (*given, *node.args[3:])
        node.meta = {**node.meta, "val": node.meta["val"].unsqueeze(0)}


def _keep_layouts_of_attention(program: ExportedProgram) -> None:
    """Have each attention (`scaled_dot_product_attention`) lie in memory as the trace saw it.

    PyTorch's kernels lay their answers out differently, and which one it takes depends on whether the mask is trained
    and on gradients. The exporter traces the program again: with another layout it refuses the `view` that puts the
    heads together, as it did for transformers with trained biases (Swin, BEiT).
    """
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default or not node.meta["val"].is_contiguous():
            continue
        with program_graph.inserting_before(node.next):
            kept = {"memory_format": torch.contiguous_format}
            laid_out = program_graph.call_function(aten.clone.default, (node,), kept)
        use_instead(program, node, laid_out)


def _write_promoted_differences(program: ExportedProgram) -> None:
    """Write the cast of `1.0 - mask` where the mask is of whole numbers. PyTorch makes it by itself, and the exporter
    looks for a subtraction whose first argument is a number, which there is none of."""
    import torch

    program_graph, aten = program.graph_module.graph, torch.ops.aten
    for node in list(program_graph.nodes):
        if node.target is not aten.rsub.Scalar or node.args[0].meta["val"].dtype == node.meta["val"].dtype:
            continue
        with program_graph.inserting_before(node):
            cast = program_graph.call_function(aten.to.dtype, (node.args[0], node.meta["val"].dtype))
        node.args = (cast, *node.args[1:])


@contextmanager
def optimiser_corrected() -> Iterator[None]:
    """Have the exporter's optimiser leave small numbers as they are, and not search long graphs for nothing."""
    with _small_numbers_kept(), _pairs_begin_where_they_fit():
        yield


@contextmanager
def _small_numbers_kept() -> Iterator[None]:
    """Have the exporter's optimiser leave additions of 0 and products by 1 alone. It takes 1e-9 for 0, so the graph of
    `log(x + 1e-9)` would answer -inf for 0, and that of `x / (x.sum() + 1e-12)` NaN. Runtimes drop what adds nothing
    themselves."""
    from onnxscript import rewriter

    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", ())
    rounding = getattr(rewriter, "_no_op", None) or getattr(rewriter, "no_op", None)
    left_out = set(map(id, getattr(getattr(rounding, "rules", ()), "rules", ())))
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if id(rule) not in left_out)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


@contextmanager
def _pairs_begin_where_they_fit() -> Iterator[None]:
    """Have the exporter's optimiser look for pairs of operators only from an operator that can be the first of one.

    onnxscript 0.7 has a rule for two Slices, and at each operator, whatever it is, goes through the whole graph for the
    second: half of the time of a decoder's export with 30 layers. What it finds is the same.
    """
    from onnxscript.rewriter import pattern

    matcher = getattr(pattern, "SimplePatternMatcher", None)
    result = getattr(pattern, "MatchResult", None)
    if matcher is None or result is None:
        yield
        return
    search = matcher.match

    def match(self: Any, model: Any, graph: Any, node: Any, **settings: Any) -> Any:
        first = self.pattern.output_nodes[0].op_identifier()
        if len(self.pattern.output_nodes) > 1 and first is not None and first != node.op_identifier():
            return result().fail("the operator is not the first of the pattern")
        return search(self, model, graph, node, **settings)

    matcher.match = match
    try:
        yield
    finally:
        matcher.match = search
