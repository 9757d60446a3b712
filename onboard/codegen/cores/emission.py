"""The canonical op written into a graph: its operands put into its layout, its result into the old
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onboard.codegen.cores.core_runs import Core, CutAxes, NotAttentionError
from onboard.codegen.cores.head_axes import Axes
from onboard.codegen.cores.op_settings import Number, Written, is_tensor, put

_ORDER = {"bsnd": "BTHD", "bnsd": "BHTD"}


def emit(
    core: Core, axes: CutAxes, settings: dict[str, Written], scale: Number, layout: str
) -> fx.Node:
    """Put attention in the place of a core; return the node of the op.

    Raises `NotAttentionError` where no tensor's size says how to take merged axes apart.
    """
    graph, cut = core.gm.graph, core.cut
    of_operands = (axes.query, axes.key, axes.value)
    sizes = _Sizes(core, of_operands)
    sizes.check((*of_operands, axes.result))
    with graph.inserting_before(cut.result):
        order = _ORDER[layout]
        key, value, query = (
            _brought(graph, node, each, order, sizes)
            for node, each in zip(
                (cut.key, cut.value, cut.query), (axes.key, axes.value, axes.query), strict=True
            )
        )
        if is_tensor(core, scale.written):
            query = graph.call_method("mul", (query, put(graph, scale.written)))
        keywords = {name: put(graph, each) for name, each in settings.items()}
        op = torch.ops.onboard.torch_attention
        attention = graph.call_function(
            op, (query, key, value), {"is_causal": True, **keywords, "layout": layout}
        )
        result = _taken_back(graph, attention, axes.result, order, sizes)
    cut.result.replace_all_uses_with(result)
    return attention


class _Sizes:
    """Which tensor's axis has the size of a letter: what is written may not depend on the sizes of
    one model.
    """

    def __init__(self, core: Core, of_operands: tuple[Axes, Axes, Axes]) -> None:
        self._graph = core.gm.graph
        self._places: dict[str, tuple[fx.Node, int]] = {}
        for node, axes in zip(core.cut.operands, of_operands, strict=True):
            for index, role in enumerate(_joined(axes)):
                letter = "K" if role == ["H"] and axes is not of_operands[0] else "".join(role)
                self._places.setdefault(letter, (node, index))
        for node in core.gm.graph.nodes:
            if node.op == "placeholder" and node in core.content:
                for letter, index in core.plain_axes(node).items():
                    self._places.setdefault(letter, (node, index))

    def check(self, all_axes: tuple[Axes, ...]) -> None:
        """Raise where a size would be needed that no tensor has."""
        for axes in all_axes:
            roles = _joined(axes)
            apart = [each for role in roles if len(role) > 1 for each in role]
            split = "K" in itertools.chain(*roles)
            for letter in {*apart, *("K" if split else "")} - {"H", "G"}:
                if letter not in self._places:
                    raise NotAttentionError(f"no tensor has an axis of size {letter} alone")

    def apart(self, letters: Sequence[str]) -> tuple[Any, ...]:
        """Return the sizes that an axis is taken apart into; heads are what remains."""
        return tuple(-1 if each in ("H", "G") else self._size(each) for each in letters)

    def _size(self, letter: str) -> fx.Node:
        return self._graph.call_method("size", self._places[letter])


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


def _brought(graph: fx.Graph, node: fx.Node, axes: Axes, order: str, sizes: _Sizes) -> fx.Node:
    roles = _joined(axes)
    for index in reversed(range(len(roles))):
        if roles[index] == ["1"]:
            node = graph.call_method("squeeze", (node, index))
        elif len(roles[index]) > 1:
            node = graph.call_method("unflatten", (node, index, sizes.apart(roles[index])))
    letters = [each for role in roles for each in role if each != "1"]
    heads = "KG" if "K" in letters else "H" if "H" in letters else ""
    wanted = list(order.replace("H", heads))
    node = _permuted(graph, node, letters, wanted)
    if heads == "KG":
        start = wanted.index("K")
        node = graph.call_method("flatten", (node, start, start + 1))
    return node if heads else graph.call_method("unsqueeze", (node, order.index("H")))


def _taken_back(graph: fx.Graph, node: fx.Node, axes: Axes, order: str, sizes: _Sizes) -> fx.Node:
    roles = _joined(axes)
    letters = [each for role in roles for each in role if each != "1"]
    lying = list(order)
    if "K" in letters:
        head = order.index("H")
        node = graph.call_method("unflatten", (node, head, sizes.apart("KG")))
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
