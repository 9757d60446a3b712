"""Options that a config's defaults leave off, by the names of its fields: what released checkpoints
switch on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

_SWITCHES = re.compile(
    r"(\w+_)?bias|(use_)?qk?_(layer)?norm|use_qk_norm|tie_word_embeddings"
    r"|norm_topk_prob|attention_k_eq_v|use_double_wide_mlp"
)
_LIMITS = re.compile(r"clip_qkv|\w+_logit_softcapping")
_LIMIT = 2.5  # one that random activations reach
_WINDOW = 4096  # the tiny config has a shorter one


@dataclass(frozen=True)
class Option:
    """Fields of the config that change together."""

    name: str
    changes: dict[str, Any]
    shows: bool = True
    """Whether a short text has to show it: one that it changes nothing for does not take effect."""


def options(config: PretrainedConfig) -> list[Option]:
    """Return what can be changed: biases, QK norm, tied embeddings, grouped heads, a window, RoPE
    scaling and more.
    """
    values = config.to_dict()
    heads, rest = (
        _grouped_heads(config, values),
        (_window, _rope_scaling, _limits, _layers, _mixture),
    )
    return [*_switches(values), *heads, *(option for rule in rest for option in rule(values))]


def _switches(values: dict[str, Any]) -> Iterator[Option]:
    for name in sorted(values):
        if isinstance(values[name], bool) and _SWITCHES.fullmatch(name):
            yield Option(f"{name}={not values[name]}", {name: not values[name]})


def _grouped_heads(config: PretrainedConfig, values: dict[str, Any]) -> Iterator[Option]:
    heads = values.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    if isinstance(heads, int) and heads % 2 == 0 and values.get("num_key_value_heads") == heads:
        yield Option("grouped heads", {"num_key_value_heads": heads // 2})


def _window(values: dict[str, Any]) -> Iterator[Option]:
    if "sliding_window" in values and (
        values["sliding_window"] is None or values.get("use_sliding_window") is False
    ):
        switch = {"use_sliding_window": True} if "use_sliding_window" in values else {}
        # Kinds of layers that were derived from the switch are derived again.
        yield Option("sliding window", {"sliding_window": _WINDOW, "layer_types": None, **switch})


def _rope_scaling(values: dict[str, Any]) -> Iterator[Option]:
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        yield Option(
            "rope scaling", {"rope_parameters": {**rope, "rope_type": "linear", "factor": 4.0}}
        )


def _limits(values: dict[str, Any]) -> Iterator[Option]:
    for name in sorted(values):
        if values[name] is None and _LIMITS.fullmatch(name):
            yield Option(f"{name}={_LIMIT}", {name: _LIMIT})


def _layers(values: dict[str, Any]) -> Iterator[Option]:
    """Layers of another kind at the start, or at the end."""
    layers = values.get("num_hidden_layers")
    for name, count in (("first_k_dense_replace", 1), ("num_kv_shared_layers", (layers or 0) // 2)):
        if values.get(name) == 0 and layers is not None:
            yield Option(f"{name}={count}", {name: count})


def _mixture(values: dict[str, Any]) -> Iterator[Option]:
    if values.get("enable_moe_block") is False and values.get("num_experts", 0) is None:
        sizes = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
        yield Option("a mixture in every layer", {"enable_moe_block": True, **sizes})
