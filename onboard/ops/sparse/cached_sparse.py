"""Latent attention to chosen keys over a paged cache of latents (DeepSeek-V3.2, arXiv:2512.02556,
section 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.cached_attention import (
    first_seen,
    only_seen,
    read_sequence,
    write_tokens,
)
from onboard.ops.latent_attention.mla import fake_mla
from onboard.ops.library import register_op
from onboard.ops.sparse.sparse import torch_sparse_mla


def fake_cached_sparse_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    kpe: Tensor,
    weight: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    """Return an empty output, [1, tokens, heads, value_dim]."""
    return fake_mla(q_nope, q_pe, latent, kpe, weight)


@register_op(fake_cached_sparse_mla, mutates=("mla_cache",), cached_form_of="torch_sparse_mla")
def torch_cached_sparse_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    indices: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`torch_sparse_mla` of a flat row of tokens: store their latents, then attend to chosen ones
    in the pages.

    A decode step reads the chosen latents alone, however long a sequence is, with the weight
    absorbed into queries and outputs, and nothing back from the device. Prefill expands the
    latents, sequence by sequence.

    Args:
        q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight: as in `torch_sparse_mla`, with a batch
            of one row.
        indices: [1, tokens, top_k] integers, positions within each token's sequence; -1 stands for
            none. None: all are chosen.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        mla_cache: [pages, 1, page_size, rank + rope_dim], written to.
        scale, sinks, sliding_window: as in `torch_sparse_mla`.

    Returns:
        [1, tokens, heads, value_dim]; zeros for tokens beyond the last sequence.
    """
    write_tokens(
        mla_cache, torch.cat([compressed_kv[0].unsqueeze(1), kpe[0]], dim=-1), slot_mapping
    )
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        positions = _positions(indices, kv_lens, sliding_window, longest_kv)
        return _decode(
            q_nope, q_pe, kv_b_proj_weight, mla_cache, block_table, positions, scale, sinks
        )
    out = fake_mla(q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight).zero_()
    starts, lengths, rank = cu_seqlens.tolist(), kv_lens.tolist(), compressed_kv.shape[-1]
    for index in range(sequences):
        rows = slice(starts[index], starts[index + 1])
        first = first_seen(lengths[index] - (rows.stop - rows.start), sliding_window)
        stored = read_sequence(mla_cache, block_table[index], lengths[index], first)
        stored = stored.transpose(1, 2).to(q_nope.dtype)
        latent, key = stored[:, :, 0, :rank], stored[..., rank:]
        chosen = None if indices is None else indices[:, rows]
        queries = (q_nope[:, rows], q_pe[:, rows])
        out[:, rows] = torch_sparse_mla(
            *queries, latent, key, kv_b_proj_weight, chosen, scale, sinks, sliding_window
        )
    return out


def _decode(
    q_nope: Tensor,
    q_pe: Tensor,
    weight: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of each sequence's one token to its `positions`, [1, sequences, heads,
    value_dim].
    """
    factor = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale
    seen = positions >= 0
    stored = only_seen(_gathered(cache, block_table, positions).to(q_nope.dtype), seen)
    return _absorbed(q_nope[0], q_pe[0], weight, stored, seen, sinks, factor).unsqueeze(0)


def _positions(
    indices: Tensor | None, kv_lens: Tensor, window: int | None, longest_kv: int
) -> Tensor:
    """Return the positions that each sequence's last token sees, [sequences, keys]; -1 where there
    are fewer.
    """
    last = (kv_lens - 1).unsqueeze(1)
    if indices is None:
        count = longest_kv if window is None else min(window, longest_kv)
        return (last - torch.arange(count, device=kv_lens.device)).clamp(min=-1)
    near = indices[0] <= last
    return indices[0].masked_fill(
        ~(near if window is None else near & (indices[0] > last - window)), -1
    )


def _gathered(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """Return what a cache [pages, 1, page_size, dim] holds at `positions`, [sequences, keys, dim];
    -1 reads 0.
    """
    at = positions.clamp(min=0).long()
    page_size = cache.shape[2]
    pages = block_table.long().gather(1, at // page_size)
    return cache[pages, 0, at % page_size]


def _absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    weight: Tensor,
    stored: Tensor,
    seen: Tensor,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Return one token's attention for each sequence to its own `stored` latents, [sequences,
    heads, value_dim].
    """
    heads, nope = q_nope.shape[1:]
    rank = weight.shape[1]
    by_head = weight.view(heads, -1, rank)
    to_keys, to_values = by_head[:, :nope], by_head[:, nope:]
    queries = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope, to_keys), q_pe], dim=-1)
    scores = (queries @ stored.transpose(1, 2)).to(
        torch.promote_types(q_nope.dtype, torch.float32)
    ) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1).expand(len(scores), -1, -1)
        scores = torch.cat([scores, sink], dim=-1)
    chances = scores.softmax(dim=-1)[..., : stored.shape[1]].to(q_nope.dtype)
    return torch.einsum("bhr,hvr->bhv", chances @ stored[..., :rank], to_values)
