"""Recognise sums of all tokens up to each, which linear attention without a decay is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, nodes_of, placeholders, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_RECURRENCE = torch.ops.onboard.torch_linear_recurrence.default


@register_transform("match_running_sum")
class MatchRunningSum(GraphTransform[TransformConfig]):
    """Replace cumsum(x [batch, sequence, ...], 1), and of x [batch, heads, sequence, ...] along its
    tokens, by `torch_linear_recurrence` with a decay of one, of numbers that are no integers.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such sum."""
        tokens = next((node for node in placeholders(gm) if node.target == "input_ids"), None)
        sums = [node for node in nodes_of(gm, aten.cumsum) if _is_of_text(node, tokens)]
        for node in sums:
            replace_with(node, _summed(gm, node))
        return len(sums)


def _is_of_text(node: fx.Node, tokens: fx.Node | None) -> bool:
    """Whether a sum is over the tokens of each text."""
    value, dim = node.meta["val"], _dim(node)
    if tokens is None or not value.is_floating_point() or dim not in (1, 2):
        return False
    batch, length = map(str, tokens.meta["val"].shape)
    others = [size for place, size in enumerate(value.shape) if place not in (0, dim)]
    if not all(isinstance(size, int) for size in others):
        return False
    return [str(value.shape[0]), str(value.shape[dim])] == [batch, length]


def _dim(node: fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return int(arguments(node)["dim"]) % rank


def _summed(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the sums, as the recurrence of [batch, sequence, channels]."""
    value, turned = node.meta["val"], _dim(node) == 2

    def made(target: Any, *args: Any) -> fx.Node:
        return call(gm, node, target, *args, like=node)

    x: Any = node.args[0]
    x = x if x.meta["val"].dtype == value.dtype else made(aten.to.dtype, x, value.dtype)
    x = made(aten.transpose.int, x, 1, 2) if turned else x
    sizes = [*value.shape]
    rest = [sizes[1], *sizes[3:]] if turned else sizes[2:]
    x = made(aten.flatten.using_ints, x, 2) if len(rest) > 1 else x
    x = x if rest else made(aten.unsqueeze.default, x, 2)
    x = made(_RECURRENCE, x, made(aten.ones_like.default, x))
    x = made(aten.unflatten.int, x, 2, rest) if len(rest) > 1 else x
    x = x if rest else made(aten.squeeze.dim, x, 2)
    return made(aten.transpose.int, x, 1, 2) if turned else x
