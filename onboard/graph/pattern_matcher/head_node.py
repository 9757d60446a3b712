"""The language-model head in a graph: the linear layer that the logits come from."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, is_op
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


def head_node(gm: fx.GraphModule) -> object:
    """Return where a search for the head ends: the last linear layer, or something else.

    What follows the head (a scale, a soft cap, a cast, a cut of the vocabulary) has to work row by
    row.
    """
    node: object = gm.graph.output_node().args[0]
    while isinstance(node, fx.Node) and (is_op(node, *_POINTWISE) or _cuts_vocabulary(node)):
        rows = [
            each for each in node.all_input_nodes if getattr(each.meta.get("val"), "ndim", 3) == 3
        ]
        if len(rows) != 1:
            return node
        node = rows[0]
    return node


def is_head(node: object) -> bool:
    """Tell whether a search has found a linear layer."""
    return is_op(node, *LINEARS)


def _cuts_vocabulary(node: fx.Node) -> bool:
    return is_op(node, aten.slice, aten.narrow) and arguments(node)["dim"] in _LAST_DIM
