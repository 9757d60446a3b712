"""Mixtures with codes: random ones, and what they compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.ops import four_bits

TOKENS, EXPERTS, TOP, HIDDEN = 7, 5, 2, 136
FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass
class Case:
    """A mixture: its codes and scales, as the ops take them, and the values that these stand for."""

    tensors: list[Tensor]
    """x, selected_experts, routing_weights, w3_w1_stacked_weight, w2_stacked_weight."""
    scales: dict[str, Tensor]
    """Further tensors by argument name."""
    values: tuple[Tensor, Tensor]
    """Both weights in float64, [experts, rows, inputs]."""


def fp8_case(
    scheme: str, *, order: str, inner: int, bias: bool = False, tensor: bool = False
) -> Case:
    """Return a mixture in float8 with scales of "rows" or "blocks"; without an order it has no
    gate.
    """
    rows = (2 if order else 1) * inner
    parts = 2 if order in ("up_gate", "gate_up") else 1
    up, up_scale, up_values = _fp8(rows, HIDDEN, parts, scheme)
    down, down_scale, down_values = _fp8(HIDDEN, inner, 1, scheme)
    scales = {"w3_w1_weight_scale": up_scale, "w2_weight_scale": down_scale}
    if bias:
        scales["w3_w1_stacked_bias"] = torch.randn(EXPERTS, rows)
        scales["w2_stacked_bias"] = torch.randn(EXPERTS, HIDDEN)
    if tensor:
        scales["w3_w1_input_scale"] = 0.005 + 0.01 * torch.rand(EXPERTS)
        scales["w2_input_scale"] = 0.001 + 0.002 * torch.rand(EXPERTS)
    selected = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)])
    inputs = [torch.randn(TOKENS, HIDDEN), selected, torch.rand(TOKENS, TOP)]
    return Case([*inputs, up, down], scales, (up_values, down_values))


def _fp8(rows: int, columns: int, parts: int, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and values; each of `parts` has blocks of its own."""
    codes = (torch.randn(EXPERTS, rows, columns) * 60).clamp(-LARGEST, LARGEST).to(FP8)
    size = columns**-0.5 / 60
    if scheme == "rows":
        scale = size * (0.5 + torch.rand(EXPERTS, rows))
        return codes, scale, codes.double() * scale.double()[..., None]
    blocks = -(-rows // parts // 128) * parts
    scale = size * (0.5 + torch.rand(EXPERTS, blocks, -(-columns // 128)))
    part, inside = torch.arange(rows) // (rows // parts), torch.arange(rows) % (rows // parts)
    block = part * (blocks // parts) + inside // 128
    values = codes.double() * scale.double()[:, block][..., torch.arange(columns) // 128]
    return codes, scale, values


def int8_case(
    *, order: str, inner: int, group: int, offset: bool = False, tensor: bool = False
) -> Case:
    """Return a mixture in integers of eight bits, in groups of inputs; without an order it has no
    gate.
    """
    rows = (2 if order else 1) * inner
    scales: dict[str, Tensor] = {}
    codes, values = [], []
    for name, shape in (("w3_w1", (rows, HIDDEN)), ("w2", (HIDDEN, inner))):
        stored = torch.randint(-128, 128, (EXPERTS, *shape), dtype=torch.int8)
        groups = (EXPERTS, shape[0], -(-shape[1] // group))
        scale = shape[1] ** -0.5 / 80 * (0.5 + torch.rand(groups))
        scales[f"{name}_weight_scale"] = scale
        spread = torch.arange(shape[1]) // group
        value = stored.double() * scale.double()[..., spread]
        if offset:
            added = shape[1] ** -0.5 * torch.randn(groups)
            scales[f"{name}_weight_offset"] = added
            value += added.double()[..., spread]
        codes.append(stored)
        values.append(value)
    if tensor:
        scales["w3_w1_input_scale"] = 0.02 + 0.02 * torch.rand(EXPERTS)
        scales["w2_input_scale"] = 0.002 + 0.002 * torch.rand(EXPERTS)
    selected = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)])
    inputs = [torch.randn(TOKENS, HIDDEN), selected, torch.rand(TOKENS, TOP)]
    return Case([*inputs, *codes], scales, (values[0], values[1]))


def four_bit_case(kind: str, *, order: str, inner: int, group: int, bias: bool = False) -> Case:
    """Return a mixture with weights of a kind of `four_bits.weight`; without an order it has no
    gate.
    """
    rows = (2 if order else 1) * inner
    scales: dict[str, Tensor] = {}
    codes, values = [], []
    for name, shape in (("w3_w1", (rows, HIDDEN)), ("w2", (HIDDEN, inner))):
        weights = [four_bits.weight(kind, *shape, group) for _ in range(EXPERTS)]
        codes.append(torch.stack([each.words for each in weights]))
        values.append(torch.stack([each.values for each in weights]))
        for part in ("scale", "zero", "whole"):
            found = [getattr(each, part) for each in weights]
            if found[0] is not None:
                scales[f"{name}_weight_{part}"] = torch.stack(found)
    if bias:
        scales["w3_w1_stacked_bias"] = torch.randn(EXPERTS, rows)
        scales["w2_stacked_bias"] = torch.randn(EXPERTS, HIDDEN)
    selected = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)])
    inputs = [torch.randn(TOKENS, HIDDEN) / 30, selected, torch.rand(TOKENS, TOP)]
    return Case([*inputs, *codes], scales, (values[0], values[1]))


def quantised(x: Tensor, how: str, scale: Tensor | None) -> Tensor:
    """Return what is left of one input [columns] in float8, float64."""
    if how == "group":
        return torch.cat([quantised(part, "token", None) for part in x.split(128)])
    step = x.float().abs().max() / LARGEST if how == "token" else scale
    return (x.float() / step).clamp(-LARGEST, LARGEST).to(FP8).double() * step.double()


def integers(x: Tensor, how: str, scale: Tensor | None) -> Tensor:
    """Return what is left of one input [columns] in integers of eight bits, float64."""
    step = x.float().abs().max() / 127.5 if how == "token" else scale
    return (x.float() / step).round().clamp(-128, 127).double() * step.double()


def naive(
    case: Case,
    order: str,
    quantize: str = "",
    *,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_cap: float | None = None,
    up_cap: float | None = None,
) -> Tensor:
    """Return the mixture's output, one token and one expert at a time, in float64."""
    x, selected, routing = case.tensors[:3]
    out = torch.zeros(x.shape, dtype=torch.float64)

    def product(weight: int, expert: int, row: Tensor) -> Tensor:
        name = ("w3_w1", "w2")[weight]
        scale = case.scales.get(f"{name}_input_scale")
        if quantize:
            left = integers if case.tensors[3].dtype == torch.int8 else quantised
            row = left(row, quantize, None if scale is None else scale[expert])
        bias = case.scales.get(f"{name}_stacked_bias")
        return case.values[weight][expert] @ row + (0.0 if bias is None else bias[expert].double())

    def cap(row: Tensor, size: float | None) -> Tensor:
        return row if size is None else size * torch.tanh(row / size)

    for token, row in enumerate(x.double()):
        for expert, share in zip(selected[token].tolist(), routing[token].double(), strict=True):
            if not 0 <= expert < EXPERTS:
                continue
            both = product(0, expert, row)
            if not order:
                middle = both.relu() ** 2 if act == "relu2" else both * both.sigmoid()
            else:
                half = len(both) // 2
                gate, up = {
                    "up_gate": (both[half:], both[:half]),
                    "gate_up": (both[:half], both[half:]),
                    "interleaved": (both[::2], both[1::2]),
                }[order]
                up = cap(up, up_cap)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                middle = cap(gate, gate_cap) * (gate * alpha).sigmoid() * (up + up_offset)
            out[token] += share * product(1, expert, middle)
    return out
