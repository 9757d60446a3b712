"""Does a transformers model count positions itself, where it should use those that it is given?

In a flat row of several sequences a count from the row's start is wrong, and where it only matters
far into a text (a temperature that grows every 8192 tokens) no short prompt shows it. So each range
over the sequence that the model's code makes, other than for masks, is shifted far away in turn:
the logits must not move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onboard.graph.export.hf_attention import attention_recorded, is_making_mask
from onboard.graph.export.hf_export import canonical_attention
from onboard.verify.tolerances import SAME

_BATCH, _LENGTH = 2, 13
_FAR = 1 << 20


class _ShiftedRange(TorchFunctionMode):
    """Shifts the nth range over the sequence; counts how many there are."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth = nth
        self.seen = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.arange or out.shape != (_LENGTH,) or is_making_mask():
            return out
        self.seen += 1
        return out + _FAR if self.seen == self.nth else out


@torch.no_grad()
def counts_positions(model: nn.Module, vocabulary: int) -> bool:
    """Return whether the logits of a model move when a range that its code makes is shifted."""
    ids = torch.arange(_BATCH * _LENGTH).view(_BATCH, _LENGTH) % vocabulary
    positions = torch.arange(_LENGTH).expand(_BATCH, _LENGTH).contiguous()

    def logits(nth: int) -> tuple[torch.Tensor, int]:
        with attention_recorded(model, canonical_attention, _LENGTH), _ShiftedRange(nth) as mode:
            output = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return output.float(), mode.seen

    expected, ranges = logits(0)
    return any(_moves(lambda nth=nth: logits(nth)[0], expected) for nth in range(1, ranges + 1))  # type: ignore[misc]


def _moves(shifted: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    try:
        actual = shifted()
    except (IndexError, RuntimeError):
        # a range that picks rows of a tensor: one that picked positions would show in short texts,
        # too
        return False
    return not bool((actual - expected).square().mean() <= SAME**2 * expected.square().mean())
