"""Values that depend on parameters alone are computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from onboard.graph.fx import ancestors, attribute, replace_with
from onboard.graph.saved_graph import CannotSaveError, decoded_graph, encoded_node
from onboard.graph.values import read_parameter
from onboard.graph.weights import Folded, delete_parameter, is_as_loaded, mark_loaded, set_parameter, weight_plan


def fold_constant(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Replace a call that reads nothing but loaded parameters by a parameter with its value; return whether it did."""
    sources = sorted(ancestors([node]))
    if node.op != "call_function" or any(source.op not in ("get_attr", "call_function") for source in sources):
        return False
    value = _evaluate(gm, sources)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    name = f"folded.{node.name}"
    parameter = nn.Parameter(value, requires_grad=False)
    if _note_fold(gm, name, sources):
        mark_loaded(parameter)
    set_parameter(gm, name, parameter)
    replace_with(node, read_parameter(gm, node, name))
    return True


def _note_fold(gm: fx.GraphModule, name: str, nodes: list[fx.Node]) -> bool:
    """Put into the plan how a parameter is computed; False when that cannot be said, or not from the checkpoint."""
    read = {str(node.target): attribute(gm, str(node.target)) for node in nodes if node.op == "get_attr"}
    if not all(isinstance(each, nn.Parameter) and is_as_loaded(each) for each in read.values()):
        return False
    try:
        calls = [encoded_node(gm, node) for node in nodes]
    except CannotSaveError:
        return False
    described = {source: (list(each.shape), each.dtype) for source, each in read.items()}
    weight_plan(gm).folds[name] = Folded(described, calls)
    return True


def fold_again(gm: nn.Module) -> None:
    """Compute the folded parameters of a graph that was saved with them, from their sources, which are let go."""
    plan = weight_plan(gm)
    if not plan.folds:
        return
    assert isinstance(gm, fx.GraphModule)
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    for name, fold in plan.folds.items():
        value = _evaluate(gm, list(decoded_graph(fold.calls).nodes))
        parameter = nn.Parameter(value, requires_grad=False)
        mark_loaded(parameter)
        set_parameter(gm, name, parameter)
    for source in dict.fromkeys(source for fold in plan.folds.values() for source in fold.sources):
        if source not in read:
            delete_parameter(gm, source)


@torch.no_grad()
def _evaluate(gm: fx.GraphModule, nodes: list[fx.Node]) -> Any:
    """Run nodes that are in graph order and return the last one's value."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        is_read = node.op == "get_attr"
        values[node] = attribute(gm, str(node.target)) if is_read else node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]]
