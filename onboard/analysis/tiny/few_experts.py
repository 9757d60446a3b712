"""Mixtures of experts in small: few experts in few groups, and layers of both kinds where only some
are mixtures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

EXPERTS = 16
WIDTH = 32

_RULES: list[tuple[str, Callable[[int], int]]] = [
    (r"(num|n|moe)_.*shared_experts?|n_shared_experts?", lambda value: min(value, 2)),
    (r"(num|n|moe)_(\w+_)?experts", lambda value: min(value, EXPERTS)),
    (
        r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_per_token",
        lambda value: min(value, 4),
    ),
    (r"(n|num)_(expert_)?groups?", lambda value: min(value, 4)),
    (r"topk_group|num_limited_groups", lambda value: min(value, 2)),
    (r"zero_expert_num", lambda value: min(value, 4)),
    (r"\w*(expert|shared|moe)\w*_(intermediate|ffn_hidden)_size", lambda value: min(value, WIDTH)),
]
"""A config field's whole name -> its value in small; the first rule that fits counts."""


def few_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that say how many experts there are and how wide, with small
    values.
    """
    small: dict[str, Any] = {}
    for name, value in values.items():
        rule = next((shrink for pattern, shrink in _RULES if re.fullmatch(pattern, name)), None)
        if rule is None:
            continue
        if type(value) is int:
            small[name] = rule(value)
        elif isinstance(value, list) and all(type(item) is int for item in value):
            small[name] = [rule(item) for item in value]
    return small
