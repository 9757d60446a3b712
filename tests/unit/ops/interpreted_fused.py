"""The kernels that fusions put in against float64; `test_triton_kernels.py` starts this in Triton's
interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error
from tests.support.ops.ragged import DEVICE

ops = torch.ops.onboard

# The interpreter truncates where hardware rounds, hence twice the usual error of bfloat16.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2.5e-2}
HEADS = [
    *((torch.float32, dim, size) for dim, size in ((8, 8), (24, 24), (80, 32), (7, 2))),
    (torch.float16, 20, 6),
    (torch.bfloat16, 20, 20),
]
"""Dtype and channels of a head, and how many of them turn."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def heads_in_a_projection(
    dim: int, dtype: torch.dtype, q_heads: int = 6, k_heads: int = 2
) -> tuple[Tensor, Tensor]:
    """Queries and keys with gaps between their tokens; the numbers of heads differ."""
    wide = randn(2, 3, (q_heads + 1 + k_heads) * dim, dtype=dtype)
    q, k = wide[..., : q_heads * dim], wide[..., (q_heads + 1) * dim :]
    return q.view(2, 3, q_heads, dim), k.view(2, 3, k_heads, dim)


@pytest.mark.parametrize(("dtype", "dim", "size"), HEADS)
def test_rope_pairs(dtype: torch.dtype, dim: int, size: int) -> None:
    q, k = heads_in_a_projection(dim, dtype)
    angle = torch.rand(1 if size < dim else 2, 3, size // 2, device=DEVICE) * 6.28
    freqs = torch.polar(torch.full_like(angle, 1.25), angle).expand(2, 3, size // 2)
    for ours, x in zip(ops.triton_rope_pairs(q, k, freqs), (q.double(), k.double()), strict=True):
        turned = (
            torch.complex(x[..., 0:size:2], x[..., 1:size:2])
            * freqs.to(torch.complex128)[:, :, None]
        )
        expected = torch.cat([torch.view_as_real(turned).flatten(-2), x[..., size:]], -1)
        assert ours.dtype == dtype
        assert relative_error(ours, expected) < DTYPES[dtype]
        assert torch.equal(ours[..., size:].double(), x[..., size:])


def test_rope_pairs_turns_the_other_way_with_conjugate_frequencies() -> None:
    q, k = heads_in_a_projection(8, torch.float32)
    angle = torch.rand(2, 3, 4, device=DEVICE)
    freqs = torch.polar(torch.ones_like(angle), angle)
    back = ops.triton_rope_pairs(*ops.triton_rope_pairs(q, k, freqs), freqs.conj())
    assert relative_error(back[0], q) < 1e-6
    assert relative_error(back[1], k) < 1e-6


@pytest.mark.parametrize(("dtype", "dim", "size"), HEADS)
def test_rope_deinterleaved(dtype: torch.dtype, dim: int, size: int) -> None:
    q, k = heads_in_a_projection(dim, dtype, 5, 1)
    # Nothing about its halves is assumed
    cos, sin = (randn(1, 3, size).expand(2, 3, size) for _ in range(2))
    rounded = cos.to(dtype).double(), sin.to(dtype).double()
    expected = ops.torch_rope_deinterleaved(q.double(), k.double(), *rounded)
    for ours, theirs in zip(ops.triton_rope_deinterleaved(q, k, cos, sin), expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 4, 24), (1, 1, 2048), (7,), (0, 4)])
def test_l2norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype) * 3
    actual, exact = ops.triton_l2norm(x, 1e-2), x.double()
    assert (actual.dtype, actual.shape) == (dtype, x.shape)
    if x.numel():
        assert (
            relative_error(actual, exact / (exact.square().sum(-1, keepdim=True) + 1e-2).sqrt())
            < DTYPES[dtype]
        )


def test_l2norm_of_heads_inside_a_projection() -> None:
    q, _ = heads_in_a_projection(24, torch.float32)
    assert not q.is_contiguous()
    assert relative_error(ops.triton_l2norm(q, 1e-6), ops.torch_l2norm(q.double(), 1e-6)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (5, 190), (32, 19)])
def test_fused_gdn_gating(dtype: torch.dtype, heads: int, tokens: int) -> None:
    wide = randn(2, tokens, 2 * heads, dtype=dtype) * 20
    (a, b), bias = wide.chunk(2, -1), randn(heads, dtype=dtype)
    rate = -randn(heads).exp()
    g, beta = ops.triton_fused_gdn_gating(a, b, rate, bias)
    assert (g.dtype, beta.dtype) == (torch.float32, dtype)
    dt = a.double() + bias.double()
    dt = dt.clamp(min=0) + dt.abs().neg().exp().log1p()
    expected = rate.double() * dt
    # What is used is e^g: of steps far below one the size does not matter.
    error = (g.double() - expected).abs() / (rate.double().abs() * dt.clamp(min=1))
    assert error.max() < 2e-6, "in float32, whatever the projections are in"
    off = (beta.double() - b.double().sigmoid()).abs().max().item()
    assert off < DTYPES[dtype], "a share of one: far below zero it is zero in half precision"


PAIRS = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.bfloat16, torch.float16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float32),
    (torch.bfloat16, torch.float32, None),
]
"""Dtypes of both operands of a sum, and what it is cast to before the norm."""


@pytest.mark.parametrize("wide", ["", "wide_"])
@pytest.mark.parametrize(("left", "right", "dtype"), PAIRS)
def test_a_sum_that_is_cast_before_its_norm(
    left: torch.dtype, right: torch.dtype, dtype: torch.dtype | None, wide: str
) -> None:
    x, residual, weight = randn(2, 5, 40, dtype=left) * 3, randn(2, 5, 40, dtype=right), randn(40)
    weight = weight.to(dtype or torch.float32)
    results = [
        getattr(ops, f"{backend}_fused_add_{wide}rmsnorm")(x, residual, weight, 1e-3, dtype)
        for backend in ("triton", "torch")
    ]
    exact = x.double() + residual.double()
    low = (
        exact.to(torch.promote_types(left, right))
        .to(dtype or torch.promote_types(left, right))
        .double()
    )
    normed = low * (low.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    for got in results:
        assert [each.dtype for each in got] == [each.dtype for each in results[1]]
        assert relative_error(got[0], normed) < DTYPES[got[0].dtype if dtype is None else dtype]
        assert relative_error(got[1], exact) < DTYPES[torch.promote_types(left, right)]


def test_registration_is_sound() -> None:
    q, k = heads_in_a_projection(8, torch.float32)
    table, freqs = randn(2, 3, 8), torch.complex(randn(2, 3, 4), randn(2, 3, 4))
    calls = {
        ops.triton_rope_pairs: (q, k, freqs),
        ops.triton_rope_deinterleaved: (q, k, table, table),
        ops.triton_l2norm: (q, 1e-6),
        ops.triton_fused_gdn_gating: (table, table, table[0, 0], table[0, 1]),
        ops.triton_fused_add_rmsnorm: (table, table, table[0, 0], 1e-6, torch.bfloat16),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
