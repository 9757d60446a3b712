# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernel is written in Triton's language: its arguments have Triton's types.)
"""What the delta rule's chunks need besides where each key channel has a gate of its own (Kimi Team
2025, arXiv:2510.26692).

What is left of token s at token l differs from channel to channel, so that it is no factor of their
product. As a product of two powers, one of each token, one of these may overflow. Between blocks of
ROWS tokens both are taken from the beginning of the later block: neither is above one. Within a
block each channel's decay is computed for each pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onboard.ops.delta_rule.delta_rule_kernels import load_chunk, load_tile, unit
from onboard.ops.recurrences.triton_state import span

ROWS = 16


@triton.jit
def _older(
    k_ptr, g_ptr, start, base, begin, key, k_stride, g_stride,
    KEY: tl.constexpr, NORMALISE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return [CHUNK, channels], the chunk's keys that come before its token `begin`, as they reach
    that token; zeros of the others.
    """
    row = tl.arange(0, CHUNK)
    token, mask = start + base + row, (row < begin)[:, None] & (key < KEY)[None, :]
    k = load_tile(k_ptr, token * k_stride, key, mask)
    g = load_tile(g_ptr, token * g_stride, key, mask)
    if NORMALISE:
        k = unit(k, 1)
    return k * tl.exp(tl.sum(g, 0)[None, :] - tl.cumsum(g, 0))


@triton.jit
def kda_products_kernel(
    system_ptr, weights_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, kv_lens_ptr, slots_ptr, scale,
    q_stride_token, q_stride_head, k_stride_token, k_stride_head, g_stride_token, g_stride_head, beta_stride_token,
    HEADS: tl.constexpr, KEY: tl.constexpr, NORMALISE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of a chunk's system, but for the identity, and of its weights: beta_l k_l k_s of
    s < l and q_l k_s of s <= l, decayed from s to l channel by channel.
    """
    head, first = tl.program_id(1), tl.program_id(0) * ROWS
    start, tokens, _, _ = span(tl.program_id(2), cu_seqlens_ptr, kv_lens_ptr, slots_ptr)
    if first >= tokens:
        return
    begin = first % CHUNK
    row, column, key = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token, inside = start + first + row, first + row < tokens
    mask = inside[:, None] & (key < KEY)[None, :]
    q_ptr, k_ptr = q_ptr + head * q_stride_head, k_ptr + head * k_stride_head
    g_ptr += head * g_stride_head
    q = load_tile(q_ptr, token * q_stride_token, key, mask)
    k = load_tile(k_ptr, token * k_stride_token, key, mask)
    if NORMALISE:
        q, k = unit(q, 1), unit(k, 1)
    q *= scale
    total = tl.cumsum(load_tile(g_ptr, token * g_stride_token, key, mask), 0)
    older = _older(
        k_ptr, g_ptr, start, first - begin, begin, key, k_stride_token, g_stride_token,
        KEY, NORMALISE, CHUNK,
    )  # fmt: skip
    reached = tl.exp(total)
    system = tl.dot(k * reached, tl.trans(older), input_precision=PRECISION)
    weights = tl.dot(q * reached, tl.trans(older), input_precision=PRECISION)
    for index in range(ROWS):
        here = (row == index)[:, None]
        since = tl.sum(tl.where(here, total, 0.0), 0)[None, :]
        brought = tl.sum(tl.where(here, k, 0.0), 0)[None, :] * tl.exp(
            tl.minimum(total - since, 0.0)
        )
        is_column = (column == begin + index)[None, :]
        later = tl.where(row > index, tl.sum(k * brought, 1), 0.0)[:, None]
        system = tl.where(is_column, later, system)
        later = tl.where(row >= index, tl.sum(q * brought, 1), 0.0)[:, None]
        weights = tl.where(is_column, later, weights)
    system *= load_chunk(beta_ptr + head, token, beta_stride_token, inside)[:, None]
    place = (token * HEADS + head)[:, None] * CHUNK + column[None, :]
    tl.store(system_ptr + place, system, mask=inside[:, None])
    tl.store(weights_ptr + place, weights, mask=inside[:, None])
