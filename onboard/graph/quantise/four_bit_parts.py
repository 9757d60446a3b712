"""Quantised weights of four bits as their kernels read them (`onboard.ops.four_bits.four_bits`)."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.four_bits.four_bits import GROUPS, RUN, ZERO, pack
from onboard.quantised.encoded import E2M1, Encoded
from onboard.quantised.weight import QuantisedWeight

LINEARS = {
    "int4": "torch_int4_linear",
    "mxfp4": "torch_mxfp4_linear",
    "nvfp4": "torch_nvfp4_linear",
}
"""By kind of a quantised weight: the op for linear layers that compute with it."""


def fits_kernels(group: int, inputs: int) -> bool:
    """Tell whether kernels read groups of this size."""
    return group in GROUPS or group % RUN == 0 or group >= inputs


def zero_dtype(weight: QuantisedWeight) -> torch.dtype:
    """Return what holds the zeros of a weight that has some: codes, or what is added to values."""
    return torch.uint8 if "zero" in weight.parts else torch.float32


def four_bit_part(encoded: Encoded, kind: str) -> Tensor:
    """Return a part of a weight [..., outputs, inputs] for the ops: its "words", "scale", "zero" or
    "whole"; or, [inputs], the "order" in which these have the inputs, and the "inputs"' factors.
    """
    match kind:
        case "words":
            return pack(_ordered_codes(encoded))
        case "scale":
            return encoded.scale
        case "zero" if encoded.zero is not None:
            return (encoded.zero + ZERO).to(torch.uint8)
        case "zero" if encoded.offset is not None:
            return encoded.offset.float()
        case "whole" if encoded.whole is not None:
            return encoded.whole.expand(encoded.codes.shape[:-1])
        case "order":
            return order_of(encoded)
        case "inputs" if encoded.inputs is not None:
            return encoded.inputs
    raise AssertionError(f"a weight without {kind}")


def _ordered_codes(encoded: Encoded) -> Tensor:
    """Return codes from 0 to 15, the inputs of a group side by side; those with offsets are."""
    codes = encoded.codes
    if encoded.table is None:
        codes = (codes if encoded.offset is not None else codes + ZERO).view(torch.uint8)
    else:
        assert encoded.table == E2M1
    return codes if encoded.groups is None else codes.index_select(-1, order_of(encoded))


def order_of(encoded: Encoded) -> Tensor:
    """Return the inputs [inputs] int64 by their groups."""
    if encoded.groups is None:
        return torch.arange(encoded.codes.shape[-1], device=encoded.codes.device)
    return torch.argsort(encoded.groups, stable=True)
