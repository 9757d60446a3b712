"""What the cached graph is told of a step: the flat row of tokens and its metadata.

Each step's integers are written into one host buffer and reach the device in one copy
(`step_buffer.py`) once they are asked for; every input of the graph is a view. Running sequences
have rows (`rows.py`) from which a step is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from onboard.cache.budget import Limits
from onboard.cache.rows import SequenceRows
from onboard.cache.step_buffer import (
    CHOICE_NAMES,
    IntArray,
    Layout,
    StepBuffer,
    padded,
    table_names,
)
from onboard.modeling import ONE_CODEBOOK, Codebooks

METADATA_NAMES = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
"""What attention over pages takes."""
STATE_METADATA_NAMES = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
"""What a recurrence takes that keeps one state a sequence."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the tokens of one step lie, the last `padding` sequences of one token each included."""

    kv_lens: IntArray
    """[sequences] tokens cached after it."""
    longest: int
    """New tokens of one sequence, at most."""
    padding: int
    sequence: IntArray
    """[tokens] each token's sequence."""
    positions: IntArray
    """[tokens] each token's place in it."""
    ends: IntArray
    """[sequences] where the tokens of each end in the row."""


class SequenceInfo:
    """The inputs of the cached graph for one step: tokens, positions and the metadata of
    docs/architecture.md.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        page_size: int,
        device: torch.device,
        first_position: int = 0,
        snapshots: int = 0,
        codebooks: Codebooks = ONE_CODEBOOK,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max(max_num_tokens, max_batch_size)
        self.page_size = page_size
        self.device = device
        self.first_position = first_position
        """What a sequence's first token has in `position_ids`; nothing else counts from there."""
        self.snapshots = snapshots
        """Recurrent states that are kept for requests to come."""
        self.codebooks = codebooks
        """What a token stands for."""
        self.pages_per_sequence = -(-max_seq_len // page_size)
        self.decode_sizes: list[int] = []
        """Captured decode batch sizes, ascending: a decode-only batch is padded up to the next
        one.
        """
        self._range = np.arange(max(self.max_num_tokens, max_batch_size) + 3)
        self._info = torch.zeros(5, dtype=torch.int32)
        self._numbers = self._info.numpy()
        self.inputs: dict[str, torch.Tensor] = {}
        """Where the graph finds its inputs for this step: the same tensors for every decode batch
        of one size.
        """
        self.choice: dict[str, torch.Tensor] = {}
        """How each sequence's next token is chosen, by `CHOICE_NAMES`: no inputs of the graph."""
        self.num_sequences = 0
        """Sequences of this step, without padding."""
        self.set_groups(1)

    def set_groups(self, groups: int) -> None:
        """Lay the inputs out for sequences with `groups` tables of pages; those after the first are
        `..._1` and so on.

        What was captured or gathered before is void.
        """
        self.num_groups = groups
        self.pool_sizes = [1 + self.pages_per_sequence] * groups
        """Pages that each group has, the spare page 0 included: examples read and write no
        others.
        """
        # One sequence and one token more than the limits: `rope_length` may add a row.
        self.buffer = StepBuffer(
            sequences=self.max_batch_size + 1,
            tokens=self.max_num_tokens + 1,
            pages_per_sequence=self.pages_per_sequence,
            groups=groups,
            device=self.device,
            codebooks=self.codebooks.count,
        )
        self.rows = SequenceRows(
            self.max_batch_size + 1,
            self.max_seq_len,
            self.pages_per_sequence,
            groups,
            self.codebooks.count,
        )
        self._shown: IntArray | None = None  # the slots whose pages the block tables show
        self._places: dict[int, int] = {}  # where they do, by slot
        # Columns of theirs that may be other than 0
        self._filled = np.zeros(self.max_batch_size + 1, dtype=np.int64)
        self._decoded: IntArray | None = (
            None  # the very slots of the last step, if it was a plain decode step
        )
        self.set_decode_example(1)

    def set_rows(
        self,
        slots: IntArray,
        lengths: IntArray | None = None,
        *,
        rope_length: int = 0,
        position_ids: IntArray | None = None,
    ) -> None:
        """Describe one step of sequences that have rows: `lengths` [sequences] uncached tokens of
        each of `slots`.

        `lengths` None: one token each. The rest as for `set_batch`.
        """
        starts, plain = self.rows.num_cached[slots], not rope_length and position_ids is None
        if slots is self._decoded and lengths is None and plain:
            self._decode_on(slots, starts)
            return
        step = self._step(starts, lengths, rope_length)
        self._decoded = slots if step.longest == 1 and plain else None
        slots = padded(slots, step.padding, 0)
        owners = slots[step.sequence]
        page, layout = step.positions // self.page_size, self.buffer.layout_for(len(step.positions))
        layout.host["input_ids"][: len(owners)] = self.rows.tokens_at(owners, step.positions)
        for group, table in enumerate(self.rows.tables):
            self._write_mapping(layout, group, table[owners, page], step.positions)
        self._show(layout, slots)
        self.rows.write_sampling(layout.host, slots, step.kv_lens)
        self._finish(layout, step, slots, step.ends - 1, rope_length, position_ids)

    def _decode_on(self, slots: IntArray, starts: IntArray) -> None:
        """Describe one more decode step of the sequences that the last one had: only what has
        changed is written.
        """
        assert self._shown is not None
        layout, sequences, longest = (
            self.buffer.layout_for(len(self._shown)),
            len(slots),
            int(starts.max()),
        )
        assert longest < self.max_seq_len
        host, kv_lens, page = layout.host, starts + 1, starts // self.page_size
        host["kv_lens"][:sequences] = kv_lens
        host["input_ids"][:sequences] = self.rows.latest[slots]
        host["position_ids"][:sequences] = starts + self.first_position
        for group, table in enumerate(self.rows.tables):
            self._write_mapping(layout, group, table[slots, page], starts)
        self._show(layout, self._shown)
        self.rows.write_uniforms(host, slots, kv_lens)
        self._numbers[3] = longest + 1
        self.buffer.written(layout)

    def set_batch(
        self,
        token_ids: IntArray,
        starts: IntArray,
        lengths: IntArray,
        pages: IntArray,
        logits_rows: IntArray | None = None,
        *,
        slots: IntArray | None = None,
        rope_length: int = 0,
        position_ids: IntArray | None = None,
    ) -> None:
        """Describe one step of any sequences: prefill, chunked prefill, decode or a mixture.

        `token_ids` [tokens] are the new tokens of all sequences, one after the other; `starts`
        [sequences] how many tokens of each are cached; `lengths` [sequences] how many are new;
        `pages` [groups, sequences,
        <= pages_per_sequence], or without `groups` when there is one, each sequence's pages;
        `slots` [sequences] where its recurrent states lie (default: the spare slot 0, for models
        that have none). `logits_rows` are the rows whose logits are wanted (default: each
        sequence's last). `rope_length` makes the row's largest position at least `rope_length - 1`
        by a padding row, for models whose rotary table depends on it. `position_ids` [tokens] are
        the tokens' positions for the model where they are not their places in the sequence: an
        image's tokens may share some.
        """
        tables = pages[None] if pages.ndim == 2 else pages
        slots = np.zeros(len(lengths), dtype=np.int64) if slots is None else slots
        step = self._step(starts, lengths, rope_length)
        token_ids, slots = padded(token_ids, step.padding, 0), padded(slots, step.padding, 0)
        tables = np.pad(tables, ((0, 0), (0, step.padding), (0, 0)))
        assert len(token_ids) == len(step.positions)
        layout = self.buffer.layout_for(len(token_ids))
        layout.host["input_ids"][: len(token_ids)] = token_ids
        self._shown = self._decoded = None
        for group, table in enumerate(tables):
            self._write_mapping(
                layout,
                group,
                table[step.sequence, step.positions // self.page_size],
                step.positions,
            )
            shown = layout.host[table_names(group)[0]][: len(slots)]
            shown[:, : table.shape[1]] = table
            shown[:, table.shape[1] : self._filled[: len(slots)].max()] = 0
        self.buffer.widths[: len(slots)] = max(tables.shape[2], self._filled[: len(slots)].max())
        self._filled[: len(slots)] = tables.shape[2]
        self.rows.write_sampling(layout.host, np.zeros_like(slots), step.kv_lens)
        self._finish(
            layout,
            step,
            slots,
            step.ends - 1 if logits_rows is None else logits_rows,
            rope_length,
            position_ids,
        )

    def set_decode_example(self, size: int, kv_len: int = 1) -> None:
        """Set a decode batch of `size` sequences with `kv_len` keys each that read the same pages
        (from 1 on).

        For warm-up, measurement and capture: it has the shapes of a real step; what it computes is
        of no use.
        """
        kv = np.full(size, kv_len)
        self.set_batch(
            np.zeros(size, dtype=np.int64), kv - 1, np.ones_like(kv), self._example_pages(size)
        )

    def set_prefill_example(self, tokens: int) -> None:
        """Set a prefill of `tokens` tokens in sequences as long as possible, all in the same
        pages.
        """
        full, rest = divmod(min(tokens, self.max_batch_size * self.max_seq_len), self.max_seq_len)
        lengths = np.array([self.max_seq_len] * full + [rest] * (rest > 0))
        ids = np.zeros(lengths.sum(), dtype=np.int64)
        self.set_batch(ids, np.zeros_like(lengths), lengths, self._example_pages(len(lengths)))

    @property
    def args(self) -> dict[str, torch.Tensor]:
        """The graph's inputs for this step, on their way to the device from now on."""
        self.buffer.upload()
        return self.inputs

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states, as `Limits.num_slots`."""
        return self.limits.num_slots

    @property
    def limits(self) -> Limits:
        """What the inputs are laid out for."""
        return Limits(
            self.max_batch_size,
            self.max_seq_len,
            self.max_num_tokens,
            self.page_size,
            self.snapshots,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of a step's inputs on the device."""
        return self.buffer.num_bytes

    def _example_pages(self, sequences: int) -> IntArray:
        order = np.arange(self.pages_per_sequence)
        return np.stack(
            [np.tile(1 + order % max(size - 1, 1), (sequences, 1)) for size in self.pool_sizes]
        )

    def _step(self, starts: IntArray, lengths: IntArray | None, rope_length: int) -> _Step:
        """Say which token of which sequence each place of the row holds, padding included."""
        self.num_sequences = len(starts)
        assert len(starts) <= self.max_batch_size
        assert (starts if lengths is None else starts + lengths - 1).max() < self.max_seq_len
        if lengths is not None and lengths.max() == 1:
            lengths = None
        padding = self._padding(starts, lengths, rope_length)
        starts = padded(starts, padding, 0)
        order, count = self._range, len(starts)
        if lengths is None:  # decode, which has to be quick
            return _Step(starts + 1, 1, padding, order[:count], starts, order[1 : count + 1])
        lengths = padded(lengths, padding, 1)
        ends = np.cumsum(lengths)
        positions = order[: ends[-1]] - np.repeat(ends - starts - lengths, lengths)
        return _Step(
            starts + lengths,
            int(lengths.max()),
            padding,
            np.repeat(order[:count], lengths),
            positions,
            ends,
        )

    def _padding(self, starts: IntArray, lengths: IntArray | None, rope_length: int) -> int:
        """Return how many padding sequences the step needs: for its rotary table, or to reach a
        captured size.
        """
        count = len(starts)
        least = count + bool(
            rope_length and rope_length > (starts + (1 if lengths is None else lengths)).max()
        )
        if lengths is not None:
            return least - count
        return next((size for size in self.decode_sizes if size >= least), least) - count

    def _write_mapping(
        self, layout: Layout, group: int, pages: IntArray, positions: IntArray
    ) -> None:
        """Write where each token's key goes, of whose page the number is given."""
        target = layout.host[table_names(group)[1]][: len(positions)]
        np.multiply(pages, self.page_size, out=target, casting="unsafe")
        target += positions % self.page_size

    def _show(self, layout: Layout, slots: IntArray) -> None:
        """Bring the block tables up to date: as long as a batch stays together, only where pages
        have changed.

        No more columns are written than have pages, or had some: a longest sequence's would be
            thousands.
        """
        if self._shown is not slots and (
            self._shown is None or not np.array_equal(self._shown, slots)
        ):
            self._shown, self._places = (
                slots,
                {slot: place for place, slot in enumerate(slots.tolist())},
            )
            self._show_rows(layout, slice(len(slots)), slots)
        else:
            for slot in self.rows.changed & self._places.keys():
                place = self._places[slot]
                self._show_rows(layout, slice(place, place + 1), np.array([slot]))
        self.rows.changed.clear()

    def _show_rows(self, layout: Layout, places: slice, slots: IntArray) -> None:
        """Write some rows of the block tables."""
        filled, widths = self._filled[places], self.rows.widths[slots]
        width = max(filled.max(), widths.max())
        for group, table in enumerate(self.rows.tables):
            layout.host[table_names(group)[0]][places, :width] = table[slots, :width]
        filled[:], self.buffer.widths[places] = widths, width

    def _finish(
        self,
        layout: Layout,
        step: _Step,
        slots: IntArray,
        wanted: IntArray,
        rope_length: int,
        position_ids: IntArray | None,
    ) -> None:
        """Write what depends on neither tokens nor pages, and make the graph's inputs."""
        tokens, sequences, host = len(step.positions), len(slots), layout.host
        host["cu_seqlens"][1 : sequences + 1] = step.ends
        host["kv_lens"][:sequences] = step.kv_lens
        host["state_slots"][:sequences] = slots
        host["logits_gather_indices"][: len(wanted)] = wanted
        positions = host["position_ids"][:tokens]
        positions[:] = step.positions
        given = tokens - step.padding
        if position_ids is not None:
            positions[:given] = position_ids
        positions[:given] += self.first_position
        positions[given:] = max(rope_length - 1, 0)
        whole = step.longest > 1 and step.kv_lens.sum() == tokens
        self._numbers[:] = sequences, tokens, step.longest, step.kv_lens.max(), whole
        self.buffer.written(layout)
        self.inputs = self._views(layout, tokens, sequences, len(wanted))
        self.choice = layout.choices(sequences)

    def _views(
        self, layout: Layout, tokens: int, sequences: int, rows: int
    ) -> dict[str, torch.Tensor]:
        """Return the inputs' views; those of pure decode steps are kept, since making them takes a
        while.
        """
        key = (tokens, sequences, rows)
        if (known := layout.views.get(key)) is not None:
            return known
        counts = {"cu_seqlens": sequences + 1, "kv_lens": sequences, "state_slots": sequences}
        counts |= {table_names(group)[0]: sequences for group in range(self.num_groups)}
        counts["logits_gather_indices"] = rows
        fields = layout.device.items()
        views = {
            name: tensor[: counts.get(name, tokens)]
            for name, tensor in fields
            if name not in CHOICE_NAMES
        }
        for name in ("input_ids", "position_ids"):
            views[name] = views[name][None]
        views["batch_info_host"] = self._info
        if tokens == sequences == rows:
            layout.views[key] = views
        return views
