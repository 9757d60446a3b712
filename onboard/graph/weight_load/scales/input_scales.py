"""The scales that a checkpoint has for the inputs of its layers, one a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import nn
from torch.fx import GraphModule

from onboard.graph.weight_load.parameters import Form, set_parameter, weight_plan
from onboard.quantised.weight import Activations, QuantisedWeight


@dataclass
class InputScales:
    """Where layers that were joined get their input's scale from."""

    read: Callable[[QuantisedWeight], float]
    allow_different: bool = False
    """Layers whose scales differ stay joined, and share the largest."""
    differing: int = field(default=0, init=False)
    """How many joined layers have been met whose scales differ."""

    def groups(self, weights: Sequence[QuantisedWeight]) -> list[int]:
        """Return how many of a layer's joined weights, one after the other, have one scale."""
        if how_inputs_are_quantised(weights[0]) != "tensor":
            return [len(weights)]
        runs = [len(list(run)) for _, run in groupby(map(self.read, weights))]
        if len(runs) == 1:
            return runs
        self.differing += 1
        return [len(weights)] if self.allow_different else runs

    def fact(self) -> str | None:
        """Return what is to be known of layers whose scales differ."""
        if not self.differing:
            return None
        what = "share the largest" if self.allow_different else "are computed one by one"
        return f"{self.differing} groups of joined layers have different input scales and {what}"


def how_inputs_are_quantised(weight: QuantisedWeight) -> str:
    """Return the `quantize` of a weight's linear, as its checkpoint says; "" where inputs are not
    quantised in eight bits. Where one scale is meant and none is stored, a token has its own.
    """
    activations = weight.activations
    if activations.kind == "none" or not _takes(weight, activations):
        return ""
    if activations.kind == "tensor":
        return "tensor" if weight.input_scale else "token"
    return activations.kind


def _takes(weight: QuantisedWeight, activations: Activations) -> bool:
    """Tell whether a weight's ops take inputs of a dtype: that of its codes, and integers where outputs
    have one scale each, and codes no zero.
    """
    if activations.dtype == "int8":
        is_plain = weight.block is None and not weight.has_offset and "groups" not in weight.parts
        return weight.computed_as == "int8" and is_plain and activations.kind in ("token", "tensor")
    return (activations.dtype, weight.computed_as) == ("float8_e4m3fn", "fp8")


def plan_input_scale(gm: GraphModule, name: str, parts: Sequence[str]) -> str:
    """Plan a parameter [1] for the largest input scale of the weights `parts`; return its name."""
    scale = f"{name}_input_scale"
    tensor = torch.empty(1, dtype=torch.float32, device=next(gm.parameters()).device)
    set_parameter(gm, scale, nn.Parameter(tensor, requires_grad=False))
    weight_plan(gm).forms[scale] = Form(parts[0], "input_scale", beside=tuple(parts[1:]))
    return scale
