"""Two graphs run side by side on the same samples: the error of every tensor that both have, and the first node where
it departs.

The error of a tensor is its signal-to-noise ratio, 10 log10(Σ b² / Σ (a − b)²) over all samples, reference b and
candidate a, in dB: 20 dB is an error of 10 %, 40 dB of 1 %. A node *departs* when its output is at least `DROP_DB`
worse than the worst of its inputs. Inputs count for no more than what the candidate's precision can give
(`HEALTHY_DB`): the first quantised node of a network takes exact inputs, and is not blamed for quantising them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from compile_stage.core.records import record
from compile_stage.graph_debug.graphs import INPUT_OP, Graph, Node, find_tensors, is_float, pair_outputs

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

DROP_DB = 10.0
"""A node that departs adds at least nine times the error power that came in: far more than quantisation adds from
node to node."""

HEALTHY_DB: Mapping[str, float] = {
    "fp32": 110.0, "fp16": 60.0, "bf16": 42.0, "int8": 36.0, "int8-dynamic": 36.0, "fp8": 26.0, "int4": 16.0,
}  # fmt: skip
"""What one tensor of a healthy network has in that precision: 6 dB for each bit of the significand, less what outliers
and sums cost."""

RUNTIME_GAP_DB = 6.0
"""So much worse as it is served than as its graph says: the runtime's optimised kernels cause it, not the graph."""

Kind: TypeAlias = Literal["computation", "quantisation", "not finite"]


# What only hands on, picks or rescales what the node before computed.
HANDS_ON = (
    "Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu", "Erf", "Identity",
    "Dropout", "MaxPool", "AveragePool", "GlobalAveragePool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze",
    "Pad", "Slice", "BatchNormalization", "Mul", "Cast",
)  # fmt: skip


@record
class NodeError:
    """One node of the reference whose output both graphs have.

    Attributes:
        position: In the order in which the nodes run, from 0.
        tensor: The output that was compared; the worst, of several.
        snr_db: Of what the next nodes see; infinite where both are equal, -infinite where only the candidate is NaN or
            infinite.
        computed_db: Before the output is quantised; equal to `snr_db` where it is not.
        input_db: Of the worst input, at most what the precision can give.
        drop_db: `input_db - snr_db`.
        kind: Where most of the drop is from: the node's own arithmetic (weights included), the quantisation of its
            output, or values that overflowed.
        max_abs: Largest distance of two elements.
        merged: Nodes of the reference that the candidate has merged with this one, so that they have one
            error together.
    """

    position: int
    node: str
    op: str
    tensor: str
    snr_db: float
    computed_db: float
    input_db: float
    drop_db: float
    kind: Kind
    max_abs: float = 0.0
    merged: tuple[str, ...] = ()


@record
class Trace:
    """What a comparison found.

    Attributes:
        nodes: In the order in which they run.
        first: The first node that departs; None when the error grows little by little.
        outputs: Output → SNR in dB as the graphs say, and as they are served.
        unmatched: How many nodes of the reference have no output that the candidate has too.
        consumers: Node → the nodes that read its outputs, in the reference.
        producers: Node → the nodes whose outputs it reads.
    """

    nodes: tuple[NodeError, ...]
    first: str | None
    outputs: Mapping[str, tuple[float, float]]
    samples: int
    precision: str
    unmatched: int
    drop_db: float
    consumers: Mapping[str, tuple[str, ...]]
    producers: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def find(self, node: str) -> NodeError | None:
        """The error of a node, if it was compared."""
        return next((error for error in self.nodes if error.node == node), None)


@record
class TensorErrors:
    """How far the candidate's tensors are from the reference's.

    Attributes:
        measured: Tensor → (SNR as the next nodes see it, SNR before its quantisation, largest distance); SNR in dB.
        outputs: Output → SNR in dB as the graphs say, and as they are served.
        samples: Over so many.
        makers: Tensor → the candidate's node that computes it: of several nodes that were merged, the one that gave its
            name.
    """

    measured: Mapping[str, tuple[float, float, float]]
    outputs: Mapping[str, tuple[float, float]]
    samples: int
    makers: Mapping[str, str] = field(default_factory=dict)


def trace(
    reference: Graph,
    candidate: Graph,
    batches: Iterable[Batch],
    *,
    precision: str = "",
    threads: int = 1,
    drop_db: float = DROP_DB,
) -> Trace:
    """Run both over the batches, one at a time, so that the tensors of one batch are in memory and no more.

    Args:
        precision: The candidate's, which says how good an input can be; empty: what its file holds.

    Raises:
        SourceError: One of them can't be run.
    """
    shared = find_tensors(reference, candidate)
    pairs = pair_outputs(reference, candidate, shared)
    trips = {name: candidate.round_trips(own) for name, own in shared.items()}
    wanted = dict.fromkeys([*shared.values(), *(twin for twins, _ in trips.values() for twin in twins)])
    sums: dict[tuple[str, str], _Sums] = {}
    served: dict[str, _Sums] = {}
    samples = 0
    with (
        reference.open(list(shared), threads) as run_reference,
        candidate.open(list(wanted), threads) as run_candidate,
        candidate.open((), threads) as run_served,
    ):
        for batch in batches:
            expected, actual, final = run_reference(batch), run_candidate(batch), run_served(batch)
            samples += len(next(iter(batch.values())))
            for name, own in shared.items():
                for tensor in (own, *trips[name][0]):
                    _add(sums, (name, tensor), actual[tensor], expected[name])
            for name, own in pairs.items():
                if name in expected:
                    _add(served, name, final[own], expected[name])
    measured = {}
    for name, own in shared.items():
        if (name, own) in sums:
            twins, alone = trips[name]
            computed, after = sums[name, own], [sums[name, twin] for twin in twins if (name, twin) in sums]
            seen = after if alone and after else [computed, *after]
            snr_db = min(s.snr_db for s in seen)
            # Where only the round trip is seen, it may do more than round: a merged ReLU clips there.
            measured[name] = (snr_db, max(snr_db, computed.snr_db), max(s.max_abs for s in seen))
    outputs = {
        name: (measured[name][0], sums_.snr_db) for name, sums_ in served.items() if name in measured
    }  # fmt: skip
    makers = {name: maker for name, own in shared.items() if (maker := _maker(candidate, own)) is not None}
    errors = TensorErrors(measured=measured, outputs=outputs, samples=samples, makers=makers)
    return judge(_with_inputs(reference), errors, precision=precision or candidate.precision, drop_db=drop_db)


def judge(nodes: Sequence[Node], found: TensorErrors, *, precision: str, drop_db: float = DROP_DB) -> Trace:
    """From errors of tensors to the nodes that cause them.

    Args:
        nodes: Of the reference, in the order in which they run; model inputs as nodes without inputs.
    """
    measured = found.measured
    ops = {node.name: node.op for node in nodes}
    healthy_db = HEALTHY_DB.get(precision, HEALTHY_DB["int8"])
    producer = {name: node for node in nodes for name in node.outputs}
    errors: list[NodeError] = []
    for position, node in enumerate(nodes):
        own = [name for name in node.outputs if name in measured]
        if not own:
            continue
        tensor = min(own, key=lambda name: measured[name][0])
        snr, computed, max_abs = measured[tensor]
        before, merged = _inputs_of(node, producer, measured)
        named = _blame(node, merged, found.makers.get(tensor, ""), ops)
        came_in = min([healthy_db, *(measured[name][0] for name in before)])
        errors.append(
            NodeError(
                position=position,
                node=named,
                op=ops[named],
                tensor=tensor,
                snr_db=snr,
                computed_db=computed,
                input_db=came_in,
                drop_db=_minus(came_in, snr),
                kind="not finite" if snr == -math.inf else "quantisation" if computed - snr > 3 else "computation",
                max_abs=max_abs,
                merged=tuple(name for name in (node.name, *merged) if name != named),
            )
        )
    first = next((error for error in errors if error.drop_db >= drop_db), None)
    links = _links(nodes)
    return Trace(
        nodes=tuple(errors),
        first=first.node if first else None,
        outputs=found.outputs,
        samples=found.samples,
        precision=precision,
        unmatched=len(ops) - len({name for error in errors for name in (error.node, *error.merged)}),
        drop_db=drop_db,
        consumers=links[0],
        producers=links[1],
        notes=tuple(_notes(found.outputs)),
    )


def rank(trace: Trace) -> tuple[NodeError, ...]:
    """Nodes by the share of error that they add, the worst first; those that add none are not among them.

    Where no tensor has a larger error than the precision explains, it is those of the nodes whose output differs at
    all: a limit can be narrower than what the precision gives.
    """

    def added(error: NodeError) -> float:
        return _noise(error.snr_db) - _noise(error.input_db)

    # Errors reach the output through what follows: of two nodes that add the same, the earlier one comes first.
    guilty = [error for error in trace.nodes if added(error) > 0]
    guilty = guilty or [error for error in trace.nodes if error.snr_db < math.inf]
    return tuple(sorted(guilty, key=lambda error: (-added(error), error.position)))


# --------------------------------------------------------------------------------------------------------------- within


@dataclass
class _Sums:
    """Powers of one tensor over all batches."""

    signal: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    not_finite: int = 0

    @property
    def snr_db(self) -> float:
        if self.not_finite:
            return -math.inf
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def _add(into: dict[Any, _Sums], key: Any, candidate: Any, reference: Any) -> None:
    if not is_float(reference) or np.shape(candidate) != np.shape(reference):
        return  # counted as unmatched: an index, a shape, or a tensor that was laid out anew
    a, b = (np.ravel(np.asarray(array, np.float64)) for array in (candidate, reference))
    with np.errstate(invalid="ignore"):  # infinity minus infinity; looked at below
        apart = a - b
    noise, signal = float(apart @ apart), float(b @ b)
    sums = into.setdefault(key, _Sums())
    if not math.isfinite(noise + signal):
        both = np.isfinite(a) & np.isfinite(b)
        sums.not_finite += int(np.count_nonzero(~both & ~((a == b) | (np.isnan(a) & np.isnan(b)))))
        apart, b = apart[both], b[both]
        noise, signal = float(apart @ apart), float(b @ b)
    sums.signal += signal
    sums.noise += noise
    if apart.size:
        sums.max_abs = max(sums.max_abs, float(apart.max()), -float(apart.min()))


def _with_inputs(graph: Graph) -> tuple[Node, ...]:
    return (*(Node(name=name, op=INPUT_OP, inputs=(), outputs=(name,)) for name in graph.inputs), *graph.nodes)


def _inputs_of(
    node: Node, producer: Mapping[str, Node], measured: Mapping[str, Any]
) -> tuple[list[str], tuple[str, ...]]:
    """The nearest measured tensors before a node, and the nodes that lie between."""
    tensors, merged, seen, pending = [], [], set(), list(node.inputs)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in measured:
            tensors.append(name)
        elif name in producer and producer[name].op != INPUT_OP:
            merged.append(producer[name].name)
            pending += producer[name].inputs
    return tensors, tuple(dict.fromkeys(merged))


def _blame(node: Node, merged: Sequence[str], maker: str, ops: Mapping[str, str]) -> str:
    """Of nodes that became one: the candidate's own name for it, else the nearest one that does more than hand on."""
    if maker in (node.name, *merged):
        return maker
    if node.op in HANDS_ON:
        return next((name for name in merged if ops[name] not in HANDS_ON), node.name)
    return node.name


def _maker(candidate: Graph, tensor: str) -> str | None:
    return next((node.name for node in candidate.nodes if tensor in node.outputs), None)


def _links(nodes: Sequence[Node]) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    producer = {name: node.name for node in nodes if node.op != INPUT_OP for name in node.outputs}
    readers: dict[str, list[str]] = {}
    writers: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.inputs:
            if name in producer:
                readers.setdefault(producer[name], []).append(node.name)
                writers.setdefault(node.name, []).append(producer[name])
    inputs = {name for node in nodes if node.op == INPUT_OP for name in node.outputs}
    for node in nodes:
        for name in inputs.intersection(node.inputs):
            readers.setdefault(name, []).append(node.name)
    return {k: tuple(dict.fromkeys(v)) for k, v in readers.items()}, {
        k: tuple(dict.fromkeys(v)) for k, v in writers.items()
    }


def _notes(outputs: Mapping[str, tuple[float, float]]) -> Iterable[str]:
    for name, (graph_db, served_db) in outputs.items():
        if _minus(graph_db, served_db) >= RUNTIME_GAP_DB and served_db < HEALTHY_DB["fp32"]:
            yield (
                f"output {name!r} has {served_db:.1f} dB as it is served and {graph_db:.1f} dB with every tensor "
                "looked at: the runtime's optimised kernels add error that the graph does not have"
            )


def _minus(a: float, b: float) -> float:
    return 0.0 if a == b else a - b


def _noise(snr_db: float) -> float:
    """Noise in parts of the signal; what is not finite is worse than anything that is."""
    return 1e30 if snr_db == -math.inf else min(1e29, 10 ** (-snr_db / 10))
