"""From one layout to another: what a rank takes of what it has, and what it gets from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import call
from onboard.graph.sharding.cuts import Cut, Entries, runs
from onboard.graph.sharding.reshaped_cuts import Size

aten, ops = torch.ops.aten, torch.ops.onboard
_ORDER = "sharding_order"


@dataclass
class Exchange:
    """Inserts, on one rank, the calls that change how tensors lie; counts collectives."""

    gm: GraphModule
    rank: int
    collectives: dict[str, int] = field(default_factory=dict)
    """Name -> how many."""

    def reduce(self, node: Node, layer_type: str, before: Node) -> Node:
        """Add up what the ranks have."""
        self._count("dist_all_reduce")
        return self._call(before, node, ops.dist_all_reduce.default, node, layer_type)

    def gather(
        self, node: Node, dim: int, size: Size, cut: Cut, layer_type: str, before: Node
    ) -> Node:
        """Put together what the ranks have of a dimension."""
        self._count("all_gather")
        sizes = [len(own) for own in cut.entries]
        assert not len(cut.left_out), "what no rank has cannot be gathered"

        def gathered(x: Node, at: int) -> Node:
            whole = self._call(before, x, ops.all_gather.default, x, at, sizes, layer_type)
            return self._ordered(whole, at, cut, before)

        return self._by_block(node, dim, size, cut.size, sizes[self.rank], before, gathered)

    def take(
        self, node: Node, dim: int, size: Size, has: Cut, places: tuple[Entries, ...], before: Node
    ) -> Node:
        """Take the entries at `places` of what a rank has of a dimension of `size`."""
        own = places[self.rank]

        def taken(x: Node, at: int) -> Node:
            if all(len(runs(each)) == 1 for each in places):
                start, stop = runs(own)[0]
                return self._call(before, x, aten.slice.Tensor, x, at, start, stop)
            constant = self._constant(own.tolist(), before)
            return self._call(before, x, aten.index_select.default, x, at, constant)

        return self._by_block(node, dim, size, has.size, len(has.entries[self.rank]), before, taken)

    def _by_block(
        self,
        node: Node,
        dim: int,
        size: Size,
        block: int,
        local: int,
        before: Node,
        change: Callable[[Node, int], Node],
    ) -> Node:
        """Change a dimension of `size`, block by block where it has several; of each a rank has
        `local` entries.
        """
        if size == block:
            return change(node, dim)
        x = self._call(before, node, aten.unflatten.int, node, dim, [-1, local])
        return self._call(before, node, aten.flatten.using_ints, change(x, dim + 1), dim, dim + 1)

    def _ordered(self, whole: Node, dim: int, cut: Cut, before: Node) -> Node:
        """Bring gathered entries into their order, each once."""
        order = np.concatenate(cut.entries)
        places = np.unique(order, return_index=True)[1]
        if np.array_equal(places, np.arange(len(order))):
            return whole
        constant = self._constant(places.tolist(), before)
        return self._call(before, whole, aten.index_select.default, whole, dim, constant)

    def _constant(self, entries: Iterable[int], before: Node) -> Node:
        """Insert a node that reads a new buffer of places."""
        name = f"{_ORDER}_{sum(key.startswith(_ORDER) for key in self.gm._buffers)}"
        self.gm.register_buffer(
            name, torch.tensor(list(entries), dtype=torch.int64), persistent=False
        )
        with self.gm.graph.inserting_before(before):
            return self.gm.graph.get_attr(name)

    def _count(self, name: str) -> None:
        self.collectives[name] = self.collectives.get(name, 0) + 1

    def _call(self, before: Node, like: Node, target: Callable[..., object], *args: object) -> Node:
        return call(self.gm, before, target, *args, like=like)
