"""A rank's share of the weights: parameters that are cut before they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.graph.fx import ancestors
from onboard.graph.sharding.cuts import WHOLE, Layout, everything, runs, union
from onboard.graph.sharding.exchange import Exchange
from onboard.graph.weight_load.gemm_fusion import private_parameters
from onboard.graph.weight_load.parameters import (
    Joined,
    Part,
    Share,
    leave_unread,
    set_parameter,
    tied_names,
    weight_plan,
)


@dataclass
class Shares:
    """What a graph's readers want of its parameters, on one rank."""

    gm: GraphModule
    """As it is before it is rewritten."""
    rank: int
    wanted: dict[str, list[tuple[Node, Layout]]] = field(default_factory=dict)
    """Parameter -> the nodes that read it, and what of it."""

    def __post_init__(self) -> None:
        self._groups = {name: names for names in tied_names(self.gm) for name in names}
        self._private = private_parameters(self.gm)

    def read(self, name: str, layout: Layout, before: Node) -> Node:
        """Return a node that reads a parameter as it lies by a layout."""
        readers = self.wanted.setdefault(name, [])
        known = next((node for node, own in readers if own.same_as(layout)), None)
        if known is not None:
            return known
        with self.gm.graph.inserting_before(_first(self.gm)):
            node = self.gm.graph.get_attr(name)
        readers.append((node, layout))
        return node

    def is_parameter(self, node: Node) -> bool:
        """Whether a node reads a parameter."""
        return node.op == "get_attr" and str(node.target) in self._groups

    def is_private(self, node: Node) -> bool:
        """Whether a node reads a parameter that nothing else reads."""
        return self.is_parameter(node) and str(node.target) in self._private

    def leave_to_first(self, name: str) -> None:
        """Let the first rank alone have a parameter that is added to a sum; the others add zeros."""
        size = self.gm.get_parameter(name).shape[0]
        weight_plan(self.gm).joins[name] = Joined((Part(None, size),), 0)
        leave_unread(self.gm, [name])

    def settle(self, exchange: Exchange) -> None:
        """Cut the parameters to what is wanted of them."""
        for name, readers in self.wanted.items():
            layout = _all_of([own for _, own in readers], self.gm.get_parameter(name).shape)
            for node, own in readers:
                self._take(node, own, layout, exchange)
            if layout.cuts:
                self._cut(name, layout)

    def _take(self, node: Node, own: Layout, has: Layout, exchange: Exchange) -> None:
        """Let those who read a parameter, of which the rank has more, take their part of it."""
        shape, users = self.gm.get_parameter(str(node.target)).shape, list(node.users)
        taken = node
        for dim, cut in own.cuts.items():
            held = has.cuts.get(dim, everything(cut.size, len(cut.entries)))
            if not cut.same_as(held):
                places = cut.positions_in(held)
                assert places is not None
                taken = exchange.take(taken, dim, shape[dim], held, places, users[0])
        if taken is not node:
            for user in users:
                user.replace_input_with(node, taken)

    def _cut(self, name: str, layout: Layout) -> None:
        whole = self.gm.get_parameter(name)
        shape = list(whole.shape)
        for dim, cut in layout.cuts.items():
            shape[dim] = len(cut.entries[self.rank])
        own = nn.Parameter(
            torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=False
        )
        kept = {dim: runs(cut.entries[self.rank]) for dim, cut in layout.cuts.items()}
        for each in self._groups[name]:
            set_parameter(self.gm, each, own)
            weight_plan(self.gm).shares[each] = Share(tuple(whole.shape), kept)


def bytes_read_by(gm: GraphModule) -> int:
    """Return the bytes of the parameters that a graph's result is computed from."""
    live = ancestors([gm.graph.output_node()])
    read = {str(node.target) for node in live if node.op == "get_attr"}
    groups = (names for names in tied_names(gm) if read & set(names))
    return sum(gm.get_parameter(names[0]).nbytes for names in groups)


def _all_of(layouts: list[Layout], shape: torch.Size) -> Layout:
    """Return what serves all who read a parameter."""
    dims = layouts[0].cuts.keys()
    if all(layout.same_as(layouts[0]) for layout in layouts):
        return layouts[0]
    if len(dims) != 1 or any(layout.cuts.keys() != dims for layout in layouts):
        return WHOLE
    [dim] = dims
    cut = union([layout.cuts[dim] for layout in layouts])
    return WHOLE if cut.is_whole else Layout({dim: cut})


def _first(gm: GraphModule) -> Node:
    first: Node = next(iter(gm.graph.nodes))
    return first
