"""Recognise the experts of a mixture by what they do: compare a module with `torch_moe` on the same
choice of experts.

How the weights lie is found by trying the layouts of `expert_layouts`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.scales import scaled
from onboard.analysis.recognise.expert_layouts import Layout, layouts
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.ops.linear.activation import ACTIVATIONS
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_MIXTURE

"""Sums over experts are added up in another order."""
_COARSE = {"limit": 0.61, "alpha": 1.37, "gate_cap": 0.83, "up_cap": 0.71}
"""Constants that matter: with them a candidate that leaves one out is found out."""
_UNUSED = 0.53
_TOKENS = 11


@dataclass
class _Inputs:
    """What experts are called with, by the names of their forward's parameters, in its order."""

    names: dict[str, str]
    values: dict[str, torch.Tensor]


def probe_experts(
    module: nn.Module, call: ModuleCall, separate: Mapping[str, torch.Tensor]
) -> Finding | None:
    """Recognise experts: a module that is called with hidden states, chosen experts and routing
    weights.

    Args:
        module: the candidate.
        call: one of its calls.
        separate: its weights as checkpoints have them, with names relative to the module.
    """
    roles = _roles(module, call)
    if roles is None:
        return None
    for layout in layouts(module, separate):
        if layout.weights[0][0].shape[1] != call.output.shape[-1]:
            continue
        for constants in _constants(module):
            found = _fit(module, _inputs(roles, call, len(layout.weights[0])), layout, constants)
            if found is not None:
                return _with_identities(module, roles, call, layout, found)
    return None


def _roles(module: nn.Module, call: ModuleCall) -> dict[str, str] | None:
    """Return role -> parameter of the three inputs, in the order of the signature; None when there
    are others.
    """
    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
    given = {name: value for name, value in bound.items() if value is not None}
    if len(given) != 3 or not all(isinstance(value, torch.Tensor) for value in given.values()):
        return None
    if not isinstance(call.output, torch.Tensor):
        return None
    chosen = [name for name, value in given.items() if not value.is_floating_point()]
    if len(chosen) != 1:
        return None
    shape = given[chosen[0]].shape
    roles = {}
    for name, value in given.items():
        role = (
            "indices"
            if name in chosen
            else "weights"
            if value.shape == shape and "x" in roles
            else "x"
        )
        roles[role] = name
    fits = (
        len(roles) == 3
        and call.output.shape == given[roles["x"]].shape
        and given[roles["weights"]].shape == shape
    )
    return roles if fits else None


def _inputs(roles: dict[str, str], call: ModuleCall, experts: int) -> _Inputs:
    """Return random inputs in the form of the recorded ones, which choose among `experts`."""
    generator = torch.Generator().manual_seed(13)
    tensors = [
        item for item in (*call.args, *call.kwargs.values()) if isinstance(item, torch.Tensor)
    ]
    chosen = next(item for item in tensors if not item.is_floating_point())
    lead, lead_of_chosen = ((1,) * (item.dim() - 2) + (_TOKENS,) for item in (call.output, chosen))
    top = min(chosen.shape[-1], experts)
    values = {
        "x": torch.randn(*lead, call.output.shape[-1], generator=generator),
        "indices": torch.rand(*lead_of_chosen, experts, generator=generator).argsort(dim=-1)[
            ..., :top
        ],
        "weights": torch.rand(*lead_of_chosen, top, generator=generator),
    }
    return _Inputs(roles, values)


def _constants(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the roles that float attributes can have; `up_offset` has no attribute in any model
    that we know.
    """
    none = {"limit": None, "alpha": None, "up_offset": 0.0, "gate_cap": None, "up_cap": None}
    floats = [key for key, value in vars(module).items() if type(value) is float]
    yield none
    for limit in floats:
        for alpha in [None, *(key for key in floats if key != limit)]:
            for offset in (0.0, 1.0):
                yield {**none, "limit": limit, "alpha": alpha, "up_offset": offset}
    for gate_cap, up_cap in itertools.permutations(_inner_floats(module), 2):
        yield {**none, "gate_cap": gate_cap, "up_cap": up_cap}


def _inner_floats(module: nn.Module) -> list[str]:
    """Return the paths of float attributes of the modules inside a module that have no weights."""
    inside = [
        (path, child) for path, child in module.named_modules() if path and not child.state_dict()
    ]
    return [
        f"{path}.{key}"
        for path, child in inside
        for key, value in vars(child).items()
        if type(value) is float
    ]


def _get(module: nn.Module, path: str) -> Any:
    owner, _, attribute = path.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)


def _set(module: nn.Module, path: str, value: float) -> None:
    owner, _, attribute = path.rpartition(".")
    setattr(module.get_submodule(owner), attribute, value)


def _fit(
    module: nn.Module, inputs: _Inputs, layout: Layout, constants: dict[str, Any]
) -> Finding | None:
    probe = copy.deepcopy(module) if constants["gate_cap"] else copy.copy(module)
    for attribute in [key for key, value in vars(module).items() if type(value) is float]:
        setattr(probe, attribute, _UNUSED)  # what no role reads must not matter
    values: dict[str, float | None] = {role: None for role in _COARSE}
    for role, attribute in constants.items():
        if role in _COARSE and attribute is not None:
            _set(probe, attribute, _COARSE[role])
            values[role] = _COARSE[role]
    sizes = [{**inputs.values, "x": x} for x in scaled(inputs.values["x"])]
    try:
        expected = [probe(*(given[role] for role in inputs.names)) for given in sizes]
    except REFUSED:
        return None
    gated = bool(layout.weights[2])
    act, names = _activation(module)
    holder = (
        type(module.get_submodule(act.rpartition(".")[0])).__name__ if act and "." in act else None
    )
    for name in names:
        caps = (values["gate_cap"], values["up_cap"])
        fixed = (
            gated,
            name,
            *layout.biases,
            values["limit"],
            values["alpha"],
            constants["up_offset"],
            *caps,
        )
        error = worst(
            rmse_ratio(
                torch.ops.onboard.torch_moe(*given.values(), *layout.weights, *fixed), wanted
            )
            for given, wanted in zip(sizes, expected, strict=True)
        )
        if error < SAME_MIXTURE:
            kind = "gated" if gated else "plain"
            evidence = f"probe: torch_moe, {kind}, with {name} fits with rmse ratio {error:.1e}"
            own = {
                "act": act,
                "act_class": holder,
                "activation": name,
                "gated": gated,
                "identity": False,
                **inputs.names,
            }
            return Finding("experts", {**layout.parameters, **constants, **own}, [evidence])
    return None


def _with_identities(
    module: nn.Module, roles: dict[str, str], call: ModuleCall, layout: Layout, found: Finding
) -> Finding | None:
    """Note whether an id behind the last expert's stands for an expert that returns its input.

    None where a router chooses such ids and they mean something else.
    """
    experts = len(layout.weights[0])
    inputs = _inputs(roles, call, experts + 1)
    x, indices, weights = inputs.values.values()
    try:
        expected = module(*(inputs.values[role] for role in inputs.names))
    except REFUSED:
        return found
    facts = found.parameters
    limit, alpha, *caps = (_get(module, facts[role]) if facts[role] else None for role in _COARSE)
    fixed = (
        facts["gated"],
        facts["activation"],
        *layout.biases,
        limit,
        alpha,
        facts["up_offset"],
        *caps,
    )
    kept = (weights * (indices >= experts)).sum(dim=-1, keepdim=True) * x
    error = rmse_ratio(
        torch.ops.onboard.torch_moe(x, indices, weights, *layout.weights, *fixed) + kept, expected
    )
    counts = [key for key, value in vars(module).items() if type(value) is int and value == experts]
    # The length of a list will not do: exports may have fewer experts
    if error < SAME_MIXTURE and len(counts) == 1:
        evidence = [
            *found.evidence,
            f"probe: further ids return their input, rmse ratio {error:.1e}",
        ]
        return Finding("experts", {**facts, "identity": True, "experts": counts[0]}, evidence)
    chosen = [
        item for item in (*call.args, *call.kwargs.values()) if isinstance(item, torch.Tensor)
    ]
    return (
        None
        if any(not item.is_floating_point() and bool((item >= experts).any()) for item in chosen)
        else found
    )


def _activation(module: nn.Module) -> tuple[str | None, list[str]]:
    """Return the attribute that holds the activation, and the names that it may have."""
    config = getattr(module, "config", None)
    values = config.to_dict().values() if config is not None else []
    named = [
        value
        for value in values
        if isinstance(value, str) and value in ACT2FN and value in ACTIVATIONS
    ]
    leaves = [
        (name, child)
        for name, child in module.named_modules()
        if name and not any(child.children())
    ]
    holders = [
        name
        for name, child in leaves
        if not any(child.parameters()) and not isinstance(child, nn.Identity)
    ]
    return (holders[0] if len(holders) == 1 else None), list(
        dict.fromkeys([*named, "silu", "gelu", "relu"])
    )
