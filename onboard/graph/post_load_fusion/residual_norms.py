"""Residual additions and the RMSNorms behind them: found in a graph, and replaced by one op."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Argument

from onboard.graph.fx import Target, arguments, is_op, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.dtype_casts import is_cast

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ResidualSum(NamedTuple):
    """An addition that a norm normalises, behind a change of dtype or as it is."""

    total: fx.Node
    cast: fx.Node | None

    @property
    def readers(self) -> set[fx.Node]:
        """The nodes that read the sum in either dtype."""
        return {*self.total.users, *(self.cast.users if self.cast else ())} - {self.cast}


def residual_sum(norm: fx.Node) -> ResidualSum | None:
    """Return the sum that a norm normalises, when nothing is broadcast in it and nothing reads it
    before the norm.
    """
    source = arguments(norm)["input"]
    found = (
        ResidualSum(source.all_input_nodes[0], source)
        if is_cast(source)
        else ResidualSum(source, None)
    )
    if not is_op(found.total, torch.ops.aten.add.Tensor) or found.total.kwargs.get("alpha", 1) != 1:
        return None
    if not all(_fits(operand, found.total) for operand in found.total.args):
        return None
    return found if all(norm <= reader for reader in found.readers) else None


def _fits(operand: object, total: fx.Node) -> bool:
    """Whether an operand has the shape of the sum, and its dtype or one of those that kernels add
    in float32.
    """
    value, expected = (
        operand.meta.get("val") if isinstance(operand, fx.Node) else None,
        total.meta.get("val"),
    )
    if value is None or expected is None or value.shape != expected.shape:
        return False
    return value.dtype == expected.dtype or (
        value.dtype in _KERNEL_DTYPES and expected.dtype in _KERNEL_DTYPES
    )


def fuse_residual_norm(
    gm: fx.GraphModule,
    norm: fx.Node,
    found: ResidualSum,
    op: Target,
    operands: Sequence[Argument],
    *rest: Argument,
) -> None:
    """Put `op` in the place of a norm and the sum before it: it takes the operands, the norm's
    weight, its epsilon, the dtype of the cast and the rest, and returns the norm and the sum.
    """
    total, cast = found
    values, dtype = arguments(norm), None if cast is None else cast.meta["val"].dtype
    pair = insert_call(
        gm, norm, op, *operands, values["weight"], values["eps"], dtype, *rest, like=norm
    )
    normed = insert_call(gm, norm, operator.getitem, pair, 0, like=norm)
    both = insert_call(gm, norm, operator.getitem, pair, 1, like=total)
    replace_with(norm, normed)
    if cast is not None:
        both.append(cast)  # for its other readers; without any it is dead
    replace_with(total, both)
