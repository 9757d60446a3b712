"""Linear layers over many tokens: where the kernel with what stands behind them is faster than the
library's product, and how it is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onboard.ops.linear.activation import KERNEL_ACTIVATIONS
from onboard.ops.linear.tile_kernels import tile_kernel
from onboard.ops.triton.launch import TYPES, copies_tiles, dot_type, processors

_FULL = 0.9
"""Share of the tiles' places that has to be used: the library has more sizes of tiles to choose."""

_FEW_COLUMNS = 3072
"""With more, small tiles read a bfloat16 weight too often."""

_GROUP = 16
"""Rows of tiles that programs take column by column."""


@dataclass(frozen=True)
class Tile:
    """Rows and outputs of a tile, and how the kernel is compiled for it."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int

    def count(self, rows: int, outputs: int) -> int:
        """Return how many of them cover a result."""
        count: int = triton.cdiv(rows, self.rows) * triton.cdiv(outputs, self.outputs)
        return count


_GATED = (Tile(128, 128, num_warps=8, num_stages=3),)
_LARGE = (Tile(128, 256, num_warps=8, num_stages=3),)
_SMALL = (Tile(128, 128, num_warps=4, num_stages=4), Tile(64, 128, num_warps=4, num_stages=4))


def choose_tile(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, gated: bool, programs: int
) -> Tile | None:
    """Return the largest tile with which all `programs` have work, nearly all of the time; None: the
    library is as fast.

    Measured on compute capability 9.0 over the layers of dense models of 0.6 to 70 billion
    parameters, in bfloat16 and float8.
    """
    if dtype.itemsize > 2:
        return None
    small = dtype.itemsize == 1 or columns <= _FEW_COLUMNS
    tiles = _GATED if gated else _LARGE + (_SMALL if small else ())
    return next((each for each in tiles if _filled(each, rows, outputs, programs) > _FULL), None)


def _filled(tile: Tile, rows: int, outputs: int, programs: int) -> float:
    """Return the share of the tiles' places that rows and outputs fill, where each of the programs
    computes as many tiles.
    """
    count = tile.count(rows, outputs)
    places = (count + -count % programs) * tile.rows * tile.outputs
    return rows * outputs / places


def tiled_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, act: str,
    x_scale: Tensor | None = None, weight_scale: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor | None:  # fmt: skip
    """Return act(x @ gate) * (x @ up) + residual in one kernel, or x @ weight + residual; None where
    the library's product is as fast, there is a bias or scales are of blocks, or copies of tiles cannot
    address a tensor.

    Args:
        x: [rows, columns] numbers, or codes with scales `x_scale` [rows] float32.
        weight: [outputs, columns]; gates, then what they multiply, if `act` is not "". Codes have
            scales `weight_scale` [outputs].
        dtype: of the result; None: that of x.
    """
    (rows, columns), outputs = x.shape, len(weight) // (2 if act else 1)
    around = bias is None and (act or residual is not None)
    in_blocks = weight_scale is not None and weight_scale.dim() == 2
    if not around or in_blocks or not copies_tiles(x.device):
        return None
    programs = processors(x.device)
    tile = choose_tile(rows, outputs, columns, x.dtype, bool(act), programs)
    if tile is None:
        return None
    out = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    tensors = (out, x, weight) if residual is None else (out, x, weight, residual)
    if not all(map(_addressable, tensors)):
        return None
    return _launch(tile, programs, out, x, weight, residual, act, x_scale, weight_scale)


def _addressable(tensor: Tensor) -> bool:
    """Tell whether rows begin at multiples of 16 bytes, as copies of tiles want it."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
    return aligned and tensor.stride(1) == 1


def _launch(
    tile: Tile, programs: int, out: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, act: str,
    x_scale: Tensor | None, weight_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    (rows, outputs), columns = out.shape, x.shape[1]
    step = 128 // x.element_size()
    result = (tile.rows, tile.outputs)
    tile_kernel[(min(tile.count(rows, outputs), programs),)](
        _described(out, result),
        _described(x, (tile.rows, step)),
        _described(weight, (tile.outputs, step)),
        None if residual is None else _described(residual, result),
        x_scale,
        weight_scale,
        rows,
        outputs,
        columns,
        ACTIVATION=KERNEL_ACTIVATIONS[act] if act else None,
        HAS_RESIDUAL=residual is not None,
        SCALED=x_scale is not None,
        SUM=tl.int32 if x.dtype == torch.int8 else tl.float32,
        DOT_TYPE=dot_type(x.dtype),
        OUT_TYPE=TYPES[out.dtype],
        BM=tile.rows,
        BN=tile.outputs,
        BK=step,
        GROUP=_GROUP,
        PROGRAMS=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _described(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
