"""In what quantised weights have to be alike that one op computes with, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.graph.quantise.kernel_forms import has_kernels
from onboard.graph.weight_load.scales.input_scales import how_inputs_are_quantised
from onboard.quantised.layouts.integers import groups_of_inputs
from onboard.quantised.weight import QuantisedWeight

Read = Callable[[QuantisedWeight, str], Tensor]
"""Returns a part of a weight as the checkpoint has it, by its role."""
_OF_INPUTS = ("groups", "inputs")
"""Parts that say something of a weight's inputs: weights side by side have the same."""


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint's weights."""

    read: Read
    input_scale: Callable[[QuantisedWeight], float]

    def of(self, weight: QuantisedWeight) -> object:
        """Return what is the same for weights that one op computes with; None: it is decoded."""
        inputs = weight.shape[-1]
        if len(weight.shape) != 2 or not has_kernels(weight.computed_as, weight.block, inputs):
            return None
        how = how_inputs_are_quantised(weight)
        if weight.computed_as == "fp8":
            return "fp8", weight.block, weight.activations, how
        if weight.transposed or not self._fits(weight):
            return None
        contents = [self._content(weight, role) for role in _OF_INPUTS if role in weight.parts]
        scale = self.input_scale(weight) if how == "tensor" else None
        roles = frozenset(role for role in weight.parts if role != "codes")
        kind = (weight.computed_as, weight.block, weight.scale_dtype, weight.has_offset, roles)
        return (*kind, how, scale, *contents)

    def _fits(self, weight: QuantisedWeight) -> bool:
        """Tell whether groups of inputs in any order are of one size, as kernels have them."""
        group = group_of(weight)
        if "groups" not in weight.parts:
            return True
        groups = groups_of_inputs(self.read(weight, "groups"), group)
        if int(groups.min()) < 0:
            return False
        sizes = torch.bincount(groups)
        return bool((sizes[:-1] == group).all() and sizes[-1] <= group)

    def _content(self, weight: QuantisedWeight, role: str) -> bytes:
        return self.read(weight, role).contiguous().view(torch.uint8).numpy().tobytes()


def group_of(weight: QuantisedWeight) -> int:
    """Return how many inputs share a scale."""
    return weight.shape[1] if weight.block is None else weight.block[1]
