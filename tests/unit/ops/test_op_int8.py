"""Linears with integers of eight bits: what the reference computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.integers.int8_linear import int8_values, quantise_int8_rows
from tests.support.ops import int8
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
EXACT = 1e-6


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("group", [16, 32, 96, 128, 320])
def test_products_are_those_of_the_weights_values(group: int, offset: bool) -> None:
    seeded()
    weight = int8.weight(24, 320, group, offset=offset)
    values = int8_values(weight.codes, weight.scale, weight.offset, group)
    assert relative_error(values, weight.values) < EXACT
    x, bias = torch.randn(2, 5, 320), torch.randn(24)
    form = (weight.scale, weight.offset, None, group)
    actual = ops.torch_int8_linear(x, weight.codes, bias, *form)
    assert relative_error(actual, x.double() @ weight.values.T + bias.double()) < EXACT


@pytest.mark.parametrize("how", ["token", "tensor"])
def test_inputs_are_integers(how: str) -> None:
    seeded()
    weight = int8.weight(24, 200, 200, offset=False)
    x, bias = torch.randn(3, 4, 200) * torch.rand(3, 4, 1), torch.randn(24)
    x[0, 0] = 0
    given = (x.abs().max() / 100).reshape(1)
    actual = ops.torch_int8_linear(x, weight.codes, bias, weight.scale, None, given, 200, how)
    codes, scale = int8.naive_rows(x.view(-1, 200), given if how == "tensor" else None)
    sums = codes.to(torch.int64) @ weight.codes.to(torch.int64).T
    expected = sums.double() * scale * weight.scale.double().T + bias.double()
    assert relative_error(actual.view(-1, 24), expected) < EXACT


def test_tokens_use_the_whole_range() -> None:
    x = torch.tensor([[-255.0, 64, 255], [0, 0, 0]])
    codes, scale = quantise_int8_rows(x)
    assert codes.tolist() == [[-128, 32, 127], [0, 0, 0]]
    assert float(scale[0]) == 2


def test_what_stands_around_a_linear() -> None:
    seeded()
    weight = int8.weight(24, 256, 64, offset=True)
    x, norm, residual = torch.randn(3, 256), torch.rand(256), torch.randn(3, 12)
    form = (weight.scale, weight.offset, None, 64, "")
    actual = ops.torch_fused_int8_linear(x, weight.codes, None, *form, residual, norm, 1e-5, "silu")
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, True) + 1e-5) * norm.double()
    gate, up = _halves(normed @ weight.values.T)
    expected = gate * torch.sigmoid(gate) * up + residual.double()
    assert relative_error(actual, expected) < EXACT


def _halves(y: Tensor) -> tuple[Tensor, Tensor]:
    return y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
