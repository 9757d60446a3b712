"""Recognise the token before each, written as a zero in front of the text without its last
token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ZEROS = (aten.new_zeros, aten.zeros, aten.zeros_like)
_OF_ZERO = (
    aten.to,
    aten._to_copy,
    aten.view,
    aten.reshape,
    aten.expand,
    aten.unsqueeze,
    aten.mul,
    aten.linear,
)
"""What makes zeros of zeros, whatever the other arguments are, except a linear's bias."""


@register_transform("match_token_shift")
class MatchTokenShift(GraphTransform[TransformConfig]):
    """Replace cat([zeros [batch, 1, channels], x[:, :-1]], dim=1) by `torch_token_shift`.

    Where both parts went through one linear with a bias, the linear of the shifted input is what
    they are together.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.cat):
            if (parts := _parts(node)) is not None and (
                new := _shift(gm, node, *parts)
            ) is not None:
                replace_with(node, new)
                matches += 1
        return matches


def _parts(cat: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the first row and x [batch, sequence, channels] where `cat` is that row and x without
    its last token.
    """
    found = arguments(cat)
    tensors = found["tensors"]
    if found["dim"] not in (1, -2) or len(tensors) != 2 or cat.meta["val"].dim() != 3:
        return None
    first, rest = tensors
    return (first, rest.args[0]) if first.meta["val"].shape[1] == 1 and _lacks_last(rest) else None


def _shift(gm: fx.GraphModule, cat: fx.Node, first: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return what `cat` is in terms of the token shift; None where its first row is no zero's."""
    if _is_zero(first):
        return call(gm, cat, torch.ops.onboard.torch_token_shift.default, source, like=cat)
    if not (is_op(first, aten.linear) and is_op(source, aten.linear)):
        return None
    before = source.args[0]
    if not _is_zero(first.args[0]) or not _same_layer(first, source):
        return None
    assert isinstance(before, fx.Node)
    shifted = call(gm, cat, torch.ops.onboard.torch_token_shift.default, before, like=before)
    return call(gm, cat, aten.linear.default, shifted, *source.args[1:], like=cat)


def _same_layer(first: fx.Node, second: fx.Node) -> bool:
    """Whether two linears read the same weight and bias."""
    ours, theirs = arguments(first), arguments(second)
    pairs = [(ours[key], theirs[key]) for key in ("weight", "bias")]
    return all(a is b or (a.op == b.op == "get_attr" and a.target == b.target) for a, b in pairs)


def _lacks_last(node: Any) -> bool:
    if not is_op(node, aten.slice):
        return False
    found = arguments(node)
    return (found["dim"], found["start"] or 0, found["end"], found["step"]) == (1, 0, -1, 1)


def _is_zero(node: Any) -> bool:
    if is_op(node, *_ZEROS):
        return True
    if is_op(node, aten.linear) and arguments(node)["bias"] is not None:
        return False
    return is_op(node, *_OF_ZERO) and _is_zero(node.args[0])
