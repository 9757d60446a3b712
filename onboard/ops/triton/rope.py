# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Half rotation of queries and keys, with or without a norm of each head before it, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.triton.launch import last_contiguous, overlaps, power_of_two, require_device
from onboard.ops.triton.overlap import wait_for_inputs

ELEMENTS = 1024
"""Channel pairs that a program turns at a time."""


@triton.jit
def _scaled(x, scale, weight_ptr, channel, inside, dtype: tl.constexpr):
    """Return normalised channels, rounded before and after they meet the weight, as by an RMSNorm of its own."""
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, stride_head, heads, first_head, eps,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token: the first SIZE of their DIM channels turn, the rest is kept as it is."""
    HALF: tl.constexpr = SIZE // 2
    dtype = x_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK_HALF)
    turns = channel < HALF
    inside = (head < heads)[:, None] & turns[None, :]
    source = x_ptr + head[:, None] * stride_head + channel[None, :]
    target = out_ptr + head[:, None] * DIM + channel[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    rest = SIZE + tl.arange(0, BLOCK_REST)
    kept = (head < heads)[:, None] & (rest < DIM)[None, :]
    if SIZE < DIM:
        passed = tl.load(x_ptr + head[:, None] * stride_head + rest[None, :], mask=kept, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if SIZE < DIM:
            squares += tl.sum(passed * passed, 1)
        scale = tl.rsqrt(squares / DIM + eps)
        first = _scaled(first, scale, weight_ptr, channel, turns, dtype)
        second = _scaled(second, scale, weight_ptr, HALF + channel, turns, dtype)
        if SIZE < DIM:
            passed = _scaled(passed, scale, weight_ptr, rest, rest < DIM, dtype)
    # The table is cast to the dtype of what it turns, as in the reference, and each half of it is its own.
    cos_first = tl.load(cos_ptr + channel, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin_first = tl.load(sin_ptr + channel, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    cos_second = tl.load(cos_ptr + HALF + channel, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin_second = tl.load(sin_ptr + HALF + channel, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    tl.store(target, (first * cos_first - second * sin_first).to(dtype), mask=inside)
    tl.store(target + HALF, (second * cos_second + first * sin_second).to(dtype), mask=inside)
    if SIZE < DIM:
        tl.store(out_ptr + head[:, None] * DIM + rest[None, :], passed.to(dtype), mask=kept)


@triton.jit(do_not_specialize=["length"])
def _rope_kernel(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, q_heads, k_heads, eps,
    q_stride_batch, q_stride_token, q_stride_head, k_stride_batch, k_stride_token, k_stride_head,
    cos_stride_batch, cos_stride_token, sin_stride_batch, sin_stride_token,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program turns HEADS query heads, or HEADS key heads, of one token."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    cos_ptr += batch * cos_stride_batch + token * cos_stride_token
    sin_ptr += batch * sin_stride_batch + token * sin_stride_token
    q_blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(1)
    if block < q_blocks:
        _rotate_heads(
            q_out_ptr + row * q_heads * DIM, q_ptr + batch * q_stride_batch + token * q_stride_token, q_weight_ptr,
            cos_ptr, sin_ptr, q_stride_head, q_heads, block * HEADS, eps,
            DIM, SIZE, BLOCK_HALF, BLOCK_REST, HEADS, NORM,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_out_ptr + row * k_heads * DIM, k_ptr + batch * k_stride_batch + token * k_stride_token, k_weight_ptr,
            cos_ptr, sin_ptr, k_stride_head, k_heads, (block - q_blocks) * HEADS, eps,
            DIM, SIZE, BLOCK_HALF, BLOCK_REST, HEADS, NORM,
        )  # fmt: skip


def _fake_rope_cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return _fake_rope_cached(q, k, cos, sin)


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor]:
    require_device(q)
    q, k = last_contiguous(q), last_contiguous(k)
    q_out, k_out = _fake_rope_cached(q, k, cos, sin)
    batch, length, q_heads, dim = q.shape
    k_heads, size = k.shape[2], cos.shape[-1]
    cos, sin = (last_contiguous(t).expand(batch, length, size) for t in (cos, sin))
    half = power_of_two(size // 2)
    heads = min(power_of_two(max(q_heads, k_heads)), max(1, ELEMENTS // half))
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    if q.numel():
        _rope_kernel[(batch * length, blocks)](
            q_out, k_out, q, k, *(weights or (None, None)), cos, sin, length, q_heads, k_heads, eps,
            *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
            DIM=dim, SIZE=size, BLOCK_HALF=half, BLOCK_REST=power_of_two(max(1, dim - size)), HEADS=heads,
            NORM=weights is not None, **overlaps(q.device),
        )  # fmt: skip
    return q_out, k_out


@register_op(_fake_rope_cached)
def triton_rope_cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`torch_rope_cached` as one kernel, in float32."""
    return _launch(q, k, cos, sin, None, 0.0)


@register_op(_fake_norm_rope)
def triton_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_norm_rope` as one kernel, for weights of the heads' dtype."""
    return _launch(q, k, cos, sin, (q_weight.contiguous(), k_weight.contiguous()), eps)
