"""Four-bit weights as kernels read them: words of eight codes, which linear layers and mixtures share.

128 neighbouring inputs of an output are a run, which 16 words (int32) hold: word i of a run has the
code of the run's input 16 j + i in its bits 4 j to 4 j + 3. So bits 4 j of all 16 words are those of
16 neighbouring inputs, which a tensor core takes at once; a pair of neighbouring words, which a
thread of it has, holds eight pairs of neighbouring inputs. The last run is filled with code 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

RUN = 128
"""Inputs of a run."""
WORDS = 16
"""Words of a run."""
GROUPS = (16, 32, 64)
"""Sizes of groups that share a scale, beside the multiples of a run, and all of an output's."""

Levels = Literal["int4", "e2m1"]
"""What codes stand for: "int4", the distance from `zero`; "e2m1", a float of four bits."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes (OCP Microscaling Formats 1.0, section 5.3.3)."""
ZERO = 8
"""The code of zero where no others are given: integers from -8 to 7."""


@dataclass(frozen=True)
class Words:
    """A weight in words [..., rows, words], see `unpacked`, and a bias [..., rows]."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    whole: Tensor | None
    bias: Tensor | None
    levels: str
    group: int


def pack(codes: Tensor) -> Tensor:
    """Return codes [..., inputs] from 0 to 15 as words [..., 16 * ceil(inputs / 128)] int32."""
    rest = -codes.shape[-1] % RUN
    padded = F.pad(codes, (0, rest)) if rest else codes
    runs = padded.view(*codes.shape[:-1], -1, RUN // WORDS, WORDS)
    words = torch.zeros_like(runs[..., 0, :], dtype=torch.int32)
    for plane in range(RUN // WORDS):  # one by one: a word takes four times a code's room
        words |= runs[..., plane, :].to(torch.int32) << 4 * plane
    return words.flatten(-2)


def unpack(words: Tensor, inputs: int) -> Tensor:
    """Return the codes [..., inputs] uint8 of words."""
    runs = words.reshape(*words.shape[:-1], -1, WORDS)
    planes = [(runs >> 4 * plane & 15).to(torch.uint8) for plane in range(RUN // WORDS)]
    return torch.stack(planes, dim=-2).flatten(-3)[..., :inputs]


def scale_values(scale: Tensor) -> Tensor:
    """Return scales in float32; those in uint8 are exponents of 2 with 127 added (E8M0)."""
    return torch.exp2(scale.float() - 127.0) if scale.dtype == torch.uint8 else scale.float()


def unpacked(
    words: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None,
    levels: str, group: int, inputs: int,
) -> Tensor:  # fmt: skip
    """Return the float32 values [..., outputs, inputs] of a weight in words.

    Args:
        words: [..., outputs, 16 * ceil(inputs / 128)] int32.
        scale: [..., outputs, ceil(inputs / group)] of any float type, or uint8 exponents.
        zero: like scale, uint8: the code that stands for zero; None: 8. Of float32 it is what code 0
            stands for, which is added to codes times scales.
        whole: [..., outputs] float32, a further scale; or None.
        levels: as `Levels`.
        group: inputs that share a scale: one of `GROUPS`, or at least a run.
        inputs: how many there are.
    """
    codes = unpack(words, inputs)
    scales = scale_values(scale)
    scales = _spread(scales if whole is None else scales * whole.unsqueeze(-1), group, inputs)
    if levels == "e2m1":
        return torch.tensor(E2M1, device=words.device)[codes.int()] * scales
    if zero is None:
        return (codes.float() - ZERO) * scales
    spread = _spread(zero.float(), group, inputs)
    if zero.is_floating_point():
        return codes.float() * scales + spread
    return (codes.float() - spread) * scales


def _spread(groups: Tensor, group: int, inputs: int) -> Tensor:
    return groups.repeat_interleave(group, -1)[..., :inputs]
