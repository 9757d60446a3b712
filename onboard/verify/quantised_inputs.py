"""Transformers' linear layers with inputs quantised as a run's are: their error is what ours is
measured by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onboard.graph.context import TransformContext
from onboard.graph.weight_load.input_scales import how_inputs_are_quantised
from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.graph.weight_load.quantised_linears import EIGHT_BIT_KEYS
from onboard.graph.weight_load.weight_names import match_names, module_renaming
from onboard.ops.linear.fp8_linear import dequantised, quantise_rows


def quantise_inputs(model: nn.Module, context: TransformContext) -> int:
    """Let linear layers of transformers' `model` quantise their inputs where the run's do; return
    how many.
    """
    quantised = _quantised(model, context)
    for name, (how, scale) in quantised.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_quantising(how, scale))
    return len(quantised)


def _quantised(
    model: nn.Module, context: TransformContext
) -> dict[str, tuple[str, torch.Tensor | None]]:
    """Return the weights of `model` whose layers the run computes with eight-bit inputs, how these
    are quantised, and their scale where they have one.
    """
    if not any(entry.key in EIGHT_BIT_KEYS and entry.num_matches for entry in context.history):
        return {}
    if (checkpoint := quantised_checkpoint(context.factory.checkpoint)) is None:
        return {}
    stored = match_names(list(model.state_dict()), checkpoint.names(), module_renaming(model))
    quantised = {}
    for name, each in stored.items():
        weight = checkpoint.weights.get(each)
        if weight is not None and name.endswith(".weight"):
            how = how_inputs_are_quantised(weight)
            scale = torch.tensor([checkpoint.input_scale(weight)]) if how == "tensor" else None
            quantised[name] = how, scale
    return {name: each for name, each in quantised.items() if each[0]}


def _quantising(how: str, scale: torch.Tensor | None) -> Any:
    def quantise(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        given = None if scale is None else scale.to(x.device)
        rows = dequantised(*quantise_rows(x.reshape(-1, x.shape[-1]), how, given))
        return (rows.to(x.dtype).view(x.shape), *inputs[1:])

    return quantise
