"""Attention over a paged key-value cache (Kwon et al. 2023, arXiv:2309.06180): the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.stored import as_output, as_read, as_stored, fake_output
from onboard.ops.library import register_op

_Options = tuple[
    float | None, Tensor | None, int | None, float | None, str, Tensor | None, int | None
]
"""What `torch_attention` takes after `is_causal`."""
_Caches = tuple[tuple[Tensor, Tensor | None], ...]
"""Of keys and of values, with their scales."""


def fake_cached_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: object, **keywords: object
) -> Tensor:
    """Return an empty output of `torch_cached_attention`: [1, tokens, heads, value_dim]."""
    return fake_output(query, value, rest, keywords, 16)


def write_tokens(
    cache: Tensor, tokens: Tensor, slot_mapping: Tensor, scale: Tensor | None = None
) -> None:
    """Store tokens [tokens, kv_heads, dim] in their slots of a cache [pages, kv_heads, page_size,
    dim], divided by a scale if there is one.
    """
    size = cache.shape[2]
    if len(slot_mapping) == 1 and not cache.is_cuda:  # a copy takes less time than an indexed one
        page, place = divmod(int(slot_mapping), size)
        cache[page, :, place] = as_stored(tokens[0], cache.dtype, scale)
    else:
        pages = slot_mapping // size
        cache[pages, :, slot_mapping - pages * size] = as_stored(tokens, cache.dtype, scale)


def read_sequence(cache: Tensor, pages: Tensor, length: int, first: int = 0) -> Tensor:
    """Return the first `length` tokens of a sequence, [1, kv_heads, length, dim], with zeros for
    those before `first`.

    A page that has left a sequence's window is another's by now. What lies there may be no number,
    and no number times a weight of 0 is still none.
    """
    rows = cache.index_select(0, pages[: -(-length // cache.shape[2])])
    tokens = rows.transpose(0, 1).flatten(1, 2)[None, :, :length]
    tokens[:, :, :first].zero_()
    return tokens


def first_seen(position: int, sliding_window: int | None, chunk_size: int | None = None) -> int:
    """Return the first key that the query at `position` sees."""
    by_window = 0 if sliding_window is None else position - sliding_window + 1
    by_chunk = 0 if chunk_size is None else position // chunk_size * chunk_size
    return max(by_window, by_chunk, 0)


def only_seen(stored: Tensor, seen: Tensor) -> Tensor:
    """Return what was read for sequences [sequences, keys, ...], with zeros for the keys that are
    not `seen`.

    They are an earlier owner's, or nobody's, as in `read_sequence`; `seen` is [sequences, keys]
    bool.
    """
    return stored.masked_fill(~seen.view(*seen.shape, *[1] * (stored.dim() - 2)), 0.0)


@register_op(
    fake_cached_attention,
    mutates=("k_cache", "v_cache"),
    cached_form_of="torch_attention",
    no_capture="torch_cached_attention reads lengths on the host (attn_backend triton does not)",
)
def torch_cached_attention(
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
    """Causal attention of a flat row of tokens: store keys and values, then attend over the pages.

    Prefill, chunked prefill, decode and mixes of them are one to it: new tokens are the last ones.

    Args:
        query: [1, tokens, heads, head_dim].
        key: [1, tokens, kv_heads, head_dim].
        value: [1, tokens, kv_heads, value_dim].
        cu_seqlens: [sequences + 1] int32, where each sequence's new tokens start.
        kv_lens: [sequences] int32, keys of each sequence, the new ones included.
        block_table: [sequences, pages] int32, the pages of each sequence.
        slot_mapping: [tokens] int64, page * page_size + offset of each token.
        batch_info_host: [5] int32 on the CPU; the first entry is the number of sequences.
        k_cache: [pages, kv_heads, page_size, head_dim], written to; of any floating dtype.
        v_cache: [pages, kv_heads, page_size, value_dim], likewise.
        sinks, scale, sliding_window, logit_cap, alibi_slopes, chunk_size: as in `torch_attention`.
        k_scale, v_scale: [1] or [kv_heads] float32; keys and values are divided by it when they are
            stored, and multiplied when read.
        out_scale: as in `torch_attention`.

    Returns:
        [1, tokens, heads, value_dim]; zeros for tokens beyond the last sequence.
    """
    caches = ((k_cache, k_scale), (v_cache, v_scale))
    for (cache, each), tokens in zip(caches, (key, value), strict=True):
        write_tokens(cache, tokens[0], slot_mapping, each)
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    sequences = int(batch_info_host[0])
    options = (scale, sinks, sliding_window, logit_cap, "bnsd", alibi_slopes, chunk_size)
    tables = block_table[:sequences]
    if _share_a_call(starts[: sequences + 1], lengths[:sequences], query, alibi_slopes, chunk_size):
        mixed = _decode_together(query, caches, lengths[:sequences], tables, options)
    else:
        mixed = _attend_one_by_one(query, caches, starts, lengths, tables, options)
    return as_output(mixed, out_scale)


def _attend_one_by_one(
    query: Tensor,
    caches: _Caches,
    starts: list[int],
    lengths: list[int],
    tables: Tensor,
    options: _Options,
) -> Tensor:
    """Attend with the new queries of each sequence; those of no sequence give zeros."""
    _, _, window, _, _, _, chunk_size = options
    parts = []
    for sequence, pages in enumerate(tables):
        new = query[:, starts[sequence] : starts[sequence + 1]].transpose(1, 2)
        first = first_seen(lengths[sequence] - new.shape[2], window, chunk_size)
        keys, values = _keys_and_values(caches, pages, lengths[sequence], first, query)
        parts.append(torch_attention(new, keys, values, None, 0.0, True, *options).transpose(1, 2))
    if (rest := query.shape[1] - starts[len(tables)]) > 0:
        size = caches[1][0].shape[-1]
        parts.append(query.new_zeros((1, rest, query.shape[2], size)))
    return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).contiguous()


def _keys_and_values(
    caches: _Caches, pages: Tensor, length: int, first: int, query: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a sequence has in its caches from `first` on, in the query's dtype."""
    keys, values = (
        as_read(read_sequence(cache, pages, length, first), query.dtype, scale)
        for cache, scale in caches
    )
    return keys, values


def _share_a_call(
    starts: list[int],
    lengths: list[int],
    query: Tensor,
    alibi_slopes: Tensor | None,
    chunk_size: int | None,
) -> bool:
    """Whether all sequences decode one token, and are about as long: reading all as the longest is
    no great waste.
    """
    sequences = len(lengths)
    if sequences < 2 or query.shape[1] != sequences or starts != list(range(sequences + 1)):
        return False
    return (
        alibi_slopes is None and chunk_size is None and sequences * max(lengths) <= 2 * sum(lengths)
    )


def _decode_together(
    query: Tensor,
    caches: _Caches,
    lengths: list[int],
    tables: Tensor,
    options: _Options,
) -> Tensor:
    """Attend with one query of each sequence; keys beyond a sequence's length count nothing."""
    scale, sinks, window, logit_cap, layout, *_ = options
    longest = max(lengths)
    _, heads, page_size, _ = caches[0][0].shape
    rows = _head_rows(tables[:, : -(-longest // page_size)], heads)
    keys, values = (
        as_read(_read_rows(cache, rows)[:, :, :longest], query.dtype, each)
        for cache, each in caches
    )
    mask = _seen(lengths, window, query.device)
    if mask is not None:
        for stored in (keys, values):  # what an earlier owner of the page left may be no number
            stored.transpose(1, 2)[~mask] = 0
    allowed = None if mask is None else mask[:, None, None]
    new = query[0][:, :, None]
    mixed = torch_attention(
        new, keys, values, allowed, 0.0, False, scale, sinks, None, logit_cap, layout
    )
    return mixed[:, :, 0][None]


def _seen(lengths: list[int], window: int | None, device: torch.device) -> Tensor | None:
    """Return which keys each sequence's last token sees, [sequences, longest] bool; None: each sees
    all.
    """
    longest = max(lengths)
    if min(lengths) == longest and (window is None or window >= longest):
        return None
    places, ends = (
        torch.arange(longest, device=device),
        torch.tensor(lengths, device=device)[:, None],
    )
    seen = places < ends
    return seen if window is None else seen & (places >= ends - window)


def _head_rows(pages: Tensor, heads: int) -> Tensor:
    """Return the rows of a cache seen as [pages * heads, ...]: [sequences, heads, pages], so that
    one copy does.
    """
    return (
        pages[:, None] * heads
        + torch.arange(heads, dtype=pages.dtype, device=pages.device)[:, None]
    )


def _read_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens of rows [sequences, heads, pages], [sequences, heads, tokens, dim]."""
    return (
        cache.flatten(0, 1)
        .index_select(0, rows.flatten())
        .view(*rows.shape[:2], -1, cache.shape[-1])
    )
