"""Linears with integers of eight bits. Run by test_triton_kernels.py in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.integers import triton_int8_linear as launcher
from onboard.ops.integers.int8_linear import quantise_int8_rows
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.triton_linear import Tiles
from tests.support.ops import int8
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
EXACT, ROUNDED = 1e-6, 6e-2
"""Of float32, and of bfloat16, which the interpreter cuts off: of 600 draws the largest was 3.2e-2."""
TURNED = 2e-3
"""Where inputs are quantised behind a norm, whose last bit may turn a code of an input."""


@pytest.mark.drawn
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("group", [16, 96, 128, 256, 320])
@pytest.mark.parametrize("rows", [1, 5])
def test_products(rows: int, group: int, offset: bool) -> None:
    seeded()
    weight = int8.weight(72, 320, group, offset=offset)
    x, bias, residual = torch.randn(rows, 320), torch.randn(72), torch.randn(rows, 72)
    form = (weight.scale, weight.offset, None, group, "")
    actual = ops.triton_fused_int8_linear(x, weight.codes, bias, *form, residual)
    expected = x.double() @ weight.values.T + bias.double() + residual.double()
    assert relative_error(actual, expected) < EXACT


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("how", ["token", "tensor"])
def test_products_of_integers(rows: int, how: str) -> None:
    seeded()
    weight = int8.weight(72, 320, 320, offset=False)
    x = torch.randn(rows, 320) * torch.rand(rows, 1)
    given = (x.abs().max() / 100).reshape(1)
    rest = (torch.randn(72), weight.scale, None, given, 320, how, torch.randn(rows, 72))
    actual = ops.triton_fused_int8_linear(x, weight.codes, *rest)
    if rows == 1:  # exact
        expected = x.double() @ weight.values.T + rest[0].double() + rest[-1].double()
    else:
        expected = ops.torch_fused_int8_linear(x, weight.codes, *rest)
    assert relative_error(actual, expected) < EXACT


@pytest.mark.drawn
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)])
@pytest.mark.parametrize("how", ["", "token"])
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_what_stands_around_a_linear(rows: int, how: str, dtype: torch.dtype, limit: float) -> None:
    seeded()
    group = 256 if how else 64
    weight = int8.weight(96, 256, group, offset=not how)
    x, residual = torch.randn(1, rows, 256).to(dtype), torch.randn(1, rows, 48).to(dtype)
    norm = torch.rand(256).to(dtype)
    around = (residual, norm, 1e-6, "silu")
    form = (weight.scale, weight.offset, None, group)
    actual = ops.triton_fused_int8_linear(x, weight.codes, None, *form, how, *around)
    exact = how if rows > 1 else ""
    expected = ops.torch_fused_int8_linear(x, weight.codes, None, *form, exact, *around)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < (max(limit, TURNED) if how else limit)


def test_parts_of_the_inputs_and_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded()
    weight = int8.weight(72, 640, 128, offset=True)
    for rows, splits in ((3, 4), (40, 1)):
        tiles = Tiles(16, 64, 64, 4, 2, splits=splits)
        monkeypatch.setattr(launcher, "choose_int8_tiles", lambda *_, tiles=tiles: tiles)
        x = torch.randn(rows, 640)
        form = (weight.scale, weight.offset, None, 128)
        actual = ops.triton_fused_int8_linear(x, weight.codes, None, *form)
        assert relative_error(actual, x.double() @ weight.values.T) < EXACT


@pytest.mark.parametrize("group", [32, 128, 300])
def test_many_tokens_have_the_weight_written_out(group: int) -> None:
    seeded()
    weight = int8.weight(40, 300, group, offset=True)
    values = launcher.int8_write_out(
        weight.codes, weight.scale, weight.offset, group, torch.float32
    )
    assert relative_error(values, weight.values) < EXACT
    x = torch.randn(launcher.MOST_ROWS + 1, 300)
    form = (weight.scale, weight.offset, None, group)
    actual = ops.triton_fused_int8_linear(x, weight.codes, None, *form)
    assert relative_error(actual, x.double() @ weight.values.T) < EXACT


@pytest.mark.parametrize("given", [None, 0.02])
def test_integers_of_tokens(given: float | None) -> None:
    seeded()
    x = torch.randn(5, 200) * torch.rand(5, 1)
    x[2], x[3, :4] = 0, torch.tensor([0.5, 1.5, -2.5, 1e9]) * 0.02
    scale = None if given is None else torch.tensor([given])
    codes, scales = quantise(x, "token" if given is None else "tensor", scale, dtype=torch.int8)
    expected, wanted = quantise_int8_rows(x, scale)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, wanted)
