"""Which dimensions of an op's inputs and outputs go together.

A dimension has a letter, or "." where it has to be whole. Dimensions with one letter are cut
alike; their sizes may be multiples of one another, as those of key heads, query heads and of a
weight with several rows a head. A letter that no output has is summed over: cut, it leaves each
rank with a summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

import torch
from torch.fx import Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, is_op
from onboard.graph.sharding.cuts import Cut
from onboard.graph.sharding.reshaped_cuts import Size, sizes_of

aten, ops = torch.ops.aten, torch.ops.onboard

Place = tuple[str, int | None]
"""An argument's name, and the index in it where it is a list."""


@dataclass(frozen=True)
class Operand:
    """An input of an op."""

    place: Place
    node: Node
    letters: str

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes of its dimensions."""
        return sizes_of(self.node.meta["val"])


@dataclass(frozen=True)
class Signature:
    """The dimensions of one call."""

    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    units: Mapping[str, int] = field(default_factory=dict)
    """Letter -> how many parts of its dimension cannot be taken apart; the others' entries can."""
    once: frozenset[str] = frozenset()
    """Arguments that are added to a sum over ranks, so that one rank alone may have them."""

    def operands_with(self, letter: str) -> Iterator[tuple[Operand, int, Size]]:
        """Yield each operand, dimension and size that has a letter."""
        for operand in self.operands:
            for dim, (own, size) in enumerate(zip(operand.letters, operand.sizes, strict=True)):
                if own == letter:
                    yield operand, dim, size

    def is_summed(self, letter: str) -> bool:
        """Whether no output has a letter."""
        return not any(letter in output for output in self.outputs)


def fitted(cut: Cut, size: Size) -> Cut | None:
    """Return a cut for a dimension of the same letter with another size; None where it has none."""
    if isinstance(size, str) or size == cut.size:
        return cut
    if size % cut.size == 0:
        return cut.refined(size // cut.size)
    return cut.shared_by(cut.size // size) if cut.size % size == 0 else None


Written = Callable[[Node], Signature | None]
_WRITTEN: dict[Any, Written] = {}


def signature_of(*targets: Any) -> Callable[[Written], Written]:
    """Register what writes the signature of a call of `targets`; it gives None for a call that has
    none.
    """

    def register(written: Written) -> Written:
        _WRITTEN.update(dict.fromkeys(targets, written))
        return written

    return register


def signature(node: Node) -> Signature | None:
    """Return the signature of a call, None for an op that has none, or not with tensors of these
    numbers of dimensions.
    """
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _WRITTEN:
        found = _WRITTEN[packet](node)
    else:
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        found = pointwise(node) if is_pointwise else None
    fits = found is None or all(len(each.letters) == len(each.sizes) for each in found.operands)
    return found if fits else None


def shape(node: Node) -> tuple[Size, ...]:
    """Return the sizes of the dimensions of a node's result."""
    return sizes_of(node.meta["val"])


def operands(node: Node, **letters: str) -> tuple[Operand, ...]:
    """Return the operands that are there among arguments, each (or each of a list) with its
    letters.
    """
    values, found = arguments(node), []
    for name, own in letters.items():
        value = values.get(name)
        each = list(enumerate(value)) if isinstance(value, list | tuple) else [(None, value)]
        found += [Operand((name, i), node, own) for i, node in each if isinstance(node, Node)]
    return tuple(found)


_CASTS = (
    aten.to,
    aten._to_copy,
    aten.contiguous,
    aten.clone,
    aten.alias,
    aten.type_as,
    aten.dropout,
)


def is_cast(node: Node) -> bool:
    """Whether a call changes a tensor's dtype or memory at most."""
    return is_op(node, *_CASTS)


@signature_of(*_CASTS)
def unary(node: Node) -> Signature | None:
    """An op that changes neither shape nor places; a second tensor says a dtype alone."""
    letters = ascii_lowercase[: len(shape(node))]
    first = next(iter(arguments(node)))
    return Signature(operands(node, **{first: letters}), (letters,))


@signature_of(aten.view_as)
def view_as(node: Node) -> Signature | None:
    """A view of the shape that the tensor has already."""
    values, letters = arguments(node), ascii_lowercase[: len(shape(node))]
    if shape(values["self"]) != shape(values["other"]):
        return None
    return Signature(operands(node, self=letters, other=letters), (letters,))


def pointwise(node: Node) -> Signature | None:
    """Entry by entry, with broadcasting."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    out = shape(node)
    letters = ascii_lowercase[: len(out)]
    found = []
    for name, value in arguments(node).items():
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
            own = shape(value)
            aligned = zip(
                own, out[len(out) - len(own) :], letters[len(out) - len(own) :], strict=True
            )
            found.append(
                Operand(
                    (name, None),
                    value,
                    "".join(letter if size == whole else "." for size, whole, letter in aligned),
                )
            )
    return Signature(tuple(found), (letters,))


@signature_of(aten.linear, ops.torch_linear_simple)
def linear(node: Node) -> Signature | None:
    """x [..., K], weight [N, K], bias [N] -> [..., N]."""
    front = ascii_lowercase[: len(shape(node)) - 1]
    found = operands(node, input=f"{front}K", weight="NK", bias="N")
    return Signature(found, (f"{front}N",), once=frozenset(["bias"]))


@signature_of(aten.addmm)
def addmm(node: Node) -> Signature | None:
    """bias [N], x [rows, K], weight [K, N] -> [rows, N]."""
    values = arguments(node)
    if values["beta"] != 1 or values["alpha"] != 1 or len(shape(values["self"])) != 1:
        return None
    found = operands(node, self="N", mat1="aK", mat2="KN")
    return Signature(found, ("aN",), once=frozenset(["self"]))


@signature_of(aten.matmul, aten.bmm, aten.mm)
def matmul(node: Node) -> Signature | None:
    """[..., M, K] by [..., K, N] -> [..., M, N]."""
    left, right, out = (shape(each) for each in (*node.all_input_nodes[:2], node))
    if len(node.all_input_nodes) != 2 or min(len(left), len(right)) < 2:
        return None
    front = ascii_lowercase[: len(out) - 2]

    def aligned(own: tuple[Size, ...]) -> str:
        skipped = len(out) - len(own)
        sizes = zip(front[skipped:], own[:-2], out[skipped:-2], strict=True)
        return "".join(letter if size == whole else "." for letter, size, whole in sizes)

    first, second = list(arguments(node))[:2]
    found = operands(node, **{first: aligned(left) + "MK", second: aligned(right) + "KN"})
    return Signature(found, (f"{front}MN",))


@signature_of(ops.torch_rmsnorm, ops.torch_layernorm, ops.torch_l2norm)
def norm(node: Node) -> Signature | None:
    """Over the last dimension, which has to be whole."""
    front = ascii_lowercase[: len(shape(node)) - 1]
    return Signature(operands(node, input=f"{front}."), (f"{front}.",))


@signature_of(aten.softmax, aten._softmax, aten.log_softmax, aten.cumsum, aten.flip)
def over_one_dimension(node: Node) -> Signature | None:
    """Over a dimension (or several), which has to be whole."""
    values, letters = arguments(node), list(ascii_lowercase[: len(shape(node))])
    for dim in values["dims"] if "dims" in values else [values["dim"]]:
        letters[dim] = "."
    return Signature(operands(node, self="".join(letters)), ("".join(letters),))


@signature_of(aten.mean, aten.sum, aten.amax, aten.var, aten.std, aten.linalg_vector_norm)
def over_some_dimensions(node: Node) -> Signature | None:
    """Over dimensions that have to be whole, all where none is named; None for an overload that has
    them otherwise.
    """
    values = arguments(node)
    source, dims = values.get("self"), values.get("dim")
    if not isinstance(source, Node) or dims is None:
        return None
    letters = list(ascii_lowercase[: len(shape(source))])
    named = [dims] if isinstance(dims, int) else dims or range(len(letters))
    gone = {dim % len(letters) for dim in named}
    kept = bool(values.get("keepdim"))
    out = [
        "." if place in gone else letter
        for place, letter in enumerate(letters)
        if kept or place not in gone
    ]
    letters = ["." if place in gone else letter for place, letter in enumerate(letters)]
    return Signature(operands(node, self="".join(letters)), ("".join(out),))


@signature_of(aten.stack)
def stack(node: Node) -> Signature | None:
    """Tensors cut alike, along a new dimension."""
    values, out = arguments(node), shape(node)
    letters = list(ascii_lowercase[: len(out) - 1])
    found = operands(node, tensors="".join(letters))
    letters.insert(values["dim"] % len(out), ".")
    return Signature(found, ("".join(letters),))


_NEW = (aten.new_ones, aten.new_zeros, aten.new_full, aten.new_empty)


def says_dtype(node: Node) -> bool:
    """Whether a call takes a tensor's dtype, and nothing else of it."""
    return is_op(node, *_NEW)


@signature_of(*_NEW)
def new_values(node: Node) -> Signature | None:
    """Of a tensor's dtype alone: none of its dimensions has to be whole."""
    return Signature((), ("." * len(shape(node)),))


@signature_of(aten.layer_norm)
def plain_layer_norm(node: Node) -> Signature | None:
    """Over the last dimensions, which have to be whole."""
    whole = len(arguments(node)["normalized_shape"])
    letters = ascii_lowercase[: len(shape(node)) - whole] + "." * whole
    return Signature(operands(node, input=letters), (letters,))


@signature_of(ops.torch_rmsnorm_gated)
def gated_norm(node: Node) -> Signature | None:
    """Over groups of the last dimension, which cannot be taken apart."""
    values, size = arguments(node), shape(node)[-1]
    front = ascii_lowercase[: len(shape(node)) - 1]
    if not isinstance(size, int):
        return None
    groups = size // values["group_size"]
    last = "G" if groups > 1 else "."
    found = operands(node, x=front + last, gate=front + last, weight=last)
    return Signature(found, (front + last,), units={"G": groups})


@signature_of(aten.embedding)
def embedding(node: Node) -> Signature | None:
    """A table with a row a token, of which each rank has some: a sum of what the ranks find."""
    return Signature(operands(node, weight="v."), ("." * len(shape(node)),))


@signature_of(
    ops.torch_rope_with_explicit_cos_sin,
    ops.torch_rope_with_qk_interleaving,
    ops.torch_rope_with_complex_freqs,
)
def rotation(node: Node) -> Signature | None:
    """Queries and keys with heads of their own, and a table."""
    first, second = list(arguments(node))[:2]
    heads = arguments(node)["unsqueeze_dim"]
    dims = len(shape(node.all_input_nodes[0]))
    query, key = ("." * heads + letter + "." * (dims - heads - 1) for letter in "hg")
    return Signature(operands(node, **{first: query, second: key}), (query, key))


@signature_of(ops.torch_causal_conv1d)
def convolution(node: Node) -> Signature | None:
    """Along the sequence, of each channel by itself; None for one that mixes channels."""
    weight = shape(arguments(node)["weight"])
    if weight[1] != 1 or weight[0] != shape(node)[-1]:
        return None
    return Signature(operands(node, input="..c", weight="c..", bias="c"), ("..c",))
