"""Which quantised weights there are kernels for: by their codes, and by what shares a scale."""

from __future__ import annotations

from onboard.graph.quantise.four_bit_parts import LINEARS, fits_kernels
from onboard.ops.linear.fp8_linear import BLOCK

_INT8_STEP = 16
"""Inputs that kernels for integers of eight bits take at least."""


def has_kernels(kind: str, block: tuple[int, int] | None, inputs: int) -> bool:
    """Tell whether ops compute with codes of a kind ("fp8", "int8", "int4", "mxfp4", "nvfp4") of which
    blocks share a scale; None: all of an output's inputs do.
    """
    if kind == "fp8":
        return block in (None, (BLOCK, BLOCK))
    rows, group = (1, inputs) if block is None else block
    if kind == "int8":
        return rows == 1 and (group % _INT8_STEP == 0 or group >= inputs)
    return kind in LINEARS and rows == 1 and fits_kernels(group, inputs)
