"""Connected parts of a graph that one kernel can compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from onboard.graph.pattern_matcher.patterns import same_shape


@dataclass(eq=False)
class Region:
    """Elementwise nodes that one kernel computes."""

    nodes: dict[fx.Node, None]
    """In graph order."""
    widest: fx.Node
    """One of them that has the shape of all that leave the region."""

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes that others read."""
        return [node for node in self.nodes if any(user not in self.nodes for user in node.users)]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the region reads."""
        read = {source: None for node in self.nodes for source in node.all_input_nodes}
        return [node for node in read if node not in self.nodes]


def find_regions(
    graph: fx.Graph,
    is_pointwise: Callable[[fx.Node], bool],
    reduces_rows: Callable[[fx.Node], bool],
    most_nodes: int,
) -> list[Region]:
    """Return maximal regions of pointwise nodes and of those that reduce the rows of their first
    argument.

    Producer and consumer join when what leaves both has one shape (a smaller producer, which is
    broadcast, joins when nobody else reads it) and no path leads out of the pair and back in: each
    region can be computed at once. Nodes that reduce rows join those that work on such rows.
    """
    search = _Search(most_nodes)
    for node in graph.nodes:
        if is_pointwise(node):
            search.add(node)
    search.add_rows([node for node in graph.nodes if reduces_rows(node)])
    return search.regions()


def sort_graph(graph: fx.Graph) -> None:
    """Put every node behind what it reads, and else leave the order as it is."""
    placed: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        path = {node: None} if node not in placed else {}  # each is read by the one before it
        while path:
            current = next(reversed(path))
            missing = next(
                (source for source in current.all_input_nodes if source not in placed), None
            )
            if missing is None:
                placed[path.popitem()[0]] = None
            else:
                assert missing not in path, f"{missing} depends on itself"
                path[missing] = None
    previous = None
    for node in placed:
        if previous is not None and previous.next is not node:
            previous.append(node)
        previous = node


_MOST_SIBLINGS = 4
"""Readers of one value that may join because of it; a table that all layers read brings nothing
together.
"""


@dataclass
class _Search:
    most_nodes: int
    region_of: dict[fx.Node, Region] = field(default_factory=dict)
    rows: dict[fx.Node, None] = field(default_factory=dict)
    """Nodes that reduce rows; they come last."""

    def add(self, node: fx.Node) -> None:
        """Make a region of a node, and join it with those of its sources, and of what reads the
        same few values.
        """
        self.region_of[node] = Region({node: None}, node)
        sources = node.all_input_nodes
        siblings = [
            user
            for source in sources
            if len(source.users) <= _MOST_SIBLINGS
            for user in source.users
        ]
        while any([self._join(other, node) for other in (*sources, *siblings)]):
            pass

    def add_rows(self, nodes: list[fx.Node]) -> None:
        """Join each node that reduces rows with those that read it, and all of them with what they
        read.
        """
        self.rows = dict.fromkeys(nodes)
        for node in nodes:
            self.region_of[node] = Region({node: None}, node)
        for node in nodes:
            for user in node.users:
                self._join(node, user)
        while nodes and any(
            [self._join(source, node) for node in self.region_of for source in node.all_input_nodes]
        ):
            pass

    def regions(self) -> list[Region]:
        """Return the regions found so far."""
        return list(dict.fromkeys(self.region_of.values()))

    def _join(self, source: fx.Node, node: fx.Node) -> bool:
        first, second = self.region_of.get(source), self.region_of.get(node)
        if first is None or second is None or first is second:
            return False
        if len(first.nodes) + len(second.nodes) > self.most_nodes:
            return False
        union = Region(dict.fromkeys(sorted([*first.nodes, *second.nodes])), second.widest)
        if not (_leaves_in_one_shape(union) and self._has_whole_rows(union)) or self._comes_back(
            union
        ):
            return False
        self.region_of.update(dict.fromkeys(union.nodes, union))
        return True

    def _has_whole_rows(self, union: Region) -> bool:
        return all(
            same_shape(node.all_input_nodes[0], union.widest)
            for node in union.nodes
            if node in self.rows
        )

    def _comes_back(self, union: Region) -> bool:
        """Whether a path leads out of a region and into it again, other regions being computed at
        once.
        """
        last = max(union.nodes)
        pending = [user for node in union.nodes for user in node.users if user not in union.nodes]
        seen = set(pending)
        while pending:
            node = pending.pop()
            region = self.region_of.get(node)
            if region is None and node > last and not self.rows:
                continue  # nothing behind the newest node is in a region yet
            group = list(region.nodes) if region is not None else [node]
            for user in (user for each in group for user in each.users):
                if user in union.nodes:
                    return True
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
        return False


def _leaves_in_one_shape(region: Region) -> bool:
    return all(same_shape(node, region.widest) for node in region.outputs)
