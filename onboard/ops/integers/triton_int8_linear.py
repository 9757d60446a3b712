"""Linear layers with integers of eight bits: how the kernels are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onboard.ops.integers.int8_linear import fake_fused_int8_linear
from onboard.ops.integers.int8_product import (
    int8_matrix_kernel,
    int8_vector_kernel,
    int8_write_out_kernel,
    scale_sums_kernel,
)
from onboard.ops.library import register_op
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.fp8_kernels import quantise
from onboard.ops.linear.triton_fp8_linear import choose_fp8_tiles
from onboard.ops.linear.triton_linear import MOST_ROWS, Tiles, as_rows, compose, counters, launch
from onboard.ops.linear.triton_many_tokens import tiled_product
from onboard.ops.norm.triton_rmsnorm import triton_rmsnorm
from onboard.ops.triton.launch import (
    dot_type,
    overlaps,
    power_of_two,
    power_of_two_in,
    processors,
    require_device,
)

_STEP = 128
"""Inputs that a step takes at most, where groups have their own scales."""
_FEWEST_INPUTS = 512
"""Of a part of the inputs that a program sums up."""
_LEAST_LIBRARY_ROWS = 17
"""Fewer tokens the library does not multiply (torch._int_mm on CUDA)."""


def choose_int8_tiles(
    rows: int, outputs: int, inputs: int, group: int, device: torch.device
) -> Tiles:
    """Tiles for `outputs` rows of a weight and exact inputs: not measured yet."""
    if rows == 1:
        return Tiles(1, 4, 1024, num_warps=4)
    tokens, step = min(64, max(16, power_of_two(rows))), even_step(group)
    programs = triton.cdiv(outputs, 64) * triton.cdiv(rows, tokens)
    wanted = min(2 * processors(device) // programs, inputs // _FEWEST_INPUTS)
    splits = power_of_two_in(wanted) if rows <= tokens else 1
    return Tiles(tokens, 64, step, 4, num_stages=max(4, 512 // step), splits=splits)


def even_step(group: int) -> int:
    """Return the largest power of two, up to a run, that divides a group; a whole output's is one
    run after the other.
    """
    return min(_STEP, group & -group) if group % 16 == 0 else _STEP


def int8_write_out(
    weight: Tensor, scale: Tensor, offset: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """Return a weight's values [outputs, inputs] (`int8_values`) in `dtype`."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    group, step = widened(group, inputs), even_step(widened(group, inputs))
    int8_write_out_kernel[(triton.cdiv(outputs, 32), triton.cdiv(inputs, step))](
        out, weight, scale, offset, outputs, inputs, scale.shape[1],
        HAS_OFFSET=offset is not None, GROUP=group, BN=32, BK=step, num_warps=4, **overlaps(weight.device),
    )  # fmt: skip
    return out


def widened(group: int, inputs: int) -> int:
    """Return the group, a power of two where it is all of an output's inputs: steps divide it."""
    return max(_STEP, power_of_two(inputs)) if group >= inputs else group


def _in_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str,
    scale: Tensor, offset: Tensor | None, group: int,
) -> Tensor:  # fmt: skip
    """The product for few tokens x [rows, inputs], with scales of groups."""
    rows, inputs = x.shape
    group = widened(group, inputs)
    tiles = choose_int8_tiles(rows, len(weight), inputs, group, x.device)
    outputs = len(weight) // 2 if act else len(weight)
    out = x.new_empty(rows, outputs)
    blocks = triton.cdiv(rows, tiles.rows)
    programs = triton.cdiv(outputs, tiles.outputs // 2 if act else tiles.outputs) * blocks
    tensors = (out, x, weight, bias, residual, scale, offset)
    flags = {
        "ACTIVATION": KERNEL_ACTIVATIONS[act] if act else None,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "HAS_OFFSET": offset is not None,
        "GROUP": group, "BN": tiles.outputs, "BK": tiles.columns, "num_warps": tiles.num_warps,
        **overlaps(x.device),
    }  # fmt: skip
    if tiles.rows == 1:
        part = min(tiles.columns, group & -group)
        int8_vector_kernel[(programs,)](
            *tensors, outputs, inputs, scale.shape[1], PART=part, **flags
        )
        return out
    parts = arrived = None
    if tiles.splits > 1:
        size = programs * tiles.splits * tiles.outputs * tiles.rows
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = counters(weight.data_ptr(), x.device, programs)
    int8_matrix_kernel[(programs, tiles.splits)](
        *tensors, parts, arrived, rows, outputs, inputs, scale.shape[1], blocks,
        EVEN=inputs % tiles.columns == 0, SPLITS=tiles.splits, BM=tiles.rows, STAGES=tiles.num_stages,
        TYPE=dot_type(x.dtype), **flags,
    )  # fmt: skip
    return out


def _weight_only(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str,
    scale: Tensor, offset: Tensor | None, group: int,
) -> Tensor:  # fmt: skip
    """The product with exact inputs: reading codes for few tokens, the library's of a weight that is
    written out for more.
    """
    if len(x) > MOST_ROWS:
        values = int8_write_out(weight, scale, offset, group, x.dtype)
        return compose(x, values, bias, residual, None, 0.0, act)
    if scale.shape[1] > 1 or offset is not None:
        return _in_groups(x, weight, bias, residual, act, scale, offset, group)
    tiles = choose_int8_tiles(len(x), len(weight), x.shape[1], _STEP, x.device)
    return launch(x, weight, bias, residual, None, 0.0, act, tiles, scale[:, 0].float())


def _of_integers(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None,
    eps: float, act: str, scale: Tensor, given: Tensor | None, how: str,
) -> Tensor:  # fmt: skip
    """The product of inputs as integers: the library's for many tokens where it has one."""
    codes, x_scale = quantise(x, how, given, norm, eps, dtype=torch.int8)
    rows = scale[:, 0].float()
    if len(x) > MOST_ROWS and has_integer_product(weight, len(x)):
        tiled = tiled_product(codes, weight, bias, residual, act, x_scale, rows, x.dtype)
        if tiled is not None:
            return tiled
        sums = torch._int_mm(codes, weight.t())
        return scale_sums(sums, x_scale, scale, bias, residual, act, x.dtype)
    few = min(len(x), MOST_ROWS)
    tiles = choose_fp8_tiles(few, len(weight), x.shape[1], False, x.device)
    return launch(codes, weight, bias, residual, None, eps, act, tiles, rows, x_scale, x.dtype)


def has_integer_product(weight: Tensor, rows: int) -> bool:
    """Tell whether the library multiplies so many rows of integers with a weight's."""
    return rows >= _LEAST_LIBRARY_ROWS and not any(size % 8 for size in weight.shape)


def scale_sums(
    sums: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    act: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return sums of integers [rows, outputs] times the scales of rows [rows] and outputs [outputs,
    1], with what stands behind a linear layer, as one kernel.
    """
    rows, outputs = sums.shape
    outputs = outputs // 2 if act else outputs
    out = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    block = min(1024, power_of_two(outputs))
    scale_sums_kernel[(rows, triton.cdiv(outputs, block))](
        out, sums, x_scale, scale, bias, residual, outputs,
        ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=4, **overlaps(sums.device),
    )  # fmt: skip
    return out


@register_op(fake_fused_int8_linear)
def triton_fused_int8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    offset: Tensor | None = None,
    input_scale: Tensor | None = None,
    group: int = 128,
    quantize: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_int8_linear` as one kernel for few tokens, two where inputs are quantised, and
    around the library's product for more; a single token's input is not quantised: its products are
    exact and cost nothing.
    """
    require_device(input)
    if not input.numel():
        return fake_fused_int8_linear(input, weight, bias, weight_scale, activation=activation)
    x, residual = as_rows(input), None if residual is None else as_rows(residual)
    if norm_weight is not None and (x.dtype == torch.float16 or not quantize or len(x) == 1):
        x, norm_weight = triton_rmsnorm(x, norm_weight, eps), None
    if quantize and len(x) > 1:
        y = _of_integers(
            x, weight, bias, residual, norm_weight, eps, activation, weight_scale, input_scale, quantize,
        )  # fmt: skip
    else:
        y = _weight_only(x, weight, bias, residual, activation, weight_scale, offset, group)
    return y.view(*input.shape[:-1], y.shape[-1])
