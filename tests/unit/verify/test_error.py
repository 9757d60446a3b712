"""The one measure of an error: no unit, and nothing that is no number or proves nothing is
small.
"""

from __future__ import annotations

import math

import pytest
import torch

from onboard.verify.error import rmse_ratio, worst


def test_an_error_is_relative_to_what_is_expected_whatever_its_scale() -> None:
    x = torch.randn(50, 7) * 10 ** torch.randint(-6, 6, ()).double()
    assert rmse_ratio(1.01 * x, x) == pytest.approx(0.01, rel=1e-4)
    z = torch.complex(x, x)
    assert rmse_ratio(z * 1j, z) == pytest.approx(2**0.5, rel=1e-4)


def test_a_loss_of_zero_has_no_error() -> None:
    zero = torch.tensor(0.0)
    assert rmse_ratio(zero, zero.clone()) == 0.0
    assert rmse_ratio(torch.tensor(0.1), zero) == math.inf
    assert math.isnan(rmse_ratio(zero, torch.tensor(math.nan)))


def test_what_is_no_number_or_proves_nothing_is_within_no_limit() -> None:
    x, zeros = torch.randn(5), torch.zeros(5)
    spoilt = torch.where(torch.arange(5) == 3, torch.nan, x)
    for actual, expected in ((spoilt, x), (x, spoilt), (spoilt, spoilt), (zeros, zeros)):
        assert math.isnan(rmse_ratio(actual, expected))
    assert rmse_ratio(x, zeros) == rmse_ratio(x, x[None]) == math.inf
    assert math.isnan(worst([3.0, math.nan, 1.0]))
    assert worst([3.0, math.inf]) == math.inf
