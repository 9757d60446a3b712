"""What functions of flash-linear-attention (`fla`) have in common: arguments that say where texts end
and which axis comes first, and states that texts begin with.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from onboard.hf.old.fla.token_axis import heads_come_first


def each_text(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    tensors: tuple[torch.Tensor, ...],
    settings: tuple[Any, ...],
    with_state: bool,
    texts: tuple[torch.Tensor | None, bool | None],
    others: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a function makes of each text alone where several lie one after the other, whose
    `texts` are where they end and whether heads come first, and its state where that is asked for.

    Raises:
        NotImplementedError: an argument is given that has no form here.
    """
    given = [
        key for key, v in others.items() if isinstance(v, torch.Tensor) or v not in (None, False)
    ]
    if given:
        raise NotImplementedError(f"{', '.join(sorted(given))}: no form here")
    if any(type(item) in (int, float) and item == -1 for item in settings):
        raise NotImplementedError("a scale of -1, which meant none given once: no form here")
    ends, said_first = texts
    if ends is not None and said_first:
        raise NotImplementedError("cu_seqlens where heads come first: no form here")
    if turned := heads_come_first(tensors, said_first if ends is None else False):
        tensors = tuple(item.transpose(1, 2) for item in tensors)
    bounds = [(0, None)] if ends is None else [*pairwise(ends.tolist())]
    parts = [step(*(item[:, first:last] for item in tensors), *settings) for first, last in bounds]
    outs, states = zip(*parts, strict=True)
    out = torch.cat(outs, dim=1)
    return out.transpose(1, 2) if turned else out, torch.cat(states) if with_state else None


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32, or in float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def start(k: torch.Tensor, v: torch.Tensor, initial_state: torch.Tensor | None) -> torch.Tensor:
    """Return the state [batch, heads, key size, value size] that a text begins with."""
    if initial_state is not None:
        return wide(initial_state)
    return wide(v).new_zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]))
