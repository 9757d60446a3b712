"""The batch sizes of decode steps that are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from onboard.errors import UsageError


def capture_sizes(wanted: Sequence[int] | None, max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture, ascending: the `wanted` ones that a batch can have; None:
    powers of two and `max_batch_size`.

    Raises `UsageError` for a size below 1.
    """
    if wanted is None:
        powers = [1 << exponent for exponent in range(max_batch_size.bit_length())]
        return sorted({*powers, max_batch_size})
    if bad := [size for size in wanted if size < 1]:
        raise UsageError(
            f"CUDA graphs cannot be captured for batch size {bad[0]}", hint="Sizes start at 1"
        )
    return sorted({size for size in wanted if size <= max_batch_size})
