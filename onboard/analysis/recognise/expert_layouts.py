"""How the weights of a mixture's experts may lie in a module: one module an expert, stacks, or flat
matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import nn

NO_STACKS = {
    "gate_up": None,
    "transposed": False,
    "form": None,
    "gate_up_bias": None,
    "down_bias": None,
}


@dataclass
class Layout:
    """Where the weights of a candidate come from; `parameters` is what the template is told."""

    parameters: dict[str, Any]
    weights: list[list[torch.Tensor]]
    """Gate, down and up projections (no up projections when the experts are not gated)."""
    biases: list[list[torch.Tensor] | None] = field(default_factory=lambda: [None, None, None])


def layouts(module: nn.Module, separate: Mapping[str, torch.Tensor]) -> Iterator[Layout]:
    """Yield the ways in which a module's weights may be those of experts; `separate` are those of
    its checkpoints.
    """
    own = dict(module.named_parameters())
    yield from _separate_layouts(separate, own)
    yield from _stacked_layouts(own)
    yield from _flat_layouts(module, own)


def _separate_layouts(
    weights: Mapping[str, torch.Tensor], stacks: dict[str, nn.Parameter]
) -> Iterator[Layout]:
    """Yield the ways to take modules `0.a`, `0.b`, `0.c` as gate, down and up projection.

    The sizes of the experts are those of the stack of down projections, so that one is looked for,
    too.
    """
    parts = [name.split(".") for name in weights]
    if not parts or not all(
        len(part) == 3 and part[0].isdigit() and part[2] == "weight" for part in parts
    ):
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
            parameters = {"layout": "modules", **names, **NO_STACKS, **stack}
            yield Layout(parameters, [*lists, []][:3])


def _stack_of(
    weights: list[torch.Tensor], stacks: dict[str, nn.Parameter]
) -> dict[str, Any] | None:
    """Return the name of the stack of `weights`, and whether it has rows and columns swapped."""
    whole = torch.stack(weights)
    for name, value in stacks.items():
        for transposed in (False, True):
            if torch.equal(
                value.transpose(-1, -2) if transposed and value.dim() == 3 else value, whole
            ):
                return {"down_stack": name, "down_transposed": transposed}
    return None


def _stacked_layouts(parameters: dict[str, nn.Parameter]) -> Iterator[Layout]:
    """Yield the ways to take two stacks as gate (and up) projections and as down projections."""
    stacks = [name for name, value in parameters.items() if value.dim() == 3]
    biases = {name: value for name, value in parameters.items() if value.dim() == 2}
    if (
        len(stacks) != 2
        or len(stacks) + len(biases) != len(parameters)
        or len(biases) not in (0, 2)
    ):
        return
    for (first, down), transposed in (
        (pair, flip) for pair in permutations(stacks) for flip in (False, True)
    ):
        gate_up, out = (
            parameters[n].transpose(1, 2) if transposed else parameters[n] for n in (first, down)
        )
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
            lists = [
                list(gate.unbind()),
                list(out.unbind()),
                [] if up is None else list(up.unbind()),
            ]
            extra = [
                None if b is None else list(b.unbind())
                for b in (gate_bias, pair[1] if pair else None, up_bias)
            ]
            yield Layout({**names, "form": form}, lists, extra)


def split(stack: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gate and up projection of a stack whose dimension 1 holds both."""
    if form == "whole":
        return stack, None
    if form == "alternating":
        return stack[:, ::2], stack[:, 1::2]
    first, second = stack.chunk(2, dim=1)
    return (first, second) if form == "halves" else (second, first)


def _flat_layouts(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[Layout]:
    """Yield the ways to take three matrices [experts * intermediate, hidden] as the projections of
    all experts.
    """
    shapes = {tuple(value.shape) for value in parameters.values()}
    if len(parameters) != 3 or len(shapes) != 1 or len(shape := next(iter(shapes))) != 2:
        return
    counts = {
        key: value
        for key, value in vars(module).items()
        if type(value) is int and 1 < value < shape[0]
    }
    for attribute, count in counts.items():
        if shape[0] % count or list(counts.values()).count(count) > 1:
            continue  # nothing tells which attribute of two is the number of experts
        for gate, down, up in permutations(parameters):
            names = {"layout": "flat", "gate": gate, "down": down, "up": up, "experts": attribute}
            parts = [list(parameters[name].chunk(count)) for name in (gate, down, up)]
            yield Layout(
                {**NO_STACKS, **names}, [parts[0], [part.T for part in parts[1]], parts[2]]
            )
