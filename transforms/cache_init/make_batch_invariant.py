"""Let a sequence's logits be the same, bit for bit, whatever else is in the batch, if the run asks
for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from onboard.errors import OnboardError, UsageError
from onboard.graph.backends import triton_runs_on
from onboard.graph.context import TransformContext
from onboard.graph.fx import op_name
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.ops.library import NOT_OURS, declared, op_sources

_MOVES = {
    "_to_copy", "arange", "cat", "clone", "contiguous", "embedding", "expand", "expand_as", "flatten", "full", "gather",
    "index", "index_select", "lift_fresh_copy", "narrow", "ones", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "sym_size", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze",
    "view", "zeros",
}  # fmt: skip
"""PyTorch's operators that move numbers and compute none; of our own ops it is declared which are
row-wise.
"""


@register_transform("make_batch_invariant")
class MakeBatchInvariant(GraphTransform[TransformConfig]):
    """Replace each operator whose rounding depends on the batch by the form of it that does not
    (`invariant_*`).

    A graph with an operator that has no such form is refused.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each operator replaced."""
        if not context.runtime.batch_invariant:
            return skipped("batch_invariant is off")
        if context.attn_backend != "triton" or not triton_runs_on(context.device):
            raise UsageError(
                f"batch_invariant needs Triton's kernels; this is {context.device} with {context.attn_backend}",
                hint="Leave it out, or run on a GPU with attn_backend triton",
            )
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        forms = {
            source.invariant_form_of: name
            for name, source in op_sources().items()
            if source.invariant_form_of
        }
        matches = sum(_replace(node, forms) for node in calls)
        if others := sorted({str(node.target) for node in calls if not _is_invariant(node)}):
            raise OnboardError(
                f"batch_invariant: the graph has {', '.join(others)}, whose results may depend on the batch",
                hint="Run without batch_invariant",
            )
        gm.recompile()
        return TransformInfo(num_matches=matches, is_clean=True, has_valid_shapes=True)


def _replace(node: fx.Node, forms: Mapping[str, str]) -> bool:
    """Put the invariant form of a node's operator in its place, if there is one."""
    found = declared(node.target) is not NOT_OURS and op_name(node) in forms
    if found:
        node.target = getattr(torch.ops.onboard, forms[op_name(node)]).default
    return found


def _is_invariant(node: fx.Node) -> bool:
    """Whether each of a node's rows is computed in the same way, whatever other rows there are."""
    if not isinstance(node.target, OpOverload):
        # Items of results, and sums of sizes
        return getattr(node.target, "__module__", "") == "_operator"
    own = declared(node.target)
    if own is not NOT_OURS:
        return own.row_wise or bool(own.invariant_form_of)
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _MOVES
