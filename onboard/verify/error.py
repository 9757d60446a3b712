"""The one measure of how far a result is from what is expected: rmse(actual - expected) /
rmse(expected).

A few outliers do not decide it, and it has no unit, so that one limit (`onboard.verify.tolerances`)
serves tensors of any scale. It is NaN where either tensor has a NaN, and where `expected` is zero
throughout: a tensor of zeros proves nothing. A NaN is within no limit: comparisons are written `not
error <= limit`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def rmse_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return rmse(actual - expected) / rmse(expected), in float64; infinite where the shapes
    differ, 0 of single numbers that are both zero, as a loss that nothing adds to.
    """
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = wide(actual), wide(expected)
    if actual.dim() == 0 and not actual.any() and not expected.any():
        return 0.0
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64; a complex one as pairs of real and imaginary part."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def worst(errors: Iterable[float]) -> float:
    """Return the largest error; one that is not a number is larger than any other, which `max`
    would pass over.
    """
    return max(errors, key=lambda error: (error != error, error))
