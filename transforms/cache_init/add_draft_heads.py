"""Put the checkpoint's own heads for multi-token prediction beside the graph, to draft with."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.draft_heads.add_heads import add_heads
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


@register_transform("add_draft_heads")
class AddDraftHeads(BaseTransform[TransformConfig]):
    """Build a graph for each head, and register its caches; the model's graph stays as it is.

    `detect_head_input_for_capture` has to be enabled, too.
    """

    acts = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each head; raise `UsageError` where there is none that can be run."""
        assert isinstance(gm, fx.GraphModule)
        context.draft_heads = add_heads(gm, context)
        count = len(context.draft_heads)
        return gm, TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)
