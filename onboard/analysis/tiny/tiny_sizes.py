"""Small sizes by the names of a config's fields; sizes that depend on one another stay
consistent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onboard.analysis.tiny.few_experts import few_experts
from onboard.analysis.tiny.tiny_mixers import shrink_mixers

VOCABULARY = 131
_WORDS = ("vocab_size", "padded_vocab_size")
HIDDEN = 64
HEADS = 4
WINDOW = 5
"""Shorter than any prompt that probes and proofs use."""
CHUNK = 8
"""So, too, what attention is cut into."""
MAX_POSITIONS = 256
ORIGINAL_POSITIONS = 64
"""Where RoPE that scales with length switches; prompts lie on both sides of it."""

REACHED = 0.75
"""Where what limits activations limits some random ones: a limit that nothing reaches may be lost
unnoticed.
"""
_LIMITS = re.compile(r"(\w+_)?(swiglu_limit|soft_?cap(ping)?|clip(_\w+)?)")

_SIZES = {
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "hidden_size_global": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": ORIGINAL_POSITIONS,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "local_attention_window_len": WINDOW,
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "attention_chunk_size": CHUNK,
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    "rescale_every": 2,
    "n_inner": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "d_inner": 96,
    "feed_forward_size": 96,
    "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "word_embed_proj_dim": HIDDEN,
    "embedding_dim": HIDDEN,
    "backbone_hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 12,
    "laurel_rank": 8,
    "adapter_rank": 8,
    "indexer_head_dim": 2 * HIDDEN // HEADS,
    "indexer_budget": 8,
    "indexer_n_heads": 16,
    "ple_embed_dim": HIDDEN,
    "ngram_vocab_size_base": VOCABULARY,
    "rotary_dim": 8,
    "n_ctx": MAX_POSITIONS,
    "window_size": WINDOW,
    "keep_window_size": WINDOW,
    "rel_extent": 7,
    "max_seq_len": MAX_POSITIONS,
    "num_random_blocks": 1,
    "num_query_groups": HEADS,
    "hc_sinkhorn_iters": 3,
}
KNOWN_SIZES = frozenset(_SIZES)
_RATES = "compress_rates"
"""Of kinds of layers: the tokens that one key stands for."""
_WIDTHS = ("attention_hidden_size", "lru_width")
"""Widths that are a multiple of the model's own."""
_HEAD_DIMS = ("head_dim", "d_head", "attention_head_size", "kv_channels")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "n_head_kv",
    "n_kv_heads",
    "multi_query_group_num",
    "swa_num_key_value_heads",
)
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink_sizes(
    values: dict[str, Any], full: Mapping[str, Any], aliases: Mapping[str, str]
) -> None:
    """Shrink every size among a config's fields.

    Args:
        values: the fields, changed in place.
        full: the fields with their real sizes.
        aliases: usual name -> the name that this config has for it.
    """
    native = {name: aliases.get(name, name) for name in (*_SIZES, *_HEAD_DIMS, *_KV_HEADS)}
    hidden, heads = full.get(native["hidden_size"]), full.get(native["num_attention_heads"])
    for name, size in _SIZES.items():
        values.update(_resized(values, native[name], size))
    for name in _WIDTHS:
        if isinstance(values.get(name), int) and hidden:
            values[name] = values[name] * HIDDEN // hidden
    for name in _KV_HEADS:
        if isinstance(values.get(native[name]), int):  # lists of layers' numbers stay
            values[native[name]] = _kv_heads(values[native[name]], heads)
    for name in _HEAD_DIMS:
        if values.get(native[name]) is not None:
            values[native[name]] = _head_dim(values[native[name]], values, full, heads, hidden)
    for index, name in enumerate(_TOKEN_IDS):
        if values.get(name) is not None:
            values[name] = index
    if isinstance(values.get(_RATES), dict):
        values[_RATES] = {kind: min(rate, CHUNK) for kind, rate in values[_RATES].items()}
    values |= {name: _with_few_words(part) for name, part in values.items()}
    _shrink_axes(values)
    _shrink_chunks(values, full)
    _shrink_random_blocks(values)
    values |= _lower_limits(values)
    values |= few_experts(values)
    values |= _shares(values, full, native["intermediate_size"])
    shrink_mixers(values, full)


def _with_few_words(part: Any) -> Any:
    """Return a table of sizes inside a config with a small vocabulary; anything else as it is."""
    words = [name for name in _WORDS if isinstance(part, dict) and isinstance(part.get(name), int)]
    return {**part, **dict.fromkeys(words, VOCABULARY)} if words else part


def keep_heads(
    values: dict[str, Any],
    full: Mapping[str, Any],
    aliases: Mapping[str, str],
    *,
    size: bool,
    number: bool,
) -> None:
    """Give a small config's heads the size, or as many as, they have in the full one: some code has
    it as a number.
    """
    native = {name: aliases.get(name, name) for name in (*_SIZES, *_HEAD_DIMS, *_KV_HEADS)}
    kept = (*_HEAD_DIMS,) * size + ("num_attention_heads", *_KV_HEADS) * number
    for name in kept:
        if isinstance(full.get(native[name]), int):
            values[native[name]] = full[native[name]]
    hidden, heads = full.get(native["hidden_size"]), full.get(native["num_attention_heads"])
    if isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads if size else HIDDEN // HEADS
        values[native["hidden_size"]] = width * (heads if number else HEADS)
        if full.get("qk_rope_head_dim") == hidden // heads:
            values.update(_turned_channels(values, width))


def _turned_channels(values: Mapping[str, Any], width: int) -> dict[str, int]:
    """Return the sizes of latent attention's heads whose turned channels are as many as tables have
    that code makes for a head's share of the width.
    """
    sizes = {"qk_rope_head_dim": width}
    if isinstance(values.get("qk_head_dim"), int):
        sizes["qk_head_dim"] = values["qk_nope_head_dim"] + width
    return sizes


def _lower_limits(values: Mapping[str, Any]) -> dict[str, float]:
    """Lower each limit to about `REACHED`, none to where another one is: they are not to be
    mistaken for each other.
    """
    names = [
        name for name in sorted(values) if _LIMITS.fullmatch(name) and _is_number(values[name])
    ]
    return {
        name: min(values[name], REACHED + index / 64)
        for index, name in enumerate(names)
        if values[name] > 0
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shrink_overrides(
    overrides: Mapping[str, Any], small: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one layer's own fields with the ratio to the other layers' that they have in the full
    config.
    """
    ratios = {
        name: value / full[name]
        for name, value in overrides.items()
        if _is_size(value) and full.get(name)
    }
    sizes = {name: int(small[name] * ratio) for name, ratio in ratios.items()}
    # Which a rotation takes
    pairs = {name: size - size % 2 for name, size in sizes.items() if name in _HEAD_DIMS}
    return {**overrides, **sizes, **pairs}


def rotated_dim(small: Mapping[str, Any]) -> int:
    """Return how many channels RoPE turns, but for a factor that its parameters may have: those that
    latent attention keeps for it, else a head's.
    """
    return small.get("qk_rope_head_dim") or small.get("head_dim") or 16


def shrink_rope(value: Any, channels: int) -> Any:
    """Shrink lengths, sections and per-channel factors inside RoPE parameters, however deep they
    lie.
    """
    if not isinstance(value, dict):
        return value
    out = {key: shrink_rope(item, channels) for key, item in value.items()}
    if out.get("original_max_position_embeddings") is not None:
        out["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    rotary = int(channels * out.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(factors := out.get(key), list) and factors:
            out[key] = [factors[index * len(factors) // rotary] for index in range(rotary)]
    if isinstance(sections := out.get("mrope_section"), list):
        out["mrope_section"] = _sections(sections, rotary)
    return out


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _resized(values: Mapping[str, Any], name: str, size: int) -> dict[str, Any]:
    """Return the field with its new size; a list has one size a layer."""
    value = values.get(name)
    if isinstance(value, list | tuple) and all(_is_size(item) for item in value):
        return {name: [size] * len(value)}
    # 0: there is none
    return {} if not value or isinstance(value, list | tuple | str) else {name: size}


def _kv_heads(kv_heads: int, heads: int | None) -> int:
    # Of one head alone: as many keys as queries
    return {1: 1, heads: HEADS}.get(kv_heads, HEADS // 2)


def _head_dim(
    size: int,
    values: Mapping[str, Any],
    full: Mapping[str, Any],
    heads: int | None,
    hidden: int | None,
) -> int:
    """A size that divides the width of the attention goes on doing so; another one stays another
    one.
    """
    width = full.get("attention_hidden_size", hidden)
    if heads is None or width is None or size * heads != width:
        return 2 * HIDDEN // HEADS
    return int(values.get("attention_hidden_size", HIDDEN) // HEADS)


def _sections(sections: list[int], channels: int) -> list[int]:
    """Share `channels` out in the ratio of `sections`; what is left over goes to the first."""
    shares = [section * channels // sum(sections) for section in sections]
    return [shares[0] + channels - sum(shares), *shares[1:]]


def _shares(values: Mapping[str, Any], full: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the lists, each of a layer, of sizes that a size is shared out to, experts' say, that go
    on making it up; as many of each as there are experts.
    """
    counts = {
        whole: values[key]
        for key, whole in full.items()
        if _is_size(whole) and _is_size(values.get(key)) and key.endswith("experts")
    }
    return {
        key: [_sections(row[: counts.get(len(row), len(row))], values[name]) for row in rows]
        for key, rows in full.items()
        if isinstance(rows, list | tuple) and rows and _is_size(full.get(name))
        if all(isinstance(row, list | tuple) and all(map(_is_size, row)) for row in rows)
        if all(sum(row) == full[name] for row in rows)
    }


def _shrink_axes(values: dict[str, Any]) -> None:
    """Axial positions: the axes' lengths make up all positions and their widths the model's."""
    if isinstance(values.get("axial_pos_shape"), list | tuple):
        values["axial_pos_shape"] = [16, MAX_POSITIONS // 16]
        values["axial_pos_embds_dim"] = [HIDDEN // 4, HIDDEN - HIDDEN // 4]
    for name in values:
        if re.fullmatch(r"\w+_attn_chunk_length", name):
            values[name] = 4


def _shrink_chunks(values: dict[str, Any], full: Mapping[str, Any]) -> None:
    """Chunks of which a window has a whole number go on doing so."""
    window, chunk = full.get("window_size"), full.get("chunk_size")
    if not isinstance(window, int) or not isinstance(chunk, int):
        return
    if 0 < chunk < window and window % chunk == 0:
        values |= {"window_size": CHUNK, "chunk_size": CHUNK // 2}


def _shrink_random_blocks(values: dict[str, Any]) -> None:
    """Where attention has random blocks, texts of a few blocks attend to everything: no prompt is
    to be as short.
    """
    if values.get("num_random_blocks") is not None:
        values["block_size"] = 2
