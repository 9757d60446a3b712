"""Experts as checkpoints have them: transformers stacks them in memory, most checkpoints hold them
one by one.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    revert_weight_conversion,
)

_NUMBERED = re.compile(r"(.*experts)\.(\d+)\.(.*)")


def separate_experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a transformers model with every stack of experts taken apart.

    The names of the parts are those that transformers writes into checkpoints
    (`experts.3.gate_proj.weight`); all other names are the module's own. A model whose checkpoints
    have stacks, too, keeps them. Experts that return their input have rows in some of transformers'
    stacks, which nothing reads: these are left out.
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
        return _without_stumps(separate)
    finally:
        own._weight_conversions = before


def _without_stumps(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict without the numbered modules that lack a weight which the first one of
    their kind has.
    """
    names = {name: match.groups() for name in state if (match := _NUMBERED.fullmatch(name))}
    leaves: dict[tuple[str, str], set[str]] = {}
    for path, number, leaf in names.values():
        leaves.setdefault((path, number), set()).add(leaf)
    whole = {path: own for (path, number), own in leaves.items() if number == "0"}
    stumps = {key for key, own in leaves.items() if own < whole.get(key[0], set())}
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in names or names[name][:2] not in stumps
    }


def _merges(rule: Any) -> bool:
    return isinstance(rule, WeightConverter) and any(
        isinstance(item, MergeModulelist) for item in rule.operations
    )
