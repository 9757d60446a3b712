"""The canonical op written into a graph: its operands put into its layout, its result into the old
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onboard.codegen.cores.core_runs import Cut, CutAxes
from onboard.codegen.cores.head_axes import Axes

_ORDER = {"bsnd": "BTHD", "bnsd": "BHTD"}


def emit(
    gm: fx.GraphModule, cut: Cut, axes: CutAxes, settings: dict[str, Any], layout: str
) -> fx.Node:
    """Put attention in the place of a cut's result; return the node of the op."""
    graph = gm.graph
    with graph.inserting_before(cut.result):
        given = [
            _brought(graph, node, each, _ORDER[layout])
            for node, each in zip(cut.operands, (axes.query, axes.key, axes.value), strict=True)
        ]
        keywords = {"is_causal": True, **settings, "layout": layout}
        op = torch.ops.onboard.torch_attention
        attention = graph.call_function(op, tuple(given), keywords)
        result = _taken_back(graph, attention, axes.result, _ORDER[layout])
    cut.result.replace_all_uses_with(result)
    return attention


def _joined(axes: Axes) -> list[list[str]]:
    """Return the roles with K and G as H where they lie as one."""
    alone = axes.heads == (axes.key_heads or axes.heads)
    roles = []
    for role in axes.roles:
        letters = "".join(role).replace("KG", "H")
        roles.append([each for each in letters])
    flat = [each for role in roles for each in role]
    if "K" in flat and "G" not in flat:
        roles = [["H" if each == "K" else each for each in role] for role in roles]
    if "G" in flat and "K" not in flat:
        roles = [["H" if each == "G" else each for each in role] for role in roles]
    if {"K", "G"} <= set(flat) and (alone or axes.key_heads == 1):
        # One of both has one entry: where it lies changes nothing.
        gone = "G" if alone else "K"
        roles = [[each for each in role if each != gone] for role in roles]
        roles = [["H" if each in ("K", "G") else each for each in role] or ["1"] for role in roles]
    if "H" not in itertools.chain(*roles) and ["1"] in roles and axes.heads == 1:
        roles[roles.index(["1"])] = ["H"]
    return roles


def _brought(graph: fx.Graph, node: fx.Node, axes: Axes, order: str) -> fx.Node:
    roles, sizes = _joined(axes), axes.sizes(-1, -1)
    for index in reversed(range(len(roles))):
        if roles[index] == ["1"]:
            node = graph.call_method("squeeze", (node, index))
        elif len(roles[index]) > 1:
            apart = tuple(sizes[each] for each in roles[index])
            node = graph.call_method("unflatten", (node, index, apart))
    letters = [each for role in roles for each in role if each != "1"]
    heads = "KG" if "K" in letters else "H" if "H" in letters else ""
    wanted = list(order.replace("H", heads))
    node = _permuted(graph, node, letters, wanted)
    if heads == "KG":
        start = wanted.index("K")
        node = graph.call_method("flatten", (node, start, start + 1))
    return node if heads else graph.call_method("unsqueeze", (node, order.index("H")))


def _taken_back(graph: fx.Graph, node: fx.Node, axes: Axes, order: str) -> fx.Node:
    roles, sizes = _joined(axes), axes.sizes(-1, -1)
    letters = [each for role in roles for each in role if each != "1"]
    lying = list(order)
    if "K" in letters:
        head = order.index("H")
        node = graph.call_method("unflatten", (node, head, (sizes["K"], sizes["G"])))
        lying[head : head + 1] = ["K", "G"]
    elif "H" not in letters:
        node = graph.call_method("squeeze", (node, order.index("H")))
        lying.remove("H")
    node = _permuted(graph, node, lying, letters)
    for index, role in enumerate(roles):
        if role == ["1"]:
            node = graph.call_method("unsqueeze", (node, index))
        elif len(role) > 1:
            node = graph.call_method("flatten", (node, index, index + len(role) - 1))
    return node


def _permuted(
    graph: fx.Graph, node: fx.Node, lying: Sequence[str], wanted: Sequence[str]
) -> fx.Node:
    order = [lying.index(each) for each in wanted]
    moved = [index for index, place in enumerate(order) if index != place]
    if not moved:
        return node
    if len(moved) == 2:
        return graph.call_method("transpose", (node, *moved))
    return graph.call_method("permute", (node, *order))
