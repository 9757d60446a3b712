"""Recognise mixtures whose experts are modules of a list, however their code sends tokens to them.

Code does so in many ways: masks, sorted tokens and counts of each expert, one-hot permutations,
branches for training. None of them is read here. The statements around what mentions the list are
run on random tokens, choices and weights, and are a mixture when `torch_moe` gives the same; the
fewest that are count. Where no three tensors are tokens, choices and weights, as in masks of the
places in each expert's buffer, the statements that choose count, too: with a softmax of a linear
layer, and the largest of it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from types import FrameType
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.source import find_method
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_MIXTURE

KIND = "mixture"
_RESULT = "result"


@dataclass(frozen=True)
class Region:
    """Statements of a method, one after the other: `begin` is the first one's number among all of
    the method's, those inside others too.
    """

    method: str
    begin: int
    statements: tuple[ast.stmt, ...]
    behind: frozenset[str]
    """Variables that the method reads behind them."""


@dataclass(frozen=True)
class _Roles:
    """The variables of a region that are tokens, their experts and the weights of these."""

    x: str
    indices: str
    weights: str


def probe_mixture(module: nn.Module, calls: Sequence[ModuleCall]) -> Finding | None:
    """Recognise a module with a list of experts, in one of whose methods statements are a mixture.

    Args:
        module: the candidate.
        calls: what it was called with.
    """
    for name, experts in module.named_children():
        if not isinstance(experts, nn.ModuleList) or not calls:
            continue
        if (form := _form(experts)) is None:
            continue
        seen = _locals_of(module, calls[0])
        for fit in (_fit, _fit_with_router):
            for region in _regions(type(module), name):
                variables = seen.get((region.method, region.statements[0].lineno))
                found = None if variables is None else fit(module, experts, region, variables, form)
                if found is not None:
                    return Finding(KIND, {"experts": name, **found[0], **form}, [found[1]])
    return None


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
    experts: nn.ModuleList,
    form: dict[str, Any],
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what `torch_moe` makes of these experts."""
    names = [form[role] for role in ("gate", "down", "up")]
    lists = [[getattr(each, name).weight for each in experts] if name else [] for name in names]
    biases = [
        [getattr(each, name).bias for each in experts] if name and form["biased"] else None
        for name in names
    ]
    settings = (form["up"] is not None, form["activation"], *biases)
    out: torch.Tensor = torch.ops.onboard.torch_moe(x, indices, weights, *lists, *settings)
    return out


def statements_of(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside them, in the order of the text."""
    for block in blocks_of(body):
        yield from block


def blocks_of(body: Sequence[ast.stmt]) -> Iterator[Sequence[ast.stmt]]:
    """Yield a body, then those inside it."""
    yield body
    for statement in body:
        for part in ("body", "orelse"):
            if inner := getattr(statement, part, []):
                yield from blocks_of(inner)


def _regions(cls: type, attr: str) -> Iterator[Region]:
    """Yield statements of methods that have all of a body's mentions of `self.<attr>` among them,
    or all behind a branch that returns; those that begin late and end early come first.
    """
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        found = find_method(cls, name)
        if found is None or name == "__init__":
            continue
        every = list(statements_of(found[1].body))
        for block in blocks_of(found[1].body):
            for first in _starts(block):
                places = [i for i in range(first, len(block)) if _mentions(block[i], attr)]
                for begin in range(places[0], first - 1, -1) if places else ():
                    for end in range(places[-1] + 1, len(block) + 1):
                        part = tuple(block[begin:end])
                        behind = _read_behind(found[1], part)
                        yield Region(name, every.index(block[begin]), part, behind)


def _starts(block: Sequence[ast.stmt]) -> list[int]:
    """Return where a body begins, and goes on behind a branch that returns; later ones first."""
    behind = [
        place + 1
        for place, item in enumerate(block)
        if isinstance(item, ast.If) and isinstance(item.body[-1], ast.Return) and not item.orelse
    ]
    return [*reversed(behind), 0]


def _mentions(tree: ast.AST, attr: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attr
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        for node in ast.walk(tree)
    )


def _read_behind(method: ast.FunctionDef, part: Sequence[ast.stmt]) -> frozenset[str]:
    end = part[-1].end_lineno or 0
    return frozenset(
        node.id
        for node in ast.walk(method)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno > end
    )


def _locals_of(module: nn.Module, call: ModuleCall) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the variables before the first run of each line of a module's methods, by method and
    line.
    """
    codes = {
        inspect.unwrap(function).__code__: name
        for name, function in inspect.getmembers(type(module), inspect.isfunction)
    }
    seen: dict[tuple[str, int], dict[str, Any]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        method = codes.get(frame.f_code)
        if method is None or frame.f_locals.get("self") is not module:
            return None
        if event == "line":
            seen.setdefault((method, frame.f_lineno), dict(frame.f_locals))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.no_grad():
            module(*call.args, **call.kwargs)
    except (RuntimeError, TypeError, ValueError):
        return {}  # its inputs were changed while it ran
    finally:
        sys.settrace(before)
    return seen


def _fit(
    module: nn.Module,
    experts: nn.ModuleList,
    region: Region,
    variables: dict[str, Any],
    form: dict[str, Any],
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture, and how well it fits."""
    roles, result = _roles(region, variables, len(experts)), _result(region)
    if roles is None or result is None:
        return None
    function = _function(module, region, variables, result)
    errors, k = [], variables[roles.indices].numel() // _tokens(variables[roles.x])
    for spread in (len(experts), k):  # with few of them most experts have no token
        given = _random(roles, variables, spread, k)
        x, indices, weights = (given[name] for name in (roles.x, roles.indices, roles.weights))
        rows = (indices.reshape(-1, k), weights.reshape(-1, k))
        expected = _mixed(experts, form, x.clone(), *rows)
        try:
            with torch.no_grad():
                actual = function(**{**variables, **given})
        except Exception:  # other statements, which these inputs mean nothing to
            return None
        same = isinstance(actual, torch.Tensor) and actual.shape == x.shape
        errors.append(rmse_ratio(actual, expected) if same else float("inf"))
    if not worst(errors) < SAME_MIXTURE:
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
    }
    return parameters, f"probe: torch_moe fits {region.method} with rmse ratio {worst(errors):.1e}"


def _fit_with_router(
    module: nn.Module,
    experts: nn.ModuleList,
    region: Region,
    variables: dict[str, Any],
    form: dict[str, Any],
) -> tuple[dict[str, Any], str] | None:
    """Return the parameters of a region that is a mixture with its router, and how well it fits."""
    result = _result(region)
    names = [n for n in _read(region.statements) if isinstance(variables.get(n), torch.Tensor)]
    if result is None or len(names) != 1 or variables[names[0]].dim() < 2:
        return None
    given = _texts(variables[names[0]])
    function = _function(module, region, variables, result)
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


def _routers(module: nn.Module, experts: nn.ModuleList) -> Iterator[tuple[str, int, bool]]:
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
    experts: nn.ModuleList,
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
        for name in _read(region.statements)
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


def _read(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the variables that statements read before they assign them."""
    read: dict[str, None] = {}
    made: set[str] = set()
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        whole = {
            node.id for item in targets for node in ast.walk(item) if isinstance(node, ast.Name)
        }
        plain = {name for name in whole if not _loads(name, statement)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id not in (made | plain):
                read[node.id] = None
        made |= whole
    return list(read)


def _loads(name: str, statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )


def _result(region: Region) -> str | None:
    """Return the one variable that a region makes for what comes behind it; `result` where it ends
    with a return.
    """
    inside = [node for item in region.statements for node in ast.walk(item)]
    returns = [node for node in inside if isinstance(node, ast.Return)]
    if returns:
        return _RESULT if returns == [region.statements[-1]] else None
    stored = {
        node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    left = sorted(stored & region.behind)
    return left[0] if len(left) == 1 else None


def _function(
    module: nn.Module, region: Region, variables: dict[str, Any], result: str
) -> Callable[..., Any]:
    """Return a function of the variables that runs a region and returns what it makes."""
    text = "\n".join(ast.unparse(item) for item in region.statements)
    if not isinstance(region.statements[-1], ast.Return):
        text += f"\nreturn {result}"
    body = "\n".join(f"    {line}" for line in text.splitlines())
    found = find_method(type(module), region.method)
    assert found is not None
    names = dict(vars(sys.modules[found[0].__module__]))
    exec(f"def region({', '.join(variables)}):\n{body}", names)  # of code that was run before
    function: Callable[..., Any] = names["region"]
    return function


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
