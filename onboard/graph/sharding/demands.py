"""From the ops that do the work back to the weights: which nodes are to be cut, and how.

One walk over the graph, the last node first, so that all that is asked of a node is known when it
is reached. A linear layer that is reached is an opening: it computes its rank's outputs alone. One
that nobody asks is a closing if all that it reads can be cut: it is tried by a walk of its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch.fx import Graph, Node

from onboard.graph.sharding.cuts import WHOLE, Cut, Layout, layout_of, union
from onboard.graph.sharding.hints import Hint
from onboard.graph.sharding.layer_work import mixer
from onboard.graph.sharding.signatures import Signature, fitted, signature
from onboard.graph.sharding.structure import structure

Parts = dict[int, Layout]


@dataclass
class Demand:
    """What is asked of a node so far."""

    layer_type: str
    parts: dict[int, list[Layout]] = field(default_factory=lambda: defaultdict(list))
    letters: dict[str, Cut] = field(default_factory=dict)


class CannotCutError(Exception):
    """A walk has come to a node that cannot be cut as asked."""


class Demands:
    """The hints of a graph in the making."""

    def __init__(self, graph: Graph, world_size: int) -> None:
        self.world_size = world_size
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.asked: dict[Node, Demand] = {}
        self.hints: dict[Node, Hint] = {}

    def ask(self, node: Node, layout: Layout, layer_type: str, part: int = 0) -> None:
        """Note that somebody wants a result of a node to lie like that."""
        if layout.cuts:
            self.asked.setdefault(node, Demand(layer_type)).parts[part].append(layout)

    def settle(self, node: Node) -> Hint | None:
        """Turn what was asked of a node into its hint, and ask its inputs; None for a node that
        nobody asked.

        What nobody asked for may be read by those who do not ask: every rank has it.
        """
        demand = self.asked.get(node)
        if demand is None:
            return None
        parts = {index: _completed(agreed(asked)) for index, asked in demand.parts.items()}
        hint = Hint(demand.layer_type, parts, demand.letters)
        self.hints[node] = hint
        for source, part, layout in inputs_of(node, hint):
            self.ask(source, layout, hint.layer_type, part)
        return hint

    def trial(self, start: Node, layout: Layout, *, allowed: Iterable[Node]) -> str | None:
        """Return the layer type of what `start` is made of if all of it can be cut so that `start`
        lies like `layout`; None where it cannot, or where others than `allowed` need it whole.
        """
        walk = _Walk(self, start, layout, set(allowed))
        try:
            return walk.run()
        except CannotCutError:
            return None


class _Walk(Demands):
    """A trial: the demands that would come of one more, kept apart."""

    def __init__(self, base: Demands, start: Node, layout: Layout, allowed: set[Node]) -> None:
        self.base, self.allowed = base, allowed
        self.world_size, self.place = base.world_size, base.place
        self.asked, self.hints = {}, {}
        self._open: list[tuple[int, Node]] = []
        self.ask(start, layout, "mlp")

    def ask(self, node: Node, layout: Layout, layer_type: str, part: int = 0) -> None:
        if layout.cuts and node not in self.asked:
            heappush(self._open, (-self.place[node], node))
        super().ask(node, layout, layer_type, part)

    def run(self) -> str:
        """Walk to the end; return the layer type, or raise `CannotCutError`."""
        layer_type, opened, seen = "mlp", False, set(self.allowed)
        while self._open:
            node = heappop(self._open)[1]
            seen.add(node)
            if known := self.base.asked.get(node):
                layer_type, opened = known.layer_type, True
                self._agrees(node, known)
                continue
            if node.op == "get_attr":
                continue
            hint = self.settle(node)
            assert hint is not None
            self._check(node, hint, seen)
            if found := mixer(node):
                layer_type = found.layer_type
            opened |= is_linear(node)
        if not opened:
            raise CannotCutError
        return layer_type

    def _agrees(self, node: Node, known: Demand) -> None:
        for part, layouts in self.asked[node].parts.items():
            if part not in known.parts or not agreed(layouts).same_as(agreed(known.parts[part])):
                raise CannotCutError

    def _check(self, node: Node, hint: Hint, seen: set[Node]) -> None:
        """Raise `CannotCutError` where a demand ends at a node that computes something, or where
        others read it.
        """
        if node.op != "call_function":
            raise CannotCutError
        reached = list(inputs_of(node, hint))
        if not reached and not is_weight(node):
            raise CannotCutError
        is_value = not is_weight(node)
        others = [user for user in node.users if user not in seen and user not in self.base.asked]
        if is_value and any(user.users and not _says_size(user) for user in others):
            raise CannotCutError


def _says_size(node: Node) -> bool:
    return not hasattr(node.meta.get("val"), "shape") and not isinstance(
        node.meta.get("val"), list | tuple
    )


def is_weight(node: Node) -> bool:
    """Whether a node is a weight, or computed from weights alone, a few steps away."""
    pending, steps = [node], 0
    while pending and steps < 32:
        each = pending.pop()
        steps += 1
        if each.op == "placeholder":
            return False
        pending.extend(each.all_input_nodes)
    return not pending


def _completed(layout: Layout) -> Layout:
    return layout_of((dim, cut.completed()) for dim, cut in layout.cuts.items())


def agreed(layouts: list[Layout]) -> Layout:
    """Return what serves all who asked: the dimension asked for first, with all that they want of
    it.
    """
    dims = layouts[0].cuts.keys()
    alike = [layout for layout in layouts if layout.cuts.keys() == dims]
    return layout_of((dim, union([layout.cuts[dim] for layout in alike])) for dim in dims)


def is_linear(node: Node) -> bool:
    """Whether a node is a product with a weight, an opening or a closing."""
    found = signature(node) if node.op == "call_function" else None
    factors = [each.node for each in found.operands if "K" in each.letters] if found else []
    return any(map(is_weight, factors))


def inputs_of(node: Node, hint: Hint) -> Iterator[tuple[Node, int, Layout]]:
    """Yield what a node's hint asks of its inputs: input, index of its result, layout."""
    if node.op != "call_function":
        return
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        assert isinstance(index, int)
        yield source, index, hint.results.get(0, WHOLE)
    elif (moved := structure(node)) is not None:
        for source, layout in moved.back(node, hint.results).items():
            yield source, 0, layout
    elif (found := signature(node)) is not None:
        letters = letters_of(found, hint)
        for operand in found.operands:
            if cuts := operand_layout(operand.letters, operand.sizes, letters).cuts:
                yield operand.node, 0, Layout(cuts)


def letters_of(found: Signature, hint: Hint) -> dict[str, Cut]:
    """Return the cuts of a signature's letters that a hint asks for and the op can have."""
    letters = dict(hint.letters)
    for index, layout in hint.results.items():
        for dim, cut in layout.cuts.items():
            letter = found.outputs[index][dim]
            if letter != ".":
                letters.setdefault(letter, cut)
    return {letter: cut for letter, cut in letters.items() if is_possible(found, letter, cut)}


def is_possible(found: Signature, letter: str, cut: Cut) -> bool:
    """Whether all dimensions of a letter can be cut alike."""
    if letter in found.units and cut.in_blocks(cut.size // found.units[letter]) is None:
        return False
    return all(fitted(cut, size) is not None for _, _, size in found.operands_with(letter))


def operand_layout(letters: str, sizes: Iterable[int | str], cuts: Mapping[str, Cut]) -> Layout:
    """Return how an operand lies when its letters are cut."""
    named = enumerate(zip(letters, sizes, strict=True))
    return layout_of(
        (dim, fitted(cuts[letter], size)) for dim, (letter, size) in named if letter in cuts
    )
