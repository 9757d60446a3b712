"""Random four-bit weights, and what they stand for, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@dataclass(frozen=True)
class Weight:
    """A weight as the ops take it, and its values in float64."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    whole: Tensor | None
    levels: str
    group: int
    values: Tensor

    def form(self) -> tuple[Tensor, Tensor | None, Tensor | None, str, int]:
        """Scales, zeros, whole scales, levels and group, as the fused op takes them."""
        return self.scale, self.zero, self.whole, self.levels, self.group


def words_of(codes: Tensor) -> Tensor:
    """Words of codes [outputs, inputs], bit by bit as `onboard.ops.four_bits.four_bits` says."""
    outputs, inputs = codes.shape
    words = [[0] * (16 * -(-inputs // 128)) for _ in range(outputs)]
    for n, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            words[n][k // 128 * 16 + k % 16] |= code << 4 * (k % 128 // 16)
    return torch.tensor(words).to(torch.int32)


def weight(kind: str, outputs: int, inputs: int, group: int) -> Weight:
    """A random weight of a kind: "int4", "zeros" (int4 with codes of zero), "added" (int4 with what
    code 0 stands for), "mxfp4", "nvfp4".
    """
    codes = torch.randint(0, 16, (outputs, inputs))
    groups = -(-inputs // group)
    zero = whole = None
    levels = "e2m1" if "fp4" in kind else "int4"
    level = torch.tensor(FLOATS, dtype=torch.float64)[codes] if "fp4" in kind else codes - 8.0
    factor = torch.ones(outputs, 1, dtype=torch.float64)
    if kind == "mxfp4":
        scale = torch.randint(118, 130, (outputs, groups), dtype=torch.uint8)
        numbers = 2.0 ** (scale.double() - 127)
    elif kind == "nvfp4":
        scale = (torch.rand(outputs, groups) * 400).to(torch.float8_e4m3fn)
        whole = torch.rand(outputs) * 1e-3
        numbers, factor = scale.double(), whole.double()[:, None]
    else:
        scale = (torch.rand(outputs, groups) / 8).half()
        numbers = scale.double()
    column = torch.arange(inputs) // group
    if kind == "added":
        added = torch.randn(outputs, groups) / 8
        values = codes * numbers[:, column] + added.double()[:, column]
        return Weight(words_of(codes), scale, added, None, levels, group, values)
    if kind == "zeros":
        zero = torch.randint(0, 17, (outputs, groups), dtype=torch.uint8)
        level = codes.double() - zero.double()[:, column]
    values = level.double() * numbers[:, column] * factor
    return Weight(words_of(codes), scale, zero, whole, levels, group, values)
