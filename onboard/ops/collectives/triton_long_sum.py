# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""Sums of long tensors over the ranks, and the residual addition and RMSNorm behind them, by one
kernel that writes to the other ranks' memory.

A tensor is rows, of which each rank adds up its part: every rank sends the others what it has of
their parts, and then the sums of its own. Data goes as it is, sixteen bytes a store, and a flag
behind each share of it (release and acquire over the whole system, section 8 of the PTX manual), so
that all links are busy both ways and nothing is written twice: the library's collectives on two GPUs
of one host use half of what they carry. Sums are taken in float32 in the order of ranks: all ranks
have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.collectives.triton_peer_sum import memory_of
from onboard.ops.triton.launch import TYPES, overlaps, power_of_two
from onboard.ops.triton.overlap import wait_for_inputs
from onboard.parallel.peer_memory import PeerMemory, Region

PROGRAMS = 256
"""Programs of a kernel, all of which run at once: each waits for the one of its number elsewhere."""
SHARES = 4
"""Times that a program sends, so that what has come is added up while the rest is on its way."""
MOST_BYTES = 32 * 2**20
"""Bytes of a tensor that one launch adds up; a longer one takes several."""
ROW_BYTES = 8192
"""Bytes of a row where a tensor may be cut anywhere."""


@triton.jit
def raised(flag_ptr, value, gone_ptr):
    """Wait until a flag has a value; what its rank had sent before is there then."""
    missing = (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < value).to(tl.int32)
    while missing != 0:
        missing = (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < value).to(tl.int32)
        if tl.load(gone_ptr, volatile=True) != 0:
            missing = 0
    tl.debug_barrier()  # one thread has looked for all


@triton.jit
def raise_flags(
    addresses_ptr, place, value, RANK: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """Tell every other rank that what this program has sent so far is there."""
    tl.debug_barrier()  # all threads have stored
    for hop in tl.static_range(1, WORLD):
        flags = memory_of(addresses_ptr, (RANK + hop) % WORLD, tl.int64)
        tl.atomic_xchg(flags + place, value, sem="release", scope="sys")


@triton.jit
def finish(
    out_ptr, total_ptr, residual_ptr, weight_ptr, summed, start, column, inside, eps,
    SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
):  # fmt: skip
    """Store a row of sums, or what comes of it; roundings are those of separate steps."""
    total = summed.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + column, rounded, mask=inside)
        values = rounded.to(NORM_DTYPE).to(tl.float32)
        total = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        if not WIDE:
            total = total.to(NORM_DTYPE).to(tl.float32)
        total *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def send_parts(
    x_ptr, addresses_ptr, turn, column, size, step,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Send what this rank has of the rows of a turn that others add up."""
    for hop in tl.static_range(1, WORLD):
        peer = (RANK + hop) % WORLD
        start = (turn * WORLD + peer).to(tl.int64) * SIZE
        inside = (column < SIZE) & (start + column < size)
        box = memory_of(addresses_ptr, peer, DTYPE) + RANK * step + turn * SIZE
        tl.store(box + column, tl.load(x_ptr + start + column, mask=inside), mask=inside)


@triton.jit
def sum_of_parts(
    x_ptr, addresses_ptr, turn, start, column, inside, step,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """Return this rank's row of a turn, added up in the order of ranks."""
    total = tl.zeros((BLOCK,), tl.float32)
    own = memory_of(addresses_ptr, RANK, DTYPE) + turn * SIZE
    for source in tl.static_range(WORLD):
        if source == RANK:
            total += tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        else:
            place = own + source * step + column
            part = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
    return total.to(DTYPE)


@triton.jit
def send_sum(
    summed, addresses_ptr, turn, column, inside, step,
    SIZE: tl.constexpr, DTYPE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Send this rank's row of a turn to all others."""
    for hop in tl.static_range(1, WORLD):
        box = memory_of(addresses_ptr, (RANK + hop) % WORLD, DTYPE) + (WORLD + RANK) * step
        tl.store(box + turn * SIZE + column, summed, mask=inside)


@triton.jit
def _long_sum_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, addresses_ptr, flags_ptr, counts_ptr,
    gone_ptr, size, shares, rounds, step, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    WIDE: tl.constexpr, NORM_DTYPE: tl.constexpr, DTYPE: tl.constexpr, SHARES: tl.constexpr,
    PROGRAMS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up rows of SIZE elements, `size` elements in all: row `turn * WORLD + r` is added up by
    rank r, and a program has `rounds` turns in each of `shares`, SHARES at most. An inbox has `step`
    elements for each source: first parts that are to be added up, and behind those of all sources,
    sums.
    """
    wait_for_inputs(OVERLAP)
    program, programs = tl.program_id(0), tl.num_programs(0)
    exchanges = tl.load(counts_ptr + program)
    before = exchanges.to(tl.int64) * SHARES
    column = tl.arange(0, BLOCK)
    flags = memory_of(flags_ptr, RANK, tl.int64) + program
    for share in range(shares):
        for i in range(share * rounds, (share + 1) * rounds):
            send_parts(
                x_ptr, addresses_ptr, i * programs + program, column, size, step, SIZE, DTYPE, RANK, WORLD
            )  # fmt: skip
        raise_flags(flags_ptr, RANK * PROGRAMS + program, before + share + 1, RANK, WORLD)
    for share in range(shares):
        for hop in tl.static_range(1, WORLD):
            raised(flags + (RANK + hop) % WORLD * PROGRAMS, before + share + 1, gone_ptr)
        for i in range(share * rounds, (share + 1) * rounds):
            turn = i * programs + program
            start = (turn * WORLD + RANK).to(tl.int64) * SIZE
            inside = (column < SIZE) & (start + column < size)
            summed = sum_of_parts(
                x_ptr, addresses_ptr, turn, start, column, inside, step, SIZE, BLOCK, DTYPE, RANK, WORLD
            )  # fmt: skip
            send_sum(summed, addresses_ptr, turn, column, inside, step, SIZE, DTYPE, RANK, WORLD)
            finish(
                out_ptr, total_ptr, residual_ptr, weight_ptr, summed, start, column, inside, eps,
                SIZE, HAS_RESIDUAL, NORM, WIDE, NORM_DTYPE,
            )  # fmt: skip
        place = (WORLD + RANK) * PROGRAMS + program
        raise_flags(flags_ptr, place, before + share + 1, RANK, WORLD)
    sums = memory_of(addresses_ptr, RANK, DTYPE) + WORLD * step
    for share in range(shares):
        for hop in tl.static_range(1, WORLD):
            raised(flags + (WORLD + (RANK + hop) % WORLD) * PROGRAMS, before + share + 1, gone_ptr)
        for i in range(share * rounds, (share + 1) * rounds):
            turn = i * programs + program
            for hop in tl.static_range(1, WORLD):
                start = (turn * WORLD + (RANK + hop) % WORLD).to(tl.int64) * SIZE
                inside = (column < SIZE) & (start + column < size)
                place = sums + (RANK + hop) % WORLD * step + turn * SIZE + column
                summed = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
                finish(
                    out_ptr, total_ptr, residual_ptr, weight_ptr, summed, start, column, inside,
                    eps, SIZE, HAS_RESIDUAL, NORM, WIDE, NORM_DTYPE,
                )  # fmt: skip
    tl.store(counts_ptr + program, exchanges + 1)


@dataclass(frozen=True)
class Norm:
    """What is behind a sum: the arguments of `triton_rmsnorm.launch`, of the same names."""

    total: Tensor
    """[rows, size]: where the sum goes."""
    weight: Tensor
    eps: float
    dtype: torch.dtype
    wide: bool


def long_sum(x: Tensor, memory: PeerMemory, residual: Tensor | None = None) -> Tensor | None:
    """Add up a long tensor over all ranks.

    Args:
        x: this rank's summand, contiguous, of a dtype that `can_exchange` knows; of one shape on
            all ranks.
        memory: what the ranks share.
        residual: what is added to the rounded sum, contiguous, of x's shape and dtype.

    Returns:
        The sum as a new tensor; None where the memory has no room for it.
    """
    out = torch.empty_like(x)
    flat = None if residual is None else residual.view(-1)
    done = _exchange(out.view(-1), x.view(-1), flat, memory, ROW_BYTES // x.element_size(), None)
    return out if done else None


def long_sum_and_norm(
    out: Tensor, x: Tensor, residual: Tensor, memory: PeerMemory, norm: Norm
) -> bool:
    """Add a tensor up over all ranks, add the residual, normalise: into `norm.total` and `out`.

    Args:
        out: [rows, size].
        x, residual: [rows, size], contiguous; x as `long_sum` wants it, rows of `MOST_BYTES` over
            the ranks and programs at most.

    Returns:
        False, and nothing is done, where the memory has no room for it.
    """
    flat = out.view(-1), x.view(-1), residual.view(-1)
    return _exchange(*flat, memory, x.shape[-1], norm)


def _exchange(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    memory: PeerMemory,
    size: int,
    norm: Norm | None,
) -> bool:
    """Exchange rows of `size` elements, as many at a time as there is room for."""
    region = memory.region(MOST_BYTES // (memory.world_size * PROGRAMS), PROGRAMS)
    flags = memory.region(torch.int64.itemsize, PROGRAMS)  # below zero at first, and counted from 1
    if region is None or flags is None:
        return False
    step = region.elements(x)
    most = step // size * memory.world_size * size
    if most == 0:
        return False
    for start in range(0, x.numel(), most):
        part = slice(start, start + most)
        _launch(
            out[part], x[part], None if residual is None else residual[part],
            None if norm is None else norm.total.view(-1)[part],
            memory, region, flags, size, step, norm,
        )  # fmt: skip
    return True


def _launch(
    out: Tensor, x: Tensor, residual: Tensor | None, total: Tensor | None, memory: PeerMemory,
    region: Region, flags: Region, size: int, step: int, norm: Norm | None,
) -> None:  # fmt: skip
    turns = triton.cdiv(x.numel(), size * memory.world_size)
    programs = min(turns, PROGRAMS)
    shares = min(SHARES, triton.cdiv(turns, programs))
    block = power_of_two(size)
    _long_sum_kernel[(programs,)](
        out, total, x, residual, norm and norm.weight, region.addresses, flags.addresses,
        region.counts, memory.gone, x.numel(), shares,
        triton.cdiv(turns, programs * shares), step,
        norm.eps if norm else 0.0,
        SIZE=size, BLOCK=block, HAS_RESIDUAL=residual is not None, NORM=norm is not None,
        WIDE=norm is not None and norm.wide, NORM_DTYPE=TYPES[norm.dtype if norm else x.dtype],
        DTYPE=TYPES[x.dtype], SHARES=SHARES, PROGRAMS=PROGRAMS, RANK=memory.rank, WORLD=memory.world_size,
        num_warps=min(16, max(4, block // 512)), **overlaps(x.device),
    )  # fmt: skip
