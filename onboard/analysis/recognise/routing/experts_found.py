"""The experts of a mixture, wherever they lie: in a list, in a module that holds one, in one module, or
as stacks of the mixture itself; how they may be made, and what they make of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.scales import scaled
from onboard.analysis.recognise.mixture_roles import ANY, summed
from onboard.analysis.recognise.numbered_experts import (
    Numbered,
    handed_weights,
    numbered_experts,
    own_stacks,
    weights_of,
)
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.routing.held_lists import held_lists
from onboard.analysis.recognise.routing.numbered_names import ASKED, numbered_names
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME_MIXTURE

Experts = nn.ModuleList | Numbered
_OF_ANY_CLASS = {"layout": ANY, "activation": None, "gate": None, "down": None, "up": None}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def candidates(
    module: nn.Module, call: ModuleCall
) -> Iterator[tuple[Sequence[str], Experts, Sequence[dict[str, Any]]]]:
    """Yield the attributes that experts lie in, the experts, and how they may be made."""
    for name, child in module.named_children():
        if (found := _experts(child)) is not None:
            yield [name], found[0], [{"experts": name, **found[1]}]
        for handed, forms in handed_weights(child):
            yield [name], handed, [{"experts": name, **form} for form in forms]
    for prefix, listed in numbered_names(module):
        if (form := _form(listed)) is not None:
            own = [name for name, _ in module.named_children() if name.startswith(prefix)]
            yield [*own, *ASKED], listed, [{"experts": prefix, "numbered": True, **form}]
    for name, path, held in held_lists(module, call):
        yield [name], held, [{"experts": path, **(_form(held) or _OF_ANY_CLASS)}]
    for names, stacks, forms in own_stacks(module):
        yield names, stacks, [{"experts": None, **form} for form in forms]


def _experts(child: nn.Module) -> tuple[Experts, dict[str, Any]] | None:
    """Return experts, and how they are made; None for a module of another kind."""
    named = {"named": True} if isinstance(child, nn.ModuleDict) else {}
    child = nn.ModuleList(child.values()) if isinstance(child, nn.ModuleDict) else child
    if isinstance(
        child, nn.Sequential
    ):  # whose modules run apart, if statements around it show that
        form = _form(listed := nn.ModuleList(child)) if len(child) > 1 else None
        return None if form is None else (listed, form)
    if not isinstance(child, nn.ModuleList):
        return numbered_experts(child)
    if len(child) < 2:
        return None
    return child, (_form(child) or _OF_ANY_CLASS) | named


def _form(experts: nn.ModuleList) -> dict[str, Any] | None:
    """Return the linear layers of experts that are made alike, by what they do, and their
    activation.
    """
    if len({type(expert) for expert in experts}) != 1:
        return None
    linears = [path for path, child in experts[0].named_modules() if type(child) is nn.Linear]
    if len(linears) not in (2, 3):
        return None
    for names in permutations(linears):
        gate, down, *up = names
        for fused, activation in product((None,) if up else (None, "gate", "up"), ACTIVATIONS):
            form: dict[str, Any] = {"gate": gate, "down": down, "up": up[0] if up else None}
            form |= {"activation": activation, "biased": _biased(experts[0], names)}
            form |= {"fused": fused} if fused else {}
            if form["biased"] is not None and _is_expert(experts, form):
                return form
    return None


def _biased(expert: nn.Module, names: Sequence[str]) -> bool | None:
    """Whether linear layers have biases; None where some have."""
    biased = {expert.get_submodule(name).bias is not None for name in names}
    return biased.pop() if len(biased) == 1 else None


def _is_expert(experts: nn.ModuleList, form: dict[str, Any]) -> bool:
    gate: Any = experts[0].get_submodule(form["gate"])
    x = torch.randn(5, gate.in_features, generator=torch.Generator().manual_seed(17))
    return all(_computes(experts, form, each) for each in scaled(x))


def _computes(experts: nn.ModuleList, form: dict[str, Any], x: torch.Tensor) -> bool:
    first = torch.zeros(5, 1, dtype=torch.int64)
    try:
        expected = experts[0](x, *_own_shares(experts[0], x))
        actual = mixed(experts, form, x, first, torch.ones(5, 1))
    except REFUSED:
        return False
    same = isinstance(expected, torch.Tensor) and expected.shape == actual.shape
    return same and rmse_ratio(actual, expected) < SAME_MIXTURE


def _own_shares(expert: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the weights, all one, that an expert is called with which scales what it gives itself;
    whether it does, statements around it show.
    """
    taken = inspect.signature(expert.forward).parameters.values()
    needed = [each for each in taken if each.default is each.empty and each.kind in _POSITIONAL]
    return [torch.ones(len(x), 1)] if len(needed) == 2 else []


def mixed(
    experts: Experts,
    form: dict[str, Any],
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what `torch_moe` makes of these experts, or what a sum over all of them does."""
    if form.get("layout") == ANY and isinstance(experts, nn.ModuleList):
        return summed(experts, x, indices, weights)
    if isinstance(experts, Numbered):
        settings = (form["up"] is not None, form["activation"])
        whole: torch.Tensor = torch.ops.onboard.torch_moe(
            x, indices, weights, *weights_of(experts, form), *settings
        )
        return whole
    lists, biases = _projections(experts, form)
    rest = (form["up"] is not None or "fused" in form, form["activation"], *biases)
    out: torch.Tensor = torch.ops.onboard.torch_moe(x, indices, weights, *lists, *rest)
    return out


def _projections(
    experts: nn.ModuleList, form: dict[str, Any]
) -> tuple[list[list[Any]], list[list[Any] | None]]:
    """Return the matrices of gate, down and up projections, and their biases, None where there are
    none.
    """
    names = [form[role] for role in ("gate", "down", "up")]
    layers: list[list[Any]] = [
        [each.get_submodule(name) for each in experts] if name else [] for name in names
    ]
    lists = [[layer.weight for layer in each] for each in layers]
    biases = [[layer.bias for layer in each] if form["biased"] else [] for each in layers]
    if "fused" in form:  # gate and up are one layer
        first = 0 if form["fused"] == "gate" else 1
        for each in (lists, biases):
            halves = [whole.chunk(2) for whole in each[0]]
            each[0], each[2] = ([half[place] for half in halves] for place in (first, 1 - first))
    return lists, [each or None for each in biases]
