"""Puts the layers and experts that were not exported into a graph, after the pattern of those that
were.

A layer's part of the graph is told by its nodes' module paths. Three layers of each kind were
exported; the second and the third must be the same but for their names, and each read its
predecessor's one result where the other does. Every further layer of the kind is then a copy of the
third that reads its own weights and its own predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onboard.graph.export.few_rows import check_stacks
from onboard.graph.export.layer_kinds import PATTERNS, ExpertList, Repeated, Stack
from onboard.graph.fx import attribute

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class StampError(Exception):
    """The exported layers do not say what the others are like; the message says why."""


@dataclass
class Region:
    """One exported layer: its nodes, the value that it takes from the layer before it, and the one
    it hands on.
    """

    index: int
    nodes: list[fx.Node] = field(default_factory=list)
    link: fx.Node | None = None
    result: fx.Node | None = None


def stamp(gm: fx.GraphModule, repeated: Repeated) -> None:
    """Complete the graph of a model of which only `repeated.kept()` was exported.

    Raises `StampError`: the graph is of no use then, and the model has to be exported in full.
    """
    if repeated.stack:
        stamp_layers(gm, repeated.stack)
    stamp_experts(gm, repeated.experts, repeated.exported_experts)


def check_repeated(gm: fx.GraphModule, repeated: Repeated) -> None:
    """Raise `StampError` where `stamp` would; the graph stays as it is, that of a shorter model."""
    if repeated.stack:
        _patterns(gm, repeated.stack)
    check_stacks(gm, repeated.stacks)
    exported = repeated.exported_experts
    stamp_experts(gm, [replace(item, experts=exported) for item in repeated.experts], exported)


def stamp_layers(gm: fx.GraphModule, stack: Stack) -> None:
    """Add every layer of `stack` to a graph that has only those in `stack.exported`.

    The new layers' weights are read by their names, which the module need not have yet. Raises
    `StampError`, before it changes anything, when the layers are no chain of equal links.
    """
    regions, patterns = _patterns(gm, stack)
    bounds = [*(region.index for region in regions[1:]), len(stack.kinds)]
    for region, following, bound in zip(regions, [*regions[1:], None], bounds, strict=True):
        _fill(
            gm.graph,
            stack,
            region,
            following,
            [patterns[stack.kinds[i]] for i in range(region.index + 1, bound)],
        )


def _patterns(gm: fx.GraphModule, stack: Stack) -> tuple[list[Region], dict[int, Region]]:
    """Return the exported layers, and the last one of each kind, after which further ones are
    stamped.
    """
    regions = _linked(_regions(gm.graph, stack))
    patterns = {stack.kinds[region.index]: region for region in regions}
    for kind, pattern in patterns.items():
        same = [region for region in regions if stack.kinds[region.index] == kind]
        if len(same) == PATTERNS and _form(gm, stack, same[-2]) != _form(gm, stack, pattern):
            raise StampError(
                f"layers {same[-2].index} and {pattern.index} are of one kind and run differently"
            )
    return regions, patterns


def _regions(graph: fx.Graph, stack: Stack) -> list[Region]:
    regions: list[Region] = []
    for node in filter(_is_tensor_op, graph.nodes):
        index = layer_of(node, stack)
        if index is not None and (not regions or regions[-1].index != index):
            regions.append(Region(index))
        if index is not None:
            regions[-1].nodes.append(node)
    if [region.index for region in regions] != list(stack.exported):
        raise StampError("its layers do not run one after another, each once")
    return regions


def _is_tensor_op(node: fx.Node) -> bool:
    """Whether a node works on tensors, or ends the graph; sizes are the same wherever they are
    computed.
    """
    value = node.meta.get("val")
    if isinstance(value, _SIZES) and free_unbacked_symbols(value):
        raise StampError(f"{node.name} is a size that depends on data")
    return node.op in {"call_function", "output"} and not isinstance(value, _SIZES)


def layer_of(node: fx.Node, stack: Stack) -> int | None:
    """Return the layer whose part of the graph a node is, None outside of all of them."""
    paths = (path for path, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next((index for path in paths if (index := stack.index(path)) is not None), None)


def _linked(regions: list[Region]) -> list[Region]:
    """Find what each layer hands on; only the next one may read it."""
    for region, following in zip(regions, [*regions[1:], None], strict=True):
        members = set(region.nodes)
        readers = {node: set(filter(_is_tensor_op, node.users)) - members for node in region.nodes}
        results = [node for node in region.nodes if readers[node]]
        if len(results) != 1:
            raise StampError(f"layer {region.index} hands on {len(results)} values instead of one")
        region.result = results[0]
        if following is not None:
            following.link = region.result
            if not readers[region.result] <= set(following.nodes):
                raise StampError(
                    f"more than the next layer reads the result of layer {region.index}"
                )
    return regions


def _form(gm: fx.GraphModule, stack: Stack, region: Region) -> list[Any]:
    """Return what a layer computes, in terms that are equal for layers which differ in their
    weights' names alone.
    """
    places = {node: position for position, node in enumerate(region.nodes)}
    prefix = stack.layer(region.index) + "."

    def term(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in places:
            return ("node", places[value])
        if value is region.link:
            return ("link",)
        if isinstance(size := value.meta.get("val"), _SIZES):
            return ("size", str(size))
        if value.op == "get_attr":
            target = str(value.target)
            return (
                ("weight", target[len(prefix) :])
                if target.startswith(prefix)
                else _constant(gm, target)
            )
        return ("outside", value.name)

    forms = [(node.target, fx.map_arg((node.args, node.kwargs), term)) for node in region.nodes]
    assert region.result is not None
    return [*forms, places[region.result]]


def _constant(gm: fx.GraphModule, target: str) -> Any:
    """Return a constant made in `forward` by its value, any other tensor by its name."""
    tensor = attribute(gm, target)
    if "constant" in target and isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor:
        return ("constant", tensor.dtype, tensor.tolist())
    return ("outside", target)


def _fill(
    graph: fx.Graph,
    stack: Stack,
    region: Region,
    following: Region | None,
    patterns: Sequence[Region],
) -> None:
    """Stamp the layers between an exported one and the next exported one, which then reads the last
    of them.
    """
    assert region.result is not None
    old = result = region.result
    members = set(region.nodes)
    readers = [user for user in old.users if user not in members]
    place = region.nodes[-1].next
    for index, pattern in enumerate(patterns, start=region.index + 1):
        with graph.inserting_before(place):
            result = _stamp(graph, stack, pattern, index, result)
    for reader in readers:
        reader.replace_input_with(old, result)
    if following is not None:
        following.link = result


def _stamp(graph: fx.Graph, stack: Stack, pattern: Region, index: int, link: fx.Node) -> fx.Node:
    """Copy a layer for layer `index`, which follows on the value `link`; return the copy's
    result.
    """
    assert pattern.link is not None
    assert pattern.result is not None
    copies: dict[fx.Node, fx.Node] = {pattern.link: link}
    old, new = stack.layer(pattern.index), stack.layer(index)
    for node in pattern.nodes:
        for source in node.all_input_nodes:
            if (
                source.op == "get_attr"
                and source not in copies
                and str(source.target).startswith(old + ".")
            ):
                copies[source] = graph.create_node("get_attr", new + str(source.target)[len(old) :])
                copies[source].meta.update(source.meta)
        copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
        copies[node].meta["nn_module_stack"] = _moved(node.meta["nn_module_stack"], old, new)
    return copies[pattern.result]


def _moved(modules: dict[str, tuple[str, Any]], old: str, new: str) -> dict[str, tuple[str, Any]]:
    """Return a node's module stack with the path of one layer for another's."""
    inside = {key: f"{path}.".startswith(old + ".") for key, (path, _) in modules.items()}
    return {
        key.replace(old, new) if inside[key] else key: (
            new + path[len(old) :] if inside[key] else path,
            cls,
        )
        for key, (path, cls) in modules.items()
    }


def stamp_experts(gm: fx.GraphModule, experts: Sequence[ExpertList], exported: int) -> None:
    """Lengthen the lists of expert weights in a graph from the first `exported` experts of each
    list to all of them.

    Raises `StampError` when an expert's weight is read in any other way than at its place in such a
    list.
    """
    lengths = {item.name: item.experts for item in experts}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not any(
            _owner(source, lengths) for source in node.all_input_nodes
        ):
            continue
        with gm.graph.inserting_before(node):
            node.args = tuple(
                _lengthened(gm.graph, value, lengths, exported) for value in node.args
            )
            node.kwargs = {
                key: _lengthened(gm.graph, value, lengths, exported)
                for key, value in node.kwargs.items()
            }
        if any(_owner(source, lengths) for source in _single(node)):
            raise StampError(f"{node.name} reads one expert's weight")


def _owner(node: fx.Node, lengths: Mapping[str, int]) -> str | None:
    """Return the list of experts whose weight a node reads."""
    if node.op != "get_attr":
        return None
    path = str(node.target)
    while path:
        path = path.rpartition(".")[0]
        if path in lengths:
            return path
    return None


def _single(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a call takes one by one, not in a list."""
    return [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]


def _lengthened(graph: fx.Graph, value: Any, lengths: Mapping[str, int], exported: int) -> Any:
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], fx.Node):
        return value
    owner = _owner(value[0], lengths)
    if owner is None:
        return value
    tail = str(value[0].target).removeprefix(f"{owner}.0.")
    if [getattr(node, "target", None) for node in value] != [
        f"{owner}.{index}.{tail}" for index in range(exported)
    ]:
        raise StampError(f"a list with weights of {owner} is not in the order of the experts")
    more = [
        graph.create_node("get_attr", f"{owner}.{index}.{tail}")
        for index in range(exported, lengths[owner])
    ]
    for node in more:
        node.meta.update(value[0].meta)
    return [*value, *more]
