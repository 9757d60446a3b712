"""The step buffer: a step's numbers in one pinned host buffer and one device buffer, with one copy
between them.

Order of host and device:

1. The host waits until the copy of the step before has ended (`layout_for`); only then may it
   overwrite the host buffer. It does not wait for that step's other kernels.
2. It writes the step's numbers (`written`).
3. The copy is enqueued on the step's stream: by `upload` for a step that runs eagerly, or by the
   first kernels of a captured step (`fetch`, recorded at capture), since changing between the copy
   engine and a CUDA graph costs microseconds. On the device the copy runs behind the step before,
   so it never overwrites numbers that a kernel still reads.
4. An event after the copy is what point 1 waits for.

Fields with an entry for each token, or for each chosen one, exist twice: decode-sized in front of
the fields with an entry for each sequence, and full-sized behind them. So a decode step copies the
first two parts and any other step the last two: one contiguous copy of no more than it needs, and
every input of a captured CUDA graph keeps its address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from onboard.ops import has_triton

IntArray = npt.NDArray[np.integer]
HostFields = dict[str, npt.NDArray[Any]]

_ALIGNMENT = 256  # bytes; Triton specialises on aligned pointers
_BY_TOKEN = ("input_ids", "position_ids", "logits_gather_indices")
_TABLE = "block_table"
ADAPTER_IDS = "adapter_ids"
"""For each token 0, or 1 + the index of its adapter; only where a run has adapters."""
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")
CHOICE_NAMES = (*SAMPLING_NAMES, "uniform")
"""The arguments of `choose_tokens` after the logits, in its order, each [rows of logits]."""
ROW_NAMES = ("row_slots", "row_lengths")
"""Of each row of logits the slot of its sequence, and that sequence's tokens up to it."""
_OF_SEQUENCES = ("state_slots", "kv_lens")
"""The same where a step has a row for each sequence's last token."""
MOST_ROWS = 256
"""Rows of logits of a step with drafts; each is as long as the vocabulary."""
_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def table_names(group: int) -> tuple[str, str]:
    """Return the names of the block table and the slot mapping of a group of pages."""
    names = (_TABLE, "slot_mapping")
    return names if group == 0 else (f"{names[0]}_{group}", f"{names[1]}_{group}")


def padded(values: IntArray, padding: int, value: int) -> IntArray:
    """Return integers with `value` appended `padding` times."""
    if not padding:
        return values
    return np.concatenate([values, np.full(padding, value)]).astype(np.int64)


class StepSizes(NamedTuple):
    """How many there are of what a step is made of, with padding."""

    tokens: int
    sequences: int
    rows: int
    """Of logits."""


class StepKind(NamedTuple):
    """What becomes of a step's inputs."""

    by_row: bool
    """Whether a token is chosen from each row of logits, and not for each sequence."""
    kept: bool
    """Whether the step has the size of a captured one, and its inputs are the same each time."""


PLAIN = StepKind(by_row=False, kept=False)


@dataclass(frozen=True)
class Layout:
    """The fields of steps with at most `tokens` tokens, on host and device."""

    tokens: int
    host: HostFields
    device: dict[str, torch.Tensor]
    span: slice
    """The bytes of the buffers that such a step copies."""
    views: dict[StepSizes, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Inputs of earlier decode steps, and of other captured ones."""
    chosen: dict[tuple[int, bool], dict[str, torch.Tensor]] = field(default_factory=dict)

    def choices(self, rows: int, *, by_row: bool = False) -> dict[str, torch.Tensor]:
        """Return what tokens are chosen with from rows of logits, by `CHOICE_NAMES` and `ROW_NAMES`:
        views of the device buffer, the same tensors each time.

        Without `by_row` there is a row for each sequence.
        """
        if (rows, by_row) not in self.chosen:
            sources = ROW_NAMES if by_row else _OF_SEQUENCES
            fields = {name: name for name in CHOICE_NAMES} | dict(
                zip(ROW_NAMES, sources, strict=True)
            )
            self.chosen[rows, by_row] = {
                name: self.device[source][:rows] for name, source in fields.items()
            }
        return self.chosen[rows, by_row]

    def counts(self, sizes: StepSizes) -> dict[str, int]:
        """Return how many entries a step has of each field that the graph reads."""
        known = {"cu_seqlens": sizes.sequences + 1, "logits_gather_indices": sizes.rows}
        known |= dict.fromkeys(("kv_lens", "state_slots"), sizes.sequences)
        tables = {name for name in self.host if name.startswith(_TABLE)}
        return {
            name: sizes.sequences if name in tables else known.get(name, sizes.tokens)
            for name in self.host
            if name not in (*CHOICE_NAMES, *ROW_NAMES)
        }

    def inputs(
        self, sizes: StepSizes, info: torch.Tensor, *, kept: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the graph's inputs for a step: views of the device buffer, and `batch_info_host`.

        Those of decode steps, and others that are to be `kept`, are the same each time: making them
        takes time, and a captured step is recognised by them.
        """
        if (known := self.views.get(sizes)) is not None:
            return known
        views = {name: self.device[name][:count] for name, count in self.counts(sizes).items()}
        for name in ("input_ids", "position_ids", ADAPTER_IDS):
            if name in views:
                views[name] = views[name][None]
        views["batch_info_host"] = info
        if kept or len(set(sizes)) == 1:
            self.views[sizes] = views
        return views


class StepBuffer:
    """The host and the device buffer for steps of at most `sequences` sequences and `tokens`
    tokens.
    """

    def __init__(
        self,
        *,
        sequences: int,
        tokens: int,
        pages_per_sequence: int,
        groups: int,
        device: torch.device,
        codebooks: int = 1,
        adapters: bool = False,
    ) -> None:
        parts = _parts(sequences, tokens, pages_per_sequence, groups, codebooks, adapters)
        ends = np.cumsum([_num_bytes(part) for part in parts]).tolist()
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        small, middle, large = (
            self._fields(part, start) for part, start in zip(parts, [0, *ends[:-1]], strict=True)
        )
        self.layouts = [
            _layout(sequences, {**small, **middle}, slice(0, ends[1])),
            _layout(tokens, {**middle, **large}, slice(ends[0], ends[2])),
        ]
        # Byte offset of the block tables, which come last among a decode step's fields: `fetch`
        # copies what is before them whole, and of the tables only the columns in use.
        self._tables = ends[1] - groups * _aligned(
            sequences * pages_per_sequence * torch.int32.itemsize
        )
        tables = (middle[table_names(group)[0]] for group in range(groups))
        self._shown_tables = [
            (on_device, torch.from_numpy(on_host)) for on_host, on_device in tables
        ]
        self._widths = torch.zeros(sequences, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.widths = self._widths.numpy()
        """[sequences] number of leading columns of each block-table row that a captured step
        copies; pinned, and read by its kernel when it runs.
        """
        self._written: Layout | None = None  # written by the host, no copy enqueued yet
        cuda = device.type == "cuda"
        # External: a replay of a CUDA graph in which it was recorded records it for the host, too.
        self._copied = torch.cuda.Event(external=True) if cuda else None  # type: ignore[no-untyped-call]
        kernels: Any = (
            import_module("onboard.ops.triton.host_copy") if cuda and has_triton() else None
        )
        self._copy = kernels.copy if kernels else _copy
        self._copy_rows = kernels.copy_rows if kernels else _copy_rows

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def layout_of(self, tokens: int) -> Layout:
        """Return the smallest layout that fits."""
        return next(each for each in self.layouts if tokens <= each.tokens)

    def layout_for(self, tokens: int, *, by_row: bool = False) -> Layout:
        """Return the smallest layout that fits, after waiting until the host may write to it; with
        `by_row` one that has fields for rows of logits.
        """
        if self._copied is not None:
            # The last step's copy may still read the host buffer. It is among that step's first
            # work, so with steps launched ahead the host waits for the step before it, not for it.
            self._copied.synchronize()
        return self.layouts[-1] if by_row else self.layout_of(tokens)

    def written(self, layout: Layout) -> None:
        """Record that a step's numbers are complete in the host buffer."""
        self._written = layout

    def upload(self) -> None:
        """Enqueue the copy of the numbers written last, unless that was done already."""
        if self._copied is not None and self._written is not None:
            self._device[self._written.span].copy_(
                self._host[self._written.span], non_blocking=True
            )
            self._copied.record()
        self._written = None

    def fetch(self, sequences: int) -> None:
        """Copy the numbers of a decode step of `sequences` sequences, by kernels.

        Called while a CUDA graph is captured: each replay then reads the host buffer as it is at
        that moment. All decode batches share these addresses.
        """
        if self._copied is not None:
            words = slice(self._tables // torch.int64.itemsize)
            self._copy(self._device.view(torch.int64)[words], self._host.view(torch.int64)[words])
            for target, source in self._shown_tables:
                self._copy_rows(target[:sequences], source[:sequences], self._widths[:sequences])
            self._copied.record()

    def fetched(self) -> None:
        """Record that a replay was launched, which copies the numbers written last."""
        self._written = None

    def _fields(
        self, shapes: _Shapes, offset: int
    ) -> dict[str, tuple[npt.NDArray[Any], torch.Tensor]]:
        fields = {}
        for name, (shape, dtype) in shapes.items():
            span = slice(offset, offset + int(np.prod(shape)) * dtype.itemsize)
            host, device = (
                buffer[span].view(dtype).view(shape) for buffer in (self._host, self._device)
            )
            fields[name] = host.numpy(), device
            offset += _aligned(span.stop - span.start)
        return fields


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_rows(target: torch.Tensor, source: torch.Tensor, widths: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _layout(
    tokens: int, fields: dict[str, tuple[npt.NDArray[Any], torch.Tensor]], span: slice
) -> Layout:
    host = {name: array for name, (array, _) in fields.items()}
    return Layout(tokens, host, {name: tensor for name, (_, tensor) in fields.items()}, span)


def _by_token(tokens: int, groups: int, adapters: bool) -> _Shapes:
    own = [ADAPTER_IDS] if adapters else []
    names = [*_BY_TOKEN, *own, *(table_names(group)[1] for group in range(groups))]
    return dict.fromkeys(names, ((tokens,), torch.int64))


def _by_row(rows: int, codebooks: int) -> _Shapes:
    return {
        **dict.fromkeys(SAMPLING_NAMES, ((rows,), torch.float32)),
        "uniform": ((rows,) if codebooks == 1 else (rows, codebooks), torch.float64),
    }


def _by_sequence(sequences: int, pages: int, groups: int) -> _Shapes:
    tables = [table_names(group)[0] for group in range(groups)]
    return {
        "cu_seqlens": ((sequences + 1,), torch.int32),
        "kv_lens": ((sequences,), torch.int32),
        "state_slots": ((sequences,), torch.int64),
        **dict.fromkeys(tables, ((sequences, pages), torch.int32)),
    }


def buffer_bytes(
    *, sequences: int, tokens: int, pages_per_sequence: int, groups: int, codebooks: int = 1
) -> int:
    """Return the bytes of a `StepBuffer`."""
    return sum(map(_num_bytes, _parts(sequences, tokens, pages_per_sequence, groups, codebooks)))


def _parts(
    sequences: int, tokens: int, pages: int, groups: int, codebooks: int, adapters: bool = False
) -> tuple[_Shapes, _Shapes, _Shapes]:
    """Return the three parts of the buffers, in order: a decode step copies the first two, any
    other step the last two.
    """
    rows = sequences + MOST_ROWS
    small = _by_token(sequences, groups, adapters) | _by_row(sequences, codebooks)
    large = _by_token(tokens, groups, adapters) | _by_row(rows, codebooks)
    large |= dict.fromkeys(ROW_NAMES, ((rows,), torch.int64))
    return small, _by_sequence(sequences, pages, groups), large


def _num_bytes(shapes: _Shapes) -> int:
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
