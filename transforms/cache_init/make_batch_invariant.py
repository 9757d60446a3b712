"""Let a sequence's logits be the same, bit for bit, whatever else is in the batch, if the run asks for it."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch._ops import OpOverload

from onboard.errors import OnboardError, UsageError
from onboard.graph.backends import triton_runs_on
from onboard.graph.context import TransformContext
from onboard.graph.fx import op_name
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform
from onboard.ops.library import op_sources

_ROW_BY_ROW = {
    "_to_copy", "arange", "cat", "clone", "contiguous", "embedding", "expand", "expand_as", "flatten", "full", "gather",
    "index", "index_select", "lift_fresh_copy", "narrow", "ones", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "sym_size", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze",
    "view", "zeros",
    "gather_logits_before_lm_head", "torch_cached_residual_add", "torch_rope_cached", "torch_rope_with_complex_freqs",
    "torch_rope_with_explicit_cos_sin", "torch_rope_with_qk_interleaving", "triton_fused_add_rmsnorm",
    "triton_fused_add_wide_rmsnorm", "triton_l2norm", "triton_moe_router", "triton_norm_rope", "triton_rmsnorm",
    "triton_rope_cached", "triton_rope_deinterleaved", "triton_rope_pairs", "triton_silu_and_mul",
    "triton_wide_rmsnorm",
}  # fmt: skip
"""Operators that move numbers, or compute a token's from its own alone and in the same way for any number of tokens."""


@register_transform("make_batch_invariant")
class MakeBatchInvariant(BaseTransform[TransformConfig]):
    """Replace each operator whose rounding depends on the batch by the form of it that does not (`invariant_*`).

    A graph with an operator that has no such form is refused.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each operator replaced."""
        assert isinstance(gm, fx.GraphModule)
        if not context.runtime.batch_invariant:
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        if context.attn_backend != "triton" or not triton_runs_on(context.device):
            raise UsageError(
                f"batch_invariant needs Triton's kernels; this is {context.device} with {context.attn_backend}",
                hint="Leave it out, or run on a GPU with attn_backend triton",
            )
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        matches = sum(map(_replace, calls))
        if others := sorted({str(node.target) for node in calls if not _is_invariant(node)}):
            raise OnboardError(
                f"batch_invariant: the graph has {', '.join(others)}, whose results may depend on the batch",
                hint="Run without batch_invariant",
            )
        gm.recompile()
        return gm, TransformInfo(num_matches=matches, is_clean=True, has_valid_shapes=True)


def _replace(node: fx.Node) -> bool:
    """Put the invariant form of a node's operator in its place, if there is one."""
    name = op_name(node).replace("triton_", "invariant_")
    found = name.startswith("invariant_") and name in op_sources()
    if found:
        node.target = getattr(torch.ops.onboard, name).default
    return found


def _is_invariant(node: fx.Node) -> bool:
    """Whether each of a node's rows is computed in the same way, whatever other rows there are."""
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", "") == "_operator"  # items of results, and sums of sizes
    name = op_name(node)
    pointwise = torch.Tag.pointwise in node.target.tags
    return pointwise or name in _ROW_BY_ROW or name.startswith("invariant_")
