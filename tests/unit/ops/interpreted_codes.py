"""Producers that quantise, and what reads their codes. Run by test_triton_kernels.py in a process
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from tests.support.ops.naive import Options, cached_attention, make_batch, relative_error
from tests.unit.ops.interpreted_fp8 import SAME, encode, seeded

ops = torch.ops.onboard


def are_near(codes: Tensor, expected: Tensor) -> bool:
    """Whether codes are a tie's neighbour apart at most; the interpreter, unlike a GPU, loses the
    carry of what is rounded up to a power of two, which few numbers are: of 2^-6, the least normal
    one, nothing is left.
    """
    size = expected.double().abs()
    difference = (codes.double() - expected.double()).abs()
    near = difference <= (size / 7).clamp(min=2**-9)
    return (
        bool((difference <= (size / 2).clamp(min=2**-6)).all())
        and float(near.double().mean()) > 0.95  # of a scale one step of bfloat16 off, too
    )


@pytest.mark.drawn
@pytest.mark.parametrize("how", ["token", "group", "tensor"])
@pytest.mark.parametrize("kind", ["norm", "wide norm", "silu", "relu2"])
def test_producers(kind: str, how: str) -> None:
    seeded()
    x, given = torch.randn(2, 3, 600).bfloat16(), torch.tensor([0.013])
    weight = torch.randn(600).to(torch.float32 if "wide" in kind else torch.bfloat16)
    name = "rmsnorm_quant_fp8" if "norm" in kind else "silu_and_mul_quant_fp8"
    values = (weight, 1e-3) if "norm" in kind else (kind,)
    expected, actual = (
        getattr(ops, f"{backend}_{name}")(x, *values, how, given) for backend in ("torch", "triton")
    )
    assert [each.shape for each in actual] == [each.shape for each in expected]
    assert relative_error(actual[1], expected[1]) < SAME
    assert are_near(actual[0], expected[0])


@pytest.mark.drawn
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("how", ["token", "group", "layer"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_of_codes(rows: int, blocks: bool, how: str, activation: str) -> None:
    seeded()
    codes = torch.randn(1, rows, 384).to(torch.float8_e4m3fn)
    scales = {
        "token": torch.rand(1, rows, 1) + 0.1,
        "group": torch.rand(1, rows, 3) + 0.1,
        "layer": torch.rand(1) + 0.1,
    }[how]
    weight, weight_scale = encode(torch.randn(256, 384), blocks)
    bias, residual = torch.randn(256).bfloat16(), torch.randn(1, rows, 256).bfloat16()
    residual = residual[..., :128] if activation else residual
    rest = (weight, bias, weight_scale, torch.bfloat16, residual, activation)
    expected = ops.torch_fp8_codes_linear(codes, scales, *rest)
    actual = ops.triton_fp8_codes_linear(codes, scales, *rest)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) < SAME


@pytest.mark.drawn
@pytest.mark.parametrize("how", ["", "group"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_block_with_eight_bit_weights(rows: int, how: str) -> None:
    seeded()
    x = torch.randn(1, rows, 256).bfloat16()
    both, both_scale = encode(torch.randn(512, 256) / 16, blocks=True)
    down, down_scale = encode(torch.randn(128, 256) / 16, blocks=True)
    values = (x, both, down, both_scale, down_scale, None, torch.randn(128).bfloat16(), "silu", how)
    expected = ops.torch_fused_finegrained_fp8_swiglu_mlp(*values)
    actual = ops.triton_fused_finegrained_fp8_swiglu_mlp(*values)
    # The interpreter cuts numbers off; one token's inputs are not quantised, nor many without the library
    assert relative_error(actual, expected.double()) < (0.06 if how else SAME)


@pytest.mark.parametrize("how", ["token", "group", "tensor"])
def test_shapes_under_tracing(how: str) -> None:
    x, given = torch.randn(2, 3, 300), torch.tensor([0.1])
    checks = ("test_faketensor",)
    for name, values in (("rmsnorm", (torch.randn(300), 1e-3)), ("silu_and_mul", ("silu",))):
        op = getattr(ops, f"triton_{name}_quant_fp8").default
        torch.library.opcheck(op, (x, *values, how, given), test_utils=checks)


ATTENTION_STEPS = {
    "prefill": [(5, 5), (17, 17)],
    "decode": [(1, 1), (1, 9), (1, 70)],
    "mixed": [(1, 20), (7, 7), (1, 16)],
}


@pytest.mark.drawn
@pytest.mark.parametrize("step", ATTENTION_STEPS)
@pytest.mark.parametrize("name", ["triton_cached_attention", "invariant_cached_attention"])
def test_attention_that_writes_codes(name: str, step: str) -> None:
    seeded()
    batch = make_batch(ATTENTION_STEPS[step], heads=6, kv_heads=2, dim=24, value_dim=20, padding=2)
    sinks, scale = torch.randn(6), torch.tensor([0.006])
    twin = replace(batch, k_cache=batch.k_cache.clone(), v_cache=batch.v_cache.clone())
    exact = cached_attention(batch, Options(sinks=sinks))
    codes = getattr(ops, name)(*batch.arguments(), sinks, out_scale=scale)
    known = ops.torch_cached_attention(*twin.arguments(), sinks, out_scale=scale)
    expected = (exact / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert codes.dtype == known.dtype == torch.float8_e4m3fn
    assert are_near(codes, expected)
    assert are_near(known, expected)
    assert (known.float() - expected.float()).count_nonzero() < 0.01 * known.numel()  # ties
