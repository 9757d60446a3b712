"""A residual addition and the RMSNorm after it in one op."""

from __future__ import annotations

import operator
from itertools import product

import torch
from torch import fx, nn

from onboard.graph.backends import fused_op
from onboard.graph.casts import remove_identity_casts
from onboard.graph.context import TransformContext
from onboard.graph.fx import Target, arguments, is_op, nodes_of, replace_with
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.graph.values import insert_call
from onboard.ops import has_triton

_BACKENDS = ("torch", "triton") if has_triton() else ("torch",)


@register_transform("fuse_add_rms_norm")
class FuseAddRMSNorm(BaseTransform[TransformConfig]):
    """Replace `total = x + residual; rmsnorm(total)` by an op that returns both, on the norm's own back end."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each pair; it needs the shapes of what is added."""
        assert isinstance(gm, fx.GraphModule)
        casts = remove_identity_casts(gm)  # between a sum and its norm, or its next use
        matches = 0
        for backend, name in product(_BACKENDS, ("rmsnorm", "wide_rmsnorm")):
            for norm in nodes_of(gm, fused_op(backend, name)):
                if (total := _residual_sum(norm)) is not None:
                    _fuse(gm, norm, total, fused_op(backend, f"fused_add_{name}"))
                    matches += 1
        return gm, TransformInfo(num_matches=matches, is_clean=not (matches or casts), has_valid_shapes=True)


def _residual_sum(norm: fx.Node) -> fx.Node | None:
    """Return the addition that a norm normalises, when its operands are alike and nothing reads it before the norm."""
    total = arguments(norm)["input"]
    if not is_op(total, torch.ops.aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        return None
    alike = all(_like(operand, total) for operand in total.args)
    return total if alike and all(norm <= user for user in total.users) else None


def _like(operand: object, total: fx.Node) -> bool:
    """Whether an operand has the shape and dtype of the sum: no broadcasting, no promotion."""
    value, expected = operand.meta.get("val") if isinstance(operand, fx.Node) else None, total.meta.get("val")
    if value is None or expected is None:
        return False
    return bool(value.dtype == expected.dtype and value.shape == expected.shape)


def _fuse(gm: fx.GraphModule, norm: fx.Node, total: fx.Node, op: Target) -> None:
    values = arguments(norm)
    pair = insert_call(gm, norm, op, *total.args, values["weight"], values["eps"], like=norm)
    normed = insert_call(gm, norm, operator.getitem, pair, 0, like=norm)
    both = insert_call(gm, norm, operator.getitem, pair, 1, like=total)
    replace_with(norm, normed)
    replace_with(total, both)
