"""How many experts a mixture has, how many a token goes to, and how many every token does: as its config says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PretrainedConfig

from onboard.analysis.spec import Block, Trait

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
    if not any(block.kind == "experts" for block in blocks):
        return {}
    values = config.to_dict()
    found = {trait: next(_counts(values, pattern), None) for trait, pattern in _FIELDS.items()}
    out = {
        trait: Trait(value=value, evidence=f"probe: experts; config.json: {name}")
        for trait, (name, value) in ((trait, pair) for trait, pair in found.items() if pair is not None)
    }
    if "shared_experts" not in out and (width := next(_counts(values, _SHARED_WIDTH), None)):
        out["shared_experts"] = Trait(value=1, evidence=f"config.json: {width[0]}")
    return out


def _counts(values: dict[str, Any], pattern: str) -> Iterator[tuple[str, int]]:
    """Yield the fields of such a name that count something; of a count for each layer the largest."""
    for name, value in values.items():
        if re.fullmatch(pattern, name):
            counts = [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
            if counts and max(counts) > 0:
                yield name, max(counts)
