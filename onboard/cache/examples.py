"""Examples of steps, for warm-up, measurement and capture: their shapes are those of real steps, their
results are meaningless.
"""

from __future__ import annotations

import numpy as np

from onboard.cache.batch import SequenceInfo
from onboard.cache.step_buffer import IntArray, StepSizes

_CONTEXT = 1024
"""Tokens that sequences have behind them which decode, or have drafts."""


def set_decode_example(info: SequenceInfo, size: int, kv_len: int = 1) -> None:
    """Write a decode batch of `size` sequences with `kv_len` keys each, which all share the pages
    from 1 on.
    """
    kv = np.full(size, kv_len)
    info.set_batch(
        np.zeros(size, dtype=np.int64), kv - 1, np.ones_like(kv), _example_pages(info, size)
    )


def set_prefill_example(info: SequenceInfo, tokens: int) -> None:
    """Write a prefill of `tokens` tokens, in sequences of the maximum length that share their
    pages.
    """
    full, rest = divmod(min(tokens, info.max_batch_size * info.max_seq_len), info.max_seq_len)
    lengths = np.array([info.max_seq_len] * full + [rest] * (rest > 0))
    ids = np.zeros(lengths.sum(), dtype=np.int64)
    info.set_batch(ids, np.zeros_like(lengths), lengths, _example_pages(info, len(lengths)))


def set_drafts_example(info: SequenceInfo, size: StepSizes, *, padding: bool = True) -> None:
    """Write a step of `size.tokens` tokens that checks as many drafts in each of its sequences, of
    which there is one less than `size.sequences`.
    """
    count = size.sequences - 1
    lengths = np.full(count, size.tokens // count)
    behind = max(min(_CONTEXT, info.max_seq_len) - size.tokens // count, 0)
    rows = np.arange(size.rows)
    info.set_batch(
        np.zeros(size.tokens, dtype=np.int64),
        np.full(count, behind),
        lengths,
        _example_pages(info, count),
        rows,
        size=size if padding else None,
        after=rows + 1,
    )


def set_step_example(
    info: SequenceInfo, size: StepSizes, *, whole: bool, padding: bool = True
) -> None:
    """Write a step of `size.tokens` tokens, at most the longest sequence's: of one prompt that
    begins (`whole`), or of one that goes on, beside sequences that decode.
    """
    decoding = 0 if whole else (size.sequences - 1) // 2
    lengths = np.array([1] * decoding + [size.tokens - decoding])
    behind = min(_CONTEXT, info.max_seq_len) - 1
    starts = np.array([behind] * decoding + [0 if whole else 1])
    ids, pages = np.zeros(size.tokens, dtype=np.int64), _example_pages(info, len(lengths))
    info.set_batch(ids, starts, lengths, pages, size=size if padding else None)


def _example_pages(info: SequenceInfo, sequences: int) -> IntArray:
    order = np.arange(info.pages_per_sequence)
    return np.stack(
        [np.tile(1 + order % max(size - 1, 1), (sequences, 1)) for size in info.pool_sizes]
    )
