"""Joining linear layers that share an input: one matrix product, then views of its output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.weight_load.parameters import (
    ParameterNames,
    further_names,
    join_parameters,
    joined_name,
    tied_names,
)
from onboard.ops.library import declared
from onboard.ops.linear.fp8_linear import BLOCK

aten = torch.ops.aten
LINEARS = (aten.linear.default, torch.ops.onboard.torch_linear_simple.default)
_JOINED = ("weight", "weight_scale", "zero", "whole", "offset")
"""Arguments of linears that have their outputs first."""
_VIEWS = (
    aten.view,
    aten.transpose,
    aten.permute,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.narrow,
)


def fuse_sibling_linears(
    gm: GraphModule, *, allow_other_users: bool, forms: Collection[str] = ("",)
) -> int:
    """Join linears that share an input, the op and the dtype; return how many groups were joined.

    Weights that are tied or used elsewhere stay as they are: joining would double them. With
    `allow_other_users` the input may have users that are not linear; without, one such user keeps
    all its linears apart. `forms` says which linears: "" plain ones, or what `OpSource.takes_codes`
    calls those with codes, which are joined where their schemes are one.
    """
    private = private_parameters(gm)
    groups = [
        group
        for node in gm.graph.nodes
        if allow_other_users or all(map(_projects, node.users))
        for group in _siblings(gm, node, private, forms)
        if len(group) > 1
    ]
    for group in groups:
        _fuse(gm, group)
    return len(groups)


def _projects(node: Node) -> bool:
    """Whether a node is a linear layer or a feed-forward block."""
    return is_op(node, *LINEARS) or declared(node.target).feed_forward


def private_parameters(gm: GraphModule) -> set[str]:
    """Return the names of the parameters that are used once in the graph and have no second
    name.
    """
    uses = Counter(
        str(node.target) for node in gm.graph.nodes if node.op == "get_attr" for _ in node.users
    )
    groups = [
        names for names in tied_names(gm) if len(names) == 1 and not further_names(gm, names[0])
    ]
    return {names[0] for names in groups if uses[names[0]] == 1}


def _siblings(
    gm: GraphModule, node: Node, private: set[str], forms: Collection[str]
) -> Iterator[list[Node]]:
    """Yield the linears that read `node`, in graph order, by what must agree for them to be one."""
    groups: dict[object, list[Node]] = defaultdict(list)
    for user in sorted(node.users):
        form = declared(user.target).takes_codes
        if form not in forms or not (form or is_op(user, *LINEARS)):
            continue
        values = arguments(user)
        tensors = [values[name] for name in (*_JOINED, "bias") if name in values]
        if values["input"] is node and _names(tensors) <= private:
            groups[_scheme(gm, user)].append(user)
    yield from groups.values()


def _scheme(gm: GraphModule, linear: Node) -> object:
    """Return what is the same for linears that can be one: op, numbers, dtypes and inner sizes, and
    that an input has no scale that another one's may differ from.
    """
    values = arguments(linear)
    joined = {name: values[name] for name in _JOINED if isinstance(values.get(name), Node)}
    parameters = {name: gm.get_parameter(str(node.target)) for name, node in joined.items()}
    outputs = len(parameters["weight"])
    whole_blocks = all(len(each) == outputs or outputs % BLOCK == 0 for each in parameters.values())
    if values.get("input_scale") is not None or not whole_blocks:
        return linear
    numbers = [value for value in values.values() if isinstance(value, (int, str))]
    kinds = [(name, each.dtype, each.shape[1:]) for name, each in parameters.items()]
    return linear.target, *numbers, *kinds


def _names(nodes: Iterable[Node | None]) -> set[str]:
    """Return the names that tensors are read from; for a computed one, a name that no parameter
    has.
    """
    return {
        str(node.target) if node.op == "get_attr" else f"%{node.name}"
        for node in nodes
        if node is not None
    }


def _fuse(gm: GraphModule, linears: Sequence[Node]) -> None:
    """Replace linears that share an input by one; its output is cut back into views."""
    first = linears[0]
    weights, biases = (
        [arguments(linear)[name] for linear in linears] for name in ("weight", "bias")
    )
    sizes = [gm.get_parameter(str(weight.target)).shape[0] for weight in weights]
    weight, bias = _join(gm, first, weights, biases)
    further = {
        name: [arguments(linear)[name] for linear in linears]
        for name in _JOINED[1:]
        if arguments(first).get(name) is not None
    }
    tensors = {name: _join_further(gm, weight, name, nodes) for name, nodes in further.items()}
    values = arguments(first) | {"weight": weight, "bias": bias} | tensors
    joined = insert_call(gm, first, first.target, *values.values(), like=first)  # type: ignore[arg-type]
    pieces = [
        insert_call(gm, first, aten.narrow.default, joined, -1, start, size, like=linear)
        for linear, start, size in zip(linears, accumulate(sizes, initial=0), sizes, strict=False)
    ]
    for linear, piece in zip(linears, pieces, strict=True):
        _let_views_copy(linear)
        replace_with(linear, piece)
    _erase_unread([*weights, *biases, *chain(*further.values())])


def _join_further(gm: GraphModule, weight: Node, name: str, parts: Sequence[Node]) -> Node:
    """Join what belongs to codes, under the name of their joined weight; return what reads it."""
    whole = f"{weight.target}_{name.removeprefix('weight_')}"
    return read_parameter(
        gm, weight.next, join_parameters(gm, whole, [str(p.target) for p in parts])
    )


def fuse_swiglu_gemms(gm: GraphModule) -> int:
    """Join the gate and up weights of every `torch_swiglu_mlp`; return how many were."""
    private = private_parameters(gm)
    blocks = [
        node
        for node in nodes_of(gm, torch.ops.onboard.torch_swiglu_mlp)
        if _gate_and_up(node) <= private
    ]
    for block in blocks:
        _fuse_swiglu(gm, block)
    return len(blocks)


def _gate_and_up(block: Node) -> set[str]:
    return _names(
        arguments(block)[name] for name in ("gate_weight", "up_weight", "gate_bias", "up_bias")
    )


def _fuse_swiglu(gm: GraphModule, block: Node) -> None:
    values = arguments(block)
    weights = [values["gate_weight"], values["up_weight"]]
    biases = [values["gate_bias"], values["up_bias"]]
    weight, bias = _join(gm, block, weights, biases)
    op = torch.ops.onboard.torch_fused_swiglu_mlp.default
    rest = (values["down_weight"], bias, values["down_bias"], values["activation"])
    replace_with(block, insert_call(gm, block, op, values["input"], weight, *rest, like=block))
    _erase_unread([*weights, *biases])


def write_out(gm: GraphModule, block: Node, gate: OpOverload) -> None:
    """Put two linears, and the op `gate` between them, in the place of a `*_fused_swiglu_mlp`."""
    values, linear = arguments(block), aten.linear.default
    both = (values["gate_up_weight"], values["gate_up_bias"])
    x = insert_call(gm, block, linear, values["input"], *both, like=block)
    x = insert_call(gm, block, gate, x, values["activation"], like=block)
    down = (values["down_weight"], values["down_bias"])
    replace_with(block, insert_call(gm, block, linear, x, *down, like=block))


def _join(
    gm: GraphModule, before: Node, weights: Sequence[Node], biases: Sequence[Node | None]
) -> tuple[Node, Node | None]:
    """Join weights, and biases when there are any (a missing one is zeros); return nodes that read
    the results.
    """
    names = [str(weight.target) for weight in weights]
    sizes = [gm.get_parameter(name).shape[0] for name in names]
    weight = join_parameters(gm, joined_name(names, ParameterNames(gm)), names)
    bias = ""
    if any(biases):
        parts = [
            str(node.target) if node else size for node, size in zip(biases, sizes, strict=True)
        ]
        bias = join_parameters(gm, weight.removesuffix("weight") + "bias", parts)
    return read_parameter(gm, before, weight), read_parameter(gm, before, bias) if bias else None


def _erase_unread(nodes: Iterable[Node | None]) -> None:
    """Erase the reads of parameters that are gone."""
    for node in nodes:
        if node is not None and not node.users:
            node.graph.erase_node(node)


def _let_views_copy(node: Node) -> None:
    """Turn `view` into `reshape` on everything that will alias a strided piece, which not every
    view can.
    """
    pending = [user for user in node.users if is_op(user, *_VIEWS)]
    while pending:
        user = pending.pop()
        if is_op(user, aten.view):
            user.target = aten.reshape.default
        pending.extend(user for user in user.users if is_op(user, *_VIEWS))
