"""Recognise mixtures whose experts are modules of a list, or told by a number, however their code sends
tokens to them.

Code does so in many ways: masks, sorted tokens and counts of each expert, one-hot permutations,
branches for training. None of them is read here. The statements around what mentions the list are
run on random tokens, choices and weights, and are a mixture when `torch_moe` gives the same, or,
where experts are no MLPs that it knows, a sum of what each of them makes of every token; the fewest
that are count. Where no three tensors are tokens, choices and weights, as in masks of the
places in each expert's buffer, the statements that choose count, too: with a softmax of a linear
layer, and the largest of it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.mixture_roles import (
    ANY,
    Roles,
    choices,
    random_values,
    roles_of,
    rows_of,
    summed,
    tokens,
)
from onboard.analysis.recognise.numbered_experts import (
    Numbered,
    handed_weights,
    numbered_experts,
    own_stacks,
    weights_of,
)
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.stretches import (
    Region,
    function_of,
    locals_of,
    read_first,
    regions_of,
    result_of,
    sorts_around,
)
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_MIXTURE

KIND = "mixture"
Experts = nn.ModuleList | Numbered
_OF_ANY_CLASS = {"layout": ANY, "activation": None, "gate": None, "down": None, "up": None}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OTHER = 1.37
"""By what a number of a module is multiplied to see what it does."""


def probe_mixture(module: nn.Module, calls: Sequence[ModuleCall]) -> Finding | None:
    """Recognise a module with a list of experts, with one module that has the weights of all, or with
    stacks of these weights, in one of whose methods statements are a mixture.

    Args:
        module: the candidate.
        calls: what it was called with.
    """
    fits = _fits(module, calls)
    first = next(fits, None)
    if first is None:
        return None
    region, found = first
    if sorts_around(type(module), region):  # what is sorted before is of the mixture, too
        whole = (each for other, each in fits if not sorts_around(type(module), other))
        found = next(whole, found)
    return Finding(KIND, found[0], [found[1]])


def _fits(
    module: nn.Module, calls: Sequence[ModuleCall]
) -> Iterator[tuple[Region, tuple[dict[str, Any], str]]]:
    """Yield the regions that are a mixture, with its parameters and how well it fits."""
    seen: dict[tuple[str, int], dict[str, Any]] | None = None
    for names, experts, forms in _candidates(module) if calls else ():
        seen = locals_of(module, calls[0]) if seen is None else seen
        for fit in (_fit, _fit_with_router, _fit_added):
            for region in regions_of(type(module), *names):
                variables = seen.get((region.method, region.statements[0].lineno))
                found = (
                    None if variables is None else fit(module, experts, region, variables, forms)
                )
                if found is not None:
                    yield region, found


def _candidates(
    module: nn.Module,
) -> Iterator[tuple[Sequence[str], Experts, Sequence[dict[str, Any]]]]:
    """Yield the attributes that experts lie in, the experts, and how they may be made."""
    for name, child in module.named_children():
        if (found := _experts(child)) is not None:
            yield [name], found[0], [{"experts": name, **found[1]}]
        for handed, forms in handed_weights(child):
            yield [name], handed, [{"experts": name, **form} for form in forms]
    for names, stacks, forms in own_stacks(module):
        yield names, stacks, [{"experts": None, **form} for form in forms]


def _experts(child: nn.Module) -> tuple[Experts, dict[str, Any]] | None:
    """Return experts, and how they are made; None for a module of another kind."""
    if not isinstance(child, nn.ModuleList):
        return numbered_experts(child)
    if len(child) < 2:
        return None
    return child, _form(child) or _OF_ANY_CLASS


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
    first = torch.zeros(5, 1, dtype=torch.int64)
    try:
        expected = experts[0](x, *_own_shares(experts[0], x))
        actual = _mixed(experts, form, x, first, torch.ones(5, 1))
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


def _mixed(
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


def _fit(
    module: nn.Module,
    experts: Experts,
    region: Region,
    variables: dict[str, Any],
    forms: Sequence[dict[str, Any]],
    *,
    added: bool = False,
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture, and how well it fits; of one that is
    `added` to what was there before.
    """
    result = result_of(region, in_place=added)
    if result is None or not _reads_alone(module, region, forms[0]):
        return None
    for roles in roles_of(region, variables, len(experts), result):
        if (roles.base is not None) is not added:
            continue
        k = choices(variables, roles.x, roles.indices)
        function = function_of(module, region, variables, result)
        made = _made(module, function, variables, roles, (len(experts), k))
        for form in forms if made is not None else ():
            found = _fitting(module, experts, form, roles, made or [], k)
            if found is not None:
                scale, error = found
                every = "a sum over experts, each of which computes every token,"
                op = every if form.get("layout") == ANY else "torch_moe"
                said = f"probe: {op} fits {region.method} with rmse ratio {error:.1e}"
                place = _place(region, result) | _of_roles(roles, variables)
                return {**form, **place, "scale": scale}, said
    return None


def _fit_added(*given: Any) -> tuple[dict[str, Any], str] | None:
    return _fit(*given, added=True)


def _reads_alone(module: nn.Module, region: Region, form: dict[str, Any]) -> bool:
    """Whether a region of a module with stacks of its own reads no other parameters of it."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    others = own - {form[role] for role in ("gate", "down", "up")}
    return form["experts"] is not None or not any(
        isinstance(node, ast.Attribute) and node.attr in others
        for statement in region.statements
        for node in ast.walk(statement)
    )


def _place(region: Region, result: str) -> dict[str, Any]:
    place = {"method": region.method, "begin": region.begin, "count": len(region.statements)}
    return {**place, "result": result}


def _of_roles(roles: Roles, variables: dict[str, Any]) -> dict[str, Any]:
    chosen, k = variables[roles.indices], choices(variables, roles.x, roles.indices)
    in_rows = chosen.dim() > 1 and chosen.shape[-1] == k
    return {**vars(roles), "in_rows": in_rows}


_Made = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]
"""What a region was given, what it made of that, and with another value in each number."""


def _made(
    module: nn.Module,
    function: Callable[..., Any],
    variables: dict[str, Any],
    roles: Roles,
    spreads: Sequence[int],
) -> list[_Made] | None:
    """Return what a region makes of random tokens: with few of the experts most have no token; None
    where it does not run with them, or what it adds to is not just added to.
    """
    k, out = choices(variables, roles.x, roles.indices), []

    def run(**given: Any) -> Any:
        return function(**{**variables, **{key: item.clone() for key, item in given.items()}})

    try:
        with torch.no_grad():
            for spread in spreads:
                given = random_values(roles, variables, spread, k)
                made = run(**given)
                if not isinstance(made, torch.Tensor) or made.shape != given[roles.x].shape:
                    return None
                if roles.base is not None and not _only_adds(run, given, roles, made):
                    return None
                out.append((given, made, _with_other_numbers(module, run, given)))
    except REFUSED:  # other statements, which these inputs mean nothing to
        return None
    return out


def _only_adds(
    run: Callable[..., Any], given: dict[str, torch.Tensor], roles: Roles, made: torch.Tensor
) -> bool:
    assert roles.base is not None
    more = torch.randn(made.shape, generator=torch.Generator().manual_seed(29))
    return rmse_ratio(run(**{**given, roles.base: more}), made + more) < SAME_MIXTURE


def _fitting(
    module: nn.Module,
    experts: Experts,
    form: dict[str, Any],
    roles: Roles,
    made: Sequence[_Made],
    k: int,
) -> tuple[str | None, float] | None:
    """Return the attribute that experts of a form are multiplied by, if any, and the error; None
    where they make something else.
    """
    try:
        expected = [
            _mixed(experts, form, given[roles.x], *rows_of(roles, given, k)) for given, _, _ in made
        ]
    except REFUSED:  # the sizes of another form, or experts that are called in another way
        return None
    pairs = [
        (actual, other, wanted) for (_, actual, other), wanted in zip(made, expected, strict=True)
    ]
    scale = _scale(module, pairs)
    factor = 1.0 if scale is None else getattr(module, scale)
    error = worst([rmse_ratio(actual, factor * wanted) for actual, _, wanted in pairs])
    return (scale, error) if error < SAME_MIXTURE else None


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
    forms: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture with its router, and how well it fits."""
    result, form = result_of(region), forms[0]
    names = [n for n in read_first(region.statements) if isinstance(variables.get(n), torch.Tensor)]
    if len(forms) > 1 or result is None or len(names) != 1 or variables[names[0]].dim() < 2:
        return None
    if form.get("layout") == ANY:
        return None
    given = _texts(variables[names[0]])
    function = function_of(module, region, variables, result)
    try:
        with torch.no_grad():
            made = [function(**{**variables, names[0]: x.clone()}) for x in given]
    except REFUSED:  # other statements, which these inputs mean nothing to
        return None
    pairs = list(zip(given, made, strict=True))
    if any(not isinstance(y, torch.Tensor) or y.shape != x.shape for x, y in pairs):
        return None
    for router, k, renormalised in _routers(module, experts):
        expected = [_routed(module, experts, form, router, k, renormalised, x) for x in given]
        error = worst([rmse_ratio(y, e) for y, e in zip(made, expected, strict=True)])
        if error < SAME_MIXTURE:
            roles = {"x": names[0], "indices": "selected_experts", "weights": "routing_weights"}
            choice = {"router": router, "chosen": k, "renormalised": renormalised, "in_rows": True}
            parameters = {**form, **_place(region, result)}
            said = f"probe: a softmax of {router} and torch_moe fit {region.method} with rmse ratio {error:.1e}"
            return {**parameters, **roles, **choice}, said
    return None


def _texts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return random tokens, and tokens that are all the same: an expert with room for some of them
    alone leaves the others out.
    """
    generator = torch.Generator().manual_seed(23)
    several = torch.randn(x.shape, generator=generator)
    return [several, several.flatten(0, -2)[:1].expand(tokens(x), -1).reshape(x.shape)]


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
