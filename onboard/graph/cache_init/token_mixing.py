"""Does a cached graph treat each token by itself, other than in its cached ops?

A step's row holds tokens of several sequences, in pieces: what mixes its tokens without a cache
gives wrong logits. So the graph is run on a row, and on each third of that row, and a piece must
get what it gets within the row. Whatever looks at neighbours, at the first or last tokens, at the
largest or at all of them, or at a token's place in the row differs for one of the pieces, whichever
operators it is written in.

The canonical and the cached ops, linears and embeddings are not run: the graph is cut there (an
extension's op is run, unless it writes to a cache). What goes into one must be alike in both runs,
and what comes out is random, the same in both. Parameters are random, too, and all about one: no
mixing hides behind a weight of a checkpoint that happens to be small, and none need to be loaded.
Tables take other values than their own: one that begins with many equal rows would hide that a
row's tokens are counted by its place. For the same reason whatever counts is tried with large
numbers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from onboard.graph.fx import ancestors, attribute, is_op, placeholders, writes
from onboard.graph.pattern_matcher.patterns import aten
from onboard.ops.library import declared
from onboard.verify.tolerances import TOKEN_ALONE, TOKEN_ALONE_ROUNDED

_ROW, _PIECE = 9, 3
_NO_VALUE = object()
_BLOCK = (1 << 17) - 1
"""Random numbers that are drawn for one tensor; a longer one repeats them. It is prime: rows of a
table differ.
"""
_FAR = [_PIECE**power for power in range(1, 12)]
"""What counted numbers are multiplied with: any number up to the last lies between a piece's and a
row's for one.
"""


@dataclass(frozen=True)
class TokenMixing:
    """A node through which a token's values depend on the other tokens of its row, or on its place
    there.
    """

    node: fx.Node

    def __str__(self) -> str:
        stack = self.node.meta.get("nn_module_stack") or {}
        path = next((str(entry[0]) for entry in reversed(stack.values()) if entry[0]), "")
        target = self.node.target
        name = str(target.overloadpacket) if isinstance(target, OpOverload) else str(target)
        return f"{name} in {path.removeprefix('L__self__.')}" if path else name


@torch.no_grad()
def token_mixing(gm: fx.GraphModule, device: torch.device) -> TokenMixing | None:
    """Return the first node that mixes the tokens of a row outside of the canonical ops, None when
    there is none.
    """
    symbols = _symbols(gm, "input_ids")
    if len(symbols) != 2:
        return None  # a graph of one fixed size has no rows
    symbols += _symbols(gm, "logits_gather_indices")
    for start in range(0, _ROW, _PIECE):
        if (culprit := _Probe(gm, device, symbols, start).run()) is not None:
            return TokenMixing(culprit)
    return _counting(gm, symbols)


def _symbols(gm: fx.GraphModule, name: str) -> list[Any]:
    """Return the sizes of an input that are not fixed."""
    shape = next((node.meta["val"].shape for node in placeholders(gm) if node.target == name), ())
    return [size.node.expr for size in shape if isinstance(size, torch.SymInt)]


def _counting(gm: fx.GraphModule, symbols: list[Any]) -> TokenMixing | None:
    """Return the first node that differs when what counts a row's tokens gives large numbers.

    Numbers that pick something cannot be that large: such a graph fails, on the CPU without harm,
        and tells nothing.
    """
    if not any(_counts(node) for node in gm.graph.nodes):
        return None
    for far in _FAR:
        try:
            culprit = _Probe(gm, torch.device("cpu"), symbols, _ROW - _PIECE, far).run()
        except Exception:
            return None
        if culprit is not None:
            return TokenMixing(culprit)
    return None


@dataclass
class _Probe:
    """Two runs side by side: each node's value in the row, and in a piece of it."""

    gm: fx.GraphModule
    device: torch.device
    symbols: list[Any]
    """Batch and length, as sizes in the graph name them; last, where logits are gathered, the
    number of them.
    """
    start: int
    """Where the piece begins."""
    far: int = 1
    """What counted numbers are multiplied with."""
    values: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    differing: dict[fx.Node, None] = field(default_factory=dict)
    readers: dict[fx.Node, int] = field(default_factory=dict)
    """How many nodes are still to read a value."""
    culprit: fx.Node | None = None

    def __post_init__(self) -> None:
        self.random = torch.Generator(self.device).manual_seed(11)
        self.stood_in = set(filter(self._has_stand_in, self.gm.graph.nodes))
        self.unread = self._unread()

    def _unread(self) -> set[fx.Node]:
        """Return the nodes of weights alone that only the ops read which are not run: nobody asks
        for their values, which are as large as the weights.
        """
        of_weights: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr" or (inputs and all(each in of_weights for each in inputs)):
                of_weights.add(node)
        unread: set[fx.Node] = set()
        for node in reversed(self.gm.graph.nodes):
            if node in of_weights and all(
                each in unread or each in self.stood_in or each.op == "output"
                for each in node.users
            ):
                unread.add(node)
        return unread

    def _has_stand_in(self, node: fx.Node) -> bool:
        """Whether random values stand for those of a node, which is not run."""
        if node.op != "call_function" or not _is_cut(node):
            return False
        leaves = pytree.tree_leaves(node.meta.get("val"))
        return bool(leaves) and None not in map(self._shapes, leaves)

    def run(self) -> fx.Node | None:
        """Return the first node that mixes tokens."""
        for node in self.gm.graph.nodes:
            if node not in self.unread:
                self.visit(node)
            if self.culprit is not None:
                break
            self.forget_what_only_served(node)
        return self.culprit

    def visit(self, node: fx.Node) -> None:
        """Give a node its values, and look at what goes into one where the graph is cut."""
        if node.op == "placeholder":
            self.values[node] = self._input(node)
        elif node.op == "output":
            self._must_agree(node)
        elif node.op == "call_function":
            if node in self.stood_in:
                self._must_agree(node)
                self.values[node] = self._stand_in(node)
            else:
                self._compute(node)

    def forget_what_only_served(self, node: fx.Node) -> None:
        """Drop the values that `node` was the last to read."""
        for each in node.all_input_nodes:
            self.readers[each] = self.readers.get(each, len(each.users)) - 1
            if self.readers[each] == 0:
                self.values.pop(each, None)

    def _input(self, node: fx.Node) -> tuple[Any, Any]:
        if node.target == "input_ids":
            row = torch.randperm(2 * _ROW, generator=self.random, device=self.device)[None, :_ROW]
        elif node.target == "position_ids":
            row = torch.arange(_ROW, device=self.device)[None] + 2
        elif node.target == "logits_gather_indices":
            return tuple(torch.arange(length, device=self.device) for length in (_ROW, _PIECE))  # type: ignore[return-value]
        elif _has_rows(node, self.symbols[:2]):
            known = self._shapes(node.meta["val"]) is not None
            return self._noise_in(node.meta["val"]) if known else (_NO_VALUE, _NO_VALUE)
        else:  # metadata and caches, which only cached ops read
            return _NO_VALUE, _NO_VALUE
        return row, _piece(row, torch.Size((1, _PIECE)), self.start)

    def _stand_in(self, node: fx.Node) -> tuple[Any, Any]:
        """Return random values in the shapes of a node's, which are known."""
        leaves, spec = pytree.tree_flatten(node.meta["val"])
        rows, pieces = zip(*map(self._noise_in, leaves), strict=True)
        return pytree.tree_unflatten(rows, spec), pytree.tree_unflatten(pieces, spec)

    def _noise_in(self, leaf: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = self._shapes(leaf)
        assert shapes is not None
        row = self._noise(shapes[0], leaf.dtype)
        piece = _piece(row, shapes[1], self.start)
        assert piece is not None
        return row, piece

    def _shapes(self, leaf: Any) -> tuple[torch.Size, torch.Size] | None:
        """Return a value's shapes over the row and over the piece; None where they are not known, or
        the piece's is no part of the row's.
        """
        row, piece = self._shape(leaf, _ROW), self._shape(leaf, _PIECE)
        if row is None or piece is None:
            return None
        return (
            None if _piece(torch.empty(()).expand(row), piece, self.start) is None else (row, piece)
        )

    def _shape(self, leaf: Any, length: int) -> torch.Size | None:
        """Return the shape of a value over one row of that length."""
        if not isinstance(leaf, torch.Tensor):
            return None
        known = dict(zip(self.symbols, (1, length, length), strict=False))
        sizes = [
            size.node.expr.xreplace(known) if isinstance(size, torch.SymInt) else size
            for size in leaf.shape
        ]
        return (
            torch.Size(map(int, sizes))
            if all(getattr(size, "is_number", True) for size in sizes)
            else None
        )

    def _noise(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=self.random, device=self.device).to(dtype)
        return torch.randint(2, shape, generator=self.random, device=self.device).to(dtype)

    def _compute(self, node: fx.Node) -> None:
        row = self._called(node, lambda each: self._value(each)[0])
        of_parameters = node.all_input_nodes and all(
            a is b for a, b in map(self._value, node.all_input_nodes)
        )
        piece = row if of_parameters else self._called(node, lambda each: self._value(each)[1])
        if self.far > 1 and _counts(node):
            row, piece = row * self.far, piece * self.far
        self.values[node] = row, piece
        if row is not piece and not _agree(row, piece, self.start):
            self.differing[node] = None

    def _called(self, node: fx.Node, load: Callable[[fx.Node], Any]) -> Any:
        keywords = {
            key: self.device if key == "device" else value for key, value in node.kwargs.items()
        }
        return node.target(*map_arg(node.args, load), **map_arg(keywords, load))  # type: ignore[operator]

    def _value(self, node: fx.Node) -> tuple[Any, Any]:
        if node not in self.values:
            assert node.op == "get_attr", f"{node} is read before it is computed"
            value = self._attribute(attribute(self.gm, str(node.target)))
            self.values[node] = value, value
        return self.values[node]

    def _attribute(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (
            isinstance(value, nn.Parameter)
            or value.is_meta
            or (value.is_floating_point() and value.numel() > 1)
        ):
            block = (
                torch.rand(min(value.numel(), _BLOCK), generator=self.random, device=self.device)
                + 0.5
            )
            times = -(-value.numel() // _BLOCK)
            return block.to(value.dtype).repeat(times)[: value.numel()].view(value.shape)
        value = value.to(self.device)
        order = torch.randperm(value.numel(), generator=self.random, device=self.device)
        # Whatever whole numbers pick, they are in range
        return value.flatten()[order].view(value.shape)

    def _must_agree(self, node: fx.Node) -> None:
        """Find the first node that made what goes into `node` differ, if it does."""
        if self.culprit is None and any(each in self.differing for each in node.all_input_nodes):
            origins = ancestors(each for each in node.all_input_nodes if each in self.differing)
            self.culprit = next(each for each in self.differing if each in origins)


def _has_rows(node: fx.Node, symbols: list[Any]) -> bool:
    """Whether an input has a row of numbers for each token, as hidden states do."""
    value = node.meta["val"]
    sizes = [getattr(getattr(size, "node", None), "expr", size) for size in value.shape[:2]]
    return value.is_floating_point() and value.ndim > 2 and sizes == symbols


def _counts(node: fx.Node) -> bool:
    """Whether a node makes whole numbers by counting."""
    value = node.meta.get("val")
    return (
        is_op(node, aten.arange, aten.cumsum)
        and isinstance(value, torch.Tensor)
        and not value.is_floating_point()
    )


def _is_cut(node: fx.Node) -> bool:
    """Whether an operator is known to treat each token by itself, or has a cache for what it does
    not.
    """
    if isinstance(node.target, OpOverload) and node.target.namespace == "onboard":
        if not declared(node.target).ships:
            return writes(node)  # nobody knows what an extension's does
        return not is_op(node, torch.ops.onboard.gather_logits_before_lm_head)
    if not is_op(node, aten.linear, aten.embedding):
        return False
    weights = node.args[:1] if is_op(node, aten.embedding) else node.args[1:]
    return all(
        isinstance(weight, fx.Node) and weight.op == "get_attr"
        for weight in weights
        if weight is not None
    )


def _piece(row: torch.Tensor, shape: torch.Size, start: int) -> torch.Tensor | None:
    """Return the piece's part of a value [..., tokens * n, ...] of the row; None: it has no such
    part.
    """
    if row.dim() != len(shape):
        return None
    for dim, (size, wanted) in enumerate(zip(row.shape, shape, strict=True)):
        if size == wanted:
            continue
        each = size // _ROW
        if (size, wanted) != (each * _ROW, each * _PIECE):
            return None
        row = row.narrow(dim, each * start, wanted)
    return row


def _agree(row: Any, piece: Any, start: int) -> bool:
    """Whether all tensors of the piece are parts of the row's; sizes are what they are."""
    pairs = zip(pytree.tree_leaves(row), pytree.tree_leaves(piece), strict=True)
    return all(
        _close(_piece(a, b.shape, start), b) for a, b in pairs if isinstance(a, torch.Tensor)
    )


def _close(expected: torch.Tensor | None, actual: torch.Tensor) -> bool:
    if expected is None:
        return False
    if not (actual.is_floating_point() or actual.is_complex()) or actual.numel() == 0:
        return torch.equal(expected, actual)
    tolerance = (
        TOKEN_ALONE if actual.dtype in (torch.float32, torch.float64) else TOKEN_ALONE_ROUNDED
    )
    wide = torch.complex128 if actual.is_complex() else torch.float64
    expected, actual = expected.to(wide), actual.to(wide)
    sizes = actual.abs().nan_to_num()
    sizes = sizes[sizes > 0]  # of experts without a token all are zero
    scale = float(sizes.median()) if len(sizes) else 0.0
    return torch.allclose(expected, actual, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
