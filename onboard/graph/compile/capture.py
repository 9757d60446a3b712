"""What is captured as CUDA graphs: which decode steps, what there is memory for, what is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onboard.errors import UsageError

_HALVED_FROM = 16
"""Fewer sequences take as long as one but for their keys."""
_STEP = 16
"""Padded sequences beyond that many take time: their products no longer hide behind the reading of
weights."""
_SHARES = 8
"""From that many steps on, what lies between two powers of two is parted in equal shares."""
_TIMED_RUNS = 3
_MEMORY_SHARE = 2.5
"""Steps are captured if this many times the memory of the largest one is free."""


def capture_sizes(wanted: Sequence[int] | None, max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture, ascending: the `wanted` ones that a batch can have; None:
    powers of two, 24, multiples of 16 up to 256, then seven sizes between two powers of two, and
    `max_batch_size`.

    Raises `UsageError` for a size below 1.
    """
    if wanted is None:
        powers = [1 << exponent for exponent in range(max_batch_size.bit_length())]
        sizes = {size for power in powers for size in range(power, 2 * power, _step_from(power))}
        return sorted({*(size for size in sizes if size < max_batch_size), max_batch_size})
    if bad := [size for size in wanted if size < 1]:
        raise UsageError(
            f"CUDA graphs cannot be captured for batch size {bad[0]}", hint="Sizes start at 1"
        )
    return sorted({size for size in wanted if size <= max_batch_size})


def _step_from(power: int) -> int:
    """Return how far apart the captured sizes are from a power of two to the next."""
    if power < _HALVED_FROM:
        return power
    return max(power // _SHARES, min(power // 2, _STEP))


def has_room(step: Callable[[], Any], device: torch.device) -> bool:
    """Whether there is enough memory to capture a step, in a pool of its own, beside the step
    itself, which is run for that.
    """
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] > _MEMORY_SHARE * needed


def shortest_time(step: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of some measured times of a step in seconds, host and device together."""
    best = math.inf
    for _ in range(_TIMED_RUNS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
