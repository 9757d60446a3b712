"""From hints to a rank's graph: each node computes its rank's share, and collectives go where
shares have to become whole.

A sum over ranks is put off for as long as its summands can be added up as they are: what comes of
two branches that are added is reduced once. What is whole and added to a summand waits beside it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from onboard.graph.fx import arguments, call, is_op, op_name
from onboard.graph.sharding.cuts import WHOLE, Cut, Layout, everything, runs
from onboard.graph.sharding.demands import is_possible, letters_of, operand_layout
from onboard.graph.sharding.exchange import Exchange
from onboard.graph.sharding.hints import Hint, hint_of
from onboard.graph.sharding.local_calls import EXPERTS, localise
from onboard.graph.sharding.reshaped_cuts import Size, sizes_of
from onboard.graph.sharding.shares import Shares
from onboard.graph.sharding.signatures import Signature, is_cast, says_dtype, shape, signature
from onboard.graph.sharding.structure import Structure, set_argument, structure

aten = torch.ops.aten
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


@dataclass
class Value:
    """What a node of the whole graph has become."""

    node: Node
    layouts: list[Layout]
    """Of each of its results."""
    addend: Node | None = None
    """What is added to the sum over ranks, once."""


@dataclass
class Rewriting:
    """A graph on its way to being a rank's."""

    gm: GraphModule
    rank: int
    chosen: Callable[[Hint], bool]
    """Which hints are followed."""
    values: dict[Node, Value] = field(default_factory=dict)
    followed: Counter[str] = field(default_factory=Counter)
    """Layer type -> nodes that were cut."""
    made_whole: Counter[str] = field(default_factory=Counter)
    """Op -> how often its inputs had to be made whole, since no rule knows it."""
    layouts: dict[Node, list[Layout]] = field(default_factory=dict)
    """What came of each node, before what follows it asked for anything."""
    summed: dict[Node, str] = field(default_factory=dict)
    """Node whose summands are added up -> the kind of layer."""

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.gm, self.rank)
        self.shares = Shares(self.gm, self.rank)
        self._origins: dict[Node, Node] = {}

    def run(self) -> None:
        """Rewrite all nodes, in order, then cut the parameters."""
        for node in list(self.gm.graph.nodes):
            if node.op == "call_function":
                self.values[node] = value = self._called(node)
                self.layouts[node] = list(value.layouts)
                self._origins.setdefault(value.node, node)
            elif node.op == "output":
                node.args = (self.at(node.args[0], WHOLE, node),)
            else:
                self.values[node] = Value(node, [WHOLE])
        self.shares.settle(self.exchange)

    def at(self, node: Node, layout: Layout, before: Node, part: int = 0) -> Node:
        """Return a node that has the value of `node` in a layout, for a call `before` which it is
        needed.
        """
        if self.shares.is_parameter(node):
            return self.shares.read(str(node.target), layout, before)
        value = self.values[node]
        if not _is_tensor(node):
            return value.node
        if value.layouts[part].partial and not (layout.partial and value.addend is None):
            self._reduce(value, before)
        return self._moved(value.node, shape(node), value.layouts[part], layout, before)

    def layout(self, node: Node) -> Layout:
        """Return how a node's value lies now; whole for one beside which something waits."""
        value = self.values[node]
        return WHOLE if value.addend is not None else value.layouts[0]

    def _moved(
        self, node: Node, sizes: Sequence[Size], has: Layout, wanted: Layout, before: Node
    ) -> Node:
        for dim in sorted(has.cuts.keys() | wanted.cuts.keys()):
            held, cut = has.cuts.get(dim), wanted.cuts.get(dim)
            if held is not None and held.same_as(cut):
                continue
            places = cut.positions_in(held) if held is not None and cut is not None else None
            if held is not None and places is None:
                node = self.exchange.gather(node, dim, sizes[dim], held, "unknown", before)
                self.made_whole[op_name(before) or before.op] += 1
                held = None
            if cut is not None:
                base = held or everything(cut.size, len(cut.entries))
                own = places if places is not None else cut.entries
                node = self.exchange.take(node, dim, sizes[dim], base, own, before)
        return node

    def _reduce(self, value: Value, before: Node) -> None:
        """Make a sum over ranks whole, for all who come after."""
        layer_type = value.layouts[0].partial
        self.summed[self._origins.get(value.node, value.node)] = layer_type
        node = self.exchange.reduce(value.node, layer_type, before)
        if value.addend is not None:
            node = call(self.gm, before, aten.add.Tensor, value.addend, node, like=value.node)
        value.node, value.layouts, value.addend = node, [Layout(value.layouts[0].cuts)], None

    def _called(self, node: Node) -> Value:
        if node.target is operator.getitem:
            return self._item(node)
        if not _is_tensor(node):
            return self._number(node)
        if (waiting := self._added(node)) is not None:
            return waiting
        hint = hint_of(node)
        hint = hint if hint is not None and self.chosen(hint) else None
        moved, own = structure(node), signature(node)
        result = node
        if moved is not None:
            layouts = self._move(node, moved, hint)
        elif own is not None:
            result, layouts = self._compute(node, own, hint)
        else:
            layouts = self._unknown(node)
        if hint is not None and any(layout.cuts or layout.partial for layout in layouts):
            self.followed[hint.layer_type] += 1
        value = Value(result, list(layouts))
        return self._at_once(node, value) if hint is not None and hint.gathered else value

    def _at_once(self, node: Node, value: Value) -> Value:
        self.values[node] = value
        return Value(self.at(node, WHOLE, node.next), [WHOLE])

    def _item(self, node: Node) -> Value:
        source, index = node.args
        assert isinstance(source, Node)
        value = self.values[source]
        node.replace_input_with(source, value.node)
        return Value(node, [value.layouts[index]])  # type: ignore[index]

    def _number(self, node: Node) -> Value:
        """A size, or something computed from sizes: no dimension that is asked for is cut."""
        for source in node.all_input_nodes:
            cut = source in self.values and self.layout(source).cuts
            new = self.at(source, WHOLE, node) if cut else self.values[source].node
            node.replace_input_with(source, new)
        return Value(node, [WHOLE])

    def _added(self, node: Node) -> Value | None:
        """Return what an addition of summands, or of a summand and something whole, becomes; None
        for anything else.
        """
        if not is_op(node, *_ADDITIONS) or arguments(node)["alpha"] != 1:
            return None
        first, second = arguments(node)["self"], arguments(node)["other"]
        if not (_alike(first, node) and _alike(second, node)):
            return None
        summands = [each for each in (first, second) if self._partial(each)]
        if any(self.values[each].layouts[0].cuts for each in summands):
            return None
        if len(summands) == 2:
            return self._both(node, first, second)
        if len(summands) == 1 and is_op(node, aten.add.Tensor):
            value = self.values[summands[0]]
            whole = self.at(second if summands[0] is first else first, WHOLE, node)
            return Value(value.node, list(value.layouts), self._plus(value.addend, whole, node))
        return None

    def _both(self, node: Node, first: Node, second: Node) -> Value | None:
        left, right = self.values[first], self.values[second]
        if right.addend is not None and not is_op(node, aten.add.Tensor):
            return None
        node.args = (left.node, right.node)
        layouts = [Layout(partial=left.layouts[0].partial)]
        return Value(node, layouts, self._plus(left.addend, right.addend, node))

    def _plus(self, first: Node | None, second: Node | None, before: Node) -> Node | None:
        if first is None or second is None:
            return first or second
        return call(self.gm, before, aten.add.Tensor, first, second, like=before)

    def _partial(self, node: Any) -> bool:
        return node in self.values and bool(self.values[node].layouts[0].partial)

    def _move(self, node: Node, moved: Structure, hint: Hint | None) -> Sequence[Layout]:
        sources, results = moved.sources(node), hint.results if hint is not None else {}
        asked = moved.back(node, results)
        given = [asked.get(source) or self._kept(source, moved) for source in sources]
        given = list(moved.asks(node, given, results))
        layouts = moved.ahead(node, given, results)
        if layouts is None:
            given = [WHOLE] * len(given)
            layouts = moved.ahead(node, given, {})
            assert layouts is not None
        if any(layout.cuts for layout in [*given, *layouts]):
            moved.localise(node, given, layouts, self.rank)
        for source, layout in zip(sources, given, strict=True):
            node.replace_input_with(source, self.at(source, layout, node))
        return layouts

    def _kept(self, source: Node, moved: Structure) -> Layout:
        layout = self.layout(source)
        return WHOLE if layout.partial and not moved.keeps_sums else layout

    def _compute(
        self, node: Node, own: Signature, hint: Hint | None
    ) -> tuple[Node, Sequence[Layout]]:
        cuts = self._cuts(own, hint)
        partial = "" if cuts else self._passes(node, own)  # shares of several cuts are no sum
        summed = next((letter for letter in cuts if own.is_summed(letter)), None)
        if summed is not None:
            partial = hint.layer_type if hint is not None else "unknown"
            if not self._adds_once(cuts):
                self._once(node, own)
            own = signature(node) or own
        for operand in own.operands:
            layout = operand_layout(operand.letters, operand.sizes, cuts)
            if summed is None and partial and self._partial(operand.node):
                layout = Layout(layout.cuts, partial)
            _put(node, operand.place, self.at(operand.node, layout, node))
        self._others(node, own)
        results = zip(own.outputs, _result_sizes(node), strict=True)
        layouts = [
            replace(operand_layout(letters, sizes, cuts), partial=partial)
            for letters, sizes in results
        ]
        return (localise(self, node, cuts) if cuts else node), layouts

    def _cuts(self, own: Signature, hint: Hint | None) -> dict[str, Cut]:
        """Return the cuts of a signature's letters: those of the hint, then those of its inputs."""
        cuts = letters_of(own, hint) if hint is not None else {}
        for operand in own.operands:
            for dim, cut in self.layout(operand.node).cuts.items():
                letter = operand.letters[dim]
                if letter not in cuts and letter != "." and is_possible(own, letter, cut):
                    cuts[letter] = cut
        if "N" in cuts:
            cuts.pop("K", None)
        return cuts

    def _adds_once(self, cuts: Mapping[str, Cut]) -> bool:
        """Whether the rank adds what is to be added once: the first does; of ranks that each have
        other experts, the one that has the first of their channels.
        """
        if EXPERTS not in cuts:
            return self.rank == 0
        return "c" not in cuts or runs(cuts["c"].entries[self.rank])[0][0] == 0

    def _once(self, node: Node, own: Signature) -> None:
        """Leave to another rank what is to be added once."""
        for operand in own.operands:
            if operand.place[0] not in own.once:
                continue
            if self.shares.is_private(operand.node):
                self.shares.leave_to_first(str(operand.node.target))
            else:
                nothing = call(self.gm, node, aten.zeros_like.default, operand.node, like=node)
                self.values[nothing] = Value(nothing, [WHOLE])
                nothing.meta["val"] = operand.node.meta["val"]
                nothing.replace_input_with(operand.node, self.at(operand.node, WHOLE, nothing))
                _put(node, operand.place, nothing)

    def _passes(self, node: Node, own: Signature) -> str:
        """Return the layer type of a summand that an op gives on as one; "" for none."""
        partial = [each.node for each in own.operands if self._partial(each.node)]
        if len(partial) != 1 or self.values[partial[0]].addend is not None:
            return ""
        is_first = partial[0] is arguments(node).get("self") or is_op(node, aten.mul)
        scales = is_op(node, *_SCALINGS) and is_first and _alike(partial[0], node)
        casts = is_cast(node) and node.meta["val"].is_floating_point()
        return self.layout(partial[0]).partial if scales or casts else ""

    def _others(self, node: Node, own: Signature) -> None:
        """Make whole what has no letters; of what says a dtype alone any share will do."""
        known = {operand.node for operand in own.operands}
        for source in [each for each in _read_by(node) if each in self.values]:
            if source not in known:
                kept = is_cast(node) or says_dtype(node) or not _is_tensor(source)
                new = self.values[source].node if kept else self.at(source, WHOLE, node)
                node.replace_input_with(source, new)

    def _unknown(self, node: Node) -> Sequence[Layout]:
        sources = node.all_input_nodes
        for source in sources:
            node.replace_input_with(source, self.at(source, WHOLE, node))
        return [WHOLE] * len(_result_sizes(node))


def _read_by(node: Node) -> list[Node]:
    return list(node.all_input_nodes)


def _result_sizes(node: Node) -> list[tuple[Size, ...]]:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return [sizes_of(each) for each in values]


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | list | tuple)


def _alike(source: Any, node: Node) -> bool:
    """Whether an operand has the shape and dtype of the result."""
    value = source.meta.get("val") if isinstance(source, Node) else None
    result = node.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == result.dtype
        and sizes_of(value) == sizes_of(result)
    )


def _put(node: Node, place: tuple[str, int | None], new: Node) -> None:
    """Give an argument, or one entry of a list, another node."""
    name, index = place
    if index is None:
        set_argument(node, name, new)
        return
    entries = list(arguments(node)[name])
    entries[index] = new
    set_argument(node, name, entries)


def hints_in(gm: GraphModule) -> Mapping[Node, Hint]:
    """Return the nodes with hints."""
    return {node: hint for node in gm.graph.nodes if (hint := hint_of(node)) is not None}
