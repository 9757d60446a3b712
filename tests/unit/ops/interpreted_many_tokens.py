"""Linears over many tokens. Run by test_triton_kernels.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onboard.ops  # noqa: F401
from onboard.ops.linear import triton_many_tokens as launcher
from onboard.ops.linear.triton_many_tokens import Tile, choose_tile, tiled_product
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard

SAME = 1e-6
CODES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which every case has several, whole ones and others."""
    tile = Tile(32, 64, num_warps=1, num_stages=1)
    monkeypatch.setattr(launcher, "choose_tile", lambda *_: tile)
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")


def expected(x: Tensor, weight: Tensor, residual: Tensor | None, act: str) -> Tensor:
    y = x.double() @ weight.double().t()
    if act:
        gate, up = y.chunk(2, -1)
        y = {"silu": F.silu, "relu": F.relu}[act](gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.drawn
@pytest.mark.parametrize("act", ["", "silu", "relu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(64, 128, 128), (70, 200, 152)])
def test_numbers(rows: int, outputs: int, columns: int, residual: bool, act: str) -> None:
    x, weight = torch.randn(rows, columns), torch.randn(outputs * (2 if act else 1), columns)
    added = torch.randn(rows, outputs) if residual else None
    actual = tiled_product(x, weight, None, added, act)
    if act or residual:
        assert actual is not None
        assert relative_error(actual, expected(x, weight, added, act)) < SAME
    else:
        assert actual is None  # nothing stands behind it


def encoded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1) / CODES[dtype]
    codes = x / scale[:, None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_codes_with_scales(dtype: torch.dtype, act: str, scales: torch.dtype) -> None:
    rows, outputs, columns = 70, 208, 272
    x, x_scale = encoded(torch.randn(rows, columns), dtype)
    weight, scale = encoded(torch.randn(outputs * (2 if act else 1), columns), dtype)
    scale, residual = scale.to(scales), torch.randn(rows, outputs)
    actual = tiled_product(x, weight, None, residual, act, x_scale, scale, torch.float32)
    assert actual is not None
    assert actual.dtype == torch.float32
    values = x.float() * x_scale[:, None], weight.float() * scale.float()[:, None]
    assert relative_error(actual, expected(*values, residual, act)) < 2e-6


def test_what_copies_of_tiles_cannot_address() -> None:
    weight, residual = torch.randn(64, 48), torch.randn(70, 64)
    assert tiled_product(torch.randn(70, 48), weight, None, residual, "") is not None
    assert tiled_product(torch.randn(70, 50)[:, :48], weight, None, residual, "") is None
    assert (
        tiled_product(torch.randn(70 * 48 + 1)[1:].view(70, 48), weight, None, residual, "") is None
    )
    assert (
        tiled_product(torch.randn(70, 48), torch.randn(62, 48), None, residual[:, :62], "") is None
    )


def test_the_fused_linear_takes_it() -> None:
    """More tokens than its kernel for few, no bias: the result is that of the tiles, bit for bit."""
    x, norm = torch.randn(1, 300, 128).bfloat16(), torch.randn(128).bfloat16()
    weight = torch.randn(8192, 128).bfloat16()
    actual = ops.triton_fused_linear(x, weight, None, None, norm, 1e-3, "silu")
    normalised = ops.triton_rmsnorm(x[0], norm, 1e-3)
    assert torch.equal(actual[0], tiled_product(normalised, weight, None, None, "silu"))
    wide = ops.torch_rmsnorm(x.double(), norm.double(), 1e-3)
    assert relative_error(actual[0], expected(wide[0], weight, None, "silu")) < 2.5e-2


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "gated", "whole"),
    [
        (8192, 14336, 4096, True, True),
        (512, 14336, 4096, True, False),  # 3.4 tiles for each of 132 programs
        (8192, 4096, 14336, False, True),
        (256, 4096, 14336, False, False),
        (2048, 1024, 3072, False, True),
    ],
)
def test_tiles_where_all_programs_have_work(
    rows: int, outputs: int, columns: int, gated: bool, whole: bool
) -> None:
    tile = choose_tile(rows, outputs, columns, torch.bfloat16, gated, 132)
    assert (tile is not None) == whole
    assert choose_tile(rows, outputs, columns, torch.float32, gated, 132) is None
    if tile is not None:
        count = -(-rows // tile.rows) * -(-outputs // tile.outputs)
        assert count / (-(-count // 132) * 132) > 0.9
