"""Values of every size: what code bounds shows in some of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

SCALES = (1.0, 1e4, 1e-4)
"""Of random numbers of about one: beyond the bounds that code is written with, and within."""
_WIDE = 1e4


def scaled(x: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor in every size."""
    return [x * scale for scale in SCALES]


def linear_variants(
    compute: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield arguments with one of them far larger, each in which an op is linear: others may have it
    grow without end.
    """
    base = compute(arguments)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            wide = {**arguments, key: value * _WIDE}
            if rmse_ratio(compute(wide), _WIDE * base) < SAME:
                yield wide
