"""Cached mixers and latent attention, in float64 against the uncached ops on each whole sequence.

The batch changes from step to step: prefill, chunks, mixtures with decode, pure decode with padding
rows, and a slot that another sequence had before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from onboard.cache.batch import SequenceInfo
from onboard.cache.examples import set_decode_example
from onboard.cache.resources import KVPagedResource
from onboard.ops.attention.block_attention import torch_cached_block_attention
from onboard.ops.attention.cached_attention import torch_cached_attention
from onboard.ops.attention.dynamic_mask import torch_cached_dynamic_mask_attention
from onboard.ops.attention.relative_attention import torch_cached_relative_attention
from onboard.ops.attention.rope_attention import torch_cached_rope_attention
from onboard.ops.convolution.cached_causal_conv import torch_cached_causal_conv1d
from onboard.ops.delta_rule.cached_delta_rule import (
    torch_cached_delta_rule,
    torch_cached_gated_delta_rule,
)
from onboard.ops.delta_rule.dplr import torch_cached_dplr_delta_rule
from onboard.ops.delta_rule.kda import torch_cached_kda
from onboard.ops.hidden_states.head_input import torch_cached_head_input, torch_head_input
from onboard.ops.hidden_states.residual_add import torch_cached_residual_add
from onboard.ops.latent_attention.cached_mla import torch_cached_mla
from onboard.ops.latent_attention.rope_mla import torch_cached_rope_mla
from onboard.ops.library import op_sources
from onboard.ops.recurrences.gated_linear import torch_cached_gated_linear_attention
from onboard.ops.recurrences.lightning import torch_cached_lightning_attention
from onboard.ops.recurrences.linear_recurrence import torch_cached_linear_recurrence
from onboard.ops.recurrences.mlstm import torch_cached_mlstm
from onboard.ops.recurrences.token_shift import torch_cached_token_shift
from onboard.ops.recurrences.wkv import torch_cached_wkv
from onboard.ops.sparse.block_indexer import torch_cached_block_indexer
from onboard.ops.sparse.cached_indexer import torch_cached_lightning_indexer
from onboard.ops.sparse.cached_sparse import torch_cached_sparse_mla
from onboard.ops.sparse.compressed_attention import torch_cached_compressed_attention
from onboard.ops.sparse.gated_pool import torch_cached_gated_pool
from onboard.ops.sparse.sparse_attention import torch_cached_sparse_attention
from onboard.ops.ssm.cached_ssm import torch_cached_selective_scan, torch_cached_ssm
from onboard.ops.ssm.replayed_ssm import torch_replayed_ssm

ops: Any = torch.ops.onboard
PAGE = 4


@dataclass
class Mechanism:
    """A mechanism by its two forms; `inputs` are tensors of [1, tokens, ...]."""

    whole: Callable[..., Tensor]
    cached: Callable[..., Tensor]
    """(inputs, metadata by name, cache) -> outputs."""
    shapes: list[tuple[int, ...]]
    cache: tuple[int, ...]
    paged: bool = False

    @property
    def can_be_captured(self) -> bool:
        """Whether its cached op declares nothing against it."""
        sources = op_sources()
        return not any(
            sources[name].no_capture for name in self.cached.__code__.co_names if name in sources
        )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _state(info: dict[str, Tensor]) -> list[Tensor]:
    return [info[name] for name in ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")]


def _conv(groups: int, dilation: int) -> Mechanism:
    weight, bias = _random(6, 6 // groups, 4), _random(6)
    padding = 3 * dilation
    return Mechanism(
        lambda x: ops.torch_causal_conv1d(
            x, weight, bias, 1, padding, dilation, groups, "zeros", "silu"
        ),
        lambda x, info, cache: torch_cached_causal_conv1d(
            x, weight, bias, *_state(info), cache, dilation, groups, "silu"
        ),
        [(6,)],
        (padding, 6),
    )


def _ssm() -> Mechanism:
    A, D, bias = -torch.rand(4, dtype=torch.float64), _random(4), _random(4)
    return Mechanism(
        lambda x, B, C, dt: ops.torch_ssm(x, A, B, C, D, dt, bias, [0.0, 2.0], 3),
        lambda x, B, C, dt, info, cache: torch_cached_ssm(
            x, A, B, C, D, dt, bias, *_state(info), cache, [0.0, 2.0], 3
        ),
        [(4, 5), (2, 3), (2, 3), (4,)],
        (4, 5, 3),
    )


def _replayed_ssm() -> Mechanism:
    """The states, what the last three tokens came with and where they began lie side by side."""
    A, D, bias = -torch.rand(4, dtype=torch.float64), _random(4), _random(4)
    parts = [(4, 5, 3), (3, 4, 5), (3, 2, 3), (3, 4), (1,)]

    def cached(
        x: Tensor, B: Tensor, C: Tensor, dt: Tensor, info: dict[str, Tensor], cache: Tensor
    ) -> Tensor:
        caches = [
            part.unflatten(1, shape)
            for part, shape in zip(cache.split([*map(prod, parts)], 1), parts, strict=True)
        ]
        return torch_replayed_ssm(x, A, B, C, D, dt, bias, *_state(info), *caches, [0.0, 2.0], 3)

    return Mechanism(
        lambda x, B, C, dt: ops.torch_ssm(x, A, B, C, D, dt, bias, [0.0, 2.0], 3),
        cached,
        [(4, 5), (2, 3), (2, 3), (4,)],
        (sum(map(prod, parts)),),
    )


def _head_input() -> Mechanism:
    return Mechanism(
        torch_head_input,
        lambda x, info, cache: torch_cached_head_input(x, info["slot_mapping"], cache),
        [(6,)],
        (1, PAGE, 6),
        paged=True,
    )


def _residual_add() -> Mechanism:
    return Mechanism(
        lambda x, residual: x + residual,
        lambda x, residual, info, cache: torch_cached_residual_add(
            x, residual, info["slot_mapping"], cache
        ),
        [(6,), (6,)],
        (1, PAGE, 6),
        paged=True,
    )


def _scan(gated: bool) -> Mechanism:
    A, D, bias = -torch.rand(5, 3, dtype=torch.float64), _random(5), _random(5)
    return Mechanism(
        lambda x, dt, B, C, *z: ops.torch_selective_scan(x, dt, A, B, C, D, *z, dt_bias=bias),
        lambda x, dt, B, C, *rest: torch_cached_selective_scan(
            x, dt, A, B, C, D, rest[0] if gated else None, bias, *_state(rest[-2]), rest[-1]
        ),
        [(5,), (5,), (3,), (3,), *[(5,)] * gated],
        (5, 3),
    )


def _delta_rule() -> Mechanism:
    return Mechanism(
        lambda q, k, v, g, b: ops.torch_gated_delta_rule(q, k, v, -g.abs(), b.sigmoid(), 0.4, True),
        lambda q, k, v, g, b, info, cache: torch_cached_gated_delta_rule(
            q, k, v, -g.abs(), b.sigmoid(), *_state(info), cache, 0.4, True
        ),
        [(2, 5), (2, 5), (4, 3), (4,), (4,)],
        (4, 5, 3),
    )


def _kda() -> Mechanism:
    return Mechanism(
        lambda q, k, v, g, b: ops.torch_kda(q, k, v, -g.abs(), b.sigmoid(), 0.4, True),
        lambda q, k, v, g, b, info, cache: torch_cached_kda(
            q, k, v, -g.abs(), b.sigmoid(), *_state(info), cache, 0.4, True
        ),
        [(4, 5), (4, 5), (4, 3), (4, 5), (4,)],
        (4, 5, 3),
    )


def _dplr_delta_rule() -> Mechanism:
    return Mechanism(
        lambda *x: ops.torch_dplr_delta_rule(*x[:3], x[3] / 4, x[4] / 4, -x[5].abs(), 0.4),
        lambda *x: torch_cached_dplr_delta_rule(
            *x[:3], x[3] / 4, x[4] / 4, -x[5].abs(), *_state(x[6]), x[7], 0.4
        ),
        [(4, 5), (4, 5), (4, 3), (4, 5), (4, 5), (4, 5)],
        (4, 5, 3),
    )


def _plain_delta_rule() -> Mechanism:
    return Mechanism(
        lambda q, k, v, b: ops.torch_delta_rule(q, k, v, b.sigmoid(), 0.4, True),
        lambda q, k, v, b, info, cache: torch_cached_delta_rule(
            q, k, v, b.sigmoid(), *_state(info), cache, 0.4, True
        ),
        [(2, 5), (2, 5), (4, 3), (4,)],
        (4, 5, 3),
    )


def _lightning() -> Mechanism:
    slopes = torch.rand(4, dtype=torch.float64)
    return Mechanism(
        lambda q, k, v: ops.torch_lightning_attention(q, k, v, slopes),
        lambda q, k, v, info, cache: torch_cached_lightning_attention(
            q, k, v, slopes, *_state(info), cache
        ),
        [(4, 5), (4, 5), (4, 3)],
        (4, 3, 5),
    )


def _gated_linear(weighted: bool) -> Mechanism:
    first = _random(4, 5) if weighted else None
    return Mechanism(
        lambda q, k, v, g: ops.torch_gated_linear_attention(q, k, v, -g.exp(), first),
        lambda q, k, v, g, info, cache: torch_cached_gated_linear_attention(
            q, k, v, -g.exp(), *_state(info), cache, first
        ),
        [(4, 5), (4, 5), (4, 3), (4, 5)],
        (4, 5, 3),
    )


def _recurrence() -> Mechanism:
    return Mechanism(
        lambda x, decay: ops.torch_linear_recurrence(x, decay.sigmoid()),
        lambda x, decay, info, cache: torch_cached_linear_recurrence(
            x, decay.sigmoid(), *_state(info), cache
        ),
        [(5,), (5,)],
        (5,),
    )


def _shift() -> Mechanism:
    return Mechanism(
        ops.torch_token_shift,
        lambda x, info, cache: torch_cached_token_shift(x, *_state(info), cache),
        [(5,)],
        (5,),
    )


def _wkv() -> Mechanism:
    weights = _random(5), _random(5)
    return Mechanism(
        lambda key, value: ops.torch_wkv(key, value, *weights),
        lambda key, value, info, cache: torch_cached_wkv(
            key, value, *weights, *_state(info), cache
        ),
        [(5,), (5,)],
        (3, 5),
    )


def _mlstm() -> Mechanism:
    return Mechanism(
        lambda *x: ops.torch_mlstm(*x, 0.1),
        lambda *x: torch_cached_mlstm(*x[:5], *_state(x[5]), x[6], 0.1),
        [(4, 5), (4, 5), (4, 3), (4,), (4,)],
        (4, 6, 4),
    )


def _pages(info: dict[str, Tensor], window: int | None = None) -> list[Tensor]:
    """The metadata of pages; those that have left a window are given up, as the runtime does."""
    table = info["block_table"]
    if window is not None:
        first = info["kv_lens"] - info["cu_seqlens"].diff() - window + 1
        table = table.masked_fill(torch.arange(table.shape[1]) < (first // PAGE)[:, None], 0)
    return [
        info["cu_seqlens"],
        info["kv_lens"],
        table,
        info["slot_mapping"],
        info["batch_info_host"],
    ]


HEADS, NOPE, ROPE, RANK, VALUE = 3, 6, 4, 5, 7
LATENT = [(HEADS, NOPE), (HEADS, ROPE), (RANK,), (1, ROPE)]


def _mla(scale: float | None) -> Mechanism:
    weight = _random(HEADS * (NOPE + VALUE), RANK)
    return Mechanism(
        lambda *x: ops.torch_mla(*x, weight, True, scale),
        lambda *x: torch_cached_mla(*x[:4], weight, *_pages(x[4]), x[5], scale),
        LATENT,
        (1, PAGE, RANK + ROPE),
        paged=True,
    )


def _windowed_mla(window: int) -> Mechanism:
    weight = _random(HEADS * (NOPE + VALUE), RANK)
    return Mechanism(
        lambda *x: ops.torch_sparse_mla(*x, weight, None, 0.3, None, window),
        lambda *x: torch_cached_sparse_mla(
            *x[:4], weight, None, *_pages(x[4], window), x[5], 0.3, None, window
        ),
        LATENT,
        (1, PAGE, RANK + ROPE),
        paged=True,
    )


def _indexed_mla(top_k: int, window: int | None = None) -> Mechanism:
    """An indexer and the attention that it chooses keys for; a page holds the latents and the
    indexer's keys.
    """
    weight, sinks, width = _random(HEADS * (NOPE + VALUE), RANK), _random(HEADS), RANK + ROPE

    def whole(*x: Tensor) -> Tensor:
        chosen = ops.torch_lightning_indexer(*x[4:], top_k, 0.4)
        return ops.torch_sparse_mla(*x[:4], weight, chosen, None, sinks, window)

    def cached(*x: Any) -> Tensor:
        pages, cache = _pages(x[7], window), x[8]
        chosen = torch_cached_lightning_indexer(
            *x[4:7], *_pages(x[7]), cache[..., width:], top_k, 0.4
        )
        return torch_cached_sparse_mla(
            *x[:4], weight, chosen, *pages, cache[..., :width], None, sinks, window
        )

    shapes = [*LATENT, (8, 3), (3,), (8,)]
    return Mechanism(whole, cached, shapes, (1, PAGE, width + 3), paged=True)


def _sparse(top_k: int, block_size: int, weighted: bool) -> Mechanism:
    """An indexer of blocks and the attention that it chooses keys for; a page holds keys, values
    and indexer's keys.
    """

    def whole(
        q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, *weights: Tensor
    ) -> Tensor:
        chosen = ops.torch_block_indexer(
            query, key, *(weights or [None]), top_k, block_size, 0.4, expand=True
        )
        return ops.torch_sparse_attention(q, k, v, chosen, 0.4)

    def cached(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        *weights, info, cache = rest
        pages = _pages(info)
        index_cache, k_cache, v_cache = cache[:, :1, :, 8:], cache[..., :5], cache[..., 5:8]
        chosen = torch_cached_block_indexer(
            query, key, *(weights or [None]), *pages, index_cache, top_k, block_size, 0.4, True
        )
        return torch_cached_sparse_attention(q, k, v, chosen, *pages, k_cache, v_cache, 0.4)

    shapes = [(4, 5), (2, 5), (2, 3), (16, 3), (3,), *[(16,)] * weighted]
    return Mechanism(whole, cached, shapes, (2, PAGE, 11), paged=True)


def _pool(block_size: int, overlap: bool) -> Mechanism:
    """A page holds values and gates side by side."""
    bias, seen = _random(block_size, 6), block_size * (1 + overlap)
    return Mechanism(
        lambda *x: ops.torch_gated_pool(*x, bias, overlap),
        lambda *x: torch_cached_gated_pool(
            *x[:2], bias, *_pages(x[2], seen), x[3][..., :6], x[3][..., 6:], overlap
        ),
        [(6,), (6,)],
        (1, PAGE, 12),
        paged=True,
    )


def _compressed(block_size: int, window: int, top_k: int | None = None) -> Mechanism:
    """Attention to a window and to entries, all or those that an indexer chooses; a page holds what
    each has.
    """
    sinks = _random(4)
    room = KVPagedResource(1, 5, torch.float32, PAGE, None, block_size).keys_per_page

    def whole(q: Tensor, kv: Tensor, entries: Tensor, query: Tensor, key: Tensor) -> Tensor:
        chosen = (
            None
            if top_k is None
            else ops.torch_block_indexer(query, key, None, top_k, block_size, 0.4)
        )
        return ops.torch_compressed_attention(
            q, kv, entries, chosen, block_size, window, 0.4, sinks
        )

    def cached(
        q: Tensor, kv: Tensor, entries: Tensor, query: Tensor, key: Tensor, info: Any, cache: Tensor
    ) -> Tensor:
        pages = _pages(info)
        indexer = (*pages, cache[..., 10:], top_k, block_size, 0.4)
        chosen = None if top_k is None else torch_cached_block_indexer(query, key, None, *indexer)
        tables = *_pages(info, window), pages[2], pages[3]
        caches = cache[..., :5], cache[:, :, :room, 5:10]
        return torch_cached_compressed_attention(
            q, kv, entries, chosen, *tables, *caches, block_size, window, 0.4, sinks
        )

    return Mechanism(
        whole, cached, [(4, 5), (1, 5), (5,), (16, 3), (3,)], (1, PAGE, 13), paged=True
    )


def _relative(window: int | None) -> Mechanism:
    """A page holds keys and values side by side."""
    sinks = _random(4)
    return Mechanism(
        lambda *x: ops.torch_relative_attention(*x, 0.4, sinks, window),
        lambda *x: torch_cached_relative_attention(
            *x[:4], *_pages(x[4], window), x[5][..., :5], x[5][..., 5:], 0.4, sinks, window
        ),
        [(4, 5), (2, 5), (2, 3), (4, 6)],
        (2, PAGE, 8),
        paged=True,
    )


def _relative_with_sinks() -> Mechanism:
    """Sinks that each query brings."""
    return Mechanism(
        lambda *x: ops.torch_relative_attention(*x[:4], 0.4, x[4], 3),
        lambda *x: torch_cached_relative_attention(
            *x[:4], *_pages(x[5]), x[6][..., :5], x[6][..., 5:], 0.4, x[4], 3
        ),
        [(4, 5), (2, 5), (2, 3), (4, 6), (4,)],
        (2, PAGE, 8),
        paged=True,
    )


def _dynamic_mask(keep: int, window: int | None = None) -> Mechanism:
    """A page holds keys, values and biases side by side."""
    return Mechanism(
        lambda q, k, v, bias: ops.torch_dynamic_mask_attention(q, k, v, bias, keep, 0.4, window),
        lambda q, k, v, bias, info, cache: torch_cached_dynamic_mask_attention(
            q,
            k,
            v,
            bias,
            *_pages(info, window),
            cache[..., :5],
            cache[..., 5:8],
            cache[..., 8:],
            keep,
            0.4,
            window,
        ),
        [(4, 5), (2, 5), (2, 3), (2,)],
        (2, PAGE, 9),
        paged=True,
    )


def _attention(window: int | None = None, chunk: int | None = None) -> Mechanism:
    """A page holds keys and values side by side."""
    sinks = _random(4)
    options = 0.4, window, None, None, chunk
    seen = min((each for each in (window, chunk) if each is not None), default=None)
    return Mechanism(
        lambda *x: ops.torch_attention(
            *x, None, 0.0, True, 0.4, sinks, window, None, "bsnd", None, chunk
        ),
        lambda *x: torch_cached_attention(
            *x[:3], *_pages(x[3], seen), x[4][..., :5], x[4][..., 5:], sinks, *options
        ),
        [(4, 5), (2, 5), (2, 3)],
        (2, PAGE, 8),
        paged=True,
    )


def _rope_attention() -> Mechanism:
    """Each token has its own cosines and sines, of four of five channels."""
    options = "rope_cached", None, None, 0.4, 3
    return Mechanism(
        lambda *x: ops.torch_rope_attention(*x, scale=0.4, sliding_window=3),
        lambda *x: torch_cached_rope_attention(
            *x[:5], *_pages(x[5], 3), x[6][..., :5], x[6][..., 5:], *options
        ),
        [(4, 5), (2, 5), (2, 3), (4,), (4,)],
        (2, PAGE, 8),
        paged=True,
    )


def _rope_mla() -> Mechanism:
    weight = _random(HEADS * (NOPE + VALUE), RANK)
    return Mechanism(
        lambda *x: ops.torch_rope_mla(*x[:4], weight, *x[4:]),
        lambda *x: torch_cached_rope_mla(*x[:4], weight, *x[4:6], *_pages(x[6]), x[7]),
        [*LATENT, (ROPE,), (ROPE,)],
        (1, PAGE, RANK + ROPE),
        paged=True,
    )


def _block_attention(window: int | None) -> Mechanism:
    """No token is in a block, which may come in one step only."""

    def cached(*x: Any) -> Tensor:
        blocks = torch.full((x[0].shape[1],), -1, dtype=torch.int32)
        caches = x[4][..., :5], x[4][..., 5:]
        return torch_cached_block_attention(
            blocks, *x[:3], *_pages(x[3], window), *caches, None, 0.4, window
        )

    return Mechanism(
        lambda *x: ops.torch_attention(*x, None, 0.0, True, 0.4, None, window),
        cached,
        [(4, 5), (2, 5), (2, 3)],
        (2, PAGE, 8),
        paged=True,
    )


MECHANISMS = {
    "attention": _attention,
    "attention in a window": lambda: _attention(window=3),
    "attention in chunks": lambda: _attention(chunk=4),
    "attention in a window in chunks": lambda: _attention(window=3, chunk=5),
    "attention that rotates": _rope_attention,
    "mla that rotates": _rope_mla,
    "block attention": lambda: _block_attention(None),
    "block attention in a window": lambda: _block_attention(3),
    "conv": lambda: _conv(groups=6, dilation=1),
    "grouped, dilated conv": lambda: _conv(groups=2, dilation=2),
    "ssm": _ssm,
    "ssm that can be taken back": _replayed_ssm,
    "residual add": _residual_add,
    "head input": _head_input,
    "selective scan": lambda: _scan(gated=False),
    "gated selective scan": lambda: _scan(gated=True),
    "gated delta rule": _delta_rule,
    "kda": _kda,
    "dplr delta rule": _dplr_delta_rule,
    "lightning attention": _lightning,
    "gated linear attention": lambda: _gated_linear(weighted=False),
    "gated linear attention that weights the token itself": lambda: _gated_linear(weighted=True),
    "linear recurrence": _recurrence,
    "token shift": _shift,
    "wkv": _wkv,
    "mlstm": _mlstm,
    "delta rule": _plain_delta_rule,
    "mla": lambda: _mla(None),
    "scaled mla": lambda: _mla(0.3),
    "windowed mla": lambda: _windowed_mla(3),
    "attention to blocks": lambda: _sparse(2, 3, weighted=False),
    "attention to many blocks": lambda: _sparse(9, 2, weighted=True),
    "gated pool": lambda: _pool(3, overlap=False),
    "gated pool of long blocks": lambda: _pool(5, overlap=False),
    "gated pool that overlaps": lambda: _pool(2, overlap=True),
    "gated pool of blocks of one token": lambda: _pool(1, overlap=True),
    "compressed attention": lambda: _compressed(3, 4),
    "compressed attention to long blocks": lambda: _compressed(5, 2),
    "compressed attention to pairs": lambda: _compressed(2, 3),
    "compressed attention to chosen blocks": lambda: _compressed(2, 3, top_k=2),
    "compressed attention to many chosen blocks": lambda: _compressed(3, 20, top_k=9),
    "relative attention with sinks of queries": _relative_with_sinks,
    "relative attention": lambda: _relative(None),
    "relative attention in a window": lambda: _relative(4),
    "dynamic mask": lambda: _dynamic_mask(3),
    "dynamic mask in a window": lambda: _dynamic_mask(2, window=4),
    "indexed mla": lambda: _indexed_mla(3),
    "indexed mla with a window": lambda: _indexed_mla(4, window=5),
    "indexed mla with room for all": lambda: _indexed_mla(20),
}


def test_every_cached_op_of_the_registry_is_here() -> None:
    registered = {
        name
        for name, source in op_sources().items()
        if source.mutates and name.startswith("torch_")
    }
    called = {name for make in MECHANISMS.values() for name in make().cached.__code__.co_names}
    assert registered <= called


LENGTHS = (9, 6, 12, 1, 3)
ARRIVALS = (0, 1, 3, 4, 9)


def _plan() -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, start, end): each in chunks of up to 5 tokens first, then token by
    token.
    """
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for index, (length, step) in enumerate(zip(LENGTHS, ARRIVALS, strict=True)):
        start = 0
        while start < length:
            size = random.randint(1, 5) if start < length // 2 else 1
            end = min(start + size, length)
            steps.setdefault(step, []).append((index, start, end))
            start, step = end, step + 1
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_cached_op_continues_each_sequence(name: str) -> None:
    _check(MECHANISMS[name](), torch.float64, 1e-9)


@pytest.mark.parametrize("name", [name for name, make in MECHANISMS.items() if make().paged])
def test_pages_may_have_another_dtype(name: str) -> None:
    _check(MECHANISMS[name](), torch.float32, 1e-4)


@pytest.mark.parametrize(
    "name", ["indexed mla", "indexed mla with a window", "dynamic mask", "attention to blocks"]
)
def test_equals_are_chosen_alike_in_prompts_chunks_and_batches(name: str) -> None:
    """Small integers make exact scores, most of which tie."""
    _check(
        MECHANISMS[name](), torch.float64, 1e-9, lambda *shape: torch.randint(-1, 2, shape).double()
    )


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_fake_kernel_knows_shape_and_dtype_of_the_result(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op, source in op_sources().items():
        if source.mutates and op.startswith("torch_"):
            monkeypatch.setitem(globals(), op, _beside_its_fake(op, source.function))
    info = SequenceInfo(
        max_batch_size=4,
        max_seq_len=16,
        max_num_tokens=64,
        page_size=PAGE,
        device=torch.device("cpu"),
    )
    set_decode_example(info, 4, kv_len=9)
    mechanism = MECHANISMS[name]()
    mechanism.cached(
        *(_random(1, 4, *each) for each in mechanism.shapes),
        info.args,
        _random(8, *mechanism.cache),
    )


def _beside_its_fake(op: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with FakeTensorMode() as mode:
            fake = getattr(ops, op)(*tree_map_only(Tensor, mode.from_tensor, args))
        result = function(*args)
        assert (result.shape, result.dtype) == (fake.shape, fake.dtype)
        return result

    return run


def _check(
    mechanism: Mechanism,
    dtype: torch.dtype,
    tolerance: float,
    draw: Callable[..., Tensor] = _random,
) -> None:
    """Serve sequences by a cache of `dtype`, step by step, and compare with each one's whole."""
    plan = _plan()
    inputs = [[draw(1, length, *shape) for shape in mechanism.shapes] for length in LENGTHS]
    expected = [mechanism.whole(*each) for each in inputs]
    info = SequenceInfo(
        max_batch_size=8,
        max_seq_len=16,
        max_num_tokens=64,
        page_size=PAGE,
        device=torch.device("cpu"),
    )
    info.decode_sizes = [1, 4, 8]
    # What earlier owners left, what unused rows bring and what leaves a window may be no numbers.
    cache = torch.full((40 if mechanism.paged else 8, *mechanism.cache), torch.nan, dtype=dtype)
    slots = [3, 1, 6, 2, 3]  # the last takes the slot of the first, which has ended by then
    assert not any({0, 4} <= {index for index, _, _ in step} for step in plan)
    for step in plan:
        chosen, starts, ends = (np.array(column) for column in zip(*step, strict=True))
        pages = np.array([[1 + 4 * index + page for page in range(4)] for index in chosen])
        ids = np.zeros((ends - starts).sum(), dtype=np.int64)
        info.set_batch(
            ids, starts, ends - starts, pages, slots=np.array([slots[index] for index in chosen])
        )
        rows = [
            torch.cat([inputs[i][part][:, a:b] for i, a, b in step], 1)
            for part in range(len(mechanism.shapes))
        ]
        padding = info.args["input_ids"].shape[1] - rows[0].shape[1]
        rows = [
            torch.cat([row, torch.nan * _random(1, padding, *row.shape[2:])], 1) for row in rows
        ]
        outputs = mechanism.cached(*rows, info.args, cache)
        offset = 0
        for index, start, end in step:
            actual = outputs[:, offset : offset + end - start]
            assert actual.dtype == torch.float64
            torch.testing.assert_close(
                actual, expected[index][:, start:end], rtol=tolerance, atol=tolerance
            )
            offset += end - start


def test_a_decode_step_reads_nothing_back_from_the_device() -> None:
    """On the meta device a value cannot be read (the functions themselves, since an op has a fake
    kernel there).
    """
    info = SequenceInfo(
        max_batch_size=4,
        max_seq_len=16,
        max_num_tokens=64,
        page_size=PAGE,
        device=torch.device("cpu"),
    )
    set_decode_example(info, 4, kv_len=9)
    on_meta = {
        name: tensor if name == "batch_info_host" else tensor.to("meta")
        for name, tensor in info.args.items()
    }
    with torch.device("meta"):
        for mechanism in (make() for make in MECHANISMS.values()):
            cache = torch.zeros((8, *mechanism.cache), dtype=torch.float64)
            with nullcontext() if mechanism.can_be_captured else pytest.raises(RuntimeError):
                outputs = mechanism.cached(
                    *(_random(1, 4, *shape) for shape in mechanism.shapes), on_meta, cache
                )
                assert outputs.shape[:2] == (1, 4)
