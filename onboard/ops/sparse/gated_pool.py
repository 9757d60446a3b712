"""Gated pooling of blocks of tokens, as it is and over a paged cache of the tokens that a block is
made of.

Tokens are counted in blocks from a text's first one on. A block has one entry, a mean of its
tokens' values that is weighted channel by channel; it stands with the block's last token
(DeepSeek-V4's compressed keys).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.attention.cached_attention import read_sequence, write_tokens
from onboard.ops.library import register_op


def span(bias: Tensor, overlap: bool) -> int:
    """Return the tokens that an entry is made of, of `bias` [block_size, channels]."""
    return len(bias) * (1 + overlap)


def _fake(
    values: Tensor, gates: Tensor, bias: Tensor, overlap: bool = False, *_: object, **__: object
) -> Tensor:
    return values.new_empty((*values.shape[:2], values.shape[2] // (1 + overlap)))


@register_op(_fake, carries_state=True)
def torch_gated_pool(values: Tensor, gates: Tensor, bias: Tensor, overlap: bool = False) -> Tensor:
    """Return the entry of each block with its last token, zeros with its others and those of an
    unfinished block.

    An entry is sum(softmax(gate + bias) * value) over the block's tokens, each channel by itself;
    the softmax is in float32 or wider.

    Args:
        values: [batch, sequence, channels].
        gates: like values.
        bias: [block_size, channels], by the place in the block.
        overlap: the first half of the channels counts for the next block's entry, the second for
            the own block's, so that an entry is made of two blocks; that of a text's first block of
            this one alone.

    Returns:
        [batch, sequence, channels], or half the channels with `overlap`.
    """
    return _spread(
        _entries(values, gates, bias, overlap),
        torch.zeros_like(_first(values, overlap)),
        len(bias),
        0,
    )


def _first(values: Tensor, overlap: bool) -> Tensor:
    return values[..., : values.shape[-1] // (1 + overlap)]


def _entries(values: Tensor, gates: Tensor, bias: Tensor, overlap: bool) -> Tensor:
    """Return the entries of the whole blocks that tokens [batch, tokens, channels] begin with,
    [batch, blocks, dim].
    """
    size = len(bias)
    blocks = values.shape[1] // size
    shape = len(values), blocks, size, values.shape[2]
    value, gate = (each[:, : blocks * size].reshape(shape) for each in (values, gates))
    gate = gate + bias
    if overlap:
        value, gate = _with_block_before(value, 0.0), _with_block_before(gate, -torch.inf)
    return _pooled(value, gate)


def _with_block_before(tokens: Tensor, fill: float) -> Tensor:
    """Return [batch, blocks, 2 * size, dim] of [batch, blocks, size, 2 * dim]: what the block
    before has for the next one, `fill` where there is none, then the own half."""
    before, own = tokens.chunk(2, dim=-1)
    shifted = torch.cat([torch.full_like(before[:, :1], fill), before[:, :-1]], dim=1)
    return torch.cat([shifted, own], dim=2)


def _pooled(value: Tensor, gate: Tensor) -> Tensor:
    """Return the sum of values [..., tokens, dim] that the softmax of their gates weighs, [...,
    dim].
    """
    weights = gate.softmax(dim=-2, dtype=torch.promote_types(gate.dtype, torch.float32))
    return (value * weights.to(value.dtype)).sum(dim=-2)


def _spread(entries: Tensor, out: Tensor, size: int, first: int) -> Tensor:
    """Write entries [batch, blocks, dim] to the rows of `out` that are the last tokens of blocks;
    return `out`.

    The first row of `out` is the token at `first`.
    """
    out[:, size - 1 - first % size :: size] = entries
    return out


def _fake_cached(
    values: Tensor, gates: Tensor, bias: Tensor, *rest: object, **options: object
) -> Tensor:
    overlap = options.get("overlap", rest[7] if len(rest) > 7 else False)
    assert isinstance(overlap, bool)
    return _fake(values, gates, bias, overlap)


@register_op(_fake_cached, mutates=("value_cache", "gate_cache"), cached_form_of="torch_gated_pool")
def torch_cached_gated_pool(
    values: Tensor,
    gates: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    batch_info_host: Tensor,
    value_cache: Tensor,
    gate_cache: Tensor,
    overlap: bool = False,
) -> Tensor:
    """`torch_gated_pool` of a flat row of tokens: store their values and gates, then pool the
    blocks that end here.

    A decode step pools for all sequences at once, as if each ended a block, and reads nothing back
    from the device.

    Args:
        values, gates, bias, overlap: as in `torch_gated_pool`, with a batch of one row.
        cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host: as in
            `torch_cached_attention`.
        value_cache: [pages, 1, page_size, channels], written to. As many tokens as an entry is made
            of are read.
        gate_cache: likewise.

    Returns:
        As `torch_gated_pool`, [1, tokens, ...]; zeros for tokens beyond the last sequence.
    """
    caches = (value_cache, gate_cache)
    for cache, tokens in zip(caches, (values, gates), strict=True):
        write_tokens(cache, tokens[0].unsqueeze(1), slot_mapping)
    sequences, _, longest_query, *_ = batch_info_host.tolist()
    if longest_query == 1:
        return _decoded(caches, bias, overlap, kv_lens, block_table).to(values.dtype).unsqueeze(0)
    out = _fake(values, gates, bias, overlap).zero_()
    size, starts, lengths = len(bias), cu_seqlens.tolist(), kv_lens.tolist()
    for index in range(sequences):
        rows, length = slice(starts[index], starts[index + 1]), lengths[index]
        new = length - (rows.stop - rows.start)
        before = min(int(overlap), new // size)  # blocks that the first one to end here needs
        first = (new // size - before) * size
        stored = (
            read_sequence(cache, block_table[index], length, first)[0, :, first:]
            for cache in caches
        )
        value, gate = (each.to(values.dtype) for each in stored)
        _spread(_entries(value, gate, bias, overlap)[:, before:], out[:, rows], size, new)
    return out


def _decoded(
    caches: tuple[Tensor, Tensor], bias: Tensor, overlap: bool, kv_lens: Tensor, block_table: Tensor
) -> Tensor:
    """Return what each sequence's last token has, [sequences, dim]: its block's entry if it ends
    the block.
    """
    size, count = len(bias), span(bias, overlap)
    lengths = kv_lens.long().unsqueeze(1)
    positions = lengths - count + torch.arange(count, device=kv_lens.device)
    at = positions.clamp(min=0)
    page_size = caches[0].shape[2]
    pages = block_table.long().gather(1, at // page_size)
    there = (positions >= 0).unsqueeze(-1)
    value, gate = (cache[pages, 0, at % page_size].masked_fill(~there, 0.0) for cache in caches)
    gate = gate + bias.repeat(1 + overlap, 1)
    if overlap:
        value, gate = _own_halves(value, size), _own_halves(gate, size)
    pooled = _pooled(value, gate.masked_fill(~there, -torch.inf))
    return torch.where(lengths % size == 0, pooled, torch.zeros_like(pooled))


def _own_halves(tokens: Tensor, size: int) -> Tensor:
    """Return of tokens [sequences, 2 * size, 2 * dim] the first half of the first block, the second
    of the other.
    """
    before, own = tokens.chunk(2, dim=-1)
    return torch.cat([before[:, :size], own[:, size:]], dim=1)
