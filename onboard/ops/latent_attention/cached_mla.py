"""Multi-head latent attention over a paged cache of latents (DeepSeek-V2, arXiv:2405.04434, section
2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.attention.cached_attention import only_seen, read_sequence, write_tokens
from onboard.ops.attention.stored import as_read
from onboard.ops.latent_attention.mla import fake_mla, torch_mla
from onboard.ops.library import register_op


@register_op(fake_mla, mutates=("mla_cache",), cached_form_of="torch_mla")
def torch_cached_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    compressed_kv: Tensor,
    kpe: Tensor,
    kv_b_proj_weight: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    mla_cache: Tensor,
    scale: float | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """`torch_mla` of a flat row of tokens: store their latents, then attend over the pages.

    A decode step never expands keys and values: the weight is absorbed into queries and outputs, so
    that each head attends to the latents themselves. It reads nothing back from the device. Prefill
    expands them, sequence by sequence.

    Args:
        q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight: as in `torch_mla`, with a batch of one
            row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        mla_cache: [pages, 1, page_size, rank + rope_dim], written to.
        scale: factor of the scores; None: (nope_dim + rope_dim) ** -0.5.
        k_scale: [1] float32, by which latents and keys are divided before they are stored, and
            multiplied when they are read.

    Returns:
        [1, tokens, heads, value_dim]; zeros for tokens beyond the last sequence.
    """
    new = torch.cat([compressed_kv[0].unsqueeze(1), kpe[0]], dim=-1)
    write_tokens(mla_cache, new, slot_mapping, k_scale)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        pages = block_table[:, : -(-longest_kv // mla_cache.shape[2])]
        factor = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5 if scale is None else scale
        stored = as_read(mla_cache[pages].flatten(1, 3), q_nope.dtype, k_scale)
        out = _absorbed(q_nope[0], q_pe[0], kv_b_proj_weight, stored, kv_lens, factor)
        return out.unsqueeze(0)
    out = fake_mla(q_nope, q_pe, compressed_kv, kpe, kv_b_proj_weight).zero_()
    starts, lengths, rank = cu_seqlens.tolist(), kv_lens.tolist(), compressed_kv.shape[-1]
    for index in range(sequences):
        rows = slice(starts[index], starts[index + 1])
        stored = read_sequence(mla_cache, block_table[index], lengths[index])
        stored = as_read(stored, q_nope.dtype, k_scale).transpose(1, 2)
        latent, key = stored[:, :, 0, :rank], stored[..., rank:]
        out[:, rows] = torch_mla(
            q_nope[:, rows], q_pe[:, rows], latent, key, kv_b_proj_weight, True, scale
        )
    return out


def _absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    weight: Tensor,
    stored: Tensor,
    kv_lens: Tensor,
    scale: float,
) -> Tensor:
    """Return one token's attention for each sequence, [sequences, heads, value_dim]; `stored` is
    [sequences, keys, rank + rope_dim].
    """
    heads, nope = q_nope.shape[1:]
    rank = weight.shape[1]
    by_head = weight.view(heads, -1, rank)
    to_keys, to_values = by_head[:, :nope], by_head[:, nope:]
    seen = torch.arange(stored.shape[1], device=stored.device) < kv_lens.unsqueeze(1)
    stored = only_seen(stored, seen)
    queries = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope, to_keys), q_pe], dim=-1)
    scores = (queries @ stored.transpose(1, 2)).to(
        torch.promote_types(q_nope.dtype, torch.float32)
    ) * scale
    chances = F.softmax(scores.masked_fill(~seen.unsqueeze(1), -torch.inf), dim=-1).to(q_nope.dtype)
    return torch.einsum("bhr,hvr->bhv", chances @ stored[..., :rank], to_values)
