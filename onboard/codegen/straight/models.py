"""The models whose runs are compared: the small one, others, and the whole one without memory."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from onboard.hf.copied_model import copied
from onboard.hf.hf_model import build_reference, unquantised
from onboard.hf.parameters_on import without_memory


def whole_model(config: PretrainedConfig) -> nn.Module:
    """Return the model with its real sizes, its parameters on the meta device."""
    with without_memory(computing=True):
        model = build_reference(
            unquantised(config), dtype=torch.float32, attn_implementation="eager"
        )
    made: nn.Module = model.eval().requires_grad_(False)
    return made


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in a dtype: what stays float32 there is so whatever the model is."""
    return copied(model).to(dtype)


def give_shapes(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put tensors without values in the place of those on the meta device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, item in list(module._parameters.items()):
            if item is not None and item.is_meta and id(item) not in made:
                with mode:
                    empty = torch.empty(item.shape, dtype=item.dtype)
                made[id(item)] = nn.Parameter(empty, requires_grad=False)
            if item is not None and id(item) in made:
                module._parameters[name] = made[id(item)]
