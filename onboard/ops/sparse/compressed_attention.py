"""Attention to a window of tokens and to entries that stand for blocks of tokens, as it is and over
paged caches.

Tokens are counted in blocks from a text's first one on; the entry of a block stands with its last
token, and a query sees the entries of blocks that have ended with it or before it: all, or those
that were chosen for it (DeepSeek-V4's compressed sparse and heavily compressed attention). One
softmax goes over both kinds of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onboard.ops.attention.attention import torch_attention
from onboard.ops.attention.cached_attention import (
    first_seen,
    only_seen,
    read_sequence,
    write_tokens,
)
from onboard.ops.attention.stored import as_stored
from onboard.ops.library import register_op
from onboard.ops.sparse.sparse import chosen_keys


def _fake(query: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@register_op(
    _fake,
    carries_state=True,
    attends=True,
    described="Attention to a window of tokens and to compressed blocks before it",
)
def torch_compressed_attention(
    query: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    block_size: int,
    sliding_window: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention to the tokens of a window and to entries of blocks; keys are values, of one
    head.

    Args:
        query: [batch, sequence, heads, dim].
        kv: [batch, sequence, 1, dim].
        entries: [batch, sequence, dim]; that of a block's last token is the block's, the others
            count for nothing.
        chosen: [batch, sequence, count] integers, the numbers of the blocks that each query sees
            among those that have ended; -1 stands for none. None: all of these.
        block_size: tokens of a block.
        sliding_window: tokens that a query sees, itself the last.
        scale: factor of the scores; None: dim ** -0.5.
        sinks: [heads], a logit of each head that takes weight and gives nothing.

    Returns:
        Like query.
    """
    last = torch.arange(query.shape[1], device=query.device).unsqueeze(-1)
    near, ended = _masks(last, 0, kv.shape[1], block_size, sliding_window)
    shown = _among(ended, chosen, len(query))
    return _attend(query, kv, entries[:, block_size - 1 :: block_size], near, shown, scale, sinks)


def _masks(
    last: Tensor, first: int, length: int, block_size: int, window: int
) -> tuple[Tensor, Tensor]:
    """Return which tokens from `first` to `length` queries at `last` [queries, 1] see, and which
    blocks have ended.
    """
    distance = last - torch.arange(first, length, device=last.device)
    blocks = torch.arange(length // block_size, device=last.device)
    return (distance >= 0) & (distance < window), blocks < (last + 1) // block_size


def _among(ended: Tensor, chosen: Tensor | None, batch: int) -> Tensor:
    """Return which blocks queries see, [batch, queries, blocks], of those [queries, blocks] that
    have ended.
    """
    return (
        ended.expand(batch, -1, -1)
        if chosen is None
        else ended & chosen_keys(chosen, ended.shape[-1])[:, 0]
    )


def _attend(
    query: Tensor,
    kv: Tensor,
    entries: Tensor,
    near: Tensor,
    shown: Tensor,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to tokens [batch, tokens, 1, dim] that are `near` and entries [batch, blocks, dim]
    that are `shown`.

    Both masks are [batch, queries, keys], that of the tokens also without a batch.
    """
    keys = torch.cat([kv.to(query.dtype), entries.unsqueeze(2).to(query.dtype)], dim=1)
    mask = torch.cat([near.expand(len(query), -1, -1), shown], dim=-1).unsqueeze(1)
    return torch_attention(query, keys, keys, mask, 0.0, False, scale, sinks)


@dataclass(frozen=True)
class _Entries:
    """The entries of sequences in the pages [pages, 1, entries of a page, dim] in which their
    blocks end.
    """

    cache: Tensor
    page_size: int
    block_size: int

    def write(self, entries: Tensor, slots: Tensor, ends: Tensor) -> None:
        """Store the entries [tokens, dim] of tokens in `slots` that are the `ends` of blocks; page
        0 takes the rest.
        """
        pages = torch.where(ends, slots // self.page_size, 0)
        self.cache[pages, 0, slots % self.page_size // self.block_size] = as_stored(
            entries, self.cache.dtype
        )

    def read(self, table: Tensor, numbers: Tensor) -> Tensor:
        """Return the entries of blocks by their numbers [sequences, blocks], [sequences, blocks,
        dim]; -1 is any.
        """
        last = numbers.clamp(min=0).long() * self.block_size + self.block_size - 1
        pages = table.long().gather(1, last // self.page_size)
        return self.cache[pages, 0, last % self.page_size // self.block_size]

    def first(self, table: Tensor, count: int) -> Tensor:
        """Return a sequence's first entries, [1, count, dim]; `table` is its row, [1, pages]."""
        return self.read(table, torch.arange(count, device=table.device).unsqueeze(0))


@register_op(
    _fake, mutates=("kv_cache", "entry_cache"), cached_form_of="torch_compressed_attention"
)
def torch_cached_compressed_attention(
    query: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    entry_table: Tensor,
    entry_slots: Tensor,
    kv_cache: Tensor,
    entry_cache: Tensor,
    block_size: int,
    sliding_window: int,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`torch_compressed_attention` of a flat row of tokens, stored first, over the pages.

    A decode step attends for all sequences at once, reads the chosen entries alone, and nothing
    back from the device.

    Args:
        query, kv, entries, chosen, block_size, sliding_window, scale, sinks: as in
            `torch_compressed_attention`, with a batch of one row; blocks are counted within each
            token's sequence.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        entry_table, entry_slots: `block_table` and `slot_mapping` of the pages of entries.
        kv_cache: [pages, 1, page_size, dim], written to.
        entry_cache: [pages, 1, entries of a page, dim], written to: of blocks that end in the page.

    Returns:
        Like query; zeros for tokens beyond the last sequence.
    """
    write_tokens(kv_cache, kv[0], slot_mapping)
    store = _Entries(entry_cache, kv_cache.shape[2], block_size)
    sequences, _, longest_query, longest_kv, *_ = batch_info_host.tolist()
    if longest_query == 1:
        store.write(entries[0], entry_slots, kv_lens % block_size == 0)
        near, tokens = _window(kv_cache, block_table, kv_lens, min(sliding_window, longest_kv))
        shown, others = _blocks(store, entry_table, kv_lens, chosen, longest_kv)
        one = query.transpose(0, 1)
        return _attend(one, tokens, others, near, shown, scale, sinks).transpose(0, 1)
    out = torch.zeros_like(query)
    starts, lengths = cu_seqlens.tolist(), kv_lens.tolist()
    for index in range(sequences):
        rows, length = slice(starts[index], starts[index + 1]), lengths[index]
        last = torch.arange(length - (rows.stop - rows.start), length, device=query.device)
        store.write(entries[0, rows], entry_slots[rows], (last + 1) % block_size == 0)
        first = first_seen(length - len(last), sliding_window)
        tokens = read_sequence(kv_cache, block_table[index], length, first)[:, :, first:]
        others = store.first(entry_table[index : index + 1], length // block_size)
        near, ended = _masks(last.unsqueeze(-1), first, length, block_size, sliding_window)
        shown = _among(ended, None if chosen is None else chosen[:, rows], 1)
        seen = (tokens.transpose(1, 2), others, near, shown)
        out[:, rows] = _attend(query[:, rows], *seen, scale, sinks)
    return out


def _window(cache: Tensor, table: Tensor, kv_lens: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return which of the last `window` tokens each sequence has, [sequences, 1, window], and these
    [..., 1, dim].
    """
    places = kv_lens.long().unsqueeze(1) - window + torch.arange(window, device=kv_lens.device)
    at = places.clamp(min=0)
    pages = table.long().gather(1, at // cache.shape[2])
    seen = places >= 0
    return seen.unsqueeze(1), only_seen(cache[pages, :, at % cache.shape[2]], seen)


def _blocks(
    store: _Entries, table: Tensor, kv_lens: Tensor, chosen: Tensor | None, longest: int
) -> tuple[Tensor, Tensor]:
    """Return what each sequence's last token sees of the entries that it reads, [sequences, 1,
    blocks], and these.
    """
    every = torch.arange(longest // store.block_size, device=kv_lens.device).expand(
        len(kv_lens), -1
    )
    numbers = every if chosen is None else chosen[0].clamp(max=longest // store.block_size - 1)
    seen = (numbers >= 0) & (numbers < (kv_lens // store.block_size).unsqueeze(1))
    return seen.unsqueeze(1), only_seen(store.read(table, numbers), seen)
