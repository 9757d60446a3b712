"""One kernel for the rotation of queries and keys, and for the norms of their heads before it."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import NO_TRITON, choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.post_load_fusion.rotated_attention import norms_before
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.ops.library import declared

_ops = torch.ops.onboard
_HEADS_DIM = 2  # of layout bsnd, where tables [batch, sequence, size] are broadcast
_HEADS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TABLE_DTYPES = (*_HEADS_DTYPES, torch.complex64)


@register_transform("optimize_rope")
class OptimizeRope(GraphTransform[TransformConfig]):
    """Replace rotations in layout bsnd by the fused kernel; those that it does not fit are a
    visible fact.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each rotation."""
        if choose_backend("auto", context, self.key) != "triton":
            return skipped(NO_TRITON)
        rotations = [node for node in gm.graph.nodes if declared(node.target).fused_form]
        fitting = [node for node in rotations if _fits(node)]
        for node in fitting:
            _use_kernel(node)
        if left := [node for node in rotations if node not in fitting]:
            context.facts.append(
                f"{self.key}: {len(left)} rotations have no fused kernel, for example {left[0]}"
            )
        joined = [
            node
            for node in nodes_of(gm, fused_op("triton", "rope_cached"))
            if _take_in_norms(gm, node)
        ]
        gm.recompile()
        return TransformInfo(num_matches=len(fitting), is_clean=not joined, has_valid_shapes=True)


def _fits(rotation: fx.Node) -> bool:
    """Whether a rotation has layout, shapes and dtypes of the kernel."""
    tensors = _tensors(rotation)
    if arguments(rotation)["unsqueeze_dim"] != _HEADS_DIM or not all(
        "val" in tensor.meta for tensor in tensors
    ):
        return False
    values = [tensor.meta["val"] for tensor in tensors]
    heads, tables = values[:2], values[2:]
    heads_fit = all(value.dim() == 4 and value.dtype in _HEADS_DTYPES for value in heads)
    return heads_fit and all(value.dim() == 3 and value.dtype in _TABLE_DTYPES for value in tables)


def _use_kernel(rotation: fx.Node) -> None:
    tensors, kernel = tuple(_tensors(rotation)), declared(rotation.target).fused_form
    rotation.args, rotation.kwargs = tensors, {}
    rotation.target = fused_op("triton", kernel)


def _tensors(rotation: fx.Node) -> list[fx.Node]:
    """Return queries, keys and tables."""
    return [value for name, value in arguments(rotation).items() if name != "unsqueeze_dim"]


def _take_in_norms(gm: fx.GraphModule, rotation: fx.Node) -> bool:
    """Let the half rotation's kernel normalise the heads, too, if norms of one kind feed it and
    nothing else.
    """
    q, k, cos, sin = rotation.args
    if (norms := norms_before(gm, q, k)) is None:
        return False
    rotation.args = (*norms, cos, sin)
    rotation.target = fused_op("triton", "norm_rope")
    return True
