"""Remove slices that keep everything."""

from __future__ import annotations

import sys

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("cleanup_noop_slice")
class CleanupNoopSlice(GraphTransform[TransformConfig]):
    """Replace `x[..., :, ...]` by `x`."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Remove each such slice."""
        noops = [
            node for node in nodes_of(gm, torch.ops.aten.slice.Tensor) if _keeps_everything(node)
        ]
        for node in noops:
            replace_with(node, node.args[0])  # type: ignore[arg-type]
        return len(noops)


def _keeps_everything(node: fx.Node) -> bool:
    slicing = arguments(node)
    if slicing["start"] not in (None, 0) or slicing["step"] != 1:
        return False
    if slicing["end"] in (None, sys.maxsize):
        return True
    size = slicing["self"].meta["val"].shape[slicing["dim"]]
    return isinstance(size, int) and isinstance(slicing["end"], int) and slicing["end"] >= size
