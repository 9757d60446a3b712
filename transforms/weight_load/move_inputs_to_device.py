"""Bring what is not a parameter to the run's device: buffers, and constants that the graph
creates.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.graph.context import TransformContext
from onboard.graph.fx import graph_modules
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.parameters import move_buffers


@register_transform("move_inputs_to_device")
class MoveInputsToDevice(BaseTransform[TransformConfig]):
    """Point `device=` arguments of the graph at the run's device; export wrote down the device that
    it ran on.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each node that named another device."""
        move_buffers(gm, context.device)
        moved = [
            node
            for _, graph in graph_modules(gm)
            for node in _nodes_elsewhere(graph, context.device)
        ]
        for node in moved:
            node.kwargs = {**node.kwargs, "device": context.device}
        return gm, TransformInfo(
            num_matches=len(moved), is_clean=not moved, has_valid_shapes=not moved
        )


def _nodes_elsewhere(gm: GraphModule, wanted: torch.device) -> list[Node]:
    return [
        node for node in gm.graph.nodes if _names_other_device(node.kwargs.get("device"), wanted)
    ]


def _names_other_device(device: object, wanted: torch.device) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device) != wanted
