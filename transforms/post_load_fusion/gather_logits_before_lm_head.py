"""Logits only where they are wanted: the rows are gathered before the language-model head, not
after.
"""

from __future__ import annotations

from itertools import dropwhile

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.context import TransformContext
from onboard.graph.fx import add_placeholder, arguments, is_op
from onboard.graph.new_nodes import infer_value, insert_call
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.graph.weight_load.gemm_fusion import LINEARS

aten = torch.ops.aten
_POINTWISE = (
    aten.mul,
    aten.div,
    aten.add,
    aten.sub,
    aten.neg,
    aten.tanh,
    aten.to,
    aten._to_copy,
    aten.clone,
    aten.alias,
    torch.ops.onboard.all_gather,
)
_LAST_DIM = (2, -1)


@register_transform("gather_logits_before_lm_head")
class GatherLogitsBeforeLmHead(GraphTransform[TransformConfig]):
    """Insert `gather_logits_before_lm_head` before the last linear, and the input
    `logits_gather_indices`.

    What follows the head (a scale, a soft cap, a cast, a cut of the vocabulary) has to work row by
    row.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for the head; without one the fact says where the search ended."""
        head = _before_pointwise(gm.graph.output_node().args[0])
        if not is_op(head, *LINEARS):
            context.facts.append(
                f"{self.key}: the logits come from {head}, not from a linear layer"
            )
            return skipped("the logits come from no linear layer")
        assert isinstance(head, fx.Node)
        indices = add_placeholder(
            gm, "logits_gather_indices", torch.zeros(2, dtype=torch.int64, device=context.device)
        )
        hidden = arguments(head)["input"]
        gather = torch.ops.onboard.gather_logits_before_lm_head.default
        head.replace_input_with(hidden, insert_call(gm, head, gather, hidden, indices, like=head))
        for node in dropwhile(lambda node: node is not head, gm.graph.nodes):
            if node.op == "call_function":
                infer_value(node)
        return 1


def _before_pointwise(node: object) -> object:
    """Follow row-by-row operations back to what they start from."""
    while isinstance(node, fx.Node) and (is_op(node, *_POINTWISE) or _cuts_vocabulary(node)):
        rows = [
            each for each in node.all_input_nodes if getattr(each.meta.get("val"), "ndim", 3) == 3
        ]
        if len(rows) != 1:
            return node
        node = rows[0]
    return node


def _cuts_vocabulary(node: fx.Node) -> bool:
    return is_op(node, aten.slice, aten.narrow) and arguments(node)["dim"] in _LAST_DIM
