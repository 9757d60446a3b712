"""The state of the running sequences as host arrays with a row for each slot; a step's metadata is
gathered from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onboard.cache.step_buffer import (
    CHOICE_NAMES,
    ROW_NAMES,
    SAMPLING_NAMES,
    HostFields,
    IntArray,
)
from onboard.ops.sampling.sampling import uniforms


class SequenceRows:
    """One row for each slot; row 0 belongs to padding and has no tokens and no pages.

    The scheduler and `SequencePages` update a row when something changes: a token arrives, a page
    is allocated or freed, tokens are cached.
    """

    def __init__(
        self,
        slots: int,
        max_seq_len: int,
        pages_per_sequence: int,
        groups: int = 1,
        codebooks: int = 1,
    ) -> None:
        self.tokens = np.zeros((slots, max_seq_len), dtype=np.int32 if codebooks == 1 else np.int64)
        """[slots, max_seq_len] tokens of each sequence at its admission, and drafts."""
        self.num_tokens = np.zeros(slots, dtype=np.int64)
        """[slots] how many these are."""
        self.latest = np.zeros(slots, dtype=np.int64)
        """[slots] the latest generated token, or its placeholder token (`-slot`) while only the
        device knows it.
        """
        self.sampling = np.zeros((slots, len(SAMPLING_NAMES)), dtype=np.float32)
        """[slots, 4] sampling parameters, in the order of `SAMPLING_NAMES`."""
        self.keys = np.zeros(slots, dtype=np.uint64)
        """[slots] keys of the random numbers."""
        self.adapters = np.zeros(slots, dtype=np.int64)
        """[slots] 0, or 1 + the index of the sequence's adapter."""
        self.codebooks = codebooks
        """Number of codes of a token; each needs a random number."""
        self.drawn = self.filtered = False
        """Whether the step written last samples at all (temperature above 0), and whether with
        top_k, top_p or min_p.
        """
        self.num_cached = np.zeros(slots, dtype=np.int64)
        """[slots] leading tokens whose keys and values are cached, those of launched steps
        included.
        """
        self.tables: npt.NDArray[np.int32] = np.zeros(
            (groups, slots, pages_per_sequence), dtype=np.int32
        )
        """[groups, slots, pages] page numbers; 0 where a sequence has none."""
        self.widths = np.zeros(slots, dtype=np.int64)
        """[slots] number of leading columns of the tables that are in use."""
        self.changed: set[int] = set()
        """Slots whose pages have changed since the block tables of a step were last updated."""

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        """Start a row: set its tokens; none is cached, and it has no pages."""
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_cached[slot] = 0
        self.tables[:, slot, : self.widths[slot]] = 0
        self.widths[slot] = 0
        self.changed.add(slot)

    def tokens_at(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Return the tokens of sequences at these positions, [tokens]: from the admitted tokens, or
        the latest one, placeholders included.
        """
        return np.where(
            positions < self.num_tokens[slots], self.tokens[slots, positions], self.latest[slots]
        )

    def put(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Write tokens from position `start` on, for the next step to read; those that the model does
        not choose itself are overwritten later.
        """
        self.tokens[slot, start : start + len(tokens)] = tokens
        self.num_tokens[slot] = start + len(tokens)

    def rewind(self, slot: int, num_cached: int, latest: int) -> None:
        """Set how many leading tokens count as cached, and the latest token, which comes after
        them.
        """
        self.num_cached[slot] = num_cached
        self.num_tokens[slot] = min(self.num_tokens[slot], num_cached)
        self.latest[slot] = latest

    def set_sampling(self, slot: int, sampling: Sequence[float], key: int) -> None:
        """Set the sampling parameters of a row and the key of its random numbers."""
        self.sampling[slot] = sampling
        self.keys[slot] = key

    def write_sampling(self, host: HostFields, slots: IntArray, lengths: IntArray) -> None:
        """Write the sampling parameters and random numbers of a step; `lengths` [sequences] are the
        cached tokens after it.
        """
        columns = self.sampling[slots].T
        for name, column in zip(SAMPLING_NAMES, columns, strict=True):
            host[name][: len(column)] = column
        self._look_at(columns)
        self.write_uniforms(host, slots, lengths)

    def write_choice(self, host: HostFields, slots: IntArray, lengths: IntArray) -> None:
        """Write what tokens are chosen with from rows of logits: after `lengths` [rows] tokens of the
        sequence in each of `slots` [rows].
        """
        for name, values in zip(ROW_NAMES, (slots, lengths), strict=True):
            host[name][: len(values)] = values
        self.write_sampling(host, slots, lengths)

    def write_uniforms(self, host: HostFields, slots: IntArray, lengths: IntArray) -> None:
        """Write the random numbers alone; the sequences are those of the last `write_sampling`.

        A number depends on the request's key and the token's index, not on the step, so that a
        request draws the same tokens in any batch.
        """
        if self.drawn and self.codebooks == 1:
            host[CHOICE_NAMES[-1]][: len(slots)] = uniforms(self.keys[slots], lengths)
        elif self.drawn:
            counters = lengths[:, None] * self.codebooks + np.arange(self.codebooks)
            host[CHOICE_NAMES[-1]][: len(slots)] = uniforms(self.keys[slots][:, None], counters)

    def _look_at(self, columns: npt.NDArray[np.float32]) -> None:
        temperature, top_k, top_p, min_p = columns
        self.drawn = bool(temperature.any())
        self.filtered = self.drawn and bool(
            ((top_k > 0) | (top_p < 1) | (min_p > 0))[temperature > 0].any()
        )

    def set_pages(self, slot: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Set the pages of a sequence from page index `first` on."""
        end = first + len(pages)
        self.tables[group, slot, first:end] = pages
        self.widths[slot] = max(self.widths[slot], end)
        self.changed.add(slot)
