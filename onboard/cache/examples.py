"""Examples of steps, for warm-up, measurement and capture: their shapes are those of real steps, their
results are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from onboard.cache.batch import SequenceInfo
from onboard.cache.step_buffer import IntArray, StepSizes

Example = Callable[..., None]
"""Writes the example of a step of a size (`StepSizes`), padded to it or not (`padding`)."""
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
    """Write a step of `size.tokens` tokens, as many in each of its sequences, of which there is one
    less than `size.sequences`; a token is chosen from each row of logits: from each token's, or from
    those of the sequences' last ones.
    """
    count = size.sequences - 1
    length = size.tokens // count
    behind = min(_CONTEXT, info.max_seq_len) - length
    rows = np.arange(size.tokens) if size.rows == size.tokens else None
    info.set_batch(
        np.zeros(size.tokens, dtype=np.int64),
        np.full(count, behind),
        np.full(count, length),
        _example_pages(info, count),
        rows,
        size=size if padding else None,
        after=np.ones(count if rows is None else size.rows, dtype=np.int64),
    )


def set_heads_example(info: SequenceInfo, size: StepSizes, *, padding: bool = True) -> None:
    """Write a decode batch of `size.sequences` sequences, which is not padded, for what chooses tokens
    from rows of logits.
    """
    ones = np.ones(size.sequences, dtype=np.int64)
    behind = np.full(len(ones), info.max_seq_len - 1)
    pages = _example_pages(info, len(ones))
    info.set_batch(0 * ones, behind, ones, pages, after=ones)


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


def prompt_examples(info: SequenceInfo) -> dict[bool, Example]:
    """Return examples of steps that read prompts, by whether all sequences begin."""
    return {whole: partial(set_step_example, info, whole=whole) for whole in (False, True)}


def draft_examples(info: SequenceInfo) -> dict[bool, Example]:
    """Return the example of steps that check drafts, whose sequences have begun before."""
    return {False: partial(set_drafts_example, info)}


def _example_pages(info: SequenceInfo, sequences: int) -> IntArray:
    order = np.arange(info.pages_per_sequence)
    return np.stack(
        [np.tile(1 + order % max(size - 1, 1), (sequences, 1)) for size in info.pool_sizes]
    )
