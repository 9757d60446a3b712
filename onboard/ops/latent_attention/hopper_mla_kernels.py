# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, no-any-return"
# (The kernel is written in Gluon's language: its arguments have its types.)
"""The kernel of one token's attention to a paged cache of latents on Hopper GPUs, where a tile of
Triton's compiler would wait for each of its products.

A program has three groups of four warps, as in FlashAttention-3 (arXiv:2407.08608, section 3.1):
one copies tiles of keys, two buffers ahead; one computes their scores and weights, and mixes the
first half of the latents; one mixes the second half meanwhile. Halves, since the sums of all
channels do not fit the registers of one. Layouts and barriers are said here, so Gluon, Triton's
language for that, takes the place of Triton; no interpreter runs it, and `mla_kernel` computes the
same everywhere else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = gl.constexpr(1.4426950408889634)
_STAGES = gl.constexpr(2)
_THREADS = gl.constexpr(128)
"""Of a group of warps."""
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name since, and up to Triton 3.6


@gluon.constexpr_function
def _copied(columns):
    """The layout in which a group of warps copies rows, 16 bytes a thread."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _product(columns):
    """The layout of a group's matrix product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _tile(rows, columns, dtype):
    """The layout of an operand in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.jit
def _copy_queries(shared, query_ptr, head, stride, HEADS: gl.constexpr):
    """Copy the queries of a block of heads; behind the last head are those of the last again."""
    layout: gl.constexpr = _copied(shared.shape[1])
    row = head + gl.arange(0, shared.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, shared.shape[1], gl.SliceLayout(0, layout))[None, :]
    place = query_ptr + gl.minimum(row, HEADS - 1) * stride + column
    async_copy.async_copy_global_to_shared(shared, place)


@gluon.jit
def _key_places(
    table_ptr, cache_ptr, tile, high, stride_page, stride_slot,
    PAGE: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Return where COLUMNS channels of each key of a tile are; behind the last key is that again,
    whose weights are 0.
    """
    layout: gl.constexpr = _copied(COLUMNS)
    n = gl.minimum(tile + gl.arange(0, KEYS, gl.SliceLayout(1, layout)), high - 1)
    start = gl.load(table_ptr + n // PAGE).to(gl.int64) * stride_page + (n % PAGE) * stride_slot
    return cache_ptr + start[:, None] + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _copy_keys(
    table_ptr, cache_ptr, low, high, length, stride_page, stride_slot, left, right, turned,
    full_left, full_right, free_left, free_right, PAGE: gl.constexpr,
):  # fmt: skip
    """Copy tiles of the keys low..high, each half when its buffer is free. Old keys are there from the
    start; the newest is written by the kernel in front.
    """
    KEYS: gl.constexpr = left.shape[1]
    HALF: gl.constexpr = left.shape[2]
    ROPE: gl.constexpr = turned.shape[2]
    for tile in range(low, high, KEYS):
        index = (tile - low) // KEYS
        slot, phase = index % _STAGES, (index // _STAGES + 1) & 1
        place = _key_places(
            table_ptr, cache_ptr, tile, high, stride_page, stride_slot, PAGE, KEYS, HALF
        )
        turned_place = _key_places(
            table_ptr, cache_ptr + 2 * HALF, tile, high, stride_page, stride_slot, PAGE, KEYS, ROPE
        )
        if tile + KEYS >= length:
            gdc_wait()
        mbarrier.wait(free_left.index(slot), phase)
        async_copy.async_copy_global_to_shared(turned.index(slot), turned_place)
        async_copy.async_copy_global_to_shared(left.index(slot), place)
        async_copy.mbarrier_arrive(full_left.index(slot), increment_count=False)
        mbarrier.wait(free_right.index(slot), phase)
        async_copy.async_copy_global_to_shared(right.index(slot), place + HALF)
        async_copy.mbarrier_arrive(full_right.index(slot), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _store(out_ptr, mixed, head, target, HEADS: gl.constexpr, RANK: gl.constexpr):
    """Store half of the channels of a block of heads; `target` is the row of head 0, and rows are
    `target[1]` apart.
    """
    first, step = target
    row = head + gl.arange(0, mixed.shape[0], gl.SliceLayout(1, mixed.type.layout))
    channel = gl.arange(0, mixed.shape[1], gl.SliceLayout(0, mixed.type.layout))
    place = out_ptr + (first + row * step)[:, None] * RANK + channel[None, :]
    gl.store(place, mixed.to(out_ptr.dtype.element_ty), mask=(row < HEADS)[:, None])


@gluon.jit
def _scores(
    query_left, query_right, query_turned, left, right, turned, full_left, full_right, index
):
    """Return the products of all queries and the keys of a tile, once these are there."""
    slot, phase = index % _STAGES, (index // _STAGES) & 1
    ROWS: gl.constexpr = query_left.shape[0]
    KEYS: gl.constexpr = left.shape[1]
    none = gl.zeros([ROWS, KEYS], gl.float32, _product(KEYS))
    mbarrier.wait(full_left.index(slot), phase)
    fence_async_shared()
    keys = turned.index(slot).permute((1, 0))
    sums = warpgroup_mma(query_turned, keys, none, use_acc=False, is_async=True)
    sums = warpgroup_mma(query_left, left.index(slot).permute((1, 0)), sums, is_async=True)
    mbarrier.wait(full_right.index(slot), phase)
    fence_async_shared()
    sums = warpgroup_mma(query_right, right.index(slot).permute((1, 0)), sums, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _weigh_and_mix(
    query_left, query_right, query_turned, left, right, turned, weights_shared, decay_shared,
    full_left, full_right, free_left, ready, taken, query_ptr, query_stride, out_ptr, lse_ptr, target,
    low, high, scale, head, HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute the weights of each tile, hand them to `_mix`, and mix the first half of the latents."""
    ROWS: gl.constexpr = query_left.shape[0]
    KEYS: gl.constexpr = left.shape[1]
    HALF: gl.constexpr = left.shape[2]
    layout: gl.constexpr = _product(KEYS)
    mixing: gl.constexpr = _product(HALF)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    mixed = gl.zeros([ROWS, HALF], gl.float32, mixing)
    gdc_wait()
    gdc_launch_dependents()
    _copy_queries(query_turned, query_ptr + 2 * HALF, head, query_stride, HEADS)
    _copy_queries(query_left, query_ptr, head, query_stride, HEADS)
    _copy_queries(query_right, query_ptr + HALF, head, query_stride, HEADS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    for tile in range(low, high, KEYS):
        index = (tile - low) // KEYS
        scores = _scores(
            query_left, query_right, query_turned, left, right, turned, full_left, full_right, index
        )
        scores *= scale * _LOG2E
        if tile + KEYS > high:
            n = tile + gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :]
            scores = gl.where(n < high, scores, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        weights = gl.exp2(scores - new_peak[:, None])
        decay = gl.exp2(peak - new_peak)
        total = total * decay + gl.sum(weights, 1)
        peak = new_peak
        mbarrier.wait(taken, (index + 1) & 1)
        weights_shared.store(weights.to(query_left.dtype))
        decay_shared.store(decay)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(ready)
        operand = gl.convert_layout(weights.to(query_left.dtype), gl.DotOperandLayout(0, mixing, 2))
        mixed *= gl.convert_layout(decay, gl.SliceLayout(1, mixing))[:, None]
        mixed = warpgroup_mma(operand, left.index(index % _STAGES), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        _barrier()
        mbarrier.arrive(free_left.index(index % _STAGES))
    mbarrier.wait(taken, (gl.cdiv(high - low, KEYS) + 1) & 1)
    decay_shared.store(1.0 / total)
    _barrier()
    mbarrier.arrive(ready)
    mixed *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, mixing))[:, None]
    if SPLIT:
        row = head + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        first, step = target
        gl.store(lse_ptr + first + row * step, peak + gl.log2(total), mask=row < HEADS)
    _store(out_ptr, mixed, head, target, HEADS, 2 * HALF)


@gluon.jit
def _mix(
    right, weights_shared, decay_shared, free_right, ready, taken, out_ptr, target, low, high, head,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Mix the second half of the latents by the weights of `_weigh_and_mix`."""
    ROWS: gl.constexpr = weights_shared.shape[0]
    KEYS: gl.constexpr = right.shape[1]
    HALF: gl.constexpr = right.shape[2]
    layout: gl.constexpr = _product(HALF)
    mixed = gl.zeros([ROWS, HALF], gl.float32, layout)
    for tile in range(low, high, KEYS):
        index = (tile - low) // KEYS
        mbarrier.wait(ready, index & 1)
        fence_async_shared()
        mixed *= decay_shared.load(gl.SliceLayout(1, layout))[:, None]
        mixed = warpgroup_mma(weights_shared, right.index(index % _STAGES), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        _barrier()
        mbarrier.arrive(taken)
        mbarrier.arrive(free_right.index(index % _STAGES))
    mbarrier.wait(ready, gl.cdiv(high - low, KEYS) & 1)
    mixed *= decay_shared.load(gl.SliceLayout(1, layout))[:, None]
    _store(out_ptr + HALF, mixed, head, target, HEADS, 2 * HALF)


@gluon.jit
def _new_barriers(ARRIVALS: gl.constexpr):
    """Return barriers for each buffer, which as many threads arrive at."""
    found = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def hopper_mla_kernel(
    out_ptr, lse_ptr, query_ptr, cu_seqlens_ptr, kv_lens_ptr, block_table_ptr, cache_ptr, scale,
    query_stride_token, query_stride_head, table_stride, stride_page, stride_slot,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr, SPLIT: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Attend ROWS heads of the one token of a sequence over one share of its keys.

    Queries are [tokens, heads, RANK + ROPE], what has positions behind, rotated. Everything else as
    `mla_kernel` has it.
    """
    HALF: gl.constexpr = RANK // 2
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    head, split, splits, sequence = (
        gl.program_id(0) * ROWS,
        gl.program_id(1),
        gl.num_programs(1),
        gl.program_id(2),
    )
    token = gl.load(cu_seqlens_ptr + sequence)
    length = gl.load(kv_lens_ptr + sequence)
    share = gl.cdiv(gl.cdiv(length, KEYS), splits) * KEYS
    low = split * share
    high = gl.minimum(low + share, length)
    if gl.load(cu_seqlens_ptr + sequence + 1) == token:
        high = low
    if low >= high:
        return
    token = token.to(gl.int64)
    query_ptr += token * query_stride_token
    query_left = gl.allocate_shared_memory(dtype, [ROWS, HALF], _tile(ROWS, HALF, dtype))
    query_right = gl.allocate_shared_memory(dtype, [ROWS, HALF], _tile(ROWS, HALF, dtype))
    query_turned = gl.allocate_shared_memory(dtype, [ROWS, ROPE], _tile(ROWS, ROPE, dtype))
    left = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, HALF], _tile(KEYS, HALF, dtype))
    right = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, HALF], _tile(KEYS, HALF, dtype))
    turned = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, ROPE], _tile(KEYS, ROPE, dtype))
    weights = gl.allocate_shared_memory(dtype, [ROWS, KEYS], _tile(ROWS, KEYS, dtype))
    decay = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_left, full_right = _new_barriers(_THREADS), _new_barriers(_THREADS)
    free_left, free_right, handed = _new_barriers(1), _new_barriers(1), _new_barriers(1)
    ready, taken = handed.index(0), handed.index(1)
    fence_async_shared()
    _barrier()
    target = (token * HEADS * splits + split, splits)
    gl.warp_specialize(
        [
            (_weigh_and_mix, (
                query_left, query_right, query_turned, left, right, turned, weights, decay, full_left, full_right,
                free_left, ready, taken, query_ptr, query_stride_head, out_ptr, lse_ptr, target, low, high, scale,
                head, HEADS, SPLIT,
            )),
            (_mix, (right, weights, decay, free_right, ready, taken, out_ptr, target, low, high, head, HEADS)),
            (_copy_keys, (
                block_table_ptr + sequence * table_stride, cache_ptr, low, high, length, stride_page, stride_slot,
                left, right, turned, full_left, full_right, free_left, free_right, PAGE,
            )),
        ],
        [4, 4],
        [160, 112],
    )  # fmt: skip
