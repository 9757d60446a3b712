"""Joining linear layers that share an input: one matrix product, then views of its output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, attr_tensor, call, is_op, replace_with
from onboard.graph.weights import further_names, join_parameters, joined_name, tied_names

aten = torch.ops.aten
LINEARS = (aten.linear.default, torch.ops.onboard.torch_linear_simple.default)
_VIEWS = (aten.view, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.slice, aten.narrow)


def fuse_sibling_linears(gm: GraphModule, *, allow_other_users: bool) -> int:
    """Join linears that share an input, the op and the dtype; return how many groups were joined.

    Weights that are tied or used elsewhere stay as they are: joining would double them. With `allow_other_users` the
    input may have users that are not linear; without, one such user keeps all its linears apart.
    """
    private = private_parameters(gm)
    groups = [
        group
        for node in gm.graph.nodes
        if allow_other_users or all(is_op(user, *LINEARS) for user in node.users)
        for group in _siblings(gm, node, private)
        if len(group) > 1
    ]
    for group in groups:
        _fuse(gm, group)
    return len(groups)


def private_parameters(gm: GraphModule) -> set[str]:
    """Return the names of the parameters that are used once in the graph and have no second name."""
    uses = Counter(str(node.target) for node in gm.graph.nodes if node.op == "get_attr" for _ in node.users)
    groups = [names for names in tied_names(gm) if len(names) == 1 and not further_names(gm, names[0])]
    return {names[0] for names in groups if uses[names[0]] == 1}


def erase_unread(nodes: Iterable[Node]) -> None:
    """Erase those nodes, reads of parameters that are gone, that nothing uses any more."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def _siblings(gm: GraphModule, node: Node, private: set[str]) -> Iterator[list[Node]]:
    """Yield the linears that read `node`, in graph order, by what must agree for them to be one."""
    groups: dict[object, list[Node]] = defaultdict(list)
    for user in sorted(node.users):
        if is_op(user, *LINEARS) and arguments(user)["input"] is node and _parameters(user) <= private:
            weight = attr_tensor(gm, arguments(user)["weight"])
            assert weight is not None
            groups[user.target, weight.dtype].append(user)
    yield from groups.values()


def _parameters(linear: Node) -> set[str]:
    """Return the names that weight and bias are read from; for a computed one, a name that no parameter has."""
    tensors = [arguments(linear)["weight"], arguments(linear)["bias"]]
    return {str(node.target) if node.op == "get_attr" else f"%{node.name}" for node in tensors if node is not None}


def _fuse(gm: GraphModule, linears: Sequence[Node]) -> None:
    """Replace linears that share an input by one; its output is cut back into views."""
    weights = [str(arguments(linear)["weight"].target) for linear in linears]
    biases = [arguments(linear)["bias"] for linear in linears]
    sizes = [gm.get_parameter(weight).shape[0] for weight in weights]
    weight = join_parameters(gm, joined_name(weights), weights)
    bias = None
    if any(node is not None for node in biases):
        parts = [size if node is None else str(node.target) for node, size in zip(biases, sizes, strict=True)]
        bias = join_parameters(gm, weight.removesuffix("weight") + "bias", parts)
    _cut(gm, linears, sizes, [weight, bias])


def _cut(gm: GraphModule, linears: Sequence[Node], sizes: Sequence[int], names: Sequence[str | None]) -> None:
    first = linears[0]
    with gm.graph.inserting_before(first):
        tensors = [name and gm.graph.get_attr(name) for name in names]
    joined = call(gm, first, first.target, arguments(first)["input"], *tensors, like=first)  # type: ignore[arg-type]
    starts = accumulate(sizes, initial=0)
    pieces = [
        call(gm, first, aten.narrow.default, joined, -1, start, size, like=linear)
        for linear, start, size in zip(linears, starts, sizes, strict=False)
    ]
    for linear, piece in zip(linears, pieces, strict=True):
        _let_views_copy(linear)
        read = [node for node in linear.all_input_nodes if node.op == "get_attr"]
        replace_with(linear, piece)
        erase_unread(read)


def _let_views_copy(node: Node) -> None:
    """Turn `view` into `reshape` on everything that will alias a strided piece, which not every view can."""
    pending = [user for user in node.users if is_op(user, *_VIEWS)]
    while pending:
        user = pending.pop()
        if is_op(user, aten.view):
            user.target = aten.reshape.default
        pending.extend(user for user in user.users if is_op(user, *_VIEWS))
