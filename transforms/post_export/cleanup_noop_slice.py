"""Remove slices that keep everything."""

from __future__ import annotations

import sys

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("cleanup_noop_slice")
class CleanupNoopSlice(BaseTransform[TransformConfig]):
    """Replace `x[..., :, ...]` by `x`."""

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Remove each such slice."""
        assert isinstance(gm, fx.GraphModule)
        noops = [node for node in nodes_of(gm, torch.ops.aten.slice.Tensor) if _keeps_everything(node)]
        for node in noops:
            replace_with(node, node.args[0])  # type: ignore[arg-type]
        return gm, TransformInfo(num_matches=len(noops), is_clean=not noops, has_valid_shapes=True)


def _keeps_everything(node: fx.Node) -> bool:
    slicing = arguments(node)
    if slicing["start"] not in (None, 0) or slicing["step"] != 1:
        return False
    if slicing["end"] in (None, sys.maxsize):
        return True
    size = slicing["self"].meta["val"].shape[slicing["dim"]]
    return isinstance(size, int) and isinstance(slicing["end"], int) and slicing["end"] >= size
