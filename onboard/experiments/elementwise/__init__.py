"""Pointwise programs: functions of scalars, in a dialect of MLIR (xdsl), that are applied to whole
tensors.

A program has the dtypes of a subgraph of elementwise operators and the order of its roundings, and
no shapes: it is applied to each element of its inputs, broadcast to one shape. `dialect` defines
the operations, `program` reads and prints programs, `canonicalize` simplifies them, `evaluate` runs
them with PyTorch's operators, and `source` prints them as Triton kernels. All of it needs the
package xdsl (`pip install onboard[mlir]`).
"""

from __future__ import annotations

import importlib.util


def has_xdsl() -> bool:
    """Whether the package xdsl is installed, which all modules of this package import."""
    return importlib.util.find_spec("xdsl") is not None
