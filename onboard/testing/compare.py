"""Comparison of two tensors by the ratio of root mean squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onboard.verify.error import rmse_ratio, wide


@dataclass(frozen=True)
class Measurement:
    """One comparison that a test made."""

    label: str
    error: float
    tolerance: float


MEASUREMENTS: list[Measurement] = []
"""Comparisons since the plugin (`onboard.testing.plugin`) last looked, in order."""


def assert_rmse_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, label: str, where: str = ""
) -> None:
    """Fail unless both have one shape and their `rmse_ratio` is at most `tolerance`; a NaN never
    passes.

    The message says of what (`label`) and `where` it was computed.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    of = f" ({where})" if where else ""
    assert actual.shape == expected.shape, (
        f"{label}: the shape is {list(actual.shape)}, expected {list(expected.shape)}{of}"
    )
    error = rmse_ratio(actual, expected.to(actual.device))
    MEASUREMENTS.append(Measurement(label, error, tolerance))
    if not error <= tolerance:  # so written, a NaN fails
        raise AssertionError(
            f"{label}: rmse ratio {error:.2e}, at most {tolerance:.0e} is allowed; {_worst(actual, expected)}{of}"
        )


def _worst(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Name the element that differs most (a NaN counts as most), with both values."""
    actual, expected = wide(actual).cpu(), wide(expected).cpu()
    flat = int((actual - expected).abs().nan_to_num(nan=float("inf")).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)]
    return (
        f"at {index} it gives {actual.flatten()[flat]:.8g}, expected {expected.flatten()[flat]:.8g}"
    )
