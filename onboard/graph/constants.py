"""Values that depend on parameters alone are computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from onboard.graph.fx import ancestors, attribute, replace_with
from onboard.graph.values import read_parameter
from onboard.graph.weights import set_parameter


def fold_constant(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Replace a call that reads nothing but loaded parameters by a parameter with its value; return whether it did."""
    sources = sorted(ancestors([node]))
    if node.op != "call_function" or any(source.op not in ("get_attr", "call_function") for source in sources):
        return False
    value = evaluate(gm, sources)[node]
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    name = f"folded.{node.name}"
    set_parameter(gm, name, nn.Parameter(value, requires_grad=False))
    replace_with(node, read_parameter(gm, node, name))
    return True


@torch.no_grad()
def evaluate(gm: fx.GraphModule, nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Run nodes that read nothing but each other and what `gm` holds, and are in graph order; return their values."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        is_read = node.op == "get_attr"
        values[node] = attribute(gm, str(node.target)) if is_read else node.target(*args, **kwargs)  # type: ignore[operator]
    return values
