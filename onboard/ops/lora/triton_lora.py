# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""What low-rank adapters add, as two kernels for any mixture of adapters in a step.

A program has a tile of tokens, and goes over all adapters; one that none of its tokens has costs a
comparison alone. So each adapter's matrices are read once for a tile, whoever is in the batch, and
a captured step serves every batch. The first product is cut along the inputs into parts that
programs compute side by side; the second kernel adds them up in order, so that results do not vary
from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.lora.lora import same_outputs
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    require_device,
    tile_width,
)

_TOKENS = 16
_INPUTS = 128
_OUTPUTS = 128
_RANKS = 64
_MOST_PARTS = 16


@triton.jit
def _down_kernel(
    inner_ptr, x_ptr, down_ptr, adapters_ptr, tokens, columns, inputs, x_stride, count,
    part_size, DOT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Write a part's sums of each token's own adapter: [parts, tokens, columns] float32."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(adapters_ptr + token, mask=token < tokens, other=0)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    rows = token.to(tl.int64)[:, None] * x_stride
    for adapter in range(count):
        wanted = own == adapter + 1
        if tl.max(wanted.to(tl.int32), 0) > 0:
            for first in range(part * part_size, min(part * part_size + part_size, inputs), INPUTS):
                at = first + tl.arange(0, INPUTS)
                x = tl.load(
                    x_ptr + rows + at[None, :],
                    mask=wanted[:, None] & (at[None, :] < inputs),
                    other=0.0,
                )
                down = tl.load(
                    down_ptr + column[None, :] * inputs + at[:, None],
                    mask=(column[None, :] < columns) & (at[:, None] < inputs),
                    other=0.0,
                )
                sums = tl.dot(x.to(DOT), down.to(DOT), sums, input_precision="ieee")
        down_ptr += columns * inputs
    target = (part * tokens + token).to(tl.int64)[:, None] * columns + column[None, :]
    inside = (token[:, None] < tokens) & (column[None, :] < columns)
    tl.store(inner_ptr + target, sums, mask=inside)


@triton.jit
def _up_kernel(
    out_ptr, y_ptr, inner_ptr, up_ptr, adapters_ptr, tokens, columns, outputs, y_stride, count,
    first_output, size, first_column, parts, rank, DOT: tl.constexpr, TOKENS: tl.constexpr,
    RANK: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Add a layer's second product to its outputs."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    within = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    output, is_output = first_output + within, within < size
    own = tl.load(adapters_ptr + token, mask=token < tokens, other=0)
    inside = (token[:, None] < tokens) & is_output[None, :]
    sums = tl.load(
        y_ptr + token.to(tl.int64)[:, None] * y_stride + output[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    for first in range(0, rank, RANK):
        number = first + tl.arange(0, RANK)
        inner = tl.zeros((TOKENS, RANK), tl.float32)
        for part in range(parts):
            row = (part * tokens + token).to(tl.int64)[:, None] * columns + first_column
            mask = (token[:, None] < tokens) & (number[None, :] < rank)
            inner += tl.load(inner_ptr + row + number[None, :], mask=mask, other=0.0)
        matrix = up_ptr
        for adapter in range(count):
            wanted = own == adapter + 1
            if tl.max(wanted.to(tl.int32), 0) > 0:
                up = tl.load(
                    matrix + number[:, None] * outputs + output[None, :],
                    mask=(number[:, None] < rank) & is_output[None, :],
                    other=0.0,
                )
                mine = tl.where(wanted[:, None], inner, 0.0)
                sums = tl.dot(mine.to(DOT), up.to(DOT), sums, input_precision="ieee")
            matrix += rank * outputs
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * outputs + output[None, :],
        sums.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@register_op(same_outputs, inserted=True)
def triton_lora(
    outputs: Tensor,
    input: Tensor,
    down: Tensor,
    up: Tensor,
    sizes: list[int],
    adapters: Tensor | None = None,
) -> Tensor:
    """`torch_lora` by kernels, with sums in float32."""
    if adapters is None:
        return outputs.clone()
    require_device(outputs)
    out = same_outputs(outputs)
    rows = last_contiguous(outputs).reshape(-1, outputs.shape[-1])
    own = adapters.reshape(-1)
    if out.numel():
        inner = _inner(last_contiguous(input).reshape(-1, input.shape[-1]), down, own)
        first = 0
        for layer, size in enumerate(sizes):
            _add(out, rows, inner, up, own, layer, first, size)
            first += size
    return out


def _inner(x: Tensor, down: Tensor, own: Tensor) -> Tensor:
    """Return the first products, [parts, tokens, layers * rank] float32."""
    tokens, (count, columns, inputs) = len(x), down.shape
    parts = min(_MOST_PARTS, triton.cdiv(inputs, 2 * _INPUTS))
    part_size = triton.cdiv(triton.cdiv(inputs, parts), _INPUTS) * _INPUTS
    inner = torch.empty((parts, tokens, columns), dtype=torch.float32, device=x.device)
    block = min(_RANKS, tile_width(columns))
    grid = (triton.cdiv(tokens, _TOKENS), parts, triton.cdiv(columns, block))
    _down_kernel[grid](
        inner, x, down, own, tokens, columns, inputs, x.stride(0), count, part_size,
        DOT=dot_type(x.dtype), TOKENS=_TOKENS, COLUMNS=block, INPUTS=_INPUTS,
    )  # fmt: skip
    return inner


def _add(
    out: Tensor, rows: Tensor, inner: Tensor, up: Tensor, own: Tensor, layer: int, first: int,
    size: int,
) -> None:  # fmt: skip
    """Add the second product of one of the layers."""
    parts, tokens, columns = inner.shape
    count, rank, outputs = up.shape
    block = min(_OUTPUTS, tile_width(size))
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(size, block))
    _up_kernel[grid](
        out, rows, inner, up, own, tokens, columns, outputs, rows.stride(0), count, first, size,
        layer * rank, parts, rank, DOT=dot_type(rows.dtype), TOKENS=_TOKENS,
        RANK=min(_RANKS, tile_width(rank)), OUTPUTS=block,
    )  # fmt: skip
