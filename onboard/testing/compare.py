"""Comparison of two tensors by the ratio of root mean squares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onboard.verify.error import rmse_ratio, wide
from onboard.verify.rounding.against_float64 import Rounding, rounding


@dataclass(frozen=True)
class Measurement:
    """One comparison that a test made."""

    label: str
    error: float
    tolerance: float
    rounding: Rounding | None = None
    """Beyond the tolerance, where the reference was computed in float64 as well."""

    @property
    def passes(self) -> bool:
        """Whether the error is within the tolerance, or is the reference's own rounding."""
        known = self.rounding is not None and self.rounding.is_theirs
        return self.error <= self.tolerance or known  # so written, a NaN fails

    @property
    def against_float64(self) -> str:
        """Return both errors against float64, where they are known."""
        if self.rounding is None:
            return ""
        errors = f"{self.rounding.ours:.2e}, the expected values {self.rounding.theirs:.2e}"
        return f"; against float64 it errs by {errors}"


MEASUREMENTS: list[Measurement] = []
"""Comparisons since the plugin (`onboard.testing.plugin`) last looked, in order."""

NOTES: list[str] = []
"""What is to be known of the comparisons since then."""


def assert_rmse_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    label: str,
    where: str = "",
    exact: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Fail unless both have one shape and their `rmse_ratio` is at most `tolerance`; a NaN never
    passes.

    `exact` computes `expected` in float64; it is asked where the error is larger, which then passes
    if it is rounding by the rule of `onboard.verify.rounding`. The message says of what (`label`)
    and `where` it was computed.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    of = f" ({where})" if where else ""
    assert actual.shape == expected.shape, (
        f"{label}: the shape is {list(actual.shape)}, expected {list(expected.shape)}{of}"
    )
    if not expected.numel():
        NOTES.append(f"{label}: no token reached it, so nothing was compared")
        return
    error = rmse_ratio(actual, expected.to(actual.device))
    own = rounding([actual], [expected], [exact()]) if exact and error > tolerance else None
    MEASUREMENTS.append(found := Measurement(label, error, tolerance, own))
    if not found.passes:
        raise AssertionError(
            f"{label}: rmse ratio {error:.2e}, at most {tolerance:.0e} is allowed{found.against_float64};"
            f" {_worst(actual, expected)}{of}"
        )


def _worst(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Name the element that differs most (a NaN counts as most), with both values."""
    actual, expected = wide(actual).cpu(), wide(expected).cpu()
    flat = int((actual - expected).abs().nan_to_num(nan=float("inf")).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)]
    return (
        f"at {index} it gives {actual.flatten()[flat]:.8g}, expected {expected.flatten()[flat]:.8g}"
    )
