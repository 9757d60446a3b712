"""Experts whose weights lie in one module, which computes one of them of the tokens and its number:
lists of matrices, stacks, or matrices that are those of all experts one below the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.bounds.scales import scaled
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME_MIXTURE

_ROLES = ("gate", "down", "up")
OWN = "own"
"""Stacks that are parameters of the mixture itself."""
_MOST = 6
"""Stacks of as many experts, in threes and pairs."""


@dataclass(frozen=True)
class Numbered:
    """Such a module, and how many experts it has."""

    module: nn.Module
    count: int

    def __len__(self) -> int:
        return self.count

    def modules(self) -> Iterator[nn.Module]:
        """Yield what it is made of."""
        return self.module.modules()


def numbered_experts(module: nn.Module) -> tuple[Numbered, dict[str, Any]] | None:
    """Return a module as experts, and how their weights lie in it; None where it is none, or its
    experts have biases.
    """
    if len(inspect.signature(module.forward).parameters) != 2:
        return None
    for experts, forms, held in _possible(module):
        for form in forms:
            if _fits(experts, form, held):
                return experts, form
    return None


def own_stacks(
    module: nn.Module,
) -> Iterator[tuple[tuple[str, ...], Numbered, list[dict[str, Any]]]]:
    """Yield the names of stacks [experts, ., .] that are parameters of a mixture itself, the experts,
    and how they may be made; the statements that compute with them tell.
    """
    stacks = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
    for count in sorted({len(p) for p in stacks.values()} - {1}):
        alike = [name for name, p in stacks.items() if len(p) == count]
        for names in [*combinations(alike, 3), *combinations(alike, 2)]:
            held = {name: list(stacks[name].unbind()) for name in names}
            forms = list(_forms(held, OWN, None))
            if forms and len(alike) <= _MOST:
                yield names, Numbered(module, count), forms


def handed_weights(module: nn.Module) -> Iterator[tuple[Numbered, list[dict[str, Any]]]]:
    """Yield experts whose weights a module has and is handed by its caller, one expert's in a call,
    and how they may be made; the caller's statements tell. A module that reads its own is handed
    something else.
    """
    if len(inspect.signature(module.forward).parameters) not in (3, 4):
        return
    read = inspect.unwrap(type(module).forward).__code__.co_names
    for experts, forms, held in _possible(module):
        if held.keys().isdisjoint(read) and (made := list(forms)):
            yield experts, made


def _possible(
    module: nn.Module,
) -> Iterator[tuple[Numbered, Iterator[dict[str, Any]], dict[str, list[torch.Tensor]]]]:
    """Yield the experts that all weights of a module may be, how they may be made, and their
    matrices by name.
    """
    for layout, size, held in _layouts(module):
        counts = {len(matrices) for matrices in held.values()}
        if len(held) in (2, 3) and len(counts) == 1 and counts != {1}:
            yield Numbered(module, counts.pop()), _forms(held, layout, size), held


def weights_of(experts: Numbered, form: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return gate, down and up projections of each expert [out, in]."""
    if form["layout"] == OWN:
        names = [form[role] for role in _ROLES if form[role]]
        return _lists(form, {name: list(getattr(experts.module, name).unbind()) for name in names})
    held = next(
        held
        for layout, size, held in _layouts(experts.module)
        if (layout, size) == (form["layout"], form["size"])
    )
    return _lists(form, held)


def _layouts(
    module: nn.Module,
) -> Iterator[tuple[str, str | None, dict[str, list[torch.Tensor]]]]:
    """Yield the ways in which all weights of a module may be matrices of experts, by name; of flat
    ones the attribute that says how many experts there are.
    """
    listed = {
        name: list(child)
        for name, child in module.named_children()
        if isinstance(child, nn.ParameterList)
    }
    own = dict(module.named_parameters(recurse=False))
    inside = sum(len(matrices) for matrices in listed.values())
    if inside + len(own) != len(list(module.parameters())):
        return
    if listed and not own and all(p.dim() == 2 for each in listed.values() for p in each):
        yield "lists", None, listed
    elif own and not listed and all(p.dim() == 3 for p in own.values()):
        yield "stacks", None, {name: list(p.unbind()) for name, p in own.items()}
    elif own and not listed and all(p.dim() == 2 for p in own.values()):
        rows = {len(p) for p in own.values()}
        for size, count in vars(module).items():
            if type(count) is int and 1 < count < min(rows) and not any(r % count for r in rows):
                yield "flat", size, {name: list(p.chunk(count)) for name, p in own.items()}


def _forms(
    held: dict[str, list[torch.Tensor]], layout: str, size: str | None
) -> Iterator[dict[str, Any]]:
    for names in permutations(held):
        for turned in product((False, True), repeat=len(names)):
            form: dict[str, Any] = {role: None for role in _ROLES} | dict(
                zip(_ROLES, names, strict=False)
            )
            flips = [role for role, flip in zip(_ROLES, turned, strict=False) if flip]
            form |= {"layout": layout, "size": size, "turned": flips, "biased": False}
            first = [matrices[0].shape for matrices in _lists(form, held) if matrices]
            if first[0] == first[1][::-1] and first[-1] in (first[0], first[1]):
                yield from ({**form, "activation": each} for each in ACTIVATIONS)


def _lists(form: dict[str, Any], held: dict[str, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    lists = [held[form[role]] if form[role] else [] for role in _ROLES]
    return [
        [matrix.T for matrix in matrices] if role in form["turned"] else matrices
        for role, matrices in zip(_ROLES, lists, strict=True)
    ]


def _fits(experts: Numbered, form: dict[str, Any], held: dict[str, list[torch.Tensor]]) -> bool:
    """Whether the first expert and the last one compute what the op does."""
    lists = _lists(form, held)
    x = torch.randn(5, lists[0][0].shape[1], generator=torch.Generator().manual_seed(17))
    settings = (form["up"] is not None, form["activation"])
    for number in (0, len(experts) - 1):
        if not all(_computes(experts, number, each, (*lists, *settings)) for each in scaled(x)):
            return False
    return True


def _computes(experts: Numbered, number: int, x: torch.Tensor, given: tuple[Any, ...]) -> bool:
    chosen = torch.full((5, 1), number)
    try:
        with torch.no_grad():
            made = experts.module(x, number)
            op = torch.ops.onboard.torch_moe(x, chosen, torch.ones(5, 1), *given)
    except Exception:  # a module that computes something else, which these inputs mean nothing to
        return False
    same = isinstance(made, torch.Tensor) and made.shape == op.shape
    return same and rmse_ratio(op, made) < SAME_MIXTURE
