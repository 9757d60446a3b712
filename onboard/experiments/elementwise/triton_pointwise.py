"""Generated kernels: each program is printed as a Triton kernel for each number of dimensions that
it meets.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from torch import Tensor

from onboard.experiments.elementwise.pointwise_op import common_shape, empty_results
from onboard.ops.library import register_op
from onboard.ops.triton.launch import power_of_two, require_device
from onboard.user_cache import keep, user_cache

_SMALL, _BLOCK, _LARGE_BLOCK = 1 << 16, 256, 1024
"""Elements of a tile, for tensors of up to `_SMALL` elements and for larger ones."""


class Layout(NamedTuple):
    """How the elements of some tensors lie, once dimensions have been joined."""

    rows: int
    columns: int
    sizes: tuple[int, ...]
    """Those of the dimensions before the last."""
    strides: tuple[tuple[int, ...], ...]
    """For each tensor, in elements: in those dimensions, then along a row."""


@lru_cache(maxsize=4096)
def joined_layout(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], whole_rows: bool
) -> Layout:
    """Join neighbouring dimensions of `shape` that lie one behind the other in each tensor, and in
    a contiguous one.

    With `whole_rows` the last one stays alone.
    """
    joined: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(len(shape) - 1, -1, -1):
        size, steps = shape[dim], tuple(each[dim] for each in strides)
        if size == 1 and not (whole_rows and dim == len(shape) - 1):
            continue
        if (
            joined
            and not (whole_rows and len(joined) == 1)
            and all(
                step == inner * joined[-1][0]
                for step, inner in zip(steps, joined[-1][1], strict=True)
            )
        ):
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, steps))
    joined = joined[::-1] or [(1, (0,) * len(strides))]
    sizes = tuple(size for size, _ in joined[:-1])
    per_tensor = tuple(tuple(steps[each] for _, steps in joined) for each in range(len(strides)))
    return Layout(math.prod(sizes), joined[-1][0], sizes, per_tensor)


@register_op(empty_results)
def triton_pointwise(inputs: list[Tensor], program: str) -> list[Tensor]:
    """`torch_pointwise` as one kernel; every operation rounds as PyTorch's kernel of its own
    does.
    """
    for x in inputs:
        require_device(x)
    outputs = empty_results(inputs, program)
    shape = tuple(common_shape(inputs))
    whole_rows = _has_whole_rows(program)
    layout = joined_layout(shape, tuple(x.expand(shape).stride() for x in inputs), whole_rows)
    if layout.rows * layout.columns:
        _launch(_kernel(program, len(layout.sizes)), outputs, inputs, layout, whole_rows)
    return outputs


def _tile(layout: Layout, whole_rows: bool) -> tuple[int, int]:
    """Return how many rows and columns a program works on, powers of two."""
    block = _BLOCK if layout.rows * layout.columns <= _SMALL else _LARGE_BLOCK
    columns = power_of_two(layout.columns)
    columns = columns if whole_rows else min(block, columns)
    return min(max(1, block // columns), power_of_two(layout.rows)), columns


def _launch(
    kernel: Any, outputs: list[Tensor], inputs: list[Tensor], layout: Layout, whole_rows: bool
) -> None:
    rows, columns = _tile(layout, whole_rows)
    grid = (triton.cdiv(layout.rows, rows) * triton.cdiv(layout.columns, columns),)
    outer = [stride for strides in layout.strides for stride in strides[:-1]]
    along = [strides[-1] for strides in layout.strides]
    kernel[grid](
        *outputs,
        *inputs,
        layout.rows,
        layout.columns,
        *layout.sizes[1:],
        *outer,
        *along,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=min(4, max(1, rows * columns // 64))
        if rows * columns <= _LARGE_BLOCK
        else min(16, columns // 512),
        enable_fp_fusion=False,  # a product and a sum are rounded each, as in two kernels
    )


@lru_cache(maxsize=1024)
def _has_whole_rows(program: str) -> bool:
    from onboard.experiments.elementwise.dialect import reduces_rows
    from onboard.experiments.elementwise.program import parse_program, steps

    return reduces_rows(steps(parse_program(program)))


@lru_cache(maxsize=1024)
def _kernel(program: str, outer: int) -> Any:
    """Return the compiled-on-demand kernel of a program for `outer` dimensions before the last."""
    from onboard.experiments.elementwise.kernel_source import kernel_source
    from onboard.experiments.elementwise.program import parse_program

    source = kernel_source(parse_program(program), outer)
    name = f"pointwise_{hashlib.sha256(source.encode()).hexdigest()[:32]}.py"
    folder = user_cache("kernels")
    path = Path(f"<{name}>") if folder is None else folder / name
    if folder is not None:  # for people and debuggers to read
        keep(path, source.encode())
    # What runs is the text that was just made, whatever the file holds; Triton asks `linecache` for
    # it.
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    names: dict[str, Any] = {"__name__": f"onboard_kernels.{path.stem}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return names["kernel"]
