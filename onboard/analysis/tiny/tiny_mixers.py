"""Small sizes for latent attention and recurrent mixers; sizes that depend on one another stay
consistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_LATENT_SUMS = {"qk_head_dim": 20}
_STATE_SIZES = ("state_size", "ssm_state_size", "mamba_d_state")
_STATE, _SCAN_HEADS, _CHUNK, _TIME_RANK = 12, 8, 8, 6
_FEW_HEADS = 4
_SCAN_HEAD_COUNTS = ("num_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_SCAN_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_INDEXER = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}
"""Fewer keys than any prompt has, so that it matters which ones an indexer chooses. With few heads,
keys that none of them likes would often have the same score, zero, and which of them are chosen
would be arbitrary."""
_DELTA = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_num_heads": 4,
    "linear_head_dim": 12,
}


def shrink_mixers(values: dict[str, Any], full: Mapping[str, Any]) -> None:
    """Shrink a config's fields of latent attention, state space models and delta rules; `full` are
    the real sizes.
    """
    if values.get("kv_lora_rank") is not None:
        _shrink_latent(values, full)
    if any(values.get(key) is not None for key in _STATE_SIZES):
        _shrink_scan(values)
    if values.get("linear_num_value_heads") is not None:
        grouped = values["linear_num_value_heads"] != values["linear_num_key_heads"]
        values.update(linear_num_value_heads=4, linear_num_key_heads=2 if grouped else 4)
    values.update({key: size for key, size in _INDEXER.items() if values.get(key) is not None})
    values.update({key: size for key, size in _DELTA.items() if values.get(key) is not None})
    if attends_in_blocks(full):
        values["block_size"] = _CHUNK
    if values.get("lru_width") is not None:
        values["lru_width"] = values["hidden_size"]
    _share_width(values, full)


def indexer_sizes(config: Any) -> tuple[int, int, int] | None:
    """Return a config's heads of the indexer, their size and how many keys it chooses; None: it has
    no indexer.
    """
    names = ("index_n_heads", "index_head_dim", "index_topk")
    heads, dim, top_k = (getattr(config, name, None) for name in names)
    return (heads, dim, top_k) if heads and dim and top_k else None


def attends_in_blocks(values: Mapping[str, Any]) -> bool:
    """Whether linear attention goes block by block: its heads forget at constant rates, less the
    deeper the layer.
    """
    return values.get("block_size") is not None and "linear_attention" in (
        values.get("layer_types") or ()
    )


def _share_width(values: dict[str, Any], full: Mapping[str, Any]) -> None:
    """Heads that the width is shared out to go on doing so: as many as there were, or else four."""
    heads, width = values.get("num_heads"), full.get("hidden_size")
    if (
        isinstance(heads, int)
        and isinstance(width, int)
        and width % heads == 0
        and values["hidden_size"] % heads
    ):
        values["num_heads"] = _FEW_HEADS


def _shrink_latent(values: dict[str, Any], full: Mapping[str, Any]) -> None:
    sizes = {**_LATENT, **_LATENT_SUMS}
    if full.get("head_dim") == full.get("qk_rope_head_dim"):
        sizes["head_dim"] = _LATENT["qk_rope_head_dim"]
    elif "qk_nope_head_dim" in full:  # without, heads are those of projections of low rank
        sizes["head_dim"] = _whole_head(full)
    values.update({key: size for key, size in sizes.items() if values.get(key) is not None})


def _whole_head(full: Mapping[str, Any]) -> int:
    """The channels with RoPE and those without, of the layers that have the most of these."""
    widest = max(
        own.get("qk_nope_head_dim", 0) for own in ({}, *full.get("per_layer_config", {}).values())
    )
    ratio = max(widest / full["qk_nope_head_dim"], 1)
    return int(_LATENT["qk_nope_head_dim"] * ratio) + _LATENT["qk_rope_head_dim"]


def _shrink_scan(values: dict[str, Any]) -> None:
    heads_key = next((key for key in _SCAN_HEAD_COUNTS if values.get(key) is not None), None)
    own_heads = "num_attention_heads" not in values
    inner = int(
        next((values[key] for key in ("expand", "mamba_expand") if key in values), 2)
        * values["hidden_size"]
    )
    small: dict[str, Any] = dict.fromkeys(_STATE_SIZES, _STATE)
    small |= dict.fromkeys(("chunk_size", "mamba_chunk_size"), _CHUNK)
    small |= dict.fromkeys(("time_step_rank", "mamba_dt_rank"), _TIME_RANK)
    small |= {key: min(2, values[key]) for key in _GROUPS if values.get(key) is not None}
    small |= {"mamba_d_ssm": inner}
    if heads_key is not None:
        small |= {heads_key: _SCAN_HEADS, **dict.fromkeys(_SCAN_HEAD_DIMS, inner // _SCAN_HEADS)}
        small |= {"head_dim": inner // _SCAN_HEADS} if own_heads else {}
    values.update({key: size for key, size in small.items() if isinstance(values.get(key), int)})
