# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""The kernel in front of a decode step's attention to latents: it makes queries of latents, rotates
what has positions, and stores the new tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.attention.rotation_kernels import load_turned
from onboard.ops.latent_attention.mla_kernels import load_rows, store_new_latent
from onboard.ops.triton.overlap import wait_for_inputs


@triton.jit
def _absorbed(
    row_ptr, real, weight, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, DOT_TYPE: tl.constexpr
):
    """Return the products of a head's queries with its weight [nope, part of the rank]."""
    nope = load_rows(row_ptr, real, NOPE, BLOCK_NOPE, DOT_TYPE)
    return tl.dot(nope, weight.to(DOT_TYPE), input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def absorb_kernel(
    out_ptr, nope_ptr, rotated_ptr, weight_ptr, latent_ptr, key_ptr, slot_ptr, cache_ptr, cos_ptr, sin_ptr,
    tokens, nope_stride_token, nope_stride_head, rotated_stride_token, rotated_stride_head, weight_stride_head,
    latent_stride, key_stride, cos_stride, sin_stride, stride_page, stride_slot,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    DOT_TYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_PART: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, OVERLAP: tl.constexpr,
    SIZE: tl.constexpr = 0, STEP: tl.constexpr = 1, TURNS: tl.constexpr = 0,
):  # fmt: skip
    """Write BLOCK_PART channels of the queries of one head and BLOCK_M tokens, [tokens, heads, rank +
    rope]; the programs of the first channels also write what has positions, rotated as in
    `mla_kernel`, and store the new tokens, each program of a head some of them.

    Weights, which no kernel writes, are fetched before the kernel in front is waited for.
    """
    head, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel, inner = part * BLOCK_PART + tl.arange(0, BLOCK_PART), tl.arange(0, BLOCK_NOPE)
    inside = (inner < NOPE)[:, None] & (channel < RANK)[None, :]
    weight_ptr += head.to(tl.int64) * weight_stride_head
    weight = tl.load(weight_ptr + inner[:, None] * RANK + channel[None, :], mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    token = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = token < tokens
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    row_ptr = nope_ptr + token * nope_stride_token + head * nope_stride_head
    absorbed = _absorbed(row_ptr, real, weight, NOPE, BLOCK_NOPE, DOT_TYPE)
    target = out_ptr + (token * HEADS + head)[:, None] * (RANK + ROPE)
    element = out_ptr.dtype.element_ty
    tl.store(
        target + channel[None, :],
        absorbed.to(element),
        mask=real[:, None] & (channel < RANK)[None, :],
    )
    if part > 0:
        return
    turned, x_ptr = tl.arange(0, BLOCK_ROPE)[None, :], rotated_ptr + head * rotated_stride_head
    x_ptr, there = (x_ptr + token * rotated_stride_token)[:, None], real[:, None] & (turned < ROPE)
    if TURNS:
        rotated = load_turned(
            x_ptr, turned, there, cos_ptr + (token * cos_stride)[:, None],
            sin_ptr + (token * sin_stride)[:, None], SIZE, STEP, TURNS,
        )  # fmt: skip
    else:
        rotated = tl.load(x_ptr + turned, mask=there, other=0.0)
    tl.store(target + RANK + turned, rotated.to(element), mask=there)
    for i in range(block * BLOCK_M + head, tl.minimum(block * BLOCK_M + BLOCK_M, tokens), HEADS):
        new = tl.cast(i, tl.int64)
        cos, sin = cos_ptr, sin_ptr
        if TURNS:
            cos += new * cos_stride
            sin += new * sin_stride
        store_new_latent(
            latent_ptr + new * latent_stride, key_ptr + new * key_stride, tl.load(slot_ptr + new), cache_ptr, 1.0,
            cos, sin, stride_page, stride_slot, False, RANK, ROPE, PAGE, BLOCK_RANK, BLOCK_ROPE, SIZE, STEP, TURNS,
        )  # fmt: skip
