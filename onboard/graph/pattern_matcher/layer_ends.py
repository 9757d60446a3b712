"""Where in a graph a model's layers end, by the modules that its nodes were traced in."""

from __future__ import annotations

import operator
import re
from collections import defaultdict

from torch import fx

from onboard.graph.fx import is_op

_ENTRY = re.compile(r"(.+)\.(\d+)")


def layer_paths(gm: fx.GraphModule) -> list[str]:
    """Return the paths of a model's layers, in order: of all lists of modules the one in which most
    is computed.
    """
    calls: dict[str, set[fx.Node]] = defaultdict(set)
    indices: dict[str, set[int]] = defaultdict(set)
    for node in gm.graph.nodes:
        for path in paths(node):
            if entry := _ENTRY.fullmatch(path):
                calls[entry[1]].add(node)
                indices[entry[1]].add(int(entry[2]))
    outer = max(calls, key=lambda name: (len(calls[name]), -len(name)), default=None)
    return [] if outer is None else [f"{outer}.{index}" for index in sorted(indices[outer])]


def paths(node: fx.Node) -> list[str]:
    """Return the modules that a node was traced in, outermost first; a part of a result is where
    all of it is.
    """
    while is_op(node, operator.getitem) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()] if node.op == "call_function" else []


def members(gm: fx.GraphModule, layer: str) -> set[fx.Node]:
    """Return the nodes that were traced in a layer."""
    return {node for node in gm.graph.nodes if layer in paths(node)}


def results(gm: fx.GraphModule, layer: str) -> list[fx.Node]:
    """Return the nodes of a layer that are read outside of it, in graph order."""
    own = members(gm, layer)
    return [
        node
        for node in gm.graph.nodes
        if node in own and any(user not in own for user in node.users)
    ]
