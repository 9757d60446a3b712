"""Recognise mixtures whose experts are modules of a list, or told by a number, however their code sends
tokens to them.

Code does so in many ways: masks, sorted tokens and counts of each expert, one-hot permutations,
branches for training. None of them is read here. The statements around what mentions the list are
run on random tokens, choices and weights, and are a mixture when `torch_moe` gives the same; the
fewest that are count. Where no three tensors are tokens, choices and weights, as in masks of the
places in each expert's buffer, the statements that choose count, too: with a softmax of a linear
layer, and the largest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.numbered_experts import Numbered, numbered_experts, weights_of
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.stretches import (
    Region,
    function_of,
    locals_of,
    read_first,
    regions_of,
    result_of,
)
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_MIXTURE

KIND = "mixture"
Experts = nn.ModuleList | Numbered
_OTHER = 1.37
"""By what a number of a module is multiplied to see what it does."""


@dataclass(frozen=True)
class _Roles:
    """The variables of a region that are tokens, their experts and the weights of these."""

    x: str
    indices: str
    weights: str


def probe_mixture(module: nn.Module, calls: Sequence[ModuleCall]) -> Finding | None:
    """Recognise a module with a list of experts, or with one module that has the weights of all, in
    one of whose methods statements are a mixture.

    Args:
        module: the candidate.
        calls: what it was called with.
    """
    for name, child in module.named_children() if calls else ():
        if (found_experts := _experts(child)) is None:
            continue
        experts, form = found_experts
        seen = locals_of(module, calls[0])
        for fit in (_fit, _fit_with_router):
            for region in regions_of(type(module), name):
                variables = seen.get((region.method, region.statements[0].lineno))
                found = None if variables is None else fit(module, experts, region, variables, form)
                if found is not None:
                    return Finding(KIND, {"experts": name, **found[0], **form}, [found[1]])
    return None


def _experts(child: nn.Module) -> tuple[Experts, dict[str, Any]] | None:
    """Return experts, and how they are made; None for a module of another kind."""
    if not isinstance(child, nn.ModuleList):
        return numbered_experts(child)
    form = _form(child)
    return None if form is None else (child, form)


def _form(experts: nn.ModuleList) -> dict[str, Any] | None:
    """Return the linear layers of experts that are made alike, by what they do, and their
    activation.
    """
    if len(experts) < 2 or len({type(expert) for expert in experts}) != 1:
        return None
    linears = [name for name, child in experts[0].named_children() if type(child) is nn.Linear]
    if len(linears) not in (2, 3):
        return None
    for names in permutations(linears):
        for activation in ACTIVATIONS:
            gate, down, *up = names
            form: dict[str, Any] = {"gate": gate, "down": down, "up": up[0] if up else None}
            form |= {"activation": activation, "biased": _biased(experts[0], names)}
            if form["biased"] is not None and _is_expert(experts, form):
                return form
    return None


def _biased(expert: nn.Module, names: Sequence[str]) -> bool | None:
    """Whether linear layers have biases; None where some have."""
    biased = {getattr(expert, name).bias is not None for name in names}
    return biased.pop() if len(biased) == 1 else None


def _is_expert(experts: nn.ModuleList, form: dict[str, Any]) -> bool:
    gate: Any = getattr(experts[0], form["gate"])
    x = torch.randn(5, gate.in_features, generator=torch.Generator().manual_seed(17))
    first = torch.zeros(5, 1, dtype=torch.int64)
    try:
        expected = experts[0](x)
        actual = _mixed(experts, form, x, first, torch.ones(5, 1))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    same = isinstance(expected, torch.Tensor) and expected.shape == actual.shape
    return same and rmse_ratio(actual, expected) < SAME_MIXTURE


def _mixed(
    experts: Experts,
    form: dict[str, Any],
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what `torch_moe` makes of these experts."""
    if isinstance(experts, Numbered):
        settings = (form["up"] is not None, form["activation"])
        whole: torch.Tensor = torch.ops.onboard.torch_moe(
            x, indices, weights, *weights_of(experts, form), *settings
        )
        return whole
    names = [form[role] for role in ("gate", "down", "up")]
    lists = [[getattr(each, name).weight for each in experts] if name else [] for name in names]
    biases = [
        [getattr(each, name).bias for each in experts] if name and form["biased"] else None
        for name in names
    ]
    rest = (form["up"] is not None, form["activation"], *biases)
    out: torch.Tensor = torch.ops.onboard.torch_moe(x, indices, weights, *lists, *rest)
    return out


def _fit(
    module: nn.Module,
    experts: Experts,
    region: Region,
    variables: dict[str, Any],
    form: dict[str, Any],
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture, and how well it fits."""
    roles, result = _roles(region, variables, len(experts)), result_of(region)
    if roles is None or result is None:
        return None
    function = function_of(module, region, variables, result)
    pairs, k = [], variables[roles.indices].numel() // _tokens(variables[roles.x])
    for spread in (len(experts), k):  # with few of them most experts have no token
        given = _random(roles, variables, spread, k)
        x, indices, weights = (given[name] for name in (roles.x, roles.indices, roles.weights))
        rows = (indices.reshape(-1, k), weights.reshape(-1, k))
        expected = _mixed(experts, form, x.clone(), *rows)
        try:
            with torch.no_grad():
                actual = function(**{**variables, **given})
                other = _with_other_numbers(module, function, {**variables, **given})
        except Exception:  # other statements, which these inputs mean nothing to
            return None
        if not isinstance(actual, torch.Tensor) or actual.shape != x.shape:
            return None
        pairs.append((actual, other, expected))
    scale = _scale(module, pairs)
    factor = 1.0 if scale is None else getattr(module, scale)
    error = worst([rmse_ratio(actual, factor * expected) for actual, _, expected in pairs])
    if not error < SAME_MIXTURE:
        return None
    chosen = variables[roles.indices]
    parameters = {
        "method": region.method,
        "begin": region.begin,
        "count": len(region.statements),
        "result": result,
        "x": roles.x,
        "indices": roles.indices,
        "weights": roles.weights,
        "in_rows": chosen.dim() > 1 and chosen.shape[-1] == k,
        "scale": scale,
    }
    return parameters, f"probe: torch_moe fits {region.method} with rmse ratio {error:.1e}"


def _numbers(module: nn.Module) -> dict[str, float]:
    return {key: value for key, value in vars(module).items() if type(value) is float}


def _with_other_numbers(
    module: nn.Module, function: Callable[..., Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return what a region gives with another value in each attribute that is a float, by name."""
    other = {}
    for key, value in _numbers(module).items():
        setattr(module, key, value * _OTHER)
        try:
            other[key] = function(**given)
        finally:
            setattr(module, key, value)
    return other


def _scale(
    module: nn.Module, pairs: Sequence[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]
) -> str | None:
    """Return the attribute by which a region multiplies what the experts make; None: none."""
    for key in _numbers(module):
        errors = [rmse_ratio(other[key], _OTHER * actual) for actual, other, _ in pairs]
        if worst(errors) < SAME_MIXTURE:
            return key
    return None


def _fit_with_router(
    module: nn.Module,
    experts: Experts,
    region: Region,
    variables: dict[str, Any],
    form: dict[str, Any],
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture with its router, and how well it fits."""
    result = result_of(region)
    names = [n for n in read_first(region.statements) if isinstance(variables.get(n), torch.Tensor)]
    if result is None or len(names) != 1 or variables[names[0]].dim() < 2:
        return None
    given = _texts(variables[names[0]])
    function = function_of(module, region, variables, result)
    try:
        with torch.no_grad():
            made = [function(**{**variables, names[0]: x.clone()}) for x in given]
    except Exception:  # other statements, which these inputs mean nothing to
        return None
    pairs = list(zip(given, made, strict=True))
    if any(not isinstance(y, torch.Tensor) or y.shape != x.shape for x, y in pairs):
        return None
    for router, k, renormalised in _routers(module, experts):
        expected = [_routed(module, experts, form, router, k, renormalised, x) for x in given]
        error = worst([rmse_ratio(y, e) for y, e in zip(made, expected, strict=True)])
        if error < SAME_MIXTURE:
            place = {"method": region.method, "begin": region.begin}
            roles = {"x": names[0], "indices": "selected_experts", "weights": "routing_weights"}
            choice = {"router": router, "chosen": k, "renormalised": renormalised, "in_rows": True}
            parameters = {**place, "count": len(region.statements), "result": result}
            said = f"probe: a softmax of {router} and torch_moe fit {region.method} with rmse ratio {error:.1e}"
            return {**parameters, **roles, **choice}, said
    return None


def _texts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return random tokens, and tokens that are all the same: an expert with room for some of them
    alone leaves the others out.
    """
    generator = torch.Generator().manual_seed(23)
    several = torch.randn(x.shape, generator=generator)
    return [several, several.flatten(0, -2)[:1].expand(_tokens(x), -1).reshape(x.shape)]


def _routers(module: nn.Module, experts: Experts) -> Iterator[tuple[str, int, bool]]:
    """Yield the linear layers that give a number an expert, how many experts they may choose, and
    whether their weights add up to one.
    """
    inside = {id(each) for each in experts.modules()}
    choices = [*product(range(1, len(experts) + 1), (False, True))]
    for path, layer in module.named_modules():
        fits = isinstance(layer, nn.Linear) and layer.out_features == len(experts)
        if fits and id(layer) not in inside:
            yield from ((path, k, whole) for k, whole in choices)


def _routed(
    module: nn.Module,
    experts: Experts,
    form: dict[str, Any],
    router: str,
    k: int,
    renormalised: bool,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return what the experts make of tokens that go to those with the largest softmax."""
    rows = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        weights, indices = module.get_submodule(router)(rows).softmax(dim=-1).topk(k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if renormalised else weights
    return _mixed(experts, form, rows, indices, weights).reshape(x.shape)


def _roles(region: Region, variables: dict[str, Any], experts: int) -> _Roles | None:
    """Return the roles of the tensors that a region reads; None where these are others than
    three, or a token had more choices than there are experts.
    """
    names = [
        name
        for name in read_first(region.statements)
        if isinstance(variables.get(name), torch.Tensor) and variables[name].dim() > 0
    ]
    chosen = [name for name in names if not variables[name].is_floating_point()]
    if len(names) != 3 or len(chosen) != 1:
        return None
    sizes = {name: variables[name].numel() for name in names}
    floats = sorted(set(names) - set(chosen), key=lambda name: sizes[name] == sizes[chosen[0]])
    x, weights = floats
    choices, rest = divmod(sizes[chosen[0]], _tokens(variables[x]))
    fits = sizes[weights] == sizes[chosen[0]] and rest == 0 and choices <= experts
    return _Roles(x, chosen[0], weights) if fits else None


def _random(
    roles: _Roles, variables: dict[str, Any], spread: int, k: int
) -> dict[str, torch.Tensor]:
    """Return random tokens, which go to `k` of the first `spread` experts each, and weights."""
    generator = torch.Generator().manual_seed(19)
    x, indices, weights = (variables[name] for name in (roles.x, roles.indices, roles.weights))
    chosen = torch.rand(_tokens(x), spread, generator=generator).argsort(dim=-1)[:, :k].contiguous()
    return {
        roles.x: torch.randn(x.shape, generator=generator),
        roles.indices: chosen.to(indices.dtype).reshape(indices.shape),
        roles.weights: torch.rand(weights.shape, generator=generator),
    }


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]
