"""Experts as checkpoints have them: transformers stacks them in memory, most checkpoints hold them one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, revert_weight_conversion


def separate_experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a transformers model with every stack of experts taken apart.

    The names of the parts are those that transformers writes into checkpoints (`experts.3.gate_proj.weight`); all other
    names are the module's own. A model whose checkpoints have stacks, too, keeps them.
    """
    own: Any = model
    merges = [rule for rule in get_model_conversion_mapping(own, add_legacy=False) if _merges(rule)]
    state = model.state_dict()
    if not merges:
        return state
    before = vars(own).get("_weight_conversions")
    own._weight_conversions = merges
    try:
        separate: dict[str, torch.Tensor] = revert_weight_conversion(own, state)
        return separate
    finally:
        own._weight_conversions = before


def _merges(rule: Any) -> bool:
    return isinstance(rule, WeightConverter) and any(isinstance(item, MergeModulelist) for item in rule.operations)
