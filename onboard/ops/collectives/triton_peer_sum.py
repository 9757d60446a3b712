# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Sums and concatenations over the ranks by kernels that write to the other ranks' memory.

A word of 64 bits carries 32 bits of data and the number of the exchange (NCCL's protocol LL): it
arrives as a whole, so whoever reads it knows by the number whether it is there, and no fence and no
second message is needed. In one shot each rank sends all that it has to every other rank, and each
adds up everything; in two shots each rank adds up its part of every block, and sends the sums. Sums
are taken in float32 in the order of ranks: all ranks have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.triton.launch import TYPES, overlaps, power_of_two
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.parallel.peer_memory import PeerMemory, Region

WORDS = 512
"""Words of a program: half a kilobyte for each of its four warps."""
MOST_BYTES = 2**20
"""Bytes of a tensor that is summed so; the library's collectives are as fast from there on."""
_GATHERED, _GATHERING = 24 * 2**20, 512
"""Bytes of a concatenation, logits of 64 rows among them, and programs that make it: all of them run
at once on a GPU of 64 processors.
"""
_ONE_SHOT = {2: 2**20, 3: 2**18, 4: 2**17}
"""World size -> bytes up to which everything is sent to everybody."""
_ONE_SHOT_BEYOND = 2**16


@triton.jit
def packed(x, WORDS: tl.constexpr):
    """Return elements as the low halves of WORDS words, two 16-bit elements or one of 32 bits each."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if BITS == 16:
        low, high = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), (WORDS, 2)))
        words = low.to(tl.int64) | (high.to(tl.int64) << 16)
    else:
        words = x.to(tl.uint32, bitcast=True).to(tl.int64)
    return words


@triton.jit
def unpacked(words, DTYPE: tl.constexpr, WORDS: tl.constexpr):
    """Return the elements that `packed` made words of, in float32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    if BITS == 16:
        low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        elements = tl.reshape(tl.join(low, high), (2 * WORDS,)).to(tl.float32)
    else:
        elements = (words & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return elements


@triton.jit
def memory_of(addresses_ptr, rank):
    """Return where a rank's memory begins."""
    return tl.multiple_of(tl.load(addresses_ptr + rank), 16).to(tl.pointer_type(tl.int64))


@triton.jit
def arrived(places, count, gone_ptr):
    """Return the words at `places` once all of them are of exchange `count`."""
    words = tl.load(places, volatile=True)
    missing = tl.max(((words >> 32).to(tl.int32) != count).to(tl.int32), 0)
    while missing != 0:
        words = tl.load(places, volatile=True)
        missing = tl.max(((words >> 32).to(tl.int32) != count).to(tl.int32), 0)
        if tl.load(gone_ptr, volatile=True) != 0:
            missing = 0
    return words


@triton.jit
def send_to_all(
    addresses_ptr, start, places, words, count, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """Write words of an exchange to every other rank's memory, at `start` and on."""
    marked = words | (count.to(tl.int64) << 32)
    for step in tl.static_range(1, WORLD):
        # Each begins with its neighbour, so that no rank is written to by all at once
        peer = (RANK + step) % WORLD
        tl.store(memory_of(addresses_ptr, peer) + start + places, marked, cache_modifier=".wt")


@triton.jit
def sum_of_all(
    x, addresses_ptr, start, step, places, count, gone_ptr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Return x, in float32, and what came from the others, added up in the order of ranks; what
    rank r sends is at `start + r * step`.
    """
    total = tl.zeros_like(x)
    own = memory_of(addresses_ptr, RANK)
    for source in tl.static_range(WORLD):
        if source == RANK:
            total += x
        else:
            words = arrived(own + start + source * step + places, count, gone_ptr)
            total += unpacked(words, DTYPE, WORDS)
    return total


@triton.jit
def _one_shot_kernel(
    out_ptr, x_ptr, residual_ptr, addresses_ptr, counts_ptr, gone_ptr, size, step,
    HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one block of elements; `step` words of the region belong to each source."""
    wait_for_inputs(OVERLAP)
    BLOCK: tl.constexpr = WORDS * 32 // DTYPE.primitive_bitwidth
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    element = program * BLOCK + tl.arange(0, BLOCK)
    places = program * WORDS + tl.arange(0, WORDS)
    x = tl.load(x_ptr + element, mask=element < size, other=0.0)
    send_to_all(addresses_ptr, half + RANK * step, places, packed(x, WORDS), count, RANK, WORLD)
    total = sum_of_all(
        x.to(tl.float32), addresses_ptr, half, step, places, count, gone_ptr, DTYPE, WORDS, RANK, WORLD
    )  # fmt: skip
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + element, mask=element < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(DTYPE), mask=element < size)
    tl.store(counts_ptr + program, count)


@triton.jit
def _two_shot_kernel(
    out_ptr, x_ptr, residual_ptr, addresses_ptr, counts_ptr, gone_ptr, size, step,
    HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one block of elements, of which each rank sums a part of WORDS words.

    A source's words of a program are first what it has of this rank's part, then its own sums.
    """
    wait_for_inputs(OVERLAP)
    PART: tl.constexpr = WORDS * 32 // DTYPE.primitive_bitwidth
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    first = program * WORLD * PART + tl.arange(0, PART)
    places = program * 2 * WORDS + tl.arange(0, WORDS)
    mark = count.to(tl.int64) << 32
    for hop in tl.static_range(1, WORLD):
        peer = (RANK + hop) % WORLD
        element = first + peer * PART
        words = packed(tl.load(x_ptr + element, mask=element < size, other=0.0), WORDS) | mark
        box = memory_of(addresses_ptr, peer) + half + RANK * step
        tl.store(box + places, words, cache_modifier=".wt")
    element = first + RANK * PART
    x = tl.load(x_ptr + element, mask=element < size, other=0.0).to(tl.float32)
    total = sum_of_all(
        x, addresses_ptr, half, step, places, count, gone_ptr, DTYPE, WORDS, RANK, WORLD
    )  # fmt: skip
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + element, mask=element < size, other=0.0).to(tl.float32)
    total = total.to(DTYPE)
    places += WORDS
    send_to_all(addresses_ptr, half + RANK * step, places, packed(total, WORDS), count, RANK, WORLD)
    tl.store(out_ptr + element, total, mask=element < size)
    own = memory_of(addresses_ptr, RANK)
    for hop in tl.static_range(1, WORLD):
        source = (RANK + hop) % WORLD
        words = arrived(own + half + source * step + places, count, gone_ptr)
        element = first + source * PART
        tl.store(out_ptr + element, unpacked(words, DTYPE, WORDS).to(DTYPE), mask=element < size)
    tl.store(counts_ptr + program, count)


@triton.jit
def _gather_kernel(
    out_ptr, x_ptr, addresses_ptr, counts_ptr, gone_ptr, size, part, blocks, step,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Put a program's share of every rank's blocks of elements in its place: `part` elements of each
    rank make a row. All are sent before one is waited for: no program needs another of its rank.
    """
    wait_for_inputs(OVERLAP)
    BLOCK: tl.constexpr = WORDS * 32 // DTYPE.primitive_bitwidth
    program = tl.program_id(0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * WORLD * step
    for block in range(program, blocks, tl.num_programs(0)):
        element = block * BLOCK + tl.arange(0, BLOCK)
        places = block * WORDS + tl.arange(0, WORDS)
        x = tl.load(x_ptr + element, mask=element < size, other=0.0)
        send_to_all(addresses_ptr, half + RANK * step, places, packed(x, WORDS), count, RANK, WORLD)
        target = element // part * (WORLD * part) + element % part
        tl.store(out_ptr + RANK * part + target, x, mask=element < size)
    own = memory_of(addresses_ptr, RANK)
    for block in range(program, blocks, tl.num_programs(0)):
        element = block * BLOCK + tl.arange(0, BLOCK)
        places = block * WORDS + tl.arange(0, WORDS)
        target = element // part * (WORLD * part) + element % part
        for hop in tl.static_range(1, WORLD):
            source = (RANK + hop) % WORLD
            words = arrived(own + half + source * step + places, count, gone_ptr)
            theirs = unpacked(words, DTYPE, WORDS).to(DTYPE)
            tl.store(out_ptr + source * part + target, theirs, mask=element < size)
    tl.store(counts_ptr + program, count)


@triton.jit
def _one_shot_norm_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, addresses_ptr, counts_ptr, gone_ptr, step, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, NORM_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr, WORDS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up one row, add its residual, normalise; roundings are those of separate steps."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row) + 1
    half = (count & 1) * WORLD * step
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    places = row * WORDS + tl.arange(0, WORDS)
    x = tl.load(x_ptr + row * SIZE + column, mask=inside, other=0.0)
    send_to_all(addresses_ptr, half + RANK * step, places, packed(x, WORDS), count, RANK, WORLD)
    residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = sum_of_all(
        x.to(tl.float32), addresses_ptr, half, step, places, count, gone_ptr, DTYPE, WORDS, RANK, WORLD
    )  # fmt: skip
    total = (total.to(DTYPE).to(tl.float32) + residual).to(total_ptr.dtype.element_ty)
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
    return x.dtype in _WORD_DTYPES and 0 < x.numel() * x.element_size() <= most


def most_gathered(memory: PeerMemory) -> int:
    """Return the bytes of a rank's part that these kernels concatenate: for any number of ranks, the
    whole is of one size.
    """
    return _GATHERED // memory.world_size


_WORD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    region = memory.region(WORDS, MOST_BYTES // (4 * WORDS))
    if region is None:
        return None
    return _launch_sum(_one_shot_kernel, x, residual, memory, region, 4 * WORDS)


def two_shot_sum(x: Tensor, memory: PeerMemory, residual: Tensor | None = None) -> Tensor | None:
    """`peer_sum` in two shots: parts are summed by one rank each, and sums are sent to everybody."""
    block = 4 * WORDS * memory.world_size
    region = memory.region(2 * WORDS, triton.cdiv(MOST_BYTES, block))
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
    region = memory.region(most_gathered(memory) // (4 * _GATHERING), _GATHERING)
    if region is None:
        return None
    shape = list(x.shape)
    shape[dim] *= memory.world_size
    out, part = x.new_empty(shape), x[(0,) * (dim % x.dim())].numel()
    [blocks] = _grid(x, 4 * WORDS)
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
        "step": region.words * region.counts.numel(),
        "DTYPE": TYPES[x.dtype],
        "WORDS": WORDS,
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
    words = block * x.element_size() // 4
    region = memory.region(words, ROWS)
    if region is None:
        return False
    _one_shot_norm_kernel[(x.numel() // size,)](
        out, total, x, residual, weight, region.addresses, region.counts, memory.gone, words * ROWS, eps,
        SIZE=size, BLOCK=block, WIDE=wide, NORM_DTYPE=TYPES[dtype], DTYPE=TYPES[x.dtype], WORDS=words,
        RANK=memory.rank, WORLD=memory.world_size, num_warps=min(16, max(4, block // 512)),
        **overlaps(x.device),
    )  # fmt: skip
    return True
