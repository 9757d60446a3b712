"""One kernel for the rotation of queries and keys."""

from __future__ import annotations

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform

_ops = torch.ops.onboard
_HEADS_DIM = 2  # of layout bsnd, where cos and sin [batch, sequence, size] are broadcast


@register_transform("optimize_rope")
class OptimizeRope(BaseTransform[TransformConfig]):
    """Replace half rotations in layout bsnd by the fused kernel, where there is one; the others are a visible fact."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each rotation."""
        assert isinstance(gm, fx.GraphModule)
        if choose_backend("auto", context, self.key) != "triton":
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        rotations = nodes_of(gm, _ops.torch_rope_with_explicit_cos_sin)
        fitting = [node for node in rotations if _fits(node)]
        for node in fitting:
            node.args, node.kwargs = tuple(_tensors(node)), {}
            node.target = fused_op("triton", "rope_cached")
        others = nodes_of(gm, _ops.torch_rope_with_complex_freqs, _ops.torch_rope_with_qk_interleaving)
        if left := [*others, *(node for node in rotations if node not in fitting)]:
            context.facts.append(f"{self.key}: {len(left)} rotations have no fused kernel, for example {left[0]}")
        gm.recompile()
        return gm, TransformInfo(num_matches=len(fitting), is_clean=True, has_valid_shapes=True)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [arguments(node)[name] for name in ("q", "k", "cos", "sin")]


def _fits(node: fx.Node) -> bool:
    dims = [tensor.meta["val"].ndim if "val" in tensor.meta else None for tensor in _tensors(node)]
    return arguments(node)["unsqueeze_dim"] == _HEADS_DIM and dims == [4, 4, 3, 3]
