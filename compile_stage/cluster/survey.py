"""What a cluster has, and for which target of a policy: `doctor --engine ray`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from compile_stage.cluster.nodes import Needs, Node
from compile_stage.cluster.pool import Pool
from compile_stage.core.environment import hardware
from compile_stage.core.records import Policy, record


@record
class Survey:
    """The nodes, and what each target of a policy finds among them.

    Attributes:
        targets: Name → names of the nodes that it may be measured on; empty without a policy.
        absent: Name of a target that no node is for → what it asks for.
        problem: Why a run would be refused whatever it asks for, such as two versions of compile-stage; empty for none.
    """

    nodes: tuple[Node, ...]
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def survey(pool: Pool, policy: Policy | None) -> Survey:
    """Ask every node what it is."""
    nodes, problem = pool.all_nodes()
    targets, absent = {}, {}
    for one in policy.targets if policy is not None else ():
        wanted = dict(one.target.hardware) or {"fingerprint": hardware().fingerprint}
        fitting = _fitting(wanted, nodes)
        targets[one.target.name] = tuple(node.name for node in fitting)
        if not fitting:
            absent[one.target.name] = ", ".join(f"{key} {value}" for key, value in wanted.items())
    return Survey(nodes=nodes, targets=targets, absent=absent, problem=problem)


def _fitting(wanted: Mapping[str, str], nodes: Sequence[Node]) -> list[Node]:
    needs = Needs(hardware=wanted)
    return [node for node in nodes if node.cpus and needs.refuse(node) is None]
