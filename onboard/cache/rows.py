"""What running sequences have from step to step, as arrays: a step's metadata is gathered from
them, not rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onboard.cache.step_buffer import CHOICE_NAMES, SAMPLING_NAMES, HostFields, IntArray
from onboard.ops.sampling.sampling import uniforms


class SequenceRows:
    """One row a running sequence, by its slot; row 0 is the padding sequence, which has no tokens
    and no pages.

    Whoever runs the sequences updates a row when something changes: a token is known, a page is
    taken or freed, tokens are cached.
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
        """Tokens that each sequence began with."""
        self.num_tokens = np.zeros(slots, dtype=np.int64)
        """How many these are."""
        self.latest = np.zeros(slots, dtype=np.int64)
        """The token behind them that was chosen last; the slot, negated, where only the device
        knows it.
        """
        self.sampling = np.zeros((slots, len(SAMPLING_NAMES)), dtype=np.float32)
        """How each sequence's tokens are chosen, by `SAMPLING_NAMES`."""
        self.keys = np.zeros(slots, dtype=np.uint64)
        """Of each sequence's random numbers."""
        self.codebooks = codebooks
        """A token takes as many of these."""
        self.drawn = self.filtered = False
        """Whether some token of the step that was written last is drawn, and from a filtered
        distribution.
        """
        self.num_cached = np.zeros(slots, dtype=np.int64)
        """Leading tokens of each sequence whose keys and values are cached."""
        self.tables: npt.NDArray[np.int32] = np.zeros(
            (groups, slots, pages_per_sequence), dtype=np.int32
        )
        """Pages of each sequence, by group; 0 where it has none."""
        self.widths = np.zeros(slots, dtype=np.int64)
        """Leading columns of each sequence's tables behind which it has no pages: far fewer than a
        longest one has.
        """
        self.changed: set[int] = set()
        """Whose pages changed since a step's block tables were last brought up to date."""

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        """Begin a row: its tokens are known, none is cached, and it has no pages."""
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_cached[slot] = 0
        self.tables[:, slot, : self.widths[slot]] = 0
        self.widths[slot] = 0
        self.changed.add(slot)

    def tokens_at(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Return the tokens of sequences at these positions, of which none is behind the latest."""
        return np.where(
            positions < self.num_tokens[slots], self.tokens[slots, positions], self.latest[slots]
        )

    def set_sampling(self, slot: int, sampling: Sequence[float], key: int) -> None:
        """Say how the tokens of a row are chosen."""
        self.sampling[slot] = sampling
        self.keys[slot] = key

    def write_sampling(self, host: HostFields, slots: IntArray, lengths: IntArray) -> None:
        """Write how the next tokens of sequences in `slots` are chosen, of which `lengths` tokens
        are known.
        """
        self._write_parameters(host, self.sampling[slots].T)
        self.write_uniforms(host, slots, lengths)

    def write_uniforms(self, host: HostFields, slots: IntArray, lengths: IntArray) -> None:
        """Write the random numbers alone: of the sequences for which `write_sampling` was called
        last.
        """
        if self.drawn and self.codebooks == 1:
            host[CHOICE_NAMES[-1]][: len(slots)] = uniforms(self.keys[slots], lengths)
        elif self.drawn:
            counters = lengths[:, None] * self.codebooks + np.arange(self.codebooks)
            host[CHOICE_NAMES[-1]][: len(slots)] = uniforms(self.keys[slots][:, None], counters)

    def _write_parameters(self, host: HostFields, columns: npt.NDArray[np.float32]) -> None:
        for name, column in zip(SAMPLING_NAMES, columns, strict=True):
            host[name][: len(column)] = column
        temperature, top_k, top_p, min_p = columns
        self.drawn = bool(temperature.any())
        self.filtered = self.drawn and bool(
            ((top_k > 0) | (top_p < 1) | (min_p > 0))[temperature > 0].any()
        )

    def set_pages(self, slot: int, group: int, first: int, pages: Sequence[int]) -> None:
        """Write the pages of a sequence from its page number `first` on."""
        end = first + len(pages)
        self.tables[group, slot, first:end] = pages
        self.widths[slot] = max(self.widths[slot], end)
        self.changed.add(slot)
