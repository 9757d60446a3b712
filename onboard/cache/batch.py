"""The inputs of the cached graph for one step: the flat row of tokens and its metadata.

A step's numbers are gathered from the rows of the running sequences (`rows.py`), written into one
host buffer, and copied to the device in one copy (`step_buffer.py`), which starts when the inputs
are asked for. Every input of the graph is a view of the device buffer.
"""

from __future__ import annotations

import numpy as np
import torch

from onboard.cache.budget import Limits
from onboard.cache.captured_steps import CapturedSteps
from onboard.cache.rows import SequenceRows
from onboard.cache.step_buffer import (
    ADAPTER_IDS,
    PLAIN,
    IntArray,
    Layout,
    StepBuffer,
    StepKind,
    StepSizes,
    padded,
    table_names,
)
from onboard.cache.step_layout import StepLayout, laid_out, padding_to, single_tokens
from onboard.modeling import ONE_CODEBOOK, Codebooks

METADATA_NAMES = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
"""The metadata of an op over pages."""
STATE_METADATA_NAMES = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
"""The metadata of a recurrence, which keeps one state for each sequence."""


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
        adapters: bool = False,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max(max_num_tokens, max_batch_size)
        self.page_size = page_size
        self.device = device
        self.first_position = first_position
        """Position id of a sequence's first token; all other numbers count from 0."""
        self.snapshots = snapshots
        """Number of snapshots of recurrent states, kept for later requests."""
        self.codebooks = codebooks
        """How many codes a token stands for; one for text."""
        self.adapters = adapters
        """Whether tokens may have adapters."""
        self.is_adapted = False
        """Whether some of this step do."""
        self.pages_per_sequence = -(-max_seq_len // page_size)
        self.decode_sizes: list[int] = []
        """Batch sizes of the captured decode steps, ascending: a decode batch is padded to the next
        one.
        """
        self.captured: CapturedSteps | None = None
        """The captured steps that read prompts: others are padded to them."""
        self.captured_drafts: CapturedSteps | None = None
        """Those that check drafts."""
        self._range = np.arange(max(self.max_num_tokens, max_batch_size) + 3)
        self._info = torch.zeros(5, dtype=torch.int32)
        self.numbers = self._info.numpy()
        """Of `batch_info_host`, which the graph reads on the host."""
        self.inputs: dict[str, torch.Tensor] = {}
        """The graph's inputs for this step, views of the device buffer: the same tensor objects for
        every decode batch of one size, by which a captured CUDA graph is found.
        """
        self.choice: dict[str, torch.Tensor] = {}
        """What the step's tokens are chosen with, by `CHOICE_NAMES` and `ROW_NAMES`; the graph does
        not take it.
        """
        self.num_sequences = 0
        """Number of sequences of this step, without padding."""
        self.sizes = StepSizes(1, 1, 1)
        """Of this step."""
        self.written_tables: list[tuple[int, int, int]] | None = None
        """Rows of block tables that were written since other ranks were told: first, last and number
        of columns; None where nobody is told.
        """
        self.set_groups(1)

    def set_groups(self, groups: int) -> None:
        """Lay the inputs out anew for `groups` groups of pages, each with a block table and a slot
        mapping.

        Inputs and captured CUDA graphs from before become invalid.
        """
        self.num_groups = groups
        self.pool_sizes = [1 + self.pages_per_sequence] * groups
        """Number of pages of each group, the spare page 0 included; examples use no others."""
        # One sequence and one token more than the limits: `rope_length` may add a row.
        self.buffer = StepBuffer(
            sequences=self.max_batch_size + 1,
            tokens=self.max_num_tokens + 1,
            pages_per_sequence=self.pages_per_sequence,
            groups=groups,
            device=self.device,
            codebooks=self.codebooks.count,
            adapters=self.adapters,
        )
        self.rows = SequenceRows(
            self.max_batch_size + 1,
            self.max_seq_len,
            self.pages_per_sequence,
            groups,
            self.codebooks.count,
        )
        # What the block tables in the host buffer hold: the slot of each row, the row of each slot,
        # and how many columns of each row may be other than 0
        self._shown: IntArray | None = None
        self._places: dict[int, int] = {}
        self._filled = np.zeros(self.max_batch_size + 1, dtype=np.int64)
        self._decoded: IntArray | None = (
            None  # the very slots of the last step, if it was a plain decode step
        )
        one = np.ones(1, dtype=np.int64)
        self.set_batch(0 * one, 0 * one, one, np.zeros((groups, 1, 1), dtype=np.int64))

    def set_rows(
        self,
        slots: IntArray,
        lengths: IntArray | None = None,
        *,
        rope_length: int = 0,
        position_ids: IntArray | None = None,
        logits_rows: IntArray | None = None,
        captured: bool = True,
    ) -> None:
        """Write one step of the running sequences in `slots`: the next `lengths` [sequences]
        uncached tokens of each; None: one token each.

        The other arguments are those of `set_batch`, but that a token is chosen from each of
        `logits_rows`; `captured`: one that reads prompts or drafts may be padded to a captured step.
        """
        starts, plain = self.rows.num_cached[slots], not rope_length and position_ids is None
        if slots is self._decoded and lengths is None and plain:
            self._decode_on(slots, starts)
            return
        captured, by_row = captured and plain, logits_rows is not None
        size = self._captured_size(slots, starts, lengths, logits_rows) if captured else None
        step = self._step(starts, lengths, rope_length, size)
        self._decoded = slots if step.longest == 1 and plain and not by_row else None
        slots = padded(slots, step.padding, 0)
        owners, page = slots[step.sequence], step.positions // self.page_size
        layout = self.buffer.layout_for(len(step.positions), by_row=by_row)
        layout.host["input_ids"][: len(owners)] = self.rows.tokens_at(owners, step.positions)
        if self.adapters:
            layout.host[ADAPTER_IDS][: len(owners)] = own = self.rows.adapters[owners]
            self.is_adapted = bool(own.any())
        for group, table in enumerate(self.rows.tables):
            self._write_mapping(layout, group, table[owners, page], step.positions)
        self._show(layout, slots)
        if logits_rows is None:
            wanted = step.ends - 1
            self.rows.write_sampling(layout.host, slots, step.kv_lens)
        else:
            rows, after = slots[step.sequence[logits_rows]], step.positions[logits_rows] + 1
            wanted = self._write_choice(layout, logits_rows, rows, after, size)
        kind = StepKind(by_row, size is not None)
        self._finish(layout, step, slots, wanted, rope_length, position_ids, kind)

    def _decode_on(self, slots: IntArray, starts: IntArray) -> None:
        """Write the next decode step of an unchanged batch: only the numbers that have changed.

        All else is in the host buffer from the step before: `layout_for` has waited for that step's
        copy, so overwriting is safe, and nothing else writes to the buffer in between. If the token
        of that step has not reached the host, `rows.latest` is its placeholder token.
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
        self.numbers[3] = longest + 1
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
        adapter: int = 0,
        size: StepSizes | None = None,
        after: IntArray | None = None,
    ) -> None:
        """Write one step of any sequences: prefill, chunked prefill, decode or a mixture.

        Args:
            token_ids: [tokens] the new tokens of all sequences, one sequence after the other.
            starts: [sequences] number of cached tokens.
            lengths: [sequences] number of new tokens.
            pages: [groups, sequences, <= pages_per_sequence] page numbers; without the first
                dimension if there is one group.
            logits_rows: indices into the row of tokens whose logits are computed; None: each
                sequence's last token.
            slots: [sequences] slots of the recurrent states; None: the spare slot 0, for models
                without states.
            rope_length: a padding sequence makes the largest position at least `rope_length - 1`,
                for models whose rotary table depends on it.
            position_ids: [tokens] positions for the model, where they differ from the index in the
                sequence (an image's tokens may share one); None: they do not.
            adapter: of all sequences, 0 for none, or 1 + its index.
            size: of the captured step to pad it to, if any.
            after: [rows] a token is chosen from each row of logits, as one after so many tokens of
                the sequence in its slot; None: one for each sequence, the likeliest.
        """
        tables = pages[None] if pages.ndim == 2 else pages
        slots = np.zeros(len(lengths), dtype=np.int64) if slots is None else slots
        step = self._step(starts, lengths, rope_length, size)
        token_ids, slots = padded(token_ids, step.padding_tokens, 0), padded(slots, step.padding, 0)
        tables = np.pad(tables, ((0, 0), (0, step.padding), (0, 0)))
        assert len(token_ids) == len(step.positions)
        layout = self.buffer.layout_for(len(token_ids), by_row=after is not None)
        layout.host["input_ids"][: len(token_ids)] = token_ids
        if self.adapters:
            layout.host[ADAPTER_IDS][: len(token_ids)] = adapter
            self.is_adapted = adapter > 0
        self._shown = self._decoded = None
        self._write_tables(layout, step, tables, len(slots))
        wanted = step.ends - 1 if logits_rows is None else logits_rows
        if after is None:
            self.rows.write_sampling(layout.host, np.zeros_like(slots), step.kv_lens)
        else:
            rows = slots if logits_rows is None else slots[step.sequence[wanted]]
            wanted = self._write_choice(layout, wanted, rows, after, size)
        kind = StepKind(after is not None, size is not None)
        self._finish(layout, step, slots, wanted, rope_length, position_ids, kind)

    @property
    def args(self) -> dict[str, torch.Tensor]:
        """The graph's inputs for this step; starts their copy to the device."""
        self.buffer.upload()
        return self.inputs

    @property
    def num_slots(self) -> int:
        """Number of slots, as `Limits.num_slots`."""
        return self.limits.num_slots

    @property
    def limits(self) -> Limits:
        """The limits that the inputs are sized for."""
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

    def _step(
        self,
        starts: IntArray,
        lengths: IntArray | None,
        rope_length: int,
        size: StepSizes | None = None,
    ) -> StepLayout:
        """Return which token of which sequence each entry of the row of tokens is, with padding."""
        self.num_sequences = len(starts)
        assert len(starts) <= self.max_batch_size
        assert (starts if lengths is None else starts + lengths - 1).max() < self.max_seq_len
        if lengths is not None and lengths.max() == 1:
            lengths = None
        if size is not None and lengths is not None:
            added = padding_to(size, lengths)
        else:
            sizes = self.decode_sizes if lengths is None else []
            added = single_tokens(starts, lengths, rope_length, sizes)
        return laid_out(self._range, starts, lengths, added)

    def _captured_size(
        self,
        slots: IntArray,
        starts: IntArray,
        lengths: IntArray | None,
        logits_rows: IntArray | None,
    ) -> StepSizes | None:
        """Return the size of the captured step that serves one of several tokens a sequence, if any
        does.
        """
        known = self.captured if logits_rows is None else self.captured_drafts
        if known is None or lengths is None or lengths.max() == 1:
            return None
        if self.adapters and self.rows.adapters[slots].any():
            return None
        rows = len(starts if logits_rows is None else logits_rows)
        sizes = StepSizes(int(lengths.sum()), len(starts), rows)
        return known.serving(sizes, whole=not starts.any())

    def _write_choice(
        self,
        layout: Layout,
        places: IntArray,
        slots: IntArray,
        after: IntArray,
        size: StepSizes | None,
    ) -> IntArray:
        """Write what tokens are chosen with from the rows of logits at `places`: those of sequences in
        `slots` [rows], `after` so many tokens, which padding has none of. Return the places, with
        rows of the spare slot up to a captured step's `size`.
        """
        count = len(places) if size is None else size.rows
        slots, after = padded(slots, count - len(slots), 0), padded(after, count - len(after), 1)
        self.rows.write_choice(layout.host, slots, after)
        return padded(places, count - len(places), 0)

    def _write_mapping(
        self, layout: Layout, group: int, pages: IntArray, positions: IntArray
    ) -> None:
        """Write the slot mapping of a group: page * page_size + offset of each token's key;
        `pages` [tokens] are the page numbers.
        """
        target = layout.host[table_names(group)[1]][: len(positions)]
        np.multiply(pages, self.page_size, out=target, casting="unsafe")
        target += positions % self.page_size

    def _write_tables(
        self, layout: Layout, step: StepLayout, tables: IntArray, sequences: int
    ) -> None:
        """Write block tables [groups, sequences, pages] and slot mappings of other sequences than
        those before.
        """
        for group, table in enumerate(tables):
            self._write_mapping(
                layout,
                group,
                table[step.sequence, step.positions // self.page_size],
                step.positions,
            )
            shown = layout.host[table_names(group)[0]][:sequences]
            shown[:, : table.shape[1]] = table
            shown[:, table.shape[1] : self._filled[:sequences].max()] = 0
        width = max(tables.shape[2], self._filled[:sequences].max())
        self._note_tables(slice(sequences), width)
        self._filled[:sequences] = tables.shape[2]

    def _show(self, layout: Layout, slots: IntArray) -> None:
        """Update the block tables: all rows for a new batch, else only rows whose pages changed.

        Only columns that have pages, or had some, are written: a table has thousands of columns.
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
        filled[:] = widths
        self._note_tables(places, width)

    def _note_tables(self, places: slice, width: int) -> None:
        """Note how many columns of some rows of the block tables are written."""
        self.buffer.widths[places] = width
        if self.written_tables is not None:
            self.written_tables.append((places.start or 0, places.stop, int(width)))

    def _finish(
        self,
        layout: Layout,
        step: StepLayout,
        slots: IntArray,
        wanted: IntArray,
        rope_length: int,
        position_ids: IntArray | None,
        kind: StepKind,
    ) -> None:
        """Write the numbers that depend on neither tokens nor pages, and make the graph's inputs.

        Nothing is copied to the device here: `batch_info_host` is read on the host, and the rest
        goes with the next `upload` or the replay of a captured step.
        """
        tokens, sequences, host = len(step.positions), len(slots), layout.host
        host["cu_seqlens"][1 : sequences + 1] = step.ends
        host["kv_lens"][:sequences] = step.kv_lens
        host["state_slots"][:sequences] = slots
        host["logits_gather_indices"][: len(wanted)] = wanted
        positions = host["position_ids"][:tokens]
        positions[:] = step.positions
        given = tokens - step.padding_tokens
        if position_ids is not None:
            positions[:given] = position_ids
        positions[:given] += self.first_position
        positions[given:] = max(rope_length - 1, 0)
        whole = step.longest > 1 and step.kv_lens.sum() == tokens
        self.numbers[:] = sequences, tokens, step.longest, step.kv_lens.max(), whole
        self.show_inputs(layout, StepSizes(tokens, sequences, len(wanted)), kind)

    def show_inputs(self, layout: Layout, sizes: StepSizes, kind: StepKind = PLAIN) -> None:
        """Make the graph's inputs those of a step of these sizes, written to the layout."""
        self.buffer.written(layout)
        self.sizes = sizes
        self.inputs = layout.inputs(sizes, self._info, kept=kind.kept)
        rows = sizes.rows if kind.by_row else sizes.sequences
        self.choice = layout.choices(rows, by_row=kind.by_row)
