# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""What low-rank adapters add in steps of few tokens, as one kernel beside the linear layer.

Its first programs compute the first products, each of some inputs and of one adapter; the others,
one for some outputs and one adapter, read the adapter's second matrix, wait until those have
arrived, and only then for the linear layer in front. So nearly all of it runs while that layer
reads its weights. Programs have the tokens' adapters by their order, however many are loaded: no
more programs than tokens come for each tile. Sums of parts are added up in order, so that results
do not vary from run to run.

Programs that wait have higher numbers than those that they wait for, which have begun before them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.triton_silu_mul import activate
from onboard.ops.triton.launch import dot_type, overlaps, tile_width
from onboard.ops.triton.overlap import wait_for_inputs

TOKENS = 16
_PARTS = 16
_COLUMNS = 16
_INPUTS = 128
_OUTPUTS = 128
_RANKS = 64
_MOST_COLUMNS = 256
MOST_LAYERS = 3


@triton.jit
def _own_tokens(adapters_ptr, tokens, slot, TOKENS: tl.constexpr):
    """Return the adapter that is number `slot` of those that the tokens have, from the lowest, which
    tokens have it, and how many adapters there are besides 0; -1 where there are fewer.
    """
    i = tl.arange(0, TOKENS)
    own = tl.load(adapters_ptr + i, mask=i < tokens, other=-1).to(tl.int32)
    mine, other = own[:, None], own[None, :]
    is_again = (mine == other) & (i[None, :] < i[:, None])
    is_first = (tl.sum(is_again.to(tl.int32), 1) == 0) & (own >= 0)
    smaller = (other < mine) & (is_first[None, :])
    order = tl.sum(smaller.to(tl.int32), 1)
    wanted = (order == slot) & (own >= 0)
    distinct = tl.sum((is_first & (own > 0)).to(tl.int32), 0)
    return tl.max(tl.where(wanted, own, -1), 0), wanted, distinct


@triton.jit
def _leave_part(
    inner_ptr, x_ptr, down_ptr, wanted, adapter, part, block, columns, inputs, x_stride,
    part_size, DOT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Write the sums of some inputs for the tokens of an adapter."""
    token = tl.arange(0, TOKENS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    rows = x_ptr + token.to(tl.int64)[:, None] * x_stride
    matrix = down_ptr + (adapter - 1) * (tl.cast(inputs, tl.int64) * columns)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in range(part * part_size, min(part * part_size + part_size, inputs), INPUTS):
        at = first + tl.arange(0, INPUTS)
        is_input = at < inputs
        x = tl.load(rows + at[None, :], mask=wanted[:, None] & is_input[None, :], other=0.0)
        place = matrix + column[None, :] * inputs + at[:, None]
        down = tl.load(place, mask=is_column[None, :] & is_input[:, None], other=0.0)
        sums = tl.dot(x.to(DOT), down.to(DOT), sums, input_precision="ieee")
    target = (part * TOKENS + token)[:, None] * columns + column[None, :]
    tl.store(inner_ptr + target, sums, mask=wanted[:, None] & is_column[None, :])


@triton.jit
def _await(arrived_ptr, wanted):
    """Wait until so many programs have arrived."""
    while tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu") < wanted:
        pass


@triton.jit
def _added(
    inner_ptr, up_ptr, arrived_ptr, wanted, adapter, output, is_output, first_column, arrivals,
    columns, outputs, rank, DOT: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return what the adapter adds to some outputs of its tokens, once the first products are
    there.
    """
    sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    matrix = up_ptr + (adapter - 1) * (tl.cast(outputs, tl.int64) * rank)
    for first in range(0, rank, RANK):
        number = first + tl.arange(0, RANK)
        is_rank = number < rank
        up = tl.load(
            matrix + number[:, None] * outputs + output[None, :],
            mask=is_rank[:, None] & is_output[None, :],
            other=0.0,
        )
        _await(arrived_ptr, arrivals)
        inner = tl.zeros((TOKENS, RANK), tl.float32)
        token = tl.arange(0, TOKENS)[:, None]
        at = inner_ptr + token * columns + (first_column + number)[None, :]
        mask = wanted[:, None] & is_rank[None, :]
        for part in tl.static_range(PARTS):
            place = at + part * TOKENS * columns
            inner += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
        sums = tl.dot(inner.to(DOT), up.to(DOT), sums, input_precision="ieee")
    return sums


@triton.jit
def _depart(arrived_ptr, departures):
    """Say that a program needs the first products no longer; the last one makes room for the next
    step.
    """
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel", scope="gpu") == departures - 1:
        tl.atomic_xchg(arrived_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(arrived_ptr + 1, 0, sem="release", scope="gpu")


@triton.jit
def _outputs_of(block, size_0, size_1, size_2, OUTPUTS: tl.constexpr):
    """Return the outputs of a block of up to three layers, which of them there are, and the layer's
    number.
    """
    blocks_0, blocks_1 = tl.cdiv(size_0, OUTPUTS), tl.cdiv(size_1, OUTPUTS)
    is_second, is_third = block >= blocks_0, block >= blocks_0 + blocks_1
    block -= tl.where(is_second, blocks_0, 0) + tl.where(is_third, blocks_1, 0)
    size = tl.where(is_third, size_2, tl.where(is_second, size_1, size_0))
    begin = tl.where(is_second, size_0, 0) + tl.where(is_third, size_1, 0)
    within = block * OUTPUTS + tl.arange(0, OUTPUTS)
    return begin + within, within < size, is_second.to(tl.int32) + is_third.to(tl.int32)


@triton.jit
def adapt_kernel(
    out_ptr, y_ptr, x_ptr, down_ptr, up_ptr, adapters_ptr, inner_ptr, arrived_ptr, tokens, columns,
    inputs, outputs, rank, x_stride, y_stride, slots, blocks, tiles, part_size, size_0, size_1,
    size_2, second_column, ACTIVATION: tl.constexpr, DOT: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    RANK: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up(down(x)) of each token's own adapter to y, then activate and multiply the halves.

    With an activation the sizes are those of a half, and what gates are multiplied by has the first
    products from `second_column` on.
    """
    if not EARLY:
        wait_for_inputs(OVERLAP)
    slot, number = tl.program_id(0) % slots, tl.program_id(0) // slots
    adapter, wanted, distinct = _own_tokens(adapters_ptr, tokens, slot, TOKENS)
    downs = PARTS * blocks
    if number < downs:
        if adapter > 0:
            _leave_part(
                inner_ptr, x_ptr, down_ptr, wanted, adapter, number % PARTS, number // PARTS,
                columns, inputs, x_stride, part_size, DOT, TOKENS, COLUMNS, INPUTS,
            )  # fmt: skip
            tl.debug_barrier()  # all of the program's stores come before its arrival
            tl.atomic_add(arrived_ptr, 1, sem="release", scope="gpu")
            wait_for_inputs(OVERLAP)
    elif adapter >= 0:
        token = tl.arange(0, TOKENS)[:, None]
        output, is_output, layer = _outputs_of(number - downs, size_0, size_1, size_2, OUTPUTS)
        width = outputs if ACTIVATION is None else outputs // 2
        sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        ups = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        if adapter > 0:
            sums = _added(
                inner_ptr, up_ptr, arrived_ptr, wanted, adapter, output, is_output, layer * rank,
                downs * distinct, columns, outputs, rank, DOT, TOKENS, OUTPUTS, RANK, PARTS,
            )  # fmt: skip
            if ACTIVATION is not None:
                ups = _added(
                    inner_ptr, up_ptr, arrived_ptr, wanted, adapter, output + width, is_output,
                    second_column, downs * distinct, columns, outputs, rank, DOT, TOKENS, OUTPUTS,
                    RANK, PARTS,
                )  # fmt: skip
            _depart(arrived_ptr, tiles * distinct)
        wait_for_inputs(OVERLAP)
        inside = wanted[:, None] & is_output[None, :]
        y = y_ptr + token.to(tl.int64) * y_stride + output[None, :]
        sums += tl.load(y, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            ups += tl.load(y + width, mask=inside, other=0.0).to(tl.float32)
            sums = activate(sums, ACTIVATION) * ups
        place = out_ptr + token.to(tl.int64) * width + output[None, :]
        tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def _scratch(address: int, device: torch.device, columns: int) -> tuple[Tensor, Tensor]:
    """Return where the first products with the matrices at an address lie, and two zeros, which
    the kernel leaves as it found them.

    It is written before the kernel in front has ended, so no other tensor may have had its place.
    """
    inner = torch.empty((_PARTS, TOKENS, columns), dtype=torch.float32, device=device)
    return inner, torch.zeros(2, dtype=torch.int32, device=device)


def takes(rows: Tensor, down: Tensor, sizes: list[int]) -> bool:
    """Return whether one kernel does it: few tokens, and room for the first products."""
    few = len(rows) <= TOKENS and down.shape[1] <= _MOST_COLUMNS
    return few and len(sizes) <= MOST_LAYERS


def adapt_few(
    out: Tensor, rows: Tensor, x: Tensor, down: Tensor, up: Tensor, own: Tensor, sizes: list[int],
    activation: str, *, is_older: bool,
) -> None:  # fmt: skip
    """Write to `out` [tokens, ...] the outputs `rows` with what is added to them; whether x was there
    before the kernel in front began.
    """
    tokens, (count, columns, inputs), (rank, outputs) = len(rows), down.shape, up.shape[1:]
    inner, arrived = _scratch(down.data_ptr(), rows.device, columns)
    part_size = triton.cdiv(triton.cdiv(inputs, _PARTS), _INPUTS) * _INPUTS
    some = [outputs // 2] if activation else sizes
    block = min(_OUTPUTS, tile_width(max(some)))
    slots, blocks = min(tokens, count + 1), triton.cdiv(columns, _COLUMNS)
    tiles = sum(triton.cdiv(size, block) for size in some)
    adapt_kernel[(slots * (_PARTS * blocks + tiles),)](
        out, rows, x, down, up, own, inner, arrived, tokens, columns, inputs, outputs, rank,
        x.stride(0), rows.stride(0), slots, blocks, tiles, part_size,
        *some, *[0] * (MOST_LAYERS - len(some)), rank if len(sizes) > 1 else 0,
        ACTIVATION=KERNEL_ACTIVATIONS[activation] if activation else None, DOT=dot_type(rows.dtype),
        TOKENS=TOKENS, PARTS=_PARTS, COLUMNS=_COLUMNS, INPUTS=_INPUTS, OUTPUTS=block,
        RANK=min(_RANKS, tile_width(rank)), EARLY=is_older, **overlaps(rows.device),
    )  # fmt: skip
