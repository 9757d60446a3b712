"""A residual addition and the RMSNorm after it in one op."""

from __future__ import annotations

import operator
from itertools import product
from typing import NamedTuple

import torch
from torch import fx

from onboard.graph.backends import fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import Target, arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.dtype_casts import is_cast, remove_identity_casts
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.ops import has_triton

_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Sum(NamedTuple):
    """An addition that a norm normalises, behind a change of dtype or as it is."""

    total: fx.Node
    cast: fx.Node | None

    @property
    def readers(self) -> set[fx.Node]:
        """The nodes that read the sum in either dtype."""
        return {*self.total.users, *(self.cast.users if self.cast else ())} - {self.cast}


@register_transform("fuse_add_rms_norm")
class FuseAddRMSNorm(GraphTransform[TransformConfig]):
    """Replace `total = x + residual; rmsnorm(total)` by an op that returns both, on the norm's own
    back end.

    The sum may be cast before it is normalised, as in models that keep it in float32.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each pair; it needs the shapes of what is added."""
        casts = remove_identity_casts(gm)  # between a sum and its norm, or its next use
        matches = 0
        for backend, name in product(_BACKENDS, ("rmsnorm", "wide_rmsnorm")):
            for norm in nodes_of(gm, fused_op(backend, name)):
                if (found := _residual_sum(norm)) is not None:
                    _fuse(gm, norm, found, fused_op(backend, f"fused_add_{name}"))
                    matches += 1
        return TransformInfo(
            num_matches=matches, is_clean=not (matches or casts), has_valid_shapes=True
        )


def _residual_sum(norm: fx.Node) -> _Sum | None:
    """Return the sum that a norm normalises, when nothing is broadcast in it and nothing reads it
    before the norm.
    """
    source = arguments(norm)["input"]
    found = _Sum(source.all_input_nodes[0], source) if is_cast(source) else _Sum(source, None)
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


def _fuse(gm: fx.GraphModule, norm: fx.Node, found: _Sum, op: Target) -> None:
    total, cast = found
    values, dtype = arguments(norm), () if cast is None else (cast.meta["val"].dtype,)
    pair = insert_call(
        gm, norm, op, *total.args, values["weight"], values["eps"], *dtype, like=norm
    )
    normed = insert_call(gm, norm, operator.getitem, pair, 0, like=norm)
    both = insert_call(gm, norm, operator.getitem, pair, 1, like=total)
    replace_with(norm, normed)
    if cast is not None:
        both.append(cast)  # for its other readers; without any it is dead
    replace_with(total, both)
