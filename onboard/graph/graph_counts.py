"""How many nodes and which operators a model's graphs have, to say what a transform has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from onboard.graph.fx import graph_modules, op_name


@dataclass(frozen=True)
class GraphCounts:
    """Nodes of all graphs of a model together."""

    nodes: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    """Calls of each operator, by its name without overload."""

    def changes_to(self, other: GraphCounts) -> dict[str, int]:
        """Return the operators of which `other` has more or (below zero) fewer."""
        names = sorted({*self.ops, *other.ops})
        changes = {name: other.ops[name] - self.ops[name] for name in names}
        return {name: change for name, change in changes.items() if change}


def graph_counts(module: nn.Module) -> GraphCounts:
    """Count the nodes and operators of a model's graphs; none in a model without any."""
    nodes, ops = 0, Counter[str]()
    for _, gm in graph_modules(module):
        nodes += len(gm.graph.nodes)
        ops.update(name for node in gm.graph.nodes if (name := op_name(node)))
    return GraphCounts(nodes, ops)


def size(module: nn.Module) -> int:
    """Return the number of nodes of a model's graphs."""
    return sum(len(gm.graph.nodes) for _, gm in graph_modules(module))
