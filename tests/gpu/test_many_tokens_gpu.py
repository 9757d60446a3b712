"""Linears over many tokens in tiles of our own, on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onboard.ops  # noqa: F401
from onboard.ops.linear.triton_many_tokens import tiled_product
from tests.support.ops.naive import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "large tiles": (4096, 4096, 1024),
    "gates": (4000, 14336, 1024),
    "small tiles": (2040, 1024, 3072),
    "narrow": (1020, 1016, 2064),
}
DTYPES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float8_e4m3fn: 1e-2, torch.int8: 1e-2}


def drawn(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return values [rows, columns], and scales of rows where they are codes."""
    x = torch.randn(rows, columns, device="cuda") * torch.rand(rows, 1, device="cuda")
    if dtype.itemsize == 2:
        return x.to(dtype), None
    scale = x.abs().amax(1) / (448 if dtype == torch.float8_e4m3fn else 127)
    codes = x / scale[:, None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def double(codes: Tensor, scale: Tensor | None) -> Tensor:
    return codes.double() * (1 if scale is None else scale.double()[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_numbers(size: str, dtype: torch.dtype) -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    (rows, outputs, columns), gated = SIZES[size], size == "gates"
    x, x_scale = drawn(rows, columns, dtype)
    weight, scale = drawn(outputs * (2 if gated else 1), columns, dtype)
    out = dtype if dtype.itemsize == 2 else torch.bfloat16
    residual = None if gated else torch.randn(rows, outputs, device="cuda").to(out)
    act = "silu" if gated else ""
    actual = tiled_product(x, weight, None, residual, act, x_scale, scale, out)
    assert actual is not None
    y = double(x, x_scale) @ double(weight, scale).t()
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    expected = y if residual is None else y + residual.double()
    assert relative_error(actual, expected) < DTYPES[dtype]
    again = tiled_product(x, weight, None, residual, act, x_scale, scale, out)
    assert torch.equal(actual, again)
