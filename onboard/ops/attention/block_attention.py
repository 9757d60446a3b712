"""Attention over a paged cache in which the tokens of an image see each other, as in Gemma 3
(arXiv:2503.19786).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import first_seen, read_sequence, write_tokens
from onboard.ops.attention.stored import as_output, as_read, fake_output
from onboard.ops.library import register_op


def _fake(
    blocks: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **keywords: object
) -> Tensor:
    return fake_output(query, value, rest, keywords, 16)


@register_op(
    _fake,
    mutates=("k_cache", "v_cache"),
    no_capture="torch_cached_block_attention reads lengths on the host",
)
def torch_cached_block_attention(
    blocks: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """`torch_cached_attention`, but new tokens of one block attend to each other in both
    directions.

    `blocks` [tokens] int32 is each new token's block, -1 outside of blocks; a block has to come in
    one step. A sliding window bounds how far back a token sees, within a block, too; a chunk bounds
    both directions. The other arguments and the result are those of `torch_cached_attention`.
    """
    write_tokens(k_cache, key[0], slot_mapping, k_scale)
    write_tokens(v_cache, value[0], slot_mapping, v_scale)
    caches = ((k_cache, k_scale), (v_cache, v_scale))
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for sequence in range(int(batch_info_host[0])):
        rows, length = slice(starts[sequence], starts[sequence + 1]), lengths[sequence]
        first = first_seen(length - (rows.stop - rows.start), sliding_window, chunk_size)
        where = block_table[sequence], length, first
        keys, values = (
            as_read(read_sequence(cache, *where), query.dtype, each) for cache, each in caches
        )
        mask = allowed(blocks[rows], length, sliding_window)
        new = query[:, rows].transpose(1, 2)
        options = (scale, sinks, None, logit_cap, "bnsd", alibi_slopes, chunk_size)
        mixed = torch_attention(new, keys, values, mask, 0.0, False, *options)
        out[:, rows] = mixed.transpose(1, 2)
    return as_output(out, out_scale)


def allowed(blocks: Tensor, length: int, sliding_window: int | None) -> Tensor:
    """Return which of `length` keys the last `len(blocks)` tokens see, [tokens, length] bool."""
    keys = torch.arange(length, device=blocks.device)
    queries = keys[length - len(blocks) :, None]
    of_keys = torch.cat((blocks.new_full((length - len(blocks),), -1), blocks))
    together = (blocks[:, None] == of_keys) & (of_keys >= 0)
    mask = (keys <= queries) | together
    return mask if sliding_window is None else mask & (queries - keys < sliding_window)
