"""Second implementations, in float64, made to be obviously right: a loop over rows, no code shared
with the ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Options:
    """What an attention layer adds to softmax(q k) v."""

    scale: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None
    logit_cap: float | None = None
    alibi_slopes: Tensor | None = None
    chunk_size: int | None = None


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """rmse(actual - expected) / rmse(expected)."""
    assert actual.shape == expected.shape
    difference = actual.double() - expected.double()
    return (difference.square().mean().sqrt() / expected.double().square().mean().sqrt()).item()


def attend_row(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, bias: Tensor, sink: float, o: Options
) -> Tensor:
    """One query [d] over the keys [sk, d] that it may see; a sink of -inf is no sink."""
    logits = keys @ query * (o.scale if o.scale is not None else 1 / math.sqrt(len(query)))
    if o.logit_cap is not None:
        logits = o.logit_cap * (logits / o.logit_cap).tanh()
    logits = torch.where(seen, logits + bias, -math.inf)
    peak = max(float(logits.max()), sink)
    if peak == -math.inf:
        return torch.zeros(values.shape[-1], dtype=torch.float64)
    weights = (logits - peak).exp()
    return (weights / (weights.sum() + math.exp(sink - peak))) @ values


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of [b, s, n, d] in float64, query by query."""
    query, key, value = query.double(), key.double(), value.double()
    batch, sq, heads, _ = query.shape
    sk, kv_heads = key.shape[1:3]
    out = torch.empty(batch, sq, heads, value.shape[-1], dtype=torch.float64)
    j = torch.arange(sk)
    for b in range(batch):
        for n in range(heads):
            for i in range(sq):
                position = sk - sq + i
                seen, bias = torch.ones(sk, dtype=torch.bool), torch.zeros(sk, dtype=torch.float64)
                if mask is not None:
                    row = mask.expand(batch, heads, sq, sk)[b, n, i]
                    seen, bias = (
                        (row.clone(), bias) if row.dtype == torch.bool else (seen, row.double())
                    )
                windowed = options.sliding_window is not None
                if causal or windowed:
                    seen &= j <= position
                if windowed:
                    seen &= position - j < options.sliding_window
                if options.chunk_size is not None:
                    seen &= j // options.chunk_size == position // options.chunk_size
                if options.alibi_slopes is not None:
                    bias += float(options.alibi_slopes[n]) * (j - position)
                sinks = (
                    options.sinks
                    if options.sinks is None or options.sinks.dim() == 1
                    else options.sinks[b, i]
                )
                sink = -math.inf if sinks is None else float(sinks[n])
                group = n * kv_heads // heads
                out[b, i, n] = attend_row(
                    query[b, i, n], key[b, :, group], value[b, :, group], seen, bias, sink, options
                )
    return out


@dataclass
class Sequence:
    """The history of one sequence: keys and values of all its tokens, queries of the new ones ([s,
    n, d]).
    """

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass
class Batch:
    """A flat row of tokens with its metadata, and caches that already hold the tokens of earlier
    steps.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch_info_host: Tensor
    k_cache: Tensor
    v_cache: Tensor
    sequences: list[Sequence]

    def arguments(self) -> list[Tensor]:
        """The positional arguments of a cached attention op."""
        names = list(self.__dataclass_fields__)[:10]
        return [getattr(self, name) for name in names]


def make_batch(
    lengths: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
    spare_columns: int = 2,
    device: str | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Batch:
    """Random sequences of (new, all) tokens, in pages dealt out at random, with `padding` unused
    rows at the end.

    What no sequence has stored is NaN, as an earlier owner of a page may have left it; so are keys
    of unused rows. Cached keys and values are divided by `scales`, [kv_heads] each.
    """
    value_dim = dim if value_dim is None else value_dim
    pages_each = [-(-length // page_size) for _, length in lengths]
    order = (torch.randperm(sum(pages_each)) + 1).split(pages_each)  # page 0 stays spare
    caches = [
        torch.full((sum(pages_each) + 1, kv_heads, page_size, d), torch.nan).to(
            cache_dtype or dtype
        )
        for d in (dim, value_dim)
    ]
    block_table = torch.zeros(len(lengths), max(pages_each) + spare_columns, dtype=torch.int32)
    sequences, slots = [], []
    for row, (new, length) in enumerate(lengths):
        block_table[row, : pages_each[row]] = order[row]
        slot = (
            order[row][torch.arange(length) // page_size] * page_size
            + torch.arange(length) % page_size
        )
        key, value = (torch.randn(length, kv_heads, d).to(dtype) for d in (dim, value_dim))
        for index, (cache, tokens) in enumerate(zip(caches, (key, value), strict=True)):
            each = torch.ones(kv_heads) if scales is None else scales[index]
            for position in range(length - new):
                page, offset = divmod(int(slot[position]), page_size)
                cache[page, :, offset] = (tokens[position].double() / each[:, None]).to(cache.dtype)
        sequences.append(Sequence(torch.randn(new, heads, dim).to(dtype), key, value))
        slots.append(slot[length - new :])
    new_tokens = [new for new, _ in lengths]
    unused = Sequence(
        *(
            torch.full((padding, n, d), torch.nan).to(dtype)
            for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        )
    )
    rows = [
        torch.cat(
            [getattr(s, name)[-n:] for s, n in zip(sequences, new_tokens, strict=True)]
            + [getattr(unused, name)]
        )
        for name in ("query", "key", "value")
    ]
    ends = torch.tensor([0, *new_tokens]).cumsum(0)
    tensors = [
        *(row[None] for row in rows),
        ends.int(),
        torch.tensor([length for _, length in lengths]).int(),
        block_table,
        torch.cat([*slots, torch.arange(padding) % page_size]),
    ]
    info = torch.tensor(
        [len(lengths), int(ends[-1]), max(new_tokens), max(n for _, n in lengths)],
        dtype=torch.int32,
        device="cpu",
    )
    device = device or str(torch.get_default_device())
    return Batch(*(t.to(device) for t in tensors), info, *(c.to(device) for c in caches), sequences)


def forget(batch: Batch, options: Options) -> Batch:
    """Give up the pages that no query of a batch sees any more, as the runtime does: their numbers
    become 0.
    """
    page_size = batch.k_cache.shape[2]
    for row, sequence in zip(batch.block_table, batch.sequences, strict=True):
        position, first = len(sequence.key) - len(sequence.query), 0
        if options.sliding_window is not None:
            first = max(first, position - options.sliding_window + 1)
        if options.chunk_size is not None:
            first = max(first, position - position % options.chunk_size)
        row[: first // page_size] = 0
    return batch


def cached_attention(batch: Batch, options: Options) -> Tensor:
    """The answer that a cached attention must give, from the whole history of each sequence; zeros
    for unused rows.
    """
    outs = []
    for s in batch.sequences:
        key, value = (t.to(batch.k_cache.dtype).to(t.dtype)[None] for t in (s.key, s.value))
        outs.append(attention(s.query[None], key, value, options)[0])
    rows = sum(map(len, outs))
    unused = torch.zeros(batch.query.shape[1] - rows, *outs[0].shape[1:], dtype=torch.float64)
    return torch.cat([*outs, unused])[None]


def padded_to_captured(batch: Batch, padding: int, longest: int) -> None:
    """Let a batch with `padding` unused rows be a step that a captured one serves: one more sequence
    has these rows, on the spare page, two more have none, and what the host says is of another
    step, whose longest query has `longest` tokens.
    """
    last, added = int(batch.cu_seqlens[-1]) + padding, torch.tensor([padding, 0, 0])
    batch.cu_seqlens = torch.cat([batch.cu_seqlens, torch.full((3,), last)]).int()
    batch.kv_lens = torch.cat([batch.kv_lens, added]).int()
    rows, columns = batch.block_table.shape
    batch.block_table = torch.cat([batch.block_table, torch.zeros(3, columns)]).int()
    batch.batch_info_host = torch.tensor([rows + 3, last, longest, 7, 0], dtype=torch.int32)
