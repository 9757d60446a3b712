"""Weights of several attentions that are combined before they meet the values, as differential attention
has them (Ye et al. 2024, arXiv:2410.05258): a product is linear, so that the values may meet each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from onboard.codegen.cores.candidates import contracted
from onboard.codegen.cores.value_paths import name_of

_SUMS = frozenset(("add", "sub", "subtract"))
_FACTORS = frozenset(("mul", "rmul", "multiply"))
_CASTS = frozenset(("to", "float", "type", "type_as", "neg"))
_PRODUCTS = frozenset(("matmul", "bmm", "einsum"))
_Meet = Callable[[fx.Node], fx.Node]


def meet_apart(gm: fx.GraphModule, content: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Write `a v - c (b v)` for `(a - c b) v`, where a and b are weights [..., queries, keys] and c is a
    number or one for each head; return whether anything was.
    """
    changed = False
    for product in [node for node in gm.graph.nodes if name_of(node) in _PRODUCTS]:
        pair = contracted(product, content)
        for weights in () if pair is None else _combined(pair, content, values):
            with gm.graph.inserting_before(product):
                apart = _spread(gm.graph, weights, content, values, _meeting(gm, product, weights))
            product.replace_all_uses_with(apart)
            gm.graph.erase_node(product)
            changed = True
            break
    return changed


def _combined(
    pair: tuple[fx.Node, fx.Node], content: set[fx.Node], values: Mapping[fx.Node, Any]
) -> Iterator[fx.Node]:
    """Yield the side of a product, if any, that is a sum of weights, behind casts and factors."""
    for side in pair:
        node = side
        while (inner := _inside(node, content, values)) is not None:
            node = inner
        terms = _terms(node, content)
        square = {values[each].shape[-1] for each in terms if values[each].dim() > 1}
        if terms and len(square) == 1 and all(map(_is_normed, terms)):
            yield side


def _is_normed(node: fx.Node) -> bool:
    """Whether a term is made of a softmax by casts and factors."""
    todo, seen = [node], {node}
    while todo:
        each = todo.pop()
        if name_of(each) == "softmax":
            return True
        if name_of(each) in _CASTS | _FACTORS | _SUMS:
            todo += [item for item in each.all_input_nodes if item not in seen]
            seen.update(each.all_input_nodes)
    return False


def _terms(node: fx.Node, content: set[fx.Node]) -> list[fx.Node]:
    """Return the two tensors of tokens that a node adds up or subtracts; none of others."""
    if name_of(node) not in _SUMS or node.kwargs or len(node.args) != 2:
        return []
    return [each for each in node.args if isinstance(each, fx.Node) and each in content][:2]


def _inside(node: fx.Node, content: set[fx.Node], values: Mapping[fx.Node, Any]) -> fx.Node | None:
    """Return the tensor that a node casts, or multiplies with a number or one for each head."""
    if name_of(node) in _CASTS:
        first = node.args[0]
        return first if isinstance(first, fx.Node) and first in content else None
    if name_of(node) not in _FACTORS or len(node.args) != 2:
        return None
    wide = [each for each in node.args if isinstance(each, fx.Node) and each in content]
    others = [each for each in node.args if each not in wide]
    plain = len(wide) == 1 and all(_is_of_heads(each, values) for each in others)
    return wide[0] if plain else None


def _is_of_heads(factor: Any, values: Mapping[fx.Node, Any]) -> bool:
    value = values[factor] if isinstance(factor, fx.Node) else factor
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float)
    return value.numel() == 1 or (value.dim() > 2 and tuple(value.shape[-2:]) == (1, 1))


def _meeting(gm: fx.GraphModule, product: fx.Node, weights: fx.Node) -> _Meet:
    """Return what writes the product with other weights."""

    def meet(other: fx.Node) -> fx.Node:
        args = fx.node.map_arg(product.args, lambda each: other if each is weights else each)
        return gm.graph.create_node(product.op, product.target, args, dict(product.kwargs))

    return meet


def _spread(
    graph: fx.Graph,
    node: fx.Node,
    content: set[fx.Node],
    values: Mapping[fx.Node, Any],
    meet: _Meet,
) -> fx.Node:
    """Return the product of what a node combines, combined likewise."""
    parts = _terms(node, content)
    if len(parts) != 2:
        inner = _inside(node, content, values)
        parts = [] if inner is None else [inner]
    if not parts:
        return meet(node)
    made = {part: _spread(graph, part, content, values, meet) for part in parts}
    args = fx.node.map_arg(node.args, lambda each: made.get(each, each))
    return graph.create_node(node.op, node.target, args, dict(node.kwargs))
