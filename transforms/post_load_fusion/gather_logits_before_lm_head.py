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
from onboard.graph.pattern_matcher.head_node import head_node, is_head
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("gather_logits_before_lm_head")
class GatherLogitsBeforeLmHead(GraphTransform[TransformConfig]):
    """Insert `gather_logits_before_lm_head` before the last linear, and the input
    `logits_gather_indices`.

    What follows the head (a scale, a soft cap, a cast, a cut of the vocabulary) has to work row by
    row.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for the head; without one the fact says where the search ended."""
        if is_op(gm.graph.output_node().args[0], torch.ops.onboard.send_to_stage):
            return skipped("the head is another rank's")
        head = head_node(gm)
        if not is_head(head):
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
