"""Experts that a checkpoint has as quantised layers of their own, where the unquantised model has them
in stacks: `experts.3.gate_proj.weight` is a part of `experts.gate_up_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded, plain
from onboard.quantised.weight import DAMAGED, NOT_QUANTISED, QuantisedWeight, Tensors, require

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_APART = re.compile(r"(.*\bexperts)\.\d+\.\w+\.weight")
_BEFORE_LAYERS = re.compile(r"^([A-Za-z_]\w*\.)*?(?=\w+\.\d+\.)")
"""What models and checkpoints may name otherwise."""
WHOLE = "whole numbers"
"""The kind of what is in a stack and not quantised: biases."""
_MIXED = "several kinds"


class Declared(Protocol):
    """A stack of the unquantised model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, outputs, inputs], or the last two the other way round."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """The layers of an expert that are in it, one behind the other."""

    @property
    def alternates(self) -> bool:
        """Whether the outputs of the pieces take turns."""


Members = tuple[tuple[QuantisedWeight, ...], ...]


def same_place(one: str, other: str) -> bool:
    """Tell whether two names are of one module, but for what models and checkpoints call otherwise."""
    return _BEFORE_LAYERS.sub("", one) == _BEFORE_LAYERS.sub("", other)


def are_apart(names: Collection[str]) -> bool:
    """Tell whether there are weights of experts one by one."""
    return any(map(_APART.fullmatch, names))


def joined_experts(
    weights: Mapping[str, QuantisedWeight],
    stored: Mapping[str, TensorMeta],
    declared: Mapping[str, Declared],
) -> dict[str, QuantisedWeight]:
    """Return the weights with those of experts in the declared stacks, which lie where the experts do;
    `stored` has the experts that are not quantised, and biases.

    Raises `OnboardError` where experts are missing, or are of other shapes.
    """
    paths = {match[1] for name in weights if (match := _APART.fullmatch(name))}
    joined = dict(
        each for path in sorted(paths) for each in _stacks(path, weights, stored, declared)
    )
    taken = {each.name for stack in joined.values() for each in _flat(stack.members)}
    return {name: each for name, each in weights.items() if name not in taken} | joined


def _stacks(
    path: str,
    weights: Mapping[str, QuantisedWeight],
    stored: Mapping[str, TensorMeta],
    declared: Mapping[str, Declared],
) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yield the stacks of one mixture's experts, by name."""
    own = {
        f"{path}.{leaf}": stack
        for name, stack in declared.items()
        for place, _, leaf in [name.rpartition(".")]
        if same_place(place, path)
    }
    members = {name: _members(path, name, each, weights, stored) for name, each in own.items()}
    turned = _are_turned(own, members)
    for name, stack in own.items():
        yield name, _joined(name, stack, members[name], turned=turned and len(stack.shape) > 2)


def _flat(members: Members) -> Iterator[QuantisedWeight]:
    return (each for expert in members for each in expert)


def _members(
    path: str,
    stack: str,
    declared: Declared,
    weights: Mapping[str, QuantisedWeight],
    stored: Mapping[str, TensorMeta],
) -> Members:
    """Return what each expert has in a stack."""
    kind = "bias" if stack.endswith("_bias") else "weight"

    def member(layer: str) -> QuantisedWeight:
        name = f"{layer}.{kind}"
        return weights.get(name) or _unquantised(name, require(stored, name, f"others in {path}"))

    experts, pieces = range(declared.shape[0]), declared.pieces
    return tuple(tuple(member(f"{path}.{n}.{piece}") for piece in pieces) for n in experts)


def _unquantised(name: str, meta: TensorMeta) -> QuantisedWeight:
    """Return what is left as it is: of a vector each number is an output."""

    def decode(parts: Tensors) -> Encoded:
        return plain(parts["codes"].view(len(parts["codes"]), -1))

    return QuantisedWeight(name, meta.shape, WHOLE, {"codes": name}, decode)


def _are_turned(stacks: Mapping[str, Declared], members: Mapping[str, Members]) -> bool:
    """Tell whether a model's stacks have inputs first, which not each shape may tell by itself."""
    fits = {False, True}
    for name, stack in stacks.items():
        fits &= {turned for turned in (False, True) if _fits(stack, members[name], turned)}
        if not fits:
            first = members[name][0][0]
            what = f"{first.name} is {list(first.shape)}, and {name} {list(stack.shape)}"
            raise OnboardError(f"{what} is not made of such", hint=DAMAGED)
    return fits == {True}


def _fits(stack: Declared, members: Members, turned: bool) -> bool:
    """Tell whether the weights of each expert are an entry of a stack, perhaps with inputs first."""
    _, *entry = stack.shape
    rows, *columns = reversed(entry) if turned and len(entry) > 1 else entry
    return all(
        sum(each.shape[0] for each in expert) == rows
        and all(list(each.shape[1:]) == columns for each in expert)
        for expert in members
    )


def _joined(name: str, stack: Declared, members: Members, *, turned: bool) -> QuantisedWeight:
    first = members[0][0]
    if len({_form(each) for each in _flat(members)}) > 1:
        first = replace(first, kind=_MIXED, encoding="", block=None, input_scale=None)
        first = replace(first, activations=NOT_QUANTISED)
    return replace(
        first,
        name=name,
        shape=stack.shape,
        decode=_not_at_once,
        unread=(),
        transposed=turned,
        axes=None,
        members=members,
        alternates=stack.alternates,
    )


def _form(weight: QuantisedWeight) -> tuple[object, ...]:
    """Return in what weights are alike that one op computes with."""
    inputs = weight.activations, weight.input_scale is None
    codes = weight.kind, weight.computed_as, weight.has_offset, frozenset(weight.parts)
    return (*codes, weight.block, weight.scale_dtype, *inputs)


def _not_at_once(_: Tensors) -> NoReturn:
    raise AssertionError("a stack of experts is read one by one")


def joined_rows(parts: Sequence[Encoded], *, alternates: bool) -> Encoded:
    """Return weights of one input, their outputs one behind the other, or in turns."""
    if len(parts) == 1:
        return parts[0]
    if not all(_are_alike(parts[0], each) for each in parts[1:]):
        parts = [plain(each.values()) for each in parts]
    first = parts[0]
    if alternates or any(
        each.rows != first.rows or each.codes.shape[0] % each.rows for each in parts
    ):
        parts = [each.by_outputs() for each in parts]

    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return (
            torch.stack(list(tensors), 1).flatten(0, 1) if alternates else torch.cat(list(tensors))
        )

    def blocks(role: str) -> torch.Tensor | None:
        found = [getattr(each, role) for each in parts]
        return None if found[0] is None else joined(found)

    codes, scale = (joined([getattr(each, role) for each in parts]) for role in ("codes", "scale"))
    return replace(parts[0], codes=codes, scale=scale, offset=blocks("offset"), zero=blocks("zero"))


def _are_alike(first: Encoded, other: Encoded) -> bool:
    """Tell whether the codes of two weights mean the same, but for the scales of their blocks."""
    dtypes = [(each.codes.dtype, each.scale.dtype) for each in (first, other)]
    tables = [(each.table, each.columns, each.transposed) for each in (first, other)]
    blocks = [(each.offset is None, each.zero is None) for each in (first, other)]
    shared = (
        (getattr(first, role), getattr(other, role)) for role in ("groups", "inputs", "whole")
    )
    return (
        dtypes[0] == dtypes[1]
        and tables[0] == tables[1]
        and blocks[0] == blocks[1]
        and all(_are_equal(*pair) for pair in shared)
    )


def _are_equal(first: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if first is None or other is None:
        return first is other
    return torch.equal(first, other)
