"""Random quantised layers, written number by number as the formats say, and what they stand for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each four bits of a word have, the lowest first."""


@dataclass(frozen=True)
class Layer:
    """A layer's tensors by their endings, what its config says, and its weight in float64."""

    tensors: dict[str, Tensor]
    said: dict[str, Any]
    weight: Tensor
    needed: tuple[str, ...]
    """Endings without which nobody knows the weight."""


def words(
    codes: Tensor, bits: int, order: tuple[int, ...] | None = None, *, run_on: bool = True
) -> Tensor:
    """Codes [rows, columns] in words along the columns: as one row of bits, or with `run_on` off as
    many in each word as fit into it.
    """
    if 32 % bits and run_on:
        return _run_on(codes, bits)
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = codes.shape
    packed = [[0] * -(-columns // per_word) for _ in range(rows)]
    for row in range(rows):
        for column in range(columns):
            word, place = divmod(column, per_word)
            shift = bits * (place if order is None else order.index(place))
            packed[row][word] |= int(codes[row, column]) << shift
    return torch.tensor(packed).to(torch.int32)


def _run_on(codes: Tensor, bits: int) -> Tensor:
    """Codes whose bits follow one another, from one word into the next."""
    rows, count = [], -(-codes.shape[1] * bits // 32)
    for row in codes.tolist():
        line = sum(int(code) << (bits * place) for place, code in enumerate(row))
        rows.append([line >> (32 * word) & 0xFFFFFFFF for word in range(count)])
    return torch.tensor(rows).to(torch.int32)


def in_planes(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, columns] of which the lowest four, two and one bits lie in words of their own, as
    far as a code has them, for each 32 columns.
    """
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    found = []
    for block in codes.split(32, 1):
        shift = 0
        for width in widths:
            found.append(words(block >> shift & (1 << width) - 1, width))
            shift += width
    return torch.cat(found, 1)


def _one_less(zeros: Tensor, bits: int) -> Tensor:
    """Words of zeros that GPTQModel has taken one from: of the whole word where codes fill it, so that
    a zero of 0 borrows from the next.
    """
    if 32 % bits:
        return words((zeros - 1) % (1 << bits), bits)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    less = (words(zeros, bits).long() - ones) & 0xFFFFFFFF
    return torch.where(less >= 1 << 31, less - (1 << 32), less).to(torch.int32)


def _order(draw: random.Random, inputs: int, group: int, *, mixed: bool) -> Tensor:
    """The group of each input."""
    groups = [k // group for k in range(inputs)]
    if mixed:
        draw.shuffle(groups)
    return torch.tensor(groups, dtype=torch.int32)


Shape = tuple[int, int] | None
"""Outputs and inputs; None: any."""


def _sizes(draw: random.Random, shape: Shape) -> tuple[int, int, int]:
    """Outputs, inputs, and inputs of a group; -1: all."""
    outputs, inputs = shape or (draw.choice([16, 32, 64]), draw.choice([64, 128, 192, 256]))
    group = draw.choice([each for each in (-1, 16, 32, 64, 128) if each <= inputs])
    return outputs, inputs, group


def gptq(draw: random.Random, shape: Shape = None) -> Layer:
    """GPTQ: codes and zeros in words, groups in any order, zeros of both versions."""
    outputs, inputs, group = _sizes(draw, shape)
    widths = [4, 4, 8, 2, 3, 5, 6, 7] if outputs % 32 == 0 else [4, 4, 8, 2]
    bits, mixed = draw.choice(widths), draw.random() < 0.5
    layouts = ["gptq", "gptq_v2", *(["gptq_p"] if outputs % 32 == 0 else [])]
    layout = draw.choice(layouts) if shape is None else "gptq"  # of all layers of a model
    write = in_planes if layout == "gptq_p" else words
    size = inputs if group == -1 else group
    g_idx, groups = _order(draw, inputs, size, mixed=mixed), -(-inputs // size)
    codes = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros = torch.randint(0, 1 << bits, (groups, outputs))
    scales = (torch.rand(groups, outputs) / (1 << bits) + 1e-3).half()
    where = g_idx.long()
    weight = (codes - zeros[where]).double() * scales.double()[where]
    tensors = {
        "qweight": write(codes.T, bits).T.contiguous(),
        "qzeros": _one_less(zeros, bits) if layout == "gptq" else write(zeros, bits),
        "scales": scales,
        "g_idx": g_idx,
    }
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": mixed}
    if layout != "gptq" or draw.random() < 0.5:
        said["checkpoint_format"] = layout
    needed = ("qzeros", "scales", *(["g_idx"] if mixed else []))
    return Layer(tensors, said, weight.T, needed)


def awq(draw: random.Random, shape: Shape = None) -> Layer:
    """AWQ: outputs of a word out of order."""
    outputs, inputs, group = _sizes(draw, shape)
    size = inputs if group == -1 else group
    where = _order(draw, inputs, size, mixed=False).long()
    codes = torch.randint(0, 16, (inputs, outputs))
    zeros = torch.randint(0, 16, (-(-inputs // size), outputs))
    scales = (torch.rand(len(zeros), outputs) / 16).half()
    weight = (codes - zeros[where]).double() * scales.double()[where]
    tensors = {
        "qweight": words(codes, 4, AWQ_ORDER),
        "qzeros": words(zeros, 4, AWQ_ORDER),
        "scales": scales,
    }
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Layer(tensors, said | {"zero_point": True}, weight.T, ("qzeros", "scales"))


def _scheme(layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    groups = {"group_0": scheme}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def packed(draw: random.Random, shape: Shape = None) -> Layer:
    """compressed-tensors' integers in words, half of their range added."""
    outputs, inputs, group = _sizes(draw, shape)
    bits, symmetric = draw.choice([4, 4, 8, 1, 2, 3, 5, 6, 7]), draw.random() < 0.5
    run_on = draw.random() < 0.5
    if shape is None and group == -1 and 32 % bits == 0:
        inputs += draw.choice([0, 0, 3, 20])  # which no words end with
    mixed = group != -1 and draw.random() < 0.5
    size, half = inputs if group == -1 else group, 1 << (bits - 1)
    where = _order(draw, inputs, size, mixed=mixed)
    codes = torch.randint(-half, half, (outputs, inputs))
    scale = (torch.rand(outputs, -(-inputs // size)) / (1 << bits)).bfloat16()
    zero = torch.zeros(scale.shape) if symmetric else torch.randint(-half, half, scale.shape)
    column = where.long()
    weight = (codes - zero[:, column]).double() * scale.double()[:, column]
    tensors = {
        "weight_packed": words(codes + half, bits, run_on=run_on),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    needed = ["weight_scale"]
    if not symmetric:
        zeros = words((zero + half).T, bits, run_on=run_on)
        tensors["weight_zero_point"] = zeros.T.contiguous()
        needed.append("weight_zero_point")
    if mixed:
        tensors["weight_g_idx"] = where
        needed.append("weight_g_idx")
    strategy = (
        {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    )
    own = {"num_bits": bits, "symmetric": symmetric, "actorder": "group" if mixed else None}
    return Layer(tensors, _scheme("pack-quantized", **strategy, **own), weight, tuple(needed))


def eight_bits(draw: random.Random, shape: Shape = None) -> Layer:
    """compressed-tensors' int8 and float8, a byte a code."""
    outputs, inputs, group = _sizes(draw, shape)
    kind = draw.choice(["int", "float"])
    codes = torch.randint(-127, 128, (outputs, inputs)).float()
    stored = codes.to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
    strategy: dict[str, Any] = draw.choice(
        [
            {"strategy": "tensor"},
            {"strategy": "channel"},
            {"strategy": "block"},
            {"strategy": "group"},
        ]
    )
    rows, columns = 1, inputs
    if strategy["strategy"] == "tensor":
        rows = outputs
    elif strategy["strategy"] == "block":
        rows, columns = draw.choice([16, 128]), draw.choice([32, 128])
        strategy = {**strategy, "block_structure": [rows, columns]}
    elif strategy["strategy"] == "group":
        columns = inputs if group == -1 else group
        strategy = {**strategy, "group_size": columns}
    scale = torch.rand(-(-outputs // rows), -(-inputs // columns)) / 256
    row, column = torch.arange(outputs) // rows, torch.arange(inputs) // columns
    weight = stored.double() * scale.double()[row][:, column]
    tensors = {"weight": stored, "weight_scale": scale}
    said = _scheme(f"{kind}-quantized", type=kind, **strategy)
    return Layer(tensors, said, weight, ("weight_scale",))


FORMATS: dict[str, Callable[..., Layer]] = {
    "gptq": gptq,
    "awq": awq,
    "packed": packed,
    "eight_bits": eight_bits,
}
