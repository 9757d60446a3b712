"""Where a recorded forward may attend: two tensors of tokens are contracted, exponentials are taken,
and the result is contracted with a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from onboard.codegen.cores.value_paths import name_of, value_inputs

_PRODUCTS = frozenset(("matmul", "bmm", "mm"))
_EXPONENTIALS = frozenset(("softmax", "special_softmax", "exp", "exp2"))
_MOVES = frozenset(
    ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "expand")
    + ("expand_as", "repeat", "repeat_interleave", "unsqueeze", "squeeze", "clone", "swapaxes")
    + ("swapdims", "movedim", "moveaxis", "t", "broadcast_to", "index_select", "view_as", "detach")
    + ("to", "float", "double", "half", "bfloat16", "type_as", "type", "getitem", "reshape_as")
)
_TURNED = frozenset(("T", "mT"))
_FACTORS = frozenset(("mul", "rmul", "multiply", "div", "truediv", "divide", "true_divide"))


@dataclass(frozen=True)
class Candidate:
    """Two contractions with an exponential between them.

    `query` and `key` go into the first, `value` into the second; `result` is the first node behind
    it through which everything goes.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    scores: fx.Node
    result: fx.Node


def candidates(gm: fx.GraphModule, content: set[fx.Node]) -> Iterator[Candidate]:
    """Yield each, once, in the graph's order."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    seen = set()
    for node in order:
        if name_of(node) == "scaled_dot_product_attention":
            query, key, value = _arguments(node, "query", "key", "value")
            yield Candidate(query, key, value, node, node)
        if node in content and _takes_exponentials(gm, node):
            found = _around(node, order, content)
            if found is not None and found.scores not in seen:
                seen.add(found.scores)
                yield found


def contracted(node: fx.Node, content: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return the two tensors of tokens of whose product a node is the sum over an axis."""
    name = name_of(node)
    pair: list[Any] = []
    if name in _PRODUCTS:
        pair = list(node.args[:2])
    elif name == "baddbmm":
        pair = _arguments(node, "input", "batch1", "batch2")[1:]
    elif name == "einsum":
        rest = node.args[1:]
        pair = list(rest[0]) if rest and isinstance(rest[0], list | tuple) else list(rest)
    elif name == "sum" and isinstance(node.args[0], fx.Node):
        factors = node.args[0]
        pair = list(factors.args[:2]) if name_of(factors) in ("mul", "multiply") else []
    if len(pair) == 2 and all(isinstance(each, fx.Node) and each in content for each in pair):
        return pair[0], pair[1]
    return None


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    given = dict(zip(names, node.args, strict=False))
    return [given.get(name, node.kwargs.get(name)) for name in names]


def _takes_exponentials(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), nn.Softmax)
    return name_of(node) in _EXPONENTIALS


def _around(node: fx.Node, order: dict[fx.Node, int], content: set[fx.Node]) -> Candidate | None:
    scores = _contraction_before(node, order, content)
    if scores is None:
        return None
    below = {scores}
    for each in list(order)[order[scores] + 1 :]:
        if each in content and any(parent in below for parent in value_inputs(each)):
            below.add(each)
    pair = contracted(scores, content)
    for each in order:
        mixed = contracted(each, content) if order[each] > order[node] and each in below else None
        ours = [] if mixed is None else [one for one in mixed if one in below]
        if mixed is not None and pair is not None and len(ours) == 1:
            value = mixed[1] if mixed[0] is ours[0] else mixed[0]
            result = _through_which_all_goes(each, below, order)
            return None if result is None else Candidate(*pair, value, scores, result)
    return None


def _contraction_before(
    node: fx.Node, order: dict[fx.Node, int], content: set[fx.Node]
) -> fx.Node | None:
    """Return the last contraction whose result goes into `node`, not through another one."""
    found: set[fx.Node] = set()
    todo, seen = [node], {node}
    while todo:
        for parent in value_inputs(todo.pop()):
            if parent not in content or parent in seen:
                continue
            seen.add(parent)
            if contracted(parent, content) is not None:
                found.add(parent)
            else:
                todo.append(parent)
    return max(found, key=order.__getitem__, default=None)


def _through_which_all_goes(
    mixed: fx.Node, below: set[fx.Node], order: dict[fx.Node, int]
) -> fx.Node | None:
    """Return the first node, from `mixed` on, behind which nothing reads what comes before it, but
    for weights that the forward returns.
    """
    reach = 0
    for node in sorted(below, key=order.__getitem__):
        if node is not mixed and order[node] < order[mixed]:
            reach = max([reach, *(order[user] for user in node.users if user in below)])
        elif reach <= order[node]:
            return node
        else:
            reach = max([reach, *(order[user] for user in node.users if user in below)])
    return None


def sources(node: fx.Node, content: set[fx.Node], values: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return `node` and the tensors before it which hold the same numbers, up to a constant factor,
    in another order or fewer times.
    """
    found = [node]
    while (parent := _source(found[-1], content, values)) is not None:
        found.append(parent)
    return found


def _source(node: fx.Node, content: set[fx.Node], values: dict[fx.Node, Any]) -> fx.Node | None:
    name = name_of(node)
    if name in _MOVES or (name == "getattr" and node.args[1] in _TURNED):
        parent = node.args[0]
    elif name in _FACTORS:
        parent = _without_factor(node, values)
    else:
        return None
    if not isinstance(parent, fx.Node) or parent not in content:
        return None
    if any(each in content for each in value_inputs(node) if each is not parent):
        return None
    value, moved = values[parent], values[node]
    same = isinstance(value, torch.Tensor) and moved.numel() >= value.numel()
    return parent if same and value.is_floating_point() else None


def _without_factor(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the tensor that a node multiplies or divides by a number."""
    tensor, factor = node.args[:2]
    if isinstance(factor, fx.Node) and name_of(node) in ("mul", "multiply"):
        number = values[tensor] if isinstance(tensor, fx.Node) else tensor
        if isinstance(number, int | float):
            tensor, factor = factor, tensor
    number = values[factor] if isinstance(factor, fx.Node) else factor
    return tensor if isinstance(number, int | float) else None


def is_move(node: fx.Node) -> bool:
    """Whether a node only puts its first argument's numbers elsewhere."""
    return name_of(node) in _MOVES
