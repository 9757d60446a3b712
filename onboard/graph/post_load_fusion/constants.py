"""Values that depend on parameters alone are computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from onboard.graph.fx import ancestors, attribute, replace_with
from onboard.graph.new_nodes import read_parameter
from onboard.graph.saved_graph import CannotSaveError, decoded_graph, encoded_node
from onboard.graph.weight_load.parameters import (
    Folded,
    delete_parameter,
    is_as_loaded,
    mark_loaded,
    set_parameter,
    weight_plan,
)


def fold_constant(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Replace a call that reads nothing but loaded parameters by a parameter with its value; return
    whether it did.
    """
    sources = sorted(ancestors([node]))
    if node.op != "call_function" or any(
        source.op not in ("get_attr", "call_function") for source in sources
    ):
        return False
    value = evaluate(gm, sources)[node]
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    name = f"folded.value_{node.name}"
    parameter = nn.Parameter(value, requires_grad=False)
    if _note_fold(gm, name, sources):
        mark_loaded(parameter)
    set_parameter(gm, name, parameter)
    replace_with(node, read_parameter(gm, node, name))
    return True


def _note_fold(gm: fx.GraphModule, name: str, nodes: list[fx.Node]) -> bool:
    """Put into the plan how a parameter is computed; False when that cannot be said, or not from
    the checkpoint.
    """
    read = {
        str(node.target): attribute(gm, str(node.target)) for node in nodes if node.op == "get_attr"
    }
    known = weight_plan(gm).folds.keys()
    if known & read.keys() or not all(
        isinstance(each, nn.Parameter) and is_as_loaded(each) for each in read.values()
    ):
        return False
    try:
        calls = [encoded_node(gm, node) for node in nodes]
    except CannotSaveError:
        return False
    described = {source: (list(each.shape), each.dtype) for source, each in read.items()}
    weight_plan(gm).folds[name] = Folded(described, calls)
    return True


def fold_again(gm: nn.Module) -> None:
    """Compute the folded parameters of a graph that was saved with them, from their sources, which
    are let go.
    """
    plan = weight_plan(gm)
    if not plan.folds:
        return
    assert isinstance(gm, fx.GraphModule)
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    for name, fold in plan.folds.items():
        nodes = list(decoded_graph(fold.calls).nodes)
        value = evaluate(gm, nodes)[nodes[-1]]
        parameter = nn.Parameter(value, requires_grad=False)
        mark_loaded(parameter)
        set_parameter(gm, name, parameter)
    for source in dict.fromkeys(source for fold in plan.folds.values() for source in fold.sources):
        if source not in read:
            delete_parameter(gm, source)


def fold_constants(gm: fx.GraphModule) -> int:
    """Compute once what is computed from parameters alone and has no more numbers than these;
    return how many were.
    """
    constant: dict[fx.Node, bool] = {}
    for node in gm.graph.nodes:
        constant[node] = node.op == "get_attr" or _is_constant(node, constant)
    last = [node for node in constant if _is_worth_folding(gm, node, constant)]
    return sum(fold_constant(gm, node) for node in last)


def _is_constant(node: fx.Node, constant: dict[fx.Node, bool]) -> bool:
    """Whether a call without side effects reads constants, and at least one."""
    sources = node.all_input_nodes
    pure = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
    return (
        node.op == "call_function"
        and pure
        and bool(sources)
        and all(constant[source] for source in sources)
    )


def _is_worth_folding(gm: fx.GraphModule, node: fx.Node, constant: dict[fx.Node, bool]) -> bool:
    """Whether a constant call is the last of its kind, is no view of a parameter, and grows
    nothing.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not constant[node] or not isinstance(value, torch.Tensor):
        return False
    if all(constant[user] for user in node.users):
        return False
    sources = sorted(ancestors([node]))
    read = [attribute(gm, str(source.target)) for source in sources if source.op == "get_attr"]
    if any(tensor.is_meta for tensor in read) or value.numel() > max(
        tensor.numel() for tensor in read
    ):
        return False
    storages = {tensor.untyped_storage().data_ptr() for tensor in read}
    return evaluate(gm, sources)[node].untyped_storage().data_ptr() not in storages


@torch.no_grad()
def evaluate(gm: fx.GraphModule, nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Run nodes that read nothing but each other and what `gm` holds, and are in graph order;
    return their values.
    """
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        is_read = node.op == "get_attr"
        values[node] = attribute(gm, str(node.target)) if is_read else node.target(*args, **kwargs)  # type: ignore[operator]
    return values
