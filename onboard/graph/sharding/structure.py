"""Ops that move, take apart or join the dimensions of a tensor: what becomes of a cut.

`back` says what a cut of the results asks of the inputs, `ahead` what a cut of the inputs gives the
results, and `localise` changes the sizes that a call names into those of a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from onboard.graph.fx import arguments, is_op, known_constant
from onboard.graph.sharding.cuts import WHOLE, Cut, Entries, Layout, everything, joined, layout_of
from onboard.graph.sharding.reshaped_cuts import reshaped
from onboard.graph.sharding.signatures import shape

aten = torch.ops.aten
Parts = Mapping[int, Layout]
"""By the index of a result; an op with one has index 0."""
Moved = tuple[int, Cut] | None


class Structure(ABC):
    """What is known of one kind of op."""

    keeps_sums = False
    """A summand of a sum over ranks stays one."""

    def sources(self, node: Node) -> Sequence[Node]:
        """Return the tensors that it works on."""
        return [node.all_input_nodes[0]]

    @abstractmethod
    def back(self, node: Node, wanted: Parts) -> Mapping[Node, Layout]:
        """Return what cuts of the results ask of the inputs, as far as they can be asked."""

    @abstractmethod
    def ahead(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout] | None:
        """Return the layouts of the results; None where inputs cut like that give none."""

    def asks(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout]:
        """Return how the inputs are to lie."""
        return given

    def localise(  # noqa: B027  (most calls name no sizes)
        self, node: Node, given: Sequence[Layout], results: Sequence[Layout], rank: int
    ) -> None:
        """Change what the call says of sizes into what it is on a rank."""


_TABLE: dict[Any, Structure] = {}


def structure(node: Node) -> Structure | None:
    """Return what is known of the op that a node calls, None for one that does not move entries."""
    packet = getattr(node.target, "overloadpacket", None)
    return _RUN if packet is aten.index and _indexed_run(node) else _TABLE.get(packet)


def set_argument(node: Node, name: str, value: object) -> None:
    """Give an argument of an operator's call another value."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    if place < len(node.args):
        node.update_arg(place, value)  # type: ignore[arg-type]
    else:
        node.update_kwarg(name, value)  # type: ignore[arg-type]


class _Moving(Structure):
    """Each dimension of the one input becomes one of the result, or none."""

    keeps_sums = True

    @abstractmethod
    def to(self, node: Node, dim: int, cut: Cut) -> Moved:
        """Return where a cut of the input is in the result."""

    @abstractmethod
    def origin(self, node: Node, dim: int, cut: Cut) -> Moved:
        """Return where a cut of the result comes from."""

    def back(self, node: Node, wanted: Parts) -> Mapping[Node, Layout]:
        found = [self.origin(node, dim, cut) for dim, cut in wanted.get(0, WHOLE).cuts.items()]
        asked = layout_of(filter(None, found))
        return {node.all_input_nodes[0]: asked} if asked.cuts else {}

    def ahead(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout] | None:
        found = [self.to(node, dim, cut) for dim, cut in given[0].cuts.items()]
        return None if None in found else [layout_of(filter(None, found), given[0].partial)]


class _Reshape(_Moving):
    """view, reshape, flatten, unflatten."""

    def __init__(self, sizes: str = "") -> None:
        self.sizes = sizes
        """The argument that names sizes."""

    def to(self, node: Node, dim: int, cut: Cut) -> Moved:
        return reshaped(dim, cut, shape(node.all_input_nodes[0]), shape(node))

    def origin(self, node: Node, dim: int, cut: Cut) -> Moved:
        return reshaped(dim, cut, shape(node), shape(node.all_input_nodes[0]))

    def localise(
        self, node: Node, given: Sequence[Layout], results: Sequence[Layout], rank: int
    ) -> None:
        if not self.sizes:
            return
        values = arguments(node)
        first = values["dim"] % len(shape(node.all_input_nodes[0])) if "dim" in values else 0
        named: list[Any] = list(values[self.sizes])
        for place, size in enumerate(shape(node)[first : first + len(named)]):
            if isinstance(size, int):  # another place may need the one -1
                named[place] = local_size(size, results[0].cuts.get(first + place), rank)
        for dim in results[0].cuts:
            if first <= dim < first + len(named) and isinstance(shape(node)[dim], str):
                named[dim - first] = -1
        set_argument(node, self.sizes, named)
        if is_op(node, aten.view, aten._unsafe_view):
            node.target = aten.reshape.default  # shares of fused results are strided


class _Permuted(_Moving):
    """Ops for which a list says which input dimension each of the result is; -1 for a new one."""

    def __init__(self, order: Callable[[Node, int], list[int]]) -> None:
        self.order = order

    def _order(self, node: Node) -> list[int]:
        return self.order(node, len(shape(node.all_input_nodes[0])))

    def to(self, node: Node, dim: int, cut: Cut) -> Moved:
        order = self._order(node)
        return (order.index(dim), cut) if dim in order else None

    def origin(self, node: Node, dim: int, cut: Cut) -> Moved:
        source = self._order(node)[dim]
        return (source, cut) if source >= 0 else None


class _Chosen(_Moving):
    """index: entries of one dimension by a list; the other dimensions stay where they are."""

    def to(self, node: Node, dim: int, cut: Cut) -> Moved:
        return (dim, cut) if self._stays(node, dim) else None

    origin = to

    def _stays(self, node: Node, dim: int) -> bool:
        indices = list(arguments(node)["indices"])
        by = [place for place, index in enumerate(indices) if index is not None]
        is_list = len(by) == 1 and len(shape(indices[by[0]])) == 1
        return is_list and dim != by[0]


class _Expand(_Moving):
    """expand: dimensions of size one are repeated, new ones come in front."""

    def to(self, node: Node, dim: int, cut: Cut) -> Moved:
        return dim + len(shape(node)) - len(shape(node.all_input_nodes[0])), cut

    def origin(self, node: Node, dim: int, cut: Cut) -> Moved:
        source = dim - len(shape(node)) + len(shape(node.all_input_nodes[0]))
        repeats = source < 0 or shape(node.all_input_nodes[0])[source] == 1
        return None if repeats else (source, cut)

    def ahead(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout] | None:
        moved = [self.to(node, dim, cut) for dim, cut in given[0].cuts.items()]
        repeated = [
            (dim, cut)
            for dim, cut in hint.get(0, WHOLE).cuts.items()
            if self.origin(node, dim, cut) is None
        ]
        return [layout_of([*repeated, *filter(None, moved)], given[0].partial)]

    def localise(
        self, node: Node, given: Sequence[Layout], results: Sequence[Layout], rank: int
    ) -> None:
        sizes = list(arguments(node)["size"])
        for dim, cut in results[0].cuts.items():
            sizes[dim] = len(cut.entries[rank])
        set_argument(node, "size", sizes)


@dataclass
class _Piece:
    """A part of a dimension: its entries from `start` to `stop`."""

    start: int
    stop: int
    step: int = 1


class _Taking(Structure):
    """Ops whose results are pieces of one dimension of their input."""

    def __init__(self, pieces: Callable[[Node, int], list[_Piece]], *, drops: bool = False) -> None:
        self.pieces = pieces
        self.drops = drops
        """Whether the dimension is gone in the results."""

    def _dim(self, node: Node) -> int:
        values = arguments(node)
        if is_op(node, aten.index):
            return next(dim for dim, by in enumerate(values["indices"]) if by is not None)
        return int(values["dim"]) % len(shape(node.all_input_nodes[0]))

    def _pieces(self, node: Node) -> list[_Piece]:
        size = shape(node.all_input_nodes[0])[self._dim(node)]
        return self.pieces(node, size) if isinstance(size, int) else []

    def _behind(self, node: Node, dim: int) -> int:
        """Return the place in the results of another dimension of the input."""
        return dim - 1 if self.drops and dim > self._dim(node) else dim

    def _before(self, node: Node, dim: int) -> int:
        return dim + 1 if self.drops and dim >= self._dim(node) else dim

    def back(self, node: Node, wanted: Parts) -> Mapping[Node, Layout]:
        """Of several pieces, those that nobody asks for are asked for as a whole."""
        own, pieces = self._dim(node), self._pieces(node)
        cuts = {
            self._before(node, dim): cut
            for layout in wanted.values()
            for dim, cut in layout.cuts.items()
            if self.drops or dim != own
        }
        asked = [part.cuts[own] for part in wanted.values() if not self.drops and own in part.cuts]
        if pieces and asked:
            cuts[own] = self._joined(node, pieces, wanted, len(asked[0].entries))
        return {node.all_input_nodes[0]: Layout(cuts)} if cuts else {}

    def _joined(self, node: Node, pieces: list[_Piece], wanted: Parts, ranks: int) -> Cut:
        own, size = self._dim(node), shape(node.all_input_nodes[0])[self._dim(node)]
        assert isinstance(size, int)
        placed = []
        for index, piece in enumerate(pieces):
            length = len(range(piece.start, piece.stop, piece.step))
            cut = wanted.get(index, WHOLE).cuts.get(own) or everything(length, ranks)
            placed.append(cut.placed(piece.start, piece.step, size))
        entries = [
            np.concatenate(each) for each in zip(*(cut.entries for cut in placed), strict=True)
        ]
        if any(
            piece.step > 1 for piece in pieces
        ):  # pieces that lie one behind the other are in order
            entries = [np.sort(own) for own in entries]
        return Cut(size, tuple(entries))

    def ahead(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout] | None:
        own, pieces = self._dim(node), self._pieces(node)
        others = {self._behind(node, dim): cut for dim, cut in given[0].cuts.items() if dim != own}
        if own not in given[0].cuts:
            return [Layout(others, given[0].partial)] * self._results(node)
        if self.drops or not pieces:
            return None
        cut = given[0].cuts[own]
        if any(
            local_piece(own_entries, piece) is None
            for own_entries in cut.entries
            for piece in pieces
        ):
            return None
        parts = [cut.part(piece.start, piece.stop, piece.step) for piece in pieces]
        return [layout_of([*others.items(), (own, part)]) for part in parts]

    def _results(self, node: Node) -> int:
        value = node.meta["val"]
        return len(value) if isinstance(value, list | tuple) else 1

    def localise(
        self, node: Node, given: Sequence[Layout], results: Sequence[Layout], rank: int
    ) -> None:
        if (cut := given[0].cuts.get(self._dim(node))) is None:
            return
        local = [local_piece(cut.entries[rank], piece) for piece in self._pieces(node)]
        source, dim = node.all_input_nodes[0], self._dim(node)
        if isinstance(node.meta["val"], list | tuple):
            sizes = [piece.stop - piece.start for piece in local if piece is not None]
            node.target = aten.split_with_sizes.default
            node.args, node.kwargs = (source, sizes, dim), {}
        else:
            assert local[0] is not None
            node.target = aten.slice.Tensor
            node.args = (source, dim, local[0].start, local[0].stop, local[0].step)
            node.kwargs = {}


class _Joining(Structure):
    """cat: dimensions one after the other."""

    def sources(self, node: Node) -> Sequence[Node]:
        return list(arguments(node)["tensors"])

    def _dim(self, node: Node) -> int:
        return int(arguments(node)["dim"]) % len(shape(node))

    def back(self, node: Node, wanted: Parts) -> Mapping[Node, Layout]:
        own, cuts = self._dim(node), dict(wanted.get(0, WHOLE).cuts)
        whole, asked, start = cuts.pop(own, None), {}, 0
        for source in self.sources(node):
            size = shape(source)[own]
            part = whole.part(start, start + size) if whole and isinstance(size, int) else None
            asked[source] = layout_of([*cuts.items(), (own, part)])
            start += size if isinstance(size, int) else 0
        return {source: layout for source, layout in asked.items() if layout.cuts}

    def asks(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout]:
        """Other dimensions are cut as those of the first input that has them cut."""
        own = self._dim(node)
        others: dict[int, Cut] = {}
        for layout in [*given, hint.get(0, WHOLE)]:
            others |= {
                dim: cut for dim, cut in layout.cuts.items() if dim != own and dim not in others
            }
        mine = [[(own, each.cuts[own])] if own in each.cuts else [] for each in given]
        return [layout_of([*others.items(), *cut]) for cut in mine]

    def ahead(self, node: Node, given: Sequence[Layout], hint: Parts) -> Sequence[Layout] | None:
        own = self._dim(node)
        cuts = {dim: cut for dim, cut in given[0].cuts.items() if dim != own}
        if not any(own in each.cuts for each in given):
            return [Layout(cuts)]
        ranks = next(len(each.cuts[own].entries) for each in given if own in each.cuts)
        parts = []
        for source, layout in zip(self.sources(node), given, strict=True):
            size = shape(source)[own]
            if not isinstance(size, int):
                return None
            parts.append(layout.cuts.get(own) or everything(size, ranks))
        return [layout_of([*cuts.items(), (own, joined(parts))])]


def local_size(size: int, cut: Cut | None, rank: int) -> int:
    """Return how many entries of a dimension a rank has."""
    return size if cut is None else size // cut.size * len(cut.entries[rank])


def local_piece(entries: Entries, piece: _Piece) -> _Piece | None:
    """Return where a rank has its entries of a piece; None where that is no slice."""
    inside = (entries >= piece.start) & (entries < piece.stop)
    places = np.flatnonzero(inside & ((entries - piece.start) % piece.step == 0))
    if not len(places):
        return None
    steps = np.diff(places)
    step = int(steps[0]) if len(steps) else 1
    return _Piece(int(places[0]), int(places[-1]) + 1, step) if (steps == step).all() else None


def _transposed(node: Node, dims: int) -> list[int]:
    order, values = list(range(dims)), arguments(node)
    first, second = values["dim0"], values["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


def _with_new(node: Node, dims: int) -> list[int]:
    order = list(range(dims))
    order.insert(arguments(node)["dim"] % (dims + 1), -1)
    return order


def _squeezed(node: Node, dims: int) -> list[int]:
    dim = arguments(node)["dim"]
    gone = {each % dims for each in (dim if isinstance(dim, list | tuple) else [dim])}
    sizes = shape(node.all_input_nodes[0])
    return [each for each in range(dims) if each not in gone or sizes[each] != 1]


def _even_pieces(size: int, length: int) -> list[_Piece]:
    return [_Piece(start, min(start + length, size)) for start in range(0, size, length)]


def _split(node: Node, size: int) -> list[_Piece]:
    length = arguments(node)["split_size"]
    return _even_pieces(size, length) if isinstance(length, int) else []


def _with_sizes(node: Node, size: int) -> list[_Piece]:
    ends = np.cumsum([0, *arguments(node)["split_sizes"]]).tolist()
    return [_Piece(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _chunked(node: Node, size: int) -> list[_Piece]:
    return _even_pieces(size, -(-size // int(arguments(node)["chunks"])))


def _sliced(node: Node, size: int) -> list[_Piece]:
    values = arguments(node)
    ends = values["start"], values["end"], values["step"]
    if any(isinstance(each, Node) for each in ends):
        return []
    start, stop, step = slice(*ends).indices(size)
    return [_Piece(start, stop, step)]


def _narrowed(node: Node, size: int) -> list[_Piece]:
    start, length = arguments(node)["start"], arguments(node)["length"]
    return [_Piece(start, start + length)] if isinstance(start, int) else []


def _indexed_run(node: Node) -> list[_Piece]:
    """Return the piece of an index by constants, as `heads[:, [-1]]`; none where it is no slice."""
    by = [each for each in enumerate(arguments(node)["indices"]) if each[1] is not None]
    constant = known_constant(by[0][1]) if len(by) == 1 else None
    size = shape(node.all_input_nodes[0])[by[0][0]]
    if constant is None or constant.dtype != torch.int64 or not isinstance(size, int):
        return []
    places = [place % size for place in constant.flatten().tolist()]
    step = places[1] - places[0] if len(places) > 1 else 1
    piece = _Piece(min(places, default=0), max(places, default=-1) + 1, max(step, 1))
    is_run = constant.dim() == 1 and places == [*range(piece.start, piece.stop, piece.step)]
    return [piece] if is_run and places else []


_RUN = _Taking(lambda node, _: _indexed_run(node))
_TABLE |= {
    aten.view: _Reshape("size"),
    aten.reshape: _Reshape("shape"),
    aten._unsafe_view: _Reshape("size"),
    aten.unflatten: _Reshape("sizes"),
    aten.flatten: _Reshape(),
    aten.transpose: _Permuted(_transposed),
    **dict.fromkeys((aten.t, aten.numpy_T), _Permuted(lambda node, dims: [*range(dims)][::-1])),
    aten.permute: _Permuted(lambda node, dims: [each % dims for each in arguments(node)["dims"]]),
    aten.unsqueeze: _Permuted(_with_new),
    aten.squeeze: _Permuted(_squeezed),
    aten.index: _Chosen(),
    aten.expand: _Expand(),
    aten.split: _Taking(_split),
    aten.split_with_sizes: _Taking(_with_sizes),
    aten.chunk: _Taking(_chunked),
    aten.slice: _Taking(_sliced),
    aten.narrow: _Taking(_narrowed),
    aten.unbind: _Taking(lambda node, size: [], drops=True),
    aten.select: _Taking(lambda node, size: [], drops=True),
    aten.cat: _Joining(),
}
