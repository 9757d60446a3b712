"""Linear layers with four-bit weights: how the kernels are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onboard.ops.few_tokens.cuda_few_tokens import Around, product, suits
from onboard.ops.four_bits.four_bit_kernels import HAS_PTX
from onboard.ops.four_bits.four_bit_linear import fake_fused_four_bit_linear
from onboard.ops.four_bits.four_bit_product import four_bit_kernel, write_out_kernel
from onboard.ops.four_bits.four_bit_row_kernels import four_bit_rows_kernel
from onboard.ops.four_bits.four_bit_vector import four_bit_vector_kernel
from onboard.ops.four_bits.four_bits import RUN, Words
from onboard.ops.library import register_op
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.triton_linear import Tiles, as_rows, compose, counters
from onboard.ops.norm.triton_rmsnorm import triton_rmsnorm
from onboard.ops.triton.launch import (
    dot_type,
    overlaps,
    power_of_two,
    power_of_two_in,
    processors,
    require_device,
)

MOST_ROWS = 256
"""More tokens are the library's, of a weight that is written out: reading it is then the least part
of the work.
"""
_TOKENS = 64
"""Of a tile at most: each tile of tokens decodes the weight again."""
_OUTPUTS = 128
QUAD = RUN // 4
"""Inputs of the four words that a thread of the kernel for one token has."""
FLOATS_TILES = Tiles(1, 4, 128 * QUAD, num_warps=4)
"""Of floats and one token. Measured as `choose_four_bit_tiles` was."""
_ROWS = 2
"""Of integers and one token: those that a program takes at a time."""
_MOST_QUADS = 1024
"""As many threads as a program can have."""
_WARPS = 16
"""Of programs that take rows: so many of a processor's together are the fastest."""
_FEWEST_RUNS = 4
"""Of a part of the inputs that a program sums up."""


def choose_four_bit_tiles(rows: int, outputs: int, inputs: int, device: torch.device) -> Tiles:
    """Tiles for `outputs` rows of a weight.

    Measured on compute capability 9.0 over the layers of a dense model of 8 billion parameters, for
    1, 8 and 64 tokens.
    """
    tokens = min(_TOKENS, max(16, triton.next_power_of_2(rows)))
    blocks, runs = triton.cdiv(rows, tokens), triton.cdiv(inputs, RUN)
    programs = triton.cdiv(outputs, _OUTPUTS) * blocks
    most = processors(device) * (4 if tokens == 16 else 3) // 2
    splits = power_of_two_in(min(most // programs, runs // _FEWEST_RUNS)) if blocks == 1 else 1
    return Tiles(tokens, _OUTPUTS, RUN, num_warps=4, num_stages=3, splits=splits)


def write_out(
    weight: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None,
    levels: str, group: int, inputs: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return a weight's values [outputs, inputs] (`four_bits.unpacked`) in `dtype`."""
    outputs, rows = len(weight), 32
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    write_out_kernel[(triton.cdiv(outputs, rows), triton.cdiv(inputs, RUN))](
        out, weight, scale, zero, whole, outputs, inputs, scale.shape[1],
        E2M1=levels == "e2m1", GROUP=group, HAS_ZERO=zero is not None, HAS_WHOLE=whole is not None,
        BN=rows, num_warps=4, **overlaps(weight.device),
    )  # fmt: skip
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str,
    scale: Tensor, zero: Tensor | None, whole: Tensor | None, levels: str, group: int,
) -> Tensor:  # fmt: skip
    """Run the kernel for few tokens x [rows, inputs]; return [rows, outputs]."""
    rows, inputs = x.shape
    outputs = len(weight) // 2 if act else len(weight)
    tiles = choose_four_bit_tiles(rows, len(weight), inputs, x.device)
    out = x.new_empty(rows, outputs)
    blocks = triton.cdiv(rows, tiles.rows)
    programs = triton.cdiv(outputs, tiles.outputs // 2 if act else tiles.outputs) * blocks
    parts = arrived = None
    if tiles.splits > 1:
        size = programs * tiles.splits * tiles.outputs * tiles.rows
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = counters(weight.data_ptr(), x.device, programs)
    four_bit_kernel[(programs, tiles.splits)](
        out, x, weight, bias, residual, scale, zero, whole, parts, arrived,
        rows, outputs, inputs, scale.shape[1], blocks,
        ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        E2M1=levels == "e2m1", GROUP=group, HAS_ZERO=zero is not None, HAS_WHOLE=whole is not None,
        EVEN=inputs % RUN == 0, SPLITS=tiles.splits, BM=tiles.rows, BN=tiles.outputs, STAGES=tiles.num_stages,
        TYPE=dot_type(x.dtype), PTX=HAS_PTX, num_warps=tiles.num_warps, **overlaps(x.device),
    )  # fmt: skip
    return out


def takes_rows(
    zero: Tensor | None, whole: Tensor | None, levels: str, group: int, inputs: int
) -> bool:
    """Tell whether one token has the kernel that keeps it in registers: a quad has one scale."""
    plain = levels == "int4" and whole is None and (zero is None or zero.dtype == torch.uint8)
    return plain and (group % RUN == 0 or group >= inputs) and inputs <= _MOST_QUADS * QUAD


def _launch_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
    scale: Tensor, zero: Tensor | None, group: int,
) -> Tensor:  # fmt: skip
    """Run the kernel for one token x [1, inputs] and integers; return [1, outputs]."""
    outputs = len(weight) // 2 if act else len(weight)
    quads = power_of_two(triton.cdiv(x.shape[1], RUN) * (RUN // QUAD))
    warps = max(1, quads // 32)
    out = x.new_empty(1, outputs)
    tiles = triton.cdiv(outputs, _ROWS // 2 if act else _ROWS)
    programs = min(tiles, processors(x.device) * max(1, _WARPS // warps))
    four_bit_rows_kernel[(programs,)](
        out, x, weight, bias, residual, norm, scale, zero,
        outputs, x.shape[1], scale.shape[1], tiles, eps,
        ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        GROUP=group, HAS_ZERO=zero is not None, BN=_ROWS, Q=quads, num_warps=warps, **overlaps(x.device),
    )  # fmt: skip
    return out


def _launch_vector(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
    scale: Tensor, whole: Tensor | None, group: int,
) -> Tensor:  # fmt: skip
    """Run the kernel for one token x [1, inputs] and floats; return [1, outputs]."""
    outputs = len(weight) // 2 if act else len(weight)
    tiles = FLOATS_TILES
    out = x.new_empty(1, outputs)
    programs = triton.cdiv(outputs, tiles.outputs // 2 if act else tiles.outputs)
    four_bit_vector_kernel[(programs,)](
        out, x, weight, bias, residual, norm, scale, whole,
        outputs, x.shape[1], scale.shape[1], eps,
        ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        GROUP=group, HAS_WHOLE=whole is not None,
        BN=tiles.outputs, Q=tiles.columns // QUAD, num_warps=tiles.num_warps, **overlaps(x.device),
    )  # fmt: skip
    return out


@register_op(fake_fused_four_bit_linear)
def triton_fused_four_bit_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    zero: Tensor | None = None,
    whole: Tensor | None = None,
    levels: str = "int4",
    group: int = 128,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_four_bit_linear` as one kernel for few tokens, behind that of the norm, which
    the kernel for up to sixteen on Hopper GPUs, and that for one, have within, and around the
    library's product for more.
    """
    require_device(input)
    if not input.numel():
        return fake_fused_four_bit_linear(input, weight, bias, weight_scale, activation=activation)
    x, residual = as_rows(input), None if residual is None else as_rows(residual)
    form = (weight_scale, zero, whole, levels, group)
    words = Words(weight, weight_scale, zero, whole, bias, levels, group)
    if suits(x, words):
        y = product(x, words, Around(residual, norm_weight, eps, bool(activation), activation))
        return y.view(*input.shape[:-1], y.shape[-1])
    if len(x) == 1 and takes_rows(zero, whole, levels, group, x.shape[1]):
        around = (bias, residual, norm_weight, eps, activation)
        y = _launch_rows(x, weight, *around, weight_scale, zero, group)
        return y.view(*input.shape[:-1], y.shape[-1])
    alone = len(x) == 1 and levels == "e2m1"
    if norm_weight is not None and (not alone or x.dtype == torch.float16):
        x, norm_weight = triton_rmsnorm(x, norm_weight, eps), None
    if alone:
        around = (bias, residual, norm_weight, eps, activation)
        y = _launch_vector(x, weight, *around, weight_scale, whole, group)
        return y.view(*input.shape[:-1], y.shape[-1])
    if len(x) <= MOST_ROWS:
        y = _launch(x, weight, bias, residual, activation, *form)
    else:
        values = write_out(weight, *form, x.shape[1], x.dtype)
        y = compose(x, values, bias, residual, None, eps, activation)
    return y.view(*input.shape[:-1], y.shape[-1])
