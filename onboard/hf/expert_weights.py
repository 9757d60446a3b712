"""Experts as checkpoints have them: transformers stacks them in memory, most checkpoints hold them
one by one, and some have stacks, too.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    revert_weight_conversion,
)

from onboard.hf.architecture import decoder_config
from onboard.hf.hf_model import build_reference, unquantised
from onboard.hf.quiet import quiet_transformers

_NUMBERED = re.compile(r"(.*experts)\.(\d+)\.(.*)")
_PIECES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stack's name in its module, and the linear layers of an expert that it has one behind the other."""
_ROOT = "experts"


def separate_experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a transformers model with every stack of experts taken apart.

    The names of the parts are those that transformers writes into checkpoints
    (`experts.3.gate_proj.weight`); all other names are the module's own. A model whose checkpoints
    have stacks, too, keeps them. Experts that return their input have rows in some of transformers'
    stacks, which nothing reads: these are left out.
    """
    own: Any = model
    rules, state = merges(model), model.state_dict()
    if not rules:
        return state
    before = vars(own).get("_weight_conversions")
    own._weight_conversions = rules
    try:
        separate: dict[str, torch.Tensor] = revert_weight_conversion(own, state)
        return _without_stumps(separate)
    finally:
        own._weight_conversions = before


def merges(model: nn.Module) -> list[Any]:
    """Return the rules by which transformers stacks the experts of a checkpoint for its `model`."""
    own: Any = model
    return [rule for rule in get_model_conversion_mapping(own, add_legacy=False) if _merges(rule)]


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


@dataclass(frozen=True)
class DeclaredStack:
    """A parameter of transformers' model, [experts, ...]: weights, or biases [experts, outputs]."""

    shape: tuple[int, ...]
    pieces: tuple[str, ...]
    """The layers of an expert that are in it."""
    alternates: bool
    """Its pieces' outputs take turns."""
    are_chosen: bool = True
    """See `are_chosen`."""
    is_made: bool = False
    """A rule of loading makes it of experts one by one, as which a generated model has them."""


def are_chosen(experts: nn.Module) -> bool:
    """Tell whether a module of experts is given which of them a token goes to; without that all compute
    on inputs of their own, a batched product, for which no op takes codes.
    """
    return len(inspect.signature(experts.forward).parameters) > 1


def declared_stacks(config: Mapping[str, Any]) -> Mapping[str, DeclaredStack]:
    """Return the stacks of experts that transformers' model of a parsed config.json has, and that no rule
    of its loading makes of experts one by one, by name; nothing for a model that transformers
    does not know, or cannot build.
    """
    return {name: stack for name, stack in all_stacks(config).items() if not stack.is_made}


def all_stacks(config: Mapping[str, Any]) -> Mapping[str, DeclaredStack]:
    """Return the same with those that a rule makes."""
    return _declared(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=4)
def _declared(text: str) -> Mapping[str, DeclaredStack]:
    values = json.loads(text)
    if values.get("model_type") not in CONFIG_MAPPING:
        return {}
    try:
        with quiet_transformers(), torch.device("meta"):
            config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
            model = build_reference(decoder_config(unquantised(config)))
    except Exception:  # any type: gather builds the model, too, and says what is wrong
        return {}
    return _stacks(model)


def _stacks(model: Any) -> dict[str, DeclaredStack]:
    found = {}
    for path, module in model.named_modules():
        for leaf, pieces in _PIECES.items() if path.endswith(_ROOT) else ():
            alternates = not getattr(module, "is_concatenated", True) and len(pieces) > 1
            for name in (leaf, f"{leaf}_bias"):
                stack = getattr(module, name, None)
                if isinstance(stack, torch.Tensor) and stack.dim() > 1:
                    found[f"{path}.{name}"] = DeclaredStack(
                        tuple(stack.shape), pieces, alternates, are_chosen(module)
                    )
    made = [target for rule in merges(model) for target in rule.target_patterns] if found else []
    return {
        name: replace(
            stack, is_made=any(name.endswith(target.replace("\\", "")) for target in made)
        )
        for name, stack in found.items()
    }
