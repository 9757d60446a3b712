"""Let the graph run for every batch and sequence size, 1 included."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_CHECKS = (
    torch.ops.aten._assert_scalar,
    torch.ops.aten._assert_async,
    torch.ops.aten._assert_tensor_metadata,
    torch.ops.aten.sym_constrain_range,
    torch.ops.aten.sym_constrain_range_for_size,
    torch._check,
)


@register_transform("cleanup_input_constraints")
class CleanupInputConstraints(GraphTransform[TransformConfig]):
    """Remove what torch.export put in to check sizes, dtypes and devices at run time.

    Those checks pin what the example inputs happened to be (a size of at least 2, a device); the
    graph itself holds for more.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Erase every check node."""
        checks = [node for node in nodes_of(gm, *_CHECKS) if not node.users]
        for node in checks:
            gm.graph.erase_node(node)
        return len(checks)
