"""Other sizes and another order of layers for a small config: nothing that a tool shrinks to,
nothing round.

What can vary is a list of aspects, each with the changes that may bring it about, the best first.
Which numbers are tried follows from the type's name, so that a type has the same variant every
time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from onboard.analysis.tiny.tiny_sizes import CHUNK, HEADS, HIDDEN, VOCABULARY, WINDOW
from onboard.hf.config_layers import Layers, cut_layers, read_layers
from onboard.workflow.sweep.inputs.options_on import Option

Aspect = list[Option]
"""Changes of which one is to be made: the first that a model runs with."""

_POSITIONS = re.compile(
    r"max_(position_embeddings|target_positions|seq_len|sequence_length)|n_positions|n_ctx"
)
_INNER = re.compile(
    r"(?!num_)(\w+_)?(intermediate_size|ffn_dim|(ffn_hidden|feed_forward)_size|d_ff|n_inner|d_inner)"
)
_OF_EXPERTS = re.compile(r"\w*(expert|moe)\w*")
_EPSILON = re.compile(r"(\w+_)?(eps|epsilon)")
_EXPERTS = re.compile(r"(num|n|moe)_(?!shared)(\w+_)?experts")
_CHOSEN = re.compile(
    r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_per_token"
)
_STATE = re.compile(
    r"(ssm_|mamba_d_)?state(_size)?|(kv|q)_lora_rank|\w*time_step_rank|dt_rank|mamba_dt_rank"
)
_KERNEL = re.compile(r"\w*conv_kernel(_size|_dim)?|mamba_d_conv|conv_L_cache|conv1d_width")
_HEADS = re.compile(r"num_attention_heads|(encoder|decoder)_attention_heads|n_heads?|num_heads")
_KV_HEADS = re.compile(r"(\w+_)?num_key_value_heads|num_kv_heads|kv_n_heads")
_SCAN_HEADS = re.compile(r"num_heads|mamba_n_heads|mamba_num_heads|n_mamba_heads")
_HEAD_DIM = re.compile(r"head_dim|d_head|attention_head_size")
_CODEBOOKS = re.compile(r"num_codebooks")
_WIDE, _MANY = 72, 6
"""A width and a number of heads that are no powers of two."""
_MOST_LAYERS = 6


def aspects(small: PretrainedConfig, name: str) -> Iterator[Aspect]:
    """Yield what can vary in a small config of the type `name`, each aspect by itself."""
    draw, values = random.Random(name), small.to_dict()
    positions = _named(values, _POSITIONS, lambda _: draw.randrange(365, 420))
    yield [replace(option, shows=False) for option in positions]
    yield _sized(values, VOCABULARY, draw.choice((173, 181, 197, 211)))
    yield from _heads(values, draw)
    yield from _sizes(values, draw)
    yield _sized(values, WINDOW, draw.choice((6, 7, 9)), r"(\w+_)?window(_size)?|sliding_window")
    yield _sized(values, CHUNK, draw.choice((6, 7, 11)), r"attention_chunk_size")
    yield _named(values, _EPSILON, lambda value: draw.choice((1e-3, 3e-3)), float)
    yield [_option(_rotation(values))] if _rotation(values) else []
    yield from _layers(small, values)


def _rotation(values: dict[str, Any]) -> dict[str, Any]:
    """Return another base for each RoPE in some fields, however deep they lie."""
    found = {name: _rotation(value) for name, value in values.items() if isinstance(value, dict)}
    bases = {
        name: 0.37 * values[name]
        for name in ("rope_theta",)
        if isinstance(values.get(name), int | float)
    }
    return {name: value for name, value in found.items() if value} | bases


def _heads(values: dict[str, Any], draw: random.Random) -> Iterator[Aspect]:
    """Six heads for four, with two or three key heads; and a width that is no power of two."""
    heads = {name: _MANY for name in values if _HEADS.fullmatch(name) and values[name] == HEADS}
    kv = [name for name in values if _KV_HEADS.fullmatch(name) and type(values[name]) is int]
    scans = [
        name
        for name in values
        if _SCAN_HEADS.fullmatch(name) and type(values[name]) is int and name not in heads
    ]
    width = {name: _WIDE for name in values if type(values[name]) is int and values[name] == HIDDEN}
    width = {name: size for name, size in width.items() if "position" not in name}
    scan = {name: values[name] * _WIDE // HIDDEN for name in scans}
    grouped = [
        heads | {name: _kv_heads(values[name], share) for name in kv}
        for share in draw.sample((2, 3), 2)
    ]
    wide = [width | change | own for own in (scan, {}) for change in grouped] if heads else []
    yield [_option(change) for change in (*wide, *grouped, width | scan, width) if change]
    sizes = [name for name in values if _HEAD_DIM.fullmatch(name) and type(values[name]) is int]
    yield [_option({name: size for name in sizes}) for size in draw.sample((20, 28), 2) if sizes]


def _kv_heads(value: int, share: int) -> int:
    """One key head stays one, and as many as queries that."""
    return {1: 1, HEADS: _MANY}.get(value, share)


def _sizes(values: dict[str, Any], draw: random.Random) -> Iterator[Aspect]:
    """Odd sizes; where one has to be a multiple of something, a less odd one."""
    odd = draw.choice((5, 7, 9))
    experts = {name: value for name, value in values.items() if _OF_EXPERTS.fullmatch(name)}
    others = {name: value for name, value in values.items() if name not in experts}
    yield _plus(others, _INNER, odd) + _plus(others, _INNER, 8)
    yield _plus(experts, _INNER, odd) + _plus(experts, _INNER, 4) + _plus(experts, _INNER, 8)
    yield _plus(values, _EXPERTS, -1) + _plus(values, _EXPERTS, -4)
    yield _plus(values, _CHOSEN, -1)
    yield _plus(values, _STATE, 5) + _plus(values, _STATE, 2)
    yield _plus(values, _KERNEL, -1)
    yield _plus(values, _CODEBOOKS, -1)


def _layers(small: PretrainedConfig, values: dict[str, Any]) -> Iterator[Aspect]:
    """Layers in another order, and more than once; one more where they are all alike."""
    yield _plus(values, re.compile(r"decoder_layers|num_decoder_layers"), 1)
    layers = read_layers(small, values)
    if layers is None or layers.overrides:
        return
    there = list(range(layers.count))
    orders = [there[::-1] + there, [*there, *there[1:], there[0]], [*there, there[-1]]]
    yield [
        _ordered(values, layers, order[: max(_MOST_LAYERS, layers.count + 1)]) for order in orders
    ]


def _ordered(values: dict[str, Any], layers: Layers, order: list[int]) -> Option:
    """Change the fields so that the layers are those of `order`."""
    changed = dict(values)
    cut_layers(layers, changed, order)
    changes = {
        name: value
        for name, value in changed.items()
        if name not in values or values[name] != value
    }
    return Option(f"layers {','.join(map(str, order))}", changes)


def _sized(values: dict[str, Any], old: int, new: int, names: str = r"\w+") -> Aspect:
    """Change every field of some name that has the size `old`."""
    found = {name: new for name in values if type(values[name]) is int and values[name] == old}
    return (
        [_option(found)]
        if (found := {name: new for name in found if re.fullmatch(names, name)})
        else []
    )


def _plus(values: dict[str, Any], pattern: re.Pattern[str], amount: int) -> Aspect:
    """Change every field whose name matches by an amount, where it stays above one."""
    return _named(values, pattern, lambda value: max(value + amount, min(value, 2)))


def _named(
    values: dict[str, Any], pattern: re.Pattern[str], change: Callable[[Any], Any], kind: Any = int
) -> Aspect:
    """Change every field whose name matches, where it is a number above zero."""
    numbers = {name: value for name, value in values.items() if type(value) is kind and value > 0}
    found = {name: change(value) for name, value in numbers.items() if pattern.fullmatch(name)}
    return [_option(found)] if found else []


def _option(changes: dict[str, Any]) -> Option:
    return Option(", ".join(f"{name}={_shown(value)}" for name, value in changes.items()), changes)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
