"""In what quantised weights have to be alike that one op computes with, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.graph.quantise.four_bit_parts import fits_kernels
from onboard.graph.weight_load.input_scales import how_inputs_are_quantised
from onboard.graph.weight_load.quantised_folder import KERNEL_KINDS
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.weight import QuantisedWeight

Read = Callable[[QuantisedWeight, str], Tensor]
"""Returns a part of a weight as the checkpoint has it, by its role."""
_OF_INPUTS = ("groups", "inputs")
"""Parts that say something of a weight's inputs: weights side by side have the same."""
_INT8_STEP = 16
"""Inputs that kernels for integers of eight bits take at least."""


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint's weights."""

    read: Read
    input_scale: Callable[[QuantisedWeight], float]

    def of(self, weight: QuantisedWeight) -> object:
        """Return what is the same for weights that one op computes with; None: it is decoded."""
        if weight.computed_as not in KERNEL_KINDS or len(weight.shape) != 2:
            return None
        how = how_inputs_are_quantised(weight)
        if weight.computed_as == "fp8":
            is_known = weight.block in (None, (BLOCK, BLOCK))
            return ("fp8", weight.block, weight.activations, how) if is_known else None
        if weight.transposed or not self._fits(weight):
            return None
        contents = [self._content(weight, role) for role in _OF_INPUTS if role in weight.parts]
        scale = self.input_scale(weight) if how == "tensor" else None
        roles = frozenset(role for role in weight.parts if role != "codes")
        kind = (weight.computed_as, weight.block, weight.scale_dtype, weight.has_offset, roles)
        return (*kind, how, scale, *contents)

    def _fits(self, weight: QuantisedWeight) -> bool:
        """Tell whether kernels read a weight: groups of inputs in any order have to be of one
        size.
        """
        group, inputs = group_of(weight), weight.shape[1]
        if weight.block is not None and weight.block[0] != 1:
            return False
        if weight.computed_as == "int8":
            fits = group % _INT8_STEP == 0 or group >= inputs
        else:
            fits = fits_kernels(group, inputs)
        if not fits or "groups" not in weight.parts:
            return fits
        sizes = torch.bincount(self.read(weight, "groups").flatten().long())
        return bool((sizes[:-1] == group).all() and sizes[-1] <= group)

    def _content(self, weight: QuantisedWeight, role: str) -> bytes:
        return self.read(weight, role).contiguous().view(torch.uint8).numpy().tobytes()


def group_of(weight: QuantisedWeight) -> int:
    """Return how many inputs share a scale."""
    return weight.shape[1] if weight.block is None else weight.block[1]
