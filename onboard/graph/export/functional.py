"""Operators that write to their input, replaced by those that give a new tensor, where nobody can
tell.

Making a graph functional by tracing it once more takes longer than the export; most models only
write to a tensor that they have just made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from onboard.graph.fx import replace_with, writes
from onboard.graph.new_nodes import infer_value


def replace_in_place(gm: fx.GraphModule) -> None:
    """Replace each operator that writes to a tensor of which no other node has a view; leave all
    others.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and writes(node):
            _replace(gm, node)


def _replace(gm: fx.GraphModule, node: fx.Node) -> None:
    target, written = _functional(node.target), node.args[0] if node.args else None
    if target is None or not isinstance(written, fx.Node) or _is_shared(gm, written, node):
        return
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(target, node.args, node.kwargs)
    new.meta.update(node.meta)
    infer_value(new)
    if not _are_alike(new.meta.get("val"), written.meta["val"]):
        gm.graph.erase_node(new)
        return
    for user in [user for user in written.users if user > node]:
        user.replace_input_with(written, new)
    replace_with(node, new)


def _functional(target: Any) -> OpOverload | None:
    """Return the operator that computes what an in-place one writes to its first argument, and
    gives back.
    """
    schema = target._schema
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    ]
    if written != [True, *[False] * (len(written) - 1)] or len(schema.returns) != 1:
        return None
    packet = getattr(
        getattr(torch.ops, target.namespace), target.overloadpacket.__name__.removesuffix("_"), None
    )
    name = target._overloadname
    if packet is None or packet is target.overloadpacket or name not in packet.overloads():
        return None
    found: OpOverload = getattr(packet, name)
    return found


def _is_shared(gm: fx.GraphModule, written: fx.Node, node: fx.Node) -> bool:
    """Whether the tensor that `node` writes to may be an input or a result, or one before it a view
    of it.
    """
    value = written.meta.get("val")
    users = {*written.users, *node.users}
    if (
        not _is_new(written)
        or not isinstance(value, torch.Tensor)
        or any(user.op == "output" for user in users)
    ):
        return True
    views = any(user < node and not _is_new(user) for user in written.users)
    own = {written, _maker(written)}
    return views or any(each not in own and _shares(each, value) for each in _before(gm, node))


def _before(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    for each in gm.graph.nodes:
        if each is node:
            return
        yield each


def _is_new(node: fx.Node) -> bool:
    """Whether a node makes what it gives: it is no input, and its operator has no views.

    Operators that are made of others may give their input back without saying so, as dropout does.
    """
    node = _maker(node)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    name = node.target.name()  # type: ignore[no-untyped-call]
    is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )
    return not is_made_of_others and all(
        result.alias_info is None for result in node.target._schema.returns
    )


def _maker(node: fx.Node) -> fx.Node:
    """Return the node whose operator gives several tensors, as top-k does, for one that takes one
    of them; the node itself otherwise.
    """
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node):
        return node
    alone = all(user.target is operator.getitem for user in source.users)
    return source if alone else node


def _shares(node: fx.Node, value: torch.Tensor) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    storage = value.untyped_storage()._cdata
    return any(
        isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata == storage
        for leaf in leaves
    )


def _are_alike(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and strides."""
    if not isinstance(one, torch.Tensor) or one.dtype != other.dtype:
        return False
    return bool(one.shape == other.shape and one.stride() == other.stride())
