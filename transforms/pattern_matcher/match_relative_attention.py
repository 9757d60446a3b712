"""Find attention whose bias is a number of the query's own for each distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION
from onboard.graph.pattern_matcher.masks import evaluate
from onboard.graph.pattern_matcher.patterns import CASTS, aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_SHORT = 24
_LARGEST_EXTENT = 2048


@register_transform("match_relative_attention")
class MatchRelativeAttention(GraphTransform[TransformConfig]):
    """A bias [batch, heads, queries, keys] that is gathered by distance has no paged form, but what
    it comes from has.

    Which places are gathered, and which are zero, is found by computing them.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each causal attention with such a bias and nothing that the relative one
        lacks.
        """
        matches = 0
        for node in nodes_of(gm, ATTENTION):
            found = arguments(node)
            if not _is_plain(found) or (numbers := _numbers(gm, node, found["attn_mask"])) is None:
                continue
            options = [found[name] for name in ("scale", "sinks", "sliding_window")]
            op = torch.ops.onboard.torch_relative_attention.default
            tensors = [found[name] for name in ("query", "key", "value")]
            replace_with(node, call(gm, node, op, *tensors, numbers, *options, like=node))
            matches += 1
        return matches


def _is_plain(found: dict[str, Any]) -> bool:
    lacking = (found["logit_cap"], found["alibi_slopes"], found["chunk_size"])
    return (
        found["is_causal"]
        and found["dropout_p"] == 0.0
        and found["layout"] == "bsnd"
        and lacking == (None,) * 3
    )


def _numbers(gm: fx.GraphModule, node: fx.Node, bias: Any) -> fx.Node | None:
    """Return what a bias is gathered from, [batch, queries, heads, extent], times what the bias is
    multiplied with.
    """
    factors: list[fx.Node] = []
    while isinstance(bias, fx.Node) and is_op(bias, *CASTS, aten.mul.Tensor):
        if is_op(bias, aten.mul.Tensor):
            bias, factor = bias.args[:2]
            if not (isinstance(factor, fx.Node) and _is_by_query(factor)):
                return None
            factors.append(factor)
        else:
            bias = bias.args[0]
    source = _source(gm, bias)
    if source is None:
        return None
    numbers, *turned = (
        call(gm, node, aten.transpose.int, each, 1, 2, like=node) for each in (source, *factors)
    )
    for factor in turned:
        numbers = call(gm, node, aten.mul.Tensor, numbers, factor, like=node)
    return call(
        gm, node, aten.to.dtype, numbers, arguments(node)["query"].meta["val"].dtype, like=node
    )


def _is_by_query(factor: fx.Node) -> bool:
    """Whether a factor is one number a query, [1, 1, queries, 1]."""
    val = factor.meta.get("val")
    return (
        isinstance(val, torch.Tensor)
        and val.dim() == 4
        and (*val.shape[:2], val.shape[3]) == (1, 1, 1)
    )


def _source(gm: fx.GraphModule, bias: Any) -> fx.Node | None:
    """Return x [batch, heads, queries, extent] of a bias `x.gather(-1, distance)` that is zero
    beyond the extent.
    """
    if (
        not is_op(bias, aten.masked_fill.Scalar)
        or bias.args[2] != 0
        or not is_op(bias.args[0], aten.gather)
    ):
        return None
    source, dim, index = bias.args[0].args[:3]
    extent = source.meta["val"].shape[-1]
    if dim not in (-1, 3) or not isinstance(extent, int) or extent > _LARGEST_EXTENT:
        return None
    lengths = (_SHORT, extent + 5)
    found: fx.Node = source
    return (
        found
        if all(_is_distance(gm, index, bias.args[1], extent, length) for length in lengths)
        else None
    )


def _is_distance(
    gm: fx.GraphModule, index: fx.Node, hidden: fx.Node, extent: int, length: int
) -> bool:
    at, beyond = evaluate(gm, index, length, {}), evaluate(gm, hidden, length, {})
    if at is None or beyond is None or at.shape[-2:] != (length, length):
        return False
    keys = torch.arange(length)
    distance = keys.unsqueeze(1) - keys
    outside = (distance < 0) | (distance >= extent)
    same_place = torch.equal(at.cpu(), torch.where(outside, at.cpu(), distance).expand_as(at))
    return same_place and torch.equal(beyond.cpu(), outside.expand_as(beyond))
