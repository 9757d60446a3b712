"""Which parts of a graph could run on an auxiliary CUDA stream, and how they are put there."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from torch import Tensor, fx

from onboard.graph.compile.streams import begin_aux, end_aux, wait_aux
from onboard.graph.fx import arguments, call, is_op, op_name, writes
from onboard.ops.library import declared


def run_aside(gm: fx.GraphModule, branch: Collection[fx.Node]) -> bool:
    """Let the calls in `branch` run on the auxiliary stream, from when their inputs are there to
    their first reader.

    Returns False, and changes nothing, when the branch writes to its inputs, reads nothing or is
    read by nothing.
    """
    members = set(branch)
    nodes = sorted(members)
    inputs = sorted({source for node in nodes for source in node.all_input_nodes} - members)
    givers = [node for node in inputs if node.op != "get_attr"]
    results = [node for node in nodes if set(node.users) - members]
    if not givers or not results or any(writes(node) for node in nodes):
        return False
    readers = {user for node in results for user in node.users} - members
    last, first = givers[-1], min(readers)
    if not last < first:
        return False
    tensors = [node for node in givers if _is_tensor(node)]
    begin = call(gm, last.next, begin_aux, tensors[0], like=nodes[0])
    for weight in (node for node in inputs if node.op == "get_attr"):
        begin.prepend(weight)
    place = begin
    for node in nodes:
        place.append(node)
        place = node
    end = call(gm, place.next, end_aux, begin, *results, like=nodes[-1])
    joined = call(gm, first, wait_aux, end, *tensors, like=nodes[-1])
    for index, result in enumerate(results):
        new = call(gm, first, operator.getitem, joined, index, like=result)
        if "val" in result.meta:
            new.meta["val"] = result.meta["val"]
        result.replace_all_uses_with(new, delete_user_cb=lambda user: user in readers)
    return True


def own_part(roots: Iterable[fx.Node], others: Iterable[fx.Node], fork: fx.Node) -> set[fx.Node]:
    """Return the calls after `fork` that `roots` need and `others` do not, up to where both come
    together.
    """
    members = cone(roots, fork) - cone(others, fork)
    inside: set[fx.Node] = set()
    after: set[fx.Node] = set()
    node = min(members, default=fork)
    while members - inside - after:
        sources = set(node.all_input_nodes)
        if sources & after or (node not in members and sources & inside):
            after.add(node)
        elif node in members:
            inside.add(node)
        node = node.next
    return inside


def cone(roots: Iterable[fx.Node], fork: fx.Node) -> set[fx.Node]:
    """Return the calls after `fork` that `roots` are computed from, themselves included.

    A rotation of queries and keys in one call stands for two: each of its results comes from its
        own input.
    """
    seen: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in seen and node.op == "call_function" and fork < node:
            seen.add(node)
            pending.extend(sources(node))
    return seen


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node is computed from; of a rotated query or key, the one that was
    rotated.
    """
    rotation = node.args[0] if is_op(node, operator.getitem) else None
    if not isinstance(rotation, fx.Node) or not declared(rotation.target).rotary:
        return node.all_input_nodes
    rotated = list(arguments(rotation).values())[:2]
    own = rotated[int(node.args[1])]  # type: ignore[arg-type]
    return [own, *(source for source in rotation.all_input_nodes if source not in rotated)]


_PRODUCTS = ("linear", "mlp", "gemm", "gemv", "scaled_mm", "addmm")
_PLAIN_PRODUCTS = ("mm", "bmm", "matmul")


def is_product(node: fx.Node) -> bool:
    """Tell whether a node is a matrix product, alone or as a part of what it computes."""
    name = op_name(node)
    return name in _PLAIN_PRODUCTS or any(part in name for part in _PRODUCTS)


def computes(node: fx.Node) -> bool:
    """Tell whether a node's operator makes numbers of its own: neither a view nor a part of another
    result.
    """
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def bring_forward(nodes: Collection[fx.Node]) -> None:
    """Move nodes to right behind what they read."""
    for node in sorted(nodes):
        max(node.all_input_nodes).append(node)


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) if value is not None else not op_name(node).startswith("sym_")
