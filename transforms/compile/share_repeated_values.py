"""Compute once what several layers compute alike: tables of a rotation, put side by side."""

from __future__ import annotations

from torch import fx

from onboard.graph.compile.shared_values import share_values
from onboard.graph.context import TransformContext
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


@register_transform("share_repeated_values")
class ShareRepeatedValues(GraphTransform[TransformConfig]):
    """Let operators that are given the same give one result, which all read."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each value that is no longer computed."""
        return share_values(gm)
