# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Rotation of queries and keys, of halves or of pairs of channels, and norms of each head before
it: one launch.
"""

from __future__ import annotations

import torch
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
    """Return normalised channels, rounded before and after they meet the weight, as by an RMSNorm
    of its own.
    """
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    return (
        ((x * scale[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
    )


@triton.jit
def _table(table_ptr, channel, inside, STEP: tl.constexpr, dtype: tl.constexpr):
    """Return a part of a table for each head, in the dtype of what it turns."""
    return (
        tl.load(table_ptr + channel * STEP, mask=inside, other=0.0)
        .to(dtype)
        .to(tl.float32)[None, :]
    )


@triton.jit
def _rotate_heads(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, stride_head, heads, first_head, eps,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, PAIRS: tl.constexpr, COMPLEX: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token: the first SIZE of their DIM channels turn, the rest is kept
    as it is.

    Channels that turn together lie half a head apart, or with PAIRS side by side. They are written
    half a head apart, or with COMPLEX side by side, too; the table has each frequency once then and
    is not rounded.
    """
    HALF: tl.constexpr = SIZE // 2
    dtype = x_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK_HALF)
    turns = channel < HALF
    inside = (head < heads)[:, None] & turns[None, :]
    target = out_ptr + head[:, None] * DIM + channel[None, :]
    whole = tl.arange(0, 2 * BLOCK_HALF)
    inside_whole = (head < heads)[:, None] & (whole < SIZE)[None, :]
    if PAIRS:
        pairs = tl.load(
            x_ptr + head[:, None] * stride_head + whole[None, :], mask=inside_whole, other=0.0
        )
        first, second = tl.split(tl.reshape(pairs, (HEADS, BLOCK_HALF, 2)))
        first, second = first.to(tl.float32), second.to(tl.float32)
    else:
        source = x_ptr + head[:, None] * stride_head + channel[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    rest = SIZE + tl.arange(0, BLOCK_REST)
    kept = (head < heads)[:, None] & (rest < DIM)[None, :]
    if SIZE < DIM:
        passed = tl.load(
            x_ptr + head[:, None] * stride_head + rest[None, :], mask=kept, other=0.0
        ).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if SIZE < DIM:
            squares += tl.sum(passed * passed, 1)
        scale = tl.rsqrt(squares / DIM + eps)
        first = _scaled(first, scale, weight_ptr, channel, turns, dtype)
        second = _scaled(second, scale, weight_ptr, HALF + channel, turns, dtype)
        if SIZE < DIM:
            passed = _scaled(passed, scale, weight_ptr, rest, rest < DIM, dtype)
    if COMPLEX:
        cos = _table(cos_ptr, channel, turns, STEP, tl.float32)
        sin = _table(sin_ptr, channel, turns, STEP, tl.float32)
        turned = tl.join(
            (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
        )
        place = out_ptr + head[:, None] * DIM + whole[None, :]
        tl.store(place, tl.reshape(turned, (HEADS, 2 * BLOCK_HALF)), mask=inside_whole)
    else:
        # The table is cast to the dtype of what it turns, as in the reference, and each half of it
        # is its own.
        cos_first = _table(cos_ptr, channel, turns, STEP, dtype)
        sin_first = _table(sin_ptr, channel, turns, STEP, dtype)
        cos_second = _table(cos_ptr, HALF + channel, turns, STEP, dtype)
        sin_second = _table(sin_ptr, HALF + channel, turns, STEP, dtype)
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
    NORM: tl.constexpr, PAIRS: tl.constexpr, COMPLEX: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
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
            DIM, SIZE, BLOCK_HALF, BLOCK_REST, HEADS, NORM, PAIRS, COMPLEX, STEP,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_out_ptr + row * k_heads * DIM, k_ptr + batch * k_stride_batch + token * k_stride_token, k_weight_ptr,
            cos_ptr, sin_ptr, k_stride_head, k_heads, (block - q_blocks) * HEADS, eps,
            DIM, SIZE, BLOCK_HALF, BLOCK_REST, HEADS, NORM, PAIRS, COMPLEX, STEP,
        )  # fmt: skip


def _fake_rope_cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return _fake_rope_cached(q, k, cos, sin)


def _fake_rope_pairs(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_rope_cached(q, k, freqs_cis, freqs_cis)


def _turn(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    size: int,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    *,
    pairs: bool = False,
    is_complex: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel over tables [batch, sequence, size], or of half the size, in which a batch
    may be broadcast.
    """
    require_device(q)
    q, k = last_contiguous(q), last_contiguous(k)
    q_out, k_out = _fake_rope_cached(q, k, cos, sin)
    batch, length, q_heads, dim = q.shape
    k_heads = k.shape[2]
    cos, sin = (t.expand(batch, length, -1) for t in (cos, sin))
    half = power_of_two(size // 2)
    heads = min(power_of_two(max(q_heads, k_heads)), max(1, ELEMENTS // half))
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    if q.numel():
        _rope_kernel[(batch * length, blocks)](
            q_out, k_out, q, k, *(weights or (None, None)), cos, sin, length, q_heads, k_heads, eps,
            *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
            DIM=dim, SIZE=size, BLOCK_HALF=half, BLOCK_REST=power_of_two(max(1, dim - size)), HEADS=heads,
            NORM=weights is not None, PAIRS=pairs, COMPLEX=is_complex, STEP=cos.stride(-1), **overlaps(q.device),
        )  # fmt: skip
    return q_out, k_out


@register_op(_fake_rope_cached, rotary=("cos", "sin"), row_wise=True)
def triton_rope_cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`torch_rope_cached` as one kernel, in float32."""
    return _turn(q, k, last_contiguous(cos), last_contiguous(sin), cos.shape[-1])


@register_op(_fake_norm_rope, rotary=("cos", "sin"), row_wise=True)
def triton_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_norm_rope` as one kernel, for weights of the heads' dtype."""
    weights = q_weight.contiguous(), k_weight.contiguous()
    return _turn(q, k, last_contiguous(cos), last_contiguous(sin), cos.shape[-1], weights, eps)


@register_op(_fake_rope_cached, rotary=("cos", "sin"), row_wise=True)
def triton_rope_deinterleaved(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_rope_deinterleaved` as one kernel, in float32."""
    return _turn(q, k, last_contiguous(cos), last_contiguous(sin), cos.shape[-1], pairs=True)


@register_op(_fake_rope_pairs, rotary=("freqs_cis",), row_wise=True)
def triton_rope_pairs(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """`torch_rope_pairs` as one kernel, for freqs_cis of complex64."""
    parts = torch.view_as_real(last_contiguous(freqs_cis.resolve_conj()))
    return _turn(
        q, k, parts[..., 0], parts[..., 1], 2 * freqs_cis.shape[-1], pairs=True, is_complex=True
    )


def turn_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turns: str, norms: tuple[Tensor, Tensor, float] | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys as `TURNS` says, in one kernel; halves behind norms of their weights and eps."""
    if norms is not None:
        assert turns == "rope_cached", "norms stand before the rotation of halves"
        return triton_norm_rope(q, k, *norms, cos, sin)
    if turns == "rope_pairs":
        size = 2 * cos.shape[-1]
        return _turn(q, k, cos, sin, size, pairs=True, is_complex=True)
    cos, sin = last_contiguous(cos), last_contiguous(sin)
    return _turn(q, k, cos, sin, cos.shape[-1], pairs=turns == "rope_deinterleaved")
