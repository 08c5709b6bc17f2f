"""Who reads what in a graph, its subgraphs included, and names that are free in it."""

from __future__ import annotations

from typing import Any


class Names:
    """Names of tensors and nodes that are free in a graph; each that is given is taken from then on."""

    def __init__(self, graph: Any) -> None:
        self._taken = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
        self._taken |= {value.name for value in (*graph.initializer, *graph.input, *graph.output)}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, name: str) -> str:
        """The name, with underscores behind it where it is taken."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def has_subgraph(node: Any) -> bool:
    """True for If, Loop, Scan and their like."""
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)


def reads(node: Any) -> set[str]:
    """All tensors that a node reads, those that its subgraphs take from around it among them."""
    found = {name for name in node.input if name}
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        for graph in graphs:
            own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            inner = {name for part in graph.node for name in reads(part)} | {v.name for v in graph.output}
            found |= inner - own - {name for part in graph.node for name in part.output}
    return found


def captured(graph: Any) -> set[str]:
    """Tensors that nodes with subgraphs read: such a tensor must keep its name and its meaning."""
    return {name for node in graph.node if has_subgraph(node) for name in reads(node)}


def drop_unused_weights(graph: Any) -> None:
    """Drop the weights that no node reads any more, and that are no output."""
    used = {value.name for value in graph.output} | {name for node in graph.node for name in reads(node)}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
