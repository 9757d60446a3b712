"""Values that a graph computes more than once: each layer joins the same tables of a rotation."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from onboard.graph.fx import replace_with


def share_values(gm: fx.GraphModule) -> int:
    """Let what is computed again be read where it was computed first; return how many values are.

    What an operator writes into is left alone, and all that is computed from it: it may be another
    in between. So is what draws random numbers.
    """
    written, first = _written(gm), dict[tuple[str, str], fx.Node]()
    count = 0
    for node in list(gm.graph.nodes):
        if not _is_pure(node) or not written.isdisjoint((node, *node.all_input_nodes)):
            continue
        # Nodes are written by their names, which are theirs alone
        same = first.setdefault((str(node.target), repr((node.args, node.kwargs))), node)
        if same is not node:
            replace_with(node, same)
            count += 1
    return count


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.is_impure()


def _written(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes into whose memory something is written."""
    beside: dict[fx.Node, set[fx.Node]] = {node: set() for node in gm.graph.nodes}
    holders: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        others = list(node.all_input_nodes) if _may_be_a_view(node) else []
        if node.op == "get_attr":  # each of them is the same tensor
            others.append(holders.setdefault(str(node.target), node))
        for other in others:
            beside[node].add(other)
            beside[other].add(node)
    found: set[fx.Node] = set()
    pending = [each for node in gm.graph.nodes for each in _writes_to(node)]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += beside[node]
    return found


def _may_be_a_view(node: fx.Node) -> bool:
    """Whether a call's result may lie in the memory of what it is given."""
    if isinstance(node.target, OpOverload):
        return any(each.alias_info is not None for each in node.target._schema.returns)
    return node.op == "call_function"


def _writes_to(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a call writes into: of one that is no operator that may be all it is given."""
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if not isinstance(node.target, OpOverload):
        yield from node.all_input_nodes
    elif node.target._schema.is_mutable:
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[position] if position < len(node.args) else None
                value = node.kwargs.get(argument.name, given)
                items = value if isinstance(value, list | tuple) else [value]
                yield from (each for each in items if isinstance(each, fx.Node))
