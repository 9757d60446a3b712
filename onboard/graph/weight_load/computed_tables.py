"""Tables that a model's constructor computes and a checkpoint has, too, rounded to the dtype of its
weights (the decays of MiniMax's lightning attention): they are taken as computed.

Tables that belong together, each rounded by itself, fit no formula any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

_HALVES = (torch.bfloat16, torch.float16)


def is_rounding(stored: torch.Tensor, computed: torch.Tensor) -> bool:
    """Whether a table of a checkpoint, of any float dtype, is one in float32 rounded to 16 bits, and
    not the same.
    """
    exact, value = computed.cpu(), stored.detach().cpu().float()
    if exact.dtype != torch.float32 or value.shape != exact.shape:
        return False
    rounded = any(torch.equal(exact.to(half).float(), value) for half in _HALVES)
    return rounded and not torch.equal(exact, value)


def saved_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of floating-point numbers that checkpoints have."""
    saved = model.state_dict()
    buffers = ((name, each) for name, each in model.named_buffers() if name in saved)
    return {name: each for name, each in buffers if each.is_floating_point()}


def take_computed(
    stored: Mapping[str, torch.Tensor], computed: Callable[[], Mapping[str, torch.Tensor]]
) -> list[str]:
    """Write what was computed over its roundings, in place; return the names of these.

    `computed` is called where a table may be a rounding: to make a large model takes seconds.
    """
    maybe = {name: table for name, table in stored.items() if _fits_16_bits(table)}
    exact = computed() if maybe else {}
    rounded = [
        name for name in maybe.keys() & exact.keys() if is_rounding(maybe[name], exact[name])
    ]
    for name in rounded:
        stored[name].copy_(exact[name])
    return sorted(rounded)


def _fits_16_bits(table: torch.Tensor) -> bool:
    """Whether 16 bits have all values, some of which are no integers."""
    fits = any(torch.equal(table.to(half).to(table.dtype), table) for half in _HALVES)
    return fits and not torch.equal(table, table.round())
