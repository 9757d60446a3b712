"""The memory in which a step's numbers lie: one pinned host buffer, one device buffer, one copy
between them.

A captured step makes this copy itself, as its first kernel: a GPU takes microseconds to change
between its copy engine and a CUDA graph.

Fields that have an entry a token come twice, for decode-sized rows in front of the fields that have
one a sequence, and for full rows behind them. So each kind of step is one contiguous copy of no
more than it needs, and every input of a captured CUDA graph stays at its address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from onboard.ops import has_triton

IntArray = npt.NDArray[np.integer]
HostFields = dict[str, npt.NDArray[Any]]

_ALIGNMENT = 256  # bytes; Triton specialises on aligned pointers
_BY_TOKEN = ("input_ids", "position_ids", "logits_gather_indices")
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")
CHOICE_NAMES = (*SAMPLING_NAMES, "uniform")
"""How each sequence's next token is chosen, in the order in which `choose_tokens` takes it."""
_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def table_names(group: int) -> tuple[str, str]:
    """Return the names of the block table and the slot mapping of a group of pages."""
    return (
        ("block_table", "slot_mapping")
        if group == 0
        else (f"block_table_{group}", f"slot_mapping_{group}")
    )


def padded(values: IntArray, padding: int, value: int) -> IntArray:
    """Return integers with `padding` times `value` behind them."""
    if not padding:
        return values
    return np.concatenate([values, np.full(padding, value)]).astype(np.int64)


@dataclass(frozen=True)
class Layout:
    """Where each field lies when rows have at most `tokens` tokens."""

    tokens: int
    host: HostFields
    device: dict[str, torch.Tensor]
    span: slice
    """Bytes to copy."""
    views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    """Inputs of earlier steps, by number of tokens, sequences and rows of logits."""
    chosen: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def choices(self, sequences: int) -> dict[str, torch.Tensor]:
        """Return the device's fields that say how each sequence's next token is chosen, the same
        tensors each time.
        """
        if sequences not in self.chosen:
            self.chosen[sequences] = {name: self.device[name][:sequences] for name in CHOICE_NAMES}
        return self.chosen[sequences]


class StepBuffer:
    """The buffers for steps of at most `sequences` sequences with at most `tokens` tokens
    together.
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
    ) -> None:
        parts = _parts(sequences, tokens, pages_per_sequence, groups, codebooks)
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
        # Block tables are behind all else that a decode step has, each with a row for each
        # sequence; bytes.
        self._tables = ends[1] - groups * _aligned(
            sequences * pages_per_sequence * torch.int32.itemsize
        )
        tables = (middle[table_names(group)[0]] for group in range(groups))
        self._shown_tables = [
            (on_device, torch.from_numpy(on_host)) for on_host, on_device in tables
        ]
        self._widths = torch.zeros(sequences, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.widths = self._widths.numpy()
        """[sequences] leading columns of each row of the block tables that a decode step copies."""
        self._written: Layout | None = None  # and not copied yet
        cuda = device.type == "cuda"
        # External: a CUDA graph that records it, too, does so for the host.
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

    def layout_for(self, tokens: int) -> Layout:
        """Return the smaller layout that fits, once its host buffer is free to be written."""
        layout = next(each for each in self.layouts if tokens <= each.tokens)
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy may still read the host buffer
        return layout

    def written(self, layout: Layout) -> None:
        """Record that a step's numbers are in the host buffer."""
        self._written = layout

    def upload(self) -> None:
        """Start the copy of what was written last, in the order of the device's work, unless that
        has been done.
        """
        if self._copied is not None and self._written is not None:
            self._device[self._written.span].copy_(
                self._host[self._written.span], non_blocking=True
            )
            self._copied.record()
        self._written = None

    def fetch(self, sequences: int) -> None:
        """Copy a decode step of as many sequences; a CUDA graph that captures this does so at every
        replay.
        """
        if self._copied is not None:
            words = slice(self._tables // torch.int64.itemsize)
            self._copy(self._device.view(torch.int64)[words], self._host.view(torch.int64)[words])
            for target, source in self._shown_tables:
                self._copy_rows(target[:sequences], source[:sequences], self._widths[:sequences])
            self._copied.record()

    def fetched(self) -> None:
        """Record that a replay has been started which copies what was written last."""
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


def _by_token(tokens: int, groups: int) -> _Shapes:
    names = [*_BY_TOKEN, *(table_names(group)[1] for group in range(groups))]
    return dict.fromkeys(names, ((tokens,), torch.int64))


def _by_sequence(sequences: int, pages: int, groups: int, codebooks: int) -> _Shapes:
    tables = [table_names(group)[0] for group in range(groups)]
    return {
        "cu_seqlens": ((sequences + 1,), torch.int32),
        "kv_lens": ((sequences,), torch.int32),
        "state_slots": ((sequences,), torch.int64),
        **dict.fromkeys(SAMPLING_NAMES, ((sequences,), torch.float32)),
        "uniform": ((sequences,) if codebooks == 1 else (sequences, codebooks), torch.float64),
        **dict.fromkeys(tables, ((sequences, pages), torch.int32)),
    }


def buffer_bytes(
    *, sequences: int, tokens: int, pages_per_sequence: int, groups: int, codebooks: int = 1
) -> int:
    """Return the bytes of a `StepBuffer`."""
    return sum(map(_num_bytes, _parts(sequences, tokens, pages_per_sequence, groups, codebooks)))


def _parts(
    sequences: int, tokens: int, pages: int, groups: int, codebooks: int
) -> tuple[_Shapes, _Shapes, _Shapes]:
    """Return what lies one after the other: a decode step takes the first two, another one the
    last two.
    """
    by_sequence = _by_sequence(sequences, pages, groups, codebooks)
    return _by_token(sequences, groups), by_sequence, _by_token(tokens, groups)


def _num_bytes(shapes: _Shapes) -> int:
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
