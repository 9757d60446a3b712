"""Mark what the language-model head reads, to be kept of each token: a head that predicts further
tokens begins with it (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments
from onboard.graph.new_nodes import insert_call
from onboard.graph.pattern_matcher.head_node import head_node, is_head
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("detect_head_input_for_capture")
class DetectHeadInputForCapture(GraphTransform[TransformConfig]):
    """Put a `torch_head_input` before the head, which `insert_cached_head_input` finds."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for the head; raise `UsageError` for logits of another origin."""
        head = head_node(gm)
        if not is_head(head):
            raise UsageError(
                f"{self.key}: the logits come from {head}, not from a linear layer",
                hint="Leave out what reads the head's input (drafts of the checkpoint's own heads)",
            )
        assert isinstance(head, fx.Node)
        hidden = arguments(head)["input"]
        mark = torch.ops.onboard.torch_head_input.default
        head.replace_input_with(hidden, insert_call(gm, head, mark, hidden, like=head))
        return 1
