# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Sums and concatenations over the ranks by kernels that write to the other ranks' memory.

Memory that waits for data holds a pattern that nothing is sent as: minus zero, for which zero is sent
(the Lamport way of NVIDIA's TensorRT-LLM). An element tells by itself that it is there, so no fence,
no flag and no second message is needed, and links carry nothing but data. Whoever has read an element
puts the pattern back. In one shot each rank sends all that it has to every other rank, and each adds
up everything; in two shots each rank adds up its part of every block, and sends the sums. Sums are
taken in float32 in the order of ranks: all ranks have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.triton.launch import TYPES, overlaps, power_of_two
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.parallel.peer_memory import ABSENT, PeerMemory, Region

BLOCK_BYTES = 2048
"""Bytes of a program: sixteen for each thread of its four warps."""
MOST_BYTES = 2**20
"""Bytes of a tensor that is summed so; a longer one is a sum of parts (`triton_long_sum`)."""
_GATHERED, _GATHERING = 24 * 2**20, 512
"""Bytes of a concatenation, logits of 64 rows among them, and programs that make it: all of them run
at once on a GPU of 64 processors.
"""
_ONE_SHOT = {2: 2**20, 3: 2**18, 4: 2**17}
"""World size -> bytes up to which everything is sent to everybody."""
_ONE_SHOT_BEYOND = 2**16
_ABSENT = tl.constexpr(ABSENT)
_ABSENT_PAIR = tl.constexpr(ABSENT * 2**16 + (ABSENT & 0xFFFF))


@triton.jit
def nothing(x):
    """Return the pattern of memory that waits, as elements of x's shape and dtype."""
    if x.dtype.primitive_bitwidth == 16:
        pattern = tl.full(x.shape, _ABSENT, tl.int16)
    else:
        pattern = tl.full(x.shape, _ABSENT_PAIR, tl.int32)
    return pattern.to(x.dtype, bitcast=True)


@triton.jit
def is_nothing(x):
    """Return where elements have the pattern of memory that waits."""
    if x.dtype.primitive_bitwidth == 16:
        found = x.to(tl.int16, bitcast=True) == _ABSENT
    else:
        found = x.to(tl.int32, bitcast=True) == _ABSENT_PAIR
    return found


@triton.jit
def sendable(x):
    """Return x with zero for the pattern: minus zero, or a float32 of 1e-41."""
    return tl.where(is_nothing(x), tl.zeros_like(x), x)


@triton.jit
def memory_of(addresses_ptr, rank, DTYPE: tl.constexpr):
    """Return where a rank's memory begins, for elements of a dtype."""
    address = tl.multiple_of(tl.load(addresses_ptr + rank), 16)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def arrived(places, inside, gone_ptr):
    """Return the elements at `places` once all of them are there, and let the places wait again.

    The next exchange through these places is the one after the next of this program, and whoever
    sends it has had the next from here: from a kernel behind this one, with which this is done.
    """
    x = tl.load(places, mask=inside, other=0.0, volatile=True)
    missing = tl.max(is_nothing(x).to(tl.int32), 0)
    while missing != 0:
        x = tl.load(places, mask=inside, other=0.0, volatile=True)
        missing = tl.max(is_nothing(x).to(tl.int32), 0)
        if tl.load(gone_ptr, volatile=True) != 0:
            missing = 0
    tl.store(places, nothing(x), mask=inside)
    return x


@triton.jit
def send_to_all(addresses_ptr, start, places, x, inside, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write elements that can be sent to every other rank's memory, at `start` and on."""
    for step in tl.static_range(1, WORLD):
        # Each begins with its neighbour, so that no rank is written to by all at once
        peer = memory_of(addresses_ptr, (RANK + step) % WORLD, x.dtype)
        tl.store(peer + start + places, x, mask=inside, cache_modifier=".wt")


@triton.jit
def sum_of_all(
    x, addresses_ptr, start, step, places, inside, gone_ptr,
    RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Return x and what came from the others, added up in float32 in the order of ranks; what rank
    r sends is at `start + r * step`.
    """
    total = tl.zeros(x.shape, tl.float32)
    own = memory_of(addresses_ptr, RANK, x.dtype)
    for source in tl.static_range(WORLD):
        if source == RANK:
            total += x.to(tl.float32)
        else:
            total += arrived(own + start + source * step + places, inside, gone_ptr).to(tl.float32)
    return total


@triton.jit
def _one_shot_kernel(
    out_ptr, x_ptr, residual_ptr, addresses_ptr, counts_ptr, gone_ptr, size, step,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one block of elements; `step` elements of the region belong to each source."""
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    element = program * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    x = sendable(tl.load(x_ptr + element, mask=inside, other=0.0))
    send_to_all(addresses_ptr, half + RANK * step, element, x, inside, RANK, WORLD)
    total = sum_of_all(x, addresses_ptr, half, step, element, inside, gone_ptr, RANK, WORLD)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(x.dtype), mask=inside)
    tl.store(counts_ptr + program, count)


@triton.jit
def _two_shot_kernel(
    out_ptr, x_ptr, residual_ptr, addresses_ptr, counts_ptr, gone_ptr, size, step,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one part of BLOCK elements for each rank, of which each rank sums its own.

    A source's elements of a program are first what it has of this rank's part, then its own sums.
    """
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    first = program * WORLD * BLOCK + tl.arange(0, BLOCK)
    places = program * 2 * BLOCK + tl.arange(0, BLOCK)
    for hop in tl.static_range(1, WORLD):
        peer = (RANK + hop) % WORLD
        element = first + peer * BLOCK
        theirs = sendable(tl.load(x_ptr + element, mask=element < size, other=0.0))
        box = memory_of(addresses_ptr, peer, theirs.dtype) + half + RANK * step
        tl.store(box + places, theirs, mask=element < size, cache_modifier=".wt")
    element = first + RANK * BLOCK
    inside = element < size
    x = sendable(tl.load(x_ptr + element, mask=inside, other=0.0))
    total = sum_of_all(x, addresses_ptr, half, step, places, inside, gone_ptr, RANK, WORLD)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + element, mask=inside, other=0.0).to(tl.float32)
    summed = sendable(total.to(x.dtype))
    places += BLOCK
    send_to_all(addresses_ptr, half + RANK * step, places, summed, inside, RANK, WORLD)
    tl.store(out_ptr + element, summed, mask=inside)
    own = memory_of(addresses_ptr, RANK, x.dtype)
    for hop in tl.static_range(1, WORLD):
        source = (RANK + hop) % WORLD
        element = first + source * BLOCK
        inside = element < size
        theirs = arrived(own + half + source * step + places, inside, gone_ptr)
        tl.store(out_ptr + element, theirs, mask=inside)
    tl.store(counts_ptr + program, count)


@triton.jit
def _gather_kernel(
    out_ptr, x_ptr, addresses_ptr, counts_ptr, gone_ptr, size, part, blocks, step,
    BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Put a program's share of every rank's blocks of elements in its place: `part` elements of each
    rank make a row. All are sent before one is waited for: no program needs another of its rank.
    """
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    for block in range(program, blocks, tl.num_programs(0)):
        element = block * BLOCK + tl.arange(0, BLOCK)
        inside = element < size
        x = sendable(tl.load(x_ptr + element, mask=inside, other=0.0))
        send_to_all(addresses_ptr, half + RANK * step, element, x, inside, RANK, WORLD)
        target = element // part * (WORLD * part) + element % part
        tl.store(out_ptr + RANK * part + target, x, mask=inside)
    own = memory_of(addresses_ptr, RANK, x_ptr.dtype.element_ty)
    for block in range(program, blocks, tl.num_programs(0)):
        element = block * BLOCK + tl.arange(0, BLOCK)
        inside = element < size
        target = element // part * (WORLD * part) + element % part
        for hop in tl.static_range(1, WORLD):
            source = (RANK + hop) % WORLD
            theirs = arrived(own + half + source * step + element, inside, gone_ptr)
            tl.store(out_ptr + source * part + target, theirs, mask=inside)
    tl.store(counts_ptr + program, count)


@triton.jit
def _one_shot_norm_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, addresses_ptr, counts_ptr, gone_ptr, step, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, NORM_DTYPE: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one row, add its residual, normalise; roundings are those of separate steps."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row) + 1
    half = (count & 1) * WORLD * step
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    places = row * BLOCK + column
    x = sendable(tl.load(x_ptr + row * SIZE + column, mask=inside, other=0.0))
    send_to_all(addresses_ptr, half + RANK * step, places, x, inside, RANK, WORLD)
    residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = sum_of_all(x, addresses_ptr, half, step, places, inside, gone_ptr, RANK, WORLD)
    total = (total.to(x.dtype).to(tl.float32) + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * SIZE + column, total, mask=inside)
    values = total.to(NORM_DTYPE).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    if not WIDE:
        normed = normed.to(NORM_DTYPE).to(tl.float32)
    out = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + column, out, mask=inside)
    tl.store(counts_ptr + row, count)


def can_exchange(x: Tensor, most: int = MOST_BYTES) -> bool:
    """Whether a tensor is one that these kernels add up, or concatenate, of at most so many bytes."""
    return x.dtype in _DTYPES and 0 < x.numel() * x.element_size() <= most


def most_gathered(memory: PeerMemory) -> int:
    """Return the bytes of a rank's part that these kernels concatenate: for any number of ranks, the
    whole is of one size.
    """
    return _GATHERED // memory.world_size


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def peer_sum(x: Tensor, memory: PeerMemory, residual: Tensor | None = None) -> Tensor | None:
    """Add up a tensor over all ranks.

    Args:
        x: this rank's summand, contiguous, as `can_exchange` wants it; of one shape on all ranks.
        memory: what the ranks share.
        residual: what is added to the sum before it is rounded, contiguous, of x's shape and dtype.

    Returns:
        The sum as a new tensor; None where the memory has no room for it.
    """
    most = _ONE_SHOT.get(memory.world_size, _ONE_SHOT_BEYOND)
    add = one_shot_sum if x.numel() * x.element_size() <= most else two_shot_sum
    return add(x, memory, residual)


def one_shot_sum(x: Tensor, memory: PeerMemory, residual: Tensor | None = None) -> Tensor | None:
    """`peer_sum` in one shot: everything is sent to everybody."""
    region = memory.region(BLOCK_BYTES, MOST_BYTES // BLOCK_BYTES)
    if region is None:
        return None
    return _launch_sum(_one_shot_kernel, x, residual, memory, region, BLOCK_BYTES)


def two_shot_sum(x: Tensor, memory: PeerMemory, residual: Tensor | None = None) -> Tensor | None:
    """`peer_sum` in two shots: parts are summed by one rank each, and sums are sent to everybody."""
    block = BLOCK_BYTES * memory.world_size
    region = memory.region(2 * BLOCK_BYTES, triton.cdiv(MOST_BYTES, block))
    if region is None:
        return None
    return _launch_sum(_two_shot_kernel, x, residual, memory, region, block)


def peer_gather(x: Tensor, dim: int, memory: PeerMemory) -> Tensor | None:
    """Concatenate a tensor's parts over all ranks.

    Args:
        x: this rank's part, contiguous, as `can_exchange` wants it with `most_gathered`; of one
            shape on all ranks.
        dim: the dimension that is concatenated.
        memory: what the ranks share.

    Returns:
        The whole as a new tensor; None where the memory has no room for it.
    """
    region = memory.region(most_gathered(memory) // _GATHERING, _GATHERING)
    if region is None:
        return None
    shape = list(x.shape)
    shape[dim] *= memory.world_size
    out, part = x.new_empty(shape), x[(0,) * (dim % x.dim())].numel()
    [blocks] = _grid(x, BLOCK_BYTES)
    _gather_kernel[(min(blocks, _GATHERING),)](
        out, x, *_told(memory, region), x.numel(), part, blocks, **_options(x, memory, region)
    )
    return out


def _launch_sum(
    kernel: Any, x: Tensor, residual: Tensor | None, memory: PeerMemory, region: Region, block: int
) -> Tensor:
    """Launch a program for each `block` bytes of x."""
    out = torch.empty_like(x)
    kernel[_grid(x, block)](
        out, x, residual, *_told(memory, region), x.numel(),
        HAS_RESIDUAL=residual is not None, **_options(x, memory, region),
    )  # fmt: skip
    return out


def _grid(x: Tensor, block: int) -> tuple[int]:
    return (triton.cdiv(x.numel() * x.element_size(), block),)


def _told(memory: PeerMemory, region: Region) -> tuple[Tensor, Tensor, Tensor]:
    return region.addresses, region.counts, memory.gone


def _options(x: Tensor, memory: PeerMemory, region: Region) -> dict[str, Any]:
    """Return what the kernels of blocks take by name."""
    return {
        "step": region.elements(x),
        "BLOCK": BLOCK_BYTES // x.element_size(),
        "RANK": memory.rank,
        "WORLD": memory.world_size,
        "num_warps": 4,
        **overlaps(x.device),
    }


ROWS = 64
"""Rows up to which the sum and the norm behind it are one kernel: a program a row."""


def peer_sum_and_norm(
    out: Tensor,
    total: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    memory: PeerMemory,
    *,
    dtype: torch.dtype,
    wide: bool,
) -> bool:
    """Add a tensor up over all ranks, add the residual, normalise: into `total` and `out`.

    Args:
        out, total: [rows, size].
        x, residual: [rows, size], contiguous, rows at most `ROWS`; x as `can_exchange` wants it.
        weight, eps, dtype, wide: as `triton_rmsnorm.launch` takes them.

    Returns:
        False, and nothing is done, where the memory has no room for it.
    """
    size = x.shape[-1]
    block = power_of_two(size)
    region = memory.region(block * x.element_size(), ROWS)
    if region is None:
        return False
    _one_shot_norm_kernel[(x.numel() // size,)](
        out, total, x, residual, weight, region.addresses, region.counts, memory.gone, region.elements(x), eps,
        SIZE=size, BLOCK=block, WIDE=wide, NORM_DTYPE=TYPES[dtype], RANK=memory.rank,
        WORLD=memory.world_size, num_warps=min(16, max(4, block // 512)), **overlaps(x.device),
    )  # fmt: skip
    return True
