"""Recognise the experts of a mixture by what they do: compare a module with `torch_moe` on the same choice of experts.

How the weights lie is found by trying: one module an expert, as most checkpoints have them, or stacks, in which gate
and up projection may follow each other or alternate, and rows and columns may be swapped.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from onboard.analysis.probe import Finding
from onboard.analysis.recorder import ModuleCall, rmse_ratio
from onboard.ops.activation import ACTIVATIONS

TOLERANCE = 2e-6
"""Sums over experts are added up in another order."""
_COARSE = {"limit": 0.61, "alpha": 1.37}
"""Constants that matter: with them a candidate that leaves one out is found out."""
_UNUSED = 0.53
_TOKENS = 11


_NO_STACKS = {"gate_up": None, "transposed": False, "form": None, "gate_up_bias": None, "down_bias": None}


@dataclass
class Layout:
    """Where the weights of a candidate come from; `parameters` is what the template is told."""

    parameters: dict[str, Any]
    weights: list[list[torch.Tensor]]
    """Gate, down and up projections (no up projections when the experts are not gated)."""
    biases: list[list[torch.Tensor] | None] = field(default_factory=lambda: [None, None, None])


@dataclass
class _Inputs:
    """What experts are called with, by the names of their forward's parameters, in its order."""

    names: dict[str, str]
    values: dict[str, torch.Tensor]


def probe_experts(module: nn.Module, call: ModuleCall, separate: Mapping[str, torch.Tensor]) -> Finding | None:
    """Recognise experts: a module that is called with hidden states, chosen experts and routing weights.

    Args:
        module: the candidate.
        call: one of its calls.
        separate: its weights as checkpoints have them, with names relative to the module.
    """
    roles = _roles(module, call)
    if roles is None:
        return None
    stacks = dict(module.named_parameters())
    layouts = [*_separate_layouts(separate, stacks), *_stacked_layouts(stacks)]
    for layout in layouts:
        if layout.weights[0][0].shape[1] != call.output.shape[-1]:
            continue
        for constants in _constants(module):
            found = _fit(module, _inputs(roles, call, len(layout.weights[0])), layout, constants)
            if found is not None:
                return found
    return None


def _roles(module: nn.Module, call: ModuleCall) -> dict[str, str] | None:
    """Return role -> parameter of the three inputs, in the order of the signature; None when there are others."""
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
        role = "indices" if name in chosen else "weights" if value.shape == shape and "x" in roles else "x"
        roles[role] = name
    fits = len(roles) == 3 and call.output.shape == given[roles["x"]].shape and given[roles["weights"]].shape == shape
    return roles if fits else None


def _inputs(roles: dict[str, str], call: ModuleCall, experts: int) -> _Inputs:
    """Return random inputs in the form of the recorded ones."""
    generator = torch.Generator().manual_seed(13)
    tensors = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, torch.Tensor)]
    top = next(item for item in tensors if not item.is_floating_point()).shape[-1]
    hidden = call.output.shape[-1]
    lead = (1,) * (call.output.dim() - 2) + (_TOKENS,)
    values = {
        "x": torch.randn(*lead, hidden, generator=generator),
        "indices": torch.rand(*lead, experts, generator=generator).argsort(dim=-1)[..., :top],
        "weights": torch.rand(*lead, top, generator=generator),
    }
    return _Inputs(roles, values)


def _separate_layouts(weights: Mapping[str, torch.Tensor], stacks: dict[str, nn.Parameter]) -> Iterator[Layout]:
    """Yield the ways to take modules `0.a`, `0.b`, `0.c` as gate, down and up projection.

    The sizes of the experts are those of the stack of down projections, so that one is looked for, too.
    """
    parts = [name.split(".") for name in weights]
    if not parts or not all(len(part) == 3 and part[0].isdigit() and part[2] == "weight" for part in parts):
        return
    leaves = list(dict.fromkeys(part[1] for part in parts))
    count = len({part[0] for part in parts})
    if len(leaves) not in (2, 3) or count * len(leaves) != len(parts):
        return
    for order in permutations(leaves):
        lists = [[weights[f"{index}.{leaf}.weight"] for index in range(count)] for leaf in order]
        stack = _stack_of(lists[1], stacks)
        if lists[0][0].shape == lists[1][0].shape[::-1] and stack is not None:
            gate, down, *up = order
            names = {"gate": gate, "down": down, "up": up[0] if up else None}
            parameters = {"layout": "modules", **names, **_NO_STACKS, **stack}
            yield Layout(parameters, [*lists, []][:3])


def _stack_of(weights: list[torch.Tensor], stacks: dict[str, nn.Parameter]) -> dict[str, Any] | None:
    """Return the name of the stack of `weights`, and whether it has rows and columns swapped."""
    whole = torch.stack(weights)
    for name, value in stacks.items():
        for transposed in (False, True):
            if torch.equal(value.transpose(-1, -2) if transposed and value.dim() == 3 else value, whole):
                return {"down_stack": name, "down_transposed": transposed}
    return None


def _stacked_layouts(parameters: dict[str, nn.Parameter]) -> Iterator[Layout]:
    """Yield the ways to take two stacks as gate (and up) projections and as down projections."""
    stacks = [name for name, value in parameters.items() if value.dim() == 3]
    biases = {name: value for name, value in parameters.items() if value.dim() == 2}
    if len(stacks) != 2 or len(stacks) + len(biases) != len(parameters) or len(biases) not in (0, 2):
        return
    for (first, down), transposed in ((pair, flip) for pair in permutations(stacks) for flip in (False, True)):
        gate_up, out = (parameters[n].transpose(1, 2) if transposed else parameters[n] for n in (first, down))
        gated = gate_up.shape[1] == 2 * out.shape[2]
        if (
            len(gate_up) != len(out)
            or gate_up.shape[2] != out.shape[1]
            or not (gated or gate_up.shape[1] == out.shape[2])
        ):
            continue
        names = {"layout": "stacks", "gate_up": first, "down": down, "transposed": transposed}
        bias = next(iter(permutations(biases)), ()) if biases else ()
        if biases and parameters[bias[0]].shape[1] != gate_up.shape[1]:
            bias = bias[::-1]
        names |= {"gate_up_bias": bias[0] if bias else None, "down_bias": bias[1] if bias else None}
        pair = [parameters[name] for name in bias]
        for form in ("halves", "swapped", "alternating") if gated else ("whole",):
            gate, up = split(gate_up, form)
            gate_bias, up_bias = split(pair[0], form) if pair else (None, None)
            lists = [list(gate.unbind()), list(out.unbind()), [] if up is None else list(up.unbind())]
            extra = [None if b is None else list(b.unbind()) for b in (gate_bias, pair[1] if pair else None, up_bias)]
            yield Layout({**names, "form": form}, lists, extra)


def split(stack: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gate and up projection of a stack whose dimension 1 holds both."""
    if form == "whole":
        return stack, None
    if form == "alternating":
        return stack[:, ::2], stack[:, 1::2]
    first, second = stack.chunk(2, dim=1)
    return (first, second) if form == "halves" else (second, first)


def _constants(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the roles that float attributes can have; `up_offset` has no attribute in any model that we know."""
    floats = [key for key, value in vars(module).items() if type(value) is float]
    yield {"limit": None, "alpha": None, "up_offset": 0.0}
    for limit in floats:
        for alpha in [None, *(key for key in floats if key != limit)]:
            for offset in (0.0, 1.0):
                yield {"limit": limit, "alpha": alpha, "up_offset": offset}


def _fit(module: nn.Module, inputs: _Inputs, layout: Layout, constants: dict[str, Any]) -> Finding | None:
    probe = copy.copy(module)
    for attribute in [key for key, value in vars(module).items() if type(value) is float]:
        setattr(probe, attribute, _UNUSED)  # what no role reads must not matter
    values: dict[str, float | None] = {role: None for role in _COARSE}
    for role, attribute in constants.items():
        if role in _COARSE and attribute is not None:
            setattr(probe, attribute, _COARSE[role])
            values[role] = _COARSE[role]
    try:
        expected = probe(*(inputs.values[role] for role in inputs.names))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    gated = bool(layout.weights[2])
    act, names = _activation(module)
    for name in names:
        fixed = (gated, name, *layout.biases, values["limit"], values["alpha"], constants["up_offset"])
        actual = torch.ops.onboard.torch_moe(*inputs.values.values(), *layout.weights, *fixed)
        error = rmse_ratio(actual, expected)
        if error < TOLERANCE:
            kind = "gated" if gated else "plain"
            evidence = f"probe: torch_moe, {kind}, with {name} fits with rmse ratio {error:.1e}"
            own = {"act": act, "activation": name, "gated": gated, **inputs.names}
            return Finding("experts", {**layout.parameters, **constants, **own}, [evidence])
    return None


def _activation(module: nn.Module) -> tuple[str | None, list[str]]:
    """Return the attribute that holds the activation, and the names that it may have."""
    config = getattr(module, "config", None)
    values = config.to_dict().values() if config is not None else []
    named = [value for value in values if isinstance(value, str) and value in ACT2FN and value in ACTIVATIONS]
    holders = [name for name, child in module.named_children() if not list(child.parameters())]
    return (holders[0] if len(holders) == 1 else None), list(dict.fromkeys([*named, "silu", "gelu", "relu"]))
