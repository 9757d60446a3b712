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
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.scales import scaled
from onboard.analysis.recognise.mixture_roles import (
    ANY,
    Roles,
    choices,
    random_values,
    roles_of,
    rows_of,
    tokens,
)
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.routing.experts_found import Experts, candidates, mixed
from onboard.analysis.recognise.routing.handed_choices import Makers, joined
from onboard.analysis.recognise.stretches import (
    Region,
    function_of,
    locals_of,
    nodes_of,
    read_first,
    regions_around,
    regions_of,
    result_of,
    sorts_around,
)
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_MIXTURE

KIND = "mixture"
_OTHER = 1.37
"""By what a number of a module is multiplied to see what it does."""
_LARGE = 300.0
"""By what tokens are that a router is given, too: a softmax of numbers that are larger yet is not exact."""


def probe_mixture(module: nn.Module, calls: Sequence[ModuleCall]) -> Finding | None:
    """Recognise a module with a list of experts, with one module that has the weights of all, or with
    stacks of these weights, in one of whose methods statements are a mixture.

    Args:
        module: the candidate.
        calls: what it was called with.
    """
    fits = _fits(module, calls)
    first = next(fits, None) or next(_handed_fits(module, calls), None)
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
    for names, experts, forms in candidates(module, calls[0]) if calls else ():
        seen = locals_of(module, calls[0]) if seen is None else seen
        ways: Any = product((regions_of, regions_around), (_fit, _fit_with_router, _fit_added))
        for regions, fit in ways:
            for region in regions(type(module), *names):
                variables = seen.get((region.method, region.statements[0].lineno))
                found = (
                    None if variables is None else fit(module, experts, region, variables, forms)
                )
                if found is not None:
                    yield region, found


def _handed_fits(
    module: nn.Module, calls: Sequence[ModuleCall]
) -> Iterator[tuple[Region, tuple[dict[str, Any], str]]]:
    """Yield such regions of which another function makes a variable that is no tensor of numbers."""
    seen: dict[tuple[str, int], dict[str, Any]] | None = None
    for names, experts, forms in candidates(module, calls[0]) if calls else ():
        seen = locals_of(module, calls[0]) if seen is None else seen
        makers = Makers(module, calls[0])
        for region in regions_of(type(module), *names):
            variables = seen.get((region.method, region.statements[0].lineno), {})
            for fit, whole in product((_fit, _fit_added), joined(makers, region, variables)):
                found = fit(module, experts, whole.region, whole.variables, forms)
                if found is not None:
                    place = {"count": len(region.statements), "handed": whole.handed}
                    yield region, ({**found[0], **place}, found[1])


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
        several = max(len(experts), int(variables[roles.indices].max()) + 1)
        made = _made(module, function, variables, roles, (several, len(experts), k))
        ways = _beyond(module, experts, forms[0]) if several > len(experts) else [{}]
        for form in (form | way for form in forms for way in ways) if made is not None else ():
            found = _fitting(module, experts, form, roles, made or [], k)
            if found is not None:
                scale, error = found
                every = "a sum over experts, each of which computes every token,"
                op = every if form.get("layout") == ANY else "torch_moe"
                said = f"probe: {op} fits {region.method} with rmse ratio {error:.1e}"
                place = _place(region, result) | _of_roles(roles, variables)
                return {**form, **place, "scale": scale}, said
    return None


def _beyond(module: nn.Module, experts: Experts, form: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what ids behind the last expert's may stand for: nothing, or experts that return their
    input, which begin at an attribute that says how many others there are, or where their list ends.
    """
    own = vars(module).items()
    counts = [key for key, value in own if type(value) is int and value == len(experts)]
    if len(counts) == 1:
        return [{}, {"identities": counts[0]}]
    listed = isinstance(getattr(module, form["experts"] or "", None), nn.ModuleList)
    return [{}, {"identities": True}] if listed else [{}]


def _fit_added(*given: Any) -> tuple[dict[str, Any], str] | None:
    return _fit(*given, added=True)


def _reads_alone(module: nn.Module, region: Region, form: dict[str, Any]) -> bool:
    """Whether a region of a module with stacks of its own reads no other parameters of it."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    others = own - {form[role] for role in ("gate", "down", "up")}
    return form["experts"] is not None or not any(
        isinstance(node, ast.Attribute) and node.attr in others
        for node in nodes_of(type(module), region)
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
            for given in _random_inputs(roles, variables, spreads, k):
                made = run(**given)
                if not isinstance(made, torch.Tensor) or made.shape != given[roles.x].shape:
                    return None
                if roles.base is not None and not _only_adds(run, given, roles, made):
                    return None
                out.append((given, made, _with_other_numbers(module, run, given)))
    except REFUSED:  # other statements, which these inputs mean nothing to
        return None
    return out


def _random_inputs(
    roles: Roles, variables: dict[str, Any], spreads: Sequence[int], k: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random tokens that choose among so many experts, of every size among the first."""
    for spread in spreads:
        given = random_values(roles, variables, spread, k)
        sizes = scaled(given[roles.x]) if spread == spreads[0] else [given[roles.x]]
        yield from ({**given, roles.x: x} for x in sizes)


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
            _with_identities(experts, form, given[roles.x], *rows_of(roles, given, k))
            for given, _, _ in made
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


def _with_identities(
    experts: Experts,
    form: dict[str, Any],
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what experts make of tokens [..., hidden], those of ids behind the last one's too."""
    made = mixed(experts, form, x, indices, weights)
    if "identities" not in form:
        return made
    kept = (weights * (indices >= len(experts))).sum(dim=-1)
    return made + kept.reshape(*x.shape[:-1], 1) * x


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
    for router, k, renormalised in _routers(module, experts, given[0].shape[-1]):
        expected = [_routed(module, experts, form, router, k, renormalised, x) for x in given]
        error = worst([rmse_ratio(y, e) for y, e in zip(made, expected, strict=True)])
        if error < SAME_MIXTURE and _chooses(module.get_submodule(router), k, given[0]):
            roles = {"x": names[0], "indices": "selected_experts", "weights": "routing_weights"}
            own = {**variables, names[0]: given[0].clone()}
            rows = _gets_rows(module.get_submodule(router), function, own)
            choice = {"router": router, "chosen": k, "renormalised": renormalised, "in_rows": True}
            choice["routed_rows"] = rows
            parameters = {**form, **_place(region, result)}
            said = f"probe: a softmax of {router} and torch_moe fit {region.method} with rmse ratio {error:.1e}"
            return {**parameters, **roles, **choice}, said
    return None


def _gets_rows(router: nn.Module, function: Callable[..., Any], variables: dict[str, Any]) -> bool:
    """Whether statements give a router tokens one below the other, not texts apart."""
    ranks: list[int] = []
    hook = router.register_forward_pre_hook(lambda _, given: ranks.append(given[0].dim()))
    try:
        with torch.no_grad():
            function(**variables)
    finally:
        hook.remove()
    return ranks in ([], [2])


def _texts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return random tokens, far larger ones, and tokens that are all the same: an expert with room for some of them
    alone leaves the others out.
    """
    generator = torch.Generator().manual_seed(23)
    several = torch.randn(x.shape, generator=generator)
    return [
        several,
        several * _LARGE,
        several.flatten(0, -2)[:1].expand(tokens(x), -1).reshape(x.shape),
    ]


def _routers(module: nn.Module, experts: Experts, size: int) -> Iterator[tuple[str, int, bool]]:
    """Yield the linear layers of `size` inputs that give a number an expert, how many experts they
    may choose, and whether their weights add up to one.
    """
    inside = {id(each) for each in experts.modules()}
    choices = [*product(range(1, len(experts) + 1), (False, True))]
    for path, layer in module.named_modules():
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()
        if sizes == (size, len(experts)) and id(layer) not in inside:
            yield from ((path, k, whole) for k, whole in choices)


def _chooses(router: nn.Module, k: int, x: torch.Tensor) -> bool:
    """Whether the `k` largest of what a router gives are not the same for all tokens: what goes to one
    expert whatever it is would fit, too.
    """
    with torch.no_grad():
        made: torch.Tensor = router(x)
    chosen = made.topk(k, dim=-1).indices.flatten().tolist()
    return k == made.shape[-1] or len(set(chosen)) > k


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
    return mixed(experts, form, rows, indices, weights).reshape(x.shape)
