"""Weights in four bits, by the weights alone: each element goes to the nearest code."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onboard.quantised.encoded import E2M1, Encoded

INT4_GROUP = 128
MXFP4_GROUP = 32
_LARGEST_INT4 = 7.5
"""Half of the range of -8 .. 7, which a group's largest magnitude is to reach from the middle: as
compressed-tensors has it (calculate_qparams, symmetric)."""
_E2M1_EXPONENT = 2
"""Of E2M1's largest number, 6."""
_BIAS = 127
"""Of E8M0."""


def encode_int4(weight: torch.Tensor, group: int = INT4_GROUP) -> Encoded:
    """Return a weight [..., outputs, inputs] in integers from -8 to 7, with bfloat16 scales of
    groups of inputs.
    """
    grouped = _groups(weight, group)
    scale = _not_zero(grouped.abs().amax(-1) / _LARGEST_INT4).bfloat16()
    codes = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return Encoded(_ungrouped(codes, weight).to(torch.int8), scale, 1, group)


def encode_mxfp4(weight: torch.Tensor) -> Encoded:
    """Return a weight [..., outputs, inputs] in MXFP4: a group's scale is 2 to the exponent of its
    largest magnitude, less that of E2M1's; what is beyond 6 then becomes 6, of two numbers alike
    the even one is near (OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3).
    """
    grouped = _groups(weight, MXFP4_GROUP)
    largest = _not_zero(grouped.abs().amax(-1))
    exponent = torch.frexp(largest).exponent - 1 - _E2M1_EXPONENT
    exponent = exponent.clamp(-_BIAS, _BIAS)
    codes = nearest_e2m1(torch.ldexp(grouped, -exponent.unsqueeze(-1)))
    scale = (exponent + _BIAS).to(torch.uint8)
    return Encoded(_ungrouped(codes, weight), scale, 1, MXFP4_GROUP, table=E2M1)


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the codes, uint8, of the nearest numbers of E2M1; of two alike the even one."""
    magnitudes = torch.tensor(E2M1[:8], device=values.device)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs()
    below, upto = torch.bucketize(size, middle), torch.bucketize(size, middle, right=True)
    codes = torch.where(below % 2 == 0, below, upto)
    return (codes + 8 * values.signbit()).to(torch.uint8)


def _groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """View a weight as [..., outputs, groups, group] float32, the last group filled with zeros."""
    padded = F.pad(weight.float(), (0, -weight.shape[-1] % group))
    return padded.view(*weight.shape[:-1], -1, group)


def _ungrouped(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return codes.flatten(-2)[..., : weight.shape[-1]]


def _not_zero(largest: torch.Tensor) -> torch.Tensor:
    """Return numbers that may divide."""
    return torch.where(largest > 0, largest, torch.ones_like(largest))
