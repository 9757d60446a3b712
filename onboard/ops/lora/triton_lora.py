# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The kernels are written in Triton's language: their arguments have Triton's types.)
"""What low-rank adapters add, as two kernels for any mixture of adapters in a step.

A program has a tile of tokens and some of the adapters, in a step of few tokens one; an adapter that
none of its tokens has costs a comparison alone. So each adapter's matrices are read once for a tile,
side by side, and a captured step serves every batch. The first product is cut along the inputs into
parts that programs compute side by side; the second kernel adds them up in order, so that results do
not vary from run to run. The first one needs nothing of the linear layer in front of it, and runs
beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.linear.triton_silu_mul import triton_silu_and_mul
from onboard.ops.lora.lora import empty_result, fake_lora
from onboard.ops.lora.triton_lora_few_tokens import adapt_few, takes
from onboard.ops.triton.launch import (
    dot_type,
    last_contiguous,
    overlaps,
    require_device,
    tile_width,
)
from onboard.ops.triton.overlap import wait_for_inputs

_TOKENS = 16
_INPUTS = 128
_OUTPUTS = 128
_RANKS = 64
_MOST_PARTS = 16
_LAYERS = 3
"""Of one launch of the second kernel."""
_ADAPTERS = 16
"""Programs of a tile that adapters are divided among, at most."""


@triton.jit
def _down_kernel(
    inner_ptr, x_ptr, down_ptr, adapters_ptr, tokens, columns, inputs, x_stride, count, step,
    part_size, DOT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a part's sums of each token's own adapter: [parts, tokens, columns] float32."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    column = tl.program_id(2) // step * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(adapters_ptr + token, mask=token < tokens, other=0)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    mine = token < 0
    rows = token.to(tl.int64)[:, None] * x_stride
    size = tl.cast(inputs, tl.int64) * columns
    for adapter in range(tl.program_id(2) % step, count, step):
        wanted = own == adapter + 1
        mine = mine | wanted
        matrix = down_ptr + adapter * size
        if tl.max(wanted.to(tl.int32), 0) > 0:
            for first in range(part * part_size, min(part * part_size + part_size, inputs), INPUTS):
                at = first + tl.arange(0, INPUTS)
                x = tl.load(
                    x_ptr + rows + at[None, :],
                    mask=wanted[:, None] & (at[None, :] < inputs),
                    other=0.0,
                )
                down = tl.load(
                    matrix + column[None, :] * inputs + at[:, None],
                    mask=(column[None, :] < columns) & (at[:, None] < inputs),
                    other=0.0,
                )
                sums = tl.dot(x.to(DOT), down.to(DOT), sums, input_precision="ieee")
    wait_for_inputs(OVERLAP)  # the layer in front reads x, too: it is older
    target = (part * tokens + token).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(inner_ptr + target, sums, mask=mine[:, None] & (column[None, :] < columns))


@triton.jit
def _up_kernel(
    out_ptr, y_ptr, inner_ptr, up_ptr, adapters_ptr, tokens, columns, outputs, y_stride, count,
    step, first_output, first_column, size_0, size_1, size_2, parts, rank, DOT: tl.constexpr,
    TOKENS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the second product of up to three layers to their outputs."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(size_0, OUTPUTS), tl.cdiv(size_1, OUTPUTS)
    is_second, is_third = block >= blocks_0, block >= blocks_0 + blocks_1
    layer = is_second.to(tl.int32) + is_third.to(tl.int32)
    block -= tl.where(is_second, blocks_0, 0) + tl.where(is_third, blocks_1, 0)
    size = tl.where(is_third, size_2, tl.where(is_second, size_1, size_0))
    begin = first_output + tl.where(is_second, size_0, 0) + tl.where(is_third, size_1, 0)
    within = block * OUTPUTS + tl.arange(0, OUTPUTS)
    output, is_output = begin + within, within < size
    own = tl.load(adapters_ptr + token, mask=token < tokens, other=0)
    wait_for_inputs(OVERLAP)
    for adapter in range(tl.program_id(2), count + 1, step):  # 0: none
        wanted = (own == adapter) & (token < tokens)
        if tl.max(wanted.to(tl.int32), 0) > 0:
            inside = wanted[:, None] & is_output[None, :]
            y = y_ptr + token.to(tl.int64)[:, None] * y_stride + output[None, :]
            sums = tl.load(y, mask=inside, other=0.0).to(tl.float32)
            matrix = up_ptr + (adapter - 1) * (tl.cast(outputs, tl.int64) * rank)
            for first in range(0, min(adapter, 1) * rank, RANK):
                number = first + tl.arange(0, RANK)
                up = tl.load(
                    matrix + number[:, None] * outputs + output[None, :],
                    mask=(number[:, None] < rank) & is_output[None, :],
                    other=0.0,
                )
                inner = tl.zeros((TOKENS, RANK), tl.float32)
                for part in range(parts):
                    row = (part * tokens + token).to(tl.int64)[:, None] * columns
                    at = first_column + layer * rank + number
                    mask = wanted[:, None] & (number[None, :] < rank)
                    inner += tl.load(inner_ptr + row + at[None, :], mask=mask, other=0.0)
                sums = tl.dot(inner.to(DOT), up.to(DOT), sums, input_precision="ieee")
            tl.store(
                out_ptr + token.to(tl.int64)[:, None] * outputs + output[None, :],
                sums.to(out_ptr.dtype.element_ty),
                mask=inside,
            )


@register_op(fake_lora, inserted=True)
def triton_lora(
    outputs: Tensor,
    input: Tensor,
    down: Tensor,
    up: Tensor,
    sizes: list[int],
    adapters: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """`torch_lora` by kernels, with sums in float32."""
    require_device(outputs)
    if adapters is None:
        return triton_silu_and_mul(outputs, activation) if activation else outputs.clone()
    rows = last_contiguous(outputs).reshape(-1, outputs.shape[-1])
    own, x = adapters.reshape(-1), last_contiguous(input).reshape(-1, input.shape[-1])
    is_older = x.data_ptr() == input.data_ptr()
    if len(rows) and takes(rows, down, sizes):
        out = empty_result(outputs, activation)
        adapt_few(out, rows, x, down, up, own, sizes, activation, is_older=is_older)
        return out
    out = empty_result(outputs, "")
    if out.numel():
        inner = _inner(x, down, own, is_older=is_older)
        for layer in range(0, len(sizes), _LAYERS):
            _add(out, rows, inner, up, own, sizes, layer)
    return triton_silu_and_mul(out, activation) if activation else out


def _side_by_side(tokens: int, adapters: int) -> int:
    """Return among how many programs the adapters of a tile are divided."""
    return min(adapters, _ADAPTERS) if tokens <= _TOKENS else 1


def _inner(x: Tensor, down: Tensor, own: Tensor, *, is_older: bool) -> Tensor:
    """Return the first products, [parts, tokens, layers * rank] float32; whether x was there before
    the kernel in front began.
    """
    tokens, (count, columns, inputs) = len(x), down.shape
    parts = min(_MOST_PARTS, triton.cdiv(inputs, 2 * _INPUTS))
    part_size = triton.cdiv(triton.cdiv(inputs, parts), _INPUTS) * _INPUTS
    inner = torch.empty((parts, tokens, columns), dtype=torch.float32, device=x.device)
    block, step = min(_RANKS, tile_width(columns)), _side_by_side(tokens, count)
    grid = (triton.cdiv(tokens, _TOKENS), parts, triton.cdiv(columns, block) * step)
    early = overlaps(x.device) if is_older else {"OVERLAP": False}
    _down_kernel[grid](
        inner, x, down, own, tokens, columns, inputs, x.stride(0), count, step, part_size,
        DOT=dot_type(x.dtype), TOKENS=_TOKENS, COLUMNS=block, INPUTS=_INPUTS, **early,
    )  # fmt: skip
    return inner


def _add(
    out: Tensor, rows: Tensor, inner: Tensor, up: Tensor, own: Tensor, sizes: list[int], layer: int
) -> None:
    """Add the second products of the layers from number `layer` on that one launch has."""
    parts, tokens, columns = inner.shape
    count, rank, outputs = up.shape
    some = sizes[layer : layer + _LAYERS]
    block, step = min(_OUTPUTS, tile_width(max(some))), _side_by_side(tokens, count + 1)
    blocks = sum(triton.cdiv(size, block) for size in some)
    _up_kernel[(triton.cdiv(tokens, _TOKENS), blocks, step)](
        out, rows, inner, up, own, tokens, columns, outputs, rows.stride(0), count, step,
        sum(sizes[:layer]), layer * rank, *some, *[0] * (_LAYERS - len(some)), parts, rank,
        DOT=dot_type(rows.dtype), TOKENS=_TOKENS, RANK=min(_RANKS, tile_width(rank)),
        OUTPUTS=block, **overlaps(rows.device),
    )  # fmt: skip
