"""Linears with eight-bit weights. Run by test_triton_kernels.py in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.linear import fp8_kernels
from onboard.ops.linear import triton_fp8_linear as launcher
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.fp8_linear import quantise_rows
from onboard.ops.linear.triton_linear import Tiles
from onboard.ops.triton import launch
from tests.support.ops.float8 import rounding as rounding_error
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard
SAME = 1.5e-2
"""Of bfloat16: results are rounded, and so are normed inputs, which may quantise the other way."""


def encode(weight: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    """A weight in eight bits, with scales of rows or of blocks of 128 x 128, element by element."""
    rows, columns = weight.shape
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    block = row // 128 * -(-columns // 128) + column // 128 if blocks else row.expand(-1, columns)
    count = int(block.max()) + 1
    scale = torch.zeros(count).scatter_reduce(0, block.flatten(), weight.abs().flatten(), "amax")
    scale = scale / 448
    codes = (weight / scale[block]).to(torch.float8_e4m3fn)
    return codes, scale.view(-1, -(-columns // 128)) if blocks else scale


def exact(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight in float64."""
    rows, columns = codes.shape
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    wide = scale[row // 128, column // 128] if scale.dim() == 2 else scale[:, None]
    return codes.double() * wide.double()


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper GPUs few and some tokens have other kernels, whose tests are their own."""
    for module in (launcher, launcher.cuda_some_tokens, fp8_kernels):
        monkeypatch.setattr(module, "suits", lambda *_: False)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are rounded to the nearest code: the interpreter, unlike a GPU, cuts them off."""

    def nearest(
        x: Tensor,
        how: str,
        given: Tensor | None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        early: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return quantise_rows(x if norm is None else ops.torch_rmsnorm(x, norm, eps), how, given)

    monkeypatch.setattr(launcher, "quantise", nearest)


@pytest.mark.drawn
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("how", ["", "token", "group", "tensor"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_products(rows: int, blocks: bool, how: str) -> None:
    seeded()
    x = (torch.randn(1, rows, 384) * torch.rand(rows, 1) * 5).bfloat16()
    codes, scale = encode(torch.randn(200, 384), blocks)
    given = (x.float().abs().max() / 448).reshape(1)
    bias, residual = torch.randn(200).bfloat16(), torch.randn(1, rows, 200).bfloat16()
    actual = ops.triton_fused_fp8_linear(x, codes, bias, scale, given, how, residual)
    if how and rows > 1:
        q, s = naive_quantised(x[0].double(), how, given)
        x = (q * s)[None]
    expected = x.double() @ exact(codes, scale).T + bias.double() + residual.double()
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) < SAME


def naive_quantised(x: Tensor, how: str, given: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as numbers and the scale of each element, row by row."""
    width = {"token": x.shape[1], "group": 128, "tensor": x.shape[1]}[how]
    scale = torch.empty_like(x)
    for row in range(len(x)):
        for start in range(0, x.shape[1], width):
            part = x[row, start : start + width]
            scale[row, start : start + width] = (
                given.double() if how == "tensor" else part.abs().max() / 448
            )
    return (x / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double(), scale


@pytest.mark.drawn
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_what_stands_around(rows: int, blocks: bool) -> None:
    seeded()
    x, norm = torch.randn(2, rows, 256).bfloat16(), torch.randn(256).bfloat16()
    codes, scale = encode(torch.randn(256, 256), blocks)
    arguments = (x, codes, None, scale, None, "token", None, norm, 1e-5, "silu")
    expected = ops.torch_fused_fp8_linear(*arguments)
    quantisation = 0.0 if rows > 1 else 6e-2  # one token's input is not quantised
    for part in (slice(0, 1), slice(0, 2)):
        actual = ops.triton_fused_fp8_linear(x[part], *arguments[1:])
        many = len(x[part]) * rows > 64
        assert relative_error(actual, expected[part]) < SAME + (6e-2 if many else quantisation)


@pytest.mark.parametrize("how", ["token", "group", "tensor"])
def test_the_reference_quantises_to_the_nearest(how: str) -> None:
    seeded()
    x, given = torch.randn(3, 300), torch.tensor([0.01])
    expected, _ = naive_quantised(x.double(), how, given)
    assert relative_error(quantise_rows(x, how, given)[0].double(), expected) < 1e-3  # ties


@pytest.mark.drawn
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["token", "group", "tensor"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 300), (2, 5000)])  # long rows have two parts
def test_rows_are_quantised(rows: int, columns: int, how: str, norm: bool) -> None:
    seeded()
    x, given = torch.randn(rows, columns), torch.tensor([0.01])
    weight = torch.randn(columns) if norm else None
    codes, scale = quantise(x, how, given, weight, 1e-3)
    y = x.double() if weight is None else ops.torch_rmsnorm(x.double(), weight.double(), 1e-3)
    _, scales = naive_quantised(y, how, given)
    wide = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :columns]
    assert relative_error(wide.expand_as(x), scales) < 1e-6
    exact = y / scales
    fine = (codes.double() - exact).abs() <= rounding_error(exact, 1.0)  # a tie, or its neighbour
    if (
        launch.INTERPRETED
    ):  # the interpreter loses the carry of what is rounded up to a power of two
        fine |= exact.abs().log2().ceil().exp2() - exact.abs() <= rounding_error(exact, 1.0)
    assert bool(fine.all())


@pytest.mark.usefixtures("rounding")
def test_split_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded()
    for blocks in (False, True):
        tiles = Tiles(16, 32, 128, num_warps=1, splits=2)
        monkeypatch.setattr(launcher, "choose_fp8_tiles", lambda *_, tiles=tiles: tiles)
        x = torch.randn(3, 512).bfloat16()
        codes, scale = encode(torch.randn(130, 512), blocks)
        arguments = (x, codes, None, scale, None, "group" if blocks else "token")
        expected = ops.torch_fused_fp8_linear(*arguments)
        assert relative_error(ops.triton_fused_fp8_linear(*arguments), expected.double()) < SAME


def test_shapes_under_tracing() -> None:
    codes, scale = encode(torch.randn(64, 128), blocks=False)
    arguments = (torch.randn(2, 3, 128), codes, None, scale, None, "token", None, None, 0.0, "silu")
    checks = ("test_faketensor",)  # that of the schema cannot multiply eight-bit floats
    torch.library.opcheck(ops.triton_fused_fp8_linear.default, arguments, test_utils=checks)
