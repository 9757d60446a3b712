"""Quantised weights in integers of eight bits as their ops read them."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.graph.quantise.four_bit_parts import order_of
from onboard.quantised.encoded import Encoded
from onboard.quantised.packing import numbers


def int8_part(encoded: Encoded, kind: str) -> Tensor:
    """Return a part of a weight [outputs, inputs] for the ops: its "codes", "scale" or "offset"; or,
    [inputs], the "order" in which these have the inputs, and the "inputs"' factors.
    """
    match kind:
        case "codes":
            codes = encoded.codes
            return codes if encoded.groups is None else codes.index_select(-1, order_of(encoded))
        case "scale":
            return _of_outputs(encoded, encoded.scale)
        case "offset" if encoded.offset is not None:
            return _of_outputs(encoded, encoded.offset)
        case "offset":
            zero = torch.zeros(()) if encoded.zero is None else encoded.zero.float()
            return _of_outputs(encoded, -zero * numbers(encoded.scale))
        case "order":
            return order_of(encoded)
        case "inputs" if encoded.inputs is not None:
            return encoded.inputs
    raise AssertionError(f"a weight without {kind}")


def _of_outputs(encoded: Encoded, blocks: Tensor) -> Tensor:
    """Return what blocks of outputs share for each output."""
    return blocks.repeat_interleave(encoded.rows, -2)[..., : encoded.codes.shape[-2], :]
