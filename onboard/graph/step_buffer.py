"""The memory in which a step's numbers lie: one pinned host buffer, one device buffer, one copy between them.

Fields that have an entry a token come twice, for decode-sized rows in front of the fields that have one a sequence, and
for full rows behind them. So each kind of step is one contiguous copy of no more than it needs, and every input of a
captured CUDA graph stays at its address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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
    return ("block_table", "slot_mapping") if group == 0 else (f"block_table_{group}", f"slot_mapping_{group}")


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
        """Return the device's fields that say how each sequence's next token is chosen, the same tensors each time."""
        if sequences not in self.chosen:
            self.chosen[sequences] = {name: self.device[name][:sequences] for name in CHOICE_NAMES}
        return self.chosen[sequences]


class StepBuffer:
    """The buffers for steps of at most `sequences` sequences with at most `tokens` tokens together."""

    def __init__(
        self, *, sequences: int, tokens: int, pages_per_sequence: int, groups: int, device: torch.device
    ) -> None:
        by_sequence = _by_sequence(sequences, pages_per_sequence, groups)
        parts = [_by_token(sequences, groups), by_sequence, _by_token(tokens, groups)]
        ends = np.cumsum([_num_bytes(part) for part in parts]).tolist()
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        small, middle, large = (self._fields(part, start) for part, start in zip(parts, [0, *ends[:-1]], strict=True))
        self.layouts = [
            _layout(sequences, {**small, **middle}, slice(0, ends[1])),
            _layout(tokens, {**middle, **large}, slice(ends[0], ends[2])),
        ]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

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

    def copy_to_device(self, layout: Layout) -> None:
        """Start the step's copy, in the order of the device's work."""
        if self._copied is not None:
            self._device[layout.span].copy_(self._host[layout.span], non_blocking=True)
            self._copied.record()

    def _fields(self, shapes: _Shapes, offset: int) -> dict[str, tuple[npt.NDArray[Any], torch.Tensor]]:
        fields = {}
        for name, (shape, dtype) in shapes.items():
            span = slice(offset, offset + int(np.prod(shape)) * dtype.itemsize)
            host, device = (buffer[span].view(dtype).view(shape) for buffer in (self._host, self._device))
            fields[name] = host.numpy(), device
            offset += _aligned(span.stop - span.start)
        return fields


def _layout(tokens: int, fields: dict[str, tuple[npt.NDArray[Any], torch.Tensor]], span: slice) -> Layout:
    host = {name: array for name, (array, _) in fields.items()}
    return Layout(tokens, host, {name: tensor for name, (_, tensor) in fields.items()}, span)


def _by_token(tokens: int, groups: int) -> _Shapes:
    names = [*_BY_TOKEN, *(table_names(group)[1] for group in range(groups))]
    return dict.fromkeys(names, ((tokens,), torch.int64))


def _by_sequence(sequences: int, pages: int, groups: int) -> _Shapes:
    tables = [table_names(group)[0] for group in range(groups)]
    return {
        "cu_seqlens": ((sequences + 1,), torch.int32),
        "kv_lens": ((sequences,), torch.int32),
        "state_slots": ((sequences,), torch.int64),
        **dict.fromkeys(SAMPLING_NAMES, ((sequences,), torch.float32)),
        "uniform": ((sequences,), torch.float64),
        **dict.fromkeys(tables, ((sequences, pages), torch.int32)),
    }


def _num_bytes(shapes: _Shapes) -> int:
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in shapes.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
