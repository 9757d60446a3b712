"""One kernel for the rotation of queries and keys, and for the norms of their heads before it."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, attr_tensor, is_op, nodes_of, only_user
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
            _use_kernel(node)
        others = nodes_of(gm, _ops.torch_rope_with_complex_freqs, _ops.torch_rope_with_qk_interleaving)
        if left := [*others, *(node for node in rotations if node not in fitting)]:
            context.facts.append(f"{self.key}: {len(left)} rotations have no fused kernel, for example {left[0]}")
        joined = [node for node in fitting if _take_in_norms(gm, node)]
        gm.recompile()
        return gm, TransformInfo(num_matches=len(fitting), is_clean=not joined, has_valid_shapes=True)


def _use_kernel(rotation: fx.Node) -> None:
    rotation.args, rotation.kwargs = tuple(_tensors(rotation)), {}
    rotation.target = fused_op("triton", "rope_cached")


def _take_in_norms(gm: fx.GraphModule, rotation: fx.Node) -> bool:
    """Let a rotation's kernel normalise the heads, too, if norms of one kind feed it and nothing else."""
    q, k, cos, sin = rotation.args
    if not (_is_norm_of_heads(q, gm) and _is_norm_of_heads(k, gm)):
        return False
    of_q, of_k = arguments(q), arguments(k)
    if of_q["eps"] != of_k["eps"]:
        return False
    rotation.args = (of_q["input"], of_k["input"], of_q["weight"], of_k["weight"], of_q["eps"], cos, sin)
    rotation.target = fused_op("triton", "norm_rope")
    return True


def _is_norm_of_heads(node: Any, gm: fx.GraphModule) -> TypeGuard[fx.Node]:
    """Whether it is an RMSNorm that keeps the dtype (the kernel rounds to it) and that only one node reads."""
    if not is_op(node, _ops.torch_rmsnorm, _ops.triton_rmsnorm) or only_user(node) is None:
        return False
    value, weight = arguments(node)["input"].meta.get("val"), attr_tensor(gm, arguments(node)["weight"])
    return value is not None and weight is not None and value.dtype == weight.dtype


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [arguments(node)[name] for name in ("q", "k", "cos", "sin")]


def _fits(node: fx.Node) -> bool:
    dims = [tensor.meta["val"].ndim if "val" in tensor.meta else None for tensor in _tensors(node)]
    return arguments(node)["unsqueeze_dim"] == _HEADS_DIM and dims == [4, 4, 3, 3]
