"""How many experts a mixture has, how many a token goes to, and how many every token does: as its
config says.

How many parameters that makes for a token, the modules of the model tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.spec import Trait
from onboard.analysis.spec_blocks import MIXTURES, Block

_FIELDS = {
    "experts": r"(num|n|moe)_((?!shared)\w+_)?experts",
    "experts_per_token": r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_per_token",
    "shared_experts": r"(num|n|moe)_(\w+_)?shared_experts?",
}
"""Trait -> the whole name of the field that says it."""
_SHARED_WIDTH = r"shared_expert_intermediate_size"
"""Where a config says how wide the shared expert is, there is one."""


def mixture(config: PretrainedConfig, blocks: Sequence[Block]) -> dict[str, Trait]:
    """Return the traits of a mixture of experts; none where no module behaves like experts."""
    if not any(block.kind in MIXTURES for block in blocks):
        return {}
    values = config.to_dict()
    found = {trait: next(_counts(values, pattern), None) for trait, pattern in _FIELDS.items()}
    out = {
        trait: Trait(value=value, evidence=f"probe: experts; config.json: {name}")
        for trait, (name, value) in (
            (trait, pair) for trait, pair in found.items() if pair is not None
        )
    }
    if "shared_experts" not in out and (width := next(_counts(values, _SHARED_WIDTH), None)):
        out["shared_experts"] = Trait(value=1, evidence=f"config.json: {width[0]}")
    return out


def active_parameters(
    model: nn.Module, blocks: Sequence[Block], traits: Mapping[str, Trait]
) -> int | None:
    """Return how many of a model's parameters one token meets; None where it is no mixture, or its
    config is silent.

    Of `n` routed experts in a module a token goes to as many as the traits say; all else, the
    embeddings too, counts.
    """
    classes = {block.class_name: block for block in blocks if block.kind in MIXTURES}
    experts, chosen = (
        traits[name].value if name in traits else None for name in ("experts", "experts_per_token")
    )
    if not classes or not isinstance(experts, int) or not isinstance(chosen, int):
        return None
    found = ((module, classes.get(type(module).__name__)) for module in model.modules())
    stacks = [_experts_of(module, block) for module, block in found if block is not None]
    idle = sum(_idle(parameters, experts, chosen) for parameters in stacks)
    return sum(parameter.numel() for parameter in model.parameters()) - idle


def _experts_of(module: nn.Module, block: Block) -> list[nn.Parameter]:
    """Return the parameters of a module's routed experts; none of the same class without them, as
    layers between mixtures may have it.
    """
    if not isinstance(block, Mixture):
        return list(module.parameters())
    found = block.parameters
    if found.experts is not None:
        experts = dict(module.named_modules()).get(found.experts)  # a dense layer may have none
        return [] if experts is None else list(experts.parameters())
    stacks = dict(module.named_parameters())
    return [stacks[path] for path in (found.gate, found.down, found.up) if path in stacks]


def _idle(parameters: list[nn.Parameter], experts: int, chosen: int) -> int:
    """Return the routed experts' parameters that a token does not go to; a stack tells their
    number.
    """
    stacked = {len(parameter) for parameter in parameters if parameter.dim() == 3}
    count = stacked.pop() if len(stacked) == 1 else experts
    return sum(parameter.numel() for parameter in parameters) * max(0, count - chosen) // count


def _counts(values: dict[str, Any], pattern: str) -> Iterator[tuple[str, int]]:
    """Yield the fields of such a name that count something; of a count for each layer the
    largest.
    """
    for name, value in values.items():
        if re.fullmatch(pattern, name):
            counts = [
                item
                for item in (value if isinstance(value, list) else [value])
                if type(item) is int
            ]
            if counts and max(counts) > 0:
                yield name, max(counts)
