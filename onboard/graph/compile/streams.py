"""Parts of a graph that run on an auxiliary CUDA stream, beside the rest.

A branch lies between `begin_aux` and `end_aux`; the main stream goes on and meets it in `wait_aux`. All three are plain
functions in the graph, whose order is the order of its nodes. Fork and join are events, which is all that the capture
of a CUDA graph needs to see the branch, too.

Memory: each stream has its own in PyTorch's caching allocator, and what a stream frees is used again in the order of
that stream's work. So a branch's inputs, which are the main stream's, are kept (as arguments of `wait_aux`) until the
branch has been waited for; and its results may be read by the main stream until the next fork, at which the auxiliary
stream waits for all of the main stream's work before it allocates anything.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from onboard.graph.fx import arguments, call, is_op, nodes_of, op_name, writes
from onboard.ops.library import declared


@dataclass(frozen=True)
class Fork:
    """An open branch: the stream that goes on beside it, and its own."""

    main: torch.cuda.Stream
    aux: torch.cuda.Stream


@cache
def _aux_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def begin_aux(beside: Tensor) -> Fork | None:
    """Let what follows run on the auxiliary stream of the tensor's device; None where there are no streams."""
    if not beside.is_cuda or isinstance(beside, FakeTensor):
        return None
    fork = Fork(torch.cuda.current_stream(beside.device), _aux_stream(beside.device))
    if fork.main != fork.aux:
        fork.aux.wait_stream(fork.main)
        torch.cuda.set_stream(fork.aux)
    return fork


def end_aux(fork: Fork | None, *results: Tensor) -> tuple[torch.cuda.Event | None, tuple[Tensor, ...]]:
    """Close a branch: what follows runs on the main stream again, beside it."""
    if fork is None:
        return None, results
    event = fork.aux.record_event()
    torch.cuda.set_stream(fork.main)
    return event, results


def wait_aux(ended: tuple[torch.cuda.Event | None, tuple[Tensor, ...]], *kept: Tensor) -> tuple[Tensor, ...]:
    """Wait for a branch and return its results; `kept` are its inputs, whose memory is not free before."""
    event, results = ended
    if event is not None:
        torch.cuda.current_stream(results[0].device).wait_event(event)
    return results


def run_aside(gm: fx.GraphModule, branch: Collection[fx.Node]) -> bool:
    """Let the calls in `branch` run on the auxiliary stream, from when their inputs are there to their first reader.

    Returns False, and changes nothing, when the branch writes to its inputs, reads nothing or is read by nothing.
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


def in_one_stream(gm: fx.GraphModule) -> int:
    """Take all branches back into the main stream; return how many there were."""
    joins = nodes_of(gm, wait_aux)
    for join in joins:
        end = join.args[0]
        assert isinstance(end, fx.Node)
        for item in list(join.users):
            result = end.args[1 + int(item.args[1])]  # type: ignore[arg-type]
            assert isinstance(result, fx.Node)
            item.replace_all_uses_with(result)
            gm.graph.erase_node(item)
        for marker in (join, end, end.args[0]):
            assert isinstance(marker, fx.Node)
            gm.graph.erase_node(marker)
    if joins:
        gm.recompile()
    return len(joins)


def own_part(roots: Iterable[fx.Node], others: Iterable[fx.Node], fork: fx.Node) -> set[fx.Node]:
    """Return the calls after `fork` that `roots` need and `others` do not, up to where both come together."""
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

    A rotation of queries and keys in one call stands for two: each of its results comes from its own input.
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
    """Return the nodes that a node is computed from; of a rotated query or key, the one that was rotated."""
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
    """Tell whether a node's operator makes numbers of its own: neither a view nor a part of another result."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def bring_forward(nodes: Collection[fx.Node]) -> None:
    """Move nodes to right behind what they read."""
    for node in sorted(nodes):
        max(node.all_input_nodes).append(node)


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) if value is not None else not op_name(node).startswith("sym_")
