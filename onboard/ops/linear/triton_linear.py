"""Linear layers with what stands around them in a decoder: how the kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.fused import fake_fused_linear
from onboard.ops.linear.linear_kernels import matrix_kernel, vector_kernel
from onboard.ops.linear.triton_many_tokens import tiled_product
from onboard.ops.linear.triton_silu_mul import triton_silu_and_mul
from onboard.ops.norm.triton_rmsnorm import triton_rmsnorm
from onboard.ops.triton.launch import (
    dot_type,
    overlaps,
    power_of_two_in,
    processors,
    require_device,
)

MOST_ROWS = 64
"""More tokens are bound by arithmetic, not by the weights: `compose`. Small weights, of which a
library's tiles are too few, are not: `choose_many_tiles`.
"""

WIDE = 100
"""Rows of a weight for each processor from which they are dealt out in wide tiles."""

AHEAD = 256
"""Columns that a program has fetched before the kernel in front of it has ended: more get in that
one's way.
"""
_COUNTERS = 256


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of one call: tokens, rows and columns of the weight."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1
    """Programs that share the columns of a tile."""
    shares: int = 1
    """Parts in which one program sums them up."""
    ahead: int = 0
    """Columns of the weight that are fetched into the L2 cache before the kernel before has
    ended.
    """


def choose_tiles(rows: int, outputs: int, columns: int, device: torch.device) -> Tiles:
    """Tiles for `outputs` rows of a weight.

    Measured on compute capability 9.0 over the layers of dense models of 0.6, 8 and 70 billion
    parameters, and over what one of two ranks has of the latter.
    """
    if rows == 1:
        if columns <= 1024:
            return Tiles(1, 8, 512, num_warps=4)
        return Tiles(1, 2, 2048, num_warps=8) if outputs <= 2048 else Tiles(1, 2, 1024, num_warps=4)
    many = processors(device)
    tokens = max(8, triton.next_power_of_2(rows))
    if outputs >= WIDE * many:
        return _wide_tiles(max(16, tokens), outputs, columns, many)
    short = outputs <= 2048 and columns <= 3072
    width = 32 if short and tokens <= 16 else 64
    programs = triton.cdiv(outputs, width)
    splits = _splits(programs, columns, many)
    # With three stages a processor has two programs: a few more than processors wait for none
    stages = 3 if many < programs <= many * 3 // 2 else 5
    tokens = tokens if short else max(16, tokens)
    return Tiles(tokens, width, 128, 4, stages, splits, ahead=AHEAD)


def _wide_tiles(tokens: int, outputs: int, columns: int, many: int) -> Tiles:
    """Tiles for a weight with rows for about as many wide tiles as there are processors, or more."""
    if outputs < 128 * many:  # two programs a processor
        return Tiles(tokens, 128, 128, 8, 3, ahead=AHEAD)
    if columns > 4096 and tokens == 16:
        return Tiles(tokens, 64, 128, 4, 8, ahead=AHEAD)
    stages = 3 if columns > 4096 and tokens > 32 else 4
    return Tiles(tokens, 128, 128, 8, stages, ahead=AHEAD)


def choose_many_tiles(rows: int, outputs: int, columns: int, act: str) -> Tiles | None:
    """Tiles for 65 to 256 tokens and a small weight; None where the library's product is as fast.

    Measured on compute capability 9.0 over the layers of a dense model of 0.6 billion parameters.
    """
    if not MOST_ROWS < rows <= 256 or columns > 3072:
        return None
    if outputs <= 1024:
        return Tiles(32, 64, 128, num_warps=4, num_stages=5)
    if act and outputs <= 6144:
        wide = 128 if rows > 128 else 64
        return Tiles(wide, 128, 64, num_warps=4, num_stages=4)
    if outputs <= 4096 and rows <= 128:
        return Tiles(64, 64, 128, num_warps=4, num_stages=4)
    return None


def _splits(programs: int, columns: int, many: int) -> int:
    """In how many parts, a power of two, `programs` of at most `many` sum up columns so that enough
    are at work.
    """
    splits = 1 if programs > many // 3 and columns < 4096 else min(columns // 512, many // programs)
    return power_of_two_in(splits)


def choose_invariant_tiles(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Tiles with which a token's products are the same, bit for bit, however many `rows` of tokens
    there are.

    The weight alone decides in what order its columns are summed up, and the matrix instruction is
    always the one for 64 rows of it: it takes any number of tokens, each of which has sums of its
    own.
    """
    if dtype == torch.float32:
        return Tiles(16, 64, 32, num_warps=4, num_stages=2)
    many = processors(device)
    wide = outputs >= 128 * many
    parts = 1 if wide else _splits(triton.cdiv(outputs, 64), columns, many)
    if rows > MOST_ROWS:
        return Tiles(128, 128, 128, num_warps=8, num_stages=3, shares=parts)
    tokens = max(16, triton.next_power_of_2(rows))
    if wide:
        return Tiles(tokens, 128, 128, num_warps=8, num_stages=3 if tokens > 32 else 4)
    return Tiles(tokens, 64, 128, num_warps=4, num_stages=5, splits=parts)


@cache
def _zeros(address: int, device: torch.device) -> Tensor:
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def counters(address: int, device: torch.device, count: int) -> Tensor:
    """Return zeros, at least `count`, which each kernel leaves as it found them, for all products
    with the weight at an address.
    """
    assert count <= _COUNTERS
    return _zeros(address, device)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
    tiles: Tiles | None = None, weight_scale: Tensor | None = None, x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Run the kernel that the tiles are for, with x [rows, columns]; return [rows, outputs].

    A quantised weight has its rows' scales, or those of blocks; x that is
    quantised has those of tokens, or of their blocks, and the result is in `dtype`.
    """
    tiles = tiles or choose_tiles(len(x), len(weight), x.shape[1], x.device)
    if norm is not None and tiles.rows > 1:
        x, norm = triton_rmsnorm(x, norm, eps), None
    (rows, columns), gated = x.shape, bool(act)
    outputs = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    width = max(2, tiles.outputs) if gated else tiles.outputs
    programs = triton.cdiv(outputs, width // 2 if gated else width)
    flags = {
        "ACTIVATION": KERNEL_ACTIVATIONS[act] if gated else None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "SCALES": 0 if weight_scale is None else weight_scale.dim(),
        "BN": width,
        "BK": tiles.columns,
        "num_warps": tiles.num_warps,
        **overlaps(x.device),
    }
    if tiles.rows == 1:
        vector_kernel[(programs,)](
            out,
            x,
            weight,
            bias,
            residual,
            norm,
            weight_scale,
            outputs,
            columns,
            eps,
            HAS_NORM=norm is not None,
            **flags,
        )
        return out
    # What is fetched ahead begins and ends at a multiple of 16 bytes
    ahead = 0 if columns * weight.element_size() % 16 else tiles.ahead
    parts = arrived = None
    blocks = triton.cdiv(rows, tiles.rows)
    if tiles.splits > 1:
        assert blocks == 1, "the kernel numbers its parts by the tile of the weight alone"
        parts = x.new_empty(programs * tiles.splits * width * tiles.rows, dtype=torch.float32)
        arrived = counters(weight.data_ptr(), x.device, programs)
    matrix_kernel[(programs * blocks, tiles.splits)](
        out, x, weight, bias, residual, weight_scale, x_scale, parts, arrived, rows, outputs, columns, blocks,
        X_SCALES=0 if x_scale is None else x_scale.dim(),
        SPLITS=tiles.splits, SHARES=tiles.shares, BM=tiles.rows, STAGES=tiles.num_stages,
        EVEN=columns % tiles.columns == 0, DOT_TYPE=dot_type(x.dtype), AHEAD=ahead, **flags,
    )  # fmt: skip
    return out


def compose(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """The same for many tokens, x [rows, columns]: in tiles, or around the library's product."""
    x = x if norm is None else triton_rmsnorm(x, norm, eps)
    if (tiled := tiled_product(x, weight, bias, residual, act)) is not None:
        return tiled
    if residual is not None and bias is None and not act:
        return torch.addmm(residual, x, weight.t())
    return followed(F.linear(x, weight, bias), residual, act)


def followed(y: Tensor, residual: Tensor | None, act: str) -> Tensor:
    """Return a product with its gated activation and the residual addition behind it."""
    y = triton_silu_and_mul(y, act) if act else y
    return y if residual is None else y + residual


@register_op(fake_fused_linear)
def triton_fused_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """`torch_fused_linear` as one kernel for few tokens, and around the library's product for more.

    All tensors have one dtype, float16 or bfloat16; the activation is one of `KERNEL_ACTIVATIONS`.
    float16 is normalised by a kernel of its own: a number that has not been divided yet may be too
    large for it.
    """
    require_device(input)
    x, residual = as_rows(input), None if residual is None else as_rows(residual)
    if norm_weight is not None and x.dtype == torch.float16:
        x, norm_weight = triton_rmsnorm(x, norm_weight, eps), None
    around = (bias, residual, norm_weight, eps, activation)
    tiles = choose_many_tiles(len(x), len(weight), weight.shape[1], activation)
    if 0 < len(x) <= MOST_ROWS or tiles is not None:
        y = launch(x, weight, *around, tiles)
    else:
        y = compose(x, weight, *around)
    return y.view(*input.shape[:-1], y.shape[-1])


def as_rows(x: Tensor) -> Tensor:
    """View x as rows [tokens, columns]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


@register_op(fake_fused_linear, invariant_form_of="triton_fused_linear")
def invariant_fused_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    norm_weight: Tensor | None = None, eps: float = 0.0, activation: str = "",
) -> Tensor:  # fmt: skip
    """`triton_fused_linear` whose rows are the same, bit for bit, whatever other rows there are;
    float32, too.
    """
    require_device(input)
    if not input.numel():
        return fake_fused_linear(input, weight, activation=activation)
    x, residual = as_rows(input), None if residual is None else as_rows(residual)
    tiles = choose_invariant_tiles(len(x), len(weight), x.shape[1], x.dtype, x.device)
    y = launch(x, weight, bias, residual, norm_weight, eps, activation, tiles)
    return y.view(*input.shape[:-1], y.shape[-1])
