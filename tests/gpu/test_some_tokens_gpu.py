"""Eight-bit floats over up to 64 tokens: products and codes beside plain torch, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.linear.activation import activation_function
from onboard.ops.linear.cuda_fp8_codes import suits as suits_codes
from onboard.ops.linear.cuda_some_tokens import Shares, shares_for, some_tokens, suits
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.fp8_linear import BLOCK, dequantised, quantise_rows
from onboard.ops.triton.launch import processors, runs_hopper_code
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

ops = torch.ops.onboard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and runs_hopper_code(torch.device("cuda"))),
        reason="needs a Hopper GPU",
    ),
]

SHAPES = [(200, 1024), (1104, 2880), (4096, 14336), (28672, 4096), (40, 400), (16, 128), (9000, 16)]
SHARES = [
    (8,),
    (48, 1, 1, 3),
    (64, 2, 1, 2),
    (112, 1, 2, 1),
    (56, 2, 2, 2),
    (16, 2, 2, 1),
    (32, 1, 1, 4),
]


def _weight(outputs: int, inputs: int, blocks: bool) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (outputs, inputs), device="cuda", dtype=torch.uint8)
    codes[codes % 128 == 127] = 0  # no numbers
    shape = (-(-outputs // BLOCK), -(-inputs // BLOCK)) if blocks else (outputs,)
    return codes.view(torch.float8_e4m3fn), torch.rand(shape, device="cuda") * 1e-3 + 1e-4


def _codes(x: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    codes, scale = quantise_rows(x, "group" if blocks else "token")
    return codes.contiguous(), scale


def _expected(
    codes: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, act: str
) -> Tensor:
    y = dequantised(codes, x_scale).double() @ dequantised(weight, scale).double().T
    y = y if bias is None else y + bias.double()
    if act:
        gate, up = y.chunk(2, -1)
        y = activation_function(act)(gate) * up
    return y


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("act", ["", "silu", "gelu"])
@pytest.mark.parametrize("tokens", [1, 9, 17, 50, 64])
def test_a_product_is_that_of_plain_torch(tokens: int, act: str, blocks: bool) -> None:
    seeded()
    for outputs, inputs in SHAPES:
        weight, scale = _weight(outputs, inputs, blocks)
        made = outputs // 2 if act else outputs
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        codes, x_scale = _codes(x, blocks)
        bias = torch.randn(outputs, device="cuda").bfloat16() if inputs % 3 else None
        residual = torch.randn(tokens, made, device="cuda").bfloat16() if outputs > 1000 else None
        assert suits(codes, x_scale, weight, bias, scale, residual, act, torch.bfloat16) == (
            made % 8 == 0
        )
        if made % 8:
            continue
        actual = some_tokens(codes, x_scale, weight, bias, scale, residual, act, torch.bfloat16)
        expected = _expected(codes, x_scale, weight, scale, bias, act)
        expected = expected if residual is None else expected + residual.double()
        assert relative_error(actual, expected) < 5e-3, (outputs, inputs)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shares", SHARES)
def test_no_division_of_the_work_changes_the_result(shares: tuple[int, ...], blocks: bool) -> None:
    """Nor does who comes first, of a hundred products behind one another."""
    seeded()
    for tokens, inputs in ((64, 14336), (23, 4224)):
        weight, scale = _weight(2056, inputs, blocks)
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        codes, x_scale = _codes(x, blocks)
        given = (codes, x_scale, weight, None, scale, None, "", torch.bfloat16, Shares(*shares))
        actual = [some_tokens(*given) for _ in range(100)]
        expected = _expected(codes, x_scale, weight, scale, None, "")
        assert relative_error(actual[0], expected) < 5e-3
        assert all(torch.equal(each, actual[0]) for each in actual)


def test_programs_of_a_turn_are_on_the_device_together() -> None:
    many = processors(torch.device("cuda"))
    for rows, inputs, gated in ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True)):
        shares = shares_for(rows, inputs, gated, many)
        assert -(-rows // shares.rows) * shares.cluster <= many


@pytest.mark.parametrize("how", ["token", "group", "tensor"])
@pytest.mark.parametrize("columns", [128, 2816, 4096, 14336, 29568])
@pytest.mark.parametrize("before", ["", "norm", "gate"])
def test_codes_are_those_of_plain_torch(before: str, columns: int, how: str) -> None:
    """But for a few that lie between two, where a norm or a gate is computed otherwise."""
    seeded()
    x = torch.randn(37, columns * (2 if before == "gate" else 1), device="cuda").bfloat16() * 3
    x[5] = 0
    norm = torch.rand(columns, device="cuda").bfloat16() if before == "norm" else None
    act = "silu" if before == "gate" else ""
    given = (torch.rand(1, device="cuda") + 1) / 30 if how == "tensor" else None
    assert suits_codes(x, norm, act)
    codes, scale = quantise(x, how, given, norm, 1e-5, act)
    y = x
    if norm is not None:
        y = ops.torch_rmsnorm(x, norm, 1e-5)
    elif act:
        y = (F.silu(x[:, :columns].float()) * x[:, columns:].float()).bfloat16()
    expected, scales = quantise_rows(y, how, given)
    assert relative_error(scale, scales) < 4e-3
    differ = (codes.float() != expected.float()).double().mean().item()
    assert differ <= (0.02 if before else 0), differ
    assert relative_error(dequantised(codes, scale), dequantised(expected, scales).double()) < 0.02
